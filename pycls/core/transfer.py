"""Batches on their way to the device: the next one is copied while this one is computed on."""

from typing import Iterable, Iterator, Tuple

import torch

Batch = Tuple[torch.Tensor, ...]


def device_batches(loader: Iterable, device: torch.device) -> Iterator[Tuple[torch.Tensor, torch.Tensor]]:
    """Yields the loader's batches on `device`: normalised images (batch, channels, height, width) and labels (batch,).

    On CUDA a side stream copies one batch ahead.
    """
    batches = _copied_ahead(loader, device) if device.type == "cuda" else loader
    for *images, labels in batches:
        yield (images[0] if len(images) == 1 else normalized(*images)), labels


def normalized(images: torch.Tensor, affine: torch.Tensor) -> torch.Tensor:
    """Bytes (batch, channels, height, width) times factors plus summands, affine (batch, 2, channels), in float32."""
    factors, summands = affine[..., None, None].unbind(dim=1)
    return torch.addcmul(summands, images.float(), factors)


def _copied_ahead(loader: Iterable, device: torch.device) -> Iterator[Batch]:
    copies = torch.cuda.Stream(device)
    ahead = None
    for batch in loader:
        with torch.cuda.stream(copies):
            batch = tuple(t.to(device, non_blocking=True) for t in batch)
        if ahead is not None:
            yield ahead
        compute = torch.cuda.current_stream(device)
        compute.wait_stream(copies)
        for tensor in batch:
            # Its memory belongs to the copy stream; it must not be reused before the compute stream is done.
            tensor.record_stream(compute)
        ahead = batch
    if ahead is not None:
        yield ahead
