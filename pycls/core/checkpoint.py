"""Checkpoints: written whole or not at all, found again, and refused with reasons (see `fitting`) when they don't fit.

Files are PyCls's: OUT_DIR/checkpoints/model_epoch_0001.pyth after each epoch (1-based) and OUT_DIR/model.pyth, the
best so far. Inside an epoch the file is checkpoints/step_0003_000120.pyth: 120 iterations into epoch 3.
They hold only tensors, numbers, text, lists and dicts, so they load with `weights_only=True`. With FSDP.STATE sharded
each is a folder of the same name that ends in .shards, see `checkpoint_shards`.
"""

import os
import pickle
import re
import shutil
import zipfile
from typing import Any, Dict, List, Optional, Tuple

import torch
from torch import nn

from pycls.core import checkpoint_shards
from pycls.core.config import cfg
from pycls.core.distributed import is_master_proc
from pycls.core.errors import UserError
from pycls.core.fitting import errors_of, fitting_optimizer_state, fitting_state, starting_state, tested_state
from pycls.core.io import atomic_write, cache_url, pathmgr, remove_file, safetensors
from pycls.core.logging import get_logger
from pycls.core.net import unwrap_model

logger = get_logger(__name__)

_DIR_NAME = "checkpoints"
_EPOCH_NAME = re.compile(r"model_epoch_(\d{4,})\.(?:pyth|shards)$")
_STEP_NAME = re.compile(r"step_(\d{4,})_(\d{6,})\.(?:pyth|shards)$")
# Errors of a file that is cut short, damaged or no checkpoint at all.
_UNREADABLE = (OSError, RuntimeError, EOFError, ValueError, KeyError, zipfile.BadZipFile, pickle.UnpicklingError)

# --------------------------------------------------------------------------- names


def get_checkpoint_dir() -> str:
    """OUT_DIR/checkpoints."""
    return os.path.join(cfg.OUT_DIR, _DIR_NAME)


def get_checkpoint(epoch: int) -> str:
    """The file written after `epoch` epochs (1-based)."""
    return os.path.join(get_checkpoint_dir(), f"model_epoch_{epoch:04d}{_suffix()}")


def get_checkpoint_best() -> str:
    """OUT_DIR/model.pyth."""
    return os.path.join(cfg.OUT_DIR, f"model{_suffix()}")


def get_step_checkpoint(epoch: int, iteration: int) -> str:
    """The file written `iteration` iterations into `epoch` (1-based)."""
    return os.path.join(get_checkpoint_dir(), f"step_{epoch:04d}_{iteration:06d}{_suffix()}")


def is_sharded() -> bool:
    """Whether this run's checkpoints are folders of shards."""
    return cfg.FSDP.STATE == "sharded"


def _suffix() -> str:
    return checkpoint_shards.SUFFIX if is_sharded() else ".pyth"


def list_checkpoints() -> List[str]:
    """All checkpoints in OUT_DIR, those furthest into training first."""
    folder = get_checkpoint_dir()
    names = pathmgr.ls(folder) if pathmgr.isdir(folder) else []
    found = []
    for name in names:
        if match := _EPOCH_NAME.match(name):
            found.append(((int(match[1]), 0), name))
        elif match := _STEP_NAME.match(name):
            found.append(((int(match[1]) - 1, int(match[2])), name))
    return [os.path.join(folder, name) for _, name in sorted(found, reverse=True)]


def has_checkpoint() -> bool:
    """Whether OUT_DIR holds any checkpoint."""
    return bool(list_checkpoints())


def get_last_checkpoint() -> str:
    """The checkpoint furthest into training."""
    return list_checkpoints()[0]


def delete_checkpoints(keep: int = 0) -> int:
    """Deletes all epoch checkpoints but the last `keep`; returns how many went (PyCls's clean-up)."""
    old = [p for p in list_checkpoints() if _EPOCH_NAME.match(os.path.basename(p))][keep:]
    for path in old:
        _remove(path)
    return len(old)


def _remove(path: str) -> None:
    if os.path.isdir(path):
        shutil.rmtree(os.path.realpath(path))
        if os.path.islink(path):
            os.remove(path)
    else:
        remove_file(path)


# ------------------------------------------------------------------------- reading


def read_checkpoint(path: str) -> Dict[str, Any]:
    """Reads a file (.safetensors too) or a folder of shards, whole, on the CPU; never runs code from it.

    Raises:
        UserError: not there, damaged, sharded by another program, or holding more than plain data.
    """
    if not pathmgr.exists(path):
        raise UserError(f"{path}: there is no such checkpoint")
    if checkpoint_shards.is_shards(path):
        return checkpoint_shards.read(path)
    if pathmgr.isdir(path):
        raise UserError(f"{path}: is a folder, not a checkpoint file")
    state = _read_safetensors(path) if path.endswith(".safetensors") else _read_pickled(path)
    if not isinstance(state, dict):
        raise UserError(f"{path}: holds a {type(state).__name__}, not a checkpoint or a state dict")
    return state


def _read_pickled(path: str) -> Any:
    """What torch.save wrote."""
    try:
        with pathmgr.open(path, "rb") as f:
            # An archive, or a bare pickle as torch wrote before 1.6; of a file that is empty torch tells the rest.
            begins = f.read(2)
            f.seek(0)
            foreign = bool(begins) and not begins.startswith((b"PK", b"\x80"))
            state = None if foreign else torch.load(f, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if "weights_only" in str(error) or "Unsupported" in str(error):
            raise UserError(
                f"{path}: holds Python objects besides tensors, numbers, text, lists and dicts, and is not loaded "
                "because such a file can run code"
            ) from None
        raise UserError(f"{path}: is not a readable checkpoint") from None
    except _UNREADABLE as error:
        raise UserError(f"{path}: is damaged or no checkpoint: {_first_line(error)}") from None
    if foreign:
        raise UserError(
            f"{path}: is not a checkpoint: torch.save did not write it, and it does not end in .safetensors"
        )
    return state


def _read_safetensors(path: str) -> Dict[str, torch.Tensor]:
    """The tensors of a .safetensors file."""
    load_file = safetensors(path).load_file
    from safetensors import SafetensorError

    try:
        return load_file(pathmgr.get_local_path(path))
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: can't be read as safetensors: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:120] if str(error) else type(error).__name__


def is_whole(path: str) -> bool:
    """Whether every byte of a checkpoint is there and sound (its checksums are verified)."""
    if os.path.isdir(path):
        return checkpoint_shards.is_whole(path)
    try:
        with pathmgr.open(path, "rb") as f:
            if zipfile.is_zipfile(f):
                f.seek(0)
                with zipfile.ZipFile(f) as archive:
                    return archive.testzip() is None
        # Files of torch before 1.6 have no checksums: reading them is the only test.
        read_checkpoint(path)
        return True
    except (UserError, *_UNREADABLE):
        return False


def find_resumable() -> Optional[str]:
    """The newest whole checkpoint in OUT_DIR, None where there is none; damaged ones are passed over with a warning.

    Raises:
        UserError: there are some, all damaged: starting anew would write over what may still be mended.
    """
    paths = list_checkpoints()
    for path in paths:
        if is_whole(path):
            return path
        logger.warning("%s is damaged or cut short, it is passed over", path)
    if paths:
        raise UserError(
            f"OUT_DIR: none of the checkpoints in {get_checkpoint_dir()} (found: {len(paths)}) can be read; "
            f"the newest: {_damage(paths[0])}; move or remove them to start anew"
        )
    return None


def _damage(path: str) -> str:
    """Why a checkpoint that is not whole can't be used."""
    try:
        read_checkpoint(path)
    except UserError as error:
        return str(error)
    return f"{path}: a checksum in it is wrong"


def load_checkpoint(path, model, model_ema=None, optimizer=None) -> Tuple[int, float, float]:
    """Loads a checkpoint into a model, and into its EMA and optimizer when given (PyCls's signature).

    When only a model is asked for, it gets the weights with the lower test error, of model and EMA.

    Returns:
        (epoch from 0, test error of the model, test error of the EMA); a bare state dict counts as (0, 100, 100).
    Raises:
        UserError: the file can't be read, or does not fit: the first names and shapes that differ.
    """
    model, checkpoint = unwrap_model(model), read_checkpoint(path)
    if model_ema is None:
        model.load_state_dict(tested_state(checkpoint, model, path))
    else:
        model.load_state_dict(fitting_state(checkpoint, "model_state", model, path))
        model_ema = unwrap_model(model_ema)
        model_ema.load_state_dict(fitting_state(checkpoint, "ema_state", model_ema, path))
    if optimizer is not None:
        optimizer.load_state_dict(fitting_optimizer_state(checkpoint, optimizer, path))
    return (checkpoint.get("epoch", 0), *errors_of(checkpoint))


def load_weights(path: str, model: nn.Module) -> None:
    """Starts `model` from the weights in a full checkpoint or bare state dict, a path or URL; see `starting_state`."""
    model, path = unwrap_model(model), cache_url(path, cfg.DOWNLOAD_CACHE)
    model.load_state_dict(starting_state(read_checkpoint(path), model, path), strict=False)


# ------------------------------------------------------------------------- writing


def write_checkpoint(state: Dict[str, Any], path: str) -> str:
    """Writes a checkpoint so that `path` is whole whenever it exists."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with atomic_write(path) as f:
        torch.save(state, f)
    return path


def update_best(state: Dict[str, Any], group=None) -> None:
    """Brings OUT_DIR/model.pyth up to date: model and EMA each as of their own lowest test error (PyCls)."""
    path, former = get_checkpoint_best(), _former_best()
    averaged = state["ema_state"] is not state["model_state"]
    errors = {"model_state": "test_err", **({"ema_state": "ema_err"} if averaged else {})}
    best = _read_best(former) if former else {}
    older = [name for name, error in errors.items() if best and state[error] >= best[error]]
    if len(older) == len(errors):
        return
    if older and is_sharded():
        best = checkpoint_shards.read_parts(former, {name: _like(state[name]) for name in older}, group)
    for name in older:
        state = {**state, name: best[name], errors[name]: best[errors[name]]}
    if is_sharded():
        checkpoint_shards.write(state, path, group, linked=True)
    else:
        write_checkpoint(state, path)
    if former not in (None, path) and is_master_proc():
        _remove(former)


def _former_best() -> Optional[str]:
    """The best checkpoint so far, if any: in this run's form, or in the other one if FSDP.STATE was changed since."""
    names = (f"model{suffix}" for suffix in (_suffix(), ".pyth", checkpoint_shards.SUFFIX))
    return next((path for path in (os.path.join(cfg.OUT_DIR, n) for n in names) if pathmgr.exists(path)), None)


def _read_best(path: str) -> Dict[str, Any]:
    """The best checkpoint so far (for sharded ones without the tensors), empty when it is of no use."""
    if is_sharded() and not checkpoint_shards.is_shards(path):
        logger.warning("%s is one file, whose parts can't be taken over into shards: the best is found anew", path)
        return {}
    try:
        return checkpoint_shards.read_plain(path) if is_sharded() else read_checkpoint(path)
    except UserError as error:
        logger.warning("%s; it is written anew", error)
        return {}


def _like(state: Dict[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
    return {name: torch.empty_like(value) for name, value in state.items()}


def save_checkpoint(model, model_ema, optimizer, epoch, test_err=100.0, ema_err=100.0) -> str:
    """Writes the checkpoint of a finished epoch (from 0) and keeps the best one up to date (PyCls's signature)."""
    model_state = unwrap_model(model).state_dict()
    return save({
        "epoch": epoch,
        "test_err": float(test_err),
        "ema_err": float(ema_err),
        "model_state": model_state,
        "ema_state": unwrap_model(model_ema).state_dict() if model_ema is not None else model_state,
        "optimizer_state": optimizer.state_dict(),
        "cfg": cfg.dump(),
    })  # fmt: skip


def save(state: Dict[str, Any], group=None) -> str:
    """Writes the content of an epoch's checkpoint and keeps the best one up to date.

    The best file goes first: were the run killed in between, the repeated epoch would find it already right.
    All processes call it if the checkpoints are sharded (see `checkpoint_shards.write`), else rank 0.
    """
    update_best(state, group)
    path = _write(state, get_checkpoint(state["epoch"] + 1), group)
    if is_master_proc():
        _remove_steps()
        if cfg.TRAIN.CHECKPOINT_KEEP:
            delete_checkpoints(cfg.TRAIN.CHECKPOINT_KEEP)
    return path


def save_step(state: Dict[str, Any], epoch: int, iteration: int, group=None) -> str:
    """Writes a checkpoint inside an epoch (from 0); earlier ones of that kind are then removed. Called as `save` is."""
    path = _write(state, get_step_checkpoint(epoch + 1, iteration), group)
    if is_master_proc():
        _remove_steps(but=path)
    return path


def _write(state: Dict[str, Any], path: str, group) -> str:
    return checkpoint_shards.write(state, path, group) if is_sharded() else write_checkpoint(state, path)


def _remove_steps(but: str = "") -> None:
    for path in list_checkpoints():
        if _STEP_NAME.match(os.path.basename(path)) and path != but:
            _remove(path)


def remove_leftovers() -> None:
    """Removes the temporary files and folders of a run that was killed while writing (see `io.atomic_write`)."""
    best = os.path.realpath(os.path.join(cfg.OUT_DIR, f"model{checkpoint_shards.SUFFIX}"))
    for folder in (cfg.OUT_DIR, get_checkpoint_dir()):
        for name in pathmgr.ls(folder) if pathmgr.isdir(folder) else ():
            path = os.path.join(folder, name)
            unlinked = re.match(r"\.model_\d+\.shards$", name) and os.path.realpath(path) != best
            if unlinked or re.match(r"\..+\.(pyth|json|yaml|png|shards)(\..+)?\.tmp$", name):
                _remove(path)
