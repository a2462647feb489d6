"""Weights to and from the names of timm, torchvision and transformers, and models to ONNX.

A naming is a table of pairs (our module, theirs), in which {i} stands for a number, {i-1} for one less; everything
else follows from it in both directions. DeiT, MAE and DINO name their ViTs as timm does. Our conv nets and ViTs were
trained on BGR images (see `datasets/transforms.py`) and the other libraries' on RGB, so the first convolution's input
channels are turned round unless asked not to. MAE and DINO checkpoints without a classifier convert without one.
"""

import json
import os
import re
from typing import Dict, Iterable, List, NamedTuple, Optional, Tuple

import torch

from pycls.core.errors import UserError, look_up
from pycls.core.io import atomic_write, safetensors

State = Dict[str, torch.Tensor]
Pairs = List[Tuple[str, str]]

# --------------------------------------------------------------------------- tables

_VIT_BLOCK = "encoder.block_{i}."
_VIT_TIMM: Pairs = [
    ("class_token", "cls_token"), ("pos_embedding", "pos_embed"), ("stem.patchify", "patch_embed.proj"),
    (_VIT_BLOCK + "ln_1", "blocks.{i}.norm1"),
    (_VIT_BLOCK + "self_attention.block.in_proj_", "blocks.{i}.attn.qkv."),
    (_VIT_BLOCK + "self_attention.block.out_proj", "blocks.{i}.attn.proj"),
    (_VIT_BLOCK + "ln_2", "blocks.{i}.norm2"),
    (_VIT_BLOCK + "mlp_block.linear_1", "blocks.{i}.mlp.fc1"),
    (_VIT_BLOCK + "mlp_block.linear_2", "blocks.{i}.mlp.fc2"),
    ("encoder.ln", "norm"), ("head.head_fc", "head"),
]  # fmt: skip
_VIT_TORCHVISION: Pairs = [
    ("class_token", "class_token"), ("pos_embedding", "encoder.pos_embedding"), ("stem.patchify", "conv_proj"),
    (_VIT_BLOCK + "ln_1", "encoder.layers.encoder_layer_{i}.ln_1"),
    (_VIT_BLOCK + "self_attention.block.in_proj_", "encoder.layers.encoder_layer_{i}.self_attention.in_proj_"),
    (_VIT_BLOCK + "self_attention.block.out_proj", "encoder.layers.encoder_layer_{i}.self_attention.out_proj"),
    (_VIT_BLOCK + "ln_2", "encoder.layers.encoder_layer_{i}.ln_2"),
    (_VIT_BLOCK + "mlp_block.linear_1", "encoder.layers.encoder_layer_{i}.mlp.0"),
    (_VIT_BLOCK + "mlp_block.linear_2", "encoder.layers.encoder_layer_{i}.mlp.3"),
    ("encoder.ln", "encoder.ln"), ("head.head_fc", "heads.head"),
]  # fmt: skip
_VIT_TRANSFORMERS: Pairs = [
    ("class_token", "vit.embeddings.cls_token"), ("pos_embedding", "vit.embeddings.position_embeddings"),
    ("stem.patchify", "vit.embeddings.patch_embeddings.projection"),
    (_VIT_BLOCK + "ln_1", "vit.encoder.layer.{i}.layernorm_before"),
    (_VIT_BLOCK + "self_attention.block.in_proj_", "vit.encoder.layer.{i}.attention.attention.qkv."),
    (_VIT_BLOCK + "self_attention.block.out_proj", "vit.encoder.layer.{i}.attention.output.dense"),
    (_VIT_BLOCK + "ln_2", "vit.encoder.layer.{i}.layernorm_after"),
    (_VIT_BLOCK + "mlp_block.linear_1", "vit.encoder.layer.{i}.intermediate.dense"),
    (_VIT_BLOCK + "mlp_block.linear_2", "vit.encoder.layer.{i}.output.dense"),
    ("encoder.ln", "vit.layernorm"), ("head.head_fc", "classifier"),
]  # fmt: skip
_REGNET_TIMM: Pairs = [
    ("stem.conv", "stem.conv"), ("stem.bn", "stem.bn"), ("head.fc", "head.fc"),
    ("s{i}.b{j}.proj", "s{i}.b{j}.downsample.conv"), ("s{i}.b{j}.bn", "s{i}.b{j}.downsample.bn"),
    *[(f"s{{i}}.b{{j}}.f.{a}{ours}", f"s{{i}}.b{{j}}.conv{n}.{theirs}")
      for n, a in enumerate("abc", 1) for ours, theirs in (("", "conv"), ("_bn", "bn"))],
    ("s{i}.b{j}.f.se.f_ex.0", "s{i}.b{j}.se.fc1"), ("s{i}.b{j}.f.se.f_ex.2", "s{i}.b{j}.se.fc2"),
]  # fmt: skip
_TRUNK = "trunk_output.block{i}.block{i}-{j-1}."
_REGNET_TORCHVISION: Pairs = [
    ("stem.conv", "stem.0"), ("stem.bn", "stem.1"), ("head.fc", "fc"),
    ("s{i}.b{j}.proj", _TRUNK + "proj.0"), ("s{i}.b{j}.bn", _TRUNK + "proj.1"),
    *[(f"s{{i}}.b{{j}}.f.{a}{ours}", f"{_TRUNK}f.{a}.{theirs}")
      for a in "abc" for ours, theirs in (("", "0"), ("_bn", "1"))],
    ("s{i}.b{j}.f.se.f_ex.0", _TRUNK + "f.se.fc1"), ("s{i}.b{j}.f.se.f_ex.2", _TRUNK + "f.se.fc2"),
]  # fmt: skip
_RESNET: Pairs = [
    ("stem.conv", "conv1"), ("stem.bn", "bn1"), ("head.fc", "fc"),
    ("s{i}.b{j}.proj", "layer{i}.{j-1}.downsample.0"), ("s{i}.b{j}.bn", "layer{i}.{j-1}.downsample.1"),
    *[(f"s{{i}}.b{{j}}.f.{a}{ours}", f"layer{{i}}.{{j-1}}.{theirs}{n}")
      for n, a in enumerate("abc", 1) for ours, theirs in (("", "conv"), ("_bn", "bn"))],
]  # fmt: skip


def _conv_transformers(name: str, with_se: bool) -> Pairs:
    """transformers' RegNet and ResNet: the convs of a block are a list, in which SE takes a place of its own."""
    layer, last = f"{name}.encoder.stages.{{i-1}}.layers.{{j-1}}.", 3 if with_se else 2
    pairs = [("stem.conv", f"{name}.embedder.embedder.convolution"),
             ("stem.bn", f"{name}.embedder.embedder.normalization"), ("head.fc", "classifier.1"),
             ("s{i}.b{j}.proj", layer + "shortcut.convolution"),
             ("s{i}.b{j}.bn", layer + "shortcut.normalization")]  # fmt: skip
    for a, at in zip("abc", (0, 1, last)):
        pairs.append((f"s{{i}}.b{{j}}.f.{a}", f"{layer}layer.{at}.convolution"))
        pairs.append((f"s{{i}}.b{{j}}.f.{a}_bn", f"{layer}layer.{at}.normalization"))
    if with_se:
        pairs += [(f"s{{i}}.b{{j}}.f.se.f_ex.{n}", f"{layer}layer.2.attention.{n}") for n in (0, 2)]
    return pairs


class Naming(NamedTuple):
    """How one library names one family, and what else differs there."""

    pairs: Pairs
    first_conv: str
    batch_first_embedding: bool = False
    split_qkv: bool = False


_NAMINGS: Dict[str, Dict[str, Naming]] = {
    "vit": {
        "timm": Naming(_VIT_TIMM, "stem.patchify.weight", True),
        "torchvision": Naming(_VIT_TORCHVISION, "stem.patchify.weight", True),
        "transformers": Naming(_VIT_TRANSFORMERS, "stem.patchify.weight", True, True),
    },
    "regnetx": {
        "timm": Naming(_REGNET_TIMM, "stem.conv.weight"),
        "torchvision": Naming(_REGNET_TORCHVISION, "stem.conv.weight"),
        "transformers": Naming(_conv_transformers("regnet", False), "stem.conv.weight"),
    },
    "regnety": {
        "timm": Naming(_REGNET_TIMM, "stem.conv.weight"),
        "torchvision": Naming(_REGNET_TORCHVISION, "stem.conv.weight"),
        "transformers": Naming(_conv_transformers("regnet", True), "stem.conv.weight"),
    },
    "resnet": {
        "timm": Naming(_RESNET, "stem.conv.weight"),
        "torchvision": Naming(_RESNET, "stem.conv.weight"),
        "transformers": Naming(_conv_transformers("resnet", False), "stem.conv.weight"),
    },
}
LIBRARIES = ("timm", "torchvision", "transformers")
FAMILIES = tuple(_NAMINGS)

# ------------------------------------------------------------------------- renaming

_FIELD = re.compile(r"\{(\w)(-1)?\}")


def _matcher(template: str) -> re.Pattern:
    """A pattern for the names that a template stands for, each number as a group (the same one twice if it recurs)."""
    parts, seen, at = [], set(), 0
    for field in _FIELD.finditer(template):
        name = field[1]
        parts += [re.escape(template[at : field.start()]), rf"(?P={name})" if name in seen else rf"(?P<{name}>\d+)"]
        seen.add(name)
        at = field.end()
    end = template[at:]
    # A module's name is followed by a dot and its tensor; names that end in '.' or '_' run on into the tensor's.
    tail = "(?P<tail>.+)" if end.endswith((".", "_")) else r"(?P<tail>|\..+)"
    return re.compile("".join(parts) + re.escape(end) + tail)


def _offsets(template: str) -> Dict[str, int]:
    return {field[1]: 1 if field[2] else 0 for field in _FIELD.finditer(template)}


def _filled(template: str, numbers: Dict[str, int]) -> str:
    return _FIELD.sub(lambda f: str(numbers[f[1]] - (1 if f[2] else 0)), template)


def _rename(state: State, pairs: Pairs) -> State:
    """Names matched by the first template of a pair take the form of its second one.

    Raises:
        UserError: names that no pair knows.
    """
    rules = [(_matcher(source), _offsets(source), target) for source, target in pairs]
    renamed, unknown = {}, []
    for name, value in state.items():
        for matcher, offsets, target in rules:
            if match := matcher.fullmatch(name):
                numbers = {k: int(v) + offsets[k] for k, v in match.groupdict().items() if k != "tail"}
                renamed[_filled(target, numbers) + match["tail"]] = value
                break
        else:
            unknown.append(name)
    if unknown:
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        raise UserError(f"these names do not belong to that kind of model: {', '.join(unknown[:3])}{more}")
    return renamed


def _split_qkv(state: State) -> State:
    split = {}
    for name, value in state.items():
        if ".qkv." in name:
            for part, chunk in zip(("query", "key", "value"), value.chunk(3)):
                split[name.replace(".qkv.", f".{part}.")] = chunk.clone()
        else:
            split[name] = value
    return split


def _join_qkv(state: State) -> State:
    joined = {name: value for name, value in state.items() if not re.search(r"\.attention\.(query|key|value)\.", name)}
    for name in [name for name in state if ".attention.query." in name]:
        parts = [state[name.replace(".query.", f".{part}.")] for part in ("query", "key", "value")]
        joined[name.replace(".query.", ".qkv.")] = torch.cat(parts)
    return joined


def _turn_channels(state: State, first_conv: str) -> State:
    return {**state, first_conv: state[first_conv].flip(1)} if first_conv in state else state


def _turn_embedding(state: State) -> State:
    """(tokens, 1, width) to (1, tokens, width) and back."""
    name = "pos_embedding"
    return {**state, name: state[name].transpose(0, 1).contiguous()} if name in state else state


def naming(family: str, library: str) -> Naming:
    """The table of a family (vit, regnetx, regnety, resnet) in a library (timm, torchvision, transformers)."""
    return look_up(look_up(_NAMINGS, family, "family"), library, "library")


def to_library(state: State, family: str, library: str, turn_channels: bool = True) -> State:
    """Our state dict under a library's names.

    Args:
        turn_channels: BGR to RGB in the first convolution.
    Raises:
        UserError: unknown family or library, or names that are not ours.
    """
    n = naming(family, library)
    state = _turn_channels(state, n.first_conv) if turn_channels else state
    state = _turn_embedding(state) if n.batch_first_embedding else state
    state = _rename(state, n.pairs)
    return _split_qkv(state) if n.split_qkv else state


def from_library(state: State, family: str, library: str, turn_channels: bool = True) -> State:
    """A library's state dict under our names: the inverse of `to_library`, byte for byte."""
    n = naming(family, library)
    state = _join_qkv(state) if n.split_qkv else state
    state = _rename(state, [(theirs, ours) for ours, theirs in n.pairs])
    state = _turn_embedding(state) if n.batch_first_embedding else state
    return _turn_channels(state, n.first_conv) if turn_channels else state


def recognise(names: Iterable[str]) -> Optional[Tuple[str, str]]:
    """The (library, family) to whose table most of `names` belong, None if there is none such."""
    names = [re.sub(r"\.attention\.(query|key|value)\.", ".attention.qkv.", name) for name in names]
    counts = {
        (library, family): _count(names, [_matcher(theirs) for _, theirs in table.pairs])
        for family, tables in _NAMINGS.items()
        for library, table in tables.items()
    }
    best = max(counts, key=counts.get)
    return best if 2 * counts[best] > len(names) else None


def _count(names: List[str], matchers: List[re.Pattern]) -> int:
    return sum(any(matcher.fullmatch(name) for matcher in matchers) for name in names)


# ---------------------------------------------------------------------------- files


def write_weights(state: State, path: str) -> str:
    """Writes a bare state dict as .safetensors, or for torch.load otherwise; returns the path."""
    state = {name: value.contiguous() for name, value in state.items()}
    save = safetensors(path).save if path.endswith(".safetensors") else None
    with atomic_write(path) as f:
        f.write(save(state)) if save else torch.save(state, f)
    return path


# ----------------------------------------------------------------------------- ONNX


class _FromPixels(torch.nn.Module):
    """A model with its preprocessing in front: RGB images on 0..255 in, logits out."""

    def __init__(self, model, mean, std, order: str):
        super().__init__()
        self.model, self.turn = model, order == "bgr"
        self.register_buffer("mean", torch.tensor(mean).view(1, 3, 1, 1) * 255)
        self.register_buffer("std", torch.tensor(std).view(1, 3, 1, 1) * 255)

    def forward(self, images):
        images = (images - self.mean) / self.std
        return self.model(images.flip(1) if self.turn else images)


def export_onnx(model: torch.nn.Module, path: str, facts: Dict, pixels: bool = False) -> str:
    """Writes an ONNX file with a dynamic batch, and FILE.json beside it with what preprocessing has to do.

    Args:
        facts: side, order (bgr or rgb), mean and std (RGB, on 0..1) of the model's input, and what else to note.
        pixels: take RGB images on 0..255 instead of normalised ones in the model's channel order.
    """
    import io

    model = model.float().cpu().eval()
    if pixels:
        model = _FromPixels(model, facts["mean"], facts["std"], facts["order"]).eval()
    example, buffer = torch.zeros(2, 3, facts["side"], facts["side"]), io.BytesIO()
    torch.onnx.export(
        model, (example,), buffer, dynamo=False, opset_version=17, input_names=["images"], output_names=["logits"],
        dynamic_axes={"images": {0: "batch"}, "logits": {0: "batch"}},
    )  # fmt: skip
    with atomic_write(path) as f:
        f.write(buffer.getvalue())
    note = "RGB on 0..255" if pixels else f"normalised, channels {facts['order']}"
    with atomic_write(os.path.splitext(path)[0] + ".json") as f:
        f.write(json.dumps({**facts, "input": note}, indent=1).encode())
    return path
