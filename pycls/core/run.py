"""A training run as one value: all that must survive a restart, how it is saved and taken up again."""

import os
import random
from contextlib import contextmanager
from typing import Any, Dict, Iterator, Optional

import numpy as np
import torch

from pycls.core import checkpoint, ema, meters, optimizer
from pycls.core import distributed as dist
from pycls.core.config import cfg
from pycls.core.errors import UserError
from pycls.core.logging import get_logger
from pycls.core.parallel import Single
from pycls.core.precision import Precision

logger = get_logger(__name__)


class Run:
    """Model, EMA, optimizer, loss scale, meters and the position (epoch, iteration, both from 0)."""

    def __init__(self, plan: Single, precision: Precision, epoch_iters: int, test_iters: int, class_names=None):
        self.plan, self.precision = plan, precision
        self.model, self.raw = plan.model, plan.raw
        self.ema = ema.build_ema(plan.raw)
        self.optimizer = optimizer.construct_optimizer(plan.raw)
        precision.attach(self.optimizer)
        self.train_meter = meters.TrainMeter(epoch_iters, plan.device)
        self.test_meter = meters.TestMeter(test_iters, plan.device, "test")
        self.ema_meter = meters.TestMeter(test_iters, plan.device, "test_ema")
        self.class_names = class_names
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
            checkpoint.load_weights(cfg.TRAIN.WEIGHTS, self.raw)
            if self.ema:
                self.ema.module.load_state_dict(self.raw.state_dict())

    def resume(self, path: str) -> None:
        """Restores everything from a checkpoint of this run."""
        state = checkpoint.read_checkpoint(path)
        ema_module = self.ema.module if self.ema else None
        epoch, _, _ = checkpoint.load_checkpoint(path, self.raw, ema_module or self.raw, self.optimizer)
        if self.precision.scaler.is_enabled() and not state.get("scaler_state"):
            logger.warning("%s holds no loss scale, it starts at PRECISION.LOSS_SCALE", path)
        self.precision.load_state_dict(state.get("scaler_state", {}))
        self.epoch, self.iteration = epoch + 1, state.get("iteration", 0)
        for name, meter in self._meters().items():
            if name in state.get("meters", {}):
                meter.load_state_dict(state["meters"][name])
        _set_rng_state(state.get("rng_states"), path)
        logger.info("Resuming from %s: epoch %d, iteration %d", path, self.epoch + 1, self.iteration + 1)
        if rows := checkpoint.differing_keys(state):
            logger.warning("The config differs from the checkpoint's in %s", "; ".join(rows))

    # --------------------------------------------------------------------- saving

    def save_epoch(self, epoch: int, test_err: float, ema_err: float) -> None:
        """Writes the checkpoint of a finished epoch."""
        self._save(lambda extra: checkpoint.save_checkpoint(
            self.raw, self._ema_module(), self.optimizer, epoch, test_err, ema_err, extra))  # fmt: skip

    def save_step(self, epoch: int, iteration: int) -> None:
        """Writes a checkpoint inside an epoch, after `iteration` of its iterations."""

        def write(extra):
            state = checkpoint.pack(self.raw, self._ema_module(), self.optimizer, epoch - 1, extra=extra)
            return checkpoint.save_step(state, epoch, iteration)

        self._save(write, iteration)

    def _save(self, write, iteration: int = 0) -> None:
        # The states of all random generators are gathered before rank 0 writes.
        rng_states = dist.gather_objects(_rng_state())
        error = None
        if dist.is_master_proc():
            try:
                path = write(self._extra(iteration, rng_states))
                logger.info("Wrote checkpoint to %s", path)
            except UserError as e:
                error = str(e)
        # Nobody goes on before the file is there, and all stop if it can't be written.
        error = dist.broadcast_object(error)
        if error:
            raise UserError(error)

    def _extra(self, iteration: int, rng_states) -> Dict[str, Any]:
        return {
            "iteration": iteration,
            "scaler_state": self.precision.state_dict(),
            "rng_states": rng_states,
            "meters": {name: meter.state_dict() for name, meter in self._meters().items()},
            "class_names": self.class_names,
        }

    def _meters(self) -> Dict[str, Any]:
        return {"train": self.train_meter, "test": self.test_meter, "test_ema": self.ema_meter}

    def _ema_module(self) -> Optional[torch.nn.Module]:
        return self.ema.module if self.ema else None


# --------------------------------------------------------------- random generators


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
    import portalocker

    if not dist.is_master_proc():
        yield
        return
    try:
        os.makedirs(checkpoint.get_checkpoint_dir(), exist_ok=True)
        lock = portalocker.Lock(os.path.join(cfg.OUT_DIR, ".lock"), "a", flags=portalocker.LOCK_EX | portalocker.LOCK_NB)
        lock.acquire()
    except portalocker.LockException:
        raise UserError(f"OUT_DIR: another run is training in {cfg.OUT_DIR}; wait for it or choose another one") from None
    except OSError as error:
        raise UserError(f"OUT_DIR: {cfg.OUT_DIR} can't be written: {error.strerror}") from None
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
