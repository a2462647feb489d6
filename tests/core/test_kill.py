"""A run that is killed at any moment and started again ends bit for bit like one that never was."""

import fcntl
import os
import pty
import random
import select
import signal
import subprocess
import sys
import termios
import time

import pytest
from conftest import ROOT, TINY_RUN
from runs import SLOW_WRITER, assert_same_run, finish

from pycls.core.interrupt import StopRequest


def start(config, out_dir, *words, streams=None, **env):
    command = [sys.executable, os.path.join(ROOT, "tools", "run_net.py"), "--mode", "train", *words]
    command += ["--cfg", str(config), "OUT_DIR", str(out_dir)]
    command += ["NUM_GPUS", env.pop("processes", "1")]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    streams = streams or {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    # A group of its own, so that a kill reaches the ranks in the same instant as their parent.
    return subprocess.Popen(command, env=variables, start_new_session=True, **streams)


def kill(process, number=signal.SIGKILL):
    os.killpg(process.pid, number)
    process.communicate(timeout=60)


@pytest.fixture(scope="module", params=["1", "2"], ids=["1 process", "2 processes"])
def unbroken(request, tmp_path_factory):
    """A run that nobody disturbs: (number of processes, config, OUT_DIR, seconds it took)."""
    folder = tmp_path_factory.mktemp("unbroken")
    (folder / "tiny.yaml").write_text(TINY_RUN)
    began = time.monotonic()
    finish(start(folder / "tiny.yaml", folder / "run", processes=request.param))
    return request.param, folder / "tiny.yaml", folder / "run", time.monotonic() - began


def test_killed_at_random_moments(unbroken, tmp_path):
    processes, config, whole, seconds = unbroken
    moments = random.Random()
    out_dir, kills = tmp_path / "run", []
    for _ in range(3):
        victim = start(config, out_dir, processes=processes)
        moment = moments.uniform(0.3, 1.0) * seconds
        try:
            victim.wait(timeout=moment)
        except subprocess.TimeoutExpired:
            kill(victim)
            kills.append(round(moment, 2))
        else:
            victim.communicate()
    finish(start(config, out_dir, processes=processes))
    print(f"killed after {kills} s of about {seconds:.1f} s")
    assert_same_run(whole, out_dir)


# A rank of several that is killed while it saves: test_faults.py.
@pytest.mark.parametrize("unbroken", ["1"], ids=["1 process"], indirect=True)
def test_killed_while_writing_a_checkpoint(unbroken, tmp_path):
    processes, config, whole, _ = unbroken
    plugin, marker, out_dir = tmp_path / "slow_writer.py", tmp_path / "half", tmp_path / "run"
    plugin.write_text(SLOW_WRITER)
    victim = start(config, out_dir, "--plugin", str(plugin), processes=processes, HALF_WRITTEN=str(marker))
    deadline = time.monotonic() + 120
    while not marker.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    kill(victim)
    left = os.listdir(out_dir / "checkpoints") + os.listdir(out_dir)
    assert marker.exists() and any(name.endswith(".tmp") for name in left)
    finish(start(config, out_dir, processes=processes))
    assert not any(name.endswith(".tmp") for name in os.listdir(out_dir / "checkpoints") + os.listdir(out_dir))
    assert_same_run(whole, out_dir)


def test_asked_to_stop_it_saves_and_goes_on(unbroken, tmp_path):
    processes, config, whole, _ = unbroken
    out_dir = tmp_path / "run"
    victim = start(config, out_dir, processes=processes)
    log = out_dir / "stdout.log"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (log.exists() and "train_iter" in log.read_text()):
        time.sleep(0.02)
    # To the whole group, as a terminal or a scheduler does: ranks get it directly and through their parent.
    os.killpg(victim.pid, signal.SIGTERM)
    output = victim.communicate(timeout=60)[0].decode()
    if victim.returncode != 0:  # 0: it was over before the signal came
        assert victim.returncode == 143
        assert output.count("stopped by a signal and saved at epoch") == 1 and "Traceback" not in output
    finish(start(config, out_dir, processes=processes))
    assert_same_run(whole, out_dir)


@pytest.mark.parametrize("unbroken", ["2"], ids=["2 processes"], indirect=True)
def test_when_its_terminal_is_closed_it_saves_and_goes_on(unbroken, tmp_path):
    processes, config, whole, _ = unbroken
    out_dir, (ours, its) = tmp_path / "run", pty.openpty()
    its_own = {"preexec_fn": lambda: fcntl.ioctl(its, termios.TIOCSCTTY, 0)}
    victim = start(config, out_dir, processes=processes, streams={"stdout": its, "stderr": its, **its_own})
    os.close(its)
    log, deadline = out_dir / "stdout.log", time.monotonic() + 120
    while time.monotonic() < deadline and not (log.exists() and "train_iter" in log.read_text()):
        if select.select([ours], [], [], 0.02)[0]:
            os.read(ours, 65536)
    os.close(ours)
    assert victim.wait(timeout=60) in (0, 143)  # 0: it was over before
    finish(start(config, out_dir, processes=processes))
    assert_same_run(whole, out_dir)


def test_a_run_that_ignores_closed_terminals_goes_on():
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with StopRequest() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop
    finally:
        signal.signal(signal.SIGHUP, former)
