#!/usr/bin/env bash
# Sets up and runs the tests, two files at a time; arguments go to pytest, e.g. ./dev/test.sh tests/models -k vit
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source dev/setup_env.sh test
# One thread per process, since processes run side by side.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# A worker that dies isn't replaced: pytest-xdist would hand its file to the next one and then wait forever.
exec "$PYTHON" -m pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart=0 "$@"
