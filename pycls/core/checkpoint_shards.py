"""Sharded checkpoints: a folder to which every process writes its part, by torch.distributed.checkpoint (DCP).

    model_epoch_0003.shards/
        .metadata, __0_0.distcp, __1_0.distcp, ...    the tensors, by DCP: model_state/NAME, ema_state/NAME,
                                                      optimizer_state/NUMBER/NAME
        run.pyth                                      everything else that a checkpoint holds

They can be read by any number of processes, whole or each its part. The folder gets its name when all is written.
"""

import contextlib
import io
import os
import pickle
import shutil
import warnings
import zipfile
from typing import Any, Callable, Dict, Iterator, Tuple

import torch
from torch import distributed as torch_dist

from pycls.core import distributed as dist
from pycls.core.errors import UserError
from pycls.core.io import atomic_write, sync_folder
from pycls.core.unpickling import CheckedUnpickler

SUFFIX = ".shards"
_PLAIN = "run.pyth"
_METADATA = ".metadata"
State = Dict[str, Any]


def is_shards(path: str) -> bool:
    """Whether `path` is a folder of shards."""
    return os.path.isdir(path) and os.path.isfile(os.path.join(path, _METADATA))


# ------------------------------------------------------------- tensors and the rest


def _tensors(state: State) -> Iterator[Tuple[str, torch.Tensor]]:
    """(name in the folder, tensor) of a checkpoint's content."""
    for part in ("model_state", "ema_state"):
        # Without an average both names mean the same tensors, which are stored once.
        if part == "model_state" or state.get(part) is not state.get("model_state"):
            for name, value in state.get(part, {}).items():
                yield f"{part}/{name}", value
    for number, row in state.get("optimizer_state", {}).get("state", {}).items():
        for name, value in row.items():
            if isinstance(value, torch.Tensor):
                yield f"optimizer_state/{number}/{name}", value


def _plain(state: State) -> State:
    """The content without its tensors."""
    kept = {name: value for name, value in state.items() if name not in ("model_state", "ema_state", "optimizer_state")}
    if "optimizer_state" in state:
        rows = state["optimizer_state"]["state"].items()
        numbers = {n: {k: v for k, v in row.items() if not isinstance(v, torch.Tensor)} for n, row in rows}
        kept["optimizer_state"] = {**state["optimizer_state"], "state": numbers}
    return kept


def _joined(plain: State, tensors: Dict[str, torch.Tensor]) -> State:
    """The inverse of `_tensors` and `_plain`."""
    state = {**plain, "model_state": {}, "ema_state": {}}
    for path, value in tensors.items():
        part, name = path.split("/", 1)
        if part == "optimizer_state":
            number, name = name.split("/", 1)
            state[part]["state"].setdefault(int(number), {})[name] = value
        else:
            state[part][name] = value
    state["ema_state"] = state["ema_state"] or state["model_state"]
    return state


# ------------------------------------------------------------------------- writing


def write(state: State, path: str, group=None, linked: bool = False) -> str:
    """Writes a checkpoint; all processes call it, each with its part (DTensors) or copies of the same tensors.

    Args:
        group: the process group to agree in, where the default one is in use by another thread.
        linked: make `path` a link to a folder with the epoch in its name, so that it can be replaced at once.
    Raises:
        UserError: any process could not write.
    """
    dcp = _dcp()
    folder, name = os.path.split(os.path.abspath(path))
    temporary = os.path.join(folder, f".{name}.tmp")
    target = f".{name.removesuffix(SUFFIX)}_{state['epoch'] + 1:04d}{SUFFIX}" if linked else name

    def make():
        shutil.rmtree(temporary, ignore_errors=True)
        os.makedirs(temporary)

    def finish():
        with atomic_write(os.path.join(temporary, _PLAIN)) as f:
            torch.save(_plain(state), f)
        shutil.rmtree(os.path.join(folder, target), ignore_errors=True)
        os.rename(temporary, os.path.join(folder, target))
        if linked:
            _link(folder, name, target)
        sync_folder(folder)

    try:
        _on_master(make, group)
        dcp.save(dict(_tensors(state)), storage_writer=dcp.FileSystemWriter(temporary), process_group=group)
        _on_master(finish, group)
    except (OSError, dcp.api.CheckpointException) as error:
        if dist.is_master_proc():
            shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(f"{path}: can't be written ({_reason(error)}); older checkpoints are untouched") from None
    return path


def _on_master(action: Callable[[], None], group) -> None:
    """Runs `action` on rank 0; nobody goes on before it is done, and all raise OSError if it failed."""
    reason = None
    if dist.is_master_proc():
        try:
            action()
        except (OSError, UserError) as error:
            reason = _reason(error)
    if dist.get_world_size() > 1:
        box = [reason]
        torch_dist.broadcast_object_list(box, src=0, group=group)
        (reason,) = box
    if reason is not None:
        raise OSError(reason)


def _link(folder: str, name: str, target: str) -> None:
    """Lets `name` lead to `target` from now on, and removes what it led to."""
    former = os.path.realpath(os.path.join(folder, name))
    new = os.path.join(folder, f".{name}.link.tmp")
    if os.path.lexists(new):
        os.remove(new)
    os.symlink(target, new)
    os.replace(new, os.path.join(folder, name))
    if os.path.isdir(former) and not os.path.samefile(former, os.path.join(folder, target)):
        shutil.rmtree(former)


def _dcp():
    from torch.distributed import checkpoint as dcp

    # That one process alone saves and loads is meant.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    return dcp


def _reason(error: BaseException) -> str:
    """What went wrong, from the depth of a collective's exception."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (error, _) = min(failures.items())
        return f"rank {rank}: {_reason(error)}"
    return getattr(error, "strerror", None) or (str(error) or type(error).__name__).splitlines()[0]


# ------------------------------------------------------------------------- reading


def outline(path: str) -> State:
    """The content of a checkpoint with tensors that have shapes only (on the meta device).

    Raises:
        UserError: the folder is damaged, or holds more than tensors.
    """
    return _joined(read_plain(path), dict(_empty(path, "meta")))


def read(path: str) -> State:
    """The content of a checkpoint, whole, in this process's memory."""
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    # Not dcp.load, for which all processes would have to meet.
    tensors = dict(_empty(path, "cpu"))
    with _explained(path):
        _load_state_dict(tensors, _dcp().FileSystemReader(path), no_dist=True)
    return _joined(read_plain(path), tensors)


def read_parts(path: str, parts: State, group=None) -> State:
    """The content of a checkpoint, of its tensors each process's part: `parts` tells which, and is filled in place."""
    if "model_state" in parts and not any(
        name.startswith("ema_state/") for name in _metadata(path).state_dict_metadata
    ):
        parts = {**parts, "ema_state": parts["model_state"]}
    with _explained(path):
        _dcp().load(dict(_tensors(parts)), storage_reader=_dcp().FileSystemReader(path), process_group=group)
    return {**read_plain(path), **parts}


def read_plain(path: str) -> State:
    """The content of a checkpoint without its tensors."""
    try:
        return torch.load(os.path.join(path, _PLAIN), map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise UserError(f"{path}: {_PLAIN} in it is damaged: {_reason(error)}") from None


def _empty(path: str, device: str) -> Iterator[Tuple[str, torch.Tensor]]:
    """(name, tensor without values) of all that a folder holds."""
    for name, facts in _metadata(path).state_dict_metadata.items():
        yield name, torch.empty(facts.size, dtype=facts.properties.dtype, device=device)


@contextlib.contextmanager
def _explained(path: str) -> Iterator[None]:
    """Turns errors of reading into UserErrors."""
    try:
        yield
    except UserError:
        raise
    except (OSError, RuntimeError, ValueError, _dcp().api.CheckpointException) as error:
        raise UserError(f"{path}: can't be read: {_reason(error)}") from None


class _DescriptionsOnly(CheckedUnpickler):
    """Reads DCP's own descriptions of tensors and files; anything else in a pickle is refused unread."""

    _ALLOWED = {("torch", "Size"), ("torch", "device"), ("torch.serialization", "_get_layout")}
    _ALLOWED |= {("pathlib", name) for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")}

    def find_class(self, module: str, name: str):
        described = module in ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not (described or dtype or (module, name) in self._ALLOWED):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        found = super().find_class(module, name)
        if described and not (isinstance(found, type) and found.__module__ == module):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return found


def _metadata(path: str):
    """DCP's description of a folder.

    Raises:
        UserError: it is damaged, or could run code.
    """
    try:
        with open(os.path.join(path, _METADATA), "rb") as f:
            return _DescriptionsOnly(f.read()).load()
    except OSError as error:
        raise UserError(f"{path}: can't be read: {error.strerror}") from None
    except Exception as error:  # noqa: BLE001 - a pickle cut short fails in any way
        raise UserError(f"{path}: {_METADATA} in it is damaged or no description of tensors: {error}") from None


def is_whole(path: str) -> bool:
    """Whether every byte of a folder's files is there and sound (the checksums of its tensors are verified)."""
    try:
        read_plain(path)
        for entry in _metadata(path).storage_data.values():
            with open(os.path.join(path, entry.relative_path), "rb") as f:
                f.seek(entry.offset)
                with zipfile.ZipFile(io.BytesIO(f.read(entry.length))) as archive:
                    if archive.testzip() is not None:
                        return False
    except (UserError, OSError, zipfile.BadZipFile):
        return False
    return True
