"""CIFAR-10 as its authors publish it: python batches of 32 x 32 pictures (Krizhevsky 2009)."""

import os
import pickle
from functools import partial

import numpy as np

from pycls.core.config import cfg
from pycls.core.errors import UserError
from pycls.core.unpickling import CheckedUnpickler
from pycls.datasets import transforms
from pycls.datasets.base import ImageDataset, Preparation

# On 0..255, RGB.
_MEAN = np.array([125.3, 123.0, 113.9], dtype=np.float32).reshape(3, 1, 1)
_STD = np.array([63.0, 62.1, 66.7], dtype=np.float32).reshape(3, 1, 1)
_SIDE, _PADDING = 32, 4
_NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
# What reading a damaged or crafted pickle, with nothing but arrays allowed, was seen to raise.
_UNREADABLE = (
    pickle.UnpicklingError, EOFError, LookupError, TypeError, ValueError, AttributeError, OverflowError, MemoryError,
    SystemError, RuntimeError,
)  # fmt: skip
_FILES = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"], "val": ["test_batch"]}


class _DataType:
    """numpy.dtype in a pickle: of integers only, so that nothing damaged is ever numpy's to interpret."""

    def __init__(self, name, *_):
        self.name = name.decode() if isinstance(name, bytes) else name
        if self.name not in ("u1", "i1", "i2", "i4", "i8"):
            raise pickle.UnpicklingError(f"its arrays are of {self.name!r}, not of integers")

    def __setstate__(self, state):
        if state[1] in (">", b">"):
            self.name = ">" + self.name


class _Array:
    """numpy.ndarray in a pickle: `values` once all is read."""

    def __setstate__(self, state):
        _, shape, data_type, in_fortran_order, raw = state
        self.values = np.frombuffer(raw, data_type.name).reshape(shape, order="F" if in_fortran_order else "C")


def _bytes_from_text(text: str, encoding: str) -> bytes:
    """_codecs.encode: how Python 3 writes bytes for Python 2."""
    return text.encode("latin1")


class _ArraysOnly(CheckedUnpickler):
    """Reads numpy arrays, bytes, text, numbers, lists and dicts; anything else in a pickle is refused unread."""

    # numpy renamed its inner package in version 2; files keep the old name.
    _FOUND = {
        ("numpy.core.multiarray", "_reconstruct"): lambda *_: _Array(),
        ("numpy._core.multiarray", "_reconstruct"): lambda *_: _Array(),
        ("numpy", "ndarray"): _Array,
        ("numpy", "dtype"): _DataType,
        ("_codecs", "encode"): _bytes_from_text,
    }

    def find_class(self, module: str, name: str):
        if (module, name) not in self._FOUND:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return self._FOUND[module, name]


def _integers(values) -> np.ndarray:
    """An array, or a list of numbers, as int64 or as it is.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(values, _Array):
        return values.values
    if isinstance(values, list) and all(isinstance(value, int) for value in values):
        return np.array(values, dtype=np.int64)
    raise ValueError(f"numbers are expected, not {type(values).__name__}")


def read_batch(path: str):
    """Reads one python batch.

    Returns:
        (pictures uint8 (n, 3, 32, 32), labels int64 (n,)).
    Raises:
        UserError: not there, damaged, or holding more than arrays, bytes and lists.
    """
    try:
        with open(path, "rb") as f:
            batch = _ArraysOnly(f.read(), encoding="bytes").load()
        images = _integers(batch[b"data"]).astype(np.uint8).reshape(-1, 3, _SIDE, _SIDE)
        labels = _integers(batch.get(b"labels", batch.get(b"fine_labels"))).astype(np.int64)
    except OSError as error:
        raise UserError(f"{path}: can't be read: {error.strerror}") from None
    except _UNREADABLE as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: is not a CIFAR-10 python batch ({type(error).__name__}: {reason})") from None
    if len(images) != len(labels):
        raise UserError(f"{path}: holds {len(images)} pictures but {len(labels)} labels")
    return images, labels


class Cifar10(ImageDataset):
    """Splits: train (data_batch_1..5) and test (test_batch, also called val)."""

    def __init__(self, data_path: str, split: str):
        """Args: data_path: the folder of the batches, or the one that holds `cifar-10-batches-py`."""
        if split not in _FILES:
            raise UserError(f"cifar10: unknown split {split!r}; allowed: train, test (or val)")
        if cfg.TRAIN.IM_SIZE != _SIDE:
            raise UserError(f"TRAIN.IM_SIZE: cifar10 has pictures of {_SIDE} pixels, not {cfg.TRAIN.IM_SIZE}")
        inner = os.path.join(data_path, "cifar-10-batches-py")
        self.path = inner if os.path.isdir(inner) else data_path
        batches = [read_batch(os.path.join(self.path, name)) for name in _FILES[split]]
        self.images = np.concatenate([images for images, _ in batches])
        self.labels = np.concatenate([labels for _, labels in batches])
        self.class_names = list(_NAMES)
        self.train = split == "train"
        self.order = transforms.channel_order(cfg.DATA_LOADER.CHANNEL_ORDER, "rgb")

    @staticmethod
    def preparation() -> Preparation:
        order = transforms.channel_order(cfg.DATA_LOADER.CHANNEL_ORDER, "rgb")
        mean, std = ([round(float(v) / 255, 6) for v in values.flatten()] for values in (_MEAN, _STD))
        facts = {"side": _SIDE, "size": _SIDE, "order": order, "mean": mean, "std": std}
        return Preparation(partial(_prepare, order=order), facts)

    def load(self, index: int, rng: np.random.Generator) -> np.ndarray:
        image = (self.images[index].astype(np.float32) - _MEAN) / _STD
        if self.train:
            # Padded after normalisation, so with the mean colour (PyCls).
            image = transforms.random_flip(image.transpose(1, 2, 0), rng)
            image = transforms.random_pad_crop(image, _SIDE, _PADDING, rng).transpose(2, 0, 1)
        return image[::-1] if self.order == "bgr" else image


def _prepare(image: np.ndarray, order: str) -> np.ndarray:
    """Any BGR picture as a test sample of CIFAR-10."""
    image = transforms.center_crop(transforms.scale_shorter_side(image, _SIDE), _SIDE)
    image = (image[:, :, ::-1].transpose(2, 0, 1).astype(np.float32) - _MEAN) / _STD
    return image[::-1] if order == "bgr" else image
