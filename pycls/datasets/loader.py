"""Loaders for training and testing: which sample goes to which process, and in which order.

The order of an epoch is one permutation, drawn from RNG_SEED and the epoch. A global batch is a run of it, and
each process takes its slice of each global batch: however many processes and workers there are, a step sees the
same samples, augmented alike.
"""

import multiprocessing
import os
import pickle
import random
import re
import signal
import threading
from functools import partial
from typing import Callable, Dict, Iterator, List

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from pycls.core import distributed as dist
from pycls.core.config import cfg
from pycls.core.errors import UserError, look_up
from pycls.core.logging import get_logger
from pycls.datasets.base import ImageDataset
from pycls.datasets.cifar10 import Cifar10
from pycls.datasets.digits import Digits
from pycls.datasets.imagefolder import ImageFolder
from pycls.datasets.imagenet import ImageNet

logger = get_logger(__name__)

_DATASETS = {
    "cifar10": Cifar10,
    "digits": Digits,
    "imagefolder": ImageFolder,
    "imagenet": ImageNet,
    "imagenet-21k": ImageNet,
}
# Data sets that come from a package, not from a folder.
_EMBEDDED = {"digits"}
_DATA_DIR = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data")


def register_dataset(name: str, ctor: Callable[[str, str], Dataset]) -> None:
    """Makes `ctor(data_path, split)` available as TRAIN.DATASET and TEST.DATASET `name`.

    It gives a map-style data set of (normalised float32 image (channels, height, width), label). One that is an
    `ImageDataset` draws its randomness from seeds; for any other the global generators are seeded before each sample.
    """
    _DATASETS[name] = ctor


def check_keys(*keys: str) -> None:
    """Checks what needs no data: the loader's mode, and that there are data sets of the names in these config keys.

    Raises:
        UserError: names the key.
    """
    _refuse_ffcv()
    for key in keys:
        look_up(_DATASETS, cfg[key.split(".")[0]].DATASET, key)


def _refuse_ffcv() -> None:
    if cfg.DATA_LOADER.MODE == "ffcv":
        raise UserError("DATA_LOADER.MODE: ffcv is not available; set DATA_LOADER.MODE pytorch")


def construct_dataset(name: str, split: str, key: str) -> Dataset:
    """Builds the data set that the config key `key` names.

    Raises:
        UserError: unknown name, or its folder is not there.
    """
    ctor = look_up(_DATASETS, name, key)
    path = cfg.DATA_LOADER.DATA_DIR or os.path.join(_DATA_DIR, name)
    if name not in _EMBEDDED and not os.path.exists(path):
        raise UserError(f"{key}: the folder {path} of {name} is not there; set DATA_LOADER.DATA_DIR, or link it there")
    if not getattr(ctor, "listed_once", False):
        return ctor(path, split)
    # One process reads the folders, of which a file server may have many to show, and tells the others.
    return dist.broadcast_object(ctor(path, split) if dist.is_master_proc() else None)


def preparation(name: str):
    """The `Preparation` of pictures for models tested on data set `name`."""
    return look_up(_DATASETS, name, "TEST.DATASET").preparation()


# ------------------------------------------------------------------------ samplers


class TrainSampler:
    """Batches of keys (index, seed) for one process; position inside the epoch included."""

    def __init__(self, samples: int, global_batch: int, rank: int, world_size: int, seed: int):
        self.samples, self.global_batch, self.rank, self.seed = samples, global_batch, rank, seed
        self.batch = global_batch // world_size
        self.epoch = self.start = 0

    def __len__(self) -> int:
        """Batches of a whole epoch; the samples that don't fill a last global batch wait for another epoch."""
        return self.samples // self.global_batch

    def __iter__(self) -> Iterator[List]:
        order = np.random.default_rng((self.seed, self.epoch)).permutation(self.samples)
        for iteration in range(self.start, len(self)):
            first = iteration * self.global_batch + self.rank * self.batch
            yield [(int(i), (self.seed, self.epoch, int(i))) for i in order[first : first + self.batch]]


class TestSampler:
    """Batches of indices for one process: every sample once over all processes.

    All processes yield equally many batches (a sharded model computes together). What is missing in the last
    global batch is made up by repeated samples, marked by a negative index, whose label comes out as -1.
    """

    __test__ = False  # not a test class, whatever pytest thinks of the name

    def __init__(self, samples: int, global_batch: int, rank: int, world_size: int):
        self.samples, self.global_batch = samples, global_batch
        self.rank, self.world_size = rank, world_size

    def __len__(self) -> int:
        return -(-self.samples // self.global_batch)

    def __iter__(self) -> Iterator[List[int]]:
        for start in range(0, self.samples, self.global_batch):
            rows = np.arange(start, min(start + self.global_batch, self.samples))
            # The largest share is ceil(rows / world_size); processes with less fill up, never with nothing.
            share = -(-len(rows) // self.world_size)
            own = rows[self.rank * share : (self.rank + 1) * share]
            yield [int(i) for i in own] + [-1 - int(rows[0])] * (share - len(own))


class _Wrapper(Dataset):
    """A data set that does something around another one."""

    def __init__(self, dataset: Dataset):
        self.dataset = dataset
        self.class_names = getattr(dataset, "class_names", None)

    def __getitem__(self, key):
        return self.dataset[key]

    def __len__(self) -> int:
        return len(self.dataset)


class _Padded(_Wrapper):
    """Gives padding (a negative index) the label -1, which no statistic counts."""

    def __getitem__(self, index: int):
        if index >= 0:
            return self.dataset[index]
        return (*self.dataset[-1 - index][:-1], -1)


class _Seeded(_Wrapper):
    """Gives a data set that knows only indices its randomness by each sample's seed; the global generators, of which it
    draws, are where they were afterwards."""

    def __getitem__(self, key):
        index, seed = key if isinstance(key, tuple) else (key, (key,))
        states = random.getstate(), np.random.get_state(), torch.get_rng_state()
        number = int(np.random.SeedSequence(seed).generate_state(1)[0])
        random.seed(number)
        np.random.seed(number)
        torch.default_generator.manual_seed(number)
        try:
            return self.dataset[index]
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.set_rng_state(states[2])


def _seeded(dataset: Dataset) -> Dataset:
    return dataset if isinstance(dataset, ImageDataset) else _Seeded(dataset)


class _Shipped(_Wrapper):
    """A data set on its way to workers that start from nothing: config and plug-ins are there before it arrives."""

    def __reduce__(self):
        return _arrived, (cfg.dump(), list(dist.PLUGINS), pickle.dumps(self.dataset))


def _arrived(config: str, plugins: List[str], dataset: bytes) -> Dataset:
    dist.take_over(config, plugins, "config of the parent process")
    return pickle.loads(dataset)


# ------------------------------------------------------------------------- loaders


# Seconds for which a worker that is told to stop goes on: the main process may still need a batch before it saves.
_LINGER = 30


def _start_worker(worker: int, threads: int) -> None:
    # A terminal or a scheduler signals every process of a run at once. What to do then is the main process's
    # decision; it could not finish its step if its workers were gone first.
    for name in ("SIGINT", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    # A process that is killed leaves nobody behind that would still hold its memory and its lock of OUT_DIR.
    dist.die_with_parent()
    if hasattr(signal, "alarm"):
        signal.signal(signal.SIGALRM, _leave)
        signal.signal(signal.SIGTERM, _linger)
    # OpenCV would start a thread per core in every worker; parallelism comes from the workers.
    import cv2

    cv2.setNumThreads(0)
    torch.set_num_threads(threads)


def _linger(number, frame) -> None:
    signal.alarm(_LINGER)


def _leave(number, frame) -> None:
    # As a success: the main process is only to complain if it waits for this worker, not while it saves.
    os._exit(0)


# Number of each worker of this process, by its process id.
_workers: Dict[int, int] = {}


def _worker_died(error: RuntimeError) -> UserError:
    reason = str(error).splitlines()[0].strip()
    numbers = [str(_workers[int(pid)]) for pid in re.findall(r"\d+", reason) if int(pid) in _workers]
    which = f"loader worker {', '.join(numbers)}" if numbers else "a loader worker"
    return UserError(
        f"{which} of rank {dist.get_rank()} died ({reason}); too little shared memory (/dev/shm) or memory is the "
        "usual cause: lower DATA_LOADER.NUM_WORKERS (0 loads without workers), or give the container more shared memory"
    )


def _explain_deaths() -> None:
    """Puts the explanation around torch's handler of dead workers, whose error comes up wherever the main thread is."""
    if not hasattr(signal, "SIGCHLD") or threading.current_thread() is not threading.main_thread():
        return
    former = signal.getsignal(signal.SIGCHLD)
    if not callable(former) or hasattr(former, "explains"):
        return

    def handler(number, frame):
        try:
            former(number, frame)
        except RuntimeError as error:
            raise _worker_died(error) from None

    handler.explains = True
    signal.signal(signal.SIGCHLD, handler)


class _Loader(DataLoader):
    """DataLoader whose length is that of a whole epoch and whose dead workers are explained."""

    def __iter__(self):
        try:
            batches = super().__iter__()
            _workers.update((w.pid, i) for i, w in enumerate(getattr(batches, "_workers", ())))
            _explain_deaths()
            yield from batches
        except UserError as error:
            # From a worker it comes inside a traceback as text; the message is the last line.
            last = str(error).strip().splitlines()[-1]
            raise UserError(last.removeprefix(f"{UserError.__module__}.{UserError.__name__}: ")) from None
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise _worker_died(error) from None


def _construct_loader(dataset: Dataset, sampler) -> DataLoader:
    d = cfg.DATA_LOADER
    _refuse_ffcv()
    workers = {}
    if d.NUM_WORKERS:
        # In a rank, which was spawned, Python's default would be spawn; the platform's own is faster.
        method = d.START_METHOD or multiprocessing.get_all_start_methods()[0]
        dataset = dataset if method == "fork" else _Shipped(dataset)
        workers = {
            "prefetch_factor": d.PREFETCH,
            "persistent_workers": True,
            "multiprocessing_context": method,
            "worker_init_fn": partial(_start_worker, threads=d.WORKER_THREADS),
        }
    return _Loader(
        dataset,
        batch_sampler=sampler,
        num_workers=d.NUM_WORKERS,
        pin_memory=d.PIN_MEMORY and dist.device_type() == "cuda",
        # A generator of its own: iterating must not move the global one, which dropout draws from.
        generator=torch.Generator(),
        **workers,
    )


def construct_train_loader() -> DataLoader:
    """The training loader of the config; see `shuffle`.

    Raises:
        UserError: among others, when the split is smaller than one global batch.
    """
    dataset = construct_dataset(cfg.TRAIN.DATASET, cfg.TRAIN.SPLIT, "TRAIN.DATASET")
    _check_classes(dataset, cfg.TRAIN.DATASET, cfg.TRAIN.SPLIT)
    if len(dataset) < cfg.TRAIN.BATCH_SIZE:
        raise UserError(
            f"TRAIN.BATCH_SIZE: a global batch of {cfg.TRAIN.BATCH_SIZE} is more than the {len(dataset)} images of "
            f"split {cfg.TRAIN.SPLIT!r}"
        )
    rank, world = dist.get_rank(), dist.get_world_size()
    sampler = TrainSampler(len(dataset), cfg.TRAIN.BATCH_SIZE, rank, world, cfg.RNG_SEED)
    return _construct_loader(_seeded(dataset), sampler)


def construct_test_loader() -> DataLoader:
    """The test loader of the config, in a fixed order."""
    dataset = construct_dataset(cfg.TEST.DATASET, cfg.TEST.SPLIT, "TEST.DATASET")
    _check_classes(dataset, cfg.TEST.DATASET, cfg.TEST.SPLIT)
    # Also when the training split is tested: as a test, without augmentation.
    dataset.train = False
    sampler = TestSampler(len(dataset), cfg.TEST.BATCH_SIZE, dist.get_rank(), dist.get_world_size())
    return _construct_loader(_Padded(_seeded(dataset)), sampler)


def shuffle(loader: DataLoader, cur_epoch: int, start_iter: int = 0) -> None:
    """Sets the epoch (from 0) whose order the training loader follows, from iteration `start_iter` (from 0) on."""
    sampler = loader.batch_sampler
    sampler.epoch, sampler.start = cur_epoch, start_iter


def _check_classes(dataset, name: str, split: str) -> None:
    """Holds the classes that were found against MODEL.NUM_CLASSES, before a label breaks the loss."""
    labels = getattr(dataset, "labels", None)
    if labels is None or not len(labels):
        return
    highest, found = int(labels.max()) + 1, len(getattr(dataset, "class_names", ()))
    classes, place = max(highest, found), getattr(dataset, "path", name)
    if classes > cfg.MODEL.NUM_CLASSES:
        raise UserError(
            f"MODEL.NUM_CLASSES: {cfg.MODEL.NUM_CLASSES}, but {place} (split {split!r}) holds {classes} classes; "
            f"set MODEL.NUM_CLASSES {classes}"
        )
    if classes < cfg.MODEL.NUM_CLASSES:
        logger.warning("MODEL.NUM_CLASSES is %d, but %s (split %r) holds only %d classes",
                       cfg.MODEL.NUM_CLASSES, place, split, classes)  # fmt: skip
    logger.info("Data set %s, split %s: %d images of %d classes", name, split, len(dataset), classes)
