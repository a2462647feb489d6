#!/usr/bin/env bash
# From a bare clone to a trained Vision Transformer: sets up, trains on scanned digits on the CPU, tests the result.
#     ./dev/quickstart.sh [--fresh]
# A second run goes on where the first one stopped, or finds it finished; --fresh starts anew.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=output/quickstart
config=configs/quickstart/vit_digits.yaml
case "${1:-}" in
    "") ;;
    --fresh) rm -rf "$out" ;;
    *) echo "quickstart: unknown argument '$1'; allowed: --fresh" >&2; exit 2 ;;
esac

source dev/setup_env.sh digits

echo "quickstart: training $config (the log is in $out/stdout.log)"
"$PYTHON" tools/run_net.py --mode train --cfg "$config" OUT_DIR "$out" DEVICE cpu LOG_DEST file
echo "quickstart: testing $out/model.pyth"
"$PYTHON" tools/run_net.py --mode test --cfg "$config" OUT_DIR "$out/test" TEST.WEIGHTS "$out/model.pyth" DEVICE cpu LOG_DEST file
"$PYTHON" dev/quickstart_summary.py "$out"
