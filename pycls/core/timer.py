"""A stopwatch that adds up the times of many calls."""

import time


class Timer:
    """Sums the seconds between `tic` and `toc`; interface of PyCls.

    Attributes:
        total_time: seconds of all calls since the last reset.
        calls: number of `toc` since the last reset.
        start_time: clock reading of the last `tic`; only differences mean something.
        diff: seconds of the last call.
    """

    def __init__(self) -> None:
        self.reset()

    def tic(self) -> None:
        """Starts a call."""
        # Monotonic: a clock that the system sets back must not give negative times.
        self.start_time = time.perf_counter()

    def toc(self) -> None:
        """Ends the call that `tic` started."""
        self.diff = time.perf_counter() - self.start_time
        self.total_time += self.diff
        self.calls += 1

    def average_time(self) -> float:
        """Mean seconds per call; 0 before the first."""
        return self.total_time / self.calls if self.calls else 0.0

    def reset(self) -> None:
        """Forgets all calls."""
        self.total_time, self.calls, self.start_time, self.diff = 0.0, 0, 0.0, 0.0
