"""Memory per GPU of a training step, by part and at its worst moments.

What is counted, per process:

    weights          as stored: fp32, or 16 bit in the pure modes; the own shard under FSDP
    gradients        in the dtype of the weights; under DDP they live in its buckets from step to step
    optimizer state  fp32: two numbers per weight (Adam, AdamW), one (SGD with momentum)
    EMA              fp32 weights and buffers
    master copies    fp32 weights and gradients behind 16-bit ones (pure modes without FSDP)
    16-bit copies    of fp32 weights, which autocast makes and the backward pass needs
    activations      what autograd keeps, the images of this batch and of the next
    communication    FSDP's gathered weights, and gradients on their way to their shards
    workspace        what the backward pass (or the optimizer) needs beyond that at its worst
    context          CUDA's and NCCL's own

The moments: the forward pass ends (autocast still holds all its copies), backward begins (all activations, no gradients
yet but for DDP's), runs (FSDP: a block's gradients on their way) and ends (no activations, all gradients), and the
optimizer steps (its kernels' temporaries). The peak is the largest of them. Activations and workspace are
traced (`pycls/core/trace.py`); everything else follows from the shapes of the weights.
"""

import math
from functools import lru_cache
from typing import Dict, List, NamedTuple, Tuple

from pycls.core import hardware, parallel
from pycls.core.config import cfg
from pycls.core.trace import Style, Trace, meta_model, trace_step

# A CUDA context with cuBLAS's and cuDNN's workspaces, what NCCL adds, and a Python with torch on the CPU: as seen in
# nvidia-smi and ps, in bytes.
_CONTEXT, _NCCL, _CPU_PROCESS = 600 * 2**20, 500 * 2**20, 300 * 2**20
# Config keys that can be varied -> field of a Choice.
_FIELDS = {
    "PRECISION.MODE": "mode", "ACT_CHECKPOINT": "checkpoint", "VIT.ATTENTION": "attention", "FSDP.ENABLED": "fsdp",
    "FSDP.RESHARD_AFTER_FW": "reshard", "FSDP.SHARD_SIZE": "shard_size", "FSDP.CPU_OFFLOAD": "offload",
    "OPTIM.ACCUM_ITERS": "parts",
}  # fmt: skip


class Choice(NamedTuple):
    """What of a run decides over memory and speed. `batch` is per GPU and step, in `parts` accumulated passes."""

    gpus: int
    batch: int
    cuda: bool
    mode: str
    checkpoint: str
    attention: str
    fsdp: bool
    reshard: bool
    shard_size: int
    offload: bool
    parts: int

    def changed(self, words: Dict) -> "Choice":
        """The choice with config words (key -> value) in place of its own."""
        return self._replace(**{_FIELDS[key]: value for key, value in words.items()})

    @property
    def half(self) -> bool:
        """Whether matrix products are in 16 bit."""
        return hardware.arithmetic(self.mode) in ("fp16", "bf16")

    @property
    def pure(self) -> bool:
        """Whether the model itself is in 16 bit."""
        return self.mode in ("fp16", "bf16")

    @property
    def sharded(self) -> bool:
        """Whether weights are sharded: one process has nobody to share with."""
        return self.fsdp and self.gpus > 1

    @property
    def shards(self) -> int:
        """Processes that share one copy of the weights."""
        return (self.shard_size or self.gpus) if self.sharded else 1

    @property
    def style(self) -> Style:
        """How its step computes: FSDP gathers weights in 16 bit, whether autocast is on or not."""
        norms = cfg.FSDP.LAYER_NORM_FP32 if self.sharded else cfg.PRECISION.NORM_FP32
        half_weights = self.pure or (self.half and self.sharded)
        # Compiled norms read what is in 16 bit and keep no copy in fp32.
        norms = norms and not (half_weights and cfg.COMPILE.ENABLED)
        return Style(self.half, self.mode.startswith("amp_"), half_weights, norms, self.checkpoint, self.attention)


def choice_of_config(gpus: int, batch: int, cuda: bool) -> Choice:
    """What the config chooses, for `gpus` processes of `batch` images each."""
    automatic = "fp32" if not cfg.TRAIN.MIXED_PRECISION else "amp_fp16" if cuda else "amp_bf16"
    values = dict(cfg.flat())
    fields = {field: values[key] for key, field in _FIELDS.items()}
    return Choice(gpus, batch, cuda, **{**fields, "mode": cfg.PRECISION.MODE or automatic})


# ----------------------------------------------------------------------- the weights


class Weights(NamedTuple):
    """Shapes and element sizes of the weights, bytes of the buffers, weights of each repeated block."""

    tensors: List[Tuple[Tuple[int, ...], int]]
    buffers: int
    blocks: List[int]

    @property
    def count(self) -> int:
        return sum(math.prod(shape) for shape, _ in self.tensors)

    @property
    def bytes(self) -> int:
        return sum(size * math.prod(shape) for shape, size in self.tensors)

    @property
    def half_count(self) -> int:
        """Weights that are stored in 16 bit."""
        return sum(math.prod(shape) for shape, size in self.tensors if size == 2)

    def shard(self, shards: int) -> int:
        """Weights in the largest shard: each tensor is cut along its first axis, evenly but for the rest."""
        return sum(math.ceil(s[0] / shards) * math.prod(s[1:]) if s else 1 for s, _ in self.tensors)


def weights_of_config(half: bool) -> Weights:
    """The weights of the config's model, stored in 16 bit (`half`; norms as PRECISION.NORM_FP32 says) or fp32."""
    model = meta_model(half, cfg.PRECISION.NORM_FP32)
    blocks = [sum(p.numel() for p in block.parameters()) for block in parallel.repeated_blocks(model)]
    tensors = [(tuple(p.shape), p.element_size()) for p in model.parameters()]
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    return Weights(tensors, buffers, blocks)


def state_bytes() -> int:
    """Bytes of optimizer state per weight."""
    if cfg.OPTIM.OPTIMIZER == "sgd":
        return 4 if cfg.OPTIM.MOMENTUM else 0
    return 8


# ----------------------------------------------------------------------- the moments

Parts = Dict[str, int]


class Model:
    """The config's model, its weights and traces, each found once."""

    def __init__(self):
        self._weights, self._trace = lru_cache(None)(weights_of_config), lru_cache(None)(trace_step)

    def weights_of(self, choice: Choice) -> Weights:
        """The weights as `choice` stores them on the device, before they are sharded: shards are in fp32."""
        return self._weights(choice.pure and not choice.sharded)

    def trace_of(self, choice: Choice) -> Trace:
        """One accumulated pass of `choice`."""
        return self._trace(choice.style, choice.batch // choice.parts, choice.cuda)

    def memory(self, choice: Choice) -> Tuple[str, Parts]:
        """The moment of the peak and the bytes of each part then."""
        moments = _moments(choice, self.weights_of(choice), self.trace_of(choice))
        return max(moments.items(), key=lambda item: sum(item[1].values()))


def _moments(choice: Choice, weights: Weights, trace: Trace) -> Dict[str, Parts]:
    standing = _standing(choice, weights)
    images = 4 * 3 * cfg.TRAIN.IM_SIZE**2 * choice.batch * (2 if choice.cuda else 1)
    gradients, kept = _gradients(choice, weights)
    gathered, at_the_end, reducing = _communication(choice, weights)
    before = {**standing, "gradients": kept}
    backward = {**before, "activations": trace.saved - trace.cast + images, "16-bit copies": trace.cast,
                "communication": gathered, "workspace": trace.working}  # fmt: skip
    moments = {
        "forward ends": {
            **before,
            "activations": trace.forward - trace.casts + images,
            "16-bit copies": trace.casts,
            "communication": gathered,
        },
        "backward begins": backward,
        "backward ends": {
            **standing,
            "gradients": max(gradients, kept),
            "activations": images,
            "communication": at_the_end + reducing,
            "workspace": trace.working,
        },
        "the optimizer steps": {
            **standing,
            "gradients": gradients if choice.sharded else max(gradients, kept),
            "activations": images,
            "workspace": _optimizer_workspace(choice, weights),
        },
    }
    if choice.sharded and weights.blocks:
        # The first block is done: its activations are gone, its gradients are on their way.
        freed = (trace.saved - trace.cast) // len(weights.blocks)
        communication = gathered + reducing - (0 if choice.reshard else _element(choice) * max(weights.blocks))
        moments["backward runs"] = {**backward, "activations": backward["activations"] - freed,
                                    "communication": communication}  # fmt: skip
    return moments


def _standing(choice: Choice, weights: Weights) -> Parts:
    """What is there at any moment."""
    on_device = 0 if choice.offload and choice.sharded else 1
    own = weights.shard(choice.shards)
    average = on_device * 4 * own + weights.buffers if cfg.OPTIM.EMA_UPDATE_PERIOD > 0 else 0
    context = (_CONTEXT + (_NCCL if choice.gpus > 1 else 0)) if choice.cuda else _CPU_PROCESS
    return {
        "weights": (on_device * 4 * own if choice.sharded else weights.bytes) + weights.buffers,
        "optimizer state": on_device * state_bytes() * own,
        "EMA": average,
        # Of each 16-bit weight a copy and the copy's gradient.
        "master copies": 0 if choice.sharded else 8 * weights.half_count,
        "context": context,
    }


def _gradients(choice: Choice, weights: Weights) -> Tuple[int, int]:
    """Bytes of all gradients after the backward pass, and of those that are there before it: DDP keeps its buckets, and
    the last of several accumulated passes finds the sum of the others (whole, under FSDP)."""
    if choice.sharded:
        summed = reduced_size(choice) * weights.count if choice.parts > 1 else 0
        return (0 if choice.offload else 4 * weights.shard(choice.shards)), summed
    return weights.bytes, weights.bytes if choice.gpus > 1 or choice.parts > 1 else 0


def _element(choice: Choice) -> int:
    """Bytes of a weight that computes."""
    return 2 if choice.half else 4


def reduced_size(choice: Choice) -> int:
    """Bytes per gradient that FSDP reduces."""
    return 2 if choice.half and cfg.PRECISION.REDUCE_DTYPE == "param" else 4


def _communication(choice: Choice, weights: Weights) -> Tuple[int, int, int]:
    """Bytes of gathered weights when backward begins and when it ends, and of one block's gradients on their way to
    their shards. DDP reduces in place."""
    if not choice.sharded:
        return 0, 0, 0
    size, block = _element(choice), max(weights.blocks, default=weights.count)
    rest = weights.count - sum(weights.blocks)
    # With RESHARD_AFTER_FW: the block at work, and the buffer in which the next one arrives.
    gathered = min(weights.count, rest + 2 * block) if choice.reshard else weights.count
    at_the_end = min(weights.count, rest + block)
    return size * gathered, size * at_the_end, (size + reduced_size(choice)) * block


def _optimizer_workspace(choice: Choice, weights: Weights) -> int:
    """Temporaries of the optimizer: none in fused kernels, one number per weight in multi-tensor ones, else those of
    the largest tensor."""
    if cfg.OPTIM.FUSED or (choice.offload and choice.sharded):
        return 0
    if cfg.OPTIM.MTA:
        return 4 * weights.shard(choice.shards)
    largest = max(weights.tensors, key=lambda tensor: math.prod(tensor[0]))
    return 12 * Weights([largest], 0, []).shard(choice.shards)
