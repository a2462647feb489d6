"""What a run tells: log lines, records that programs read back, a progress bar, TensorBoard scalars.

A record is one line `json_stats: {"_type": "train_epoch", ...}` among other log lines. `dump_log_data`
makes it, `load_log_data` and `sort_log_data` read a whole log; plots and sweeps need nothing else.

torch is imported where it is used, so that programs which only read logs start at once.
"""

import contextlib
import decimal
import json
import logging
import math
import os
import platform
import subprocess
import sys
import time
from typing import Any, Dict, Iterable, List, Optional

import simplejson

from pycls.core.config import cfg
from pycls.core.errors import UserError
from pycls.core.io import pathmgr

# The line format of PyCls: where the message comes from, then the message.
_FORMAT = "[%(filename)s: %(lineno)3d]: %(message)s"
_LOG_FILE = "stdout.log"
_TAG = "json_stats: "
_TYPE = "_type"

# Strict JSON has no word for these, so they are written as text and turned back when read.
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

# The only environment variables that are ever logged: the others may hold passwords and keys.
_ENV_NAMES = (
    "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG", "PYTORCH_CUDA_ALLOC_CONF",
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK",
    "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NTASKS",
    "SLURM_PROCID", "SLURM_LOCALID", "SLURM_RESTART_COUNT",
)  # fmt: skip
_ENV_PREFIXES = ("NCCL_", "TORCH_NCCL_")

# Handlers that setup_logging added, so that a second call replaces them and touches nobody else's.
_handlers: List[logging.Handler] = []


# ------------------------------------------------------------------- log lines
def get_logger(name: str) -> logging.Logger:
    """Returns the logger `name`, kept below "pycls" so that plug-ins log as the package does."""
    return logging.getLogger(name if name.split(".")[0] == "pycls" else f"pycls.{name}")


def setup_logging(log_file: str = _LOG_FILE) -> None:
    """Sends log lines where the config says; to be called once OUT_DIR and the process group are there.

    Rank 0 appends to OUT_DIR/`log_file` if OUT_DIR exists, and writes to standard output unless LOG_DEST
    is file. Other ranks write errors to standard error. Calling again replaces the previous set-up.

    Raises:
        UserError: the log file can't be opened.
    """
    for handler in _handlers:
        logging.root.removeHandler(handler)
        handler.close()
    _handlers.clear()
    rank = _rank()
    if rank == 0:
        _handlers.extend(_master_handlers(log_file))
    else:
        _handlers.append(_ConsoleHandler("stderr"))
        _handlers[0].setLevel(logging.ERROR)
    for handler in _handlers:
        handler.setFormatter(logging.Formatter(_FORMAT if rank == 0 else f"{_FORMAT} (rank {rank})"))
        # On the root logger, so that warnings of other libraries reach the log too.
        logging.root.addHandler(handler)
    logging.getLogger("pycls").setLevel(logging.INFO if rank == 0 else logging.ERROR)


def _master_handlers(log_file: str) -> Iterable[logging.Handler]:
    to_file = cfg.LOG_DEST == "file" and cfg.OUT_DIR != ""
    if to_file or os.path.isdir(cfg.OUT_DIR):
        yield _file_handler(os.path.join(cfg.OUT_DIR, log_file))
    if not to_file:
        yield _ConsoleHandler("stdout")


def _file_handler(path: str) -> logging.Handler:
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        _end_last_line(path)
        # Names of files may hold bytes that are no text.
        return _LogFile(path, mode="a", encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise UserError(f"OUT_DIR: can't write {path}: {error.strerror}") from None


class _LogFile(logging.FileHandler):
    """A log file that stops the run when it can't be written: a run without records would be of little use."""

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        raise UserError(
            f"{self.baseFilename}: can't be written ({error.strerror}); checkpoints are untouched"
        ) from None


def _end_last_line(path: str) -> None:
    """A killed run may leave half a line; the next record must not be glued to it."""
    with open(path, "ab+") as f:
        if f.tell():
            f.seek(-1, os.SEEK_END)
            if f.read(1) != b"\n":
                f.write(b"\n")


class _ConsoleHandler(logging.StreamHandler):
    """Writes to what sys.stdout or sys.stderr is at that moment, above a progress bar if one is up."""

    def __init__(self, name: str) -> None:
        logging.Handler.__init__(self)
        self._stream_name = name

    @property
    def stream(self):
        return getattr(sys, self._stream_name)

    def emit(self, record: logging.LogRecord) -> None:
        with _TqdmProgress.hidden(self.stream):
            super().emit(record)


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


# --------------------------------------------------------------------- records
def dump_log_data(data: Dict[str, Any], data_type: str, prec: Optional[int] = 4) -> str:
    """Returns the record of `data` as one line of strict JSON behind the tag `json_stats: `.

    Args:
        data: names to values: text, numbers (numpy and torch ones too), lists and dicts of them.
        data_type: written as `_type`.
        prec: decimals of floats; None keeps all digits.
    """
    record = float_to_decimal({**_plain(data), _TYPE: data_type}, prec)
    return _TAG + simplejson.dumps(record, sort_keys=True, use_decimal=True, allow_nan=False)


def float_to_decimal(data: Any, prec: Optional[int] = 4) -> Any:
    """Returns `data` with each finite float, at any depth, as a decimal of `prec` decimals."""
    if prec is None:
        return data
    if isinstance(data, dict):
        return {k: float_to_decimal(v, prec) for k, v in data.items()}
    if isinstance(data, (list, tuple)):
        return [float_to_decimal(v, prec) for v in data]
    if isinstance(data, float) and math.isfinite(data):
        return decimal.Decimal(f"{data:.{prec}f}")
    return data


def _plain(value: Any) -> Any:
    """Returns `value` in the types that JSON knows."""
    if hasattr(value, "tolist"):  # numpy and torch, without importing either
        value = value.tolist()
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _restored(value: Any) -> Any:
    """The inverse of `_plain` for numbers that are not finite."""
    if isinstance(value, dict):
        return {k: _restored(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_restored(v) for v in value]
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value


def load_log_data(log_file: str, data_types_to_skip: Iterable[str] = ()) -> Dict[str, Dict[str, List]]:
    """Reads the records of a log, in the order written; lines that hold no whole record are skipped.

    Returns:
        data[type][metric]: one value per record of that type, None where a record lacks the metric.
    Raises:
        UserError: the file can't be read.
    """
    try:
        with pathmgr.open(log_file, "r", encoding="utf-8", errors="replace") as f:
            records = [record for record in map(_parse, f) if record is not None]
    except OSError as error:
        raise UserError(f"{log_file}: can't be read: {error.strerror or error}") from None
    by_type: Dict[str, List[Dict]] = {}
    for record in records:
        data_type = record.pop(_TYPE)
        if data_type not in data_types_to_skip:
            by_type.setdefault(data_type, []).append(record)
    data = {}
    for data_type, group in by_type.items():
        metrics = sorted({metric for record in group for metric in record})
        data[data_type] = {metric: [record.get(metric) for record in group] for metric in metrics}
    return data


def _parse(line: str) -> Optional[Dict[str, Any]]:
    """Returns the record in a log line, or None."""
    # A second tag means that a line was cut and the next one glued to it: the latter may be whole.
    start = line.find(_TAG)
    while start >= 0:
        try:
            record = json.loads(line[start + len(_TAG) :])
        except ValueError:
            record = None
        if isinstance(record, dict) and isinstance(record.get(_TYPE), str):
            return _restored(record)
        start = line.find(_TAG, start + 1)
    return None


def sort_log_data(data: Dict[str, Dict[str, List]]) -> Dict[str, Dict[str, Any]]:
    """Orders what `load_log_data` returned and splits "3/100" into numbers.

    Types with epochs gain epoch_ind and epoch_max (iter_ind and iter_max too if they have iterations) and
    are ordered by them; where a resumed run repeated an epoch or iteration, its last record counts.
    Of the other types, such as complexity, only one record is of use: each metric becomes the last value.
    """
    return {t: _sorted_by_epoch(d) if "epoch" in d else {m: v[-1] for m, v in d.items()} for t, d in data.items()}


def _sorted_by_epoch(metrics: Dict[str, List]) -> Dict[str, List]:
    metrics = dict(metrics)
    clocks = [name for name in ("epoch", "iter") if name in metrics]
    for name in clocks:
        pairs = [[int(number) for number in text.split("/")] for text in metrics[name]]
        metrics[f"{name}_ind"], metrics[f"{name}_max"] = map(list, zip(*pairs))
    moments = list(zip(*(metrics[f"{name}_ind"] for name in clocks)))
    last = {moment: row for row, moment in enumerate(moments)}
    order = [last[moment] for moment in sorted(last)]
    return {metric: [values[row] for row in order] for metric, values in metrics.items()}


# ----------------------------------------------------------------- environment
def log_environment() -> None:
    """Logs versions, machine, devices, threads and the allowed environment variables; never fails."""
    logger = get_logger(__name__)
    for name, value in {**_software(), **_machine(), **_devices()}.items():
        logger.info("%s: %s", name, value)
    for name in sorted(os.environ):
        if name in _ENV_NAMES or name.startswith(_ENV_PREFIXES):
            logger.info("%s=%s", name, os.environ[name])


def _software() -> Dict[str, Any]:
    import numpy
    import torch

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "cuda": torch.version.cuda or "none",
        "cudnn": torch.backends.cudnn.version() or "none",
        "commit": git_commit() or "unknown",
    }


def _machine() -> Dict[str, Any]:
    import torch

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "host": platform.node(),
        "system": platform.platform(),
        "cpu cores": f"{usable} usable of {os.cpu_count()}",
        "torch threads": f"{torch.get_num_threads()} within, {torch.get_num_interop_threads()} across operations",
    }


def _devices() -> Dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        return {"gpus": "none"}
    try:
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    except RuntimeError as error:  # a driver in a bad state: training will say more, this is only a log
        names = [f"unknown ({str(error).splitlines()[0]})"]
    return {"gpus": ", ".join(f"{names.count(n)} x {n}" for n in dict.fromkeys(names)), "driver": _driver()}


def _driver() -> str:
    try:
        with open("/proc/driver/nvidia/version") as f:
            return f.readline().strip()
    except OSError:
        return "unknown"


def git_commit() -> Optional[str]:
    """The commit of the tree that this file is in, marked if files differ from it; None outside of one."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if not os.path.exists(os.path.join(root, ".git")):
        # A job runs a copy of the code, which says what it was copied from.
        with contextlib.suppress(OSError), open(os.path.join(root, "COMMIT"), encoding="utf-8") as f:
            return f.read().strip() or None
        return None
    command = ["git", "-C", root, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


# -------------------------------------------------------------------- progress
class Progress:
    """How far an epoch is; this one shows nothing."""

    def update(self, n: int = 1, **stats: float) -> None:
        """Notes `n` more iterations, and numbers to show (their last values stay)."""

    def close(self) -> None:
        """Takes the display away."""

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


class _TqdmProgress(Progress):
    """A bar with rate and time left on standard error."""

    _shown = 0

    def __init__(self, total: int, start: int, description: str) -> None:
        from tqdm import tqdm

        # `initial` keeps the iterations before a resume out of the rate.
        self._bar = tqdm(total=total, initial=start, desc=description, leave=False, dynamic_ncols=True, mininterval=0.5)
        self._stats: Dict[str, str] = {}
        _TqdmProgress._shown += 1

    def update(self, n: int = 1, **stats: float) -> None:
        if stats:
            self._stats.update((name, f"{value:.4g}") for name, value in stats.items())
            self._bar.set_postfix(self._stats, refresh=False)
        self._bar.update(n)

    def close(self) -> None:
        if not self._bar.disable:
            self._bar.close()
            _TqdmProgress._shown -= 1

    @classmethod
    def hidden(cls, stream) -> contextlib.AbstractContextManager:
        """A context in which lines may be written to `stream` without breaking the bar."""
        if not cls._shown:
            return contextlib.nullcontext()
        from tqdm import tqdm

        return tqdm.external_write_mode(file=stream)


def progress(total: int, start: int = 0, description: str = "") -> Progress:
    """Returns the display of `total` iterations, `start` of them done; use it in a `with`.

    It is a bar on rank 0 if LOG.PROGRESS is on and standard error is a terminal, else it shows nothing.
    """
    if cfg.LOG.PROGRESS and sys.stderr.isatty() and _rank() == 0:
        return _TqdmProgress(total, start, description)
    return Progress()


# --------------------------------------------------------------------- scalars
class Scalars:
    """Where numbers go besides the log; this one drops them."""

    def add(self, tag_prefix: str, stats: Dict[str, Any], step: int) -> None:
        """Adds the numbers in `stats` as tag_prefix/name; text in it is left out.

        Args:
            step: training iterations since the start of the run, for every prefix, so that after a resume
                one number says what is older than the checkpoint and what is written again.
        """

    def close(self) -> None:
        """Writes what is left."""


class _TensorBoardScalars(Scalars):
    """Scalars in OUT_DIR/tensorboard."""

    def __init__(self, folder: str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError(
                "LOG.TENSORBOARD: True needs the package tensorboard: pip install 'pycls[tensorboard]', or use False"
            ) from None
        self._open, self._folder, self._writer = SummaryWriter, folder, None

    def add(self, tag_prefix: str, stats: Dict[str, Any], step: int) -> None:
        if self._writer is None:
            # The first step is known only now; what a killed run wrote from there on is replaced.
            self._writer = self._open(self._folder, purge_step=step)
        for name, value in stats.items():
            value = value.tolist() if hasattr(value, "tolist") else value
            if isinstance(value, (int, float)):
                self._writer.add_scalar(f"{tag_prefix}/{name}", value, step)
        # A kill must not leave a hole in front of the checkpoint that the run continues from.
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def scalar_writer() -> Scalars:
    """Returns the TensorBoard sink if LOG.TENSORBOARD is on and this is rank 0, else one that drops all.

    Raises:
        UserError: LOG.TENSORBOARD is on and tensorboard is not installed.
    """
    if cfg.LOG.TENSORBOARD and _rank() == 0:
        return _TensorBoardScalars(os.path.join(cfg.OUT_DIR, "tensorboard"))
    return Scalars()
