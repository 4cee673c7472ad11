#!/usr/bin/env bash
# Lints, type-checks and tests the project in a CPU environment, which it sets up if need be.
# Usage: scripts/test.sh [arguments of pytest]
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${VENV_DIR:-$root/.venv}
[[ $venv == /* ]] || venv=$PWD/$venv

"$root/scripts/setup_cpu.sh" --test "$venv"
cd "$root"
# A Ray cluster of somebody else on this machine must not get the tests' actors.
unset RAY_ADDRESS
# What the tests start by name must come from the environment.
export PATH=$venv/bin:$PATH

printf '[test] ruff\n' >&2
ruff check .
printf '[test] mypy\n' >&2
mypy
printf '[test] pytest\n' >&2
if (($#)); then
    exec python -m pytest "$@"
fi
# Much of the same in other shapes is left out: `scripts/test.sh -m long`.
python -m pytest -m 'not long' -n auto --dist loadfile tests/pure tests/cpu tests/patchset tests/families
# What starts engines has the machine to itself.
python -m pytest -m 'not faults and not long' tests/cluster tests/e2e tests/gpu
# Tests that kill processes have a cluster of their own.
exec python -m pytest -m 'faults and not long'
