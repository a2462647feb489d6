"""How a model is spread over processes: one seam, several implementations.

`prepare(model, ema)` applies, from outside and in this order: activation checkpointing, compile, shard/replicate.
The trainer only ever calls the methods of the plan that it returns; models know nothing of all this.
"""

import contextlib
import functools
from typing import Any, Dict, List, Optional

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pycls.core import distributed as dist
from pycls.core.config import cfg
from pycls.core.errors import UserError
from pycls.core.precision import Precision

State = Dict[str, Any]


class Single:
    """One process holds everything.

    Attributes:
        raw: the model under its own names. model: what the training step calls. ema: its average, or None.
    """

    name = "single process"

    def __init__(self, model: nn.Module, ema: Optional[nn.Module], precision: Precision):
        self.precision, self.device = precision, precision.device
        self.raw, self.ema = self.place(self.cast(model)), self.place(ema) if ema is not None else None
        self.model = self.raw

    def cast(self, model: nn.Module) -> nn.Module:
        """Gives the weights that are trained their storage dtype; the average stays in fp32."""
        return self.precision.cast(model)

    def place(self, model: nn.Module) -> nn.Module:
        """Puts a model where it computes."""
        return model.to(self.device)

    def accumulating(self, last: bool):
        """Context of one accumulated pass; gradients need not agree between processes before the `last`."""
        return contextlib.nullcontext()

    def clip_grad_norm(self, parameters: List[torch.Tensor]) -> torch.Tensor:
        """Scales the gradients down to a global norm of at most GRAD_CLIP; returns the norm, on the device."""
        return nn.utils.clip_grad_norm_(parameters, cfg.OPTIM.GRAD_CLIP)

    def model_state(self, model: nn.Module) -> State:
        """The whole state of `model` under its own names. All processes call it; rank 0 gets the values."""
        return self.precision.exact_weights(model, model.state_dict())

    def load_model_state(self, model: nn.Module, state: State, strict: bool = True) -> None:
        """Takes up what `model_state` gave, saved by any number of processes; not `strict`: or a part of it."""
        model.load_state_dict(state, strict=strict)
        self.precision.load_exact_weights(model, state)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> State:
        """The whole state of `optimizer`, numbered as by a single process. All processes call it."""
        return optimizer.state_dict()

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: State) -> None:
        """Takes up what `optimizer_state` gave, saved by any number of processes."""
        optimizer.load_state_dict(state)


class Replicated(Single):
    """Every process holds a copy; gradients are averaged while the backward pass runs."""

    name = "data parallel (DDP)"

    def __init__(self, model: nn.Module, ema: Optional[nn.Module], precision: Precision):
        super().__init__(model, ema, precision)
        ids = [self.device.index] if self.device.type == "cuda" else None
        self.model = DistributedDataParallel(self.raw, device_ids=ids, gradient_as_bucket_view=True)

    def accumulating(self, last: bool):
        return contextlib.nullcontext() if last else self.model.no_sync()


class Sharded(Single):
    """Every process holds a part of the weights, gradients and optimizer state, and gathers each block's weights
    when it computes (ZeRO, arXiv 1910.02054), by PyTorch's fully_shard."""

    name = "fully sharded (torch)"

    def cast(self, model: nn.Module) -> nn.Module:
        # The shards are the fp32 master weights; what is gathered from them is cast.
        return model

    def place(self, model: nn.Module) -> nn.Module:
        from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

        options = {
            "mesh": _mesh(self.device.type),
            "mp_policy": self.precision.sharding_policy(),
            "reshard_after_forward": cfg.FSDP.RESHARD_AFTER_FW,
        }
        if cfg.FSDP.CPU_OFFLOAD:
            options["offload_policy"] = CPUOffloadPolicy()
        model.to(self.device)
        for norm in self._norms_apart(model):
            fully_shard(norm, **{**options, "mp_policy": self.precision.sharding_policy(norms=True)})
        for block in repeated_blocks(model):
            fully_shard(block, **options)
        return fully_shard(model, **options)

    def _norms_apart(self, model: nn.Module) -> List[nn.Module]:
        """The layer norms that are sharded by themselves, because they compute in another dtype than the rest."""
        if not cfg.FSDP.LAYER_NORM_FP32 or self.precision.dtype is None:
            return []
        return [module for module in model.modules() if isinstance(module, nn.LayerNorm)]

    def accumulating(self, last: bool):
        self.raw.set_requires_gradient_sync(last)
        return contextlib.nullcontext()

    def model_state(self, model: nn.Module) -> State:
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        return get_model_state_dict(model, options=_full())

    def load_model_state(self, model: nn.Module, state: State, strict: bool = True) -> None:
        from torch.distributed.checkpoint.state_dict import set_model_state_dict

        set_model_state_dict(model, state, options=_full(strict=strict))

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> State:
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        return _by_number(get_optimizer_state_dict(self.raw, optimizer, options=_full()))

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: State) -> None:
        from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

        set_optimizer_state_dict(self.raw, optimizer, _by_name(state, self.raw, optimizer), options=_full())


def _full(**options):
    """Whole tensors in host memory, on rank 0 only when saving."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(full_state_dict=True, cpu_offload=True, **options)


def _mesh(device_type: str):
    """All processes in one dimension, or (copies, shards) when SHARD_SIZE makes several copies."""
    from torch.distributed.device_mesh import init_device_mesh

    world, size = dist.get_world_size(), cfg.FSDP.SHARD_SIZE or dist.get_world_size()
    if size == world:
        return init_device_mesh(device_type, (world,))
    return init_device_mesh(device_type, (world // size, size), mesh_dim_names=("copies", "shards"))


def _by_number(state: State) -> State:
    """Optimizer state keyed by parameter names -> by their position in the groups, as torch.optim writes it."""
    if not state:
        return state
    names = [name for group in state["param_groups"] for name in group["params"]]
    number = {name: i for i, name in enumerate(names)}
    groups = [{**group, "params": [number[name] for name in group["params"]]} for group in state["param_groups"]]
    return {"state": {number[name]: value for name, value in state["state"].items()}, "param_groups": groups}


def _by_name(state: State, model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """The inverse of `_by_number`."""
    names = {id(p): name for name, p in model.named_parameters()}
    ordered = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    groups = [{**group, "params": [ordered[i] for i in group["params"]]} for group in state["param_groups"]]
    return {"state": {ordered[i]: value for i, value in state["state"].items()}, "param_groups": groups}


# ------------------------------------------------------- before the model is spread


def repeated_blocks(model: nn.Module) -> List[nn.Module]:
    """The blocks that a model repeats (`model.repeated_blocks()`, if it says), else none."""
    find = getattr(model, "repeated_blocks", None)
    return list(find()) if find else []


def _checkpoint_activations(model: nn.Module) -> None:
    """Recomputes activations in the backward pass: all of a block's, or all but those of matrix products."""
    if cfg.ACT_CHECKPOINT == "none":
        return
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    options = {"use_reentrant": False}
    if cfg.ACT_CHECKPOINT == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, list(_costly_operations()))
    for block in repeated_blocks(model):
        block.forward = functools.partial(checkpoint, block.forward, **options)


def _costly_operations():
    """What is dearer to compute again than to keep."""
    aten = torch.ops.aten
    for name in ("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_dot_product_flash_attention",
                 "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
                 "_scaled_dot_product_cudnn_attention"):  # fmt: skip
        if hasattr(aten, name):
            yield getattr(aten, name).default


def _compile(model: nn.Module) -> None:
    """Compiles each repeated block in place (equal blocks share one compilation), or the whole model without them."""
    if cfg.COMPILE.ENABLED:
        for module in repeated_blocks(model) or [model]:
            module.compile(mode=cfg.COMPILE.MODE)


# --------------------------------------------------------------------- the choice


def plan_of_config(world_size: int):
    """The implementation that the config asks for.

    Raises:
        UserError: it can't be had.
    """
    if not cfg.FSDP.ENABLED:
        return Replicated if world_size > 1 else Single
    if cfg.FSDP.BACKEND == "fairscale":
        raise UserError("FSDP.BACKEND: fairscale is not available in this version yet; use FSDP.BACKEND torch")
    if cfg.FSDP.STATE != "full":
        raise UserError("FSDP.STATE: sharded checkpoints are not available in this version yet; use FSDP.STATE full")
    if cfg.FSDP.CPU_OFFLOAD and dist.device_type() == "cpu":
        raise UserError("FSDP.CPU_OFFLOAD: True needs GPUs; on the CPU the weights are in host memory anyway")
    # One process has nobody to share with: the same run, without the machinery.
    return Sharded if world_size > 1 else Single


def describe() -> str:
    """The parallel plan of the config, in words."""
    plan = plan_of_config(cfg.NUM_GPUS)
    more = [f"shards of {cfg.FSDP.SHARD_SIZE}"] if plan is Sharded and cfg.FSDP.SHARD_SIZE else []
    more += [f"compiled ({cfg.COMPILE.MODE})"] if cfg.COMPILE.ENABLED else []
    more += [f"activation checkpointing ({cfg.ACT_CHECKPOINT})"] if cfg.ACT_CHECKPOINT != "none" else []
    head = plan.name if plan is Single else f"{cfg.NUM_GPUS} processes, {plan.name}"
    return ", ".join([head, *more])


def prepare(model: nn.Module, ema: Optional[nn.Module], precision: Precision) -> Single:
    """Puts a freshly built model, and its average if any, on the device(s) as the config says."""
    world_size = dist.get_world_size()
    plan = plan_of_config(world_size)
    if cfg.BN.SYNC and world_size > 1:
        if precision.device.type == "cpu":
            raise UserError("BN.SYNC: True needs GPUs, torch has no synchronised batch norm for the CPU; use False")
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        ema = nn.SyncBatchNorm.convert_sync_batchnorm(ema) if ema is not None else None
    _checkpoint_activations(model)
    _compile(model)
    return plan(model, ema, precision)
