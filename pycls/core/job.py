"""Inside a submitted job: one rank's work, where the ranks meet, and being put back into the queue.

submitit starts a `Job` in every task of the job. A scheduler's warning (before the time limit, or a pre-emption) makes
the run save and stop, see `interrupt`; only then does rank 0 have the job put back, and the checkpoint does the rest.
"""

import logging
import math
import os
import re
import signal
import socket
import subprocess
import sys
import warnings
from typing import Any, Callable, Dict, List, Optional, Sequence

from pycls.core import distributed, rendezvous
from pycls.core.config import cfg
from pycls.core.errors import UserError
from pycls.core.interrupt import Interrupted, StopRequest, warning_signal
from pycls.core.io import atomic_write


class Job:
    """What runs in each task of a job: `main` as one rank. It holds plain data only, for it is pickled.

    Args:
        main: the program, a function of a module. config: the config as text. plugins: files and modules to import.
        folder: the job's files, seen by all nodes. cwd: where it was submitted. path: further folders of modules.
        variables: environment variables to set (None: to remove), where submitit changes the user's.
        restarts: how often it has been put back so far.
    """

    def __init__(
        self,
        main: Callable[[], Any],
        config: str,
        plugins: Sequence[str],
        folder: str,
        cwd: str,
        path: Sequence[str] = (),
        variables: Optional[Dict[str, Optional[str]]] = None,
        restarts: int = 0,
    ):
        self.main, self.config, self.plugins, self.folder = main, config, list(plugins), folder
        self.cwd, self.path, self.variables, self.restarts = cwd, list(path), dict(variables or {}), restarts

    def __call__(self) -> None:
        """Runs the rank and ends the process with its exit code; submitit calls this."""
        import submitit

        env = submitit.JobEnvironment()
        record = exit_file(self.folder, env.job_id, env.global_rank)
        if os.path.exists(record):
            os.remove(record)
        code = self.run(env)
        if code is not None:
            with atomic_write(record) as f:
                f.write(str(code).encode())
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: threads of the group and of sharding may still run, to be waited for or to abort the process.
        os._exit(_PUT_BACK[env.cluster] if code is None else code)

    def checkpoint(self):
        """The job that is to go on from here, for submitit; None when it has been put back often enough."""
        from submitit.helpers import DelayedSubmission

        if self._restarts() >= self._max_retry():
            return None
        fields = {name: value for name, value in vars(self).items() if name != "restarts"}
        return DelayedSubmission(Job(**fields, restarts=self.restarts + 1))

    # ------------------------------------------------------------------- one rank

    def run(self, env) -> Optional[int]:
        """Runs `main` as the rank that `env` (submitit's) describes; returns the exit code, None if it was put back."""
        from pycls.core.cli import guarded

        self._settle(env)
        stopped: List[Interrupted] = []

        def body():
            try:
                self._as_rank(env)
            except Interrupted as stop:
                stopped.append(stop)
                raise

        # Each rank speaks: it has a log of its own.
        code = guarded(body, name=f"rank {env.global_rank}: ")
        if not stopped:
            return code
        # A task that ends badly may take the others with it, and rank 0 is not ready yet.
        return self._after_stop(env, stopped[0]) if env.global_rank == 0 else 0

    def _settle(self, env) -> None:
        """Makes the process what it would be had the user started it."""
        os.chdir(self.cwd)
        sys.path.extend(folder for folder in self.path if folder not in sys.path)
        for name, value in self.variables.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        # Its lines go to the rank's log once, not again through ours.
        logging.getLogger("submitit").propagate = False
        # submitit ignores SIGTERM; testing and timing shall end by it.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # Schedulers signal more than once and kill by themselves: only they decide when saving takes too long.
        StopRequest.SAME_REQUEST_SECONDS = math.inf
        if env.cluster == "local":
            distributed.die_with_parent()

    def _as_rank(self, env) -> None:
        import torch

        distributed.take_over(self.config, self.plugins, "config of the job")
        if env.cluster == "slurm" and cfg.DEVICE == "auto" and distributed.device_type() == "cpu":
            warnings.warn(
                f"the job asked for GPUs, but torch sees none on {env.hostname}: the CPU is used", stacklevel=1
            )
        if env.cluster == "slurm":
            # Where SLURM binds a task to its cores, those are all that torch sees; where not, this is its share.
            torch.set_num_threads(min(torch.get_num_threads(), cfg.LAUNCH.CPUS_PER_GPU))
        if cfg.NUM_GPUS == 1:
            if distributed.device_type() == "cuda":
                torch.cuda.set_device(0)
            self.main()
            return
        tasks = env.num_tasks // env.num_nodes
        if distributed.device_type() == "cuda" and torch.cuda.device_count() < tasks:
            raise UserError(
                f"NUM_GPUS: {tasks} processes on {env.hostname}, where torch sees {torch.cuda.device_count()} GPU(s)"
            )
        path = os.path.join(self.folder, f"{env.job_id}_address_{self._restarts()}_{self.restarts}.json")
        store = rendezvous.meet(path, env.global_rank, env.node, node_addresses(), distributed.start_timeout())
        sharing = 1 if env.cluster == "slurm" else tasks
        distributed.init_process_group(env.global_rank, env.num_tasks, env.local_rank, sharing, store)
        distributed.watched(self.main, (store.host, store.port))

    # ----------------------------------------------------------------- put back

    def _after_stop(self, env, stop: Interrupted) -> Optional[int]:
        """Has the job put back into the queue if that is wanted; returns the exit code, None if it was put back."""
        if reason := self._reason_to_end(env, stop):
            print(f"pycls: not put back into the queue by pycls: {reason}", file=sys.stderr)
            return stop.code
        where = "into the queue" if env.cluster == "slurm" else "to work"
        print(f"pycls: the job is put back {where}, restart {self._restarts() + 1} of at most {self._max_retry()}")
        sys.stdout.flush()
        # Putting back ends every process of the job by SIGTERM, this one too; and once is enough.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        put_back = signal.signal(warning_signal(), signal.SIG_IGN)
        try:
            # submitit's own handler, now that all is saved: it stores `checkpoint()` and asks for the requeue.
            put_back(warning_signal(), None)
        except SystemExit:
            return None
        except (subprocess.SubprocessError, OSError, RuntimeError) as error:
            print(f"pycls: the job could not be put back into the queue: {error}", file=sys.stderr)
        return stop.code

    def _reason_to_end(self, env, stop: Interrupted) -> str:
        """Why the job shall not be put back ('': it shall)."""
        if env.cluster == "local":
            if stop.signal != warning_signal():
                return "it was asked to end"
        else:
            job = job_state(env.job_id)
            if int(job.get("Restarts", 0)) > int(os.environ.get("SLURM_RESTART_COUNT", 0)):
                return "SLURM does so itself"
            state = job.get("JobState", "RUNNING")
            if stop.signal == signal.SIGINT or state != "RUNNING":
                return f"it was asked to end (state {state})"
        if self._restarts() >= self._max_retry():
            return f"restarts so far: {self._restarts()}, LAUNCH.MAX_RETRY: {self._max_retry()}"
        return ""

    def _restarts(self) -> int:
        """How often the job has begun anew, by us or by SLURM itself."""
        by_slurm = os.environ.get("SLURM_RESTART_COUNT", 0) if os.environ.get("SUBMITIT_EXECUTOR") == "slurm" else 0
        return max(self.restarts, int(by_slurm))

    def _max_retry(self) -> int:
        # From the text: submitit may ask before the config is in force.
        import yaml

        return yaml.safe_load(self.config)["LAUNCH"]["MAX_RETRY"]


# With these codes submitit's tasks end when the job goes on later (the local executor starts it anew).
_PUT_BACK = {"slurm": 255, "local": 144}


def exit_file(folder: str, job_id: str, rank: int) -> str:
    """Where a rank leaves its exit code."""
    return os.path.join(folder, f"{job_id}_{rank}_exit")


def scontrol_show(kind: str, name: str) -> Dict[str, str]:
    """What SLURM knows of a job or node, empty if it knows nothing or can't be asked."""
    try:
        done = subprocess.run(
            ["scontrol", "--oneliner", "show", kind, name], capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return dict(re.findall(r"(?:^|\s)(\w+)=(\S*)", done.stdout)) if done.returncode == 0 else {}


def job_state(job_id: str) -> Dict[str, str]:
    """JobState, Reason, ExitCode, Restarts and the other fields of `scontrol show job`."""
    return scontrol_show("job", job_id)


def node_addresses() -> List[str]:
    """Addresses of this node, the likeliest first: the one that SLURM's daemons use, then the host's names."""
    known = scontrol_show("node", os.environ["SLURMD_NODENAME"]) if "SLURMD_NODENAME" in os.environ else {}
    return list(dict.fromkeys(filter(None, [known.get("NodeAddr"), socket.getfqdn(), socket.gethostname()])))
