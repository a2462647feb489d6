"""The stopwatch adds up calls, and a clock that is set back does not disturb it."""

import time

from pycls.core.timer import Timer


def test_calls_add_up_to_their_average(monkeypatch):
    readings = iter([10.0, 12.0, 20.0, 24.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(readings))
    timer = Timer()
    for _ in range(2):
        timer.tic()
        timer.toc()
    assert (timer.start_time, timer.diff, timer.total_time, timer.calls) == (20.0, 4.0, 6.0, 2)
    assert timer.average_time() == 3.0


def test_a_clock_set_back_gives_no_negative_time(monkeypatch):
    readings = iter([100.0, 50.0])
    monkeypatch.setattr(time, "time", lambda: next(readings))
    timer = Timer()
    timer.tic()
    timer.toc()
    assert timer.diff >= 0


def test_reset_forgets_and_no_call_averages_to_zero():
    timer = Timer()
    assert timer.average_time() == 0.0
    timer.tic()
    timer.toc()
    timer.reset()
    assert (timer.total_time, timer.calls, timer.start_time, timer.diff) == (0.0, 0, 0.0, 0.0)
