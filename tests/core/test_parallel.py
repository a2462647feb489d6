"""Every plan computes what one process does: losses, weights and averages over twenty steps."""

import parallel_steps
import pytest
import torch

from pycls.core import config
from pycls.core import distributed as dist
from pycls.core.config import cfg

VIT = """
MODEL: {TYPE: vit, NUM_CLASSES: 10}
VIT: {PATCH_SIZE: 4, HIDDEN_DIM: 16, MLP_DIM: 32, NUM_HEADS: 2, NUM_LAYERS: 2}
LN: {USE_CUSTOM_WEIGHT_DECAY: true}
"""
REGNET = """
MODEL: {TYPE: regnet, NUM_CLASSES: 10}
REGNET: {DEPTH: 3, W0: 8, WA: 8.0, WM: 2.0, GROUP_W: 4, STEM_W: 8, SE_ON: true}
BN: {USE_CUSTOM_WEIGHT_DECAY: true}
"""
# Steps so small that rounding stays rounding: a net that learns fast would blow it up.
COMMON = """
OPTIM: {BASE_LR: 0.01, EMA_ALPHA: 0.01, EMA_UPDATE_PERIOD: 3, GRAD_CLIP: 1.0, MAX_EPOCH: 3}
TRAIN: {IM_SIZE: 16, BATCH_SIZE: 32}
TEST: {IM_SIZE: 16, BATCH_SIZE: 32}
DEVICE: cpu
"""
SHARDED = ("FSDP.ENABLED", True)
PLANS = {
    "one": (),
    "ddp": (),
    "fsdp": SHARDED,
    "fsdp without reshard": (*SHARDED, "FSDP.RESHARD_AFTER_FW", False),
    "fairscale": (*SHARDED, "FSDP.BACKEND", "fairscale"),
    "hybrid": (*SHARDED, "FSDP.SHARD_SIZE", 2),
    "sync": ("BN.SYNC", True),
    "sync fsdp": ("BN.SYNC", True, *SHARDED),
}
MODES = ("amp_bf16", "bf16", "amp_fp16", "fp16")
MODELS = {"vit": VIT, "regnet": REGNET}


def config_text(model, processes, *words):
    """The config of a run, whole, as text."""
    config.reset_cfg()
    cfg.merge_from_text(MODELS[model] + COMMON, "test")
    cfg.merge_from_list([str(w) for w in ("NUM_GPUS", processes, *words)])
    text = cfg.dump()
    config.reset_cfg()
    return text


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """{(model, plan, processes): (losses, weights, average)}; one group of processes trains by all its plans."""
    path, found = tmp_path_factory.mktemp("outcomes") / "results.pyth", {}
    of_two = ["ddp", "fsdp", "fsdp without reshard", "fairscale", "sync", "sync fsdp"]
    for processes, plans in ((1, ["one"]), (2, of_two), (4, ["ddp", "fsdp", "fairscale", "hybrid"])):
        texts = {f"{m} {plan}": config_text(m, processes, *PLANS[plan]) for m in MODELS for plan in plans}
        for mode in MODES if processes == 2 else ():
            for plan in ("ddp", "fsdp", "fairscale"):
                texts[f"vit {plan} {mode}"] = config_text("vit", 2, *PLANS[plan], "PRECISION.MODE", mode)
        if processes == 1:
            parallel_steps.record(path, texts)
        else:
            dist.multi_proc_run(processes, parallel_steps.record, (path, texts))
        for name, result in torch.load(path, weights_only=True).items():
            found[(*name.split(" ", 1), processes)] = result
    config.reset_cfg()
    return found


def assert_same(a, b, tolerance=1e-6):
    assert (a[0] - b[0]).abs().max() <= tolerance, "losses"
    for mine, theirs in zip(a[1:], b[1:]):
        assert set(mine) == set(theirs)
        for name, value in mine.items():
            assert torch.allclose(value, theirs[name], rtol=0, atol=tolerance), name


SPREAD = [(plan, n) for plan in ("ddp", "fsdp", "fairscale") for n in (2, 4)]
SPREAD += [("fsdp without reshard", 2), ("hybrid", 4)]


@pytest.mark.parametrize("plan, processes", SPREAD)
def test_a_vit_trains_alike_under_every_plan(outcomes, plan, processes):
    one = outcomes["vit", "one", 1]
    assert one[0][-2:].sum() < one[0][:2].sum() - 0.01
    assert_same(one, outcomes["vit", plan, processes])


@pytest.mark.parametrize("plan, processes", SPREAD[2:])
def test_a_net_with_batch_norm_trains_alike_under_every_plan(outcomes, plan, processes):
    assert_same(outcomes["regnet", "ddp", processes], outcomes["regnet", plan, processes], 1e-5)


@pytest.mark.parametrize("plan", ["sync", "sync fsdp"])
def test_synchronised_norms_train_as_one_process_does(outcomes, plan):
    assert_same(outcomes["regnet", "one", 1], outcomes["regnet", plan, 2], 1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("plan", ["ddp", "fsdp", "fairscale"])
def test_low_precision_stays_near_under_every_plan(outcomes, plan, mode):
    losses = outcomes["vit", f"{plan} {mode}", 2][0]
    assert (losses - outcomes["vit", "one", 1][0]).abs().max() < 5e-3
