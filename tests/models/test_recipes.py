"""Every family learns: on the digits, and on pictures in CIFAR-10's format that the test makes."""

import os
import pickle

import numpy as np
import pytest

from pycls.core import builders, config, trainer
from pycls.core.interrupt import StopRequest
from pycls.core.logging import load_log_data
from pycls.core.run import seed_generators
from pycls.datasets import loader as data_loader

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

VIT = ["MODEL.TYPE", "vit", "VIT.PATCH_SIZE", 8, "VIT.HIDDEN_DIM", 32, "VIT.MLP_DIM", 64, "VIT.NUM_HEADS", 2,
       "VIT.NUM_LAYERS", 2, "OPTIM.OPTIMIZER", "adamw", "OPTIM.BASE_LR", 3e-3]  # fmt: skip
CONV_STEM = ["VIT.STEM_TYPE", "conv", "VIT.C_STEM_KERNELS", [3, 3, 1], "VIT.C_STEM_STRIDES", [4, 2, 1],
             "VIT.C_STEM_DIMS", [8, 16, 32]]  # fmt: skip
ANYNET = ["MODEL.TYPE", "anynet", "ANYNET.BLOCK_TYPE", "res_basic_block", "ANYNET.STEM_TYPE", "res_stem_cifar",
          "ANYNET.STEM_W", 8, "ANYNET.DEPTHS", [1, 1], "ANYNET.WIDTHS", [8, 16], "ANYNET.STRIDES", [2, 2]]  # fmt: skip
REGNET = ["MODEL.TYPE", "regnet", "REGNET.STEM_W", 8, "REGNET.DEPTH", 3, "REGNET.W0", 16, "REGNET.WA", 12.0,
          "REGNET.WM", 2.0, "REGNET.GROUP_W", 8]  # fmt: skip
EFFNET = ["MODEL.TYPE", "effnet", "EN.STEM_W", 8, "EN.DEPTHS", [1, 1], "EN.WIDTHS", [8, 16], "EN.EXP_RATIOS", [1, 4],
          "EN.STRIDES", [1, 2], "EN.KERNELS", [3, 5], "EN.HEAD_W", 32, "EN.DC_RATIO", 0.1, "EN.DROPOUT_RATIO", 0.1,
          "MODEL.ACTIVATION_FUN", "silu"]  # fmt: skip
FAMILIES = {
    "vit": VIT,
    "vit conv stem": [*VIT, *CONV_STEM],
    "anynet": ANYNET,
    "regnetx": REGNET,
    "regnety": [*REGNET, "REGNET.SE_ON", True],
    "resnet": ["MODEL.TYPE", "resnet", "MODEL.DEPTH", 8],
    "effnet": EFFNET,
}


@pytest.fixture(scope="module")
def cifar(tmp_path_factory):
    """CIFAR-10's files, with pictures whose colour and stripes depend on their class."""
    folder, rng = tmp_path_factory.mktemp("cifar"), np.random.default_rng(0)
    stripes = np.sin(np.arange(32)[None, :] * np.arange(1, 11)[:, None] / 3)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        labels = rng.integers(0, 10, 100)
        images = np.full((100, 3, 32, 32), 120.0) + rng.normal(0, 20, (100, 3, 32, 32))
        images[:, 0] += 60 * stripes[labels][:, None, :]
        images[:, 1] += (12 * labels - 60)[:, None, None]
        batch = {b"data": np.clip(images, 0, 255).astype(np.uint8).reshape(100, -1), b"labels": labels.tolist()}
        with open(folder / name, "wb") as f:
            pickle.dump(batch, f)
    return str(folder)


# MODEL.TYPE resnet has its small form only for data sets named cifar (PyCls); on others AnyNet builds it.
PAIRS = [(f, d) for f in FAMILIES for d in ("digits", "cifar10") if (f, d) != ("resnet", "digits")]


@pytest.mark.parametrize("family, dataset", PAIRS)
def test_every_family_learns(fresh_cfg, tmp_path, cifar, family, dataset):
    fresh_cfg.merge_from_list(["TRAIN.DATASET", dataset, "TEST.DATASET", dataset, "TEST.SPLIT", "test"])
    fresh_cfg.merge_from_list(["TRAIN.IM_SIZE", 32, "TEST.IM_SIZE", 32, "TRAIN.BATCH_SIZE", 50, "TEST.BATCH_SIZE", 100])
    fresh_cfg.merge_from_list(["DATA_LOADER.DATA_DIR", cifar, "DATA_LOADER.NUM_WORKERS", 0, "VERBOSE", False])
    fresh_cfg.merge_from_list(["OPTIM.MAX_EPOCH", 3, "OPTIM.EMA_UPDATE_PERIOD", 0, "OUT_DIR", str(tmp_path)])
    fresh_cfg.merge_from_list(FAMILIES[family])
    config.validate_cfg()
    seed_generators(fresh_cfg.RNG_SEED)
    loader = data_loader.construct_train_loader()
    run = trainer.setup_run(loader, data_loader.construct_test_loader())
    losses = [trainer.train_epoch(run, loader, builders.build_loss_fun(), e, StopRequest())["loss"] for e in range(2)]
    assert losses[1] < 0.97 * losses[0]


def test_a_users_anynet_config_of_2020_runs_unchanged(run_tool, tmp_path, cifar):
    """Keys as they were in PyCls's first release, some of which are gone."""
    (tmp_path / "old.yaml").write_text("""
MODEL:
  TYPE: anynet
  NUM_CLASSES: 10
ANYNET:
  STEM_TYPE: res_stem_cifar
  STEM_W: 8
  BLOCK_TYPE: res_bottleneck_block
  DEPTHS: [1, 1]
  WIDTHS: [16, 32]
  STRIDES: [1, 2]
  BOT_MULS: [1.0, 1.0]
  GROUP_WS: [8, 8]
BN:
  USE_PRECISE_STATS: True
  NUM_SAMPLES_PRECISE: 100
OPTIM:
  LR_POLICY: steps
  BASE_LR: 0.1
  GAMMA: 0.1
  STEPS: [0, 1]
  MAX_EPOCH: 1
  MOMENTUM: 0.9
  NESTEROV: True
  WEIGHT_DECAY: 1e-4
TRAIN:
  DATASET: cifar10
  SPLIT: train
  BATCH_SIZE: 64
  IM_SIZE: 32
  EVAL_PERIOD: 1
  CHECKPOINT_PERIOD: 1
TEST:
  DATASET: cifar10
  SPLIT: test
  BATCH_SIZE: 50
  IM_SIZE: 32
NUM_GPUS: 1
MEM:
  RELU_INPLACE: True
DATA_LOADER:
  NUM_WORKERS: 0
CUDNN:
  BENCHMARK: True
PORT: 12001
OUT_DIR: .
""")
    done = run_tool("run_net.py", "--mode", "train", "--cfg", tmp_path / "old.yaml", "DATA_LOADER.DATA_DIR", cifar)
    assert done.returncode == 0, done.stderr
    assert "MEM.RELU_INPLACE has no effect any more" in done.stderr
    assert load_log_data(str(tmp_path / "stdout.log"))["test_epoch"]["epoch"] == ["1/1"]
