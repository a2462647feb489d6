"""Vision Transformer (Dosovitskiy et al., arXiv 2010.11929), with the convolutional stem of Xiao et al. (arXiv
2106.14881), as in PyCls: names, initialisation and results are PyCls's, the computation is our own.

Between blocks tokens are (tokens, batch, width) or (batch, tokens, width), VIT.LAYOUT; weights are the same.
"""

import math
from functools import partial
from typing import Callable, Dict, List, NamedTuple, Tuple

import torch
from torch import nn
from torch.nn import functional as F

from pycls.core.config import cfg
from pycls.core.errors import UserError, look_up
from pycls.models import attention as kernels
from pycls.models.blocks import drop_path
from pycls.models.layers import Act, Chain, Conv, LayerNorm, Linear, Norm2d, Patchify, Spec

# ------------------------------------------------------------------------- seams


class Layout(NamedTuple):
    """Where batch and tokens are in a (., ., width) tensor, and the axis orders that lead there and back."""

    batch_dim: int
    token_dim: int
    # (., ., heads, channels) -> (batch, heads, tokens, channels), and back.
    split: Tuple[int, ...]
    merge: Tuple[int, ...]
    # (batch, channels, rows, k, columns, k) -> (., ., ., channels, k, k), for images cut into patches.
    cut: Tuple[int, ...]


_LAYOUTS = {
    "batch_second": Layout(1, 0, (1, 2, 0, 3), (2, 0, 1, 3), (2, 4, 0, 1, 3, 5)),
    "batch_first": Layout(0, 1, (0, 2, 1, 3), (0, 2, 1, 3), (0, 2, 4, 1, 3, 5)),
}

# ------------------------------------------------------------------------ modules


class PatchEmbed(nn.Sequential):
    """Cuts images (batch, 3, h, w) into patches and embeds each: tokens in the layout, row by row.

    A convolution whose kernel is its stride is one matrix product over cut-out patches, and is computed so. Cutting
    copies the pixels anyway, so the layout costs nothing here.
    """

    def __init__(self, layout: Layout):
        super().__init__()
        self.layout = layout

    def forward(self, images):
        conv, token_dim = self.patchify, self.layout.token_dim
        (k, _), (batch, channels, h, w) = conv.kernel_size, images.shape
        patches = images.reshape(batch, channels, h // k, k, w // k, k).permute(self.layout.cut)
        patches = patches.flatten(token_dim, token_dim + 1).flatten(2)
        return F.linear(patches, conv.weight.flatten(1), conv.bias)

    def reset_parameters(self):
        """PyCls's initialisation."""
        nn.init.trunc_normal_(self.patchify.weight, std=math.sqrt(1.0 / self.patchify.weight[0].numel()))
        nn.init.zeros_(self.patchify.bias)


class ConvEmbed(nn.Sequential):
    """Embeds images (batch, 3, h, w) by a stack of convolutions: tokens in the layout, row by row."""

    def __init__(self, layout: Layout):
        super().__init__()
        self.layout = layout

    def forward(self, images):
        x = super().forward(images).flatten(2).transpose(1, 2).transpose(0, self.layout.batch_dim)
        # Residual sums keep the strides that tokens start with: without this copy, every norm below would make one.
        return x.contiguous()

    def reset_parameters(self):
        """PyCls's initialisation."""
        for name, conv in self.named_children():
            if isinstance(conv, nn.Conv2d):
                last = name == "cstem_last_conv"
                nn.init.normal_(conv.weight, std=math.sqrt((1.0 if last else 2.0) / conv.out_channels))
                if conv.bias is not None:
                    nn.init.zeros_(conv.bias)


class MultiheadAttention(nn.Module):
    """Self-attention with one packed projection to queries, keys and values (arXiv 1706.03762).

    Parameters are named as those of `torch.nn.MultiheadAttention`.
    """

    def __init__(self, width: int, heads: int, layout: Layout, attention: Callable, qk_norm: bool):
        super().__init__()
        self.heads, self.layout, self.attention = heads, layout, attention
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * width))
        self.out_proj = nn.Linear(width, width)
        self.ln_q = LayerNorm(width // heads).build() if qk_norm else nn.Identity()
        self.ln_k = LayerNorm(width // heads).build() if qk_norm else nn.Identity()

    def reset_parameters(self):
        """PyCls's initialisation."""
        nn.init.xavier_uniform_(self.in_proj_weight)
        nn.init.zeros_(self.in_proj_bias)
        nn.init.zeros_(self.out_proj.bias)

    def forward(self, x):
        """x: tokens in the layout; returns the same shape."""
        qkv = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).unbind(2)
        q, k, v = (t.permute(self.layout.split) for t in (self.ln_q(q), self.ln_k(k), v))
        return self.out_proj(self.attention(q, k, v).permute(self.layout.merge).flatten(2))


class EncoderBlock(nn.Sequential):
    """Pre-norm block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, layout: Layout, drop_path: float, width: int, layer_scale: float):
        super().__init__()
        self.batch_dim, self.drop_path, self.layer_scale = layout.batch_dim, drop_path, layer_scale
        # A tensor, since for each new number in a block the compiler would start anew.
        self.register_buffer("drop_rate", torch.empty(()) if drop_path else None, persistent=False)
        # Learned scales of the residual branches (Touvron et al., arXiv 2103.17239), if any.
        for name in ("layer_scale_1", "layer_scale_2"):
            self.register_parameter(name, nn.Parameter(torch.empty(width)) if layer_scale else None)

    def reset_parameters(self):
        """PyCls's initialisation."""
        for linear in (self.mlp_block.linear_1, self.mlp_block.linear_2):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.normal_(linear.bias, std=1e-6)
        if self.drop_rate is not None:
            nn.init.constant_(self.drop_rate, self.drop_path)
        if self.layer_scale:
            nn.init.constant_(self.layer_scale_1, self.layer_scale)
            nn.init.constant_(self.layer_scale_2, self.layer_scale)

    def forward(self, x):
        """x: tokens in the layout; returns the same shape."""
        x = x + self._branch(self.self_attention(self.ln_1(x)), self.layer_scale_1)
        return x + self._branch(self.mlp_block(self.ln_2(x)), self.layer_scale_2)

    def _branch(self, x, scale):
        x = x if scale is None else x * scale
        return x if not self.training or self.drop_rate is None else drop_path(x, self.drop_rate, self.batch_dim)


class Attention(Spec):
    """Spec of a MultiheadAttention over `tokens` tokens."""

    __slots__ = ("make", "width", "heads", "tokens", "qk_norm")

    def __init__(self, width, heads, tokens, layout, attention, qk_norm):
        self.width, self.heads, self.tokens, self.qk_norm = width, heads, tokens, qk_norm
        self.make = partial(MultiheadAttention, width, heads, layout, attention, qk_norm)

    def build(self):
        return self.make()

    def count(self, cx):
        d, n = self.width, self.tokens
        Linear(d, 3 * d, tokens=n).count(cx)
        # Queries times keys, then weights times values.
        cx["flops"] += 2 * n * n * d
        cx["acts"] += self.heads * n * n + d * n
        Linear(d, d, tokens=n).count(cx)
        cx["params"] += 4 * (d // self.heads) if self.qk_norm else 0


# -------------------------------------------------------------------------- model


class ViT(nn.Module):
    """Vision Transformer: images (batch, 3, side, side) -> logits (batch, classes)."""

    @staticmethod
    def get_params() -> Dict:
        """What the config says, as plain values."""
        v = cfg.VIT
        return {
            "image_size": cfg.TRAIN.IM_SIZE,
            "patch_size": v.PATCH_SIZE,
            "stem_type": v.STEM_TYPE,
            "c_stem_kernels": v.C_STEM_KERNELS,
            "c_stem_strides": v.C_STEM_STRIDES,
            "c_stem_dims": v.C_STEM_DIMS,
            "n_layers": v.NUM_LAYERS,
            "n_heads": v.NUM_HEADS,
            "hidden_d": v.HIDDEN_DIM,
            "mlp_d": v.MLP_DIM,
            "cls_type": v.CLASSIFIER_TYPE,
            "num_classes": cfg.MODEL.NUM_CLASSES,
            "layout": v.LAYOUT,
            "attention": v.ATTENTION,
            "drop_path": v.DROP_PATH,
            "layer_scale": v.LAYER_SCALE,
            "pos_embed": v.POS_EMBED,
            "registers": v.REGISTERS,
            "qk_norm": v.QK_NORM,
        }

    @staticmethod
    def check_params(p: Dict) -> None:
        """Raises UserError where sizes don't go together, with the numbers and their keys."""
        if p["hidden_d"] % p["n_heads"]:
            raise UserError(f"VIT.NUM_HEADS: {p['n_heads']} heads do not divide VIT.HIDDEN_DIM {p['hidden_d']}")
        if p["pos_embed"] == "sincos" and p["hidden_d"] % 4:
            raise UserError(f"VIT.HIDDEN_DIM: {p['hidden_d']} must divide by 4 for VIT.POS_EMBED sincos")
        if p["stem_type"] == "conv":
            lengths = [len(p[f"c_stem_{name}"]) for name in ("kernels", "strides", "dims")]
            if len(set(lengths)) > 1 or not lengths[0]:
                raise UserError(
                    "VIT.C_STEM_KERNELS, C_STEM_STRIDES and C_STEM_DIMS must be equally long and not empty, not of "
                    f"{lengths[0]}, {lengths[1]} and {lengths[2]} entries"
                )
            if any(k % 2 == 0 for k in p["c_stem_kernels"]):
                raise UserError(f"VIT.C_STEM_KERNELS: {p['c_stem_kernels']} must all be odd")
            if p["c_stem_dims"][-1] != p["hidden_d"]:
                raise UserError(
                    f"VIT.C_STEM_DIMS: the last one, {p['c_stem_dims'][-1]}, must be VIT.HIDDEN_DIM {p['hidden_d']}"
                )
        step, name = _step(p)
        if p["image_size"] % step:
            below = p["image_size"] // step * step
            raise UserError(
                f"TRAIN.IM_SIZE: {p['image_size']} does not divide by {name} {step}; "
                f"the nearest sizes are {below or step} and {below + step}"
            )

    @staticmethod
    def specs(p: Dict) -> Dict[str, Spec]:
        """The layers, stated once: the modules and their complexity both follow from this."""
        d, tokens = p["hidden_d"], token_count(p)
        layout, attention = (
            look_up(_LAYOUTS, p["layout"], "VIT.LAYOUT"),
            look_up(kernels.KERNELS, p["attention"], "VIT.ATTENTION"),
        )
        rates = [p["drop_path"] * i / max(p["n_layers"] - 1, 1) for i in range(p["n_layers"])]
        blocks = {
            f"block_{i}": Chain(
                partial(EncoderBlock, layout, rate, d, p["layer_scale"]),
                ln_1=LayerNorm(d),
                self_attention=Chain(block=Attention(d, p["n_heads"], tokens, layout, attention, p["qk_norm"])),
                ln_2=LayerNorm(d),
                mlp_block=Chain(
                    linear_1=Linear(d, p["mlp_d"], tokens=tokens),
                    af=Act("gelu"),
                    linear_2=Linear(p["mlp_d"], d, tokens=tokens),
                ),
            )
            for i, rate in enumerate(rates)
        }
        stem = (
            Chain(partial(PatchEmbed, layout), patchify=Patchify(3, d, p["patch_size"]))
            if p["stem_type"] == "patchify"
            else _conv_stem(p, layout)
        )
        return {
            "stem": stem,
            "encoder": Chain(**blocks, ln=LayerNorm(d)),
            "head": Chain(head_fc=Linear(d, p["num_classes"])),
        }

    def __init__(self, params: Dict = None):
        super().__init__()
        p = self.get_params() if params is None else params
        self.check_params(p)
        d, self.side, self.layout = p["hidden_d"], p["image_size"], _LAYOUTS[p["layout"]]
        for name, spec in self.specs(p).items():
            self.add_module(name, spec.build())
        grid = p["image_size"] // _step(p)[0]
        self.grid, self.registers_count, self.pooled = grid, p["registers"], p["cls_type"] == "pooled"
        if not self.pooled:
            self.class_token = nn.Parameter(torch.empty(1, 1, d))
        if p["registers"]:
            self.registers = nn.Parameter(torch.empty(p["registers"], 1, d))
        positions = torch.empty(grid * grid + (not self.pooled), 1, d)
        if p["pos_embed"] == "learned":
            self.pos_embedding = nn.Parameter(positions)
        else:
            self.register_buffer("pos_embedding", positions, persistent=False)
        # A blueprint (on the meta device) is given its values later.
        if not self.head.head_fc.weight.is_meta:
            attentions = [m for m in self.modules() if isinstance(m, MultiheadAttention)]
            for module in (self.stem, *attentions, *self.repeated_blocks(), self):
                module.reset_parameters()

    def reset_parameters(self):
        """PyCls's initialisation of what belongs to no block; those of stem, attention and blocks are their own.

        As torch's modules do: the parts are initialised before the whole.
        """
        if not self.pooled:
            nn.init.zeros_(self.class_token)
        if self.registers_count:
            nn.init.normal_(self.registers, std=0.02)
        if isinstance(self.pos_embedding, nn.Parameter):
            nn.init.normal_(self.pos_embedding, std=0.02)
        else:
            self.pos_embedding.copy_(sincos_embedding(self.grid, self.pos_embedding.shape[-1], not self.pooled))
        nn.init.zeros_(self.head.head_fc.weight)
        nn.init.zeros_(self.head.head_fc.bias)

    def repeated_blocks(self) -> List[nn.Module]:
        """The encoder blocks: what is compiled, sharded or recomputed one by one."""
        return [m for name, m in self.encoder.named_children() if name.startswith("block_")]

    def forward(self, images):
        """images: (batch, 3, side, side) of the size that the model was built for. Returns logits (batch, classes)."""
        if not torch.jit.is_tracing() and images.shape[-2:] != (self.side, self.side):
            raise UserError(
                f"TRAIN.IM_SIZE: this ViT was built for images of {self.side} x {self.side}, not "
                f"{images.shape[-2]} x {images.shape[-1]}"
            )
        batch, tokens = self.layout.batch_dim, self.layout.token_dim
        x = self.stem(images)
        if not self.pooled:
            class_token = self._to_layout(self.class_token).expand_as(x.narrow(tokens, 0, 1))
            x = torch.cat([class_token, x], dim=tokens)
        x = x + self._to_layout(self.pos_embedding)
        if self.registers_count:
            shape = [x.shape[batch], x.shape[batch], x.shape[-1]]
            shape[tokens] = self.registers_count
            x = torch.cat([x, self._to_layout(self.registers).expand(shape)], dim=tokens)
        x = self.encoder(x)
        x = x.narrow(tokens, 0, self.grid * self.grid).mean(dim=tokens) if self.pooled else x.select(tokens, 0)
        return self.head(x)

    def _to_layout(self, x):
        """Brings a parameter (tokens, 1, width) into the layout."""
        return x.transpose(0, self.layout.token_dim)

    def adapt_state_dict(self, state: Dict) -> Dict:
        """Resizes the position embedding of a state for another image size; everything else stays."""
        name = "pos_embedding"
        if name not in state or not isinstance(self.pos_embedding, nn.Parameter):
            return state
        special = 0 if self.pooled else 1
        return {**state, name: resize_pos_embedding(state[name], self.grid, special)}

    @staticmethod
    def complexity(cx: Dict, params: Dict = None) -> Dict:
        """Adds flops, params and acts of one image to cx (PyCls's conventions)."""
        p = ViT.get_params() if params is None else params
        ViT.check_params(p)
        d, positions = p["hidden_d"], token_count(p) - p["registers"]
        for spec in ViT.specs(p).values():
            spec.count(cx)
        cx["params"] += d * positions if p["pos_embed"] == "learned" else 0
        cx["params"] += (
            d * (p["cls_type"] == "token") + d * p["registers"] + 2 * d * p["n_layers"] * bool(p["layer_scale"])
        )
        return cx


def _step(p: Dict) -> Tuple[int, str]:
    """Pixels from one token to the next, and the name of the key that says so."""
    if p["stem_type"] == "patchify":
        return p["patch_size"], "VIT.PATCH_SIZE"
    return math.prod(p["c_stem_strides"]), "the product of VIT.C_STEM_STRIDES"


def token_count(p: Dict) -> int:
    """Tokens that the encoder sees: patches, class token, registers."""
    return (p["image_size"] // _step(p)[0]) ** 2 + (p["cls_type"] == "token") + p["registers"]


def _conv_stem(p: Dict, layout: Layout) -> Chain:
    """3x3 convs with batch norm and ReLU, the last one plain with bias."""
    widths, parts = [3, *p["c_stem_dims"]], {}
    *convs, last = zip(widths, widths[1:], p["c_stem_kernels"], p["c_stem_strides"])
    for i, (w_in, w_out, kernel, stride) in enumerate(convs):
        parts[f"cstem{i}_conv"] = Conv(w_in, w_out, kernel, stride=stride)
        parts[f"cstem{i}_bn"] = Norm2d(w_out)
        parts[f"cstem{i}_af"] = Act("relu")
    w_in, w_out, kernel, stride = last
    return Chain(
        partial(ConvEmbed, layout), **parts, cstem_last_conv=Conv(w_in, w_out, kernel, stride=stride, bias=True)
    )


def sincos_embedding(grid: int, width: int, class_token: bool) -> torch.Tensor:
    """Fixed 2-d position embedding (tokens, 1, width): sines and cosines of row and column (MAE, arXiv 2111.06377)."""
    frequencies = 1.0 / 10000 ** (torch.arange(width // 4, dtype=torch.float64) / (width // 4))
    angles = torch.arange(grid, dtype=torch.float64)[:, None] * frequencies
    waves = torch.cat([angles.sin(), angles.cos()], dim=1)
    columns, rows = waves.repeat(grid, 1), waves.repeat_interleave(grid, dim=0)
    embedding = torch.cat([columns, rows], dim=1)
    if class_token:
        embedding = torch.cat([torch.zeros(1, width, dtype=torch.float64), embedding])
    return embedding[:, None].float()


def resize_pos_embedding(embedding: torch.Tensor, grid: int, special: int) -> torch.Tensor:
    """Resizes a position embedding (special + old grid^2, 1, width) to (special + grid^2, 1, width), bicubic.

    The first `special` tokens (class token) are kept; at the same size, or where the tokens form no square
    (another kind of classifier), it is returned untouched.
    """
    old = math.isqrt(max(embedding.shape[0] - special, 0))
    if old == grid or old * old != embedding.shape[0] - special or not old:
        return embedding
    kept, patches = embedding[:special], embedding[special:]
    image = patches.reshape(old, old, -1).permute(2, 0, 1)[None].float()
    image = F.interpolate(image, size=(grid, grid), mode="bicubic", align_corners=False)
    patches = image[0].permute(1, 2, 0).reshape(grid * grid, 1, -1).to(embedding.dtype)
    return torch.cat([kept, patches])
