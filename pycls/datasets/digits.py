"""The 1,797 handwritten digits that scikit-learn ships: real scans of 8 x 8 pixels, no download."""

from functools import partial

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
        try:
            from sklearn.datasets import load_digits
        except ImportError:
            raise UserError("TRAIN.DATASET: digits needs scikit-learn: pip install 'pycls[digits]'") from None
        if split not in ("train", "val", "test"):
            raise UserError(f"digits: unknown split {split!r}; allowed: train, val (or test)")
        scans = load_digits()
        order = np.concatenate([np.arange((scans.target == c).sum()) for c in range(10)])
        rank_in_class = np.empty(len(scans.target), dtype=np.int64)
        rank_in_class[np.argsort(scans.target, kind="stable")] = order
        held_out = rank_in_class % _HELD_OUT == 0
        chosen = held_out if split != "train" else ~held_out
        self.images = (scans.images[chosen] / 16.0).astype(np.float32)
        self.labels = scans.target[chosen].astype(np.int64)
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


def _normalize(image: np.ndarray) -> np.ndarray:
    return np.repeat(((image - _MEAN) / _STD)[None], 3, axis=0)


def _prepare(image: np.ndarray, size: int) -> np.ndarray:
    """Any BGR picture of a white digit on black as a test sample."""
    grey = image.mean(axis=2, dtype=np.float32) / 255
    grey = transforms.center_crop(grey, min(grey.shape))
    # The scans are 8 x 8: finer pictures are first made as coarse, so that the network sees what it knows.
    return _normalize(transforms.resize(cv2.resize(grey, (8, 8), interpolation=cv2.INTER_AREA), size, size))
