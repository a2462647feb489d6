"""What goes wrong around a run ends in one clear line, leaves nothing running, and the same command goes on."""

import errno
import os
import resource
import signal
import subprocess
import sys
import time
import warnings

import portalocker
import pytest
import torch
from conftest import ROOT, TINY_RUN
from runs import SLOW_WRITER, assert_same_run, finish

from pycls.core import checkpoint, cli, logging, meters, watch
from pycls.core.errors import UserError
from pycls.core.run import own_out_dir
from pycls.datasets import loader as data_loader


def start(folder, name, *words, launcher=(), flags=(), **env):
    """Starts the tiny run with two ranks in folder/name, in a process group of its own."""
    config = folder / "tiny.yaml"
    config.write_text(TINY_RUN)
    command = [sys.executable, *launcher, os.path.join(ROOT, "tools", "run_net.py"), "--mode", "train", *flags]
    command += ["--cfg", str(config), "OUT_DIR", str(folder / name), "NUM_GPUS", "2", *map(str, words)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    return subprocess.Popen(
        command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )


def ranks_of(process):
    with open(f"/proc/{process.pid}/task/{process.pid}/children") as f:
        children = [int(word) for word in f.read().split()]
    return [pid for pid in children if b"resource_tracker" not in open(f"/proc/{pid}/cmdline", "rb").read()]


def wait_until(condition, process, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def trained(folder, name):
    """A condition: the run has logged a training step."""
    log = folder / name / "stdout.log"
    return lambda: log.exists() and "train_iter" in log.read_text()


def told(process, code=3):
    """Waits for the end; returns the one line that was said, having seen that no process of the run is left."""
    errors = process.communicate(timeout=120)[1].decode()
    assert process.returncode == code, errors
    assert errors.count("\n") == 1 and errors.startswith("pycls: error: "), errors
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return errors
        time.sleep(0.05)
    raise AssertionError("a process of the run is left")


linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds processes through /proc")


# ----------------------------------------------------------------------------- ranks


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    finish(start(folder, "whole"))
    return folder / "whole"


@linux
def test_a_killed_rank_is_named_and_the_run_goes_on(unbroken, tmp_path):
    process = start(tmp_path, "run")
    wait_until(trained(tmp_path, "run"), process)
    os.kill(ranks_of(process)[1], signal.SIGKILL)
    assert "rank 1 was killed by SIGKILL" in told(process)
    finish(start(tmp_path, "run"))
    assert_same_run(unbroken, tmp_path / "run")


@linux
def test_a_hung_sharded_rank_is_named_with_what_the_others_waited_in(tmp_path):
    sharded = ("FSDP.ENABLED", True, "DIST_TIMEOUT", 5)
    finish(start(tmp_path, "whole", *sharded))
    process = start(tmp_path, "run", *sharded)
    wait_until(trained(tmp_path, "run"), process)
    os.kill(ranks_of(process)[1], signal.SIGSTOP)
    line = told(process)
    assert "rank 1 hangs: rank 0 has waited 5 s (DIST_TIMEOUT) for it in " in line
    assert "epoch 1, iteration" in line and "does not answer any more" in line
    finish(start(tmp_path, "run", *sharded))
    assert_same_run(tmp_path / "whole", tmp_path / "run")


@linux
def test_a_rank_killed_while_it_saves_leaves_the_last_checkpoint(unbroken, tmp_path):
    plugin, marker = tmp_path / "slow_writer.py", tmp_path / "half"
    plugin.write_text(SLOW_WRITER)
    process = start(tmp_path, "run", flags=("--plugin", str(plugin)), HALF_WRITTEN=str(marker))
    wait_until(marker.exists, process)
    os.kill(ranks_of(process)[0], signal.SIGKILL)
    assert "rank 0 was killed by SIGKILL" in told(process)
    assert any(name.endswith(".tmp") for name in os.listdir(tmp_path / "run" / "checkpoints"))
    finish(start(tmp_path, "run"))
    assert not any(name.endswith(".tmp") for name in os.listdir(tmp_path / "run" / "checkpoints"))
    assert_same_run(unbroken, tmp_path / "run")


@linux
def test_under_torchrun_the_others_name_a_killed_rank(tmp_path):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    process = start(tmp_path, "run", "OPTIM.MAX_EPOCH", 300, launcher=launcher)
    wait_until(trained(tmp_path, "run"), process)
    os.kill(ranks_of(process)[1], signal.SIGKILL)
    errors = process.communicate(timeout=120)[1].decode()
    assert process.returncode != 0
    (line,) = [line for line in errors.splitlines() if line.startswith("pycls: ")]
    assert "rank 0 lost the connection to the others in " in line and "rank 1 was killed" in line


@pytest.mark.parametrize(
    "text",
    [
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:2345",
        "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 4000ms for recv",
        "Application timeout caused pair closure",
        "NCCL communicator was aborted on rank 0.",
    ],
)
def test_errors_of_a_lost_rank_are_told_from_others(text):
    assert watch.is_broken_collective(RuntimeError(text))
    assert not watch.is_broken_collective(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not watch.is_broken_collective(UserError(text))


def test_a_stack_is_described_by_the_users_code_and_what_it_waits_in():
    frame = sys._getframe()
    assert watch.describe_stack(frame).startswith("in test_a_stack_is_described")


# ----------------------------------------------------------------------------- disks


@pytest.fixture
def little_room():
    """No file may grow beyond 50 kB, as if the disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size=50_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def out_dir(fresh_cfg, tmp_path):
    """OUT_DIR of the global config, with a first checkpoint in it."""
    fresh_cfg.OUT_DIR = str(tmp_path / "run")
    checkpoint.write_checkpoint({"weights": torch.ones(3)}, checkpoint.get_checkpoint(1))
    return tmp_path / "run"


# torch.save notices a full disk at one place in a large tensor, at another in the table of many small ones.
@pytest.mark.parametrize("state", [{"a": torch.ones(30_000)}, {str(i): torch.ones(100) for i in range(200)}])
def test_a_full_disk_is_one_line_and_leaves_older_checkpoints(out_dir, little_room, state):
    little_room()
    with pytest.raises(UserError, match=r"model_epoch_0002.pyth: can't be written \(.+\); older files are untouched"):
        checkpoint.write_checkpoint(state, checkpoint.get_checkpoint(2))
    assert os.listdir(out_dir / "checkpoints") == ["model_epoch_0001.pyth"]
    assert checkpoint.find_resumable() == str(out_dir / "checkpoints" / "model_epoch_0001.pyth")


def test_a_log_that_can_not_be_written_stops_the_run_in_one_line(out_dir, little_room, monkeypatch):
    monkeypatch.setattr(logging, "_handlers", [])
    logging.cfg.LOG_DEST = "file"
    logging.setup_logging()
    try:
        little_room()
        with pytest.raises(UserError, match=r"stdout.log: can't be written"):
            for _ in range(1000):
                logging.get_logger("pycls.test").info("x" * 100)
    finally:
        little_room(resource.getrlimit(resource.RLIMIT_FSIZE)[1])
        for handler in logging._handlers:
            logging.logging.root.removeHandler(handler)
            handler.close()


def test_a_folder_made_read_only_is_one_line_and_works_again(out_dir):
    folder = str(out_dir / "checkpoints")
    if os.geteuid() == 0:
        commands = (["mount", "--bind", folder, folder], ["mount", "-o", "remount,ro,bind", folder])
        if any(subprocess.run(c, capture_output=True, check=False).returncode for c in commands):
            subprocess.run(["umount", folder], capture_output=True, check=False)
            pytest.skip("root is not held up by permissions, and may not mount here")
    else:
        os.chmod(folder, 0o555)
    try:
        with pytest.raises(UserError, match="OUT_DIR: .*checkpoints can't be written"), own_out_dir():
            pass
        with pytest.raises(UserError, match="model_epoch_0002.pyth: can't be written"):
            checkpoint.write_checkpoint({}, checkpoint.get_checkpoint(2))
        with pytest.raises(UserError, match="model_epoch_0001.pyth: can't be deleted"):
            checkpoint.delete_checkpoints()
    finally:
        subprocess.run(["umount", folder], check=True) if os.geteuid() == 0 else os.chmod(folder, 0o755)
    with own_out_dir():
        checkpoint.write_checkpoint({}, checkpoint.get_checkpoint(2))


def test_where_files_can_not_be_locked_it_warns_and_goes_on(out_dir, monkeypatch):
    def refuse(error):
        def acquire(self, *args, **kwargs):
            raise error

        monkeypatch.setattr(portalocker.Lock, "acquire", acquire)

    refuse(portalocker.LockException(OSError(errno.ENOLCK, "No locks available")))
    with pytest.warns(UserWarning, match="can't be locked.*No locks available"), own_out_dir():
        pass
    for held in (portalocker.AlreadyLocked(), portalocker.LockException(OSError(errno.EAGAIN, "busy"))):
        refuse(held)
        with pytest.raises(UserError, match="another run is training"), own_out_dir():
            pass


# ---------------------------------------------------------------------------- clocks


def test_checkpoints_are_chosen_by_name_whatever_their_times(out_dir):
    for epoch, when in ((2, 4e9), (3, 1e9)):
        path = checkpoint.write_checkpoint({"epoch": epoch}, checkpoint.get_checkpoint(epoch))
        os.utime(path, (when, when))
    os.utime(checkpoint.get_checkpoint(1), (5e9, 5e9))
    assert checkpoint.find_resumable() == checkpoint.get_checkpoint(3)


def test_a_clock_that_runs_backwards_gives_no_odd_times(fresh_cfg, monkeypatch):
    readings = iter(range(10**6, 0, -1000))
    monkeypatch.setattr(time, "time", lambda: float(next(readings)))
    meter = meters.TrainMeter(4, torch.device("cpu"))
    for iteration, _ in enumerate(meter.timed(range(4))):
        meter.add(torch.tensor(1.0), torch.zeros(2, 10), torch.zeros(2, dtype=torch.long), 0.1)
        if meter.due(iteration):
            meter.flush(0, iteration)
    stats = meter.get_epoch_stats(0)
    assert 0 <= stats["time_avg"] < 10 and 0 <= stats["time_epoch"] < 10 and stats["eta"].startswith("00,00:")


# -------------------------------------------------------------------- memory, workers


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nmore"),
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
    ],
)
def test_too_little_memory_is_one_line_that_says_what_to_lower(fresh_cfg, capsys, error):
    def body():
        raise error

    fresh_cfg.merge_from_list(["TRAIN.BATCH_SIZE", 96, "NUM_GPUS", 2])
    with warnings.catch_warnings():
        monitored = warnings.showwarning
        assert cli.guarded(body, name="rank 1: ") == 2
        warnings.showwarning = monitored
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and line.startswith("pycls: error: rank 1: out of memory")
    assert "TRAIN.BATCH_SIZE (now 96, 48 per process)" in line and "TIME.SWEEP_BATCH" in line


def test_a_dead_worker_is_named(monkeypatch):
    monkeypatch.setattr(data_loader, "_workers", {4711: 3})
    error = data_loader._worker_died(RuntimeError("DataLoader worker (pid 4711) is killed by signal: Killed. "))
    assert str(error).startswith("loader worker 3 of rank 0 died (DataLoader worker (pid 4711) is killed by signal")


SLEEPER = """
import os, time
from pycls.core.config import cfg
from pycls.datasets import digits, loader

def hang(self, key):
    print(os.getpid(), flush=True)
    time.sleep(600)

digits.Digits.__getitem__ = hang
if __name__ == "__main__":
    cfg.merge_from_list(["TRAIN.DATASET", "digits", "TRAIN.IM_SIZE", 16, "DATA_LOADER.NUM_WORKERS", 1])
    next(iter(loader.construct_train_loader()))
"""


@linux
def test_a_worker_dies_with_its_rank_however_busy_it_is(tmp_path):
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "sleeper.py")], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": ROOT}
    )
    worker = int(process.stdout.readline())
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 4  # torch's own check, every 5 seconds, only runs between batches
    while os.path.exists(f"/proc/{worker}") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{worker}")


def test_a_loss_that_is_not_finite_is_told_with_its_loss_scale(fresh_cfg):
    meter = meters.TrainMeter(1, torch.device("cpu"))
    meter.add(torch.tensor(float("nan")), torch.zeros(2, 10), torch.zeros(2, dtype=torch.long), 0.1)
    with pytest.raises(UserError, match="nan in epoch 2, iteration 1, at learning rate 0.1, loss scale 64"):
        meter.flush(1, 0, False, lambda: ", loss scale 64")
