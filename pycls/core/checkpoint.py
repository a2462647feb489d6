"""Checkpoints: written whole or not at all, found again, and refused with reasons when they don't fit.

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
from typing import Any, Dict, Iterable, List, Optional, Tuple

import torch
import yaml
from torch import nn

from pycls.core import checkpoint_shards
from pycls.core.config import cfg, flatten
from pycls.core.distributed import is_master_proc
from pycls.core.errors import UserError
from pycls.core.io import atomic_write, cache_url, pathmgr, remove_file
from pycls.core.logging import get_logger
from pycls.core.net import unwrap_model

logger = get_logger(__name__)

_DIR_NAME = "checkpoints"
_EPOCH_NAME = re.compile(r"model_epoch_(\d{4,})\.(?:pyth|shards)$")
_STEP_NAME = re.compile(r"step_(\d{4,})_(\d{6,})\.(?:pyth|shards)$")
_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_fpw_module.", "model.")
# Errors of a file that is cut short, damaged or no checkpoint at all.
_UNREADABLE = (OSError, RuntimeError, EOFError, ValueError, KeyError, zipfile.BadZipFile, pickle.UnpicklingError)

Tensors = Dict[str, torch.Tensor]

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
    """Reads a file or a folder of shards, whole, on the CPU; never runs code from it.

    Raises:
        UserError: not there, damaged, sharded by another program, or holding more than plain data.
    """
    if not pathmgr.exists(path):
        raise UserError(f"{path}: there is no such checkpoint")
    if checkpoint_shards.is_shards(path):
        return checkpoint_shards.read(path)
    if pathmgr.isdir(path):
        raise UserError(f"{path}: is a folder, not a checkpoint file")
    try:
        with pathmgr.open(path, "rb") as f:
            state = torch.load(f, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if "weights_only" in str(error) or "Unsupported" in str(error):
            raise UserError(
                f"{path}: holds Python objects besides tensors, numbers, text, lists and dicts, and is not loaded "
                "because such a file can run code"
            ) from None
        raise UserError(f"{path}: is not a readable checkpoint") from None
    except _UNREADABLE as error:
        reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise UserError(f"{path}: is damaged or no checkpoint: {reason}") from None
    if not isinstance(state, dict):
        raise UserError(f"{path}: holds a {type(state).__name__}, not a checkpoint or a state dict")
    return state


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
    """The newest whole checkpoint in OUT_DIR; damaged ones are passed over with a warning."""
    for path in list_checkpoints():
        if is_whole(path):
            return path
        logger.warning("%s is damaged or cut short, it is passed over", path)
    return None


def strip_wrappers(state: Dict[str, torch.Tensor], known: Iterable[str] = ()) -> Dict[str, torch.Tensor]:
    """Removes what DDP, FSDP, torch.compile and trainers put into names, nested too, until `known` names appear."""
    for word in ("._orig_mod.", "._fsdp_wrapped_module.", "._fpw_module.", "._checkpoint_wrapped_module."):
        state = {name.replace(word, "."): value for name, value in state.items()}
    known = set(known)
    while state and not known.intersection(state):
        prefix = next((w for w in _WRAPPERS if all(name.startswith(w) for name in state)), None)
        if prefix is None:
            break
        state = {name[len(prefix) :]: value for name, value in state.items()}
    return state


def _errors(checkpoint: Dict) -> Tuple[float, float]:
    """Test error of model and EMA; files from before these were stored count as 100."""
    return checkpoint.get("test_err", 100), checkpoint.get("ema_err", 100)


def better_state(checkpoint: Dict, path: str = "checkpoint", known: Iterable[str] = ()) -> Dict[str, torch.Tensor]:
    """The weights in a file's content: of a full checkpoint those with the lower error (the model's on a tie).

    Args:
        known: names at which to stop stripping what wrappers put before them.
    Raises:
        UserError: no weights, or one shard of a sharded model.
    """
    if "model_state" in checkpoint:
        test_err, ema_err = _errors(checkpoint)
        use_ema = ema_err < test_err and "ema_state" in checkpoint
        return strip_wrappers(checkpoint["ema_state" if use_ema else "model_state"], known)
    for key in ("state_dict", "model", "model_state_dict"):
        if isinstance(checkpoint.get(key), dict):
            checkpoint = checkpoint[key]
            break
    state = {name: value for name, value in checkpoint.items() if isinstance(value, torch.Tensor)}
    if any(name.endswith(("_flat_param", "flat_param_0")) for name in state):
        raise UserError(f"{path}: is one shard of a sharded (FSDP) model; merge the shards into one file first")
    if not state:
        raise UserError(f"{path}: holds no tensors; its keys are {', '.join(map(str, list(checkpoint)[:6]))}")
    return strip_wrappers(state, known)


def _adapted(model: nn.Module, state: Dict[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
    """Lets the model adapt weights of another image size (position embeddings), if it knows how."""
    adapt = getattr(model, "adapt_state_dict", None)
    return adapt(state) if adapt else state


def _mismatch(own: Tensors, state: Dict[str, torch.Tensor]) -> List[str]:
    """What keeps `state` from fitting a model that has `own` tensors, one text per tensor."""
    rows = [
        f"{name} is {tuple(state[name].shape)} in the file and {tuple(value.shape)} in the model"
        for name, value in own.items()
        if name in state and state[name].shape != value.shape
    ]
    rows += [f"{name} is missing in the file" for name in own if name not in state]
    rows += [f"{name} is not in the model" for name in state if name not in own]
    return rows


def _few(rows: List[str], most: int = 3) -> str:
    more = f"; and {len(rows) - most} more" if len(rows) > most else ""
    return "; ".join(rows[:most]) + more


def load_checkpoint(path, model, model_ema=None, optimizer=None) -> Tuple[int, float, float]:
    """Loads a checkpoint into a model, and into its EMA and optimizer when given (PyCls's signature).

    When only a model is asked for, it gets the weights with the lower test error, of model and EMA.

    Returns:
        (epoch from 0, test error of the model, test error of the EMA); a bare state dict counts as (0, 100, 100).
    Raises:
        UserError: the file can't be read, or does not fit: the first names and shapes that differ.
    """
    model = unwrap_model(model)
    if model_ema is None:
        checkpoint, state = tested_state(path, model)
        model.load_state_dict(state)
    else:
        checkpoint = read_checkpoint(path)
        model.load_state_dict(fitting_state(checkpoint, "model_state", model, path))
        model_ema = unwrap_model(model_ema)
        model_ema.load_state_dict(fitting_state(checkpoint, "ema_state", model_ema, path))
    if optimizer is not None:
        optimizer.load_state_dict(fitting_optimizer_state(checkpoint, optimizer, path))
    return (checkpoint.get("epoch", 0), *_errors(checkpoint))


def tested_state(path: str, model: nn.Module, own: Optional[Tensors] = None) -> Tuple[Dict[str, Any], Tensors]:
    """The content of a file, and of its weights those with the lower test error, made sure to fit `model`.

    Here and below: `own` has the model's names and shapes, where its `state_dict()` is not to be asked for them.
    """
    checkpoint, own = read_checkpoint(path), own or model.state_dict()
    return checkpoint, _fitting(better_state(checkpoint, path, own), model, own, path, checkpoint)


def fitting_state(checkpoint: Dict, name: str, model: nn.Module, path: str, own: Optional[Tensors] = None) -> Tensors:
    """The `model_state` or `ema_state` of a checkpoint, made sure to fit `model` (old files have only the former)."""
    own = own or model.state_dict()
    if "model_state" not in checkpoint:
        raise UserError(f"{path}: holds bare weights, nothing to resume from; give it as TRAIN.WEIGHTS instead")
    state = checkpoint.get(name, checkpoint["model_state"])
    return _fitting(strip_wrappers(state, own), model, own, path, checkpoint)


def _fitting(state: Dict, model: nn.Module, own: Tensors, path: str, checkpoint: Dict) -> Dict[str, torch.Tensor]:
    state = _adapted(model, state)
    rows = _mismatch(own, state)
    if rows:
        keys = _differing_model_keys(checkpoint)
        hint = f" Differing keys: {_few(keys, 6)}." if keys else ""
        raise UserError(f"{path}: does not fit this model.{hint} {_few(rows)}")
    return state


def fitting_optimizer_state(checkpoint: Dict, optimizer: torch.optim.Optimizer, path: str) -> Dict[str, Any]:
    """The optimizer state of a checkpoint, made sure to fit `optimizer`, with the hyper-parameters of the latter.

    Raises:
        UserError: there is none, or its groups are of another number or size: both are named.
    """
    state = checkpoint.get("optimizer_state")
    if state is None:
        raise UserError(f"{path}: holds no optimizer state; give it as TRAIN.WEIGHTS to load the weights only")
    ours = [len(group["params"]) for group in optimizer.param_groups]
    theirs = [len(group["params"]) for group in state["param_groups"]]
    if ours != theirs:
        raise UserError(
            f"{path}: its optimizer has parameter groups of {theirs} tensors and this config makes {ours}; BN, LN or "
            "OPTIM.BIAS weight decay, OPTIM.WEIGHT_DECAY or OPTIM.LAYER_DECAY changed. Set them back, or start a new "
            "OUT_DIR with TRAIN.WEIGHTS to load the weights only"
        )
    groups = [
        {**{k: v for k, v in own.items() if k != "params"}, "params": old["params"]}
        for own, old in zip(optimizer.param_groups, state["param_groups"])
    ]
    return {"state": state["state"], "param_groups": groups}


def load_weights(path: str, model: nn.Module) -> None:
    """Starts `model` from the weights in a full checkpoint or bare state dict, a path or URL; see `starting_state`."""
    model = unwrap_model(model)
    model.load_state_dict(starting_state(path, model), strict=False)


def starting_state(path: str, model: nn.Module, own: Optional[Tensors] = None) -> Dict[str, torch.Tensor]:
    """The tensors of a file, a path or URL, that `model` can start from.

    A classifier for another number of classes is left out, a position embedding for another image size is resized;
    what was matched, skipped (with both shapes), missing and left over is logged.

    Raises:
        UserError: nothing in the file matches.
    """
    path = cache_url(path, cfg.DOWNLOAD_CACHE)
    own = own or model.state_dict()
    state = _adapted(model, better_state(read_checkpoint(path), path, own))
    matched = {name: v for name, v in state.items() if name in own and v.shape == own[name].shape}
    if not matched:
        names = f"the file has {_few(list(state))}; the model has {_few(list(own))}"
        raise UserError(f"{path}: nothing in it matches this model by name and shape: {names}")
    skipped = [
        f"{name} {tuple(v.shape)} in the file, {tuple(own[name].shape)} in the model"
        for name, v in state.items()
        if name in own and v.shape != own[name].shape
    ]
    missing, extra = [n for n in own if n not in state], [n for n in state if n not in own]
    logger.info("Weights from %s: %d matched, %d of another shape, %d missing in the file, %d not in the model",
                path, len(matched), len(skipped), len(missing), len(extra))  # fmt: skip
    for title, rows in (("another shape", skipped), ("missing", missing), ("not in the model", extra)):
        if rows:
            logger.warning("Weights skipped (%s): %s", title, "; ".join(rows))
    return matched


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


# ------------------------------------------------------- comparing with the config


def _config_of(checkpoint: Dict) -> Dict[str, Any]:
    """The flat config stored in a checkpoint, empty when there is none."""
    text = checkpoint.get("cfg")
    return dict(flatten(yaml.safe_load(text) or {})) if isinstance(text, str) else {}


_SECTIONS = {"vit": "VIT.", "anynet": "ANYNET.", "regnet": "REGNET.", "resnet": "RESNET.", "effnet": "EN."}


def differing_keys(checkpoint: Dict) -> List[str]:
    """'KEY (file: x, config: y)' for every key on which a checkpoint's config and the present one differ."""
    old = _config_of(checkpoint)
    return [f"{k} (file: {old[k]}, config: {v})" for k, v in cfg.flat() if k in old and old[k] != v]


def _differing_model_keys(checkpoint: Dict) -> List[str]:
    prefixes = (
        "MODEL.TYPE",
        "MODEL.DEPTH",
        "MODEL.NUM_CLASSES",
        "TRAIN.IM_SIZE",
        _SECTIONS.get(cfg.MODEL.TYPE, "MODEL."),
    )
    skip = ("VIT.LAYOUT", "VIT.ATTENTION", "VIT.DROP_PATH")
    return [row for row in differing_keys(checkpoint) if row.startswith(prefixes) and not row.startswith(skip)]
