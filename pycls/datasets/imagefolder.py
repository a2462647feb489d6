"""Pictures in class folders.

Either DATA_DIR/train/CLASS/*.jpg and DATA_DIR/val/CLASS/*.jpg, or DATA_DIR/CLASS/*.jpg with a file
DATA_LOADER.SPLIT_FILE whose lines `split<TAB>relative/path` assign pictures to splits. Classes are numbered in the
order of their names sorted as text, once for all splits, from the training split.
"""

import os
import re
import warnings
from collections import Counter
from functools import partial
from itertools import chain
from typing import Dict, Iterator, List, Tuple

import numpy as np

from pycls.core.config import cfg
from pycls.core.errors import UserError, nearest
from pycls.core.logging import get_logger
from pycls.datasets import transforms
from pycls.datasets.augment import make_augment
from pycls.datasets.base import ImageDataset, Preparation
from pycls.datasets.decode import ENDINGS, decode_image, is_hidden, is_picture

logger = get_logger(__name__)


class ImageFolder(ImageDataset):
    """Any pictures in class folders, with ImageNet's training and test pipelines (PyCls)."""

    # Names of class folders, and what to call them in messages.
    class_pattern, class_words = r"[^.].*", "class folders"
    split_file_allowed = True
    # Whether one process builds it for all, since listing the folders takes long.
    listed_once = True

    def __init__(self, data_path: str, split: str):
        """Args: data_path: DATA_DIR. split: a folder in it, or a word of the split file.

        Raises:
            UserError: no such split, no pictures, a class without pictures, or one that training does not know.
        """
        self.path, self.split = data_path, split
        split_file = cfg.DATA_LOADER.SPLIT_FILE if self.split_file_allowed else ""
        files = _from_split_file(data_path, split, split_file) if split_file else self._from_folders(data_path, split)
        self.class_names, rows = files
        # Flat arrays: a list of Python strings would be copied into every worker as it touches them.
        self.labels = np.array([label for label, _ in rows], dtype=np.int64)
        encoded = [name.encode("utf-8", "surrogateescape") for _, name in rows]
        self._names = np.frombuffer(b"".join(encoded), dtype=np.uint8)
        self._ends = np.cumsum([len(name) for name in encoded])
        self._name_missing_classes()
        self._read_config(train=split == cfg.TRAIN.SPLIT)

    def _name_missing_classes(self) -> None:
        missing = np.setdiff1d(np.arange(len(self.class_names)), self.labels)
        if len(missing):
            logger.warning("%s, split %r: no pictures of %d of %d classes: %s", self.path, self.split, len(missing),
                           len(self.class_names), _list([self.class_names[i] for i in missing]))  # fmt: skip

    def _read_config(self, train: bool) -> None:
        self.train = train
        self.crop, self.test_size = cfg.TRAIN.IM_SIZE, cfg.TEST.IM_SIZE
        self.augment, self.pca_std = make_augment(cfg.TRAIN.AUGMENT), cfg.TRAIN.PCA_STD
        self.order = transforms.channel_order(cfg.DATA_LOADER.CHANNEL_ORDER, "bgr")
        self.decoder, self.on_bad_image = cfg.DATA_LOADER.DECODER, cfg.DATA_LOADER.ON_BAD_IMAGE
        self.pixels = cfg.DATA_LOADER.PIXELS
        self._warned = set()
        if not train and self.test_size < self.crop:
            raise UserError(f"TEST.IM_SIZE: {self.test_size} is smaller than the test crop TRAIN.IM_SIZE {self.crop}")

    @staticmethod
    def preparation() -> Preparation:
        order = transforms.channel_order(cfg.DATA_LOADER.CHANNEL_ORDER, "bgr")
        size, crop = cfg.TEST.IM_SIZE, cfg.TRAIN.IM_SIZE
        mean, std = ([round(float(v), 6) for v in values] for values in (transforms.MEAN, transforms.STD))
        facts = {"side": crop, "size": size, "order": order, "mean": mean, "std": std}
        return Preparation(partial(transforms.prepare_test_image, size=size, crop=crop, order=order), facts)

    # -------------------------------------------------------------------- pictures

    def file(self, index: int) -> str:
        """Path of picture `index`."""
        start = self._ends[index - 1] if index else 0
        name = self._names[start : self._ends[index]].tobytes().decode("utf-8", "surrogateescape")
        return os.path.join(self.path, name)

    def load(self, index: int, rng: np.random.Generator):
        image = decode_image(self.file(index), self.decoder)
        if self.pixels == "uint8":
            return self._load_bytes(image, rng)
        if not self.train:
            return transforms.prepare_test_image(image, self.test_size, self.crop, self.order)
        image = transforms.random_sized_crop(image, self.crop, rng, convert=transforms.to_float)
        image = transforms.random_flip(image, rng)
        image = self.augment(image, rng)
        image = transforms.lighting(image, self.pca_std, rng)
        return transforms.normalize(image, self.order)

    def _load_bytes(self, image: np.ndarray, rng: np.random.Generator):
        """As `load`, by the same draws, in bytes: resized values are rounded to 1/255."""
        if not self.train:
            image = transforms.center_crop(transforms.scale_shorter_side(image, self.test_size), self.crop)
            return transforms.normalize_later(image, transforms.lighting_shift(0, rng), self.order)
        image = transforms.random_sized_crop(image, self.crop, rng)
        image = transforms.random_flip(image, rng)
        image = self.augment(image[:, :, ::-1], rng)[:, :, ::-1]
        return transforms.normalize_later(image, transforms.lighting_shift(self.pca_std, rng), self.order)

    def sample(self, index: int, rng: np.random.Generator):
        """As that of any data set; with ON_BAD_IMAGE replace, training gets the next picture that can be read in the
        place of one that can't, with its own label, and testing gets it with the label -1: only the shape is used."""
        for other in chain(range(index, len(self)), range(index)):
            try:
                image, label = super().sample(other, rng)
                return image, label if self.train or other == index else -1
            except UserError as error:
                self._bad_picture(other, error)
        raise UserError(f"{self.path}: no picture of split {self.split!r} can be read")

    def _bad_picture(self, index: int, error: UserError) -> None:
        """Stops at a picture that can't be read, or warns of it once."""
        if self.on_bad_image == "stop":
            raise UserError(f"{error}; DATA_LOADER.ON_BAD_IMAGE replace would go on without it") from None
        if index not in self._warned:
            self._warned.add(index)
            warnings.warn(f"{error}; {'another picture takes its place' if self.train else 'left out'}", stacklevel=2)

    # ----------------------------------------------------------------------- files

    def _from_folders(self, root: str, split: str) -> Tuple[List[str], List[Tuple[int, str]]]:
        splits = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not is_hidden(entry.name))
        if split not in splits:
            raise UserError(
                f"{root}: there is no split folder {split!r}{nearest(split, splits)}; it has {_list(splits)}"
            )
        own = self._classes(root, split)
        if split != cfg.TRAIN.SPLIT and cfg.TRAIN.SPLIT in splits:
            names = self._classes(root, cfg.TRAIN.SPLIT)
            unknown = sorted(set(own) - set(names))
            if unknown:
                raise UserError(f"{os.path.join(root, split)}: class {_list(unknown)} is not in {cfg.TRAIN.SPLIT!r}")
        else:
            names = own
        number = {name: i for i, name in enumerate(names)}
        left_out: Counter = Counter()
        rows = [(number[c], f) for c in own for f in _pictures(root, os.path.join(split, c), left_out)]
        if left_out:
            kinds = _list([f"{count} {ending}" for ending, count in left_out.most_common()])
            logger.warning("%s: %d files left out because of their endings: %s",
                           os.path.join(root, split), left_out.total(), kinds)  # fmt: skip
        empty = sorted(set(own) - {names[label] for label, _ in rows}) if split == cfg.TRAIN.SPLIT else []
        if not rows or empty:
            where = os.path.join(root, split, *empty[:1])
            raise UserError(f"{where}: holds no pictures; accepted endings: {', '.join(ENDINGS)}")
        return names, rows

    def _classes(self, root: str, split: str) -> List[str]:
        folder = os.path.join(root, split)
        found = sorted(e.name for e in os.scandir(folder) if e.is_dir() and not is_hidden(e.name))
        good = [name for name in found if re.fullmatch(self.class_pattern, name)]
        bad = sorted(set(found) - set(good))
        if not good:
            rejected = f"; these do not count: {_list(bad)}" if bad else ""
            raise UserError(f"{folder}: holds no {self.class_words} (pattern {self.class_pattern}){rejected}")
        if bad:
            warnings.warn(f"{folder}: left out, as their names are no {self.class_words}: {_list(bad)}", stacklevel=2)
        return good


def _pictures(root: str, folder: str, left_out: Counter) -> Iterator[str]:
    """Paths, relative to `root`, of the pictures in a folder, sorted. `left_out` counts the endings of the others."""
    for name in sorted(entry.name for entry in os.scandir(os.path.join(root, folder)) if entry.is_file()):
        if is_picture(name):
            yield os.path.join(folder, name)
        elif not is_hidden(name):
            left_out[os.path.splitext(name)[1].lower() or "without ending"] += 1


def _from_split_file(root: str, split: str, split_file: str) -> Tuple[List[str], List[Tuple[int, str]]]:
    """Classes of the training split and (label, relative path) of the pictures of `split`."""
    by_split: Dict[str, List[str]] = {}
    try:
        with open(split_file, encoding="utf-8") as f:
            for number, line in enumerate(f, 1):
                words = line.rstrip("\n").split("\t")
                if not line.strip():
                    continue
                if len(words) != 2 or "/" not in words[1].replace(os.sep, "/").strip("/"):
                    raise UserError(
                        f"{split_file}, line {number}: must be 'split<TAB>class/picture', not {line.strip()!r}"
                    )
                by_split.setdefault(words[0], []).append(words[1])
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"DATA_LOADER.SPLIT_FILE: {split_file} can't be read: {error}") from None
    if split not in by_split:
        raise UserError(
            f"{split_file}: has no split {split!r}{nearest(split, by_split)}; it has {_list(sorted(by_split))}"
        )

    def class_of(path):
        return os.path.basename(os.path.dirname(path))

    names = sorted({class_of(path) for path in by_split.get(cfg.TRAIN.SPLIT, by_split[split])})
    number = {name: i for i, name in enumerate(names)}
    unknown = sorted({class_of(path) for path in by_split[split]} - set(names))
    if unknown:
        raise UserError(f"{split_file}: class {_list(unknown)} of split {split!r} is not in {cfg.TRAIN.SPLIT!r}")
    missing = [path for path in by_split[split] if not os.path.isfile(os.path.join(root, path))]
    if missing:
        raise UserError(f"{split_file}: {len(missing)} of its files are not in {root}, e.g. {missing[0]}")
    return names, [(number[class_of(path)], path) for path in by_split[split]]


def _list(names: List[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "") or "none"
