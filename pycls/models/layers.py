"""Layers stated once: from one statement follow both the module and its complexity.

A block describes its layers with the specs of this file instead of with `torch.nn` modules:

    def layers(w_in, w_out, stride):
        return Chain(a=Conv(w_in, w_out, 3, stride=stride), a_bn=Norm2d(w_out), a_af=Act())

`spec.build()` makes the module (`Conv` makes an `nn.Conv2d`, and so on; names become attribute names) and
`spec.count(cx)` adds flops (multiply-adds), params and activations for an input of cx["h"] x cx["w"] and leaves the
output size there. A spec is a small object: counting a whole network takes a fraction of a millisecond.

Three forms put specs together. `Chain` runs them one after the other. `Residual` adds a `shortcut` to a `branch` that
start from the same input. `Scaled` (squeeze-and-excitation) multiplies its input by what it computes from it.
"""

from typing import Callable, Dict

from torch import nn

from pycls.core.config import cfg
from pycls.core.errors import look_up

Complexity = Dict[str, int]


class Spec:
    """One layer, described."""

    __slots__ = ()

    def build(self) -> nn.Module:
        """The module."""
        raise NotImplementedError

    def count(self, cx: Complexity) -> None:
        """Adds this layer to cx and sets cx["h"], cx["w"] to its output size."""


def _odd(k: int) -> None:
    assert k % 2 == 1, f"Only odd kernels keep the grid aligned, not {k}."


class Conv(Spec):
    """2-d convolution with "same" padding (k-1)/2: output side floor((side-1)/stride)+1."""

    __slots__ = ("w_in", "w_out", "k", "stride", "groups", "bias")

    def __init__(self, w_in, w_out, k, stride=1, groups=1, bias=False):
        self.w_in, self.w_out, self.k, self.stride, self.groups, self.bias = w_in, w_out, k, stride, groups, bias

    def build(self):
        _odd(self.k)
        return nn.Conv2d(
            self.w_in, self.w_out, self.k, self.stride, (self.k - 1) // 2, groups=self.groups, bias=self.bias
        )

    def count(self, cx):
        h, w = (cx["h"] - 1) // self.stride + 1, (cx["w"] - 1) // self.stride + 1
        weights, area = self.k * self.k * self.w_in * self.w_out // self.groups, h * w
        bias = self.w_out if self.bias else 0
        cx["h"], cx["w"] = h, w
        cx["flops"] += (weights + bias) * area
        cx["params"] += weights + bias
        cx["acts"] += self.w_out * area


class Patchify(Spec):
    """Convolution whose kernel is its stride, with bias: cuts an image into patches and embeds each."""

    __slots__ = ("w_in", "w_out", "k")

    def __init__(self, w_in, w_out, k):
        self.w_in, self.w_out, self.k = w_in, w_out, k

    def build(self):
        return nn.Conv2d(self.w_in, self.w_out, self.k, self.k)

    def count(self, cx):
        cx["h"], cx["w"] = cx["h"] // self.k, cx["w"] // self.k
        area, weights = cx["h"] * cx["w"], (self.k * self.k * self.w_in + 1) * self.w_out
        cx["flops"] += weights * area
        cx["params"] += weights
        cx["acts"] += self.w_out * area


class Linear(Spec):
    """Fully connected layer on `tokens` vectors."""

    __slots__ = ("w_in", "w_out", "bias", "tokens")

    def __init__(self, w_in, w_out, bias=True, tokens=1):
        self.w_in, self.w_out, self.bias, self.tokens = w_in, w_out, bias, tokens

    def build(self):
        return nn.Linear(self.w_in, self.w_out, bias=self.bias)

    def count(self, cx):
        weights = (self.w_in + bool(self.bias)) * self.w_out
        cx["flops"] += weights * self.tokens
        cx["params"] += weights
        cx["acts"] += self.w_out * self.tokens


class Norm2d(Spec):
    """Batch norm over `w` channels; `final` marks a block's last one, which BN.ZERO_INIT_FINAL_GAMMA starts at 0."""

    __slots__ = ("w", "final")

    def __init__(self, w, final=False):
        self.w, self.final = w, final

    def build(self):
        norm = nn.BatchNorm2d(self.w, eps=cfg.BN.EPS, momentum=cfg.BN.MOM)
        norm.final_bn = self.final
        return norm

    def count(self, cx):
        cx["params"] += 2 * self.w


class LayerNorm(Spec):
    """Layer norm over vectors of `w`."""

    __slots__ = ("w",)

    def __init__(self, w):
        self.w = w

    def build(self):
        return nn.LayerNorm(self.w, eps=cfg.LN.EPS)

    def count(self, cx):
        cx["params"] += 2 * self.w


class MaxPool(Spec):
    """Max pooling of an odd kernel."""

    __slots__ = ("w", "k", "stride")

    def __init__(self, w, k, stride=1):
        self.w, self.k, self.stride = w, k, stride

    def build(self):
        _odd(self.k)
        return nn.MaxPool2d(self.k, self.stride, (self.k - 1) // 2)

    def count(self, cx):
        cx["h"], cx["w"] = (cx["h"] - 1) // self.stride + 1, (cx["w"] - 1) // self.stride + 1
        cx["acts"] += self.w * cx["h"] * cx["w"]


class GlobalPool(Spec):
    """Mean over the whole image: (batch, w, h, w) -> (batch, w, 1, 1). Counted as no activation (PyCls)."""

    __slots__ = ()

    def build(self):
        return nn.AdaptiveAvgPool2d((1, 1))

    def count(self, cx):
        cx["h"] = cx["w"] = 1


_ACTIVATIONS: Dict[str, Callable[..., nn.Module]] = {
    "relu": lambda: nn.ReLU(inplace=cfg.MODEL.ACTIVATION_INPLACE),
    "silu": lambda: nn.SiLU(inplace=cfg.MODEL.ACTIVATION_INPLACE),
    "swish": lambda: nn.SiLU(inplace=cfg.MODEL.ACTIVATION_INPLACE),
    "gelu": nn.GELU,
    "sigmoid": nn.Sigmoid,
}


class Act(Spec):
    """Activation: `kind`, or MODEL.ACTIVATION_FUN. Costs nothing by convention."""

    __slots__ = ("kind",)

    def __init__(self, kind=None):
        self.kind = kind

    def build(self):
        return look_up(_ACTIVATIONS, (self.kind or cfg.MODEL.ACTIVATION_FUN).lower(), "MODEL.ACTIVATION_FUN")()


class Dropout(Spec):
    """Dropout with probability `p`."""

    __slots__ = ("p",)

    def __init__(self, p):
        self.p = p

    def build(self):
        return nn.Dropout(p=self.p)


# ------------------------------------------------------------------- putting together


class Chain(Spec):
    """Named layers, one after the other; None entries are left out. Builds an `nn.Sequential` with these names."""

    __slots__ = ("parts", "module")

    def __init__(self, module: Callable = nn.Sequential, **parts):
        self.parts = {name: spec for name, spec in parts.items() if spec is not None}
        self.module = module

    def build(self):
        built = self.module()
        for name, spec in self.parts.items():
            built.add_module(name, spec.build())
        return built

    def count(self, cx):
        for spec in self.parts.values():
            spec.count(cx)


class List(Chain):
    """Unnamed layers, one after the other: an `nn.Sequential` with names 0, 1, 2, ..."""

    __slots__ = ()

    def __init__(self, *parts):
        super().__init__(**{str(i): spec for i, spec in enumerate(parts)})


class Residual(Chain):
    """`branch` (a dict of specs) added to a shortcut that starts from the same input: the input itself, or `shortcut`
    (a dict of specs) where the shape changes; then `after`. `module` defines how they are added up."""

    __slots__ = ("shortcut", "branch", "after")

    def __init__(self, module: Callable, branch: Dict, shortcut: Dict = None, after: Dict = None):
        self.shortcut, self.branch, self.after = shortcut or {}, branch, after or {}
        super().__init__(module, **self.shortcut, **self.branch, **self.after)

    def count(self, cx):
        h, w = cx["h"], cx["w"]
        for spec in self.shortcut.values():
            spec.count(cx)
        cx["h"], cx["w"] = h, w
        for spec in (*self.branch.values(), *self.after.values()):
            spec.count(cx)


class Scaled(Chain):
    """Layers whose result multiplies their own input, which keeps its size (squeeze-and-excitation)."""

    __slots__ = ()

    def count(self, cx):
        h, w = cx["h"], cx["w"]
        super().count(cx)
        cx["h"], cx["w"] = h, w
