#!/usr/bin/env python3
"""Whether more tokens than a ViT needs are faster, as kernels like round numbers: bench_tokens.py [--shape S16] ...

A 224-pixel image in patches of 16 makes 196 tokens, 197 with a class token. VIT.REGISTERS pads them; this trains the
same shape with several counts in turns within one run, and prints images/s and the ratio to no padding. Above 1,
padding pays on this device; the registers it takes are learned tokens, so they change the model a little.
"""

import argparse
import os
import statistics
import sys
from typing import Dict, List, Tuple

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [ROOT, os.path.join(ROOT, "dev")]

import torch
from bench_peers import SHAPES

from pycls.core import config, hardware
from pycls.core.clock import clock_for
from pycls.core.precision import Precision
from pycls.models.vit import ViT

# Classifier, and registers that bring its tokens to a multiple of 8, 16, 64.
COUNTS = (("pooled", (0, 4, 12, 60)), ("token", (0, 3, 11, 59)))
CLASSES, SIDE = 1000, 224


class Trainee:
    """A ViT with some registers, and the images that it trains on."""

    def __init__(self, args, classifier: str, registers: int):
        width, layers, heads, mlp = SHAPES[args.shape]
        with config.temporary_cfg() as cfg:
            cfg.merge_from_list(["MODEL.NUM_CLASSES", CLASSES, "VIT.HIDDEN_DIM", width, "VIT.MLP_DIM", mlp])
            cfg.merge_from_list(["VIT.NUM_LAYERS", args.layers or layers, "VIT.NUM_HEADS", heads])
            cfg.merge_from_list(["VIT.CLASSIFIER_TYPE", classifier, "VIT.REGISTERS", registers])
            model = ViT().to(args.device).train()
        self.tokens = model.grid**2 + (not model.pooled) + registers
        self.precision = Precision(args.mode, torch.device(args.device))
        self.model = self.precision.cast(model)
        self.clock = clock_for(self.precision.device)
        self.images = torch.rand(args.batch, 3, SIDE, SIDE, device=args.device)
        self.labels = torch.arange(args.batch, device=args.device) % CLASSES
        if args.compiled:
            for block in model.repeated_blocks():
                block.compile(dynamic=False)

    def seconds(self, steps: int) -> List[float]:
        """Trains one step that does not count, then `steps`; returns their times, without the optimizer's."""
        marks = []
        for _ in range(1 + steps):
            marks.append(self.clock.mark())
            self.model.zero_grad()
            logits = self.precision.forward(self.model, self.images)
            torch.nn.functional.cross_entropy(logits, self.labels).backward()
        marks.append(self.clock.mark())
        self.clock.finish()
        return [self.clock.seconds(a, b) for a, b in zip(marks[1:], marks[2:])]


def measure(args) -> Dict[Tuple[str, int], Tuple[int, List[float]]]:
    """(Tokens, seconds of each step) by classifier and registers, all taken in turns."""
    trainees = {(c, r): Trainee(args, c, r) for c, registers in COUNTS for r in registers}
    found = {key: (trainee.tokens, []) for key, trainee in trainees.items()}
    for number in range(args.rounds):
        for key, trainee in trainees.items():
            found[key][1].extend(trainee.seconds(args.steps))
        print(f"round {number + 1} of {args.rounds} done", file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="S16")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has, to be quick")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--mode", default="amp_bf16", help="as PRECISION.MODE (default: amp_bf16)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compiled", action="store_true", help="compile the blocks")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="timed steps per turn")
    args = parser.parse_args()
    if args.device == "cpu":
        hardware.keep_freed_memory()
    print(f"{args.shape}, batch {args.batch}, {args.mode}, {hardware.device_name(torch.device(args.device))}")
    print("| classifier | registers | tokens | images/s (p25 to p75) | ratio to none |")
    print("| --- | ---: | ---: | --- | ---: |")
    found = measure(args)
    for (classifier, registers), (tokens, seconds) in found.items():
        low, middle, high = (args.batch / s for s in reversed(statistics.quantiles(seconds, n=4)))
        ratio = statistics.median(found[classifier, 0][1]) / statistics.median(seconds)
        print(f"| {classifier} | {registers} | {tokens} | {middle:.2f} ({low:.2f} to {high:.2f}) | {ratio:.3f} |")


if __name__ == "__main__":
    main()
