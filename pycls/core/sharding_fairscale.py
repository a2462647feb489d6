"""The plan that PyCls used for models that outgrow a GPU: FairScale's FullyShardedDataParallel (FSDP)."""

import importlib.util
import math
import warnings
from typing import Any, Dict, List, Optional

import torch
from torch import nn

from pycls.core import distributed as dist
from pycls.core.config import cfg
from pycls.core.errors import UserError
from pycls.core.placement import Single, State, give_values, repeated_blocks
from pycls.core.precision import Precision


class FairScaleSharded(Single):
    """As `sharding.Sharded`, by FairScale. Every process holds an equal slice of each flattened weight."""

    name = "fully sharded (fairscale)"
    # Gradients smaller than this are reduced together, in MB (FairScale's default).
    bucket_cap_mb = 25

    def __init__(self, model: nn.Module, average: Optional[nn.Module], precision: Precision, host_values: bool = True):
        precision.share_overflows()
        # FairScale calls collectives by names that newer torch versions are about to rename.
        warnings.filterwarnings("ignore", message="`torch.distributed.*(deprecated|renamed)")
        super().__init__(model, average, precision, host_values)

    @staticmethod
    def check() -> None:
        """Raises UserError where this plan can't be had."""
        if dist.device_type() == "cpu":
            raise UserError("FSDP.BACKEND: fairscale needs CUDA streams, which a CPU has not; use FSDP.BACKEND torch")
        if importlib.util.find_spec("fairscale") is None:
            raise UserError("FSDP.BACKEND: fairscale is not installed: pip install fairscale, or FSDP.BACKEND torch")
        for key in ("CPU_OFFLOAD", "SHARD_SIZE"):
            if cfg.FSDP[key]:
                raise UserError(f"FSDP.{key}: {cfg.FSDP[key]} needs FSDP.BACKEND torch")

    def cast(self, model: nn.Module) -> nn.Module:
        # The shards are the fp32 master weights; what is gathered from them is cast.
        return model

    def spread(self, model: nn.Module, initial: bool = True) -> nn.Module:
        low = self.precision.dtype is not None
        options = {
            "reshard_after_forward": cfg.FSDP.RESHARD_AFTER_FW,
            # Weights stay apart, for the parameter groups of the optimizer.
            "flatten_parameters": False,
            "mixed_precision": low,
            "compute_dtype": self.precision.dtype,
            "buffer_dtype": torch.float32,
            "fp32_reduce_scatter": low and cfg.PRECISION.REDUCE_DTYPE == "fp32",
            "bucket_cap_mb": self.bucket_cap_mb,
            "compute_device": self.device,
            # An average is tested under autocast, between training steps.
            "clear_autocast_cache": True,
        }
        blocks = repeated_blocks(model)
        for block in blocks:
            give_values(block, self.drawn_on, initial=initial)
            _put_in_place(model, block, self._wrapped(block.to(self.device), options))
        # The wrapped blocks have their values: FairScale's class must not be asked to initialise them again.
        give_values(model, self.drawn_on, leave_out=repeated_blocks(model), initial=initial)
        return self._wrapped(model.to(self.device), options)

    def _wrapped(self, module: nn.Module, options: Dict[str, Any]) -> nn.Module:
        from fairscale.nn import FullyShardedDataParallel

        if options["mixed_precision"] and cfg.FSDP.LAYER_NORM_FP32:
            plain = {**options, "mixed_precision": False, "compute_dtype": torch.float32, "fp32_reduce_scatter": False}
            for norm in [m for m in module.modules() if isinstance(m, nn.LayerNorm) and not _is_sharded(m)]:
                wrapped = FullyShardedDataParallel(norm, force_input_to_fp32=True, **plain)
                if self.precision.pure:
                    wrapped.register_forward_hook(lambda _, args, output: output.to(self.precision.dtype))
                _put_in_place(module, norm, wrapped)
        if self.precision.pure:
            # FairScale itself would cast the images to fp16, whatever the mode.
            module.register_forward_pre_hook(lambda _, args: tuple(a.to(self.precision.dtype) for a in args))
        return FullyShardedDataParallel(module, **options)

    def accumulating(self, last: bool):
        return super().accumulating(last) if last else self.raw.no_sync()

    def clip_grad_norm(self, parameters: List[torch.Tensor]) -> torch.Tensor:
        # FairScale's own waits for the device in every step.
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        norm = dist.all_reduce_sum(norm.square()).sqrt()
        nn.utils.clip_grads_with_norm_(parameters, cfg.OPTIM.GRAD_CLIP, norm)
        return norm

    def outline(self, model: nn.Module) -> State:
        # FairScale's own state_dict() would gather all weights on the GPU.
        whole = {name: torch.empty(p._orig_size, device="meta") for name, p in model.named_parameters()}
        return {**whole, **_persistent_buffers(model)}

    def model_state(self, model: nn.Module, whole: bool = True) -> State:
        state = {name: _gathered(p, p) for name, p in model.named_parameters()}
        state.update(_persistent_buffers(model))
        return state

    def load_model_state(self, model: nn.Module, state: State, strict: bool = True, whole: bool = True) -> None:
        own = {**dict(model.named_parameters()), **_persistent_buffers(model)}
        if strict and set(own) != set(state):
            raise KeyError(f"weights differ: {sorted(set(own) ^ set(state))}")
        with torch.no_grad():
            for name, value in state.items():
                own[name].copy_(_slice_of(value, own[name]))

    def optimizer_state(self, optimizer: torch.optim.Optimizer, whole: bool = True) -> State:
        state = optimizer.state_dict()
        weights = [p for group in optimizer.param_groups for p in group["params"]]
        return {**state, "state": {n: _each(row, weights[n], _gathered) for n, row in state["state"].items()}}

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: State, whole: bool = True) -> None:
        weights = [p for group in optimizer.param_groups for p in group["params"]]
        rows = {n: _each(row, weights[n], _slice_of) for n, row in state["state"].items()}
        optimizer.load_state_dict({**state, "state": rows})


def _is_sharded(module: nn.Module) -> bool:
    return any(hasattr(p, "_is_sharded") for p in module.parameters())


def _put_in_place(root: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Replaces a module below `root` by another."""
    for parent in root.modules():
        for name, child in parent.named_children():
            if child is old:
                setattr(parent, name, new)
                return


def _persistent_buffers(model: nn.Module) -> State:
    """The buffers that belong into a checkpoint, under clean names."""
    own = ("_fsdp_wrapped_module", "_fpw_module")
    return {
        ".".join(part for part in name.split(".") if part not in own): buffer
        for name, buffer in model.named_buffers()
        if _is_persistent(model, name)
    }


def _is_persistent(model: nn.Module, name: str) -> bool:
    path, _, last = name.rpartition(".")
    return last not in model.get_submodule(path)._non_persistent_buffers_set


def _each(row: Dict[str, Any], weight: torch.Tensor, change) -> Dict[str, Any]:
    """A weight's optimizer state with `change` applied to what has the weight's shape (all but counters)."""
    return {
        key: change(value, weight) if isinstance(value, torch.Tensor) and value.dim() > 0 else value
        for key, value in row.items()
    }


def _gathered(value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The whole, in host memory, of what this process holds a slice of, as it does of `weight`."""
    value = value.detach()
    if weight._is_sharded:
        slices = [torch.empty_like(value) for _ in range(dist.get_world_size())]
        torch.distributed.all_gather(slices, value.contiguous())
        value = torch.cat(slices)[: math.prod(weight._orig_size)].view(weight._orig_size)
    return value.cpu()


def _slice_of(value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What this process holds of a whole: an equal part of the flattened values, padded with zeros."""
    if not getattr(weight, "_is_sharded", False):
        return value
    size, start = weight.numel(), dist.get_rank() * weight.numel()
    part = value.flatten()[start : start + size]
    return nn.functional.pad(part, [0, size - part.numel()])
