"""What a test leaves behind besides its error: an interval, logits, errors by class and a confusion matrix."""

import csv
import functools
import io
import math
import os
from typing import Dict, List, Sequence, Tuple

import numpy as np
import torch

from pycls.core import distributed as dist
from pycls.core.config import cfg
from pycls.core.io import atomic_write
from pycls.core.logging import get_logger

logger = get_logger(__name__)

# Two-sided 95% of a normal distribution.
_Z = 1.959964


def error_interval(error: float, samples: int) -> Tuple[float, float]:
    """Wilson's 95% interval of an error rate (Wilson 1927).

    Args: error: percent. samples: how many it was counted on.
    Returns: (low, high) in percent.
    """
    p, n = error / 100.0, samples
    middle = (p + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z / (1 + _Z**2 / n) * math.sqrt(p * (1 - p) / n + _Z**2 / (4 * n * n))
    return 100.0 * max(0.0, middle - half), 100.0 * min(1.0, middle + half)


def summary(stats: Dict) -> str:
    """One line for people: errors with their intervals, samples, speed."""
    texts = []
    for name, key in (("top-1", "top1_err"), ("top-5", "top5_err")):
        low, high = error_interval(stats[key], stats["samples"])
        texts.append(f"{name} error {stats[key]:.3f}% (95% interval {low:.2f} to {high:.2f})")
    return f"{', '.join(texts)} on {stats['samples']} images, {stats['images_per_second']:.1f} images/s"


@functools.cache
def note_left_out(count: int, samples: int) -> None:
    """Logs that `count` of `samples` pictures could not be read and count nowhere; of equal tests only once."""
    if count:
        logger.warning("Testing leaves out %d of %d pictures, which can't be read", count, samples)


class NoOutputs:
    """Keeps nothing."""

    def add(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Takes a batch: logits (batch, classes), labels (batch,), -1 for padding."""

    def finish(self, loader) -> None:
        """Writes what was kept; every process calls it."""


class Outputs(NoOutputs):
    """Keeps all logits, on the host, and writes what the config asks for."""

    def __init__(self):
        self.logits: List[torch.Tensor] = []
        self.labels: List[torch.Tensor] = []

    def add(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        self.logits.append(logits.float().cpu())
        self.labels.append(labels.cpu())

    def gather(self, loader) -> Tuple[np.ndarray, np.ndarray]:
        """(logits, labels) of all processes, in the order of the data set, but for what has no label."""
        labels = torch.cat(self.labels)
        real = labels >= 0
        index = np.array([i for batch in loader.batch_sampler for i in batch])[real.numpy()]
        parts = dist.gather_objects((index, torch.cat(self.logits)[real].numpy(), labels[real].numpy()))
        index, logits, labels = (np.concatenate(column) for column in zip(*parts))
        order = np.argsort(index)
        return logits[order], labels[order]

    def finish(self, loader) -> None:
        logits, labels = self.gather(loader)
        if not dist.is_master_proc():
            return
        names = getattr(loader.dataset, "class_names", None) or [str(i) for i in range(logits.shape[1])]
        if cfg.TEST.SAVE_LOGITS:
            logger.info("Logits: %s", save_logits(logits, labels, os.path.join(cfg.OUT_DIR, "logits.npz")))
        if cfg.TEST.REPORT:
            logger.info("Report: %s", ", ".join(write_report(logits, labels, names, cfg.OUT_DIR)))


def outputs_of_config() -> NoOutputs:
    """What TEST.SAVE_LOGITS and TEST.REPORT ask to be kept."""
    return Outputs() if cfg.TEST.SAVE_LOGITS or cfg.TEST.REPORT else NoOutputs()


def save_logits(logits: np.ndarray, labels: np.ndarray, path: str) -> str:
    """Writes an .npz with `logits` (samples, classes) and `labels` (samples,); returns its path."""
    with atomic_write(path) as f:
        np.savez_compressed(f, logits=logits, labels=labels)
    return path


def confusion_matrix(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Counts (true class, predicted class)."""
    classes = logits.shape[1]
    return np.bincount(labels * classes + logits.argmax(axis=1), minlength=classes**2).reshape(classes, classes)


def write_report(logits: np.ndarray, labels: np.ndarray, names: Sequence[str], out_dir: str) -> List[str]:
    """Writes per_class.csv (worst class first) and confusion.png; returns their paths."""
    counts = confusion_matrix(logits, labels)
    # A folder's name may hold bytes that are no text; neither a font nor a CSV has anything to show for them.
    names = [name.encode("utf-8", "backslashreplace").decode() for name in names]
    table, picture = os.path.join(out_dir, "per_class.csv"), os.path.join(out_dir, "confusion.png")
    with atomic_write(table) as f:
        f.write(_per_class(counts, names).encode())
    _draw_confusion(counts, names, picture)
    return [table, picture]


def _per_class(counts: np.ndarray, names: Sequence[str]) -> str:
    totals, right = counts.sum(axis=1), counts.diagonal()
    wrong = counts - np.diag(right)
    rows = [
        (name, int(total), f"{100 * (1 - hits / total):.2f}", names[int(mistaken.argmax())] if mistaken.any() else "")
        for name, total, hits, mistaken in zip(names, totals, right, wrong)
        if total
    ]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["class", "samples", "top1_err", "most_often_taken_for"])
    writer.writerows(sorted(rows, key=lambda row: -float(row[2])))
    return text.getvalue()


def _draw_confusion(counts: np.ndarray, names: Sequence[str], path: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shares = 100.0 * counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    classes = len(counts)
    side = min(14.0, 3.5 + 0.35 * classes)
    figure = Figure(figsize=(side + 1, side), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=100)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")
    if classes <= 40:
        axes.set_xticks(range(classes), names[:classes], rotation=90)
        axes.set_yticks(range(classes), names[:classes])
    if classes <= 20:
        for (row, column), share in np.ndenumerate(shares):
            if share >= 0.5:
                colour = "white" if share > 50 else "black"
                axes.text(column, row, f"{share:.0f}", ha="center", va="center", fontsize=8, color=colour)
    figure.colorbar(image, ax=axes, label="% of the true class", shrink=0.8)
    with atomic_write(path) as f:
        figure.savefig(f, format="png")
