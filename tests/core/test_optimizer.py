"""Schedules, parameter groups, and that every kernel computes the same."""

import math

import pytest
import torch
from torch import nn

from pycls.core import optimizer as optim


class Net(nn.Module):
    """One parameter of each kind that a decay rule knows."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.pos_embedding = nn.Parameter(torch.randn(1, 4))
        self.block_0 = nn.ModuleDict({"ln_1": nn.LayerNorm(4), "linear": nn.Linear(4, 4)})
        self.block_1 = nn.ModuleDict({"ln_1": nn.LayerNorm(4), "linear": nn.Linear(4, 4)})
        self.head_bn = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        x = x + self.pos_embedding
        for block in (self.block_0, self.block_1):
            x = x + block["linear"](block["ln_1"](x))
        return self.head(self.head_bn(x))


def decays(model):
    names = {id(p): name for name, p in model.named_parameters()}
    return {names[id(p)]: g["weight_decay"] for g in optim.construct_optimizer(model).param_groups for p in g["params"]}


def test_each_parameter_is_in_one_group_by_its_rule(fresh_cfg):
    fresh_cfg.merge_from_list(["BN.USE_CUSTOM_WEIGHT_DECAY", True, "BN.CUSTOM_WEIGHT_DECAY", 0.1,
                               "LN.USE_CUSTOM_WEIGHT_DECAY", True, "LN.CUSTOM_WEIGHT_DECAY", 0.2,
                               "OPTIM.BIAS_USE_CUSTOM_WEIGHT_DECAY", True, "OPTIM.BIAS_CUSTOM_WEIGHT_DECAY", 0.3,
                               "OPTIM.WEIGHT_DECAY", 0.4])  # fmt: skip
    model = Net()
    found = decays(model)
    assert set(found) == {name for name, _ in model.named_parameters()}
    assert found["head_bn.bias"] == 0.1 and found["block_0.ln_1.bias"] == 0.2
    assert found["head.bias"] == 0.3 and found["head.weight"] == found["pos_embedding"] == 0.4


def test_frozen_parameters_are_left_out_and_empty_groups_too(fresh_cfg):
    model = Net()
    model.head.requires_grad_(False)
    groups = optim.construct_optimizer(model).param_groups
    assert all(g["params"] for g in groups)
    assert not any(p is model.head.weight for g in groups for p in g["params"])


def test_layer_decay_lowers_the_rate_towards_the_stem(fresh_cfg):
    fresh_cfg.OPTIM.LAYER_DECAY = 0.5
    model = Net()
    optimizer = optim.construct_optimizer(model)
    optim.set_lr(optimizer, 1.0)
    lr = {id(p): g["lr"] for g in optimizer.param_groups for p in g["params"]}
    assert lr[id(model.head.weight)] == 1.0
    assert lr[id(model.block_1["linear"].weight)] == 0.5
    assert lr[id(model.block_0["linear"].weight)] == 0.25
    assert lr[id(model.pos_embedding)] == 0.125


@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("kernels", ["OPTIM.MTA", "OPTIM.FUSED"])
def test_fast_kernels_compute_the_plain_step(fresh_cfg, kind, kernels):
    results = []
    for fast in (False, True):
        fresh_cfg.merge_from_list(["OPTIM.OPTIMIZER", kind, "OPTIM.BASE_LR", 0.01, kernels, fast])
        model = Net().double()
        optimizer = optim.construct_optimizer(model)
        for step in range(5):
            optimizer.zero_grad()
            inputs = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            model(inputs).square().mean().backward()
            optimizer.step()
        results.append([p.detach().clone() for p in model.parameters()])
    for plain, fast in zip(*results):
        assert torch.allclose(plain, fast, rtol=0, atol=1e-12)


def test_cosine_goes_from_base_to_minimum(fresh_cfg):
    fresh_cfg.merge_from_list(["OPTIM.BASE_LR", 2.0, "OPTIM.MAX_EPOCH", 10, "OPTIM.MIN_LR", 0.1])
    assert optim.get_epoch_lr(0) == 2.0
    assert optim.get_epoch_lr(5) == pytest.approx(2.0 * 0.55)
    assert optim.get_epoch_lr(10) == pytest.approx(0.2)


def test_warm_up_multiplies_the_schedule(fresh_cfg):
    fresh_cfg.merge_from_list(["OPTIM.BASE_LR", 1.0, "OPTIM.MAX_EPOCH", 10, "OPTIM.LR_POLICY", "lin",
                               "OPTIM.WARMUP_EPOCHS", 4, "OPTIM.WARMUP_FACTOR", 0.2])  # fmt: skip
    assert optim.get_epoch_lr(0) == pytest.approx(0.2)
    assert optim.get_epoch_lr(2) == pytest.approx(0.8 * 0.6)
    assert optim.get_epoch_lr(4) == pytest.approx(0.6)


@pytest.mark.parametrize("epoch, factor", [(0, 1), (29.9, 1), (30, 0.1), (59, 0.1), (60, 0.01), (99, 0.01)])
def test_steps_multiply_from_their_epoch_on(fresh_cfg, epoch, factor):
    fresh_cfg.merge_from_list(["OPTIM.LR_POLICY", "steps", "OPTIM.STEPS", [0, 30, 60], "OPTIM.BASE_LR", 1.0])
    assert optim.get_epoch_lr(epoch) == pytest.approx(factor)


def test_exponential_is_a_straight_line_in_logarithms(fresh_cfg):
    fresh_cfg.merge_from_list(
        ["OPTIM.LR_POLICY", "exp", "OPTIM.MIN_LR", 0.01, "OPTIM.MAX_EPOCH", 10, "OPTIM.BASE_LR", 1.0]
    )
    assert [round(math.log10(optim.get_epoch_lr(e)), 9) for e in (0, 5, 10)] == [0, -1, -2]
