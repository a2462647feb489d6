"""Clocks that tell the truth: the host's where work is done when a call returns, the device's own elsewhere."""

import time

import torch


class HostClock:
    """Marks on the host's clock (CPU)."""

    def mark(self) -> float:
        """A point in time."""
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        """Time between two marks."""
        return end - start

    def finish(self) -> None:
        """Waits until all marks have been passed."""


class CudaClock(HostClock):
    """Marks in the device's own queue (CUDA events), which the host does not wait for."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end) / 1000.0

    def finish(self) -> None:
        torch.cuda.synchronize()


def clock_for(device: torch.device) -> HostClock:
    """The clock that tells the truth on `device`."""
    return CudaClock() if device.type == "cuda" else HostClock()
