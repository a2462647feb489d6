#!/usr/bin/env python3
"""What a training picture costs on one CPU core, as floats (PyCls's pixels) and as bytes (DATA_LOADER.PIXELS uint8).

Makes JPEG files of ImageNet's usual size, prepares each by both ways in turns, and prints medians of CPU time and their
ratio: bench_pixels.py [--pictures N] [--rounds N].
"""

import argparse
import os
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import cv2
import numpy as np

from pycls.core.config import cfg
from pycls.datasets.imagefolder import ImageFolder


def make_pictures(folder: str, count: int) -> None:
    """Writes `count` JPEG files of 500 x 400 pixels with smooth content."""
    os.makedirs(os.path.join(folder, "train", "a"))
    rng = np.random.default_rng(0)
    for i in range(count):
        coarse = rng.integers(0, 255, (20, 25, 3), dtype=np.uint8)
        picture = cv2.resize(coarse, (500, 400), interpolation=cv2.INTER_CUBIC)
        cv2.imwrite(os.path.join(folder, "train", "a", f"{i}.jpg"), picture)


def milliseconds(data, rounds: int, count: int):
    """Median CPU milliseconds per picture of each data set, taken in turns."""
    seconds = {name: [] for name in data}
    for turn in range(rounds):
        for name, dataset in data.items():
            start = time.process_time()
            for i in range(count):
                dataset[i, (turn, i)]
            seconds[name].append(time.process_time() - start)
    return {name: 1e3 * float(np.median(values)) / count for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pictures", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    cv2.setNumThreads(0)
    cfg.TRAIN.IM_SIZE, cfg.TEST.IM_SIZE = 224, 256
    with tempfile.TemporaryDirectory() as folder:
        make_pictures(folder, args.pictures)
        for augment in ("", "AutoAugment"):
            data = {}
            for pixels in ("float32", "uint8"):
                cfg.DATA_LOADER.PIXELS, cfg.TRAIN.AUGMENT = pixels, augment
                data[pixels] = ImageFolder(folder, "train")
            found = milliseconds(data, args.rounds, args.pictures)
            texts = ", ".join(f"{name} {value:.2f} ms" for name, value in found.items())
            print(f"{augment or 'no augmentation'}: {texts} per picture; ratio {found['float32'] / found['uint8']:.2f}")


if __name__ == "__main__":
    main()
