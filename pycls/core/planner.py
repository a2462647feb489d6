"""Predicts a training run before anyone pays for it: memory, step time, speed, hours and cost on a cluster.

Memory per GPU comes from `pycls/core/memory.py`, seconds from `pycls/core/roofline.py`. A `timing.json` of
`--mode time` corrects the seconds to what a machine was seen to do (`calibrate`).

Speed counts the model's own work: 6 operations per multiply-add of the forward pass, recomputation left out.
"""

import json
import math
from typing import Dict, List, Optional, Tuple

from pycls.core import builders, config, memory, net
from pycls.core.config import cfg
from pycls.core.errors import UserError
from pycls.core.memory import Choice
from pycls.core.roofline import ASSUMED, Cluster, messages, step_time

GIB = 2**30


# ------------------------------------------------------------------------ calibration


def calibrate(path: str, cluster: Cluster) -> Tuple[Cluster, Dict]:
    """Corrects `cluster` by a timing.json, so that the step that was timed is predicted as it was measured.

    Returns:
        (the corrected cluster, what was compared).
    Raises:
        UserError: no such file, no timing, or one of another device.
    """
    timing = _read_timing(path)
    if cluster.gpu.name not in timing["device"]:
        raise UserError(f"--calibrate {path}: was measured on {timing['device']}, not on --gpu {cluster.key}")
    with config.temporary_cfg():
        cfg.merge_from_text(timing["config"], path, skip_unknown=True)
        choice = memory.choice_of_config(timing["processes"], timing["train_batch_per_process"], cluster.cuda)
        choice = choice._replace(mode=timing["precision"], parts=timing.get("accumulated_passes", 1))
        step = step_time(choice, memory.Model(), cluster)
    measured = timing["train_step_seconds_slowest_process"]
    optimizer = timing["optimizer_seconds"]
    scales = (max(measured - optimizer - step.exposed, 0.05 * measured) / step.compute, optimizer / step.optimizer)
    compared = {"file": path, "device": timing["device"], "measured_step_seconds": measured,
                "predicted_step_seconds": step.seconds, "compute": scales[0], "optimizer": scales[1]}  # fmt: skip
    return cluster._replace(scale_compute=scales[0], scale_optimizer=scales[1]), compared


def _read_timing(path: str) -> Dict:
    try:
        with open(path, encoding="utf-8") as f:
            timing = json.load(f)
    except OSError as error:
        raise UserError(f"--calibrate {path}: can't be read: {error.strerror}") from None
    except ValueError:
        raise UserError(f"--calibrate {path}: is not JSON; give the timing.json of a run with --mode time") from None
    needed = ("device", "config", "processes", "train_batch_per_process", "precision", "optimizer_seconds",
              "train_step_seconds_slowest_process")  # fmt: skip
    missing = [name for name in needed if name not in timing] if isinstance(timing, dict) else needed
    if missing:
        raise UserError(f"--calibrate {path}: has no {missing[0]}; time again with --mode time of this version")
    return timing


# ----------------------------------------------------------------------------- figures


def capacity(choice: Choice, cluster: Cluster) -> float:
    """Bytes of memory per process; those on one CPU share its memory."""
    return cluster.gpu.memory * GIB / (1 if cluster.cuda else min(choice.gpus, cluster.per_node))


def figures(choice: Choice, model: memory.Model, cluster: Cluster, images: int, price: float) -> Dict:
    """Memory, communication, speed and cost of one choice. `images` per epoch; `price` per GPU and hour."""
    moment, parts = model.memory(choice)
    total, limit = sum(parts.values()), capacity(choice, cluster)
    step = step_time(choice, model, cluster)
    flops = 6 * net.complexity(builders.get_model())["flops"]
    speed = choice.batch / step.seconds
    hours = math.ceil(images / (choice.batch * choice.gpus)) * step.seconds / 3600
    return {
        "memory": {
            "moment": moment,
            "parts_bytes": {name: int(size) for name, size in parts.items() if size},
            "total_bytes": int(total),
            "capacity_bytes": int(limit),
            "fits": total <= ASSUMED.full * limit,
        },
        "communication": [m._asdict() for m in messages(choice, model.weights_of(choice), cluster)],
        "step": {**step._asdict(), "seconds": step.seconds},
        "images_per_second_per_gpu": speed,
        "images_per_second": speed * choice.gpus,
        "tflops_per_gpu": flops * speed / 1e12,
        "mfu": flops * speed / cluster.peak(choice.mode),
        "hours_per_epoch": hours,
        "hours": hours * cfg.OPTIM.MAX_EPOCH,
        "gpu_hours": hours * cfg.OPTIM.MAX_EPOCH * choice.gpus,
        "cost": hours * cfg.OPTIM.MAX_EPOCH * choice.gpus * price if price else None,
    }


def changes(choice: Choice, cluster: Cluster) -> List[Dict]:
    """Config changes that save memory, the cheapest first: single ones, then more and more of them together."""
    half = "amp_bf16" if "bf16" in cluster.gpu.peaks else "amp_fp16"
    keep = {"FSDP.ENABLED": True, "FSDP.RESHARD_AFTER_FW": False}
    ladder = [
        {"VIT.ATTENTION": "sdpa"} if cfg.MODEL.TYPE == "vit" else {},
        {} if choice.half else {"PRECISION.MODE": half},
        keep,
        {"FSDP.ENABLED": True, "FSDP.RESHARD_AFTER_FW": True, "FSDP.SHARD_SIZE": 0},
        {"ACT_CHECKPOINT": "selective"} if choice.checkpoint == "none" else {},
        {"ACT_CHECKPOINT": "block"},
        *({"OPTIM.ACCUM_ITERS": n} for n in _divisors(choice.batch) if n > choice.parts),
        {"FSDP.ENABLED": True, "FSDP.CPU_OFFLOAD": True} if cluster.cuda else {},
    ]
    if choice.gpus == 1:
        ladder = [words for words in ladder if "FSDP.ENABLED" not in words]
    together, all_of_them = {}, []
    for words in ladder:
        together = {**together, **words}
        all_of_them.append(together)
    found = [words for words in (*ladder, *all_of_them) if words and choice.changed(words) != choice]
    return [_only_new(words, choice) for words in found]


def _only_new(words: Dict, choice: Choice) -> Dict:
    return {key: value for key, value in words.items() if choice.changed({key: value}) != choice}


def _divisors(number: int) -> List[int]:
    return [n for n in range(2, number + 1) if number % n == 0]


def fitting_change(choice: Choice, model: memory.Model, cluster: Cluster) -> Optional[Dict]:
    """The first of `changes` with which the step fits, or None."""
    for words in changes(choice, cluster):
        try:
            parts = model.memory(choice.changed(words))[1]
        except UserError:  # selective checkpointing of in-place activations
            continue
        if sum(parts.values()) <= ASSUMED.full * capacity(choice, cluster):
            return words
    return None
