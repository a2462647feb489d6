"""Training and testing: read top to bottom, this is the algorithm.

Where a model runs (`parallel`), in which dtype (`precision`) and from where its batches come (`loader`) is
settled before the loop and not asked inside it.
"""

import json
import os
from contextlib import closing

import torch

from pycls.core import builders, checkpoint, config, ema, evaluation, logging, meters, net, parallel, plotting, watch
from pycls.core import distributed as dist
from pycls.core import optimizer as optim
from pycls.core.config import cfg
from pycls.core.errors import UserError
from pycls.core.fitting import check_class_names, log_tested, tested_state
from pycls.core.interrupt import Interrupted, StopRequest
from pycls.core.io import atomic_write
from pycls.core.placement import Single
from pycls.core.precision import Precision
from pycls.core.run import Run, own_out_dir, seed_generators
from pycls.core.transfer import device_batches
from pycls.datasets import loader as data_loader

logger = logging.get_logger(__name__)

# --------------------------------------------------------------------------- setup


def setup_env(mode: str) -> None:
    """Output folder, logging, seeds, for `mode` train, test or time.

    The log is OUT_DIR/stdout.log; but beside a training run, whose learning curves are read from there, testing and
    timing write test.log and time.log.
    """
    if dist.is_master_proc():
        try:
            os.makedirs(cfg.OUT_DIR, exist_ok=True)
        except OSError as error:
            raise UserError(f"OUT_DIR: {cfg.OUT_DIR} can't be written: {error.strerror}") from None
    dist.barrier()
    beside_training = mode != "train" and checkpoint.has_checkpoint()
    logging.setup_logging(f"{mode}.log" if beside_training else "stdout.log")
    logging.log_environment()
    logger.info("Config:\n%s", cfg.dump())
    logger.info(logging.dump_log_data(cfg, "cfg", None))
    seed_generators(cfg.RNG_SEED)
    torch.backends.cudnn.benchmark = cfg.CUDNN.BENCHMARK
    if cfg.CUDNN.BENCHMARK and dist.device_type() == "cuda":
        logger.info("CUDNN.BENCHMARK is on: results may differ in rounding from run to run, whatever RNG_SEED")


def setup_model(precision: Precision, with_ema: bool = False, host_values: bool = True) -> Single:
    """Builds the model of the config (and a copy to hold its average) and puts it where and how it runs.

    Args:
        host_values: draw initial values on the host, where a seed gives the same ones on every machine; else on the
            device, which is faster.
    """
    model = builders.build_blueprint()
    if cfg.VERBOSE:
        logger.info("Model:\n%s", model)
    logger.info(logging.dump_log_data(net.complexity(builders.get_model()), "complexity"))
    logger.info("Precision: %s on %s; %s", precision.mode, precision.device, parallel.describe())
    average = ema.copy_for_ema(model) if with_ema else None
    return parallel.prepare(model, average, precision, host_values)


def setup_run(train_loader, test_loader) -> Run:
    """Everything that a training run consists of, before its first step."""
    precision = Precision()
    plan = setup_model(precision, with_ema=True)
    # Weights are initialised alike everywhere; from here on each process draws its own dropout masks.
    seed_generators(cfg.RNG_SEED + dist.get_rank())
    class_names = getattr(train_loader.dataset, "class_names", None)
    return Run(plan, precision, len(train_loader), len(test_loader), class_names)


# ------------------------------------------------------------------------ training


def train_model() -> None:
    """Trains the model of the config: from OUT_DIR's newest checkpoint, from TRAIN.WEIGHTS, or from scratch.

    Raises:
        Interrupted: one of `interrupt.stop_signals` came; the run is saved.
    """
    with own_out_dir(), StopRequest() as stop:
        setup_env("train")
        train_loader = data_loader.construct_train_loader()
        test_loader = data_loader.construct_test_loader()
        run = setup_run(train_loader, test_loader)
        run.start()
        if run.epoch >= cfg.OPTIM.MAX_EPOCH:
            logger.info("Nothing to do: the run in %s has finished its %d epochs", cfg.OUT_DIR, cfg.OPTIM.MAX_EPOCH)
            return
        # Only now is it sure that the run goes on: one that was refused must not leave its config here.
        write_run_files(run.class_names)
        loss_fun = builders.build_loss_fun()
        batch, lr = cfg.TRAIN.BATCH_SIZE, optim.get_epoch_lr(run.epoch)
        logger.info("Start epoch: %d; global batch %d, %d per process, learning rate %.4g",
                    run.epoch + 1, batch, batch // cfg.NUM_GPUS, lr)  # fmt: skip
        with closing(logging.scalar_writer()) as scalars, run.writer:
            for epoch in range(run.epoch, cfg.OPTIM.MAX_EPOCH):
                stats = {"train": train_epoch(run, train_loader, loss_fun, epoch, stop)}
                stats.update(test_models(run, train_loader, test_loader, epoch))
                run.save_epoch(epoch, *(stats[n]["top1_err"] if n in stats else 100.0 for n in ("test", "test_ema")))
                for name, values in stats.items():
                    scalars.add(name, values, (epoch + 1) * len(train_loader))
                if dist.any_rank(bool(stop)) and epoch + 1 < cfg.OPTIM.MAX_EPOCH:
                    raise Interrupted(epoch + 1, 0, stop.signal)
        if cfg.LOG.PLOT and dist.is_master_proc():
            logger.info("Learning curves: %s", plotting.plot_run(cfg.OUT_DIR))


def train_epoch(run: Run, loader, loss_fun, epoch: int, stop: StopRequest):
    """Trains one epoch, or what is left of it after a resume; returns its statistics."""
    meter, start = run.train_meter, run.iteration
    data_loader.shuffle(loader, epoch, start)
    run.model.train()
    batches = meter.timed(device_batches(loader, run.plan.device))
    with logging.progress(len(loader), start, f"epoch {epoch + 1}/{cfg.OPTIM.MAX_EPOCH}") as bar:
        for iteration, (inputs, labels) in enumerate(batches, start):
            watch.mark(epoch, iteration)
            lr = optim.get_epoch_lr(epoch + iteration / len(loader) * cfg.OPTIM.LR_PER_ITER)
            optim.set_lr(run.optimizer, lr)
            inputs, soft_labels, labels = prepare_batch(inputs, labels, epoch, iteration)
            loss, logits = training_step(run, loss_fun, inputs, soft_labels)
            run.ema.update(epoch, iteration)
            meter.add(loss, logits, labels, lr)
            bar.update(1)
            after_step(run, epoch, iteration, stop, bar)
    stats = meter.log_epoch_stats(epoch)
    meter.reset()
    run.iteration = 0
    return stats


def prepare_batch(inputs, labels, epoch: int, iteration: int):
    """Mixes a batch as the config says; returns images, soft labels, and the labels that errors are counted by."""
    soft_labels = net.smooth_one_hot_labels(labels)
    mix = net.draw_mix(epoch, iteration, *inputs.shape[-2:])
    if mix is None:
        return inputs, soft_labels, labels
    inputs, soft_labels = net.apply_mix(mix, inputs, soft_labels)
    return inputs, soft_labels, soft_labels.argmax(dim=1)


def training_step(run: Run, loss_fun, inputs: torch.Tensor, soft_labels: torch.Tensor):
    """Forward, backward and optimizer step on one batch, in ACCUM_ITERS parts; returns loss and logits."""
    parts = cfg.OPTIM.ACCUM_ITERS
    losses, logits = [], []
    run.precision.zero_grad(run.optimizer)
    for part, (x, y) in enumerate(zip(inputs.chunk(parts), soft_labels.chunk(parts)), 1):
        with run.plan.accumulating(last=part == parts):
            logits.append(run.precision.forward(run.model, x))
            losses.append(loss_fun(logits[-1], y))
            run.precision.backward(losses[-1] / parts)
    run.precision.step(run.optimizer, run.plan.clip_grad_norm)
    return (losses[0], logits[0]) if parts == 1 else (sum(losses).detach() / parts, torch.cat(logits))


def after_step(run: Run, epoch: int, iteration: int, stop: StopRequest, bar) -> None:
    """Statistics, checkpoints and stopping: all that has to wait for the device, so seldom."""
    meter, done = run.train_meter, iteration + 1
    last = done == meter.epoch_iters
    save = cfg.TRAIN.CHECKPOINT_ITERS and done % cfg.TRAIN.CHECKPOINT_ITERS == 0
    # One process may stop after any step; several agree on the step when their statistics meet.
    if not (meter.due(iteration) or save or (stop and dist.get_world_size() == 1)):
        return
    asked = meter.flush(epoch, iteration, bool(stop), run.precision.in_words)
    stats = meter.log_iter_stats(epoch, iteration, **run.precision.report())
    bar.update(0, loss=stats["loss"], top1_err=stats["top1_err"])
    if not last and (save or asked):
        run.save_step(epoch, done)
    if not last and asked:
        raise Interrupted(epoch, done, stop.signal)


# ------------------------------------------------------------------------- testing


def test_models(run: Run, train_loader, test_loader, epoch: int):
    """Tests the model and its EMA; returns their statistics by name."""
    results = {}
    for model, meter in ((run.raw, run.test_meter), (run.plan.ema, run.ema_meter)):
        if model is None:
            continue
        if cfg.BN.USE_PRECISE_STATS:
            data_loader.shuffle(train_loader, epoch)
            net.compute_precise_bn_stats(model, train_loader, run.plan.device)
        # Each process has its own batch norm statistics; those that are saved are the ones to test.
        dist.broadcast_tensors(model.buffers())
        results[meter.name] = test_epoch(test_loader, model, run.precision, meter, epoch)
    return results


@torch.no_grad()
def test_epoch(loader, model, precision: Precision, meter: meters.TestMeter, epoch: int, outputs=None):
    """Tests `model` on every sample of `loader`, each counted once; returns the statistics.

    Args:
        outputs: what else is done with (logits, labels) of each batch, e.g. an `evaluation.Outputs`.
    """
    outputs = outputs or evaluation.NoOutputs()
    model.eval()
    meter.reset()
    with logging.progress(len(loader), 0, meter.name) as bar:
        for iteration, (inputs, labels) in enumerate(device_batches(loader, precision.device)):
            watch.mark(epoch, iteration)
            logits = precision.forward(model, inputs)
            meter.add(logits, labels)
            outputs.add(logits, labels)
            bar.update(1)
            if meter.due(iteration):
                meter.flush()
                meter.log_iter_stats(epoch, iteration)
    stats = meter.log_epoch_stats(epoch)
    evaluation.note_left_out(len(loader.dataset) - stats["samples"], len(loader.dataset))
    return stats


def test_model() -> None:
    """Tests TEST.WEIGHTS on the test split."""
    if not cfg.TEST.WEIGHTS:
        raise UserError(
            "TEST.WEIGHTS: nothing to test; give a checkpoint, e.g. TEST.WEIGHTS "
            + os.path.join(cfg.OUT_DIR or "OUT_DIR", "model.pyth")
        )
    setup_env("test")
    precision = Precision()
    plan = setup_model(precision)
    content = checkpoint.read_checkpoint(cfg.TEST.WEIGHTS)
    weights = tested_state(content, plan.raw, cfg.TEST.WEIGHTS, plan.outline(plan.raw))
    plan.load_model_state(plan.raw, weights)
    log_tested(content, len(weights), cfg.TEST.WEIGHTS)
    loader = data_loader.construct_test_loader()
    check_class_names(
        content, getattr(loader.dataset, "class_names", None), cfg.DATA_LOADER.DATA_DIR or cfg.TEST.DATASET,
        cfg.TEST.WEIGHTS, "Test on folders that are named as those it was trained on",
    )  # fmt: skip
    meter, outputs = meters.TestMeter(len(loader), plan.device), evaluation.outputs_of_config()
    stats = test_epoch(loader, plan.raw, precision, meter, 0, outputs)
    logger.info("Test: %s", evaluation.summary(stats))
    outputs.finish(loader)


def time_model() -> None:
    """Times the model of the config and its data loader."""
    from pycls.core import benchmark  # it builds its model with this module

    setup_env("time")
    benchmark.time_config()


def write_run_files(class_names) -> None:
    """Writes OUT_DIR/config.yaml, and classes.json: the class names in the order of their numbers."""
    if not dist.is_master_proc():
        return
    config.dump_cfg()
    if class_names is not None:
        with atomic_write(os.path.join(cfg.OUT_DIR, "classes.json")) as f:
            # What a folder's name holds besides UTF-8 becomes JSON's own escapes, which read back to the same name.
            f.write(json.dumps(list(class_names), indent=1, ensure_ascii=False).encode("utf-8", "backslashreplace"))
