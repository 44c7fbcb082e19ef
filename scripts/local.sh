#!/usr/bin/env bash
# A run in four processes on this machine, with two virtual CPU devices each.
#
#   scripts/local.sh [FILE... section.key=value...]     by default quickstart
set -euo pipefail
[ $# -gt 0 ] || set -- quickstart
exec maxpipe launch local --processes 4 "$@"
