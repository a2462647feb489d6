"""How a model is spread over processes: one seam, several implementations.

`prepare(model)` applies, from outside and in this order: activation checkpointing, compile, shard/replicate.
The trainer only ever calls the methods of the object it returns.
"""

import contextlib
from typing import Dict, List

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pycls.core import distributed as dist
from pycls.core.config import cfg
from pycls.core.errors import UserError


class Single:
    """One process holds everything."""

    name = "single process"

    def __init__(self, model: nn.Module, device: torch.device):
        self.device = device
        self.raw = model.to(device)
        self.model = self.raw

    def accumulating(self, last: bool):
        """Context of one accumulated pass; gradients need not agree between processes before the `last`."""
        return contextlib.nullcontext()

    def clip_grad_norm(self, parameters: List[torch.Tensor]) -> torch.Tensor:
        """Scales the gradients down to a global norm of at most GRAD_CLIP; returns the norm, on the device."""
        return nn.utils.clip_grad_norm_(parameters, cfg.OPTIM.GRAD_CLIP)

    def model_state(self, model: nn.Module) -> Dict[str, torch.Tensor]:
        """The whole state of `model` under its own names."""
        return model.state_dict()


class Replicated(Single):
    """Every process holds a copy; gradients are averaged while the backward pass runs."""

    name = "data parallel (DDP)"

    def __init__(self, model: nn.Module, device: torch.device):
        super().__init__(model, device)
        if cfg.BN.SYNC:
            self.raw = nn.SyncBatchNorm.convert_sync_batchnorm(self.raw)
        ids = [device.index] if device.type == "cuda" else None
        self.model = DistributedDataParallel(self.raw, device_ids=ids, gradient_as_bucket_view=True)

    def accumulating(self, last: bool):
        """Averages gradients over processes only in the `last` pass."""
        return contextlib.nullcontext() if last else self.model.no_sync()


def describe() -> str:
    """The parallel plan of the config, in words."""
    if cfg.FSDP.ENABLED:
        size = cfg.FSDP.SHARD_SIZE or cfg.NUM_GPUS
        return f"{cfg.NUM_GPUS} processes, weights sharded over {size} ({cfg.FSDP.BACKEND} FSDP)"
    if cfg.NUM_GPUS == 1:
        return Single.name
    return f"{cfg.NUM_GPUS} processes, {Replicated.name}"


def check() -> None:
    """Refuses plans that can't be carried out here.

    Raises:
        UserError: names the key.
    """
    for key, wanted in (("FSDP.ENABLED", cfg.FSDP.ENABLED), ("COMPILE.ENABLED", cfg.COMPILE.ENABLED)):
        if wanted:
            raise UserError(f"{key}: True is not available in this version yet; set {key} False")
    if cfg.ACT_CHECKPOINT != "none":
        raise UserError(f"ACT_CHECKPOINT: {cfg.ACT_CHECKPOINT} is not available in this version yet; use none")


def prepare(model: nn.Module, device: torch.device) -> Single:
    """Puts a freshly built model on its device(s) as the config says."""
    check()
    return (Replicated if dist.get_world_size() > 1 else Single)(model, device)
