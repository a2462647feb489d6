"""Processes: which device and rank this one is, starting the others, and the few collectives we need.

A program is a function `main()` that runs once per rank. `run(main)` decides who starts the ranks:
nobody (one process), this process (NUM_GPUS local ones), a launcher such as torchrun, or a job (`submit`).
The number of processes always comes from the config; left-over SLURM variables change nothing.
"""

import ctypes
import os
import signal
import sys
import threading
import warnings
from datetime import timedelta
from multiprocessing import connection
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tqdm import tqdm

from pycls.core import rendezvous, watch
from pycls.core.config import cfg
from pycls.core.errors import FaultError, UserError
from pycls.core.interrupt import Interrupted, stop_signals

# How long a client waits for the rendezvous store to answer.
_STORE_TIMEOUT = timedelta(seconds=60)


def get_rank() -> int:
    """Rank of this process, 0 when there is only one."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def get_world_size() -> int:
    """Number of processes."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_master_proc() -> bool:
    """Whether this process writes the files (rank 0)."""
    return get_rank() == 0


def device_type() -> str:
    """'cuda' or 'cpu', as DEVICE says.

    Raises:
        UserError: DEVICE is cuda and there is none.
    """
    if cfg.DEVICE == "cuda" and not torch.cuda.is_available():
        raise UserError("DEVICE: cuda was asked for, but torch sees no CUDA device here; use DEVICE cpu or DEVICE auto")
    if cfg.DEVICE == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return cfg.DEVICE


def get_device() -> torch.device:
    """The device of this process."""
    kind = device_type()
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")


def started_by_launcher() -> bool:
    """Whether torchrun (or an equivalent) started this process and set the rendezvous variables."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"))


def check_process_count() -> None:
    """Refuses more local processes than this machine has devices for.

    Raises:
        UserError: says what there is and what to type.
    """
    if cfg.LAUNCH.MODE == "slurm":
        nodes_and_tasks()
        return
    wanted, kind = cfg.NUM_GPUS, device_type()
    if started_by_launcher():
        if int(os.environ["WORLD_SIZE"]) != wanted:
            raise UserError(
                f"NUM_GPUS: {wanted}, but the launcher started {os.environ['WORLD_SIZE']} processes; "
                f"add NUM_GPUS {os.environ['WORLD_SIZE']}"
            )
        return
    if wanted > cfg.MAX_GPUS_PER_NODE:
        raise UserError(
            f"NUM_GPUS: {wanted} is more than MAX_GPUS_PER_NODE {cfg.MAX_GPUS_PER_NODE}; "
            "start several machines with LAUNCH.MODE slurm or a launcher, or type a smaller NUM_GPUS"
        )
    if kind == "cuda" and wanted > torch.cuda.device_count():
        raise UserError(
            f"NUM_GPUS: {wanted} processes asked for, but this machine has {torch.cuda.device_count()} GPU(s); "
            f"add NUM_GPUS {torch.cuda.device_count()} (batch sizes are global and stay as they are)"
        )
    if kind == "cpu" and cfg.DEVICE != "cpu" and wanted > (os.cpu_count() or 1):
        raise UserError(
            f"NUM_GPUS: {wanted} processes asked for, but this machine has no GPU and {os.cpu_count()} CPU cores; "
            "add NUM_GPUS 1 (batch sizes are global and stay as they are), or DEVICE cpu to insist"
        )


def nodes_and_tasks() -> Tuple[int, int]:
    """Over how many machines NUM_GPUS processes are spread, and how many run on each.

    Raises:
        UserError: they can't be spread evenly.
    """
    wanted, most = cfg.NUM_GPUS, cfg.MAX_GPUS_PER_NODE
    nodes = -(-wanted // most)
    if wanted % nodes:
        below, above = wanted // nodes * nodes, (wanted // nodes + 1) * nodes
        raise UserError(
            f"NUM_GPUS: {wanted} processes can't be spread evenly over {nodes} machines of at most "
            f"MAX_GPUS_PER_NODE {most}; the nearest are NUM_GPUS {below} and {above}"
        )
    return nodes, wanted // nodes


def run(main: Callable[[], Any]) -> Any:
    """Runs `main` once per rank of the config and returns what rank 0's returned (None if in children or a job)."""
    check_process_count()
    if cfg.LAUNCH.MODE != "local":
        from pycls.core import submit

        return submit.submit(main)
    if started_by_launcher():
        return _as_rank(main)
    if cfg.NUM_GPUS == 1:
        if device_type() == "cuda":
            torch.cuda.set_device(0)
        return main()
    return multi_proc_run(cfg.NUM_GPUS, main)


# ------------------------------------------------------------------ process group


def _backend() -> str:
    kind = device_type()
    if cfg.DIST_BACKEND == "auto":
        return "nccl" if kind == "cuda" else "gloo"
    if cfg.DIST_BACKEND == "nccl" and kind == "cpu":
        warnings.warn("DIST_BACKEND nccl needs GPUs; gloo is used on the CPU", stacklevel=2)
        return "gloo"
    return cfg.DIST_BACKEND


def init_process_group(rank: int, world_size: int, local_rank: int, local_size: int, store=None) -> None:
    """Joins the process group, and takes this rank's device or its share of the CPU cores."""
    if device_type() == "cuda":
        torch.cuda.set_device(local_rank)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // local_size))
    where = {"store": store} if store is not None else {"init_method": "env://"}
    # The backend's own time-out, whose text names nobody, comes after the watch's: only where all ranks wait alike.
    timeout = start_timeout() + timedelta(seconds=60)
    try:
        dist.init_process_group(_backend(), rank=rank, world_size=world_size, timeout=timeout, **where)
    except RuntimeError as error:
        if not watch.is_broken_collective(error):
            raise
        reason = str(error).splitlines()[0]
        raise FaultError(f"rank {rank}: the {world_size} processes did not find each other: {reason}") from None


def destroy_process_group() -> None:
    """Leaves the process group, if there is one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _as_rank(main: Callable[[], Any]) -> Any:
    """Runs `main` as one rank of a launcher's job."""
    env = {name: int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", env["WORLD_SIZE"]))
    store, part = None, ""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        store, part = rendezvous.join_torchrun(env["RANK"], env["WORLD_SIZE"], start_timeout())
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    init_process_group(env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"], local_size, store)
    return watched(main, address, part)


def start_timeout() -> timedelta:
    """How long ranks wait for each other when they start: longer than in a step, as some have much to read first."""
    return timedelta(seconds=max(cfg.DIST_TIMEOUT, watch.START_SECONDS))


def watched(main: Callable[[], Any], address: Tuple[str, int], part: str = "") -> Any:
    """Runs `main` on a rank of the group, watching the others (see `watch`), then leaves the group.

    Args:
        address: host and port of the rendezvous store. part: the name in it of what is this group's alone.
    Raises:
        FaultError: another rank died, so that a collective broke.
    """
    watch.meet(*address, f"{_PREFIX}/{part}")
    return _watched(main)


def _watched(main: Callable[[], Any]) -> Any:
    watching = watch.Watch(get_rank(), get_world_size(), cfg.DIST_TIMEOUT)
    try:
        result = main()
    except BaseException as error:
        reason = watching.explained(error)
        if reason is not error:
            # Not leaving the group: that can wait for ever for ranks that are gone.
            raise reason from None
        destroy_process_group()
        raise
    watching.leave()
    destroy_process_group()
    return result


# ----------------------------------------------------------------- local processes


class RankFailed(RuntimeError):
    """A rank ended badly; `code` is the exit code that is passed on, `told` whether all is said."""

    def __init__(self, message: str, code: int, told: Optional[bool] = None):
        super().__init__(message)
        # A rank explains exit codes of our own itself.
        self.code, self.told = code, code in (2, FaultError.code, Interrupted.code) if told is None else told


def multi_proc_run(num_proc: int, fun: Callable, fun_args: Tuple = (), fun_kwargs: Optional[Dict] = None) -> None:
    """Runs `fun` in `num_proc` new processes that form one group; returns when all have ended.

    The parent serves the rendezvous on a port that the system picks, so that no port is guessed. If one rank
    fails, the others are ended. The function and its arguments must pickle.

    Raises:
        RankFailed: names the rank that failed first.
    """
    # Before anything starts: a free port from the system, served by the parent for as long as the ranks live.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_STORE_TIMEOUT)
    context = mp.get_context("spawn")
    state = (cfg.dump(), list(PLUGINS), os.getpid())
    processes = [
        context.Process(target=_child, args=(rank, num_proc, store.port, state, fun, fun_args, fun_kwargs or {}))
        for rank in range(num_proc)
    ]
    forward = _forward_signals(processes)
    try:
        for process in processes:
            process.start()
        _wait(processes, dist.PrefixStore(_PREFIX, store))
    except RankFailed:
        for process in processes:
            # No SIGTERM: a rank would finish its log period first, for which it waits in vain.
            process.kill()
        raise
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
        for process in processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()
        for number, handler in forward.items():
            signal.signal(number, handler)


# What the names of local ranks in the store begin with, and for how many seconds the other ranks may end by themselves.
_PREFIX, _PATIENCE = "pycls", 5

# Plug-in files and modules given on the command line; child processes import them too.
PLUGINS: List[str] = []


def _forward_signals(processes) -> Dict[int, Any]:
    """Passes what asks for it on to the ranks, which save and end; returns former handlers."""

    def forward(number, frame):
        for process in processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGTERM)

    try:
        return {number: signal.signal(number, forward) for number in stop_signals()}
    except ValueError:
        # Not the main thread (a notebook): signals stay with whoever owns them.
        return {}


def _wait(processes, store) -> None:
    """Waits for all; at the first failure, gives the others a moment to end by themselves and reports it once."""
    waiting = dict(enumerate(processes))
    failed: Dict[int, int] = {}
    unsaid, patience = None, None
    while waiting:
        ready = connection.wait([p.sentinel for p in waiting.values()], timeout=patience)
        if not ready:
            break
        for rank in [r for r, p in waiting.items() if p.sentinel in ready]:
            process = waiting.pop(rank)
            process.join()
            if process.exitcode != 0:
                failed[rank] = process.exitcode
                patience = _PATIENCE
            if process.exitcode < 0:
                first = watch.note_death(store, rank, _death(process.exitcode))
                unsaid = first if unsaid is None else unsaid
    if failed:
        raise _first_cause(failed, unsaid)


def _first_cause(failed: Dict[int, int], unsaid: Optional[bool]) -> RankFailed:
    """What to report of (rank: exit code): one that was killed, or failed by itself, not those that lost it."""
    rank, code = min(failed.items(), key=lambda item: (item[1] >= 0, item[1] == FaultError.code))
    if code < 0:
        return RankFailed(f"rank {rank} {_death(code)}; the other ranks were ended", FaultError.code, told=not unsaid)
    return RankFailed(f"rank {rank} ended with exit code {code}; the other ranks were ended", code)


def _death(code: int) -> str:
    """What the negative exit code of a process means."""
    hint = " (by hand, or by the system when memory ran out)" if -code == signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{hint}"


def _child(rank, world_size, port, state, fun, fun_args, fun_kwargs) -> None:
    """Entry of a local rank."""
    from pycls.core.cli import guarded

    text, plugins, parent = state
    die_with_parent()
    if os.getppid() != parent:
        sys.exit(1)
    # Ctrl-C reaches every process of the terminal; the parent passes it on, once.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Compilers show bars too. The usual lock is one between processes, and would outlive this one.
    tqdm.set_lock(threading.RLock())
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=_STORE_TIMEOUT)

    watch.meet("127.0.0.1", port, _PREFIX)

    def body():
        take_over(text, plugins, "config of the parent process")
        init_process_group(rank, world_size, rank, world_size, store)
        _watched(lambda: fun(*fun_args, **fun_kwargs))

    code = guarded(body, speak=watch.first_to_speak, name=f"rank {rank}: ")
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: threads of the group and of sharding may still run, to be waited for or to abort the process.
    os._exit(code)


def take_over(text: str, plugins: Sequence[str], source: str) -> None:
    """Makes a new process what the one that started it was: its plug-ins, and its config from the text."""
    from pycls.core.cli import load_plugins

    load_plugins(plugins)
    cfg.defrost()
    cfg.merge_from_text(text, source)
    cfg.freeze()


def die_with_parent() -> None:
    """Asks Linux to kill this process when the one that started it dies, so that no orphan goes on working."""
    if sys.platform.startswith("linux"):
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


# -------------------------------------------------------------------- collectives


def all_reduce_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Sums `tensor` over all processes in place and returns it."""
    if get_world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def scaled_all_reduce(tensors: List[torch.Tensor]) -> List[torch.Tensor]:
    """Averages each tensor over all processes in place (PyCls's name) and returns the list."""
    for tensor in tensors:
        all_reduce_sum(tensor).div_(get_world_size())
    return tensors


def broadcast_tensors(tensors: Iterable[torch.Tensor]) -> None:
    """Gives every process rank 0's values, in place."""
    if get_world_size() > 1:
        for tensor in tensors:
            dist.broadcast(tensor, src=0)


def any_rank(flag: bool) -> bool:
    """Whether `flag` is true on any process."""
    return flag if get_world_size() == 1 else any(gather_objects(flag))


def broadcast_object(value: Any) -> Any:
    """Returns rank 0's `value` on every rank."""
    if get_world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, device=get_device())
    return box[0]


def gather_objects(value: Any) -> List[Any]:
    """Returns the list of all ranks' values, on every rank."""
    if get_world_size() == 1:
        return [value]
    values: List[Any] = [None] * get_world_size()
    dist.all_gather_object(values, value)
    return values


def barrier() -> None:
    """Waits until every rank is here."""
    if get_world_size() > 1:
        dist.barrier()
