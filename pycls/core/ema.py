"""Exponential moving average of a model's whole state."""

from copy import deepcopy
from typing import List, Optional

import torch
from torch import nn

from pycls.core.config import cfg


def copy_for_ema(model: nn.Module) -> Optional[nn.Module]:
    """A copy of a freshly built model that will hold its average, or None when EMA_UPDATE_PERIOD is 0."""
    return deepcopy(model).requires_grad_(False) if cfg.OPTIM.EMA_UPDATE_PERIOD > 0 else None


@torch.no_grad()
def copy_tensors(target: nn.Module, source: nn.Module) -> None:
    """Gives `target` the values of all parameters and buffers of `source`, a module spread over processes alike."""
    torch._foreach_copy_(_tensors(target), _tensors(source))


class ModelEma:
    """Lets a second model's parameters and buffers follow those of the first, each process its own part.

    alpha = min(1, EMA_ALPHA * BATCH_SIZE / MAX_EPOCH * EMA_UPDATE_PERIOD) is the weight of the new state; during
    warm-up epochs it is 1, a copy (PyCls).
    """

    def __init__(self, module: Optional[nn.Module], model: nn.Module):
        """Args: module: the average (None: there is none, and updates do nothing). model: what it follows."""
        o = cfg.OPTIM
        self.module, self.model = module, model
        self.period = o.EMA_UPDATE_PERIOD
        self.alpha = min(1.0, o.EMA_ALPHA * cfg.TRAIN.BATCH_SIZE / o.MAX_EPOCH * o.EMA_UPDATE_PERIOD)
        self.warmup_epochs = o.WARMUP_EPOCHS

    @torch.no_grad()
    def update(self, epoch: int, iteration: int) -> None:
        """Follows the model if this iteration is on schedule; a few multi-tensor kernels, no host sync."""
        if self.module is None or iteration % self.period:
            return
        alpha = 1.0 if epoch < self.warmup_epochs else self.alpha
        pairs = [(ours, theirs.to(ours.dtype)) for ours, theirs in zip(_tensors(self.module), _tensors(self.model))]
        # Counters such as num_batches_tracked have no meaningful average.
        copied = [pair for pair in pairs if alpha == 1.0 or not pair[0].is_floating_point()]
        averaged = [pair for pair in pairs if alpha < 1.0 and pair[0].is_floating_point()]
        if averaged:
            torch._foreach_lerp_(*map(list, zip(*averaged)), alpha)
        if copied:
            torch._foreach_copy_(*map(list, zip(*copied)))


def _tensors(model: nn.Module) -> List[torch.Tensor]:
    """All parameters and buffers, of sharded ones the part that this process holds."""
    tensors = [t.detach() for t in (*model.parameters(), *model.buffers())]
    return [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
