#!/usr/bin/env bash
# Sets up and runs the tests; arguments go to pytest, e.g. ./dev/test.sh tests/models -k vit
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source dev/setup_env.sh test
exec "$PYTHON" -m pytest "$@"
