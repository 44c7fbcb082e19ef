#!/usr/bin/env bash
# A run of two processes on this machine, with 4 virtual devices each: what several hosts do.
#
#   scripts/two_processes.sh [FILE... section.key=value...]     by default configs/quickstart.yml
set -euo pipefail

coordinator=127.0.0.1:${PORT:-12355}
[ $# -gt 0 ] || set -- configs/quickstart.yml

processes=()
for id in 0 1; do
  maxpipe train "$@" mesh.cpu_devices=4 \
    runtime.num_processes=2 runtime.process_id=$id "runtime.coordinator=$coordinator" &
  processes+=($!)
done
status=0
for process in "${processes[@]}"; do
  wait "$process" || status=$?
done
exit $status
