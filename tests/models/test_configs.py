"""Every config loads and validates; every published model has the published size."""

import glob
import json
import os

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from pycls.core import builders, config, net

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
with open(os.path.join(ROOT, "dev", "model_complexity.json")) as f:
    PUBLISHED = json.load(f)
ALL = sorted(os.path.relpath(p, ROOT) for p in glob.glob(os.path.join(ROOT, "configs", "**", "*.yaml"), recursive=True))

# One of each family and form, small enough to trace.
TRACED = [
    "configs/archive/cifar/anynet/V-56_nds_1gpu.yaml",
    "configs/archive/cifar/resnet/R-56_nds_1gpu.yaml",
    "configs/dds_baselines/regnetx/RegNetX-400MF_dds_8gpu.yaml",
    "configs/dds_baselines/regnety/RegNetY-800MF_dds_8gpu.yaml",
    "configs/dds_baselines/resnext/X-50-32x4d_dds_8gpu.yaml",
    "configs/archive/imagenet/resnet/R-50-1x64d_step_8gpu.yaml",
    "configs/dds_baselines/effnet/EN-B0_dds_8gpu.yaml",
    "configs/vitconv_baselines/vit/ViT-P-1.0GF_adamw_8gpus.yaml",
    "configs/vitconv_baselines/vit/ViT-C-1.0GF_adamw_8gpus.yaml",
]


def load(path):
    config.load_cfg(os.path.join(ROOT, path))
    config.validate_cfg()


def test_all_published_configs_are_here():
    assert len(PUBLISHED) == 91 and set(PUBLISHED) <= set(ALL)


@pytest.mark.parametrize("path", ALL)
def test_config_is_valid_and_its_model_has_the_published_size(fresh_cfg, path):
    load(path)
    counted = net.complexity(builders.get_model())
    if path in PUBLISHED:
        assert counted == PUBLISHED[path]


@pytest.mark.parametrize("path", TRACED)
def test_counted_by_hand_is_what_a_traced_forward_counts(fresh_cfg, path):
    """The oracle: multiply-adds of a real forward pass (biases, which it leaves out, added by hand)."""
    load(path)
    # The counter knows matrix products, not the CPU's fused attention.
    fresh_cfg.VIT.ATTENTION = "math"
    counted = net.complexity(builders.get_model())
    model = builders.build_model().eval()
    bias_flops = acts = 0

    def look(module, inputs, output):
        nonlocal bias_flops, acts
        acts += output.numel()
        bias_flops += output.numel() if getattr(module, "bias", None) is not None else 0

    kinds = (torch.nn.Conv2d, torch.nn.Linear, torch.nn.MaxPool2d)
    for module in model.modules():
        if isinstance(module, kinds):
            module.register_forward_hook(look)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 3, config.cfg.TRAIN.IM_SIZE, config.cfg.TRAIN.IM_SIZE))
    if config.cfg.MODEL.TYPE == "vit":
        # Packed projections and patches are plain matrix products here, without a module to hook.
        v, tokens = config.cfg.VIT, (config.cfg.TRAIN.IM_SIZE // 16) ** 2 + 1
        packed = 3 * v.HIDDEN_DIM * tokens * v.NUM_LAYERS
        patches = v.HIDDEN_DIM * (tokens - 1) if v.STEM_TYPE == "patchify" else 0
        bias_flops += packed + patches
        acts += packed + patches + (v.NUM_HEADS * tokens**2 + v.HIDDEN_DIM * tokens) * v.NUM_LAYERS
    assert counted["flops"] == counter.get_total_flops() // 2 + bias_flops
    assert counted["acts"] == acts
    assert counted["params"] == sum(p.numel() for p in model.parameters())
