"""Running statistics: kept on the device, fetched once per log period, written as json_stats records."""

import time
from typing import Callable, Dict, Iterable, Iterator, List, Optional

import numpy as np
import torch

from pycls.core import distributed as dist
from pycls.core import logging
from pycls.core.config import cfg
from pycls.core.errors import UserError

logger = logging.get_logger(__name__)

# Columns of a row of step statistics.
_LOSS, _TOP1, _TOP5, _COUNT = range(4)


def topk_correct(logits: torch.Tensor, labels: torch.Tensor, ks: List[int]) -> List[torch.Tensor]:
    """For each k, how many labels are among the k highest logits; k is capped at the number of classes.

    Args:
        logits: (batch, classes). labels: (batch,) class numbers; negative ones (padding) count as wrong.
    """
    deepest = min(max(ks), logits.shape[1])
    top = logits.topk(deepest, dim=1).indices
    hits = top == labels.view(-1, 1)
    return [hits[:, : min(k, deepest)].any(dim=1).sum() for k in ks]


def topk_errors(logits: torch.Tensor, labels: torch.Tensor, ks: List[int]) -> List[torch.Tensor]:
    """For each k, the top-k error of a batch in percent (0-d tensors)."""
    return [(1.0 - hits / logits.shape[0]) * 100.0 for hits in topk_correct(logits, labels, ks)]


def time_string(seconds: float) -> str:
    """Seconds as 'DD,HH:MM:SS'."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days:02},{hours:02}:{minutes:02}:{seconds:02}"


def gpu_mem_usage() -> float:
    """Peak memory of this process in MB: on the GPU if there is one, else resident."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    try:
        import resource
    except ImportError:
        # Windows has no resource module; the log then says 0 rather than stopping.
        return 0.0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


class StepStats:
    """Rows of (loss sum, top-1 wrong, top-5 wrong, samples), one per step, that stay on the device until fetched."""

    def __init__(self, device: torch.device, rows: int):
        # One row more than a log period: the last one carries a flag that all ranks exchange with the rows.
        self.rows = torch.zeros(rows + 1, 4, device=device)
        self.used = 0

    def add(self, loss: Optional[torch.Tensor], logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Writes one step's row without waiting for the device. Samples with a negative label don't count."""
        row, logits = self.rows[self.used], logits.detach().float()
        count = (labels >= 0).sum()
        correct = topk_correct(logits, labels, [1, 5])
        if loss is not None:
            row[_LOSS] = loss.detach().float() * count
        row[_TOP1] = count - correct[0]
        row[_TOP5] = count - correct[1]
        row[_COUNT] = count
        self.used += 1

    @property
    def full(self) -> bool:
        """Whether the next step needs a fetch first."""
        return self.used == len(self.rows) - 1

    def fetch(self, flag: bool = False) -> np.ndarray:
        """Sums the rows over all processes and brings them to the host: the one synchronisation per log period.

        Returns:
            (steps, 4) sums. `self.flag` then says whether any process passed a true `flag`.
        """
        self.rows[-1, 0] = float(flag)
        sums = dist.all_reduce_sum(self.rows.clone()).cpu().double().numpy()
        self.flag = bool(sums[-1, 0])
        used, self.used = self.used, 0
        self.rows.zero_()
        return sums[:used]


def _percent(wrong: float, count: float) -> float:
    return float(100.0 * wrong / count) if count else 0.0


class TrainMeter:
    """Statistics of training epochs.

    Per step call `add`, and `flush` when it is `due`. Errors and losses in a record are medians over the log
    period's steps, those of an epoch means over its samples (PyCls). Times are read where the device is waited
    for anyway, so they are those of finished steps.
    """

    def __init__(self, epoch_iters: int, device: torch.device):
        self.epoch_iters = epoch_iters
        self.max_iter = cfg.OPTIM.MAX_EPOCH * epoch_iters
        self.stats = StepStats(device, min(cfg.LOG_PERIOD, max(epoch_iters, 1)))
        self.lr = 0.0
        self.reset()

    def reset(self) -> None:
        """Starts an epoch."""
        self.window = np.zeros((0, 4))
        self.totals = np.zeros(4)
        self.steps = 0
        self.data_seconds = self.seconds_before = self.window_seconds = 0.0
        self.start = self.last = time.perf_counter()

    def timed(self, batches: Iterable) -> Iterator:
        """Passes batches on, noting how long each was waited for."""
        iterator = iter(batches)
        self.start = self.last = time.perf_counter()
        while True:
            asked = time.perf_counter()
            batch = next(iterator, None)
            if batch is None:
                return
            self.data_seconds += time.perf_counter() - asked
            yield batch

    def add(self, loss: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor, lr: float) -> None:
        """Adds one step: loss (0-d), logits (batch, classes), labels (batch,). Does not wait for the device."""
        self.stats.add(loss, logits, labels)
        self.lr = lr

    def due(self, iteration: int) -> bool:
        """Whether statistics leave the device after this iteration (from 0)."""
        return (iteration + 1) % cfg.LOG_PERIOD == 0 or iteration + 1 == self.epoch_iters or self.stats.full

    def flush(self, epoch: int, iteration: int, flag: bool = False, arithmetic: Callable[[], str] = str) -> bool:
        """Fetches what has gathered; returns whether any process passed a true `flag`.

        Args:
            arithmetic: gives what a message about a loss that is not finite says of the precision.
        Raises:
            UserError: a loss is not finite. All processes see the same sums, so all stop.
        """
        rows = self.stats.fetch(flag)
        now = time.perf_counter()
        self.window_seconds, self.last = now - self.last, now
        self.window = rows
        self.steps += len(rows)
        self.totals += rows.sum(axis=0)
        losses = rows[:, _LOSS] / rows[:, _COUNT]
        if not np.isfinite(losses).all():
            first = iteration + 1 - len(losses) + int(np.argmin(np.isfinite(losses)))
            raise UserError(
                f"the loss is {losses[~np.isfinite(losses)][0]} in epoch {epoch + 1}, iteration {first + 1}, at "
                f"learning rate {self.lr:.3g}{arithmetic()}; the last checkpoint is untouched. "
                "Try a lower OPTIM.BASE_LR, OPTIM.GRAD_CLIP 1.0 or PRECISION.MODE amp_bf16"
            )
        return self.stats.flag

    @property
    def seconds_per_step(self) -> float:
        """Mean over the steps of this epoch (of this process's life) that have been fetched."""
        return (self.last - self.start) / max(self.steps, 1)

    def get_iter_stats(self, epoch: int, iteration: int) -> Dict:
        """The record of the log period that ends with `iteration` (from 0)."""
        count = self.window[:, _COUNT]
        done = epoch * self.epoch_iters + iteration + 1
        return {
            "epoch": f"{epoch + 1}/{cfg.OPTIM.MAX_EPOCH}",
            "iter": f"{iteration + 1}/{self.epoch_iters}",
            "time_avg": self.seconds_per_step,
            "time_diff": self.window_seconds / max(len(self.window), 1),
            "time_data": self.data_seconds / max(self.steps, 1),
            "eta": time_string(self.seconds_per_step * (self.max_iter - done)),
            "top1_err": float(np.median(100.0 * self.window[:, _TOP1] / count)),
            "top5_err": float(np.median(100.0 * self.window[:, _TOP5] / count)),
            "loss": float(np.median(self.window[:, _LOSS] / count)),
            "lr": self.lr,
            "mem": int(np.ceil(gpu_mem_usage())),
        }

    def log_iter_stats(self, epoch: int, iteration: int, **more: float) -> Dict:
        """Writes a train_iter record, with `more` in it, and returns it."""
        stats = {**self.get_iter_stats(epoch, iteration), **more}
        logger.info(logging.dump_log_data(stats, "train_iter"))
        return stats

    def get_epoch_stats(self, epoch: int) -> Dict:
        """The record of a whole epoch."""
        done = (epoch + 1) * self.epoch_iters
        seconds = self.seconds_before + self.last - self.start
        count = self.totals[_COUNT]
        return {
            "epoch": f"{epoch + 1}/{cfg.OPTIM.MAX_EPOCH}",
            "time_avg": self.seconds_per_step,
            "time_epoch": seconds,
            "time_data": self.data_seconds / max(self.steps, 1),
            "eta": time_string(self.seconds_per_step * (self.max_iter - done)),
            "top1_err": _percent(self.totals[_TOP1], count),
            "top5_err": _percent(self.totals[_TOP5], count),
            "loss": float(self.totals[_LOSS] / count),
            "lr": self.lr,
            "images_per_second": float(count / seconds) if seconds else 0.0,
            "mem": int(np.ceil(gpu_mem_usage())),
        }

    def log_epoch_stats(self, epoch: int) -> Dict:
        """Writes a train_epoch record and returns it."""
        stats = self.get_epoch_stats(epoch)
        logger.info(logging.dump_log_data(stats, "train_epoch"))
        return stats

    def state_dict(self) -> Dict:
        """What an epoch has gathered so far, to go on inside it."""
        seconds = self.seconds_before + self.last - self.start
        return {"totals": self.totals.tolist(), "seconds": seconds}

    def load_state_dict(self, state: Dict) -> None:
        """Takes up an epoch where it was left."""
        self.totals = np.array(state["totals"])
        self.seconds_before = state["seconds"]


class TestMeter:
    """Statistics of a test: exact over any number of processes, padding never counted."""

    __test__ = False  # not a test class, whatever pytest thinks of the name

    def __init__(self, epoch_iters: int, device: torch.device, name: str = "test"):
        self.epoch_iters = epoch_iters
        self.name = name
        self.stats = StepStats(device, min(cfg.LOG_PERIOD, max(epoch_iters, 1)))
        self.min_top1_err = self.min_top5_err = 100.0
        self.reset()

    def reset(self) -> None:
        """Starts a test; the lowest errors so far are kept."""
        self.totals = np.zeros(4)
        self.window = np.zeros((0, 4))
        self.steps, self.window_seconds = 0, 0.0
        self.start = self.last = time.perf_counter()

    def add(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Adds one batch: logits (batch, classes), labels (batch,), -1 for padding."""
        self.stats.add(None, logits, labels)

    def flush(self) -> None:
        """Fetches what has gathered."""
        self.window = self.stats.fetch()
        now = time.perf_counter()
        self.window_seconds, self.last = now - self.last, now
        self.steps += len(self.window)
        self.totals += self.window.sum(axis=0)

    def due(self, iteration: int) -> bool:
        """Whether statistics leave the device after this iteration (from 0)."""
        return (iteration + 1) % cfg.LOG_PERIOD == 0 or iteration + 1 == self.epoch_iters or self.stats.full

    def log_iter_stats(self, epoch: int, iteration: int) -> None:
        """Writes a test_iter (or test_ema_iter) record."""
        count = np.maximum(self.window[:, _COUNT], 1)
        stats = {
            "epoch": f"{epoch + 1}/{cfg.OPTIM.MAX_EPOCH}",
            "iter": f"{iteration + 1}/{self.epoch_iters}",
            "time_avg": (self.last - self.start) / max(self.steps, 1),
            "time_diff": self.window_seconds / max(len(self.window), 1),
            "top1_err": float(np.median(100.0 * self.window[:, _TOP1] / count)),
            "top5_err": float(np.median(100.0 * self.window[:, _TOP5] / count)),
            "mem": int(np.ceil(gpu_mem_usage())),
        }
        logger.info(logging.dump_log_data(stats, f"{self.name}_iter"))

    def log_epoch_stats(self, epoch: int) -> Dict:
        """Updates the lowest errors, writes a test_epoch (or test_ema_epoch) record and returns it."""
        count, seconds = self.totals[_COUNT], self.last - self.start
        top1, top5 = _percent(self.totals[_TOP1], count), _percent(self.totals[_TOP5], count)
        self.min_top1_err, self.min_top5_err = min(self.min_top1_err, top1), min(self.min_top5_err, top5)
        stats = {
            "epoch": f"{epoch + 1}/{cfg.OPTIM.MAX_EPOCH}",
            "time_avg": seconds / max(self.steps, 1),
            "time_epoch": seconds,
            "top1_err": top1,
            "top5_err": top5,
            "min_top1_err": self.min_top1_err,
            "min_top5_err": self.min_top5_err,
            "samples": int(count),
            "images_per_second": float(count / seconds) if seconds else 0.0,
            "mem": int(np.ceil(gpu_mem_usage())),
        }
        logger.info(logging.dump_log_data(stats, f"{self.name}_epoch"))
        return stats

    def state_dict(self) -> Dict:
        """The lowest errors so far."""
        return {"min_top1_err": self.min_top1_err, "min_top5_err": self.min_top5_err}

    def load_state_dict(self, state: Dict) -> None:
        """Takes up the lowest errors of an earlier part of the run."""
        self.min_top1_err, self.min_top5_err = state["min_top1_err"], state["min_top5_err"]
