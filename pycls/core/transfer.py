"""Batches on their way to the device: the next one is copied while this one is computed on."""

from typing import Iterable, Iterator, Tuple

import torch


def device_batches(loader: Iterable, device: torch.device) -> Iterator[Tuple[torch.Tensor, ...]]:
    """Yields the loader's batches on `device`. On CUDA a side stream copies one batch ahead."""
    if device.type != "cuda":
        yield from loader
        return
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
