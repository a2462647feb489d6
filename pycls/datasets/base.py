"""What all data sets share: samples whose randomness comes from a seed, and class names.

A data set is map-style: `ds[key]` with key an index, or (index, seed) where seed is a tuple of integers. All
randomness of the sample comes from that seed, so it is the same in any worker of any process.
"""

from typing import Callable, Dict, List, NamedTuple, Tuple, Union

import numpy as np
from torch.utils.data import Dataset

Key = Union[int, Tuple[int, Tuple[int, ...]]]


class Preparation(NamedTuple):
    """How testing makes a model's input of a decoded picture.

    prepare: uint8 BGR (height, width, 3) -> float32 (3, side, side).
    facts: side, size (shorter side before the crop), order (of the channels), mean and std (RGB, on 0..1).
    """

    prepare: Callable[[np.ndarray], np.ndarray]
    facts: Dict


class ImageDataset(Dataset):
    """Base class. A subclass sets `labels` (an integer array, one per sample) and `class_names`, and has `load`."""

    labels: np.ndarray
    class_names: List[str]

    def load(self, index: int, rng: np.random.Generator) -> Union[np.ndarray, Tuple[np.ndarray, np.ndarray]]:
        """Returns sample `index` as a normalised float32 image (channels, height, width), or to be normalised on the
        device: (uint8 image (channels, height, width), float32 (2, channels): factors and summands)."""
        raise NotImplementedError

    @staticmethod
    def preparation() -> Preparation:
        """What the config's testing does to any picture, for prediction and export."""
        raise NotImplementedError

    def sample(self, index: int, rng: np.random.Generator) -> Tuple:
        """Sample `index` as `load` gives it, and its label; one that no statistic shall count has the label -1."""
        return self.load(index, rng), int(self.labels[index])

    def __getitem__(self, key: Key) -> Tuple:
        index, seed = key if isinstance(key, tuple) else (key, None)
        image, label = self.sample(index, np.random.default_rng(seed))
        if isinstance(image, tuple):
            return (*map(np.ascontiguousarray, image), label)
        return np.ascontiguousarray(image, dtype=np.float32), label

    def __len__(self) -> int:
        return len(self.labels)
