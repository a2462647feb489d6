"""What the terminal shows of a job: how to watch and cancel it; its log and its states, when it is followed."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from typing import Callable, Dict, Optional, Tuple

from pycls.core.config import cfg
from pycls.core.distributed import RankFailed, nodes_and_tasks
from pycls.core.job import exit_file, job_state

# Seconds between looks at the log, and at SLURM's controller, which serves the whole cluster.
LOG_SECONDS, STATE_SECONDS = 0.5, 3.0

# (a line about the state, or '' when it is not known; whether the job has ended; its exit code, None if not known)
State = Tuple[str, bool, Optional[int]]


def announce(job_id: str, folder: str) -> None:
    """Says what was submitted, where its files are, how to watch and how to cancel it."""
    nodes, tasks = nodes_and_tasks() if cfg.LAUNCH.MODE == "slurm" else (1, cfg.NUM_GPUS)
    print(f"pycls: job {job_id} submitted: {nodes} node(s), {tasks} process(es) on each, OUT_DIR {cfg.OUT_DIR}")
    print(f"  files:  {folder}")
    print(f"  watch:  {_watch(job_id, folder)}")
    print(f"  cancel: {_cancel(job_id)}", flush=True)


def log_file(job_id: str, folder: str, rank: int = 0) -> str:
    """All that a rank writes to its standard output and error."""
    return os.path.join(folder, f"{job_id}_{rank}_log.out")


def _watch(job_id: str, folder: str) -> str:
    tail = f"tail -F {shlex.quote(log_file(job_id, folder))}"
    return f"{tail}    (state: squeue -j {job_id})" if cfg.LAUNCH.MODE == "slurm" else tail


def _cancel(job_id: str) -> str:
    return f"scancel {job_id}" if cfg.LAUNCH.MODE == "slurm" else f"kill {job_id}"


def follow_slurm(job_id: str, folder: str) -> None:
    """Follows a job of SLURM to its end; Ctrl-C leaves it running.

    Raises:
        RankFailed: it ended badly.
    """
    try:
        code, state = _follow(job_id, folder, lambda: _slurm_state(job_id, folder), STATE_SECONDS)
    except KeyboardInterrupt:
        print(f"\npycls: no longer followed; job {job_id} goes on")
        print(f"  watch:  {_watch(job_id, folder)}\n  cancel: {_cancel(job_id)}", flush=True)
        sys.exit(130)
    _finish(job_id, folder, code, state)


def follow_local(job_id: str, folder: str) -> None:
    """Follows a job on this machine to its end; Ctrl-C and SIGTERM make it save and end.

    Raises:
        RankFailed: it ended badly.
    """

    def end(number=None, frame=None):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(job_id), signal.SIGTERM)

    handlers = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        code, state = _follow(job_id, folder, lambda: _local_state(job_id, folder), LOG_SECONDS)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    _finish(job_id, folder, code, state)


def _follow(job_id: str, folder: str, look: Callable[[], State], seconds: float) -> Tuple[Optional[int], str]:
    """Prints rank 0's log as it grows, and a line whenever the state changes; returns exit code and last state."""
    log, position, last, due = log_file(job_id, folder), 0, "", 0.0
    while True:
        ended, code = False, None
        if time.monotonic() >= due:
            state, ended, code = look()
            due = time.monotonic() + seconds
            if state and state != last:
                position = _print_new(log, position)
                print(f"pycls: job {job_id}: {state}", flush=True)
                last = state
        position = _print_new(log, position)
        if ended:
            return code, last
        time.sleep(LOG_SECONDS)


def _print_new(path: str, position: int) -> int:
    """Prints what a file holds beyond `position`, up to its last whole line; returns the new position."""
    if not os.path.exists(path):
        return position
    with open(path, "rb") as f:
        position = position if os.fstat(f.fileno()).st_size >= position else 0
        f.seek(position)
        data = f.read()
    data = data[: data.rfind(b"\n") + 1]
    if data:
        sys.stdout.write(data.decode(errors="replace"))
        sys.stdout.flush()
    return position + len(data)


def _finish(job_id: str, folder: str, code: Optional[int], state: str) -> None:
    if code == 0:
        return
    failed = [rank for rank, its in _exit_codes(job_id, folder).items() if its]
    # The first one knows why; the others only lost it.
    rank = min(failed, key=lambda rank: os.path.getmtime(exit_file(folder, job_id, rank)), default=0)
    raise RankFailed(
        f"job {job_id} ended as {state}; the log of rank {rank}: {log_file(job_id, folder, rank)}", code or 1
    )


def _exit_codes(job_id: str, folder: str) -> Dict[int, int]:
    """The exit codes that ranks left, by rank."""
    codes = {}
    for rank in range(cfg.NUM_GPUS):
        with contextlib.suppress(FileNotFoundError), open(exit_file(folder, job_id, rank), encoding="utf-8") as f:
            codes[rank] = int(f.read())
    return codes


# ------------------------------------------------------------------------- states

# States in which a job is, or will be, at work; PENDING comes again after a requeue.
_ALIVE = ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "STOPPED", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED",
          "RESIZING", "SIGNALING", "STAGE_OUT", "SPECIAL_EXIT", "RESV_DEL_HOLD", "COMPLETING", "UNKNOWN")  # fmt: skip


def _slurm_state(job_id: str, folder: str) -> State:
    """The state of a job as SLURM's controller tells it; no accounting is needed."""
    job = job_state(job_id)
    own = _exit_codes(job_id, folder).get(0)
    if not job and _controller_answers():
        # Not just a moment without an answer: it may have forgotten a job that ended minutes ago.
        job = job_state(job_id) or {"JobState": "GONE"}
    if not job:
        return "", False, None
    if job["JobState"] == "GONE":
        return "no longer known to SLURM", True, own
    state, restarts = job["JobState"], int(job.get("Restarts", 0))
    again = f", restart {restarts}" if restarts else ""
    if state in _ALIVE:
        where = f" on {job.get('NodeList')}" if state == "RUNNING" else ""
        why = f" ({job['Reason']})" if state == "PENDING" and job.get("Reason", "None") != "None" else ""
        return f"{state}{where}{why}{again}", False, None
    if state == "COMPLETED":
        return f"{state}{again}", True, 0
    code, number = (int(part) for part in job.get("ExitCode", "1:0").split(":"))
    return f"{state}{again}", True, own or code or (128 + number if number else 1)


def _controller_answers() -> bool:
    try:
        return subprocess.run(["scontrol", "ping"], capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _local_state(job_id: str, folder: str) -> State:
    """The state of a job that runs on this machine as a child of this process."""
    codes = _exit_codes(job_id, folder)
    try:
        alive = os.waitpid(int(job_id), os.WNOHANG) == (0, 0)
    except ChildProcessError:
        alive = False
    if alive:
        failed = [rank for rank, code in codes.items() if code]
        if failed and time.time() - os.path.getmtime(exit_file(folder, job_id, failed[0])) > 10:
            # The others wait for it in vain; they end with their parent.
            os.kill(int(job_id), signal.SIGKILL)
        return "RUNNING", False, None
    bad = [code for code in codes.values() if code]
    if not bad and len(codes) < cfg.NUM_GPUS:
        return "killed", True, None
    return f"ended with exit code {bad[0] if bad else 0}", True, bad[0] if bad else 0
