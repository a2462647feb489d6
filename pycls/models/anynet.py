"""AnyNet: stem, stages of equal blocks, head (Radosavovic et al., arXiv 2003.13678).

Every block and stem is a function from its sizes to a spec (see `layers.py`).
"""

from typing import Callable, Dict

from torch import nn

from pycls.core.config import cfg
from pycls.core.errors import UserError, look_up
from pycls.models.blocks import ConvNet, ResBlock, squeeze_excite, stage
from pycls.models.layers import Act, Chain, Conv, GlobalPool, Linear, MaxPool, Norm2d, Residual, Spec

# -------------------------------------------------------------------------- stems


def res_stem_cifar(w_in: int, w_out: int) -> Chain:
    """3x3, for small images."""
    return Chain(conv=Conv(w_in, w_out, 3), bn=Norm2d(w_out), af=Act())


def res_stem_in(w_in: int, w_out: int) -> Chain:
    """7x7 with stride 2, then 3x3 max pooling with stride 2 (ResNet on ImageNet)."""
    return Chain(conv=Conv(w_in, w_out, 7, stride=2), bn=Norm2d(w_out), af=Act(), pool=MaxPool(w_out, 3, stride=2))


def simple_stem_in(w_in: int, w_out: int) -> Chain:
    """3x3 with stride 2."""
    return Chain(conv=Conv(w_in, w_out, 3, stride=2), bn=Norm2d(w_out), af=Act())


_stems = {"res_stem_cifar": res_stem_cifar, "res_stem_in": res_stem_in, "simple_stem_in": simple_stem_in}


def get_stem_fun(stem_type: str) -> Callable[[int, int], Spec]:
    """The stem that ANYNET.STEM_TYPE names."""
    return look_up(_stems, stem_type, "ANYNET.STEM_TYPE")


# ------------------------------------------------------------------------- blocks


def _shortcut(w_in: int, w_out: int, stride: int) -> Dict[str, Spec]:
    if w_in == w_out and stride == 1:
        return {}
    return {"proj": Conv(w_in, w_out, 1, stride=stride), "bn": Norm2d(w_out)}


def vanilla_block(w_in, w_out, stride, _params) -> Chain:
    """[3x3 conv, norm, activation] twice, no shortcut."""
    return Chain(
        a=Conv(w_in, w_out, 3, stride=stride), a_bn=Norm2d(w_out), a_af=Act(),
        b=Conv(w_out, w_out, 3), b_bn=Norm2d(w_out), b_af=Act(),
    )  # fmt: skip


def res_basic_block(w_in, w_out, stride, _params) -> Residual:
    """Two 3x3 convs and a shortcut (arXiv 1512.03385)."""
    f = Chain(
        a=Conv(w_in, w_out, 3, stride=stride), a_bn=Norm2d(w_out), a_af=Act(),
        b=Conv(w_out, w_out, 3), b_bn=Norm2d(w_out, final=True),
    )  # fmt: skip
    return Residual(ResBlock, shortcut=_shortcut(w_in, w_out, stride), branch={"f": f}, after={"af": Act()})


def _bottleneck(w_in, w_out, stride, params, shortcut=True) -> Chain:
    """1x1, 3x3 in groups (with the stride), squeeze-and-excitation, 1x1."""
    w_b = int(round(w_out * params["bot_mul"]))
    se = squeeze_excite(w_b, int(round(w_in * params["se_r"]))) if params["se_r"] else None
    return Chain(
        a=Conv(w_in, w_b, 1), a_bn=Norm2d(w_b), a_af=Act(),
        b=Conv(w_b, w_b, 3, stride=stride, groups=w_b // params["group_w"]), b_bn=Norm2d(w_b), b_af=Act(),
        se=se,
        c=Conv(w_b, w_out, 1), c_bn=Norm2d(w_out, final=shortcut),
    )  # fmt: skip


def res_bottleneck_block(w_in, w_out, stride, params) -> Residual:
    """Bottleneck with a shortcut: the block of ResNet-50, ResNeXt and RegNet."""
    f = _bottleneck(w_in, w_out, stride, params)
    return Residual(ResBlock, shortcut=_shortcut(w_in, w_out, stride), branch={"f": f}, after={"af": Act()})


class LinearResBlock(nn.Sequential):
    """x + f(x), without an activation after the sum."""

    def forward(self, x):
        """x: (batch, w, h, w); returns the same shape."""
        return x + self.f(x)


def res_bottleneck_linear_block(w_in, w_out, stride, params) -> Residual:
    """Bottleneck without a final activation, with a shortcut only where the shape is kept (arXiv 1801.04381)."""
    keeps = w_in == w_out and stride == 1
    # Without a shortcut a last norm that starts at 0 would let nothing through.
    f = _bottleneck(w_in, w_out, stride, params, shortcut=keeps)
    return Residual(LinearResBlock if keeps else nn.Sequential, branch={"f": f})


_blocks = {
    "vanilla_block": vanilla_block,
    "res_basic_block": res_basic_block,
    "res_bottleneck_block": res_bottleneck_block,
    "res_bottleneck_linear_block": res_bottleneck_linear_block,
}


def get_block_fun(block_type: str) -> Callable[..., Spec]:
    """The block that ANYNET.BLOCK_TYPE names."""
    return look_up(_blocks, block_type, "ANYNET.BLOCK_TYPE")


# -------------------------------------------------------------------------- model


class AnyHead(nn.Sequential):
    """Mean over positions and a classifier; before them a 1x1 conv if head_w > 0."""

    def forward(self, x):
        """x: (batch, channels, h, w); returns logits (batch, classes)."""
        for name, layer in self.named_children():
            x = layer(x.flatten(1) if name == "fc" else x)
        return x


def head(w_in: int, head_w: int, classes: int) -> Chain:
    """Spec of AnyHead."""
    conv = {"conv": Conv(w_in, head_w, 1), "bn": Norm2d(head_w), "af": Act()} if head_w else {}
    return Chain(AnyHead, **conv, avg_pool=GlobalPool(), fc=Linear(head_w or w_in, classes))


class AnyNet(ConvNet):
    """Images (batch, 3, side, side) -> logits (batch, classes)."""

    @staticmethod
    def get_params() -> Dict:
        a, nones = cfg.ANYNET, [None] * len(cfg.ANYNET.DEPTHS)
        return {
            "stem_type": a.STEM_TYPE,
            "stem_w": a.STEM_W,
            "block_type": a.BLOCK_TYPE,
            "depths": a.DEPTHS,
            "widths": a.WIDTHS,
            "strides": a.STRIDES,
            "bot_muls": a.BOT_MULS or nones,
            "group_ws": a.GROUP_WS or nones,
            "head_w": a.HEAD_W,
            "se_r": a.SE_R if a.SE_ON else 0,
            "num_classes": cfg.MODEL.NUM_CLASSES,
        }

    @staticmethod
    def check_params(p: Dict) -> None:
        """Raises UserError where the lists of stages don't go together."""
        lengths = {name: len(p[name]) for name in ("depths", "widths", "strides", "bot_muls", "group_ws")}
        if not p["depths"] or len(set(lengths.values())) > 1:
            raise UserError(
                "ANYNET.DEPTHS, WIDTHS, STRIDES, BOT_MULS and GROUP_WS must be equally long and not empty "
                f"(the last two may be left out), not of {', '.join(map(str, lengths.values()))} entries"
            )
        for i, (w, b, g) in enumerate(zip(p["widths"], p["bot_muls"], p["group_ws"]), 1):
            if "bottleneck" not in p["block_type"]:
                continue
            if b is None or g is None:
                raise UserError(f"ANYNET.BOT_MULS and ANYNET.GROUP_WS are needed by the block {p['block_type']}")
            if round(w * b) % g:
                raise UserError(
                    f"ANYNET.GROUP_WS: {g} in stage {i} does not divide the bottleneck width {round(w * b)}"
                )

    @staticmethod
    def specs(p: Dict) -> Dict[str, Spec]:
        """The layers, stated once: the modules and their complexity both follow from this."""
        parts = {"stem": get_stem_fun(p["stem_type"])(3, p["stem_w"])}
        block, w_in = get_block_fun(p["block_type"]), p["stem_w"]
        stages = zip(p["depths"], p["widths"], p["strides"], p["bot_muls"], p["group_ws"])
        for i, (depth, w_out, stride, bot_mul, group_w) in enumerate(stages, 1):
            params = {"bot_mul": bot_mul, "group_w": group_w, "se_r": p["se_r"]}
            parts[f"s{i}"] = stage(block, w_in, w_out, stride, depth, params)
            w_in = w_out
        parts["head"] = head(w_in, p["head_w"], p["num_classes"])
        return parts
