"""LAUNCH.MODE slurm and submitit_local: a run becomes a job, through submitit.

A job runs the code and config as they were when it was submitted: both lie in its folder, LAUNCH.FOLDER/TIME, beside
submitit's script and the log of each rank. What happens inside it is in `job`, what the terminal shows in `follow`.
"""

import contextlib
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from typing import Any, Callable, Dict, Iterator, List

import pycls
from pycls.core import distributed
from pycls.core.config import cfg
from pycls.core.errors import UserError, nearest
from pycls.core.interrupt import warning_signal
from pycls.core.job import Job
from pycls.core.logging import git_commit


def submit(main: Callable[[], Any]) -> None:
    """Submits a job that runs `main` once per rank; with submitit_local or LAUNCH.FOLLOW, returns when it has ended.

    Raises:
        UserError: it can't be submitted: the first thing that is wrong, and what to type.
        RankFailed: the job was followed and ended badly.
    """
    _check()
    from pycls.core import follow

    local = cfg.LAUNCH.MODE == "submitit_local"
    with _job_folder() as folder:
        task = Job(main, cfg.dump(), [], folder, os.getcwd(), [os.path.abspath(p) for p in sys.path if p])
        code = _copy_code(folder)
        task.plugins = _copy_plugins(code)
        if local:
            # submitit numbers the GPUs anew; the user's own choice shall stand.
            task.variables = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES")}
        # Python looks for modules where it starts: there lies the copy.
        with _working_in(code):
            job_id = _submit_local(folder, task) if local else _submit_slurm(folder, task)
    follow.announce(job_id, folder)
    if local:
        follow.follow_local(job_id, folder)
    elif cfg.LAUNCH.FOLLOW:
        follow.follow_slurm(job_id, folder)


def _check() -> None:
    mode = cfg.LAUNCH.MODE
    try:
        from submitit.core.job_environment import JobEnvironment
    except ImportError:
        raise UserError(f"LAUNCH.MODE: {mode} needs submitit; pip install 'pycls[slurm]', or use local") from None
    if not hasattr(signal, f"SIG{JobEnvironment.USR_SIG}"):
        raise UserError(f"SUBMITIT_PREEMPT_SIGNAL: there is no signal {JobEnvironment.USR_SIG}; unset it, or USR2")
    if distributed.started_by_launcher():
        raise UserError(f"LAUNCH.MODE: {mode} in a process that a launcher started; use LAUNCH.MODE local there")
    if cfg.LAUNCH.SIGNAL_DELAY >= 60 * cfg.LAUNCH.TIME_LIMIT:
        raise UserError(
            f"LAUNCH.SIGNAL_DELAY: {cfg.LAUNCH.SIGNAL_DELAY} seconds before the end of LAUNCH.TIME_LIMIT "
            f"{cfg.LAUNCH.TIME_LIMIT} minutes leave no time to train; type a smaller one"
        )
    missing = [name for name in ("sbatch", "srun", "scontrol") if shutil.which(name) is None]
    if mode == "slurm" and missing:
        raise UserError(
            f"LAUNCH.MODE: slurm, but there is no {missing[0]} on PATH; submit on a machine of the cluster, or use "
            "submitit_local to try it here"
        )


# --------------------------------------------------------------- the job's folder


@contextlib.contextmanager
def _job_folder() -> Iterator[str]:
    """A new folder for the files of one job; when submission fails, it and the folders above that it needed go again.

    Raises:
        UserError: it can't be made.
    """
    above = os.path.abspath(cfg.LAUNCH.FOLDER or os.path.join(cfg.OUT_DIR, "jobs"))
    if "%" in above:
        raise UserError(f"{'LAUNCH.FOLDER' if cfg.LAUNCH.FOLDER else 'OUT_DIR'}: {above} holds a %, which SLURM reads")
    folder, made = _make_new(above)
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        for parent in made:
            with contextlib.suppress(OSError):
                os.rmdir(parent)
        raise


def _make_new(above: str):
    """Makes above/TIME; returns it and the folders that had to be made for it, the innermost first."""
    made, parent = [], above
    while not os.path.isdir(parent):
        made.append(parent)
        parent = os.path.dirname(parent)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    try:
        os.makedirs(above, exist_ok=True)
        for number in range(1000):
            folder = os.path.join(above, f"{stamp}-{number}" if number else stamp)
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder)
                return folder, made
    except OSError as error:
        key = "LAUNCH.FOLDER" if cfg.LAUNCH.FOLDER else "OUT_DIR"
        raise UserError(f"{key}: {above} can't be written: {error.strerror}") from None
    raise UserError(f"LAUNCH.FOLDER: {above} already holds a thousand jobs of this second")


def _copy_code(folder: str) -> str:
    """Copies the package as it is now; returns the folder that holds the copy."""
    package, code = os.path.dirname(os.path.abspath(pycls.__file__)), os.path.join(folder, "code")
    data = os.path.join(package, "datasets", "data")

    def left_out(where: str, names: List[str]) -> List[str]:
        return [n for n in names if n == "__pycache__" or os.path.join(where, n) == data]

    shutil.copytree(package, os.path.join(code, "pycls"), ignore=left_out)
    # Where data sets are looked for without DATA_LOADER.DATA_DIR: the folder itself, also if it comes later.
    os.symlink(data, os.path.join(code, "pycls", "datasets", "data"))
    with open(os.path.join(code, "COMMIT"), "w", encoding="utf-8") as f:
        f.write(git_commit() or "")
    configs = os.path.join(os.path.dirname(package), "configs")
    if os.path.isdir(configs) and not os.path.exists(os.path.join(package, "configs")):
        os.symlink(configs, os.path.join(code, "configs"))
    return code


def _copy_plugins(code: str) -> List[str]:
    """Copies plug-in files; returns what the job is to import (modules are imported from where they are)."""
    names = []
    for number, name in enumerate(distributed.PLUGINS):
        if name.endswith(".py"):
            folder = os.path.join(code, "plugins", str(number))
            os.makedirs(folder)
            name = shutil.copy(name, folder)
        names.append(name)
    return names


@contextlib.contextmanager
def _working_in(folder: str) -> Iterator[None]:
    """contextlib.chdir, which Python 3.10 lacks."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


# --------------------------------------------------------------------- submission


def _submit_local(folder: str, task: Job) -> str:
    """Starts the job on this machine; returns its id, which is its controller's process number."""
    import submitit

    executor = submitit.LocalExecutor(folder, max_num_timeout=cfg.LAUNCH.MAX_RETRY)
    executor.update_parameters(
        tasks_per_node=cfg.NUM_GPUS,
        timeout_min=cfg.LAUNCH.TIME_LIMIT,
        signal_delay_s=cfg.LAUNCH.SIGNAL_DELAY,
        stderr_to_stdout=True,
    )
    # Ctrl-C reaches every process of the terminal: the job is to ignore it, `follow` passes it on.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return executor.submit(task).job_id
    finally:
        signal.signal(signal.SIGINT, handler)


def _submit_slurm(folder: str, task: Job) -> str:
    """Hands the job to SLURM; returns its id."""
    import submitit
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    executor = submitit.SlurmExecutor(folder, max_num_timeout=cfg.LAUNCH.MAX_RETRY)
    executor.update_parameters(**slurm_options())
    said = io.StringIO()
    try:
        with _outside_of_jobs(), contextlib.redirect_stderr(said):
            return executor.submit(task).job_id
    except (FailedJobError, FailedSubmissionError) as error:
        raise UserError(_explained(str(error) or said.getvalue())) from None


def slurm_options() -> Dict[str, Any]:
    """What the job asks SLURM for, by submitit's names."""
    nodes, tasks = distributed.nodes_and_tasks()
    launch = cfg.LAUNCH
    options = {
        "job_name": launch.NAME,
        "comment": launch.COMMENT or None,
        "partition": launch.PARTITION or None,
        "time": launch.TIME_LIMIT,
        "nodes": nodes,
        "ntasks_per_node": tasks,
        "cpus_per_task": launch.CPUS_PER_GPU,
        "mem": f"{launch.MEM_PER_GPU * tasks}GB",
        "signal_delay_s": launch.SIGNAL_DELAY,
        "stderr_to_stdout": True,
        "wckey": None,
        # Some clusters signal the script too: it must live on for as long as the ranks save.
        "setup": [f"trap : TERM {signal.Signals(warning_signal()).name[3:]}"],
        # Rank 0's own wish is not enough: SLURM must be allowed to put the job back.
        "additional_parameters": {"requeue" if launch.MAX_RETRY else "no-requeue": True},
        # Neighbouring ranks share a node; one that fails ends the job, where the others would wait for it in vain.
        # The number of cores is not passed on from sbatch since SLURM 22.05.
        "srun_args": [f"--cpus-per-task={launch.CPUS_PER_GPU}", "--distribution=block", "--kill-on-bad-exit=1"],
    }
    if launch.EMAIL:
        options.update(mail_user=launch.EMAIL, mail_type="END,FAIL,REQUEUE")
    # Whether there are GPUs is not asked here: login nodes have none.
    if cfg.DEVICE != "cpu":
        of_type = launch.GPU_TYPE.startswith("gpu:")
        options["gpus_per_node"] = f"{launch.GPU_TYPE[4:]}:{tasks}" if of_type else tasks
        options["constraint"] = None if of_type else launch.GPU_TYPE or None
    return options


@contextlib.contextmanager
def _outside_of_jobs() -> Iterator[None]:
    """Hides the variables of a job in which the user types: the new one would take them for wishes."""
    inside = "SLURM_JOB_ID" in os.environ
    names = [n for n in os.environ if n.startswith(("SLURM_", "SLURMD_", "SRUN_")) and n != "SLURM_CONF" and inside]
    hidden = {name: os.environ.pop(name) for name in names}
    try:
        yield
    finally:
        os.environ.update(hidden)


# What sbatch says -> the keys to look at.
_KEYS = (
    ("partition", ("LAUNCH.PARTITION",)),
    ("feature", ("LAUNCH.GPU_TYPE",)),
    ("time limit", ("LAUNCH.TIME_LIMIT",)),
    ("gres", ("NUM_GPUS", "MAX_GPUS_PER_NODE", "LAUNCH.GPU_TYPE", "DEVICE")),
    ("processors", ("LAUNCH.CPUS_PER_GPU",)),
    ("memory", ("LAUNCH.MEM_PER_GPU",)),
    ("node count", ("NUM_GPUS", "MAX_GPUS_PER_NODE")),
    ("node configuration", ("NUM_GPUS", "MAX_GPUS_PER_NODE", "LAUNCH.GPU_TYPE", "LAUNCH.CPUS_PER_GPU",
                            "LAUNCH.MEM_PER_GPU", "DEVICE")),
)  # fmt: skip


def _explained(text: str) -> str:
    """One line for what sbatch said: the keys that are meant, its own reason, and what the partition has to offer."""
    lines = [
        re.sub(r"^sbatch: (error|fatal): (Batch job submission failed: )?", "", line) for line in text.splitlines()
    ]
    reason = next((line for line in reversed(lines) if line.strip()), "it gave no reason").strip()
    keys = next((keys for word, keys in _KEYS if word in reason.lower()), ("LAUNCH.MODE",))
    flat = dict(cfg.flat())
    asked = ", ".join(f"{key} {flat[key]}" for key in keys)
    if keys == ("LAUNCH.PARTITION",):
        known = list(dict.fromkeys(_sinfo("%R").split()))
        there = f"{nearest(cfg.LAUNCH.PARTITION, known)}; known: {', '.join(known)}" if known else ""
    else:
        partition = ["--partition", cfg.LAUNCH.PARTITION] if cfg.LAUNCH.PARTITION else []
        rows = _sinfo("%R: %D nodes with %c cores, %m MB, %G, features %f; time limit %l", *partition).splitlines()
        there = f"; there is {', '.join(rows)}" if rows and keys != ("LAUNCH.MODE",) else ""
    return f"{keys[0]}: sbatch refused {asked}: {reason}{there}"


def _sinfo(form: str, *options: str) -> str:
    """What SLURM tells of its partitions and nodes, '' if it doesn't answer."""
    try:
        done = subprocess.run(
            ["sinfo", "--noheader", f"--format={form}", *options], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout
