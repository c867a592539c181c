#!/bin/sh
# Checks and times every CUDA path, in at most 8 minutes. Without a CUDA device the same checks run on the CPU, so that
# the script itself is tested. Prints one JSON line per check; exits with 1 when one fails.
# usage: tests/gpu/run.sh [folder for the results]
set -eu
cd "$(dirname "$0")/../.."
PYTHON="${PYTHON:-.venv/bin/python}"
[ -x "$PYTHON" ] || PYTHON=python3
exec timeout 480 "$PYTHON" tests/gpu/checks.py "${1:-}"
