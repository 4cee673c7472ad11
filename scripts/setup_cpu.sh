#!/usr/bin/env bash
# Makes a Python environment in which the whole project runs on a machine without a GPU.
# Usage: scripts/setup_cpu.sh [--test] [VENV_DIR]
#   --test     also install what the tests and linters need
#   VENV_DIR   the environment's folder (default: $VENV_DIR, else .venv in the project)
#   PYTHON     environment variable: the Python to make it with (default: the first that fits)
# Quick when nothing changed since the last time.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

say() { printf '[setup] %s\n' "$*" >&2; }
die() { printf '[setup] error: %s\n' "$*" >&2; exit 1; }

with_tests=
venv=${VENV_DIR:-}
for word in "$@"; do
  case $word in
    --test) with_tests=yes ;;
    -h | --help) sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    -*) die "unknown option $word (see --help)" ;;
    *) venv=$word ;;
  esac
done
venv=${venv:-$root/.venv}

[[ $(uname -s) == Linux && $(uname -m) == x86_64 ]] ||
  die "the pinned packages are for x86-64 Linux; this is $(uname -s) on $(uname -m)"

# Prints "X.Y" if the command runs and is a Python; a version manager's shim may exist and fail.
version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

find_python() {
  local candidate version seen=
  for candidate in ${PYTHON:-python3.12 python3.11 python3}; do
    version=$(version_of "$candidate") || continue
    case $version in
      3.11 | 3.12) printf '%s\n' "$candidate"; return ;;
    esac
    seen="$seen $candidate is $version;"
  done
  die "Python 3.11 or 3.12 is needed, because sglang 0.5.23 has wheels for no other;" \
    "found:${seen:- no python at all;} set PYTHON to one that fits"
}

# One word that changes whenever this script would install something else.
fingerprint() {
  { cat "$@"; printf '%s\n' "$venv" "$root"; } | sha256sum | cut -d' ' -f1
}

fresh() { [[ -x $venv/bin/python && -f $1 && $(<"$1") == "$2" ]]; }

# Installs into the environment with uv where it is there, else with the environment's own pip.
install() {
  if [[ -n $uv ]]; then
    uv pip install --quiet --python "$venv/bin/python" "$@"
  else
    # Bytecode is made of what is imported, as uv does it; of everything, it takes a minute.
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input --no-compile "$@"
  fi
}

make_environment() {
  local python
  if [[ ! -x $venv/bin/python ]]; then
    python=$(find_python)
    say "making $venv with $python ($(version_of "$python"))"
    if [[ -n $uv ]]; then
      uv venv --quiet --python "$(command -v "$python")" "$venv"
    else
      "$python" -m venv "$venv" ||
        die "$python cannot make a virtual environment; on Debian or Ubuntu: apt-get install python3-venv"
    fi
  fi
  case $(version_of "$venv/bin/python" || true) in
    3.11 | 3.12) ;;
    *) die "$venv is not an environment of Python 3.11 or 3.12; remove it or choose another folder" ;;
  esac
}

install_project() {
  local lock=$root/requirements/cpu.lock
  # torch first and with its own dependencies: the index may give a CUDA build, which cannot be
  # imported without its CUDA libraries, or a CPU build, which has none.
  say "installing torch (the largest part)"
  install --constraint "$lock" "$(grep '^torch==' "$lock")"
  say "installing SGLang, Ray, Megatron-core, NIXL and the rest of requirements/cpu.lock"
  install --no-deps --requirement "$lock"
  say "installing the project"
  install --no-deps --no-build-isolation --editable "$root"
  (cd / && "$venv/bin/python" -m sglang_rdt.cpu install) >&2
}

uv=$(command -v uv || true)
[[ $venv == /* ]] || venv=$PWD/$venv
cd "$root"

stamp=$venv/.sglang-rdt-cpu
print=$(fingerprint requirements/cpu.lock setup.py pyproject.toml scripts/setup_cpu.sh)
if ! fresh "$stamp" "$print" || ! compgen -G "$venv/lib/python3*/site-packages/sglang_rdt_cpu.pth" >/dev/null; then
  make_environment
  rm -f "$stamp"
  install_project
  printf '%s\n' "$print" >"$stamp"
fi

if [[ -n $with_tests ]]; then
  stamp=$venv/.sglang-rdt-test
  print=$(fingerprint requirements/test.lock)
  if ! fresh "$stamp" "$print"; then
    say "installing requirements/test.lock"
    rm -f "$stamp"
    install --no-deps --requirement "$root/requirements/test.lock"
    printf '%s\n' "$print" >"$stamp"
  fi
fi
say "ready: $venv"
