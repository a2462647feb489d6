"""What one training step does and keeps, found by running it on fake tensors: shapes and dtypes, but no numbers.

The true model computes its true step, forward, loss and backward, with torch's FakeTensorMode in place of arithmetic:
nothing is allocated, so a ViT-H at the batch of a cluster is traced in a second on any machine. Recorded are each
kernel's arithmetic and memory traffic, and the bytes that are alive: what autograd keeps for the backward pass, with
or without activation checkpointing, and how much more the backward pass needs at its worst moment.

The 16-bit modes are traced in bfloat16, which has the size of float16. Autocast follows CUDA's rules (softmax and norms
in fp32) unless told otherwise.
"""

import contextlib
import functools
import math
import weakref
from collections import Counter
from typing import Dict, Iterator, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from pycls.core import builders, net, parallel
from pycls.core.config import cfg
from pycls.core.errors import UserError
from pycls.core.precision import Precision


class Style(NamedTuple):
    """How a step computes.

    Attributes:
        half: matrix products in 16 bit. autocast: by autocast, which keeps copies of fp32 weights in 16 bit.
        half_weights: the model itself is in 16 bit (pure modes; weights as FSDP gathers them).
        fp32_norms: norms of a 16-bit model compute in fp32. checkpoint: ACT_CHECKPOINT. attention: VIT.ATTENTION.
    """

    half: bool
    autocast: bool
    half_weights: bool
    fp32_norms: bool
    checkpoint: str
    attention: str


class Op(NamedTuple):
    """One kernel: its floating-point operations and the bytes that it reads and writes.

    `kind` is `matrix`, `unaligned` (a matrix product in 16 bit with rows of odd length), `attention` (fused),
    `elementwise` (all that only moves bytes) or `uneven` (the same on rows of odd length). `tiles` is the number of
    256 x 128 tiles that a matrix product puts out, which the processors of a GPU share; 0 where that does not bind it.
    """

    kind: str
    flops: int
    bytes: int
    tiles: int = 0


class Trace(NamedTuple):
    """A step: how often each kernel runs, and bytes beside weights, their gradients and images.

    Attributes:
        saved: kept from forward to backward; `cast` of it are 16-bit copies of weights. working: what the backward pass
            needs at its worst on top of `saved`. forward: the most that lives in the forward pass, `casts` the copies.
    """

    ops: Counter
    saved: int
    cast: int
    working: int
    forward: int
    casts: int


# ----------------------------------------------------------------------- recording


class _Recorder(TorchDispatchMode):
    """Counts kernels, and the bytes of all storages that live."""

    def __init__(self, known):
        super().__init__()
        self.ops: Counter = Counter()
        self.alive: Dict[int, int] = {t.untyped_storage()._cdata: 0 for t in known}
        self.weights = {id(t) for t in known}
        self.now = self.peak = self.cast = self.casts = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        outputs = _tensors(out)
        for tensor in outputs:
            self._keep(tensor.untyped_storage())
        if func.namespace == "aten" and not func.is_view and func._opname not in ("detach", "_unsafe_view", "alias"):
            self.ops[_op(func, args, kwargs or {}, out)] += 1
        if func._opname == "_to_copy" and id(args[0]) in self.weights:
            self._count_cast(outputs[0].untyped_storage())
        return out

    def _keep(self, storage) -> None:
        if storage._cdata not in self.alive:
            self.alive[storage._cdata] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._drop, storage._cdata)

    def _drop(self, key: int) -> None:
        self.now -= self.alive.pop(key, 0)

    def _count_cast(self, storage) -> None:
        self.cast += storage.nbytes()
        self.casts = max(self.casts, self.cast)
        weakref.finalize(storage, self._uncast, storage.nbytes())

    def _uncast(self, size: int) -> None:
        self.cast -= size


def _tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _op(func, args, kwargs, out) -> Op:
    inputs, outputs = _tensors((args, kwargs)), _tensors(out)
    moved = sum(t.numel() * t.element_size() for t in (*inputs, *outputs))
    # The CPU's fused attention has the arithmetic of the GPU's.
    packet = getattr(torch.ops.aten, func._opname.replace("_for_cpu", ""), func.overloadpacket)
    if packet not in flop_registry:
        return Op("uneven" if _odd(outputs[:1]) else "elementwise", 0, moved)
    flops = flop_registry[packet](*args, **kwargs, out_val=out)
    if "attention" in func._opname:
        return Op("attention", flops, moved)
    if func._opname not in ("mm", "addmm", "bmm", "baddbmm"):
        return Op("matrix", flops, moved)
    odd = outputs[0].element_size() == 2 and _odd((*inputs[-2:], *outputs))
    return Op("unaligned" if odd else "matrix", flops, moved, _tiles(inputs[-2].shape[-1], *outputs[0].shape[-2:]))


def _tiles(inner: int, rows: int, columns: int) -> int:
    """Tiles of a product; one that sums over more than it puts out is cut along the sum, as finely as needed."""
    return 0 if inner > max(rows, columns) else math.ceil(rows / 256) * math.ceil(columns / 128)


def _odd(tensors) -> bool:
    """Whether rows have an odd length: in 16 bit, then, most of them start where no vector load can."""
    return any(t.dim() > 1 and t.shape[-1] > 1 and t.shape[-1] % 2 for t in tensors)


class _CudaAutocast(TorchFunctionMode):
    """Autocast on the CPU leaves norms and softmax in 16 bit; on CUDA they compute in fp32."""

    _FP32 = {F.layer_norm, torch.layer_norm, F.group_norm, torch.group_norm, F.softmax, torch.softmax,
             torch.Tensor.softmax, F.log_softmax, torch.log_softmax}  # fmt: skip

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in self._FP32 and torch.is_autocast_enabled("cpu"):
            args = [a.float() if isinstance(a, torch.Tensor) else a for a in args]
        return func(*args, **(kwargs or {}))


def _with_cuda_rules(forward, *args):
    """Blocks that are computed again need the rules once more: torch suspends such modes in the backward pass."""
    with _CudaAutocast():
        return forward(*args)


# ------------------------------------------------------------------------- the step


@contextlib.contextmanager
def overlaid(words: Dict) -> Iterator[None]:
    """The global config with `words` (key -> value) in it for a while."""
    values, frozen = dict(cfg.flat()), cfg.is_frozen()
    cfg.defrost()
    try:
        for key, value in words.items():
            cfg.assign(key, value, "planner")
        yield
    finally:
        for key in words:
            cfg.assign(key, values[key], "planner")
        if frozen:
            cfg.freeze()


def meta_model(half_weights: bool = False, fp32_norms: bool = True) -> nn.Module:
    """The model of the config without memory: on the meta device, in the dtypes that it would have."""
    precision = Precision("bf16" if half_weights else "fp32", torch.device("cpu"))
    with overlaid({"PRECISION.NORM_FP32": fp32_norms}), torch.device("meta"):
        return precision.cast(builders.build_model())


def trace_step(style: Style, batch: int, cuda: bool = True) -> Trace:
    """Traces a training step of the config's model on `batch` images of TRAIN.IM_SIZE.

    A ViT's blocks are equal, so two short ones tell what each further block adds.

    Args:
        cuda: follow CUDA's rules of autocast, else the CPU's.
    Raises:
        UserError: the model can't be run without numbers.
    """
    if cfg.MODEL.TYPE != "vit" or cfg.VIT.NUM_LAYERS < 3:
        return _trace(style, batch, cuda)
    short, longer = (_traced_with(n, style, batch, cuda) for n in (1, 2))
    more = cfg.VIT.NUM_LAYERS - 2
    added = {op: count - short.ops[op] for op, count in longer.ops.items()}
    ops = Counter({op: count + more * added[op] for op, count in longer.ops.items()})
    sizes = {name: getattr(longer, name) + more * (getattr(longer, name) - getattr(short, name))
             for name in ("saved", "cast", "forward", "casts")}  # fmt: skip
    return Trace(ops=ops, working=longer.working, **sizes)


def _traced_with(layers: int, style: Style, batch: int, cuda: bool) -> Trace:
    with overlaid({"VIT.NUM_LAYERS": layers}):
        return _trace(style, batch, cuda)


def _trace(style: Style, batch: int, cuda: bool) -> Trace:
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

    # The trace runs by the CPU's rules, where the choice could be another one.
    attention = "sdpa" if cuda and style.attention == "auto" else style.attention
    words = {"VIT.ATTENTION": attention, "ACT_CHECKPOINT": style.checkpoint, "COMPILE.ENABLED": False}
    with overlaid(words):
        model = meta_model(style.half_weights, style.fp32_norms)
        for block in parallel.repeated_blocks(model) if cuda else ():
            block.forward = functools.partial(_with_cuda_rules, block.forward)
        parallel.checkpoint_activations(model)
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                return _run(_on_fake_cpu(model), style, batch, cuda)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise UserError(f"MODEL.TYPE: {cfg.MODEL.TYPE} can't be planned, it depends on numbers: {error}") from None


def _run(model: nn.Module, style: Style, batch: int, cuda: bool) -> Trace:
    loss_fun, size = builders.build_loss_fun(), cfg.TRAIN.IM_SIZE
    images = torch.empty(batch, 3, size, size)
    soft_labels = net.smooth_one_hot_labels(torch.zeros(batch, dtype=torch.int64))
    for parameter in model.parameters():
        # Gradients of weights are counted elsewhere: each goes as soon as it is there.
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=style.autocast)
    rules = _CudaAutocast() if cuda else contextlib.nullcontext()
    with _Recorder([*model.parameters(), *model.buffers(), images, soft_labels]) as recorder, rules:
        with autocast:
            logits = model.train()(images)
        loss = loss_fun(logits.float(), soft_labels)
        saved, cast, forward, casts = recorder.now, recorder.cast, recorder.peak, recorder.casts
        recorder.peak = saved
        loss.backward()
    return Trace(recorder.ops, saved, cast, recorder.peak - saved, forward, casts)


def _on_fake_cpu(model: nn.Module) -> nn.Module:
    """Replaces weights on the meta device by fake ones that follow the CPU's rules; shared ones stay shared."""
    fakes: Dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in fakes:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype)
            fakes[id(tensor)] = nn.Parameter(empty) if isinstance(tensor, nn.Parameter) else empty
        return fakes[id(tensor)]

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            tensors.update({name: fake(tensor) for name, tensor in tensors.items() if tensor is not None})
    return model
