"""How a model is spread over processes: one seam, several implementations.

`prepare(model, ema)` applies, from outside and in this order: activation checkpointing, compile, shard/replicate.
The trainer only ever calls the methods of the plan that it returns; models know nothing of all this.
"""

import contextlib
import functools
import types
from typing import Callable, List, Optional

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from pycls.core import distributed as dist
from pycls.core import hardware
from pycls.core.config import cfg
from pycls.core.errors import UserError
from pycls.core.placement import Replicated, Single, repeated_blocks
from pycls.core.precision import Precision
from pycls.core.sharding import Sharded
from pycls.core.sharding_fairscale import FairScaleSharded
from pycls.core.sync_norm import synchronised

# ------------------------------------------------------- before the model is spread


def checkpoint_activations(model: nn.Module) -> None:
    """Recomputes activations in the backward pass: all of a block's, or all but those of matrix products.

    Raises:
        UserError: the model's activations work in place, and those of matrix products are to be kept.
    """
    if cfg.ACT_CHECKPOINT == "none":
        return
    selective = cfg.ACT_CHECKPOINT == "selective"
    if selective and any(getattr(module, "inplace", False) for module in model.modules()):
        raise UserError(
            "ACT_CHECKPOINT: selective can't keep what in-place activations change; add MODEL.ACTIVATION_INPLACE False"
        )
    recomputed = _traceable(selective)
    for block in repeated_blocks(model):
        norms = [m for m in block.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        options = {"context_fn": functools.partial(_contexts, selective, norms)} if selective or norms else {}
        if cfg.COMPILE.ENABLED:
            block.forward = types.MethodType(recomputed, block)
        else:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **options)


def _traceable(selective: bool) -> Callable:
    """A recomputing forward method that compilers see through: they skip partials of torch's function, and one method
    for all blocks is compiled once. They let running statistics follow a batch once, whatever is repeated."""
    kept = functools.partial(create_selective_checkpoint_contexts, list(_costly_operations()))
    options = {"context_fn": kept} if selective else {}

    def forward(block, *inputs):
        return checkpoint(lambda *xs: type(block).forward(block, *xs), *inputs, use_reentrant=False, **options)

    return forward


def _contexts(selective: bool, norms: List[nn.Module]):
    """(Context of a block's forward pass, context of its repetition), for torch's checkpoint."""
    if not selective:
        return contextlib.nullcontext(), _at_rest(norms)
    first, again = create_selective_checkpoint_contexts(list(_costly_operations()))
    return (first, _both(again, _at_rest(norms))) if norms else (first, again)


@contextlib.contextmanager
def _at_rest(norms: List[nn.Module]):
    """Keeps running statistics from following the same batch twice."""
    # They are still read and saved for the backward pass as in the first pass: torch compares the two.
    usual = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, momentum, count in usual:
            norm.momentum, norm.num_batches_tracked = momentum, count


@contextlib.contextmanager
def _both(one, other):
    with one, other:
        yield


def _costly_operations():
    """What is dearer to compute again than to keep."""
    aten = torch.ops.aten
    for name in ("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_dot_product_flash_attention",
                 "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
                 "_scaled_dot_product_cudnn_attention"):  # fmt: skip
        if hasattr(aten, name):
            yield getattr(aten, name).default


def _compile(model: nn.Module) -> None:
    """Compiles each repeated block in place where all are alike, so that they share one compilation, else the model.

    Raises:
        UserError: the mode and accumulated passes don't go together.
    """
    if not cfg.COMPILE.ENABLED:
        return
    if cfg.COMPILE.MODE in ("reduce-overhead", "max-autotune"):
        if cfg.OPTIM.ACCUM_ITERS > 1:
            raise UserError(
                f"COMPILE.MODE: {cfg.COMPILE.MODE} replays CUDA graphs, whose next pass takes the memory of this one's "
                "gradients, so OPTIM.ACCUM_ITERS must be 1; use default or max-autotune-no-cudagraphs"
            )
        # Else each block's graph would count as a new step, and free what the block before it put out.
        model.register_forward_pre_hook(lambda *_: torch.compiler.cudagraph_mark_step_begin())
    blocks = repeated_blocks(model)
    if len({(type(b), *(p.shape for p in b.parameters())) for b in blocks}) != 1:
        blocks = [model]
        model.forward = types.MethodType(_own_forward, model)
    for module in blocks:
        # A last batch that is smaller gets code of its own: sizes as variables are slower, and not all code has them.
        module.compile(mode=cfg.COMPILE.MODE, dynamic=False)


def _own_forward(model: nn.Module, *inputs):
    """Where compilation of a whole model begins: they pass over torch's own forward methods, and begin below them."""
    return type(model).forward(model, *inputs)


# --------------------------------------------------------------------- the choice


def plan_of_config(world_size: int):
    """The implementation that the config asks for.

    Raises:
        UserError: it can't be had.
    """
    # One process has nobody to share with: the same run, without the machinery, unless a launcher gives it a group.
    several = world_size > 1 or dist.started_by_launcher()
    if not cfg.FSDP.ENABLED:
        return Replicated if several else Single
    if cfg.FSDP.CPU_OFFLOAD and dist.device_type() == "cpu":
        raise UserError("FSDP.CPU_OFFLOAD: True needs GPUs; on the CPU the weights are in host memory anyway")
    if not several:
        return Single
    plan = {"torch": Sharded, "fairscale": FairScaleSharded}[cfg.FSDP.BACKEND]
    plan.check()
    return plan


def describe() -> str:
    """The parallel plan of the config, in words."""
    plan = plan_of_config(cfg.NUM_GPUS)
    more = [f"shards of {cfg.FSDP.SHARD_SIZE}"] if plan is Sharded and cfg.FSDP.SHARD_SIZE else []
    more += [f"compiled ({cfg.COMPILE.MODE})"] if cfg.COMPILE.ENABLED else []
    more += [f"activation checkpointing ({cfg.ACT_CHECKPOINT})"] if cfg.ACT_CHECKPOINT != "none" else []
    head = plan.name if plan is Single else f"{cfg.NUM_GPUS} processes, {plan.name}"
    return ", ".join([head, *more])


def prepare(model: nn.Module, ema: Optional[nn.Module], precision: Precision, host_values: bool = True) -> Single:
    """Puts a freshly built model, and its average if any, on the device(s) as the config says.

    Args:
        host_values: where a blueprint's initial values are drawn, see `trainer.setup_model`.
    """
    world_size = dist.get_world_size()
    plan = plan_of_config(world_size)
    if cfg.BN.SYNC and world_size > 1:
        model = synchronised(model, precision.device.type)
        ema = synchronised(ema, precision.device.type) if ema is not None else None
    if precision.device.type == "cpu":
        hardware.keep_freed_memory()
    checkpoint_activations(model)
    _compile(model)
    return plan(model, ema, precision, host_values)
