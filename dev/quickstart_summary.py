#!/usr/bin/env python3
"""The last lines of quickstart.sh: what came out of a run. quickstart_summary.py OUT_DIR."""

import os
import statistics
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from pycls.core.logging import load_log_data


def main(out_dir: str) -> None:
    train = load_log_data(os.path.join(out_dir, "stdout.log"))["train_epoch"]
    test = {
        name: values[-1]
        for name, values in load_log_data(os.path.join(out_dir, "test", "stdout.log"))["test_epoch"].items()
    }
    speed, seconds = statistics.median(train["images_per_second"]), sum(train["time_epoch"])
    print(f"""
  test error   {test["top1_err"]:.2f}% top-1 on {test["samples"]} held-out digits
  training     {seconds:.0f} s, {speed:.0f} images/s (median of {len(train["epoch"])} epochs)
  checkpoint   {out_dir}/model.pyth
  curves       {out_dir}/curves.png
""")


if __name__ == "__main__":
    main(sys.argv[1])
