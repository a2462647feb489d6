#!/usr/bin/env python3
"""How long counting a model takes: median microseconds for a few published configs."""

import os
import statistics
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

from pycls.core import builders, config, net

CONFIGS = (
    "dds_baselines/regnetx/RegNetX-400MF_dds_8gpu.yaml",
    "dds_baselines/regnety/RegNetY-4.0GF_dds_8gpu.yaml",
    "dds_baselines/effnet/EN-B0_dds_8gpu.yaml",
    "vitconv_baselines/vit/ViT-C-4.0GF_adamw_8gpus.yaml",
)


def main(repeats: int = 500) -> None:
    for name in CONFIGS:
        config.reset_cfg()
        config.load_cfg(os.path.join(ROOT, "configs", name))
        model, times = builders.get_model(), []
        for _ in range(repeats):
            start = time.perf_counter()
            net.complexity(model)
            times.append(time.perf_counter() - start)
        print(f"{os.path.basename(name):40s} {1e6 * statistics.median(times):8.1f} us")


if __name__ == "__main__":
    main()
