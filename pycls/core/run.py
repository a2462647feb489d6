"""A training run as one value: all that must survive a restart, how it is saved and taken up again."""

import os
import random
import tempfile
import warnings
from contextlib import contextmanager
from errno import EACCES, EAGAIN
from typing import Any, Dict, Iterator, Tuple

import numpy as np
import torch

from pycls.core import checkpoint, checkpoint_shards, ema, fitting, meters, optimizer
from pycls.core import distributed as dist
from pycls.core.checkpoint_writer import Writer
from pycls.core.config import cfg
from pycls.core.errors import UserError, os_error_behind
from pycls.core.logging import get_logger
from pycls.core.placement import Single
from pycls.core.precision import Precision

logger = get_logger(__name__)


class Run:
    """Model, EMA, optimizer, loss scale, meters and the position (epoch, iteration, both from 0)."""

    def __init__(self, plan: Single, precision: Precision, epoch_iters: int, test_iters: int, class_names=None):
        self.plan, self.precision = plan, precision
        self.model, self.raw = plan.model, plan.raw
        self.ema = ema.ModelEma(plan.ema, plan.raw)
        self.optimizer = optimizer.construct_optimizer(plan.raw)
        precision.attach(self.optimizer)
        self.train_meter = meters.TrainMeter(epoch_iters, plan.device)
        self.test_meter = meters.TestMeter(test_iters, plan.device, "test")
        self.ema_meter = meters.TestMeter(test_iters, plan.device, "test_ema")
        self.class_names = class_names
        self.writer = Writer()
        self.epoch = self.iteration = 0

    # ------------------------------------------------------------------- starting

    def start(self) -> None:
        """Takes up the newest whole checkpoint in OUT_DIR; else starts from TRAIN.WEIGHTS; else from scratch."""
        path = None
        if cfg.TRAIN.AUTO_RESUME:
            path = dist.broadcast_object(checkpoint.find_resumable() if dist.is_master_proc() else None)
        if path:
            self.resume(path)
        elif cfg.TRAIN.WEIGHTS:
            content = checkpoint.read_checkpoint(cfg.TRAIN.WEIGHTS)
            state = fitting.starting_state(content, self.raw, cfg.TRAIN.WEIGHTS, self.plan.outline(self.raw))
            for model in self._models().values():
                self.plan.load_model_state(model, state, strict=False)

    def resume(self, path: str) -> None:
        """Restores everything from a checkpoint of this run."""
        state, whole = self._read(path)
        fitting.check_class_names(
            state, self.class_names, cfg.DATA_LOADER.DATA_DIR or cfg.TRAIN.DATASET, path,
            "Name the folders as they were, or start a new OUT_DIR with TRAIN.WEIGHTS to train on other classes",
        )  # fmt: skip
        for name, model in self._models().items():
            weights = fitting.fitting_state(state, name, model, path, self.plan.outline(model))
            self.plan.load_model_state(model, weights, whole=whole)
        optimizer_state = fitting.fitting_optimizer_state(state, self.optimizer, path)
        self.plan.load_optimizer_state(self.optimizer, optimizer_state, whole=whole)
        if self.precision.scaler.is_enabled() and not state.get("scaler_state"):
            logger.warning("%s holds no loss scale, it starts at PRECISION.LOSS_SCALE", path)
        self.precision.load_state_dict(state.get("scaler_state", {}))
        self.epoch, self.iteration = state["epoch"] + 1, state.get("iteration", 0)
        for name, meter in self._meters().items():
            if name in state.get("meters", {}):
                meter.load_state_dict(state["meters"][name])
        _set_rng_state(state.get("rng_states"), path)
        logger.info("Resuming from %s: epoch %d, iteration %d", path, self.epoch + 1, self.iteration + 1)
        if rows := fitting.differing_keys(state):
            logger.warning("The config differs from the checkpoint's in %s", "; ".join(rows))

    def _read(self, path: str) -> Tuple[Dict[str, Any], bool]:
        """(A checkpoint's content, whether its tensors are whole): of shards, a plan that shards reads its part."""
        if not (self.plan.shards and checkpoint_shards.is_shards(path)):
            return checkpoint.read_checkpoint(path), True
        # First by shapes alone, so that what does not fit is refused with the names and not by the reader.
        outline = checkpoint_shards.outline(path)
        for name, model in self._models().items():
            fitting.fitting_state(outline, name, model, path)
        fitting.fitting_optimizer_state(outline, self.optimizer, path)
        return checkpoint_shards.read_parts(path, self._tensors(whole=False)), False

    # --------------------------------------------------------------------- saving

    def save_epoch(self, epoch: int, test_err: float, ema_err: float) -> None:
        """Writes the checkpoint of a finished epoch."""
        self.writer.submit(checkpoint.save, self._gather(epoch, 0, test_err, ema_err))

    def save_step(self, epoch: int, iteration: int) -> None:
        """Writes a checkpoint inside an epoch, after `iteration` of its iterations."""
        self.writer.submit(checkpoint.save_step, self._gather(epoch - 1, iteration), epoch, iteration)

    def _gather(self, epoch: int, iteration: int, test_err: float = 100.0, ema_err: float = 100.0) -> Dict[str, Any]:
        """The content of a checkpoint. All processes take part; rank 0 gets the values, or each its part."""
        return {
            "epoch": epoch,
            "test_err": float(test_err),
            "ema_err": float(ema_err),
            **self._tensors(whole=not checkpoint.is_sharded()),
            "cfg": cfg.dump(),
            "iteration": iteration,
            "scaler_state": self.precision.state_dict(),
            "rng_states": dist.gather_objects(_rng_state()),
            "meters": {name: meter.state_dict() for name, meter in self._meters().items()},
            "class_names": self.class_names,
        }

    def _tensors(self, whole: bool) -> Dict[str, Any]:
        """The states of models and optimizer, for a checkpoint."""
        states = {name: self.plan.model_state(model, whole) for name, model in self._models().items()}
        # Without an EMA both names point to the same tensors, which are stored once.
        states.setdefault("ema_state", states["model_state"])
        return {**states, "optimizer_state": self.plan.optimizer_state(self.optimizer, whole)}

    def _models(self) -> Dict[str, torch.nn.Module]:
        """What holds weights, by its name in a checkpoint."""
        return {"model_state": self.raw, **({"ema_state": self.plan.ema} if self.plan.ema is not None else {})}

    def _meters(self) -> Dict[str, Any]:
        return {"train": self.train_meter, "test": self.test_meter, "test_ema": self.ema_meter}


# --------------------------------------------------------------- random generators


def seed_generators(seed: int) -> None:
    """Seeds every generator of this process (plug-ins may use any of them)."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def _rng_state() -> Dict[str, Any]:
    """The state of every generator of this process, as plain data."""
    name, keys, position, has_gauss, gauss = np.random.get_state()
    version, words, gauss_next = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss],
        "python": [version, list(words), gauss_next],
    }


def _set_rng_state(states, path: str) -> None:
    if not states or len(states) != dist.get_world_size():
        logger.warning("%s holds the random states of %d processes, not %d: dropout and the like will differ",
                       path, len(states or ()), dist.get_world_size())  # fmt: skip
        return
    state = states[dist.get_rank()]
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    version, words, gauss_next = state["python"]
    random.setstate((version, tuple(words), gauss_next))


# ------------------------------------------------------------------ the output folder


@contextmanager
def own_out_dir() -> Iterator[None]:
    """Makes OUT_DIR and holds it for one training run at a time; the lock vanishes with the process that holds it.

    Raises:
        UserError: another run is at work there, a new run would overwrite an earlier one, or it can't be written.
    """
    if not dist.is_master_proc():
        yield
        return
    place = cfg.OUT_DIR
    try:
        os.makedirs(checkpoint.get_checkpoint_dir(), exist_ok=True)
        lock = _lock_out_dir()
        # To find out now that checkpoints can't be written, and not after the first epoch.
        place = checkpoint.get_checkpoint_dir()
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        raise UserError(f"OUT_DIR: {place} can't be written: {error.strerror}") from None
    try:
        checkpoint.remove_leftovers()
        if not cfg.TRAIN.AUTO_RESUME and checkpoint.has_checkpoint():
            raise UserError(
                f"OUT_DIR: {cfg.OUT_DIR} already holds checkpoints; to go on from them set TRAIN.AUTO_RESUME True, "
                "to start anew choose another OUT_DIR"
            )
        yield
    finally:
        lock.release()


def _lock_out_dir():
    """Locks OUT_DIR/.lock; where the file system has no locks, warns and goes on without."""
    import portalocker

    lock = portalocker.Lock(os.path.join(cfg.OUT_DIR, ".lock"), "a", flags=portalocker.LOCK_EX | portalocker.LOCK_NB)
    try:
        lock.acquire()
    except portalocker.LockException as error:
        # Versions of portalocker differ in the class they raise; the system's error tells a held lock from none.
        cause = os_error_behind(error)
        if isinstance(error, portalocker.AlreadyLocked) or cause is None or cause.errno in (EAGAIN, EACCES):
            raise UserError(
                f"OUT_DIR: another run is training in {cfg.OUT_DIR}; wait for it or choose another one"
            ) from None
        warnings.warn(
            f"OUT_DIR: {cfg.OUT_DIR} can't be locked ({cause.strerror}); see to it that only one run trains there",
            stacklevel=2,
        )
    return lock
