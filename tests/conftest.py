"""Shared fixtures: a clean global config, and the command line run as a user would."""

import os
import subprocess
import sys

import pytest

from pycls.core import config

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


# Files that take minutes start first: else one worker would be left with them while the other has nothing to do.
_LONGEST = [
    "test_parallel",
    "test_slurm",
    "test_trainer",
    "test_faults",
    "test_kill",
    "test_dev_scripts",
    "test_ladder",
]


def pytest_collection_modifyitems(items):
    """Puts the files of _LONGEST first and leaves the others as they are."""
    items.sort(key=lambda item: _LONGEST.index(item.path.stem) if item.path.stem in _LONGEST else len(_LONGEST))


@pytest.fixture
def fresh_cfg():
    """The global config at its defaults, restored afterwards."""
    config.reset_cfg()
    yield config.cfg
    config.reset_cfg()


@pytest.fixture
def run_tool(tmp_path):
    """Runs `python tools/NAME.py ARGS` in a fresh interpreter and folder; returns the CompletedProcess."""

    def run(name, *args, timeout=300, **env):
        command = [sys.executable, os.path.join(ROOT, "tools", name), *map(str, args)]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **env}
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=tmp_path, env=variables)

    return run


# A run of seconds on real data: two classes of stem and all of the state that a restart must keep.
TINY_RUN = """
MODEL: {TYPE: vit, NUM_CLASSES: 10}
VIT: {PATCH_SIZE: 4, HIDDEN_DIM: 16, MLP_DIM: 32, NUM_HEADS: 2, NUM_LAYERS: 2, DROP_PATH: 0.2}
LN: {USE_CUSTOM_WEIGHT_DECAY: true}
OPTIM: {OPTIMIZER: adamw, BASE_LR: 1e-3, MAX_EPOCH: 3, EMA_ALPHA: 1e-3, EMA_UPDATE_PERIOD: 2, GRAD_CLIP: 1.0}
TRAIN: {DATASET: digits, IM_SIZE: 16, BATCH_SIZE: 128, MIXUP_ALPHA: 0.8, CUTMIX_ALPHA: 1.0, CHECKPOINT_ITERS: 4}
TEST: {DATASET: digits, IM_SIZE: 16, BATCH_SIZE: 256}
DATA_LOADER: {NUM_WORKERS: 0}
LOG_PERIOD: 3
LOG: {PLOT: false}
DEVICE: cpu
"""


@pytest.fixture
def tiny_run(tmp_path):
    """Path of a config that trains a tiny ViT on the digits in seconds."""
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY_RUN)
    return path


@pytest.fixture
def train(run_tool, tiny_run, tmp_path):
    """Trains the tiny run into OUT_DIR tmp_path/name with overrides; returns (folder, CompletedProcess)."""

    def run(name, *words, code=0, flags=()):
        out_dir = tmp_path / name
        done = run_tool("run_net.py", "--mode", "train", *flags, "--cfg", tiny_run, "OUT_DIR", out_dir, *words)
        assert done.returncode == code, done.stdout + done.stderr
        return out_dir, done

    return run
