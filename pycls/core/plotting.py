"""Learning curves from logs. matplotlib is imported only where something is drawn."""

import math
import os
import textwrap
from typing import Dict, Iterable, List, Optional, Sequence

from pycls.core import logging
from pycls.core.errors import UserError
from pycls.core.io import atomic_write

# Okabe and Ito's palette, which colour-blind people can tell apart.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999933")
# Record type -> (what it is called, line style).
_CURVES = {"train_epoch": ("train", ":"), "test_epoch": ("test", "-"), "test_ema_epoch": ("test EMA", "--")}
_LABELS = {
    "top1_err": "top-1 error (%)",
    "top5_err": "top-5 error (%)",
    "loss": "training loss",
    "lr": "learning rate",
    "images_per_second": "training images/s",
}
# Panels beside the errors.
_SIDE = ("loss", "lr", "images_per_second")


def load_curves(log_file: str) -> Dict[str, Dict]:
    """The epoch records of a log, sorted: {type: {metric: values}}.

    Raises:
        UserError: the log holds none.
    """
    data = logging.load_log_data(log_file, data_types_to_skip=("train_iter", "test_iter", "test_ema_iter"))
    curves = {name: values for name, values in logging.sort_log_data(data).items() if name in _CURVES}
    if not curves:
        raise UserError(f"{log_file}: holds no finished epoch (no json_stats records of training or testing)")
    return curves


def plot_error_curves(log_files: Sequence[str], names: Sequence[str], out_path: str, metric: str = "top1_err") -> str:
    """Draws the learning curves of one or several logs: an error, and what there is of loss, learning rate and speed.

    Args:
        names: what the logs are called in the legend. out_path: of the PNG. metric: top1_err or top5_err.
    Returns:
        out_path.
    Raises:
        UserError: a log holds no epoch with that metric, or out_path can't be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    runs = [load_curves(log_file) for log_file in log_files]
    for log_file, run in zip(log_files, runs):
        if not any(_known(values.get(metric, ())) for values in run.values()):
            raise UserError(f"{log_file}: has no {metric} in its epochs")
    figure = Figure(figsize=(11, 7.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    # Logs of PyCls don't tell the speed, and those of a test alone have nothing of training.
    trained = [run.get("train_epoch", {}) for run in runs]
    keys = [key for key in _SIDE if any(key in train for train in trained)]
    left, right = figure.subfigures(1, 2, width_ratios=(1.7, 1)) if keys else (figure, None)
    main_axes = left.subplots()
    side_axes = dict(zip(keys, right.subplots(len(keys), 1, sharex=True, squeeze=False)[:, 0])) if keys else {}
    for i, (run, name) in enumerate(zip(runs, names)):
        colour = _COLOURS[i % len(_COLOURS)]
        _draw_errors(main_axes, run, name if len(runs) > 1 else "", colour, metric)
        for key, axes in side_axes.items():
            if key in trained[i]:
                _draw(axes, trained[i], key, color=colour)
    main_axes.legend(frameon=False)
    for key, axes in ((metric, main_axes), *side_axes.items()):
        axes.set_ylabel(_LABELS.get(key, key))
        axes.margins(y=0.08)
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in (main_axes, *list(side_axes.values())[-1:]):
        axes.set_xlabel("epoch")
    return _save(figure, out_path)


def _draw_errors(axes, run: Dict, name: str, colour: str, metric: str) -> None:
    """The error curves of one run, each with its lowest value in the legend."""
    for data_type, (title, style) in _CURVES.items():
        known = _known(run.get(data_type, {}).get(metric, ()))
        if known:
            label = f"{f'{name}: ' if name else ''}{title} (lowest {min(known):.2f})"
            _draw(axes, run[data_type], metric, linestyle=style, color=colour, label=label)


def _draw(axes, records: Dict, metric: str, **style) -> None:
    """One curve over epochs, with gaps where a record lacks the metric; a single epoch is a dot."""
    values = [math.nan if value is None else value for value in records[metric]]
    axes.plot(records["epoch_ind"], values, marker="." if len(values) == 1 else None, **style)


def _known(values: Iterable[Optional[float]]) -> List[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def _save(figure, out_path: str) -> str:
    with atomic_write(out_path) as f:
        figure.savefig(f, format="png")
    return out_path


def log_file_of(path: str) -> str:
    """The log that `path` names: itself, or stdout.log in an output folder.

    Raises:
        UserError: it is not there.
    """
    log_file = os.path.join(path, "stdout.log") if os.path.isdir(path) else path
    if not os.path.isfile(log_file):
        raise UserError(f"{log_file}: there is no such log")
    return log_file


def names_of(paths: List[str]) -> List[str]:
    """Short names for logs: their folder's, longer where these are equal."""
    folders = [os.path.abspath(p if os.path.isdir(p) else os.path.dirname(os.path.abspath(p))) for p in paths]
    short = [os.path.basename(folder) for folder in folders]
    if len(set(short)) == len(short):
        return short
    return [os.path.join(os.path.basename(os.path.dirname(folder)), name) for folder, name in zip(folders, short)]


def plot_run(out_dir: str) -> str:
    """Draws OUT_DIR/curves.png from OUT_DIR/stdout.log; returns its path."""
    log_file = log_file_of(out_dir)
    return plot_error_curves([log_file], names_of([out_dir]), os.path.join(out_dir, "curves.png"))


def _bars(entries: Sequence[Dict], title: str, out_path: str, value, power: int, label: str, form: str, other) -> str:
    """Horizontal bars of one value per ladder row, rows that could not be run shown as such.

    Args:
        value: what to draw of a row. power: of the speed, that it is proportional to; the rounds' spread follows it.
        other: what others published for a row, or None; drawn beside the bar.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 0.42 * len(entries) + 1.8), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    known = [i for i, e in enumerate(entries) if "reason" not in e and value(e)]
    published = {i: other(e) for i, e in enumerate(entries) if other(e)}
    widest = max([value(entries[i]) for i in known] + list(published.values()), default=1.0)
    for i, entry in enumerate(entries):
        if i not in known:
            reason = entry.get("reason", "no baseline at this image size")
            axes.text(widest * 0.01, i, textwrap.shorten(reason, 70), va="center", color="0.45", style="italic")
            continue
        number = value(entry)
        rounds = [number * (entry[end] / entry["images_per_second"]) ** power for end in ("lowest", "highest")]
        spread = [[number - min(rounds)], [max(rounds) - number]]
        colour = _COLOURS[1] if "ours" in entry["change"] or "everything" in entry["name"] else _COLOURS[0]
        axes.barh(i, number, color=colour, height=0.7, xerr=spread, error_kw={"ecolor": "0.25", "capsize": 3})
        axes.text(max(rounds) + widest * 0.02, i, form.format(number), va="center", fontsize=9)
    if published:
        marks = {"marker": "D", "color": "white", "edgecolors": "black", "zorder": 3}
        axes.scatter(list(published.values()), list(published), label="Meta's ViT-H/16 on its GPUs, published", **marks)
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), frameon=False)
    axes.set_yticks(range(len(entries)), [textwrap.fill(e["change"], 38) for e in entries], fontsize=9)
    axes.set_ylim(len(entries) - 0.5, -0.5)
    axes.set_xlim(0, widest * 1.2)
    axes.set_xlabel(label)
    axes.set_title(title, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    return _save(figure, out_path)


def plot_ladder(entries: Sequence[Dict], title: str, out_path: str) -> str:
    """Draws each row's throughput per process relative to the baseline of its image size, beside what Meta published;
    returns out_path."""
    label = "throughput relative to the baseline"
    return _bars(entries, title, out_path, lambda e: e.get("ratio"), 1, label, "{:.2f}x", lambda e: e.get("published"))


def plot_epoch_times(entries: Sequence[Dict], title: str, out_path: str) -> str:
    """Draws the hours that an epoch of ImageNet-1K (1,281,167 images) takes at each row's speed; returns out_path."""
    label = "hours per ImageNet-1K epoch (1,281,167 images) on this machine"
    return _bars(entries, title, out_path, lambda e: e["hours_per_epoch"], -1, label, "{:.2f} h", lambda e: None)


# ----------------------------------------------------------------------- the planner


def plot_plan(report: Dict, title: str, out_path: str) -> str:
    """Draws a planner's report: speed per GPU against the number of GPUs, and memory by part for each sharding.

    Returns:
        out_path.
    Raises:
        UserError: out_path can't be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    _draw_scaling(left, report)
    _draw_memory(right, report)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{title}: prediction for {report['gpu']}", x=0.01, ha="left")
    return _save(figure, out_path)


def _draw_scaling(axes, report: Dict) -> None:
    rows = [row for row in report["scaling"] if "reason" not in row]
    gpus, speeds = [row["gpus"] for row in rows], [row["images_per_second_per_gpu"] for row in rows]
    axes.plot(gpus, speeds, color=_COLOURS[0])
    for fits, face, label in ((True, _COLOURS[0], "fits in memory"), (False, "white", "does not fit")):
        chosen = [i for i, row in enumerate(rows) if row["fits"] == fits]
        if chosen:
            axes.plot([gpus[i] for i in chosen], [speeds[i] for i in chosen], "o", color=_COLOURS[0],
                      markerfacecolor=face, label=label)  # fmt: skip
    for x, y in zip(gpus, speeds):
        axes.annotate(f"{y:,.0f}", (x, y), xytext=(0, 8), textcoords="offset points", ha="center",
                      fontsize=8)  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks([row["gpus"] for row in report["scaling"]], [f"{row['gpus']:,}" for row in report["scaling"]])
    axes.minorticks_off()
    axes.set_ylim(0, 1.15 * max(speeds))
    axes.set_xlabel("GPUs")
    axes.set_ylabel("images/s per GPU")
    batch = f"{report['choice']['batch']} images per GPU"
    batch = batch if report["scaling_kind"] == "weak" else f"{report['choice']['global_batch']} images in all"
    axes.set_title(f"speed, {batch}", loc="left", fontsize=11)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="lower left")


def _draw_memory(axes, report: Dict) -> None:
    checkpoint = report["choice"]["checkpoint"]
    rows = [r for r in report["alternatives"] if r["checkpoint"] == checkpoint and "reason" not in r]
    names = sorted({name for row in rows for name in row["parts_bytes"]},
                   key=lambda name: -max(row["parts_bytes"].get(name, 0) for row in rows))  # fmt: skip
    bottoms = [0.0] * len(rows)
    for i, name in enumerate(names):
        sizes = [row["parts_bytes"].get(name, 0) / 2**30 for row in rows]
        axes.bar(range(len(rows)), sizes, bottom=bottoms, width=0.62, label=name,
                 color=_COLOURS[i % len(_COLOURS)], alpha=1.0 if i < len(_COLOURS) else 0.5)  # fmt: skip
        bottoms = [bottom + size for bottom, size in zip(bottoms, sizes)]
    limit = report["memory"]["capacity_bytes"] / 2**30
    for i, (row, top) in enumerate(zip(rows, bottoms)):
        label = f"{top:.1f}" + ("" if row["fits"] else ": too much")
        axes.text(i, top, label, ha="center", va="bottom", fontsize=9, weight="bold" if row["chosen"] else None)
    axes.axhline(limit, color="0.25", linestyle="--", linewidth=1)
    usable = f"{limit:.0f} GiB, of which {100 * report['assumed']['full']:.0f}% may be planned"
    axes.text(len(rows) - 0.5, limit, usable, ha="right", va="bottom", fontsize=9, color="0.25")
    labels = [row["sharding"].replace(", ", ",\n") + ("\n(this config)" if row["chosen"] else "") for row in rows]
    axes.set_xticks(range(len(rows)), labels)
    axes.set_ylim(0, 1.1 * max(limit, *bottoms))
    axes.set_ylabel("GiB per GPU")
    axes.set_title(f"memory on {report['gpus']:,} GPUs, ACT_CHECKPOINT {checkpoint}", loc="left", fontsize=11)
    axes.legend(*map(reversed, axes.get_legend_handles_labels()), frameon=False, fontsize=9, loc="center left",
                bbox_to_anchor=(1.0, 0.5))  # fmt: skip
