"""Compound scaling of a network in depth, width, group width and resolution (Dollar et al., arXiv 2103.06877)."""

import re
from typing import Tuple

from pycls.core.config import cfg
from pycls.core.errors import UserError
from pycls.models.blocks import adjust_block_compatibility
from pycls.models.regnet import regnet_cfg_to_anynet_cfg


def parse_scaling_type(text: str) -> Tuple[float, float, float, float]:
    """Weights of depth, width, group width and resolution.

    `d1_w8_g8_r1` gives them one by one; letters alone, as in `dwr`, weigh alike.

    Raises:
        UserError: neither form.
    """
    names = "dwgr"
    if re.fullmatch(rf"[{names}]+", text) and len(set(text)) == len(text):
        return tuple(1.0 if name in text else 0.0 for name in names)
    parts = [re.fullmatch(rf"([{names}])(\d+\.?\d*)", part) for part in text.split("_")]
    weights = {part[1]: float(part[2]) for part in parts if part}
    if not text or None in parts or len(weights) < len(parts) or not any(weights.values()):
        raise UserError(
            f"MODEL.SCALING_TYPE: {text!r} is not allowed; allowed: letters of dwgr, or weights as d1_w8_g8_r1"
        )
    return tuple(weights.get(name, 0.0) for name in names)


def get_scaling_factors(scaling_type: str, factor: float) -> Tuple[float, float, float, float]:
    """What depth, width, group width and resolution are multiplied by so that flops grow by about `factor`."""
    d, w, g, r = parse_scaling_type(scaling_type)
    total = d + w + r or g / 2 or 1.0
    return factor ** (d / total), factor ** (w / total / 2), factor ** (g / total / 2), factor ** (r / total / 2)


def _multiple(value: float, q: int) -> int:
    return max(q, int(round(value / q) * q))


def _group_width(g: float) -> int:
    """Group widths that run fast: 1 and 2 as they are, 4, then multiples of 8."""
    return int(max(1, round(g))) if g <= 2 else 4 if g <= 5 else _multiple(g, 8)


def scale_model() -> None:
    """Scales the global config's model by MODEL.SCALING_TYPE and MODEL.SCALING_FACTOR (PyCls).

    A RegNet becomes an AnyNet first.

    Raises:
        UserError: the model has no stages to scale.
    """
    if cfg.MODEL.TYPE not in ("anynet", "effnet", "regnet"):
        raise UserError(
            f"MODEL.TYPE: no scalable model: {cfg.MODEL.TYPE!r} can't be scaled; scalable: anynet, effnet, regnet"
        )
    d, w, g, r = get_scaling_factors(cfg.MODEL.SCALING_TYPE, cfg.MODEL.SCALING_FACTOR)
    if cfg.MODEL.TYPE == "regnet":
        regnet_cfg_to_anynet_cfg()
    node = cfg.ANYNET if cfg.MODEL.TYPE == "anynet" else cfg.EN
    node.DEPTHS = [max(1, round(depth * d)) for depth in node.DEPTHS]
    widths = [_multiple(width * w, 8) for width in node.WIDTHS]
    if cfg.MODEL.TYPE == "anynet":
        groups = node.GROUP_WS
        if groups:
            multipliers = node.BOT_MULS or [1.0] * len(groups)
            groups = [_group_width(width * g) for width in groups]
            widths, _, node.GROUP_WS = adjust_block_compatibility(widths, multipliers, groups)
    else:
        node.STEM_W, node.HEAD_W = _multiple(node.STEM_W * w, 8), _multiple(node.HEAD_W * w, 8)
    node.WIDTHS = widths
    cfg.TRAIN.IM_SIZE, cfg.TEST.IM_SIZE = (_multiple(size * r, 4) for size in (cfg.TRAIN.IM_SIZE, cfg.TEST.IM_SIZE))
