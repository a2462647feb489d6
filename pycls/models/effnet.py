"""EfficientNet (Tan and Le, arXiv 1905.11946)."""

from functools import partial
from typing import Dict

from torch import nn

from pycls.core.config import cfg
from pycls.core.errors import UserError
from pycls.models.anynet import AnyHead, simple_stem_in
from pycls.models.blocks import ConvNet, drop_connect, squeeze_excite, stage
from pycls.models.layers import Act, Chain, Conv, Dropout, GlobalPool, Linear, Norm2d, Spec


class MBConv(nn.Sequential):
    """Mobile inverted bottleneck; with a shortcut where the shape is kept, dropped at random in training."""

    def __init__(self, has_skip: bool, drop_rate: float):
        super().__init__()
        self.has_skip, self.drop_rate = has_skip, drop_rate

    def forward(self, x):
        """x: (batch, w_in, h, w); returns (batch, w_out, h / stride, w / stride)."""
        f_x = super().forward(x)
        if not self.has_skip:
            return f_x
        if self.training and self.drop_rate:
            f_x = drop_connect(f_x, self.drop_rate)
        return x + f_x


def mb_conv(w_in, w_out, stride, params) -> Chain:
    """1x1 expansion (left out where it changes nothing), depth-wise conv, squeeze-and-excitation, linear 1x1."""
    w_exp = int(w_in * params["exp_r"])
    has_skip, expansion = stride == 1 and w_in == w_out, {}
    if w_exp != w_in:
        expansion = {"exp": Conv(w_in, w_exp, 1), "exp_bn": Norm2d(w_exp), "exp_af": Act()}
    return Chain(
        partial(MBConv, has_skip, params["dc_ratio"]),
        **expansion,
        dwise=Conv(w_exp, w_exp, params["kernel"], stride=stride, groups=w_exp), dwise_bn=Norm2d(w_exp), dwise_af=Act(),
        se=squeeze_excite(w_exp, int(w_in * params["se_r"])),
        lin_proj=Conv(w_exp, w_out, 1), lin_proj_bn=Norm2d(w_out, final=has_skip),
    )  # fmt: skip


class EffNet(ConvNet):
    """Images (batch, 3, side, side) -> logits (batch, classes)."""

    @staticmethod
    def get_params() -> Dict:
        e = cfg.EN
        return {
            "stem_w": e.STEM_W, "ds": e.DEPTHS, "ws": e.WIDTHS, "exp_rs": e.EXP_RATIOS, "se_r": e.SE_R, "ss": e.STRIDES,
            "ks": e.KERNELS, "head_w": e.HEAD_W, "dc_ratio": e.DC_RATIO, "dropout": e.DROPOUT_RATIO,
            "num_classes": cfg.MODEL.NUM_CLASSES,
        }  # fmt: skip

    @staticmethod
    def check_params(p: Dict) -> None:
        """Raises UserError where the lists of stages don't go together."""
        lengths = [len(p[name]) for name in ("ds", "ws", "exp_rs", "ss", "ks")]
        if not lengths[0] or len(set(lengths)) > 1:
            raise UserError(
                "EN.DEPTHS, WIDTHS, EXP_RATIOS, STRIDES and KERNELS must be equally long and not empty, not of "
                f"{', '.join(map(str, lengths))} entries"
            )
        if any(k % 2 == 0 for k in p["ks"]):
            raise UserError(f"EN.KERNELS: {p['ks']} must all be odd")

    @staticmethod
    def specs(p: Dict) -> Dict[str, Spec]:
        """The layers, stated once: the modules and their complexity both follow from this."""
        parts, w_in = {"stem": simple_stem_in(3, p["stem_w"])}, p["stem_w"]
        for i, (d, w, exp_r, s, k) in enumerate(zip(p["ds"], p["ws"], p["exp_rs"], p["ss"], p["ks"]), 1):
            params = {"exp_r": exp_r, "kernel": k, "se_r": p["se_r"], "dc_ratio": p["dc_ratio"]}
            parts[f"s{i}"] = stage(mb_conv, w_in, w, s, d, params)
            w_in = w
        parts["head"] = Chain(
            AnyHead,
            conv=Conv(w_in, p["head_w"], 1), conv_bn=Norm2d(p["head_w"]), conv_af=Act(),
            avg_pool=GlobalPool(),
            dropout=Dropout(p["dropout"]) if p["dropout"] > 0 else None,
            fc=Linear(p["head_w"], p["num_classes"]),
        )  # fmt: skip
        return parts
