#!/usr/bin/env bash
# Start a run in four processes on this machine, with two virtual CPU devices each.
#
#   scripts/local.sh [FILE... section.key=value...]     (default: quickstart)
set -euo pipefail
[ $# -gt 0 ] || set -- quickstart
exec maxpipe launch local --processes 4 "$@"
