#!/usr/bin/env python3
"""Measure the ladder from PyCls's baseline to everything: ladder.py --cfg VIT.yaml --out DIR [KEY VALUE ...]."""

import argparse
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from pycls.core import config, ladder
from pycls.core.cli import Parser, guarded
from pycls.core.errors import FaultError, UserError, nearest

_EPILOG = """example:
  ladder.py --cfg configs/vit/ViT-S16_baseline_224.yaml --out output/ladder --device cpu --batch 16 --larger-batch 32 \\
      --rounds 2 PREC_TIME.NUM_ITER 3

The same command again measures only what is missing.
"""


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = Parser(
        description="Measure what each optimisation brings, one at a time.", epilog=_EPILOG, formatter_class=formatter
    )
    parser.add_argument("--cfg", required=True, help="a ViT config, e.g. configs/vit/ViT-S16_baseline_224.yaml")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for results")
    parser.add_argument("--steps", nargs="+", metavar="ROW", help="rows to measure (default: all)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds over all rows (default: 3)")
    parser.add_argument("--batch", type=int, default=64, help="batch per process of the baseline (default: 64)")
    parser.add_argument(
        "--larger-batch", type=int, default=128, help="batch per process of 'larger batch' (default: 128)"
    )
    parser.add_argument("--passes", type=int, default=1, help="accumulated passes of 'larger batch' and the rows above "
                        "it (default: 1, and twice as many while memory runs out)")  # fmt: skip
    parser.add_argument("--processes", type=int, default=1, help="number of processes (default: 1)")
    parser.add_argument("--group", action="store_true", help="let one process be a group, so that DDP and FSDP work")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is one")
    parser.add_argument("opts", nargs=argparse.REMAINDER, metavar="KEY VALUE", help="config overrides for every row")
    args = parser.parse_args()
    names = [row.name for row in ladder.rows("cpu", 1)]
    # --steps takes all words up to the next flag, those of the config too.
    keys = [i for i, step in enumerate(args.steps or ()) if "." in step]
    if keys:
        args.steps, args.opts = args.steps[: keys[0]], args.steps[keys[0] :] + args.opts
    check(args, names)
    total = str(args.batch * args.processes)
    extra = [*args.opts, "TRAIN.BATCH_SIZE", total, "TEST.BATCH_SIZE", total, "VERBOSE", "False"]
    table = ladder.rows(args.device, args.larger_batch * args.processes, args.passes)
    entries = ladder.run(
        args.cfg, args.out, table, args.steps, args.rounds, args.device, args.processes, extra, args.group
    )
    print(ladder.markdown(entries, f"Ladder, in full in {args.out}"))
    failed = [entry["name"] for entry in entries if entry.get("failed")]
    if failed:
        raise FaultError(f"not measured, see above why: {', '.join(failed)}; the same command tries them again")


def check(args, names) -> None:
    """Completes the arguments; raises UserError for what can't be measured, and makes the folder for the rest."""
    import torch

    for name in ("rounds", "batch", "larger_batch", "processes", "passes"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')}: {getattr(args, name)} is too small, at least 1")
    for step in args.steps or ():
        if step not in names:
            raise UserError(f"--steps: unknown row {step!r}{nearest(step, names)}; known: {', '.join(names)}")
    if args.group and args.processes > 1:
        raise UserError(f"--group: {args.processes} processes are a group anyway; leave it out")
    gpu = torch.cuda.is_available()
    args.device = args.device or ("cuda" if gpu else "cpu")
    if args.device == "cuda" and not gpu:
        raise UserError("--device: cuda, but PyTorch finds no GPU here; use --device cpu")
    with config.temporary_cfg() as cfg:
        config.load_cfg(args.cfg)
        cfg.merge_from_list(args.opts)
        if cfg.MODEL.TYPE != "vit":
            raise UserError(f"--cfg {args.cfg}: MODEL.TYPE is {cfg.MODEL.TYPE!r}, but the ladder is one of ViTs")
    try:
        os.makedirs(args.out, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {args.out}: can't be a folder: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(guarded(main))
