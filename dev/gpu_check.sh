#!/usr/bin/env bash
# Everything that only a GPU can tell, in under 8 minutes on an NVIDIA H200: CUDA tests, the ladder on ViT-H/16 with
# memory by optimisation (and ViT-L and ViT-B shortened), sharding by torch and FairScale with one rank, other libraries
# side by side, padded tokens (printed). At most 8 JSON and PNG files go to $OUT.
#     OUT=results dev/gpu_check.sh [--device cuda|cpu] [--tiny]
# LIMIT (470) is how many seconds it may take: the last part is cut short. --device cpu --tiny is a dry run of the script
# itself: small models, few steps. The packages are those of the current interpreter (PYTHON); nothing is installed.
# Missing pure-Python packages (fvcore, iopath, yacs, fairscale, ...) can be put on PYTHONPATH.
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
limit="${LIMIT:-470}" failed=0

step() {
    # $1: name; $2: seconds at most; then the command. A part that fails is told at the end and keeps no other from
    # running; neither does one that is `optional` and had too little time.
    local name="$1" seconds="$2" left=$((limit - SECONDS)) status=0
    shift 2
    if [ "$left" -lt "$seconds" ]; then seconds="$left"; fi
    echo "== $name (at $SECONDS s, at most $seconds s)"
    if [ "$seconds" -lt 10 ]; then status=124; else timeout "$seconds" "$@" || status=$?; fi
    if [ "$status" = 124 ] && [ -n "${optional:-}" ]; then
        echo "gpu_check: $name: the time is up; what was measured is kept"
    elif [ "$status" != 0 ]; then
        echo "gpu_check: FAILED ($status): $name: $*" >&2
        failed=1
    fi
}

ladder() {
    # $1: name of the result; $2: seconds at most; then arguments of the ladder. Rows that are there are not repeated.
    local name="$1" seconds="$2"
    shift 2
    step "ladder $name" "$seconds" "$python" tools/ladder.py --out "$work/$name" --device "$device" --rounds 1 "$@"
    for kind in ${kinds:-json png}; do
        if [ -f "$work/$name/ladder.$kind" ]; then cp "$work/$name/ladder.$kind" "$out/ladder_$name.$kind"; fi
    done
}

peers() {
    # $1: seconds at most; then arguments of bench_peers.
    local seconds="$1"
    shift
    step "other libraries" "$seconds" "$python" dev/bench_peers.py --modes bf16 --device "$device" --out "$work/peers" "$@"
}

if [ -n "$tiny" ]; then
    small="VIT.NUM_LAYERS 2 VIT.HIDDEN_DIM 64 VIT.MLP_DIM 128 VIT.NUM_HEADS 4 PREC_TIME.NUM_ITER 1 PREC_TIME.WARMUP_ITER 0"
    # shellcheck disable=SC2086
    ladder H16 90 --cfg configs/vit/ViT-H16_baseline_224.yaml --steps baseline sdpa fp16 --batch 2 --larger-batch 2 \
        --passes 2 $small
    # shellcheck disable=SC2086
    kinds=json ladder sharding 90 --cfg configs/vit/ViT-B16_baseline_224.yaml --steps baseline mta fairscale --group \
        --batch 2 --larger-batch 2 $small
    peers 120 --shapes tiny --batch 2 --rounds 1 --steps 1
    step "token counts" 60 "$python" dev/bench_tokens.py --device "$device" --shape tiny --batch 2 --rounds 1
else
    few="PREC_TIME.WARMUP_ITER 1 PREC_TIME.NUM_ITER 4"
    # Batch 560 of a ViT-H takes 135 GiB of activations at best: in 4 passes every row fits into 139 GiB.
    h16="--cfg configs/vit/ViT-H16_baseline_224.yaml --batch 64 --larger-batch 560"
    # The most telling first; the rest of the ladder gets the time that is left.
    # shellcheck disable=SC2086
    ladder H16 120 $h16 --steps baseline everything --passes 4 $few
    peers 150 --shapes B16 L16 --compiled --together --batch 96 --rounds 3 --steps 5 \
        --only ours "ours, full bf16" timm torchvision transformers
    step "CUDA tests" 90 "$python" -m pytest -q -m cuda tests/core/test_cuda.py
    # shellcheck disable=SC2086
    kinds=json ladder sharding 75 --cfg configs/vit/ViT-L16_baseline_224.yaml --steps baseline mta fairscale --group \
        --batch 64 --larger-batch 64 $few
    # shellcheck disable=SC2086
    ladder L16 75 --cfg configs/vit/ViT-L16_baseline_224.yaml --steps baseline everything --batch 128 --larger-batch 256 $few
    # shellcheck disable=SC2086
    ladder B16 75 --cfg configs/vit/ViT-B16_baseline_224.yaml --steps baseline everything --batch 256 --larger-batch 512 $few
    optional=1 step "token counts" 30 "$python" dev/bench_tokens.py --device "$device" --shape L16 --layers 4 --batch 128
    # shellcheck disable=SC2086
    optional=1 ladder H16 300 $h16 --steps baseline mta pooled batch_second larger_batch px256 fp16 sdpa bf16 fused compile \
        everything everything_batch_first baseline_px256 --passes 4 $few
fi
if [ -f "$work/peers/peers.json" ]; then cp "$work/peers/peers.json" "$out/peers.json"; fi
echo "gpu_check: results in $out: $(ls "$out" | tr '\n' ' ')"
exit "$failed"
