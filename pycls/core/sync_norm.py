"""Batch norm whose statistics are those of the global batch (BN.SYNC)."""

import torch
from torch import nn
from torch.distributed.nn.functional import all_reduce


def synchronised(model: nn.Module, device_type: str) -> nn.Module:
    """Replaces the batch norms of `model` by ones that share statistics over all processes; weights and names stay."""
    if device_type == "cuda":
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)
    for module in model.modules():
        # Its state is a plain batch norm's: only the way to compute differs.
        if type(module) is nn.BatchNorm2d:
            module.__class__ = HostSyncBatchNorm2d
    return model


class HostSyncBatchNorm2d(nn.BatchNorm2d):
    """What torch's SyncBatchNorm computes, which has no kernel for the CPU: mean and variance over all processes."""

    def forward(self, x):
        """x: (batch, channels, height, width), a process's part of the batch; returns the same shape."""
        if not self.training:
            return super().forward(x)
        count = all_reduce(x.new_full((1,), x.numel() / x.shape[1]))
        mean = _channel_sum(x) / count
        centred = x - mean[:, None, None]
        variance = _channel_sum(centred.square()) / count
        with torch.no_grad():
            if self.num_batches_tracked is not None:
                self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * count / (count - 1), self.momentum)
        scale = self.weight * torch.rsqrt(variance + self.eps)
        return centred * scale[:, None, None] + self.bias[:, None, None]


def _channel_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over batch and pixels of all processes: (channels,); gradients flow back to every process."""
    return all_reduce(x.sum(dim=(0, 2, 3)))
