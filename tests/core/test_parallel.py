"""Every plan computes what one process does: losses, weights and averages over twenty steps."""

import parallel_steps
import pytest
import torch

from pycls.core import config
from pycls.core import distributed as dist
from pycls.core.config import cfg
from pycls.core.errors import UserError
from pycls.core.sharding import can_shard

pytestmark = pytest.mark.skipif(not can_shard("cpu"), reason="sharding on the CPU needs PyTorch 2.7")

VIT = """
MODEL: {TYPE: vit, NUM_CLASSES: 10}
VIT: {PATCH_SIZE: 4, HIDDEN_DIM: 16, MLP_DIM: 32, NUM_HEADS: 2, NUM_LAYERS: 2}
LN: {USE_CUSTOM_WEIGHT_DECAY: true}
"""
# A smooth activation: at a kink, rounding decides which side a value takes, and its gradient jumps.
REGNET = """
MODEL: {TYPE: regnet, NUM_CLASSES: 10, ACTIVATION_FUN: silu}
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


# How a checkpoint is written, and by which kind of run: (FSDP.STATE, plan, mode, at once or beside the training).
CHECKPOINTS = {
    "one file": ("full", "fsdp", "fp32", False),
    "one file of fp16 beside": ("full", "fsdp", "fp16", True),
    "shards": ("sharded", "fsdp", "fp32", False),
    "shards of fp16 beside": ("sharded", "fsdp", "fp16", True),
    "shards by fairscale": ("sharded", "fairscale", "fp32", False),
}
MOVES = [(1, 2), (2, 1), (2, 4), (4, 2)]


# 38 million weights.
LARGE = ("VIT.HIDDEN_DIM", 512, "VIT.MLP_DIM", 2048, "VIT.NUM_HEADS", 8, "VIT.NUM_LAYERS", 12)


def saving(kind, processes, folder):
    """The config of a run that saves a checkpoint of a kind."""
    state, plan, mode, beside = CHECKPOINTS[kind]
    words = ("OPTIM.OPTIMIZER", "adamw", "FSDP.STATE", state, "PRECISION.MODE", mode, "TRAIN.CHECKPOINT_ASYNC", beside)
    out_dir = folder / f"{kind} {processes}".replace(" ", "_")
    return config_text("vit", processes, *PLANS[plan], *words, "OUT_DIR", out_dir)


def saved_file(kind, processes, folder):
    """The checkpoint that such a run writes."""
    name = "model_epoch_0001" + (".pyth" if CHECKPOINTS[kind][0] == "full" else ".shards")
    return str(folder / f"{kind} {processes}".replace(" ", "_") / "checkpoints" / name)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """{(model, plan, processes): (losses, weights, average)} of training by every plan, and
    {(kind, n): state, (kind, n, m): state} of checkpoints saved by n processes and taken up by m."""
    folder, found = tmp_path_factory.mktemp("outcomes"), {}
    path = folder / "results.pyth"

    def run(processes, plans, modes=(), saves=False, sources=()):
        texts = {f"vit {plan}": config_text("vit", processes, *PLANS[plan]) for plan in plans}
        # FairScale on four processes that share two cores takes longer than all the rest.
        others = [plan for plan in plans if processes < 4 or plan != "fairscale"]
        texts.update({f"regnet {plan}": config_text("regnet", processes, *PLANS[plan]) for plan in others})
        for mode in modes:
            for plan in ("ddp", "fsdp", "fairscale"):
                texts[f"vit {plan} {mode}"] = config_text("vit", 2, *PLANS[plan], "PRECISION.MODE", mode)
        saving_texts = {kind: saving(kind, processes, folder) for kind in (CHECKPOINTS if saves else ())}
        loads = {
            f"{source} {kind}": (saving(kind, processes, folder), saved_file(kind, source, folder))
            for kind in CHECKPOINTS
            for source in sources
        }
        large = config_text("vit", 4, *SHARDED, *LARGE) if processes == 4 else ""
        arguments = (path, texts, saving_texts, loads, large)
        if processes == 1:
            parallel_steps.record(*arguments)
        else:
            dist.multi_proc_run(processes, parallel_steps.record, arguments)
        for name, result in torch.load(path, weights_only=True).items():
            if name == "memory":
                found[name] = result
            elif name in texts:
                found[(*name.split(" ", 1), processes)] = result
            elif name in saving_texts:
                found[name, processes] = result
            else:
                source, kind = name.split(" ", 1)
                found[kind, int(source), processes] = result

    of_two = ["ddp", "fsdp", "fsdp without reshard", "fairscale", "sync", "sync fsdp"]
    run(1, ["one"], saves=True)
    run(2, of_two, MODES, saves=True, sources=[1])
    run(4, ["ddp", "fsdp", "fairscale", "hybrid"], saves=True, sources=[2])
    run(2, [], sources=[4])
    run(1, [], sources=[2])
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


@pytest.mark.parametrize("plan, processes", [spread for spread in SPREAD[2:] if spread != ("fairscale", 4)])
def test_a_net_with_batch_norm_trains_alike_under_every_plan(outcomes, plan, processes):
    assert_same(outcomes["regnet", "ddp", processes], outcomes["regnet", plan, processes], 1e-5)


@pytest.mark.parametrize("plan", ["sync", "sync fsdp"])
def test_synchronised_norms_train_as_one_process_does(outcomes, plan):
    assert_same(outcomes["regnet", "one", 1], outcomes["regnet", plan, 2], 1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("plan", ["ddp", "fsdp", "fairscale"])
def test_low_precision_stays_near_under_every_plan(outcomes, plan, mode):
    losses = outcomes["vit", f"{plan} {mode}", 2][0]
    assert (losses - outcomes["vit", "one", 1][0][: len(losses)]).abs().max() < 5e-3


@pytest.mark.parametrize("before, after", MOVES)
@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_a_checkpoint_is_taken_up_bit_for_bit_by_any_number_of_processes(outcomes, kind, before, after):
    saved, taken_up = outcomes[kind, before], outcomes[kind, before, after]
    assert saved[2]["state"] and (saved[3] or "fp16" not in kind), "no optimizer state or no loss scale was saved"
    assert_equal(saved, taken_up)


def assert_equal(a, b):
    """Same structure, same bits."""
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, (dict, list)):
        assert len(a) == len(b)
        for key in a if isinstance(a, dict) else range(len(a)):
            assert_equal(a[key], b[key])
    else:
        assert a == b


def test_no_process_holds_a_sharded_model_whole(outcomes):
    whole = 4 * 38e6
    # Of model and average a quarter each, a block, and what a first use of the libraries takes.
    assert 0 < outcomes["memory"] < 1.5 * whole


@pytest.mark.parametrize("kind", ["block", "selective"])
@pytest.mark.parametrize("model", MODELS)
def test_recomputed_activations_change_nothing(fresh_cfg, model, kind):
    """Loss, gradients and running statistics, which must not follow a batch twice."""
    found = []
    for checkpointed in ("none", kind):
        text = config_text(model, 1, "ACT_CHECKPOINT", checkpointed, "MODEL.ACTIVATION_INPLACE", kind != "selective")
        run = parallel_steps.new_run(text)
        losses = parallel_steps.train_steps(run, 3)
        found.append((losses, run.plan.model_state(run.raw)))
    assert torch.equal(found[0][0], found[1][0])
    for name, value in found[0][1].items():
        assert torch.equal(value, found[1][1][name]), name


def test_selective_recomputation_of_in_place_activations_is_refused(fresh_cfg):
    with pytest.raises(UserError, match="MODEL.ACTIVATION_INPLACE False"):
        parallel_steps.new_run(config_text("regnet", 1, "ACT_CHECKPOINT", "selective"))
