"""Twenty training steps under any plan, as a function for `distributed.multi_proc_run`: what the matrix compares."""

import contextlib
import copy
from typing import Dict, Tuple

import pytest
import torch

from pycls.core import builders, config, net, trainer
from pycls.core import distributed as dist
from pycls.core.config import cfg
from pycls.core.precision import Precision
from pycls.core.run import Run
from pycls.core.sharding_fairscale import FairScaleSharded

STEPS = 20


class Stream:
    """A CUDA stream on the CPU: everything happens at once, nothing needs waiting for."""

    def wait_stream(self, other):
        """Nothing is pending."""

    def synchronize(self):
        """Nothing is pending."""


@contextlib.contextmanager
def stand_in_for_streams():
    """Lets FairScale run on the CPU, where its streams have no counterpart, until the context ends."""
    from fairscale.nn import FullyShardedDataParallel

    stream, set_up = Stream(), FullyShardedDataParallel._setup_streams

    def set_up_with_stand_in(self):
        set_up(self)
        if self._is_root:
            # Shared with the modules below.
            self._streams.update(dict.fromkeys(("fp32_to_fp16", "all_gather", "post_backward"), stream))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FullyShardedDataParallel, "_setup_streams", set_up_with_stand_in)
        patch.setattr(torch.cuda, "Stream", lambda *args, **kwargs: stream)
        patch.setattr(torch.cuda, "current_stream", lambda *args: stream)
        patch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
        patch.setattr(FairScaleSharded, "check", staticmethod(lambda: None))
        # Its buckets keep gradients back on a stream of their own.
        patch.setattr(FairScaleSharded, "bucket_cap_mb", 0)
        yield


def new_run(text: str) -> Run:
    """A run by a config, as `trainer` prepares it."""
    config.reset_cfg()
    cfg.merge_from_text(text, "test")
    trainer.seed_generators(cfg.RNG_SEED)
    precision = Precision()
    return Run(trainer.setup_model(precision, with_ema=True), precision, STEPS, 1)


def train_steps(run: Run, steps: int = STEPS, start: int = 0):
    """Trains on this process's part of two batches in turn; returns the loss of each step over all processes."""
    world, rank, losses = dist.get_world_size(), dist.get_rank(), []
    run.model.train()
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(step % 2)
        images = torch.randn(cfg.TRAIN.BATCH_SIZE, 3, cfg.TRAIN.IM_SIZE, cfg.TRAIN.IM_SIZE, generator=generator)
        labels = torch.randint(cfg.MODEL.NUM_CLASSES, (cfg.TRAIN.BATCH_SIZE,), generator=generator)
        images, labels = (t.chunk(world)[rank] for t in (images, net.smooth_one_hot_labels(labels)))
        loss, _ = trainer.training_step(run, builders.build_loss_fun(), images, labels)
        run.ema.update(1, step)
        losses.append(dist.all_reduce_sum(loss.detach().clone()) / world)
    return torch.stack(losses)


@stand_in_for_streams()
def record(path, texts: Dict[str, str], saves: Dict[str, str], loads: Dict[str, Tuple[str, str]], large: str) -> None:
    """One group of processes does it all, as starting one takes longest. Writes results by name to `path`.

    Args:
        large: config of a model to build first, if any; "memory" is how many bytes this took at most, on any process.
        texts: configs to train by; the results are (losses, weights, average) of rank 0.
        saves: configs to train a little by and save a checkpoint; the results are the whole states.
        loads: (config, checkpoint) to resume; the results are the whole states.
    """
    results = {"memory": _building_memory(large)} if large else {}
    for name, text in texts.items():
        run = new_run(text)
        # Low precision is compared roughly: a few steps show it.
        losses = train_steps(run, STEPS if run.precision.mode == "fp32" else 6)
        results[name] = (losses, *(run.plan.model_state(model) for model in (run.raw, run.plan.ema)))
    for name, text in saves.items():
        run = new_run(text)
        train_steps(run, 2)
        with run.writer:
            run.save_epoch(0, 50.0, 40.0)
        results[name] = whole_state(run)
    for name, (text, source) in loads.items():
        run = new_run(text)
        run.resume(source)
        results[name] = whole_state(run)
    config.reset_cfg()
    if dist.is_master_proc():
        torch.save(results, path)


def _building_memory(text: str) -> int:
    before = _highest_memory()
    new_run(text)
    return max(dist.gather_objects(_highest_memory() - before))


def _highest_memory() -> int:
    """The most bytes of memory that this process ever had (`ru_maxrss` starts with its parent's)."""
    with open("/proc/self/status", encoding="utf-8") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("VmHWM")) * 1024


def whole_state(run: Run):
    """All that a checkpoint must keep, as one process would hold it."""
    states = [run.plan.model_state(model) for model in (run.raw, run.plan.ema)]
    # A copy, since what a single process holds is trained on.
    return copy.deepcopy([*states, run.plan.optimizer_state(run.optimizer), run.precision.state_dict()])
