"""The 1,797 handwritten digits that scikit-learn ships: real scans of 8 x 8 pixels, no download."""

import importlib.util
import os
from functools import partial
from typing import Tuple

import cv2
import numpy as np

from pycls.core.config import cfg
from pycls.core.errors import UserError
from pycls.datasets import transforms
from pycls.datasets.base import ImageDataset, Preparation

# Every fifth scan of each class, whatever the seed: 20% held out, balanced over the classes.
_HELD_OUT = 5
# Mean and standard deviation of the training scans, on 0..1.
_MEAN, _STD = 0.305, 0.376


class Digits(ImageDataset):
    """Splits: train, and val (also called test). Images are grey, repeated to 3 channels."""

    def __init__(self, data_path: str, split: str):
        """Args: data_path: not used, the scans are part of scikit-learn.

        Raises:
            UserError: unknown split, or scikit-learn is missing.
        """
        if split not in ("train", "val", "test"):
            raise UserError(f"digits: unknown split {split!r}; allowed: train, val (or test)")
        images, labels = read_scans()
        order = np.concatenate([np.arange((labels == c).sum()) for c in range(10)])
        rank_in_class = np.empty(len(labels), dtype=np.int64)
        rank_in_class[np.argsort(labels, kind="stable")] = order
        held_out = rank_in_class % _HELD_OUT == 0
        chosen = held_out if split != "train" else ~held_out
        self.images, self.labels = images[chosen], labels[chosen]
        self.class_names = [str(digit) for digit in range(10)]
        self.train, self.size = split == "train", cfg.TRAIN.IM_SIZE

    @staticmethod
    def preparation() -> Preparation:
        size = cfg.TRAIN.IM_SIZE
        facts = {"side": size, "size": size, "order": "rgb", "mean": [_MEAN] * 3, "std": [_STD] * 3}
        return Preparation(partial(_prepare, size=size), facts)

    def load(self, index: int, rng: np.random.Generator) -> np.ndarray:
        image = transforms.resize(self.images[index], self.size, self.size)
        if self.train:
            # What a hand does differently from one digit to the next; never a mirror image.
            image = transforms.random_affine(image, rng, degrees=12, shift=0.1, scale=0.12, shear=0.15)
        return _normalize(image)


def read_scans() -> Tuple[np.ndarray, np.ndarray]:
    """scikit-learn's scans, float32 (n, 8, 8) on 0..1, and digits, int64 (n,).

    Its file is read and the library not imported, which would take a second of every process.

    Raises:
        UserError: scikit-learn is missing.
    """
    spec = importlib.util.find_spec("sklearn")
    if spec is None:
        raise UserError("TRAIN.DATASET: digits needs scikit-learn: pip install 'pycls[digits]'")
    path = os.path.join(spec.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    rows = np.loadtxt(path, delimiter=",")
    return (rows[:, :-1].reshape(-1, 8, 8) / 16.0).astype(np.float32), rows[:, -1].astype(np.int64)


def _normalize(image: np.ndarray) -> np.ndarray:
    return np.repeat(((image - _MEAN) / _STD)[None], 3, axis=0)


def _prepare(image: np.ndarray, size: int) -> np.ndarray:
    """Any BGR picture of a white digit on black as a test sample."""
    grey = image.mean(axis=2, dtype=np.float32) / 255
    grey = transforms.center_crop(grey, min(grey.shape))
    # The scans are 8 x 8: finer pictures are first made as coarse, so that the network sees what it knows.
    return _normalize(transforms.resize(cv2.resize(grey, (8, 8), interpolation=cv2.INTER_AREA), size, size))
