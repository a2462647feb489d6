"""The planner's report: one choice in full, the alternatives to it, and how it scales; as a dict and as a screen of text."""

from typing import Dict, List, Optional

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
    network = f", network {r['network_gb_per_second_per_node']:g} GB/s a node" if nodes > 1 else ""
    return f"{r['gpus']} x {r['gpu']} ({nodes} node{'s' * (nodes > 1)}; NVLink {r['nvlink_gb_per_second']:g} GB/s{network})"


def _sharding_name(r: Dict) -> str:
    chosen = next((row for row in r["alternatives"] if row["chosen"]), None)
    return chosen["sharding"] if chosen else f"FSDP, shards of {r['choice']['shard_size']}"


def _main_rows(r: Dict):
    c, m = r["choice"], r["memory"]
    yield "model", f"{human_complexity(r['model'])}; {r['model']['image_size']} px"
    parts = f" in {c['parts']} passes" if c["parts"] > 1 else ""
    compiled = "compiled" if c["compile"] else "not compiled"
    yield (
        "run",
        (
            f"{c['mode']}, {_sharding_name(r)}, {compiled}, ACT_CHECKPOINT {c['checkpoint']}; batch {c['batch']}{parts} per GPU, "
            f"{c['global_batch']} in all"
        ),
    )
    share = m["total_bytes"] / m["capacity_bytes"]
    fits = "fits" if m["fits"] else "DOES NOT FIT"
    yield (
        "memory",
        (
            f"{m['total_bytes'] / GIB:.1f} of {m['capacity_bytes'] / GIB:.0f} GiB per GPU ({100 * share:.0f}%), at its most when "
            f"{m['moment']}: {fits}"
        ),
    )
    ordered = sorted(m["parts_bytes"].items(), key=lambda item: -item[1])
    shown = [f"{name} {size / GIB:.2f}" for name, size in ordered]
    half = -(-len(shown) // 2)
    yield "  of it (GiB)", ", ".join(shown[:half])
    if shown[half:]:
        yield "", ", ".join(shown[half:])
    if not m["fits"]:
        words = r["change_that_fits"]
        text = " ".join(f"{key} {value}" for key, value in words.items()) if words else None
        yield "what would fit", text or "no change of the config alone: fewer images per GPU, more GPUs or larger ones"


def _speed_rows(r: Dict):
    step = r["step"]
    messages = ", ".join(f"{m['kind']} {m['bytes'] / 1e9:.2f} GB in {m['calls']}" for m in r["communication"]) or "none"
    seconds = sum(m["seconds"] for m in r["communication"])
    spent = f" = {1e3 * seconds:.1f} ms, of which {1e3 * step['exposed']:.1f} show" if seconds else ""
    yield "messages", f"{messages}{spent}"
    yield (
        "step",
        (
            f"{1e3 * step['seconds']:.1f} ms: arithmetic {1e3 * step['compute']:.1f}, messages {1e3 * step['exposed']:.1f}, "
            f"optimizer and EMA {1e3 * step['optimizer']:.1f}"
        ),
    )
    yield (
        "speed",
        (
            f"{r['images_per_second_per_gpu']:,.1f} images/s per GPU, {r['images_per_second']:,.0f} in all; "
            f"{r['tflops_per_gpu']:.3g} TFLOP/s per GPU = {100 * r['mfu']:.1f}% of the peak (MFU)"
        ),
    )
    cost = f", cost {r['cost']:,.0f}" if r["cost"] is not None else ""
    yield (
        "training",
        (
            f"{r['hours_per_epoch']:.3g} h per epoch of {r['images_per_epoch']:,} images; {r['hours']:.3g} h for {r['epochs']} "
            f"epochs = {r['gpu_hours']:,.0f} GPU-hours{cost}"
        ),
    )


def _cell(row: Optional[Dict]) -> str:
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
        return (
            f"  Calibrated by {c['file']}: its step was predicted as {1e3 * c['predicted_step_seconds']:.1f} ms and measured as "
            f"{1e3 * c['measured_step_seconds']:.1f}; arithmetic takes {c['compute']:.2f}x, the optimizer {c['optimizer']:.2f}x."
        )
    a = r["assumed"]
    share = a["compiled"] if r["choice"]["compile"] else a["eager"]
    return (
        f"  Assumed: {100 * share:.0f}% of a roofline of {100 * a['matrix']:.0f}% of the best published matrix products and "
        f"{100 * a['bandwidth']:.0f}% of the memory bandwidth;\n  {100 * a['link']:.0f}% of the links, {100 * a['hidden']:.0f}% of "
        f"messages hidden; fits means up to {100 * a['full']:.0f}% of the memory. Measured once, --calibrate timing.json corrects it."
    )
