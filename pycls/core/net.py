"""What surrounds a network: complexity, soft labels, mixing, batch norm statistics."""

import itertools
from typing import Callable, Dict, NamedTuple, Optional, Tuple

import numpy as np
import torch
from torch import nn

from pycls.core.config import cfg
from pycls.core.distributed import scaled_all_reduce
from pycls.core.transfer import device_batches


class SoftCrossEntropyLoss(nn.Module):
    """Cross entropy against soft labels: mean over the batch of sum(-y * log_softmax(logits))."""

    def forward(self, logits: torch.Tensor, soft_labels: torch.Tensor) -> torch.Tensor:
        """Args: logits and soft_labels, both (batch, classes). Returns a scalar."""
        return torch.sum(-soft_labels * nn.functional.log_softmax(logits, dim=-1), dim=-1).mean()


def unwrap_model(model: nn.Module) -> nn.Module:
    """Returns the model inside data-parallel and torch.compile wrappers."""
    wrappers = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    while isinstance(model, wrappers) or hasattr(model, "_orig_mod"):
        model = model.module if isinstance(model, wrappers) else model._orig_mod
    return model


# --------------------------------------------------------------------- complexity


def complexity(model: Callable[..., nn.Module]) -> Dict[str, int]:
    """Counts one image of TRAIN.IM_SIZE through a model class (or instance).

    Returns:
        flops (multiply-adds), params and acts (elements that convs, linears, pools and attention put out),
        analytically from the class's `complexity(cx)`; a plug-in without one is traced instead.
    """
    size = cfg.TRAIN.IM_SIZE
    if not hasattr(model, "complexity"):
        return _traced_complexity(model if isinstance(model, nn.Module) else model(), size)
    cx = model.complexity({"h": size, "w": size, "flops": 0, "params": 0, "acts": 0})
    return {name: cx[name] for name in ("flops", "params", "acts")}


def _traced_complexity(model: nn.Module, size: int) -> Dict[str, int]:
    """Counts a model that does not count itself, by one forward pass of an image of zeros."""
    from torch.utils.flop_counter import FlopCounterMode

    acts = 0

    def count(module, inputs, output):
        nonlocal acts
        acts += output.numel() if isinstance(output, torch.Tensor) else 0

    counted = (nn.modules.conv._ConvNd, nn.Linear, nn.modules.pooling._MaxPoolNd)
    hooks = [m.register_forward_hook(count) for m in model.modules() if isinstance(m, counted)]
    training = model.training
    parameter = next(model.parameters(), torch.empty(0))
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model.eval()(torch.zeros(1, 3, size, size, dtype=parameter.dtype, device=parameter.device))
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    params = sum(p.numel() for p in model.parameters())
    return {"flops": counter.get_total_flops() // 2, "params": params, "acts": acts}


# ------------------------------------------------------------ soft labels and mixing


def smooth_one_hot_labels(labels: torch.Tensor) -> torch.Tensor:
    """Turns class numbers (batch,) into soft labels (batch, classes) with TRAIN.LABEL_SMOOTHING s:
    s/classes everywhere plus 1-s on the label (Szegedy et al., arXiv 1512.00567)."""
    classes, smoothing = cfg.MODEL.NUM_CLASSES, cfg.TRAIN.LABEL_SMOOTHING
    soft = torch.full((labels.numel(), classes), smoothing / classes, device=labels.device)
    return soft.scatter_(1, labels.view(-1, 1), 1.0 - smoothing + smoothing / classes)


class Mix(NamedTuple):
    """How one global batch is mixed: `share` of each image stays; `box` (top, bottom, left, right) is cut over."""

    share: float
    box: Optional[Tuple[int, int, int, int]]


def draw_mix(epoch: int, iteration: int, height: int, width: int) -> Optional[Mix]:
    """Draws mixup (arXiv 1710.09412) or cutmix (arXiv 1905.04899) for one global batch, on the host.

    If both are set, each batch takes one of them with equal chance. The draw depends only on seed, epoch and
    iteration: every rank draws the same.
    """
    mixup, cutmix = cfg.TRAIN.MIXUP_ALPHA, cfg.TRAIN.CUTMIX_ALPHA
    if not mixup and not cutmix:
        return None
    # The trailing 1 keeps this stream apart from the samples' own, which are seeded alike.
    rng = np.random.default_rng((cfg.RNG_SEED, epoch, iteration, 1))
    if mixup and (not cutmix or rng.random() < 0.5):
        return Mix(float(rng.beta(mixup, mixup)), None)
    side = np.sqrt(1.0 - rng.beta(cutmix, cutmix))
    half_height, half_width = int(height * side) / 2, int(width * side) / 2
    y, x = rng.integers(height), rng.integers(width)
    top, bottom = np.clip([int(y - half_height), int(y + half_height)], 0, height)
    left, right = np.clip([int(x - half_width), int(x + half_width)], 0, width)
    share = 1.0 - (bottom - top) * (right - left) / (height * width)
    return Mix(float(share), (int(top), int(bottom), int(left), int(right)))


def apply_mix(mix: Mix, inputs: torch.Tensor, soft_labels: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """Mixes each image (batch, channels, height, width) and soft label with its neighbour's.

    The batch is in random order, so pairing neighbours is a random pairing; and it stays the same however
    the batch is split over processes. In an odd batch the last image stays as it is.
    """
    partners, partner_labels = _swap_neighbours(inputs), _swap_neighbours(soft_labels)
    if mix.box is None:
        inputs = torch.lerp(partners, inputs, mix.share)
    else:
        top, bottom, left, right = mix.box
        inputs = inputs.clone()
        inputs[:, :, top:bottom, left:right] = partners[:, :, top:bottom, left:right]
    return inputs, torch.lerp(partner_labels, soft_labels, mix.share)


def _swap_neighbours(batch: torch.Tensor) -> torch.Tensor:
    even = batch.shape[0] // 2 * 2
    pairs = batch[:even].unflatten(0, (-1, 2)).flip(1).flatten(0, 1) if even else batch[:0]
    return torch.cat([pairs, batch[even:]]) if even < batch.shape[0] else pairs


# -------------------------------------------------------------- batch norm statistics


def _batch_norms(model: nn.Module):
    return [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]


def reset_bn_stats(model: nn.Module) -> None:
    """Forgets the running statistics of every batch norm."""
    for norm in _batch_norms(model):
        norm.reset_running_stats()


@torch.no_grad()
def compute_precise_bn_stats(model: nn.Module, loader, device: Optional[torch.device] = None) -> None:
    """Replaces running statistics by the mean of per-batch means and variances (PyCls, "precise BN").

    Uses BN.NUM_SAMPLES_PRECISE samples of the training loader over all processes; leaves every process with
    the same statistics. A network without batch norm is left alone.
    """
    norms = _batch_norms(model)
    if not norms:
        return
    device = device or next(model.parameters()).device
    batches = min(max(1, cfg.BN.NUM_SAMPLES_PRECISE // cfg.TRAIN.BATCH_SIZE), len(loader))
    sums = [(torch.zeros_like(n.running_mean), torch.zeros_like(n.running_var)) for n in norms]
    momenta = [n.momentum for n in norms]
    training = model.training
    model.train()
    for norm in norms:
        norm.momentum = 1.0
    try:
        for inputs, _ in itertools.islice(device_batches(loader, device), batches):
            model(inputs)
            for norm, (mean, var) in zip(norms, sums):
                mean += norm.running_mean / batches
                var += norm.running_var / batches
    finally:
        model.train(training)
        for norm, momentum in zip(norms, momenta):
            norm.momentum = momentum
    for norm, (mean, var) in zip(norms, sums):
        scaled_all_reduce([mean, var])
        norm.running_mean.copy_(mean)
        norm.running_var.copy_(var)
