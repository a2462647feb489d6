#!/usr/bin/env bash
# Everything that only a GPU can tell, in under 8 minutes on an NVIDIA H200: CUDA tests, the ladder on ViT-H/16 with
# memory by optimisation (and ViT-L and ViT-B shortened), sharding by torch and FairScale with one rank, other libraries
# side by side. At most 8 JSON and PNG files go to $OUT.
#     OUT=results dev/gpu_check.sh [--device cuda|cpu] [--tiny]
# --device cpu --tiny is a dry run of the script itself: small models, few steps. The packages are those of the current
# interpreter (PYTHON); nothing is installed. Missing pure-Python packages can be put on PYTHONPATH.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
device=cuda tiny=
while [ $# -gt 0 ]; do
    case "$1" in
        --device) device="${2:?--device needs cuda or cpu}"; shift 2 ;;
        --tiny) tiny=1; shift ;;
        *) echo "gpu_check: unknown argument '$1'; allowed: --device cuda|cpu, --tiny" >&2; exit 2 ;;
    esac
done
python="${PYTHON:-python3}"
out="${OUT:-output/gpu_check}"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"
failed=0

step() {
    # A part that fails is told at the end and does not keep the others from running.
    echo "== $1"; shift
    if ! timeout "$@"; then echo "gpu_check: FAILED: $*" >&2; failed=1; fi
}

ladder() {
    # $1: name of the result; then arguments of the ladder.
    local name="$1"; shift
    step "ladder $name" 220 "$python" tools/ladder.py --out "$work/$name" --device "$device" "$@"
    for kind in ${kinds:-json png}; do
        if [ -f "$work/$name/ladder.$kind" ]; then cp "$work/$name/ladder.$kind" "$out/ladder_$name.$kind"; fi
    done
}

if [ -n "$tiny" ]; then
    small="VIT.NUM_LAYERS 2 VIT.HIDDEN_DIM 64 VIT.MLP_DIM 128 VIT.NUM_HEADS 4 PREC_TIME.NUM_ITER 1 PREC_TIME.WARMUP_ITER 0"
    # shellcheck disable=SC2086
    ladder H16 --cfg configs/vit/ViT-H16_baseline_224.yaml --steps baseline sdpa fp16 --rounds 1 --batch 2 --larger-batch 2 $small
    # shellcheck disable=SC2086
    kinds=json ladder sharding --cfg configs/vit/ViT-B16_baseline_224.yaml --steps baseline fsdp fairscale --rounds 1 --group \
        --batch 2 --larger-batch 2 $small
    step "other libraries" 120 "$python" dev/bench_peers.py --shapes tiny --modes bf16 --batch 2 --rounds 1 --steps 1 --device "$device" --out "$work/peers"
else
    step "CUDA tests" 90 "$python" -m pytest -q -m cuda tests/core/test_cuda.py
    ladder H16 --cfg configs/vit/ViT-H16_baseline_224.yaml \
        --steps baseline mta pooled batch_second sdpa bf16 fused compile everything \
        --rounds 1 --batch 64 --larger-batch 560 PREC_TIME.NUM_ITER 8
    ladder L16 --cfg configs/vit/ViT-L16_baseline_224.yaml --steps baseline fused everything \
        --rounds 1 --batch 256 --larger-batch 512 PREC_TIME.NUM_ITER 10
    ladder B16 --cfg configs/vit/ViT-B16_baseline_224.yaml --steps baseline fused everything \
        --rounds 1 --batch 512 --larger-batch 1024 PREC_TIME.NUM_ITER 10
    kinds=json ladder sharding --cfg configs/vit/ViT-L16_optimised_224.yaml --steps baseline fsdp fairscale --rounds 1 --group \
        --batch 64 --larger-batch 64 PREC_TIME.NUM_ITER 6
    step "other libraries" 120 "$python" dev/bench_peers.py --shapes B16 L16 --modes bf16 --compiled --batch 256 --rounds 2 \
        --steps 5 --only ours timm torchvision transformers --device "$device" --out "$work/peers"
fi
if [ -f "$work/peers/peers.json" ]; then cp "$work/peers/peers.json" "$out/peers.json"; fi
echo "gpu_check: results in $out: $(ls "$out" | tr '\n' ' ')"
exit "$failed"
