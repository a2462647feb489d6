#!/usr/bin/env python3
"""Test error on the digits in every precision mode, over three seeds: the table in docs/PRECISION.md.

    dev/precision_table.py [--device cpu] [--seeds 1 2 3] [--out output/precision] [--write docs/PRECISION.md]

Each run is a fresh process; finished ones are not repeated.
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

import torch

from pycls.core.logging import git_commit, load_log_data

CONFIG = os.path.join(ROOT, "configs", "quickstart", "vit_digits.yaml")
MODES = ("fp32", "tf32", "amp_fp16", "amp_bf16", "fp16", "bf16")
HEAD = """# Accuracy in every precision mode

Top-1 test error (%) of `configs/quickstart/vit_digits.yaml` after the last epoch, over seeds {seeds}.
Measured on {device} with torch {torch}, commit {commit}. tf32 differs from fp32 on NVIDIA GPUs only.

| PRECISION.MODE | model: mean (each seed) | EMA: mean (each seed) | difference from fp32 | skipped steps |
| --- | --- | --- | ---: | ---: |
"""


def run(mode: str, seed: int, out: str, device: str) -> dict:
    """Trains one run, unless it is there, and returns its last errors and number of skipped steps."""
    folder = os.path.join(out, f"{mode}_{seed}")
    command = [sys.executable, os.path.join(ROOT, "tools", "run_net.py"), "--mode", "train", "--cfg", CONFIG]
    command += ["OUT_DIR", folder, "PRECISION.MODE", mode, "RNG_SEED", str(seed), "DEVICE", device, "LOG_DEST", "file"]
    subprocess.run(command, check=True)
    data = load_log_data(os.path.join(folder, "stdout.log"))
    errors = {kind: data[kind]["top1_err"][-1] for kind in ("test_epoch", "test_ema_epoch")}
    return {**errors, "skipped": data["train_iter"].get("skipped", [0])[-1] or 0}


def row(mode: str, runs: list, exact: list) -> str:
    """One line of the table."""

    def cell(kind):
        values = [r[kind] for r in runs]
        return f"{statistics.mean(values):.2f} ({', '.join(f'{v:.2f}' for v in values)})"

    means = [statistics.mean(r["test_epoch"] for r in rs) for rs in (runs, exact)]
    skipped = sum(r["skipped"] for r in runs)
    return f"| {mode} | {cell('test_epoch')} | {cell('test_ema_epoch')} | {means[0] - means[1]:+.2f} | {skipped} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--out", default=os.path.join("output", "precision"))
    parser.add_argument("--write", metavar="FILE", help="write the table here instead of printing it")
    args = parser.parse_args()
    args.modes = [mode for mode in MODES if mode in args.modes or mode == "fp32"]  # Differences are from fp32.
    results = {mode: [run(mode, seed, args.out, args.device) for seed in args.seeds] for mode in args.modes}
    device = (
        torch.cuda.get_device_name() if args.device == "cuda" else f"a {os.cpu_count()}-core {platform.machine()} CPU"
    )
    text = HEAD.format(
        seeds=", ".join(map(str, args.seeds)), device=device, torch=torch.__version__, commit=git_commit()
    )
    text += "\n".join(row(mode, runs, results["fp32"]) for mode, runs in results.items())
    left_out = ", ".join(mode for mode in MODES if mode not in args.modes)
    text += f"\n\nMade by `dev/precision_table.py --device {args.device} --modes {' '.join(args.modes)}`."
    text += f" Not measured here: {left_out}.\n" if left_out else "\n"
    if args.write:
        with open(args.write, "w", encoding="utf-8") as f:
            f.write(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
