"""ResNet and ResNeXt for ImageNet and CIFAR (He et al., arXiv 1512.03385; Xie et al., arXiv 1611.05431)."""

from typing import Dict

from pycls.core.config import cfg
from pycls.core.errors import UserError, look_up
from pycls.models.anynet import _shortcut, head, res_stem_cifar, res_stem_in
from pycls.models.blocks import ConvNet, ResBlock, stage
from pycls.models.layers import Act, Chain, Conv, Norm2d, Residual, Spec

# Blocks per stage on ImageNet, by number of weight layers.
_DEPTHS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


def basic_transform(w_in, w_out, stride, _params) -> Chain:
    """Two 3x3 convs."""
    return Chain(
        a=Conv(w_in, w_out, 3, stride=stride), a_bn=Norm2d(w_out), a_af=Act(),
        b=Conv(w_out, w_out, 3), b_bn=Norm2d(w_out, final=True),
    )  # fmt: skip


def bottleneck_transform(w_in, w_out, stride, params) -> Chain:
    """1x1, 3x3 in groups, 1x1; the stride is on the first or (RESNET.STRIDE_1X1 False) on the 3x3."""
    w_b, groups = params["w_b"], params["groups"]
    first, middle = (stride, 1) if params["stride_1x1"] else (1, stride)
    return Chain(
        a=Conv(w_in, w_b, 1, stride=first), a_bn=Norm2d(w_b), a_af=Act(),
        b=Conv(w_b, w_b, 3, stride=middle, groups=groups), b_bn=Norm2d(w_b), b_af=Act(),
        c=Conv(w_b, w_out, 1), c_bn=Norm2d(w_out, final=True),
    )  # fmt: skip


_transforms = {"basic_transform": basic_transform, "bottleneck_transform": bottleneck_transform}


def res_block(w_in, w_out, stride, params) -> Residual:
    """A transform and its shortcut."""
    f = params["transform"](w_in, w_out, stride, params)
    return Residual(ResBlock, shortcut=_shortcut(w_in, w_out, stride), branch={"f": f}, after={"af": Act()})


class ResNet(ConvNet):
    """Images (batch, 3, side, side) -> logits (batch, classes). CIFAR's form if the data set is a CIFAR."""

    @staticmethod
    def get_params() -> Dict:
        r = cfg.RESNET
        return {
            "cifar": "cifar" in cfg.TRAIN.DATASET,
            "depth": cfg.MODEL.DEPTH,
            "transform": look_up(_transforms, r.TRANS_FUN, "RESNET.TRANS_FUN"),
            "groups": r.NUM_GROUPS,
            "width_per_group": r.WIDTH_PER_GROUP,
            "stride_1x1": r.STRIDE_1X1,
            "num_classes": cfg.MODEL.NUM_CLASSES,
        }

    @staticmethod
    def check_params(p: Dict) -> None:
        """Raises UserError for a depth that has no network."""
        if p["cifar"] and (p["depth"] < 8 or (p["depth"] - 2) % 6):
            raise UserError(
                f"MODEL.DEPTH: {p['depth']} is not allowed for a ResNet on CIFAR, it must be 6n + 2, e.g. 56"
            )
        if not p["cifar"] and p["depth"] not in _DEPTHS:
            raise UserError(
                f"MODEL.DEPTH: {p['depth']} is not allowed for a ResNet; allowed: {', '.join(map(str, _DEPTHS))}"
            )

    @staticmethod
    def specs(p: Dict) -> Dict[str, Spec]:
        """The layers, stated once: the modules and their complexity both follow from this."""
        if p["cifar"]:
            stem, widths = res_stem_cifar(3, 16), (16, 32, 64)
            depths, bottlenecks = [(p["depth"] - 2) // 6] * 3, (None,) * 3
        else:
            stem, widths = res_stem_in(3, 64), (256, 512, 1024, 2048)
            depths, w_b = _DEPTHS[p["depth"]], p["width_per_group"] * p["groups"]
            bottlenecks = (w_b, 2 * w_b, 4 * w_b, 8 * w_b)
        parts, w_in = {"stem": stem}, 16 if p["cifar"] else 64
        for i, (depth, w_out, w_b) in enumerate(zip(depths, widths, bottlenecks)):
            params = {**p, "w_b": w_b}
            parts[f"s{i + 1}"] = stage(res_block, w_in, w_out, 2 if i else 1, depth, params)
            w_in = w_out
        return {**parts, "head": head(w_in, 0, p["num_classes"])}
