#!/bin/sh
# Checks and times every CUDA path, in at most 8 minutes. Without a CUDA device, or with DEVICE=cpu, the same checks run on
# the CPU, so that the script itself is tested. Prints one JSON line per check and a summary; exits with 1 when one fails.
# usage: tests/gpu/run.sh [folder for gpu.json] [check to skip ...]
set -eu
cd "$(dirname "$0")/../.."
PYTHON="${PYTHON:-.venv/bin/python}"
[ -x "$PYTHON" ] || PYTHON=python3
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec timeout 480 "$PYTHON" tests/gpu/checks.py "$@"
