#!/usr/bin/env bash
# Set up everything and check it: lint, types, tests. Usage: bash tools/test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/setup.sh
setup_venv dev
export PATH=$VENV/bin:$PATH
ruff check .
mypy
# Two processes of one thread each: threads of several processes on the same cores would wait for each other.
export OMP_NUM_THREADS=1
python -m pytest --numprocesses 2 --dist worksteal "$@"
