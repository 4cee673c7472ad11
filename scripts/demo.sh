#!/usr/bin/env bash
# Sets a CPU environment up where there is none yet, and runs the demo in it.
# Usage: scripts/demo.sh [arguments of "sglang-rdt demo"]
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${VENV_DIR:-$root/.venv}
[[ $venv == /* ]] || venv=$PWD/$venv

"$root/scripts/setup_cpu.sh" "$venv"
exec "$venv/bin/sglang-rdt" demo "$@"
