"""The planner's report: one choice in full, its alternatives, and how it scales; as a dict and as a screen of text."""

from typing import Dict, List

from pycls.core import builders, memory, net, planner
from pycls.core.cli import human_complexity
from pycls.core.config import cfg
from pycls.core.errors import UserError
from pycls.core.memory import Choice
from pycls.core.planner import GIB
from pycls.core.roofline import ASSUMED, Cluster

_CHECKPOINTS = ("none", "selective", "block")
_MODES = ("fp32", "tf32", "amp_fp16", "amp_bf16", "fp16", "bf16")
_SCALING = [2**i for i in range(11)]


def shardings(choice: Choice, cluster: Cluster) -> Dict[str, Dict]:
    """The ways to spread the weights over the GPUs of `choice`: name -> config words."""
    if choice.gpus == 1:
        return {"one process": {}}
    names = {
        "DDP": {"FSDP.ENABLED": False},
        "FSDP, kept gathered": {"FSDP.ENABLED": True, "FSDP.RESHARD_AFTER_FW": False, "FSDP.SHARD_SIZE": 0},
        "FSDP": {"FSDP.ENABLED": True, "FSDP.RESHARD_AFTER_FW": True, "FSDP.SHARD_SIZE": 0},
    }
    if choice.gpus > cluster.per_node and choice.gpus % cluster.per_node == 0:
        hybrid = {"FSDP.ENABLED": True, "FSDP.RESHARD_AFTER_FW": True, "FSDP.SHARD_SIZE": cluster.per_node}
        names[f"FSDP, shards of {cluster.per_node}"] = hybrid
    return names


def _row(words: Dict, choice: Choice, model: memory.Model, cluster: Cluster, **names) -> Dict:
    """Memory and speed of `choice` with `words`, or why there is none."""
    changed = choice.changed(words)
    try:
        found = planner.figures(changed, model, cluster, 1, 0)
    except UserError as error:
        return {**names, "words": words, "chosen": False, "reason": str(error)}
    found = {**found["memory"], "images_per_second_per_gpu": found["images_per_second_per_gpu"], "mfu": found["mfu"]}
    return {**names, "words": words, "chosen": changed == choice, **found}


def scaling(choice: Choice, model: memory.Model, cluster: Cluster, weak: bool) -> List[Dict]:
    """`choice` on 1 to 1,024 GPUs: the same batch per GPU (`weak`) or in all."""
    rows = []
    for gpus in _SCALING:
        batch = choice.batch if weak else choice.batch * choice.gpus // gpus
        divides = weak or (batch * gpus == choice.batch * choice.gpus and batch and batch % choice.parts == 0)
        if divides:
            shards = choice.shard_size if choice.shard_size and gpus % choice.shard_size == 0 else 0
            there = choice._replace(gpus=gpus, batch=batch, shard_size=shards)
            rows.append(_row({}, there, model, cluster, gpus=gpus, batch_per_gpu=batch))
    return rows


def report(choice: Choice, cluster: Cluster, images: int, price: float, weak: bool = True) -> Dict:
    """Everything that the planner has to say about `choice`.

    Raises:
        UserError: the device can't do what the config asks for.
    """
    model = memory.Model()
    counts = net.complexity(builders.get_model())
    found = planner.figures(choice, model, cluster, images, price)
    rows = [
        _row({**words, "ACT_CHECKPOINT": kind}, choice, model, cluster, sharding=name, checkpoint=kind)
        for name, words in shardings(choice, cluster).items()
        for kind in _CHECKPOINTS
    ]
    modes = [_row({"PRECISION.MODE": mode}, choice, model, cluster, mode=mode) for mode in _MODES]
    return {
        "gpu": cluster.key,
        "gpus": choice.gpus,
        "gpus_per_node": cluster.per_node,
        "nvlink_gb_per_second": cluster.gpu.nvlink,
        "network_gb_per_second_per_node": cluster.network,
        "model": {**counts, "image_size": cfg.TRAIN.IM_SIZE},
        "choice": {**choice._asdict(), "global_batch": choice.batch * choice.gpus, "compile": cfg.COMPILE.ENABLED},
        "epochs": cfg.OPTIM.MAX_EPOCH,
        "images_per_epoch": images,
        **found,
        "change_that_fits": None if found["memory"]["fits"] else planner.fitting_change(choice, model, cluster),
        "alternatives": rows,
        "precision_modes": modes,
        "scaling": scaling(choice, model, cluster, weak),
        "scaling_kind": "weak" if weak else "strong",
        "assumed": ASSUMED._asdict(),
    }


# ----------------------------------------------------------------------------- text


def text(r: Dict, title: str) -> str:
    """The report for people: one screen."""
    lines = [f"{title} on {_cluster(r)}"]
    lines += [f"  {name:14s} {value}" for name, value in (*_main_rows(r), *_speed_rows(r))]
    lines += ["", *_alternatives(r), "", *_modes(r), "", _assumptions(r)]
    return "\n".join(lines)


def _cluster(r: Dict) -> str:
    if r["gpus"] == 1:
        return f"1 x {r['gpu']}"
    nodes = -(-r["gpus"] // r["gpus_per_node"])
    links = f"NVLink {r['nvlink_gb_per_second']:g} GB/s" if r["gpu"] != "cpu" else "shared memory"
    links += f", network {r['network_gb_per_second_per_node']:g} GB/s a node" if nodes > 1 else ""
    return f"{r['gpus']} x {r['gpu']} ({nodes} node{'s' * (nodes > 1)}; {links})"


def _sharding_name(r: Dict) -> str:
    chosen = next((row for row in r["alternatives"] if row["chosen"]), None)
    return chosen["sharding"] if chosen else f"FSDP, shards of {r['choice']['shard_size'] or r['gpus']}"


def _main_rows(r: Dict):
    c, m = r["choice"], r["memory"]
    yield "model", f"{human_complexity(r['model'])}; {r['model']['image_size']} px"
    kind = f"{c['mode']}, {_sharding_name(r)}, {'compiled' if c['compile'] else 'not compiled'}"
    batch = f"batch {c['batch']}{f' in {n} passes' if (n := c['parts']) > 1 else ''} per GPU"
    yield "run", f"{kind}, ACT_CHECKPOINT {c['checkpoint']}; {batch}, {c['global_batch']} in all"
    total, limit = m["total_bytes"] / GIB, m["capacity_bytes"] / GIB
    size = f"{total:.1f} of {limit:.0f} GiB per GPU ({100 * total / limit:.0f}%), at its most when {m['moment']}"
    yield "memory", f"{size}: {'fits' if m['fits'] else 'DOES NOT FIT'}"
    ordered = sorted(m["parts_bytes"].items(), key=lambda item: -item[1])
    shown = [f"{name} {size / GIB:.2f}" for name, size in ordered]
    half = -(-len(shown) // 2)
    yield "  of it (GiB)", ", ".join(shown[:half])
    yield "", ", ".join(shown[half:])
    if not m["fits"]:
        advice = " ".join(f"{key} {value}" for key, value in (r["change_that_fits"] or {}).items())
        yield "would fit", advice or "no change of the config: take fewer images per GPU, more GPUs or larger ones"


def _speed_rows(r: Dict):
    step, ms = r["step"], {name: f"{1e3 * seconds:.1f}" for name, seconds in r["step"].items()}
    sent = ", ".join(_sent(r["communication"], kind) for kind in dict.fromkeys(m["kind"] for m in r["communication"]))
    seconds = sum(m["seconds"] for m in r["communication"])
    yield (
        "messages",
        (sent or "none") + (f" = {1e3 * seconds:.1f} ms, of which {ms['exposed']} show" if step["exposed"] else ""),
    )
    parts = f"arithmetic {ms['compute']}, messages {ms['exposed']}, optimizer and EMA {ms['optimizer']}"
    yield "step", f"{ms['seconds']} ms: {parts}"
    speed = f"{r['images_per_second_per_gpu']:,.1f} images/s per GPU, {r['images_per_second']:,.0f} in all"
    yield "speed", f"{speed}; {r['tflops_per_gpu']:.3g} TFLOP/s per GPU = {100 * r['mfu']:.1f}% of the peak (MFU)"
    epoch = f"{r['hours_per_epoch']:.3g} h per epoch of {r['images_per_epoch']:,} images"
    cost = f", cost {r['cost']:,.0f}" if r["cost"] is not None else ""
    whole = f"{r['hours']:.3g} h for {r['epochs']} epochs = {r['gpu_hours']:,.0f} GPU-hours{cost}"
    yield "training", f"{epoch}; {whole}"


def _sent(messages: List[Dict], kind: str) -> str:
    size, calls = (sum(m[name] for m in messages if m["kind"] == kind) for name in ("bytes", "calls"))
    return f"{kind} {size / 1e9:.2f} GB in {calls}"


def _cell(row: Dict) -> str:
    if "reason" in row:
        return "not possible"
    size, mark = f"{row['total_bytes'] / GIB:.1f} GiB", "*" if row["chosen"] else ""
    return f"{mark}{size} {row['images_per_second_per_gpu']:,.0f}/s" if row["fits"] else f"{mark}{size} too much"


def _alternatives(r: Dict) -> List[str]:
    lines = [f"  {'memory, images/s per GPU':26s}" + "".join(f"{'ACT_CHECKPOINT ' + k:>26s}" for k in _CHECKPOINTS)]
    for name in dict.fromkeys(row["sharding"] for row in r["alternatives"]):
        cells = [_cell(row) for row in r["alternatives"] if row["sharding"] == name]
        lines.append(f"  {name:26s}" + "".join(f"{cell:>26s}" for cell in cells))
    return lines


def _modes(r: Dict) -> List[str]:
    cells = [(row["mode"], _cell(row)) for row in r["precision_modes"] if "reason" not in row]
    width = max(len(cell) for _, cell in cells) + 2
    names = "".join(f"{mode:>{width}s}" for mode, _ in cells)
    return [f"  {'PRECISION.MODE':16s}{names}", f"  {'':16s}" + "".join(f"{cell:>{width}s}" for _, cell in cells)]


def _assumptions(r: Dict) -> str:
    if "calibration" in r:
        c = r["calibration"]
        predicted, measured = 1e3 * c["predicted_step_seconds"], 1e3 * c["measured_step_seconds"]
        return (
            f"  Calibrated by {c['file']}: its step, predicted as {predicted:.1f} ms, was measured as {measured:.1f};\n"
            f"  arithmetic takes {c['compute']:.2f} times as long as assumed, the optimizer {c['optimizer']:.2f} times."
        )
    percent = {name: f"{100 * value:.0f}%" for name, value in r["assumed"].items()}
    share = percent["compiled" if r["choice"]["compile"] else "eager"]
    return (
        f"  Assumed: {share} of a roofline of {percent['matrix']} of the best published matrix products and "
        f"{percent['bandwidth']} of the memory bandwidth;\n  {percent['link']} of the links, {percent['hidden']} of "
        f"messages hidden; fits: up to {percent['full']} of the memory. --calibrate timing.json corrects the times."
    )
