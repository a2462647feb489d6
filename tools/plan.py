#!/usr/bin/env python3
"""Predict memory, speed and cost of a training run: plan.py --cfg FILE.yaml --gpu h100 --nodes 8 [KEY VALUE ...]."""

import argparse
import json
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from pycls.core import cli, config
from pycls.core.cli import Parser, guarded
from pycls.core.config import cfg
from pycls.core.errors import UserError, look_up

_EPILOG = """examples:
  plan.py --cfg configs/vit/ViT-H16_optimised_224.yaml --gpu h100 --nodes 8 --price 2.5 --plot scaling.png
  plan.py --cfg configs/vit/ViT-H16_baseline_224.yaml --gpu v100-16 --gpus 64 TRAIN.BATCH_SIZE 512
  plan.py --cfg my.yaml --gpu h100 --nodes 4 --calibrate runs/timed/timing.json      # of --mode time on one h100
  plan.py --cfg my.yaml --gpu cpu                                                    # this machine, measured first

The batch per GPU is TRAIN.BATCH_SIZE / NUM_GPUS of the config, however many GPUs are planned; with --scaling strong the
global batch stays.
"""


def _parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = Parser(
        description="Predict memory, speed and cost of a training run.",
        epilog=_EPILOG,
        formatter_class=formatter,
        allow_abbrev=False,
    )
    parser.add_argument("--cfg", required=True, metavar="FILE", help="YAML config")
    parser.add_argument("--gpu", required=True, help="v100-16, v100-32, a100-40, a100-80, h100, h200, b200 or cpu")
    parser.add_argument("--nodes", type=int, metavar="N", help="number of nodes, all full")
    parser.add_argument("--gpus", type=int, metavar="N", help="number of GPUs (default: NUM_GPUS of the config)")
    parser.add_argument("--gpus-per-node", type=int, metavar="N", default=8, help="GPUs of a node (default: 8)")
    parser.add_argument("--network", type=float, metavar="GB/S", help="between nodes, per node and one way")
    parser.add_argument("--price", type=float, default=0.0, help="per GPU and hour")
    parser.add_argument("--images", type=int, help="images per epoch (default: ImageNet-1K's 1,281,167)")
    parser.add_argument(
        "--scaling", choices=["weak", "strong"], default="weak", help="keep the batch per GPU, or in all"
    )
    parser.add_argument("--calibrate", metavar="FILE", help="timing.json of --mode time on such a device")
    parser.add_argument("--json", metavar="FILE", help="write everything to this file")
    parser.add_argument(
        "--plot", metavar="FILE.png", type=cli.png_file, help="draw speed against number of GPUs, and memory"
    )
    parser.add_argument("--plugin", action="append", default=[], metavar="FILE_OR_MODULE", help="as in run_net.py")
    parser.add_argument("opts", nargs=argparse.REMAINDER, metavar="KEY VALUE", help="config overrides")
    return parser


def _cluster(args):
    from pycls.core import hardware
    from pycls.core.roofline import Cluster

    gpu = look_up({**hardware.GPUS, "cpu": None}, args.gpu, "--gpu") or hardware.this_cpu()
    return Cluster(args.gpu, gpu, args.gpus_per_node, args.network or gpu.network)


def _gpus_and_batch(args):
    """How many GPUs, and how many images each takes per step."""
    if args.nodes and args.gpus:
        raise UserError("--nodes and --gpus: give one of them")
    for name in ("nodes", "gpus", "gpus_per_node", "network", "price", "images"):
        value = getattr(args, name)
        if value is not None and (value < 0 or (value == 0 and name != "price")):
            raise UserError(f"--{name.replace('_', '-')}: {value:g} is too small")
    gpus = args.nodes * args.gpus_per_node if args.nodes else args.gpus or cfg.NUM_GPUS
    if args.scaling == "weak":
        return gpus, cfg.TRAIN.BATCH_SIZE // cfg.NUM_GPUS
    if cfg.TRAIN.BATCH_SIZE % (gpus * cfg.OPTIM.ACCUM_ITERS):
        raise UserError(
            f"TRAIN.BATCH_SIZE: {cfg.TRAIN.BATCH_SIZE} does not divide by {gpus} GPUs times OPTIM.ACCUM_ITERS"
        )
    return gpus, cfg.TRAIN.BATCH_SIZE // gpus


def main() -> None:
    args = _parser().parse_args()
    cli.load_plugins(args.plugin)
    config.load_cfg(args.cfg)
    cfg.merge_from_list(args.opts)
    config.assert_and_infer_cfg(cache_urls=False)
    gpus, batch = _gpus_and_batch(args)
    cluster = _cluster(args)

    from pycls.core import ladder, memory, plan_report, planner, plotting
    from pycls.core.io import atomic_write

    size = cfg.FSDP.SHARD_SIZE
    if cfg.FSDP.ENABLED and size and gpus % size:
        raise UserError(f"FSDP.SHARD_SIZE: {size} does not divide the {gpus} GPUs")
    compared = None
    if args.calibrate:
        cluster, compared = planner.calibrate(args.calibrate, cluster)
    choice = memory.choice_of_config(gpus, batch, cluster.cuda)
    images = args.images or ladder.IMAGENET_TRAIN_IMAGES
    report = plan_report.report(choice, cluster, images, args.price, args.scaling == "weak")
    if compared:
        report["calibration"] = compared
    title = os.path.splitext(os.path.basename(args.cfg))[0]
    if args.json:
        try:
            with atomic_write(args.json) as f:
                f.write(json.dumps(report, indent=1).encode())
        except OSError as error:
            raise UserError(f"--json {args.json}: can't be written: {error.strerror}") from None
    if args.plot:
        plotting.plot_plan(report, title, args.plot)
    print(plan_report.text(report, title))


if __name__ == "__main__":
    sys.exit(guarded(main))
