#!/usr/bin/env python3
"""Trains the same ViT shapes through ours and other libraries, in turns within one run; prints images/s and ratios.

    dev/bench_peers.py [--shapes S16 B16] [--batch 16] [--modes fp32 bf16] [--compiled] [--rounds 5] [--out DIR]
                       [--only ours timm ...] [--together] [--pycls DIR]

Every library gets a process of its own, so that none profits or suffers from another's settings, and they take turns:
one step that is not counted, then `--steps` timed ones. The step is the same for all: forward (fp32, or bf16 autocast),
cross entropy in fp32, backward, and torch's fused AdamW, on synthetic images of 224 pixels. Each library builds its
usual class with its fused attention; the table says which parameters and attention kernels that came to. A library
that can't be imported is shown as such. `--pycls` adds PyCls itself, from a checkout in DIR.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
from typing import Callable, Dict, List

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# Width, layers, heads, MLP width.
SHAPES = {"S16": (384, 12, 6, 1536), "B16": (768, 12, 12, 3072), "L16": (1024, 24, 16, 4096), "tiny": (32, 2, 2, 64)}
CLASSES, SIDE, PATCH = 1000, 224, 16

# ------------------------------------------------------------------------ the models


def ours(shape, classifier="pooled"):
    """Our ViT, as the optimised configs have it."""
    sys.path.insert(0, ROOT)
    from pycls.core import config, hardware
    from pycls.models.vit import ViT

    hardware.keep_freed_memory()
    width, layers, heads, mlp = shape
    with config.temporary_cfg() as cfg:
        cfg.merge_from_list(["MODEL.NUM_CLASSES", CLASSES, "VIT.HIDDEN_DIM", width, "VIT.MLP_DIM", mlp, "LN.EPS", 1e-6])
        cfg.merge_from_list(["VIT.NUM_LAYERS", layers, "VIT.NUM_HEADS", heads, "VIT.CLASSIFIER_TYPE", classifier])
        return ViT()


def ours_with_class_token(shape):
    """Our ViT with the classifier of the other libraries."""
    return ours(shape, "token")


def ours_in_full_bf16(shape):
    """Our ViT with weights and activations in 16 bit; see FullTrainee."""
    return ours(shape)


def of_transformers(shape):
    """transformers' ViTForImageClassification."""
    import transformers
    from torch import nn

    width, layers, heads, mlp = shape
    settings = transformers.ViTConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=mlp,
        num_labels=CLASSES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation="sdpa",
    )  # fmt: skip

    class Logits(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = transformers.ViTForImageClassification(settings)

        def forward(self, images):
            return self.model(images).logits

    return Logits()


def of_timm(shape):
    """timm's VisionTransformer."""
    from timm.layers import set_fused_attn
    from timm.models.vision_transformer import VisionTransformer

    set_fused_attn(True)
    width, layers, heads, mlp = shape
    return VisionTransformer(embed_dim=width, depth=layers, num_heads=heads, mlp_ratio=mlp / width, num_classes=CLASSES)


def of_torchvision(shape):
    """torchvision's VisionTransformer."""
    from torchvision.models.vision_transformer import VisionTransformer

    width, layers, heads, mlp = shape
    return VisionTransformer(SIDE, PATCH, layers, heads, width, mlp, num_classes=CLASSES)


def of_pycls(shape, checkout=""):
    """PyCls's ViT, from a checkout."""
    if not checkout:
        raise ImportError("no checkout; see --pycls")
    sys.path.insert(0, checkout)
    from pycls.core.config import cfg
    from pycls.models.vit import ViT

    width, layers, heads, mlp = shape
    cfg.merge_from_list(["MODEL.TYPE", "vit", "MODEL.NUM_CLASSES", CLASSES, "TRAIN.IM_SIZE", SIDE, "LN.EPS", 1e-6])
    cfg.merge_from_list(["VIT.HIDDEN_DIM", width, "VIT.MLP_DIM", mlp, "VIT.NUM_LAYERS", layers, "VIT.NUM_HEADS", heads])
    cfg.merge_from_list(["VIT.PATCH_SIZE", PATCH, "VIT.CLASSIFIER_TYPE", "token"])
    return ViT()


# Name -> what builds it, and what the head reads.
LIBRARIES = {
    "ours": (ours, "mean of tokens"),
    "ours, class token": (ours_with_class_token, "class token"),
    "ours, full bf16": (ours_in_full_bf16, "mean of tokens"),
    "timm": (of_timm, "class token"),
    "torchvision": (of_torchvision, "class token"),
    "transformers": (of_transformers, "class token"),
    "pycls": (of_pycls, "class token"),
}

# -------------------------------------------------------- one library, in its own process


class Trainee:
    """A model with its optimizer, trained one step at a time on the same images."""

    def __init__(self, model, mode, compiled, device, batch):
        import torch

        self.torch, self.model, self.mode = torch, model.to(device).train(), mode
        self.device, self.compiled = torch.device(device), compiled
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.images = torch.rand(batch, 3, SIDE, SIDE, device=device)
        self.labels = torch.arange(batch, device=device) % CLASSES
        self.facts = {"parameters": sum(p.numel() for p in model.parameters()), "attention": self._attention()}
        if compiled:
            # Ours block by block, as COMPILE.ENABLED does; the others have no such way, and are compiled whole.
            for module in getattr(model, "repeated_blocks", lambda: [model])():
                module.compile()

    def _loss(self):
        with self.torch.autocast(self.device.type, dtype=self.torch.bfloat16, enabled=self.mode == "bf16"):
            logits = self.model(self.images)
        return self.torch.nn.functional.cross_entropy(logits.float(), self.labels)

    def _attention(self) -> str:
        """The attention kernel that a forward pass really calls."""
        with self.torch.profiler.profile(activities=[self.torch.profiler.ProfilerActivity.CPU]) as profile:
            self._loss()
        names = {event.key.removeprefix("aten::") for event in profile.key_averages()}
        fused = [name for name in names if name.startswith("_scaled_dot_product_") and name.count("_") > 3]
        softmax = "_softmax" in names or "softmax" in names
        return ", ".join(sorted(fused)) or ("softmax of products" if softmax else "unknown")

    def step(self) -> float:
        """Trains one step; returns its seconds."""
        from time import perf_counter

        start = perf_counter()
        self._train()
        if self.device.type == "cuda":
            self.torch.cuda.synchronize()
        return perf_counter() - start

    def _train(self) -> None:
        self.optimizer.zero_grad()
        self._loss().backward()
        self.optimizer.step()

    def release(self) -> None:
        """Gives memory that is cached for later steps back, so that the others have it in their turns."""
        if self.device.type == "cuda":
            self.torch.cuda.empty_cache()
        else:
            _trim_heap()


class FullTrainee(Trainee):
    """Ours as PRECISION.MODE bf16 trains it: weights and activations in 16 bit, the optimizer steps fp32 copies."""

    def __init__(self, model, mode, compiled, device, batch):
        import torch

        from pycls.core.precision import Precision

        if mode != "bf16":
            raise RuntimeError(f"its mode is not {mode}")
        self.precision = Precision("bf16", torch.device(device))
        super().__init__(self.precision.cast(model), "full bf16", compiled, device, batch)
        self.precision.attach(self.optimizer)

    def _train(self) -> None:
        self.precision.zero_grad(self.optimizer)
        self.precision.backward(self._loss())
        self.precision.step(self.optimizer, clip=None)


def _trim_heap() -> None:
    """Returns freed memory to the system (glibc only; elsewhere a matter of the allocator)."""
    import ctypes

    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)


def take_turns(connection, build, arguments, settings) -> None:
    """A library's process: says what it trains or why it can't, then answers numbers of steps with their seconds."""
    try:
        kind = FullTrainee if build is ours_in_full_bf16 else Trainee
        trainee = kind(build(*arguments), **settings)
        trainee.step()
        trainee.release()
    except (ImportError, RuntimeError, TypeError) as error:
        connection.send(f"not here: {str(error).splitlines()[0]}")
        return
    connection.send(trainee.facts)
    while steps := connection.recv():
        trainee.step()
        connection.send([trainee.step() for _ in range(steps)])
        trainee.release()


# ----------------------------------------------------------------------- the comparison


def compare(shape: str, mode: str, args) -> Dict:
    """One row: {shape, mode, libraries: {name: facts, seconds and images/s, or the reason why it is missing}}."""
    spawn, libraries, workers = multiprocessing.get_context("spawn"), {}, {}
    settings = {"mode": mode, "compiled": args.compiled, "device": args.device, "batch": args.batch}
    for name in args.only or LIBRARIES:
        build, head = LIBRARIES[name]
        arguments = (SHAPES[shape], args.pycls) if name == "pycls" else (SHAPES[shape],)
        connection, theirs = spawn.Pipe()
        process = spawn.Process(target=take_turns, args=(theirs, build, arguments, settings), daemon=True)
        process.start()
        theirs.close()
        workers[name] = (process, connection)
        libraries[name] = {"head": head, "seconds": []}
        if not args.together:
            connection.poll(None)
    for name, (_, connection) in list(workers.items()):
        _take_up(name, _answer(connection), libraries, workers, libraries[name].update)
    for _ in range(args.rounds):
        for name, (_, connection) in list(workers.items()):
            connection.send(args.steps)
            _take_up(name, _answer(connection), libraries, workers, libraries[name]["seconds"].extend)
    for name, (process, connection) in workers.items():
        connection.send(0)
        process.join()
        libraries[name]["images_per_second"] = args.batch / statistics.median(libraries[name]["seconds"])
    return {"shape": shape, "mode": mode + (" compiled" if args.compiled else ""), "libraries": libraries}


def _take_up(name: str, answer, libraries: Dict, workers: Dict, keep: Callable) -> None:
    """Keeps a library's answer; one that is a reason why it can't go on ends its part."""
    if isinstance(answer, str):
        libraries[name] = {"missing": answer}
        del workers[name]
    else:
        keep(answer)


def _answer(connection):
    try:
        return connection.recv()
    except EOFError:
        return "not here: its process ended without a word"


def table(rows: List[Dict]) -> str:
    """The results as a markdown table, with the speed of ours over each library's."""
    lines = ["| shape | mode | library | images/s | min to max | ours is | parameters | head reads | attention |",
             "| --- | --- | --- | ---: | --- | ---: | ---: | --- | --- |"]  # fmt: skip
    for row in rows:
        speed = row["libraries"].get("ours", {}).get("images_per_second")
        for name, result in row["libraries"].items():
            start = f"| {row['shape']} | {row['mode']} | {name} |"
            if "missing" in result:
                lines.append(f"{start} {result['missing']} | | | | | |")
                continue
            speeds = [result["images_per_second"] / s * statistics.median(result["seconds"]) for s in result["seconds"]]
            ratio = f"{speed / result['images_per_second']:.2f} x" if speed else ""
            lines.append(
                f"{start} {result['images_per_second']:.2f} | {min(speeds):.2f} to {max(speeds):.2f} | {ratio} | "
                f"{result['parameters']:,} | {result['head']} | {result['attention']} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["S16"], choices=list(SHAPES))
    parser.add_argument("--modes", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--only", nargs="+", choices=list(LIBRARIES), help="these libraries (default: all)")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="timed steps of each library per round")
    parser.add_argument("--compiled", action="store_true", help="compile every model (ours block by block)")
    parser.add_argument(
        "--together", action="store_true", help="all start and compile at once: for many cores, and memory for all"
    )
    parser.add_argument("--device", default="", help="cuda or cpu; default: cuda if there is a GPU")
    parser.add_argument("--pycls", metavar="DIR", default="", help="a checkout of PyCls, to train its ViT as well")
    parser.add_argument("--out", metavar="DIR", help="also write peers.json and peers.md there")
    args = parser.parse_args()
    sys.path.insert(0, ROOT)
    import torch

    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    rows = []
    for shape in args.shapes:
        for mode in args.modes:
            rows.append(compare(shape, mode, args))
            print(table(rows[-1:]), flush=True)
            if args.out:
                write(rows, args)


def write(rows: List[Dict], args) -> None:
    """Writes what is measured so far, with what it was measured on."""
    import torch

    from pycls.core import hardware

    text = f"Training, batch {args.batch}, {SIDE} px, fused AdamW; medians of {args.rounds} x {args.steps} steps, "
    text += f"taken in turns, on {hardware.device_name(torch.device(args.device))}, {torch.get_num_threads()} threads, "
    text += f"torch {torch.__version__}, {versions()}\n\n{table(rows)}\n"
    os.makedirs(args.out, exist_ok=True)
    for name, content in (("peers.json", json.dumps(rows, indent=1)), ("peers.md", text)):
        with open(os.path.join(args.out, name), "w", encoding="utf-8") as f:
            f.write(content)


def versions() -> str:
    """The installed versions of the other libraries."""
    from importlib import metadata

    found = []
    for name in ("timm", "torchvision", "transformers"):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found) or "no other library"


if __name__ == "__main__":
    main()
