#!/usr/bin/env bash
# Builds .venv for `make demo` and `make test`: torch first (a CPU build where there is no GPU), then the rest.
#   PYTHON=python3.11      the interpreter
#   TORCH=torch==2.13.0    the requirement given to pip
#   PIP_ARGS=...           e.g. --index-url of CPU builds of torch, for torch alone
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
python=${PYTHON:-python3}
torch=${TORCH:-torch==2.13.0}
start=$(date +%s)

"$python" - <<'P' || { echo "error: PYTHON=$python is not Python 3.11, 3.12 or 3.13; pick one of them (PYTHON=python3.11 make ...)" >&2; exit 2; }
import sys
sys.exit(not ((3, 11) <= sys.version_info[:2] < (3, 14)))
P
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
  if ! command -v nvidia-smi >/dev/null 2>&1; then
    # without a GPU a CUDA build would be gigabytes for nothing: ask pip what it would take, before it does
    plan=$(mktemp)
    pip install --quiet --dry-run --report "$plan" ${PIP_ARGS:-} "$torch"
    if grep -q '"name": "nvidia-' "$plan"; then
      rm -f "$plan"
      echo "error: pip would install a CUDA build of torch, and this machine has no GPU." >&2
      echo "    try: PIP_ARGS='--index-url URL_OF_CPU_BUILDS' make demo   (or TORCH=/path/to/torch-2.13.0+cpu.whl)" >&2
      exit 2
    fi
    rm -f "$plan"
  fi
  echo "set-up: torch"
  pip install --quiet ${PIP_ARGS:-} "$torch"
fi
echo "set-up: packages"
pip install --quiet -r requirements/cpu.txt
pip install --quiet --no-deps -r requirements/no-deps.txt
pip install --quiet --no-deps --no-build-isolation -e . 2>/dev/null || pip install --quiet --no-deps -e .
seconds=$(($(date +%s) - start))
echo "$seconds" > "$venv/setup_seconds"
echo "set-up: done in $seconds s"
