"""The ladder: from PyCls's baseline to everything, one change at a time, each measured in a process of its own.

Rows are timed by `run_net.py --mode time`, in rounds over all rows, so that a machine that drifts drifts for all. What
is finished is not measured again. A row that can't run on a device is shown with the reason, not dropped.
"""

import json
import os
import socket
import statistics
import subprocess
import sys
from typing import Dict, Iterable, List, NamedTuple, Optional, Sequence

from pycls.core.errors import OUT_OF_MEMORY, UserError
from pycls.core.io import atomic_write

IMAGENET_TRAIN_IMAGES = 1_281_167
_MOST_PASSES = 64
# What Meta reported for its optimised ViT-H/16, relative to its baseline of DDP (the last two at 256 px).
PUBLISHED = {"larger_batch": 1.51, "px256": 1.86, "fp16": 2.18}


class Row(NamedTuple):
    """One rung: its name, what it changes in words and as config words, and the row that it builds on."""

    name: str
    change: str
    words: Dict
    above: Optional[str]


_BASE = {
    "VIT.CLASSIFIER_TYPE": "token", "VIT.LAYOUT": "batch_first", "VIT.ATTENTION": "math", "OPTIM.MTA": False,
    "OPTIM.FUSED": False, "FSDP.ENABLED": False, "COMPILE.ENABLED": False, "PRECISION.MODE": "amp_fp16",
}  # fmt: skip


def rows(device: str, larger_batch: int, passes: int = 1) -> List[Row]:
    """The rungs, in order. On the CPU the baseline computes in fp32, which is what PyCls's users would have there.

    Args:
        larger_batch: in all, of the row of this name and those above it; computed in so many accumulated `passes`.
    """
    base = {**_BASE, "PRECISION.MODE": "fp32"} if device == "cpu" else _BASE
    larger = {"TRAIN.BATCH_SIZE": larger_batch, **({"OPTIM.ACCUM_ITERS": passes} if passes > 1 else {})}
    return [
        Row("baseline", "class token, batch first, explicit attention, one kernel per tensor, DDP", base, None),
        Row("fsdp", "fully sharded data parallel", {"FSDP.ENABLED": True, "FSDP.RESHARD_AFTER_FW": False}, "baseline"),
        Row("mta", "multi-tensor optimizer", {"OPTIM.MTA": True}, "fsdp"),
        Row("fairscale", "the same by FairScale, as in PyCls", {"FSDP.BACKEND": "fairscale"}, "mta"),
        Row("pooled", "pooled classifier", {"VIT.CLASSIFIER_TYPE": "pooled"}, "mta"),
        Row("batch_second", "batch-second layout", {"VIT.LAYOUT": "batch_second"}, "pooled"),
        Row("larger_batch", f"larger batch ({larger_batch} in all)", larger, "batch_second"),
        Row("px256", "256 px", {"TRAIN.IM_SIZE": 256}, "larger_batch"),
        Row("fp16", "full fp16", {"PRECISION.MODE": "fp16"}, "px256"),
        Row("sdpa", "the fastest attention (ours)", {"VIT.ATTENTION": "auto"}, "larger_batch"),
        Row("bf16", "bf16 autocast (ours)", {"PRECISION.MODE": "amp_bf16"}, "sdpa"),
        Row("fused", "fused optimizer (ours)", {"OPTIM.FUSED": True, "OPTIM.MTA": False}, "bf16"),
        Row("compile", "compiled blocks (ours)", {"COMPILE.ENABLED": True}, "fused"),
        Row("everything", "full bf16 (ours): everything", {"PRECISION.MODE": "bf16"}, "compile"),
        Row("everything_batch_first", "everything, batch first", {"VIT.LAYOUT": "batch_first"}, "everything"),
        Row("baseline_px256", "the baseline at 256 px", {"TRAIN.IM_SIZE": 256}, "baseline"),
        Row("everything_px256", "everything at 256 px", {"TRAIN.IM_SIZE": 256}, "everything"),
    ]


def words_of(name: str, table: Sequence[Row]) -> Dict:
    """All config words of a row: those of the rows that it builds on, then its own."""
    by_name = {row.name: row for row in table}
    row = by_name[name]
    return {**(words_of(row.above, table) if row.above else {}), **row.words}


def reason_against(words: Dict, device: str) -> Optional[str]:
    """Why a row can't be run here, or None."""
    if device == "cpu" and words.get("PRECISION.MODE") in ("fp16", "amp_fp16"):
        return "fp16 is emulated on the CPU"
    if device == "cpu" and words.get("FSDP.BACKEND") == "fairscale":
        return "FairScale needs CUDA streams"
    return None


def note_on(words: Dict, alone: bool, passes: int) -> str:
    """What to know about a row that runs: where a change has nothing to act on, and how its batch is computed."""
    notes = ["one process: nothing to shard"] if words.get("FSDP.ENABLED") and alone else []
    return "; ".join([*notes, *([f"batch in {passes} passes"] if passes > 1 else [])])


def group_of_one() -> Dict[str, str]:
    """The variables by which a launcher makes a process a group by itself, in which DDP and FSDP do their work."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    return {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def measure(cfg_file: str, words: Dict, out_dir: str, extra: Sequence[str], grouped: bool = False) -> Dict:
    """Times one row in a fresh process, unless OUT_DIR has its result; returns the timing record, or an `error`.

    A batch that does not fit into memory is split into twice as many accumulated passes, and again.

    Args:
        grouped: let a single process be a group, see `group_of_one`.
    """
    result = os.path.join(out_dir, "timing.json")
    passes = words.get("OPTIM.ACCUM_ITERS", 1)
    while not os.path.exists(result):
        error = _time({**words, "OPTIM.ACCUM_ITERS": passes}, cfg_file, out_dir, extra, grouped)
        if OUT_OF_MEMORY in error and passes < _MOST_PASSES:
            passes *= 2
        elif error:
            return {"error": error}
    with open(result, encoding="utf-8") as f:
        return json.load(f)


def _time(words: Dict, cfg_file: str, out_dir: str, extra: Sequence[str], grouped: bool) -> str:
    """Runs `--mode time` in a process of its own; returns its error, '' if there was none."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    command = [sys.executable, os.path.join(root, "tools", "run_net.py"), "--mode", "time", "--cfg", cfg_file]
    command += [*extra, *(str(word) for pair in words.items() for word in pair)]
    variables = {**os.environ, **(group_of_one() if grouped else {})}
    command += ["OUT_DIR", out_dir, "LOG_DEST", "file", "TIME.TRAIN_ONLY", "True"]
    done = subprocess.run(command, capture_output=True, text=True, env=variables)
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1] if done.returncode else ""


def collect(table: Sequence[Row], results: Dict[str, List[Dict]], skipped: Dict[str, str], alone: bool) -> List[Dict]:
    """One entry per row in `results`: images/s (median, lowest, highest), ratio to the baseline at its image size.

    Args:
        skipped: the reasons for those that can't run here. alone: one process, and not a group of one.
    """
    entries = []
    for row in (row for row in table if row.name in results):
        words, found = words_of(row.name, table), results[row.name]
        runs = [result for result in found if "error" not in result]
        passes = runs[0].get("accumulated_passes", 1) if runs else 1
        entry = {"name": row.name, "change": row.change, "note": note_on(words, alone, passes), "words": words}
        entry["published"] = PUBLISHED.get(row.name)
        errors = [result["error"] for result in found if "error" in result]
        if runs:
            entry.update(_figures(runs))
        else:
            entry["failed"] = row.name not in skipped
            entry["reason"] = skipped.get(row.name) or (errors[-1] if errors else "not measured")
        entries.append(entry)
    measured = [e for e in entries if "reason" not in e]
    bases = {e["image_size"]: e["images_per_second"] for e in measured if e["name"].startswith("baseline")}
    for entry in entries:
        base = bases.get(entry.get("image_size"))
        entry["ratio"] = entry["images_per_second"] / base if base else None
    return entries


def _figures(runs: List[Dict]) -> Dict:
    """What the rounds of one row came to, per process."""
    speeds, first = [r["train_images_per_second"] / r["processes"] for r in runs], runs[0]
    speed = statistics.median(speeds)
    return {
        "images_per_second": speed,
        "lowest": min(speeds),
        "highest": max(speeds),
        "rounds": len(speeds),
        "hours_per_epoch": IMAGENET_TRAIN_IMAGES / (speed * first["processes"]) / 3600,
        "mfu": statistics.median(r["mfu_of_measured_peak"] for r in runs),
        "peak_memory_mb": statistics.median(r["peak_memory_mb"] for r in runs),
        "batch": first["train_batch_per_process"],
        "attention": ", ".join(first["attention_kernels"]),
        **{name: first[name] for name in ("image_size", "precision", "device", "torch", "commit")},
    }


_HEAD = """# {title}

Throughput of the true training step (forward, backward, optimizer, EMA) on synthetic images, per process: median over
{rounds} round(s), in brackets the lowest and highest. The ratio is to the baseline at the same image size. MFU is the
share of the matrix peak, for the same arithmetic, measured in the same run.

| row | adds | px | batch | precision | images/s | ratio | MFU | memory (MB) | note |
| --- | --- | ---: | ---: | --- | --- | ---: | ---: | ---: | --- |
"""


def markdown(entries: Iterable[Dict], title: str) -> str:
    """The ladder as a table."""
    entries = list(entries)
    lines = []
    for e in entries:
        if "reason" in e:
            lines.append(f"| {e['name']} | {e['change']} | | | | not run | | | | {e['reason']} |")
            continue
        speed = f"{e['images_per_second']:.2f} ({e['lowest']:.2f} to {e['highest']:.2f})"
        ratio = f"{e['ratio']:.2f}" if e["ratio"] else ""
        lines.append(
            f"| {e['name']} | {e['change']} | {e['image_size']} | {e['batch']} | {e['precision']} | {speed} | "
            f"{ratio} | {100 * e['mfu']:.0f}% | {e['peak_memory_mb']:.0f} | {e['note']} |"
        )
    rounds = max((e["rounds"] for e in entries if "rounds" in e), default=0)
    return _HEAD.format(title=title, rounds=rounds) + "\n".join(lines) + "\n"


def run(
    cfg_file: str,
    out_dir: str,
    table: Sequence[Row],
    names: Optional[Sequence[str]],
    rounds: int,
    device: str,
    processes: int,
    extra: Sequence[str],
    grouped: bool = False,
) -> List[Dict]:
    """Measures the rows of `table` (all, or those named); returns an entry for each.

    OUT_DIR gets ladder.json, .md and .png and epoch_time.png, anew after each row: a ladder that is stopped shows what
    it has.
    """
    common = [*extra, "NUM_GPUS", str(processes), "DEVICE", device]
    _own_folder(out_dir, cfg_file, table, common, grouped)
    wanted = [row.name for row in table if not names or row.name in names]
    skipped = {n: why for n in wanted if (why := reason_against(words_of(n, table), device))}
    results: Dict[str, List[Dict]] = {name: [] for name in wanted}
    title = f"Ladder of {os.path.splitext(os.path.basename(cfg_file))[0]}"

    def written() -> List[Dict]:
        entries = collect(table, results, skipped, processes == 1 and not grouped)
        _write(entries, title, out_dir, processes)
        return entries

    entries = written()
    for number in range(1, rounds + 1):
        for name in (n for n in wanted if n not in skipped):
            folder = os.path.join(out_dir, f"round{number}", name)
            result = measure(cfg_file, words_of(name, table), folder, common, grouped)
            results[name].append(result)
            speed = result.get("error") or f"{result['train_images_per_second']:.2f} images/s"
            print(f"round {number} of {rounds}: {name}: {speed}", flush=True)
            entries = written()
    return entries


def _own_folder(out_dir: str, cfg_file: str, table: Sequence[Row], common: Sequence[str], grouped: bool) -> None:
    """Notes in OUT_DIR what is measured there.

    Raises:
        UserError: something else is; its results would be taken for those of this ladder.
    """
    with open(cfg_file, encoding="utf-8") as f:
        facts = {"config": f.read(), "words": list(common), "rows": {r.name: r.words for r in table}, "group": grouped}
    path = os.path.join(out_dir, "ladder_settings.json")
    if os.path.exists(path):
        with open(path, encoding="utf-8") as f:
            before = json.load(f)
        other = [name for name, value in facts.items() if before.get(name) != value]
        if other:
            raise UserError(
                f"--out {out_dir}: holds a ladder with other settings ({', '.join(other)}); give another --out"
            )
    with atomic_write(path) as f:
        f.write(json.dumps(facts, indent=1).encode())


def _write(entries: List[Dict], title: str, out_dir: str, processes: int) -> None:
    from pycls.core import plotting

    measured = next((e for e in entries if "reason" not in e), None)
    text = markdown(entries, title)
    if measured:
        text += f"\nMeasured on {measured['device']}, {processes} process(es), torch {measured['torch']}, "
        text += f"commit {measured['commit']}.\n"
    for name, content in (("ladder.json", json.dumps(entries, indent=1)), ("ladder.md", text)):
        with atomic_write(os.path.join(out_dir, name)) as f:
            f.write(content.encode())
    if measured:
        plotting.plot_ladder(entries, title, os.path.join(out_dir, "ladder.png"))
        plotting.plot_epoch_times(entries, title, os.path.join(out_dir, "epoch_time.png"))
