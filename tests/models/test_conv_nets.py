"""Conv nets: refusals, scaling, initialisation, and what plug-ins import."""

import re

import pytest
import torch

from pycls.core import builders, config, net
from pycls.core.errors import UserError
from pycls.models import blocks, regnet, scaler
from pycls.models.anynet import AnyNet, res_bottleneck_linear_block
from pycls.models.effnet import mb_conv

ANY = ["MODEL.TYPE", "anynet", "ANYNET.DEPTHS", [1, 2], "ANYNET.WIDTHS", [8, 16], "ANYNET.STRIDES", [1, 2],
       "ANYNET.BOT_MULS", [1.0, 0.5], "ANYNET.GROUP_WS", [4, 4], "ANYNET.STEM_TYPE", "res_stem_cifar",
       "ANYNET.STEM_W", 8,
       "TRAIN.IM_SIZE", 16]  # fmt: skip
BLOCKS = ["vanilla_block", "res_basic_block", "res_bottleneck_block", "res_bottleneck_linear_block"]


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("extra", [[], ["ANYNET.SE_ON", True], ["ANYNET.HEAD_W", 24], ["MODEL.ACTIVATION_FUN", "silu"]])
def test_every_block_trains_and_is_counted(fresh_cfg, block, extra):
    fresh_cfg.merge_from_list([*ANY, "ANYNET.BLOCK_TYPE", block, *extra])
    model = builders.build_model().train()
    model(torch.randn(4, 3, 16, 16)).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert net.complexity(AnyNet)["params"] == sum(p.numel() for p in model.parameters())


BAD = {
    "block": ([*ANY, "ANYNET.BLOCK_TYPE", "res_botleneck_block"], "did you mean res_bottleneck_block?"),
    "stem": ([*ANY, "ANYNET.STEM_TYPE", "res_stem"], "ANYNET.STEM_TYPE"),
    "lists": ([*ANY, "ANYNET.WIDTHS", [8]], "equally long"),
    "groups": ([*ANY, "ANYNET.GROUP_WS", [3, 4]], "3 in stage 1"),
    "no group widths": ([*ANY, "ANYNET.GROUP_WS", []], "ANYNET.GROUP_WS"),
    "w0": (["MODEL.TYPE", "regnet", "REGNET.W0", 20], "REGNET.W0: 20"),
    "wm": (["MODEL.TYPE", "regnet", "REGNET.WM", 1.0], "REGNET.WM"),
    "depth": (["MODEL.TYPE", "resnet", "MODEL.DEPTH", 34], "allowed: 50, 101, 152"),
    "cifar depth": (["MODEL.TYPE", "resnet", "MODEL.DEPTH", 51, "TRAIN.DATASET", "cifar10"], "6n + 2"),
    "activation": ([*ANY, "MODEL.ACTIVATION_FUN", "mish"], "MODEL.ACTIVATION_FUN"),
    "multiplier": (["MODEL.TYPE", "regnet", "REGNET.BOT_MUL", 1.5], "BOT_MULS): 1.5 must be a whole number or below 1"),
    "squeezed away": (["MODEL.TYPE", "regnet", "REGNET.SE_ON", True, "REGNET.SE_R", 0.001], "raise SE_R"),
    "effnet lists": (["MODEL.TYPE", "effnet"], "equally long"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_nets_are_refused_by_key(fresh_cfg, name):
    words, message = BAD[name]
    fresh_cfg.merge_from_list(words)
    with pytest.raises(UserError, match=re.escape(message)):
        builders.build_model()


def test_last_norm_of_each_block_can_start_at_zero(fresh_cfg):
    fresh_cfg.merge_from_list([*ANY, "BN.ZERO_INIT_FINAL_GAMMA", True])
    model = builders.build_model().train()
    assert not model.s1.b1.f.c_bn.weight.any() and model.s1.b1.f.a_bn.weight.all()


@pytest.mark.parametrize("make", [res_bottleneck_linear_block, mb_conv])
def test_blocks_without_a_shortcut_never_start_at_zero(fresh_cfg, make):
    fresh_cfg.BN.ZERO_INIT_FINAL_GAMMA = True
    params = {"bot_mul": 1.0, "group_w": 4, "se_r": 0.25, "exp_r": 4, "kernel": 3, "dc_ratio": 0.0}
    for width, starts_at_zero in ((8, True), (16, False)):
        block = make(8, width, 1, params).build().apply(blocks.init_weights)
        weights = [p for name, p in block.named_parameters() if name.endswith("weight")]
        assert any(not p.any() for p in weights) is starts_at_zero


def test_a_regnet_and_its_anynet_are_the_same_network(fresh_cfg):
    fresh_cfg.merge_from_list(["MODEL.TYPE", "regnet", "REGNET.DEPTH", 6, "REGNET.W0", 16, "REGNET.SE_ON", True])
    torch.manual_seed(0)
    before, counted = builders.build_model(), net.complexity(builders.get_model())
    regnet.regnet_cfg_to_anynet_cfg()
    after = builders.build_model()
    after.load_state_dict(before.state_dict())
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(before.eval()(x), after.eval()(x))
    assert net.complexity(builders.get_model()) == counted


def test_scaling_multiplies_flops_by_about_the_factor(fresh_cfg):
    fresh_cfg.merge_from_list(["MODEL.TYPE", "regnet", "MODEL.SCALING_TYPE", "d1_w8_g8_r1", "MODEL.SCALING_FACTOR", 4.0,
                               "REGNET.DEPTH", 16, "REGNET.W0", 48, "REGNET.GROUP_W", 16])  # fmt: skip
    before = net.complexity(builders.get_model())["flops"]
    scaler.scale_model()
    config.validate_cfg()
    assert net.complexity(builders.get_model())["flops"] / before == pytest.approx(4.0, rel=0.25)


@pytest.mark.parametrize("text", ["", "x", "d1_w", "dd", "d1w2", "d0_w0"])
def test_bad_scaling_types_are_refused(text):
    with pytest.raises(UserError, match="MODEL.SCALING_TYPE"):
        scaler.parse_scaling_type(text)


def test_helpers_of_plug_ins_build_and_count_alike(fresh_cfg):
    cx = {"h": 17, "w": 17, "flops": 0, "params": 0, "acts": 0}
    layers = [blocks.conv2d(3, 8, 3, stride=2), blocks.norm2d(8), blocks.activation(), blocks.pool2d(8, 3, stride=2)]
    x = torch.nn.Sequential(*layers, blocks.gap2d(8))(torch.randn(2, 3, 17, 17))
    assert blocks.linear(8, 5, bias=True)(x.flatten(1)).shape == (2, 5)
    cx = blocks.pool2d_cx(blocks.norm2d_cx(blocks.conv2d_cx(cx, 3, 8, 3, stride=2), 8), 8, 3, stride=2)
    cx = blocks.linear_cx(blocks.gap2d_cx(cx, 8), 8, 5, bias=True)
    assert cx == {"h": 1, "w": 1, "flops": 216 * 81 + 45, "params": 216 + 16 + 45, "acts": 8 * 81 + 8 * 25 + 5}


def test_squeeze_and_excitation_of_plug_ins_builds_and_counts_alike(fresh_cfg):
    se, cx = blocks.SE(8, 2), {"h": 5, "w": 5, "flops": 0, "params": 0, "acts": 0}
    assert se(torch.randn(2, 8, 5, 5)).shape == (2, 8, 5, 5)
    parameters = sum(p.numel() for p in se.parameters())
    assert blocks.SE.complexity(cx, 8, 2) == {"h": 5, "w": 5, "flops": 42, "params": parameters, "acts": 10}
