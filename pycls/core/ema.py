"""Exponential moving average of a model's whole state."""

from copy import deepcopy
from typing import Optional

import torch
from torch import nn

from pycls.core.config import cfg


class ModelEma:
    """A second model whose parameters and buffers follow those of the first.

    alpha = min(1, EMA_ALPHA * BATCH_SIZE / MAX_EPOCH * EMA_UPDATE_PERIOD) is the weight of the new state; during
    warm-up epochs it is 1, a copy (PyCls).
    """

    def __init__(self, model: nn.Module):
        """Args: model: the model to follow, not yet wrapped or sharded."""
        o = cfg.OPTIM
        self.module = deepcopy(model).requires_grad_(False)
        self.period = o.EMA_UPDATE_PERIOD
        self.alpha = min(1.0, o.EMA_ALPHA * cfg.TRAIN.BATCH_SIZE / o.MAX_EPOCH * o.EMA_UPDATE_PERIOD)
        self.warmup_epochs = o.WARMUP_EPOCHS
        self.model = model

    @torch.no_grad()
    def update(self, epoch: int, iteration: int) -> None:
        """Follows the model if this iteration is on schedule; a few multi-tensor kernels, no host sync."""
        if iteration % self.period:
            return
        alpha = 1.0 if epoch < self.warmup_epochs else self.alpha
        theirs, ours = _state(self.model), _state(self.module)
        floats = [(a, b) for a, b in zip(ours, theirs) if a.is_floating_point()]
        others = [(a, b) for a, b in zip(ours, theirs) if not a.is_floating_point()]
        if alpha == 1.0:
            others, floats = others + floats, []
        if floats:
            torch._foreach_lerp_(*map(list, zip(*floats)), alpha)
        if others:
            # Counters such as num_batches_tracked have no meaningful average.
            torch._foreach_copy_(*map(list, zip(*others)))


def _state(model: nn.Module):
    return [t.detach() for t in (*model.parameters(), *model.buffers())]


def build_ema(model: nn.Module) -> Optional[ModelEma]:
    """Returns the EMA of `model`, or None when EMA_UPDATE_PERIOD is 0."""
    return ModelEma(model) if cfg.OPTIM.EMA_UPDATE_PERIOD > 0 else None
