"""Timing mode: how fast the model of the config trains and tests here, and whether the data keep up.

The model is prepared exactly as for training. Steps are timed on dummy data without waiting for the device in
between (CUDA events; the host's clock on the CPU, where work is done when a call returns). Medians over
PREC_TIME.NUM_ITER iterations, the first PREC_TIME.WARMUP_ITER left out.

TFLOP/s count the model's own work: 2 x multiply-adds x images forward, three times that for a training step.
Work that is repeated for activation checkpointing never counts.
"""

import itertools
import time
from typing import Callable, Dict, List

import numpy as np
import torch

from pycls.core import builders, ema, logging, meters, net, trainer
from pycls.core import distributed as dist
from pycls.core import optimizer as optim
from pycls.core.config import cfg
from pycls.core.errors import UserError
from pycls.core.precision import Precision
from pycls.datasets import loader as data_loader

logger = logging.get_logger(__name__)

# --------------------------------------------------------------------------- clocks


class HostClock:
    """Marks on the host's clock: right where a call returns only when its work is done (CPU)."""

    def mark(self) -> float:
        """A point in time."""
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        """Time between two marks."""
        return end - start

    def finish(self) -> None:
        """Waits until all marks have been passed."""


class CudaClock(HostClock):
    """Marks in the device's own queue (CUDA events), which the host does not wait for."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end) / 1000.0

    def finish(self) -> None:
        torch.cuda.synchronize()


def clock_for(device: torch.device) -> HostClock:
    """The clock that tells the truth on `device`."""
    return CudaClock() if device.type == "cuda" else HostClock()


def time_parts(step: Callable[[Callable[[], None]], None], clock: HostClock) -> np.ndarray:
    """Runs `step` for the configured iterations; it calls its argument after each of its parts.

    Returns:
        seconds, (iterations, parts), warm-up left out.
    """
    rows: List[List] = []
    for _ in range(cfg.PREC_TIME.WARMUP_ITER + cfg.PREC_TIME.NUM_ITER):
        marks = [clock.mark()]
        step(lambda marks=marks: marks.append(clock.mark()))
        rows.append(marks)
    clock.finish()
    rows = rows[cfg.PREC_TIME.WARMUP_ITER :]
    return np.array([[clock.seconds(a, b) for a, b in itertools.pairwise(marks)] for marks in rows])


# -------------------------------------------------------------------- what is timed


def time_test(plan, precision: Precision, batch: int) -> np.ndarray:
    """Seconds of the forward pass in evaluation, (iterations, 1)."""
    inputs = torch.zeros(batch, 3, cfg.TRAIN.IM_SIZE, cfg.TRAIN.IM_SIZE, device=plan.device)
    plan.raw.eval()

    def step(part_done):
        with torch.no_grad():
            precision.forward(plan.raw, inputs)
        part_done()

    return time_parts(step, clock_for(plan.device))


def time_train(plan, precision: Precision, batch: int) -> np.ndarray:
    """Seconds of (forward and loss, backward, optimizer and EMA) of true training steps, (iterations, 3)."""
    inputs = torch.rand(batch, 3, cfg.TRAIN.IM_SIZE, cfg.TRAIN.IM_SIZE, device=plan.device)
    labels = torch.arange(batch, device=plan.device) % cfg.MODEL.NUM_CLASSES
    soft_labels, loss_fun = net.smooth_one_hot_labels(labels), builders.build_loss_fun()
    optimizer, average = optim.construct_optimizer(plan.raw), ema.ModelEma(plan.ema, plan.raw)
    precision.attach(optimizer)
    optim.set_lr(optimizer, 1e-6)
    plan.model.train()
    count = itertools.count()

    def step(part_done):
        precision.zero_grad(optimizer)
        loss = loss_fun(precision.forward(plan.model, inputs), soft_labels)
        part_done()
        precision.backward(loss)
        part_done()
        precision.step(optimizer, plan.clip_grad_norm)
        average.update(cfg.OPTIM.WARMUP_EPOCHS, next(count))
        part_done()

    return time_parts(step, clock_for(plan.device))


def time_loader(loader) -> np.ndarray:
    """Seconds that each of the loader's batches is waited for, (iterations, 1), several epochs if need be."""
    batches = itertools.chain.from_iterable(_epochs(loader))
    return time_parts(lambda part_done: (next(batches), part_done()), HostClock())


def _epochs(loader):
    for epoch in itertools.count():
        data_loader.shuffle(loader, epoch)
        yield loader


def measure_peak(device: torch.device, dtype: torch.dtype) -> float:
    """TFLOP/s of large square matrix products in `dtype`: the ceiling that this machine was seen to reach."""
    size = 8192 if device.type == "cuda" else 2048
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    clock, marks = clock_for(device), []
    for _ in range(8):
        marks.append(clock.mark())
        a @ b
    marks.append(clock.mark())
    clock.finish()
    best = min(clock.seconds(x, y) for x, y in list(itertools.pairwise(marks))[2:])
    return 2 * size**3 / best / 1e12


# ------------------------------------------------------------------------ the report


def _spread(seconds: np.ndarray) -> Dict[str, float]:
    return {
        "median": float(np.median(seconds)),
        "p10": float(np.percentile(seconds, 10)),
        "p90": float(np.percentile(seconds, 90)),
        "min": float(seconds.min()),
    }


def time_config() -> Dict:
    """Times the model and, if the data set is there, its loader; logs PyCls's iter_times and epoch_times, a
    `timing` record with all figures, and a summary. Returns the `timing` record."""
    precision = Precision()
    plan = trainer.setup_model(precision, with_ema=True)
    if plan.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    train_batch, test_batch = cfg.TRAIN.BATCH_SIZE // cfg.NUM_GPUS, cfg.TEST.BATCH_SIZE // cfg.NUM_GPUS
    logger.info(
        "Timing %d + %d iterations of testing and of training", cfg.PREC_TIME.WARMUP_ITER, cfg.PREC_TIME.NUM_ITER
    )
    test = time_test(plan, precision, test_batch)
    train = time_train(plan, precision, train_batch)
    memory = meters.gpu_mem_usage()
    loaders = _loaders()
    forward, backward, update = (float(np.median(part)) for part in train.T)
    times = {
        "test_fw_time": float(np.median(test)),
        "train_fw_time": forward,
        "train_bw_time": backward,
        "train_fw_bw_time": float(np.median(train[:, :2].sum(axis=1))),
    }
    iterations = {"train": 0, "test": 0}
    if loaders:
        times["train_loader_time"] = float(np.median(time_loader(loaders[0])))
        iterations = {"train": len(loaders[0]), "test": len(loaders[1])}
    logger.info(logging.dump_log_data(times, "iter_times"))
    if loaders:
        epochs = {name: value * iterations[name.split("_")[0]] for name, value in times.items()}
        logger.info(logging.dump_log_data(epochs, "epoch_times"))
    report = _report(precision, times, test, train, update, memory, train_batch, test_batch)
    logger.info(logging.dump_log_data(report, "timing", prec=6))
    logger.info("Summary:\n%s", summary(report))
    return report


def _loaders():
    """The loaders of the config, or None (said why) where the data set is not on this machine."""
    try:
        return data_loader.construct_train_loader(), data_loader.construct_test_loader()
    except UserError as error:
        logger.info("The loader is not timed: %s", error)
        return None


def _report(precision, times, test, train, update, memory, train_batch, test_batch) -> Dict:
    flops = 2 * net.complexity(builders.get_model())["flops"]
    step, world = float(np.median(train.sum(axis=1))), dist.get_world_size()
    compute_dtype = precision.dtype or torch.float32
    peak = measure_peak(precision.device, compute_dtype)
    report = {
        "device": torch.cuda.get_device_name() if precision.device.type == "cuda" else "cpu",
        "processes": world,
        "precision": precision.mode,
        "train_batch_per_process": train_batch,
        "test_batch_per_process": test_batch,
        "warmup_iterations": cfg.PREC_TIME.WARMUP_ITER,
        "timed_iterations": cfg.PREC_TIME.NUM_ITER,
        "test_seconds": _spread(test),
        "train_step_seconds": _spread(train.sum(axis=1)),
        "optimizer_seconds": update,
        "test_images_per_second": world * test_batch / times["test_fw_time"],
        "train_images_per_second": world * train_batch / step,
        "test_tflops_per_process": flops * test_batch / times["test_fw_time"] / 1e12,
        "train_tflops_per_process": 3 * flops * train_batch / step / 1e12,
        "peak_tflops_measured": peak,
        "peak_memory_mb": memory,
    }
    report["mfu_of_measured_peak"] = report["train_tflops_per_process"] / peak
    if "train_loader_time" in times:
        report["loader_images_per_second"] = world * train_batch / max(times["train_loader_time"], 1e-9)
        report["bottleneck"] = "loader" if times["train_loader_time"] > step else "model"
    return report


def summary(report: Dict) -> str:
    """The report as a few aligned lines for people."""
    step, test = ({k: 1e3 * v for k, v in report[name].items()} for name in ("train_step_seconds", "test_seconds"))
    spread = f"{step['median']:.2f} ms median (p10 {step['p10']:.2f}, p90 {step['p90']:.2f})"
    share = (
        f"{100 * report['mfu_of_measured_peak']:.1f}% of the measured matrix peak {report['peak_tflops_measured']:.3f}"
    )
    speed = f"{report['train_images_per_second']:.1f} images/s, {report['train_tflops_per_process']:.3f} TFLOP/s"
    rows = [
        ("device", f"{report['device']}, {report['processes']} process(es), precision {report['precision']}"),
        ("train step", f"{spread} over {report['timed_iterations']}, batch {report['train_batch_per_process']}"),
        ("of it optimizer", f"{1e3 * report['optimizer_seconds']:.2f} ms"),
        ("train speed", f"{speed} per process = {share}"),
        ("test forward", f"{test['median']:.2f} ms median, {report['test_images_per_second']:.1f} images/s"),
        ("peak memory", f"{report['peak_memory_mb']:.0f} MB"),
    ]
    if "bottleneck" in report:
        rate, bottleneck = report["loader_images_per_second"], report["bottleneck"]
        rows.append(("loader", f"{rate:.1f} images/s; the bottleneck is the {bottleneck}"))
    return "\n".join(f"  {name:16s} {text}" for name, text in rows)
