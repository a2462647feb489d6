"""What the conv nets share: squeeze-and-excitation, residual sums, initialisation; and PyCls's own helper names."""

from typing import Dict, List, Tuple, Union

import numpy as np
import torch
from torch import nn

from pycls.core.config import cfg
from pycls.core.errors import UserError
from pycls.models.layers import Act, Chain, Conv, GlobalPool, Linear, MaxPool, Norm2d, Patchify, Scaled, Spec
from pycls.models.layers import List as Listed

# ------------------------------------------------------------------------ modules


class SE(nn.Sequential):
    """Squeeze-and-excitation (Hu et al., arXiv 1709.01507): x * f_ex(mean of x).

    `squeeze_excite` states its layers; `SE(w_in, w_se)` builds and `SE.complexity(cx, w_in, w_se)` counts them, for
    plug-ins.
    """

    def __init__(self, w_in: int = 0, w_se: int = 0):
        super().__init__()
        parts = squeeze_excite(w_in, w_se).parts if w_in else {}
        for name, spec in parts.items():
            self.add_module(name, spec.build())

    @staticmethod
    def complexity(cx: Dict, w_in: int, w_se: int) -> Dict:
        """Adds an SE to cx."""
        return _counted(squeeze_excite(w_in, w_se), cx)

    def forward(self, x):
        """x: (batch, channels, h, w); returns the same shape."""
        return x * self.f_ex(self.avg_pool(x))


def squeeze_excite(w_in: int, w_se: int) -> Scaled:
    """Spec of SE on `w_in` channels, squeezed to `w_se`."""
    if w_se < 1:
        raise UserError("SE_R (of REGNET, ANYNET or EN): squeeze-and-excitation is left without channels; raise SE_R")
    excite = Listed(Conv(w_in, w_se, 1, bias=True), Act(), Conv(w_se, w_in, 1, bias=True), Act("sigmoid"))
    return Scaled(SE, avg_pool=GlobalPool(), f_ex=excite)


class ResBlock(nn.Sequential):
    """activation(shortcut(x) + f(x)); the shortcut is x, or norm and projection of it where the shape changes."""

    def forward(self, x):
        """x: (batch, w_in, h, w); returns (batch, w_out, h / stride, w / stride)."""
        shortcut = self.bn(self.proj(x)) if "proj" in self._modules else x
        return self.af(shortcut + self.f(x))


def drop_path(x: torch.Tensor, rate: Union[float, torch.Tensor], batch_dim: int = 0) -> torch.Tensor:
    """Zeroes whole samples with chance `rate` (0 to below 1) and scales the others up (stochastic depth, arXiv
    1603.09382)."""
    shape = [1] * x.dim()
    shape[batch_dim] = x.shape[batch_dim]
    kept = torch.rand(shape, device=x.device) >= rate
    return x * (kept / (1.0 - rate)).to(x.dtype)


drop_connect = drop_path


def init_weights(m: nn.Module) -> None:
    """PyCls's initialisation of a conv net's layer (He et al., arXiv 1502.01852, by fan-out); for `model.apply`."""
    if isinstance(m, nn.Conv2d):
        fan_out = m.kernel_size[0] * m.kernel_size[1] * m.out_channels
        nn.init.normal_(m.weight, std=(2.0 / fan_out) ** 0.5)
    elif isinstance(m, nn.BatchNorm2d):
        zero = cfg.BN.ZERO_INIT_FINAL_GAMMA and getattr(m, "final_bn", False)
        nn.init.constant_(m.weight, 0.0 if zero else 1.0)
        nn.init.zeros_(m.bias)
    elif isinstance(m, nn.Linear):
        nn.init.normal_(m.weight, std=0.01)
        nn.init.zeros_(m.bias)


class ConvNet(nn.Sequential):
    """A conv net stated as specs: images (batch, 3, side, side) -> logits (batch, classes).

    A subclass says in `get_params` what the config asks for, in `check_params` what does not go together, and in
    `specs` what its layers are; module and complexity both follow.
    """

    @staticmethod
    def get_params() -> Dict:
        """What the config says, as plain values."""
        raise NotImplementedError

    @staticmethod
    def check_params(p: Dict) -> None:
        """Raises UserError where params don't go together."""

    @staticmethod
    def specs(p: Dict) -> Dict[str, Spec]:
        """The layers, by name and in order."""
        raise NotImplementedError

    def __init__(self, params: Dict = None):
        super().__init__()
        p = self.get_params() if params is None else params
        self.check_params(p)
        for name, spec in self.specs(p).items():
            self.add_module(name, spec.build())
        self.apply(init_weights)

    def repeated_blocks(self) -> List[nn.Module]:
        """The blocks of all stages (s1, s2, ...)."""
        return [block for name, s in self.named_children() if name[1:].isdigit() for block in s.children()]

    @classmethod
    def complexity(cls, cx: Dict, params: Dict = None) -> Dict:
        """Adds flops, params and acts of one image to cx (PyCls's conventions)."""
        p = cls.get_params() if params is None else params
        cls.check_params(p)
        for spec in cls.specs(p).values():
            spec.count(cx)
        return cx


# ----------------------------------------------------------------- width arithmetic


def adjust_block_compatibility(ws, bs, gs) -> Tuple[List[int], List[float], List[int]]:
    """Makes widths, bottleneck multipliers and group widths go together (RegNet, arXiv 2003.13678, as PyCls)."""
    assert len(ws) == len(bs) == len(gs) and all(w > 0 and b > 0 and g > 0 for w, b, g in zip(ws, bs, gs))
    if not all(b < 1 or b % 1 == 0 for b in bs):
        raise UserError(f"REGNET.BOT_MUL (or ANYNET.BOT_MULS): {max(bs)} must be a whole number or below 1")
    vs = [int(max(1, w * b)) for w, b in zip(ws, bs)]
    gs = [int(min(g, v)) for g, v in zip(gs, vs)]
    ms = [int(np.lcm(g, int(b))) if b > 1 else g for g, b in zip(gs, bs)]
    vs = [max(m, int(round(v / m) * m)) for v, m in zip(vs, ms)]
    ws = [int(v / b) for v, b in zip(vs, bs)]
    return ws, bs, gs


# ------------------------------------------------------- PyCls's names, for plug-ins


def conv2d(w_in, w_out, k, *, stride=1, groups=1, bias=False) -> nn.Module:
    """A 2-d convolution with "same" padding."""
    return Conv(w_in, w_out, k, stride, groups, bias).build()


def norm2d(w_in) -> nn.Module:
    """A batch norm with the config's epsilon and momentum."""
    return Norm2d(w_in).build()


def pool2d(_w_in, k, *, stride=1) -> nn.Module:
    """A max pooling with "same" padding."""
    return MaxPool(_w_in, k, stride).build()


def gap2d(_w_in) -> nn.Module:
    """A global average pooling."""
    return GlobalPool().build()


def linear(w_in, w_out, *, bias=False) -> nn.Module:
    """A fully connected layer."""
    return Linear(w_in, w_out, bias).build()


def activation(activation_fun=None) -> nn.Module:
    """The activation that MODEL.ACTIVATION_FUN (or the argument) names."""
    return Act(activation_fun).build()


def layernorm(w_in) -> nn.Module:
    """A layer norm with the config's epsilon."""
    return nn.LayerNorm(w_in, eps=cfg.LN.EPS)


def patchify2d(w_in, w_out, k, *, bias=True) -> nn.Module:
    """A convolution whose kernel is its stride."""
    return nn.Conv2d(w_in, w_out, k, k, bias=bias)


def _counted(spec, cx: Dict) -> Dict:
    spec.count(cx)
    return cx


def conv2d_cx(cx, w_in, w_out, k, *, stride=1, groups=1, bias=False) -> Dict:
    """Adds a conv2d to cx."""
    return _counted(Conv(w_in, w_out, k, stride, groups, bias), cx)


def norm2d_cx(cx, w_in) -> Dict:
    """Adds a norm2d to cx."""
    return _counted(Norm2d(w_in), cx)


def pool2d_cx(cx, w_in, k, *, stride=1) -> Dict:
    """Adds a pool2d to cx."""
    return _counted(MaxPool(w_in, k, stride), cx)


def gap2d_cx(cx, _w_in) -> Dict:
    """Adds a gap2d to cx."""
    return _counted(GlobalPool(), cx)


def linear_cx(cx, w_in, w_out, *, bias=False, num_locations=1) -> Dict:
    """Adds a linear to cx, used at `num_locations` places."""
    return _counted(Linear(w_in, w_out, bias, num_locations), cx)


def patchify2d_cx(cx, w_in, w_out, k, *, bias=True) -> Dict:
    """Adds a patchify2d to cx."""
    spec = Patchify(w_in, w_out, k)
    return _counted(spec if bias else Conv(w_in, w_out, k, k), cx)


def layernorm_cx(cx, w_in) -> Dict:
    """Adds a layernorm to cx."""
    return _counted(Norm2d(w_in), cx)


def stage(block, w_in: int, w_out: int, stride: int, depth: int, params) -> Chain:
    """Spec of `depth` blocks b1, b2, ...: the first one changes width and size, the others are alike."""
    first, other = block(w_in, w_out, stride, params), block(w_out, w_out, 1, params)
    return Chain(**{f"b{i + 1}": other if i else first for i in range(depth)})
