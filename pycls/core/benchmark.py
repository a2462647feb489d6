"""Timing mode: how fast the model of the config trains and tests here, and whether the data keep up.

The model is prepared exactly as for training. Steps are timed on synthetic data without waiting for the device in
between (CUDA events; the host's clock on the CPU). Figures are medians over PREC_TIME.NUM_ITER iterations, the first
PREC_TIME.WARMUP_ITER left out; the very first step, in which compilers work, is told apart.

TFLOP/s count the model's own work: 2 x multiply-adds x images forward, three times that for a training step.
Work that is repeated for activation checkpointing never counts.
"""

import itertools
import json
import os
from typing import Callable, Dict, List, Optional, Tuple

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pycls.core import builders, ema, hardware, logging, meters, net, parallel, trainer
from pycls.core import distributed as dist
from pycls.core import optimizer as optim
from pycls.core.clock import HostClock, clock_for
from pycls.core.config import cfg
from pycls.core.errors import UserError
from pycls.core.io import atomic_write
from pycls.core.precision import Precision
from pycls.datasets import loader as data_loader

logger = logging.get_logger(__name__)


def time_parts(step: Callable[[Callable[[], None]], None], clock: HostClock) -> Tuple[np.ndarray, float]:
    """Runs `step` for the configured iterations; it calls its argument after each of its parts.

    Returns:
        (seconds (iterations, parts), warm-up left out; seconds of the very first iteration).
    """
    rows: List[List] = []
    for i in range(1 + cfg.PREC_TIME.WARMUP_ITER + cfg.PREC_TIME.NUM_ITER):
        marks = [clock.mark()]
        step(lambda marks=marks: marks.append(clock.mark()))
        rows.append(marks)
        if i == 0:
            clock.finish()
    clock.finish()
    first, rows = rows[0], rows[1 + cfg.PREC_TIME.WARMUP_ITER :]
    times = np.array([[clock.seconds(a, b) for a, b in itertools.pairwise(marks)] for marks in rows])
    return times, clock.seconds(first[0], first[-1])


# -------------------------------------------------------------------- what is timed


def time_test(plan, precision: Precision, batch: int) -> np.ndarray:
    """Seconds of the forward pass in evaluation, (iterations, 1)."""
    inputs = torch.zeros(batch, 3, cfg.TRAIN.IM_SIZE, cfg.TRAIN.IM_SIZE, device=plan.device)
    plan.raw.eval()

    def step(part_done):
        with torch.no_grad():
            precision.forward(plan.raw, inputs)
        part_done()

    return time_parts(step, clock_for(plan.device))[0]


class TrainingStep:
    """A true training step on synthetic data: forward and loss, backward, optimizer and EMA."""

    def __init__(self, plan, precision: Precision):
        self.plan, self.precision, self.count = plan, precision, itertools.count()
        self.loss_fun, self.losses = builders.build_loss_fun(), []
        self.optimizer, self.average = optim.construct_optimizer(plan.raw), ema.ModelEma(plan.ema, plan.raw)
        precision.attach(self.optimizer)
        optim.set_lr(self.optimizer, 1e-6)

    def time(self, batch: int) -> Tuple[np.ndarray, float]:
        """(Seconds of forward, backward, optimizer and EMA (iterations, 3), seconds of the first step).

        A batch in several accumulated passes (OPTIM.ACCUM_ITERS) counts those of all passes.
        """
        device = self.plan.device
        inputs = torch.rand(batch, 3, cfg.TRAIN.IM_SIZE, cfg.TRAIN.IM_SIZE, device=device)
        soft_labels = net.smooth_one_hot_labels(torch.arange(batch, device=device) % cfg.MODEL.NUM_CLASSES)
        passes = list(zip(inputs.chunk(cfg.OPTIM.ACCUM_ITERS), soft_labels.chunk(cfg.OPTIM.ACCUM_ITERS)))
        self.plan.model.train()

        def step(part_done):
            self.precision.zero_grad(self.optimizer)
            for number, (x, y) in enumerate(passes, 1):
                with self.plan.accumulating(last=number == len(passes)):
                    loss = self.loss_fun(self.precision.forward(self.plan.model, x), y)
                    part_done()
                    self.precision.backward(loss / len(passes))
                    part_done()
                self.losses.append(loss.detach())
            self.precision.step(self.optimizer, self.plan.clip_grad_norm)
            self.average.update(cfg.OPTIM.WARMUP_EPOCHS, next(self.count))
            part_done()

        seconds, first = time_parts(step, clock_for(device))
        forward, backward = seconds[:, :-1:2].sum(axis=1), seconds[:, 1:-1:2].sum(axis=1)
        return np.stack([forward, backward, seconds[:, -1]], axis=1), first

    def finite(self) -> bool:
        """Whether every loss was finite: a run of NaNs is no result."""
        return bool(torch.stack(self.losses).isfinite().all())


def time_loader(loader) -> np.ndarray:
    """Seconds that each of the loader's batches is waited for, (iterations, 1), several epochs if need be."""
    batches = itertools.chain.from_iterable(_epochs(loader))
    return time_parts(lambda part_done: (next(batches), part_done()), HostClock())[0]


def _epochs(loader):
    for epoch in itertools.count():
        data_loader.shuffle(loader, epoch)
        yield loader


class _Recorder(TorchDispatchMode):
    """Keeps the names of the operations that are carried out."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func._opname)
        return func(*args, **(kwargs or {}))


def attention_kernels(plan, precision: Precision) -> List[str]:
    """The attention kernels that one forward pass really calls, by torch's names."""
    inputs = torch.zeros(2, 3, cfg.TRAIN.IM_SIZE, cfg.TRAIN.IM_SIZE, device=plan.device)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), _Recorder() as recorder:
        precision.forward(plan.raw.eval(), inputs)
    fused = sorted(name for name in recorder.names if name.startswith("_scaled_dot_product_") and name.count("_") > 3)
    return fused or (["softmax of a matrix product"] if "_softmax" in recorder.names else [])


# ------------------------------------------------------------------- batch size sweep


def sweep_batch(timed: TrainingStep) -> List[Dict]:
    """Doubles the batch per process until it no longer fits; one row per batch: images/s and peak memory (MB)."""
    rows: List[Dict] = []
    batch = 1
    while batch <= 8192 and not _would_overflow(rows):
        try:
            if timed.plan.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            if cfg.COMPILE.ENABLED:
                # Else compilers would take the batch for a variable, with slower code than a training run has.
                torch.compiler.reset()
            seconds = float(np.median(timed.time(batch)[0].sum(axis=1)))
        except torch.OutOfMemoryError:
            timed.precision.zero_grad(timed.optimizer)
            break
        rows.append({"batch": batch, "images_per_second": batch / seconds, "memory_mb": meters.gpu_mem_usage()})
        logger.info("Batch %d: %.2f images/s, %.0f MB", batch, batch / seconds, rows[-1]["memory_mb"])
        batch *= 2
    return rows


def _would_overflow(rows: List[Dict]) -> bool:
    """On the CPU, whether a batch twice as large might not fit: the system kills a process that takes too much."""
    if torch.cuda.is_available() or len(rows) < 2:
        return False
    free_mb = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**20
    return 2 * (rows[-1]["memory_mb"] - rows[0]["memory_mb"]) > 0.8 * free_mb


# ------------------------------------------------------------------------ the report


def _spread(seconds: np.ndarray) -> Dict[str, float]:
    return {
        "median": float(np.median(seconds)),
        "p10": float(np.percentile(seconds, 10)),
        "p90": float(np.percentile(seconds, 90)),
        "min": float(seconds.min()),
    }


def time_config() -> Dict:
    """Times the model and, if the data set is there, its loader.

    Logs PyCls's iter_times and epoch_times, a `timing` record with all figures and a summary, and writes
    OUT_DIR/timing.json. Returns the `timing` record.

    Raises:
        UserError: a loss was not finite.
    """
    precision = Precision()
    plan = trainer.setup_model(precision, with_ema=True, host_values=False)
    if plan.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    train_batch, test_batch = cfg.TRAIN.BATCH_SIZE // cfg.NUM_GPUS, cfg.TEST.BATCH_SIZE // cfg.NUM_GPUS
    logger.info("Timing %d iterations, after 1 + %d of warm-up", cfg.PREC_TIME.NUM_ITER, cfg.PREC_TIME.WARMUP_ITER)
    timed = TrainingStep(plan, precision)
    train, first_step = timed.time(train_batch)
    memory = meters.gpu_mem_usage()
    test = None if cfg.TIME.TRAIN_ONLY else time_test(plan, precision, test_batch)
    if not timed.finite():
        raise UserError("--mode time: a loss was not finite, so the times are no result; try another PRECISION.MODE")
    loaders = None if cfg.TIME.TRAIN_ONLY else _loaders()
    times = _pycls_times(train, test, loaders)
    report = {
        **hardware.facts(plan.device),
        **_choices(plan, precision),
        **_figures(precision, train, train_batch),
        "first_step_seconds": first_step,
        "peak_memory_mb": memory,
        # What tools/plan.py --calibrate needs to predict the same step.
        "config": cfg.dump(),
    }
    if test is not None:
        report.update(_test_figures(test, test_batch, report))
    if loaders:
        report.update(_loader_figures(times["train_loader_time"], report))
    if cfg.TIME.SWEEP_BATCH:
        report["sweep"] = sweep_batch(timed)
    logger.info(logging.dump_log_data(report, "timing", prec=6))
    logger.info("Summary:\n%s", summary(report))
    if dist.is_master_proc():
        with atomic_write(os.path.join(cfg.OUT_DIR, "timing.json")) as f:
            f.write(json.dumps(report, indent=1).encode())
    return report


def _loaders():
    """The loaders of the config, or None (said why) where the data set is not on this machine."""
    try:
        return data_loader.construct_train_loader(), data_loader.construct_test_loader()
    except UserError as error:
        logger.info("The loader is not timed: %s", error)
        return None


def _pycls_times(train: np.ndarray, test: Optional[np.ndarray], loaders) -> Dict[str, float]:
    """Logs and returns PyCls's records: seconds per iteration, and per epoch where the data set is known."""
    times = {
        **({"test_fw_time": float(np.median(test))} if test is not None else {}),
        "train_fw_time": float(np.median(train[:, 0])),
        "train_bw_time": float(np.median(train[:, 1])),
        "train_fw_bw_time": float(np.median(train[:, :2].sum(axis=1))),
    }
    if loaders:
        times["train_loader_time"] = float(np.median(time_loader(loaders[0])))
    logger.info(logging.dump_log_data(times, "iter_times"))
    if loaders:
        iterations = {"train": len(loaders[0]), "test": len(loaders[1])}
        epochs = {name: value * iterations[name.split("_")[0]] for name, value in times.items()}
        logger.info(logging.dump_log_data(epochs, "epoch_times"))
    return times


def _choices(plan, precision: Precision) -> Dict:
    """What was chosen, and what that came to."""
    from torch._dynamo.utils import counters

    return {
        "precision": precision.mode,
        "attention_kernels": attention_kernels(plan, precision),
        "plan": parallel.describe(),
        "processes": dist.get_world_size(),
        "compile": cfg.COMPILE.MODE if cfg.COMPILE.ENABLED else "off",
        "compiled_graphs": counters["stats"]["unique_graphs"] if cfg.COMPILE.ENABLED else 0,
        "graph_breaks": sum(counters["graph_break"].values()) if cfg.COMPILE.ENABLED else 0,
        "accumulated_passes": cfg.OPTIM.ACCUM_ITERS,
        "activation_checkpointing": cfg.ACT_CHECKPOINT,
        "data": "synthetic",
        "image_size": cfg.TRAIN.IM_SIZE,
        "warmup_iterations": 1 + cfg.PREC_TIME.WARMUP_ITER,
        "timed_iterations": cfg.PREC_TIME.NUM_ITER,
    }


def _figures(precision: Precision, train: np.ndarray, batch: int) -> Dict:
    """The measured figures of training; rates are those of the slowest process."""
    flops, world = 2 * net.complexity(builders.get_model())["flops"], dist.get_world_size()
    steps = train.sum(axis=1)
    step = max(dist.gather_objects(float(np.median(steps))))
    peak = hardware.measure_peak(precision.device, precision.dtype or torch.float32)
    vendor = hardware.vendor_peak(hardware.device_name(precision.device), precision.mode)
    tflops = 3 * flops * batch / step / 1e12
    return {
        "train_batch_per_process": batch,
        "train_step_seconds": _spread(steps),
        "train_step_seconds_slowest_process": step,
        "forward_seconds": float(np.median(train[:, 0])),
        "backward_seconds": float(np.median(train[:, 1])),
        "optimizer_seconds": float(np.median(train[:, 2])),
        "train_images_per_second": world * batch / step,
        "model_flops_per_image_forward": flops,
        "train_tflops_per_process": tflops,
        "peak_tflops_measured": peak,
        "peak_tflops_vendor": vendor,
        "mfu_of_measured_peak": tflops / peak,
        "mfu_of_vendor_peak": tflops / vendor if vendor else None,
    }


def _test_figures(test: np.ndarray, batch: int, report: Dict) -> Dict:
    speed = batch / float(np.median(test))
    return {
        "test_batch_per_process": batch,
        "test_seconds": _spread(test),
        "test_images_per_second": report["processes"] * speed,
        "test_tflops_per_process": report["model_flops_per_image_forward"] * speed / 1e12,
    }


def _loader_figures(seconds: float, report: Dict) -> Dict:
    """Whether the loader keeps up with the steps; `seconds` is what it takes for a batch."""
    batch, step = report["train_batch_per_process"], report["train_step_seconds_slowest_process"]
    return {
        "loader_images_per_second": report["processes"] * batch / max(seconds, 1e-9),
        "bottleneck": "loader" if seconds > step else "model",
    }


def _percent(share: Optional[float]) -> str:
    return "unknown" if share is None else f"{100 * share:.1f}%"


def summary(report: Dict) -> str:
    """The report as a few aligned lines for people."""
    step = {k: 1e3 * v for k, v in report["train_step_seconds"].items()}
    spread = f"{step['median']:.2f} ms median (p10 {step['p10']:.2f}, p90 {step['p90']:.2f})"
    speed = f"{report['train_images_per_second']:.1f} images/s, {report['train_tflops_per_process']:.3f} TFLOP/s"
    of_peaks = (
        f"{_percent(report['mfu_of_measured_peak'])} of the measured matrix peak ({report['peak_tflops_measured']:.3f})"
    )
    kernels = ", ".join(report["attention_kernels"]) or "none"
    first = f"{report['first_step_seconds']:.2f} s"
    if report["compile"] != "off":
        first += f", {report['compiled_graphs']} compiled graphs, {report['graph_breaks']} graph breaks"
    batch = f"batch {report['train_batch_per_process']}"
    if report["accumulated_passes"] > 1:
        batch += f" in {report['accumulated_passes']} passes"
    rows = [
        ("device", f"{report['device']}; {report['plan']}; precision {report['precision']}; attention {kernels}"),
        ("train step", f"{spread} over {report['timed_iterations']}, {batch}"),
        ("of it optimizer", f"{1e3 * report['optimizer_seconds']:.2f} ms"),
        ("train speed", f"{speed} per process = {of_peaks}, {_percent(report['mfu_of_vendor_peak'])} of the vendor's"),
        ("first step", first),
        ("peak memory", f"{report['peak_memory_mb']:.0f} MB"),
    ]
    if "test_seconds" in report:
        median = 1e3 * report["test_seconds"]["median"]
        rows.append(("test forward", f"{median:.2f} ms median, {report['test_images_per_second']:.1f} images/s"))
    if "bottleneck" in report:
        rate, bottleneck = report["loader_images_per_second"], report["bottleneck"]
        rows.append(("loader", f"{rate:.1f} images/s; the bottleneck is the {bottleneck}"))
    if report.get("sweep"):
        largest, fastest = report["sweep"][-1], max(report["sweep"], key=lambda row: row["images_per_second"])
        text = f"largest batch that fits {largest['batch']}, fastest {fastest['batch']}"
        rows.append(("batch sweep", f"{text} ({fastest['images_per_second']:.2f} images/s per process)"))
    return "\n".join(f"  {name:16s} {text}" for name, text in rows)
