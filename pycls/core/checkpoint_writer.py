"""Who writes checkpoints: the training thread, or one beside it (TRAIN.CHECKPOINT_ASYNC)."""

import threading
from typing import Any, Callable, Dict, Optional

import torch
from torch import distributed as torch_dist

from pycls.core import checkpoint
from pycls.core import distributed as dist
from pycls.core.config import cfg
from pycls.core.errors import UserError
from pycls.core.interrupt import Interrupted
from pycls.core.logging import get_logger

logger = get_logger(__name__)


class Writer:
    """Writes one checkpoint at a time; an error on any process stops all.

    As a context manager it ends when everything is written.
    """

    def __init__(self):
        self.beside = cfg.TRAIN.CHECKPOINT_ASYNC
        # The thread needs a group of its own: its collectives would mix with those of training.
        self.group = torch_dist.new_group(backend="gloo") if self.beside and dist.get_world_size() > 1 else None
        self.thread: Optional[threading.Thread] = None
        self.error: Optional[Exception] = None

    def submit(self, save: Callable, state: Dict[str, Any], *args) -> None:
        """Calls `save(state, *args, group=...)`, on rank 0 or, for shards, on all processes. All processes call this.

        Raises:
            UserError: this or the last write failed on any process.
        """
        if not self.beside:
            self._write(save, state, args)
            self.wait()
            return
        self.wait()
        state = _copied(state)
        # Not a daemon: whatever ends the training, what was begun is written to the end.
        self.thread = threading.Thread(target=self._write, args=(save, state, args), name="checkpoint writer")
        self.thread.start()

    def wait(self) -> None:
        """Waits for the last write, on every process.

        Raises:
            UserError: it failed on any of them. Exception: what else went wrong on this one.
        """
        self._join()
        error, self.error = self.error, None
        if error is not None and not isinstance(error, UserError):
            # Not the disk's fault: another process is gone, or we are wrong. Nobody is there to be asked.
            raise error
        errors = [e for e in dist.gather_objects(str(error or "")) if e]
        if errors:
            raise UserError(errors[0])

    def _join(self) -> None:
        if self.thread is not None:
            self.thread.join()
            self.thread = None

    def _write(self, save: Callable, state: Dict[str, Any], args) -> None:
        if not (checkpoint.is_sharded() or dist.is_master_proc()):
            return
        try:
            path = save(state, *args, group=self.group)
        except Exception as error:  # noqa: BLE001 - raised again by `wait`, in the thread that trains
            self.error = error
        else:
            logger.info("Wrote checkpoint to %s", path)

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if kind is None or issubclass(kind, Interrupted):
            self.wait()
        else:
            # Other processes may be gone: nothing is asked of them.
            self._join()


def _copied(state: Any, done: Optional[Dict[int, Any]] = None) -> Any:
    """A copy in host memory that training does not change; tensors that appear twice still do."""
    done = {} if done is None else done
    if isinstance(state, torch.Tensor):
        if id(state) not in done:
            done[id(state)] = state.detach().to("cpu", copy=True)
        return done[id(state)]
    if isinstance(state, dict):
        if id(state) not in done:
            done[id(state)] = {key: _copied(value, done) for key, value in state.items()}
        return done[id(state)]
    return [_copied(value, done) for value in state] if isinstance(state, list) else state
