#!/usr/bin/env bash
# Checks the code with ruff (settings in pyproject.toml).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source dev/setup_env.sh test
exec "$PYTHON" -m ruff check .
