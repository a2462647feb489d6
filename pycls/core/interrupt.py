"""SIGTERM, SIGINT, SIGHUP and a scheduler's warning: finish the step, save, end with a clear line."""

import os
import signal
import threading
import time
from typing import Optional, Tuple


def warning_signal() -> int:
    """The signal by which a scheduler announces a time-out or pre-emption: SIGUSR2, or as submitit's variable says."""
    name = os.environ.get("SUBMITIT_PREEMPT_SIGNAL", "USR2")
    return getattr(signal, f"SIG{name}", signal.SIGUSR2)


def stop_signals() -> Tuple[int, ...]:
    """The signals that ask a run to save and end: SIGTERM, Ctrl-C, a terminal that was closed, a scheduler's warning.

    Left out is SIGHUP where it is ignored: nohup ignores it so that a run outlives its terminal.
    """
    closed = getattr(signal, "SIGHUP", None)
    hang_up = () if closed is None or signal.getsignal(closed) is signal.SIG_IGN else (closed,)
    return (signal.SIGTERM, signal.SIGINT, *hang_up, warning_signal())


class Interrupted(Exception):
    """Training was asked to stop by a signal, and has saved everything at this position (both from 0).

    `signal` is the signal's number, None where it reached only another process.
    """

    # What shells and schedulers take for "ended by SIGTERM".
    code = 128 + signal.SIGTERM

    def __init__(self, epoch: int, iteration: int, number: Optional[int] = None):
        self.signal = number
        super().__init__(
            f"stopped by a signal and saved at epoch {epoch + 1}, iteration {iteration + 1}; "
            "the same command goes on from there"
        )


class StopRequest:
    """While active, remembers any of `stop_signals` instead of dying from it; one more, later, ends the process at
    once.

    A scheduler that signals every process of a run reaches a rank twice, directly and through its parent; what comes
    within SAME_REQUEST_SECONDS counts once.
    """

    SAME_REQUEST_SECONDS = 3.0

    def __init__(self):
        self.signal: Optional[int] = None
        self._since = 0.0
        self._former = {}

    def __bool__(self) -> bool:
        return self.signal is not None

    def __enter__(self) -> "StopRequest":
        # Only a main thread may handle signals; elsewhere (a notebook's worker) they stay with whoever owns them.
        mine = threading.current_thread() is threading.main_thread()
        for number in stop_signals() if mine else ():
            # A rank whose parent handles Ctrl-C ignores SIGINT, and goes on ignoring it.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._former[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _note(self, number, frame) -> None:
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._since = number, now
        elif now - self._since > self.SAME_REQUEST_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
