#!/usr/bin/env python3
"""Trains the same ViT shapes through ours and other libraries, in turns within one run; prints images/s and ratios.

    dev/bench_peers.py [--shapes S16 B16] [--batch 16] [--modes fp32 bf16] [--compiled] [--rounds 3] [--out DIR]

A library that can't be imported here is shown as such. The step is forward, cross entropy, backward and AdamW (torch's
default for the others, fused for ours) on synthetic images of 224 pixels.
"""

import argparse
import importlib
import json
import os
import statistics
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

import torch
from torch import nn

from pycls.core import config, hardware
from pycls.core.clock import clock_for
from pycls.models.vit import ViT

# Width, layers, heads, MLP width.
SHAPES = {"S16": (384, 12, 6, 1536), "B16": (768, 12, 12, 3072), "L16": (1024, 24, 16, 4096), "tiny": (32, 2, 2, 64)}
CLASSES, SIDE, PATCH = 1000, 224, 16


def ours(shape, classifier="pooled"):
    """Our ViT, as the optimised configs have it."""
    width, layers, heads, mlp = shape
    with config.temporary_cfg() as cfg:
        cfg.merge_from_list(["MODEL.NUM_CLASSES", CLASSES, "VIT.HIDDEN_DIM", width, "VIT.MLP_DIM", mlp, "LN.EPS", 1e-6])
        cfg.merge_from_list(["VIT.NUM_LAYERS", layers, "VIT.NUM_HEADS", heads, "VIT.CLASSIFIER_TYPE", classifier])
        return ViT()


def of_transformers(shape):
    """transformers' ViTForImageClassification."""
    transformers = importlib.import_module("transformers")
    width, layers, heads, mlp = shape
    settings = transformers.ViTConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=mlp,
        num_labels=CLASSES,        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = transformers.ViTForImageClassification(settings)

    class Logits(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, images):
            return self.model(images).logits

    return Logits()


def of_timm(shape):
    """timm's VisionTransformer."""
    module = importlib.import_module("timm.models.vision_transformer")
    width, layers, heads, mlp = shape
    return module.VisionTransformer(
        embed_dim=width, depth=layers, num_heads=heads, mlp_ratio=mlp / width, num_classes=CLASSES
    )


def of_torchvision(shape):
    """torchvision's VisionTransformer."""
    module = importlib.import_module("torchvision.models.vision_transformer")
    width, layers, heads, mlp = shape
    return module.VisionTransformer(SIDE, PATCH, layers, heads, width, mlp, num_classes=CLASSES)


PEERS = {"ours": ours, "transformers": of_transformers, "timm": of_timm, "torchvision": of_torchvision}


class Trainee:
    """A model with its optimizer, trained one step at a time on the same images."""

    def __init__(self, name, model, mode, compiled, device, batch):
        self.model = model.to(device).train()
        if compiled:
            self._compile(name)
        fused = {"fused": True} if name == "ours" else {}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, **fused)
        self.mode, self.device, self.clock = mode, device, clock_for(device)
        self.images = torch.rand(batch, 3, SIDE, SIDE, device=device)
        self.labels = torch.arange(batch, device=device) % CLASSES

    def _compile(self, name):
        if name == "ours":
            for block in self.model.repeated_blocks():
                block.compile()
        else:
            self.model.compile()

    def step(self) -> float:
        """Trains one step; returns its seconds."""
        start = self.clock.mark()
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.mode == "bf16"):
            loss = nn.functional.cross_entropy(self.model(self.images).float(), self.labels)
        loss.backward()
        self.optimizer.step()
        end = self.clock.mark()
        self.clock.finish()
        return self.clock.seconds(start, end)


def compare(shape, mode, compiled, device, batch, rounds, steps):
    """{library: median images/s, or the reason why it is missing}, measured in turns."""
    trainees, results = {}, {}
    for name, build in PEERS.items():
        try:
            trainees[name] = Trainee(name, build(shape), mode, compiled, device, batch)
        except (ImportError, RuntimeError) as error:
            results[name] = f"not here: {str(error).splitlines()[0]}"
    times = {name: [] for name in trainees}
    for trainee in trainees.values():
        trainee.step()
    for _ in range(rounds):
        for name, trainee in trainees.items():
            times[name] += [trainee.step() for _ in range(steps)]
    return {**{name: batch / statistics.median(seconds) for name, seconds in times.items()}, **results}


def table(rows) -> str:
    """The results as a markdown table with ratios to the best other library."""
    lines = [
        f"| shape | mode | {' | '.join(PEERS)} | ours / best other |",
        f"| --- | --- |{' ---: |' * (len(PEERS) + 1)}",
    ]
    for row in rows:
        speeds = row["images_per_second"]
        others = [v for n, v in speeds.items() if n != "ours" and isinstance(v, float)]
        ratio = f"{speeds['ours'] / max(others):.2f}" if others else "no other"
        cells = [f"{v:.2f}" if isinstance(v, float) else v for v in (speeds[name] for name in PEERS)]
        lines.append(f"| {row['shape']} | {row['mode']} | {' | '.join(cells)} | {ratio} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["S16"], choices=list(SHAPES))
    parser.add_argument("--modes", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="steps of each library per round")
    parser.add_argument("--compiled", action="store_true", help="compile every model (ours block by block)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", metavar="DIR", help="also write peers.json and peers.md there")
    args = parser.parse_args()
    device, rows = torch.device(args.device), []
    for shape in args.shapes:
        for mode in args.modes:
            speeds = compare(SHAPES[shape], mode, args.compiled, device, args.batch, args.rounds, args.steps)
            rows.append(
                {"shape": shape, "mode": mode + (" compiled" if args.compiled else ""), "images_per_second": speeds}
            )
            print(rows[-1], flush=True)
    text = f"images/s, batch {args.batch}, medians of {args.rounds * args.steps} steps taken in turns, on "
    text += f"{hardware.device_name(device)}, torch {torch.__version__}\n\n{table(rows)}\n"
    print(text)
    if args.out:
        os.makedirs(args.out, exist_ok=True)
        for name, content in (("peers.json", json.dumps(rows, indent=1)), ("peers.md", text)):
            with open(os.path.join(args.out, name), "w", encoding="utf-8") as f:
                f.write(content)


if __name__ == "__main__":
    main()
