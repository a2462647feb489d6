"""Which sample goes where: every one once, the same whatever the processes and workers, found again after a resume."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

from pycls.core.errors import UserError
from pycls.core.logging import load_log_data
from pycls.datasets import loader as data_loader
from pycls.datasets.base import ImageDataset
from pycls.datasets.digits import read_scans
from pycls.datasets.loader import TestSampler, TrainSampler

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def epoch_of(samples, batch, world, epoch=0, start=0):
    """The batches of an epoch, those of all ranks put together."""
    ranks = []
    for rank in range(world):
        sampler = TrainSampler(samples, batch, rank, world, seed=1)
        sampler.epoch, sampler.start = epoch, start
        ranks.append(list(sampler))
    return [sum(parts, []) for parts in zip(*ranks)]


@pytest.mark.parametrize("world", [2, 3, 6])
def test_a_global_batch_is_the_same_for_any_number_of_processes(world):
    assert epoch_of(40, 12, world) == epoch_of(40, 12, 1)


@pytest.mark.parametrize("world", [1, 2])
def test_order_changes_with_the_epoch_and_repeats_with_it(world):
    assert epoch_of(40, 12, world, epoch=0) != epoch_of(40, 12, world, epoch=1)
    assert epoch_of(40, 12, world, epoch=1) == epoch_of(40, 12, world, epoch=1)


def test_no_sample_comes_twice_in_an_epoch():
    indices = [key[0] for batch in epoch_of(40, 12, 2) for key in batch]
    assert len(indices) == len(set(indices)) == 36


def test_a_resumed_epoch_goes_on_where_it_was():
    assert epoch_of(40, 12, 2, epoch=3, start=2) == epoch_of(40, 12, 2, epoch=3)[2:]


@pytest.mark.parametrize("samples", [1, 2, 7, 12, 13, 25])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_testing_counts_each_sample_once_in_equally_many_batches(samples, world):
    ranks = [list(TestSampler(samples, 12, rank, world)) for rank in range(world)]
    assert len({len(batches) for batches in ranks}) == 1
    assert all(len(batch) for batches in ranks for batch in batches)
    real = sorted(i for batches in ranks for batch in batches for i in batch if i >= 0)
    assert real == list(range(samples))


@pytest.fixture
def digits(fresh_cfg):
    fresh_cfg.merge_from_list(["TRAIN.DATASET", "digits", "TEST.DATASET", "digits", "TRAIN.IM_SIZE", 16,
                               "TRAIN.BATCH_SIZE", 100,
                               "TEST.BATCH_SIZE", 100, "DATA_LOADER.NUM_WORKERS", 0])  # fmt: skip
    return fresh_cfg


def first_batches(n=2):
    loader = data_loader.construct_train_loader()
    data_loader.shuffle(loader, 5)
    return [batch for batch, _ in zip(loader, range(n))]


@pytest.mark.parametrize("method", ["", "spawn"])
def test_workers_bring_the_same_batches(digits, method):
    without = first_batches()
    digits.merge_from_list(["DATA_LOADER.NUM_WORKERS", 2, "DATA_LOADER.START_METHOD", method])
    for a, b in zip(without, first_batches()):
        assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


@pytest.mark.parametrize("workers", [0, 2])
def test_iterating_moves_no_global_generator(digits, workers):
    digits.DATA_LOADER.NUM_WORKERS = workers
    torch.manual_seed(3)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    first_batches()
    assert torch.equal(torch.get_rng_state(), before[0]) and (np.random.get_state()[1] == before[1]).all()


def test_padding_has_the_label_that_nothing_counts(digits):
    dataset = data_loader.construct_test_loader().dataset
    image, label = dataset[-1 - 7]
    assert label == -1 and np.array_equal(image, dataset[7][0])


def test_the_training_split_is_tested_without_augmentation(digits):
    digits.TEST.SPLIT = "train"
    dataset = data_loader.construct_test_loader().dataset
    assert len(dataset) == 1433 and np.array_equal(dataset[3][0], dataset[3][0])


def test_a_batch_larger_than_the_data_is_refused_with_both(digits):
    digits.TRAIN.BATCH_SIZE = 2000
    with pytest.raises(UserError, match="2000 is more than the 1433 images"):
        data_loader.construct_train_loader()


def test_more_classes_than_the_key_says_are_refused(digits):
    digits.MODEL.NUM_CLASSES = 9
    with pytest.raises(UserError, match=r"MODEL.NUM_CLASSES: 9.*10 classes"):
        data_loader.construct_train_loader()


def test_fewer_classes_only_warn(digits, caplog):
    digits.MODEL.NUM_CLASSES = 12
    data_loader.construct_train_loader()
    assert "holds only 10 classes" in caplog.text


class Threads(ImageDataset):
    """Tells, as an image, how many threads its process may use."""

    def __init__(self, path="", split=""):
        self.labels, self.class_names = np.zeros(8, dtype=np.int64), ["a"]

    def load(self, index, rng):
        import cv2

        return np.full((1, 1, 1), 100 * torch.get_num_threads() + cv2.getNumThreads())


def test_workers_use_the_threads_that_the_config_says(fresh_cfg, monkeypatch):
    monkeypatch.setitem(data_loader._DATASETS, "digits", Threads)
    fresh_cfg.merge_from_list(["TRAIN.DATASET", "digits", "TRAIN.BATCH_SIZE", 4, "DATA_LOADER.NUM_WORKERS", 1,
                               "DATA_LOADER.WORKER_THREADS", 1, "MODEL.NUM_CLASSES", 1])  # fmt: skip
    images, _ = next(iter(data_loader.construct_train_loader()))
    assert set(images.flatten().tolist()) <= {100.0, 101.0}


class Slow(Threads):
    """A picture a second, so that the test can kill the worker in between."""

    def load(self, index, rng):
        with open(self.marker, "w") as f:
            f.write(str(os.getpid()))
        time.sleep(1)
        return np.zeros((1, 1, 1))


def test_a_killed_worker_is_explained(fresh_cfg, monkeypatch, tmp_path):
    monkeypatch.setitem(data_loader._DATASETS, "digits", Slow)
    monkeypatch.setattr(Slow, "marker", str(tmp_path / "pid"), raising=False)
    fresh_cfg.merge_from_list(["TRAIN.DATASET", "digits", "TRAIN.BATCH_SIZE", 4, "DATA_LOADER.NUM_WORKERS", 1,
                               "MODEL.NUM_CLASSES", 1])  # fmt: skip

    def kill():
        while not os.path.exists(tmp_path / "pid") or not (tmp_path / "pid").read_text():
            time.sleep(0.05)
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    with pytest.raises(UserError, match=r"shared memory.*DATA_LOADER.NUM_WORKERS"):
        next(iter(data_loader.construct_train_loader()))


def started(loader):
    """An iterator of the loader whose worker has begun, and the worker's process id."""
    before = {child.pid for child in multiprocessing.active_children()}
    batches = iter(loader)
    next(batches)
    (pid,) = {child.pid for child in multiprocessing.active_children()} - before
    return batches, pid


def test_a_worker_killed_while_the_model_computes_is_explained_too(digits):
    digits.DATA_LOADER.NUM_WORKERS = 1
    _, pid = started(data_loader.construct_train_loader())
    with pytest.raises(UserError, match=r"shared memory.*DATA_LOADER.NUM_WORKERS"):
        os.kill(pid, signal.SIGKILL)
        time.sleep(20)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_workers_outlive_a_signal_to_the_whole_run(digits, number):
    digits.merge_from_list(["DATA_LOADER.NUM_WORKERS", 1, "DATA_LOADER.PREFETCH", 1])
    batches, pid = started(data_loader.construct_train_loader())
    os.kill(pid, number)
    assert sum(1 for _ in batches) == 13


class Unreadable(Threads):
    def load(self, index, rng):
        raise UserError("picture.png: can't be read")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_mistake_found_in_a_worker_is_one_line(fresh_cfg, monkeypatch, workers):
    monkeypatch.setitem(data_loader._DATASETS, "digits", Unreadable)
    fresh_cfg.merge_from_list(["TRAIN.DATASET", "digits", "TRAIN.BATCH_SIZE", 4, "DATA_LOADER.NUM_WORKERS", workers,
                               "MODEL.NUM_CLASSES", 1])  # fmt: skip
    with pytest.raises(UserError, match=r"^picture\.png: can't be read$"):
        next(iter(data_loader.construct_train_loader()))


def test_a_missing_folder_names_the_key(fresh_cfg, tmp_path):
    fresh_cfg.merge_from_list(["TRAIN.DATASET", "cifar10", "DATA_LOADER.DATA_DIR", str(tmp_path / "none")])
    with pytest.raises(UserError, match="DATA_LOADER.DATA_DIR"):
        data_loader.construct_train_loader()


def test_symlinks_below_the_package_are_honoured(fresh_cfg, tmp_path, monkeypatch):
    (tmp_path / "elsewhere" / "train" / "n01").mkdir(parents=True)
    os.symlink(tmp_path / "elsewhere", tmp_path / "imagenet")
    monkeypatch.setattr(data_loader, "_DATA_DIR", str(tmp_path))
    with pytest.raises(UserError, match="holds no pictures"):
        data_loader.construct_dataset("imagenet", "train", "TRAIN.DATASET")


def test_digits_are_split_in_fixed_balanced_parts(fresh_cfg):
    fresh_cfg.TRAIN.IM_SIZE = 8
    train, held_out = (data_loader.construct_dataset("digits", split, "K") for split in ("train", "val"))
    assert (len(train), len(held_out)) == (1433, 364)
    counts = np.bincount(held_out.labels)
    assert counts.min() >= 35 and counts.max() <= 37
    seen = {image.tobytes() for image in train.images}
    assert sum(image.tobytes() in seen for image in held_out.images) == 0
    assert not np.array_equal(train[(0, (1,))][0], train[(0, (2,))][0])
    assert np.array_equal(held_out[(0, (1,))][0], held_out[(0, (2,))][0])


def test_the_scans_are_those_of_scikit_learn(fresh_cfg):
    """Their file is read without the library."""
    from sklearn.datasets import load_digits

    images, labels = read_scans()
    digits = load_digits()
    assert np.array_equal(images, (digits.images / 16).astype(np.float32)) and np.array_equal(labels, digits.target)


PLUG_IN = """
import random

import numpy as np
import torch

from pycls.core.config import CfgNode, cfg
from pycls.datasets.loader import register_dataset

cfg.MINE = CfgNode({"SHIFT": 0.0})


class Mine(torch.utils.data.Dataset):
    def __init__(self, path, split):
        self.split = split

    def __len__(self):
        return 64

    def __getitem__(self, index):
        assert cfg.MINE.SHIFT == 2.0 and isinstance(index, int)
        noise = random.random() + np.random.rand() + torch.rand(3, 16, 16)
        return noise + cfg.MINE.SHIFT + index % 10, index % 10


register_dataset("mine", Mine)
"""


def test_a_plain_data_set_of_a_plug_in_brings_the_same_samples_in_any_worker(tmp_path):
    (tmp_path / "mine.py").write_text(PLUG_IN)

    def losses(method, workers):
        out_dir = tmp_path / f"{method}{workers}"
        command = [sys.executable, os.path.join(ROOT, "tools", "run_net.py"), "--mode", "train", "--plugin", "mine.py"]
        command += ["--cfg", os.path.join(ROOT, "configs", "quickstart", "vit_digits.yaml"), "OUT_DIR", str(out_dir)]
        command += ["TRAIN.DATASET", "mine", "TEST.DATASET", "mine", "MINE.SHIFT", "2.0", "DATA_LOADER.DATA_DIR", "."]
        command += [
            "TRAIN.BATCH_SIZE",
            "16",
            "TEST.BATCH_SIZE",
            "16",
            "OPTIM.MAX_EPOCH",
            "2",
            "OPTIM.WARMUP_EPOCHS",
            "1",
        ]
        command += f"LOG.PLOT False DATA_LOADER.START_METHOD {method} DATA_LOADER.NUM_WORKERS {workers}".split()
        variables = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=variables, timeout=200)
        assert done.returncode == 0, done.stderr
        return load_log_data(str(out_dir / "stdout.log"))["train_epoch"]["loss"]

    alone = losses("fork", 0)
    assert len(alone) == 2
    for method in ("spawn", "forkserver"):
        assert losses(method, 1) == alone, method
