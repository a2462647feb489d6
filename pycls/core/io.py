"""Files: paths local and remote (iopath), downloads with a cache, and writes that are whole or absent."""

import os
import tempfile
from contextlib import contextmanager
from typing import BinaryIO, Iterator

from iopath.common.file_io import PathManager, PathManagerFactory

from pycls.core.errors import UserError, os_error_behind

# The path manager that all file access goes through; plug-ins may register handlers on it.
pathmgr: PathManager = PathManagerFactory.get()


def default_cache_dir() -> str:
    """The folder for downloads: pycls in the user's cache folder (XDG_CACHE_HOME when set)."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "pycls")


def is_url(path: str) -> bool:
    """Whether `path` names something to download."""
    return path.startswith(("http://", "https://"))


@contextmanager
def atomic_write(path: str) -> Iterator[BinaryIO]:
    """Opens a temporary file beside `path` that replaces it only once all is written and on disk.

    Whatever happens, `path` holds either its old bytes or the new ones, never a part.

    Raises:
        UserError: the disk is full, the folder read-only or the like.
    """
    try:
        with _replacing(path) as f:
            yield f
    except (OSError, RuntimeError) as error:
        # torch.save complains of a file that is cut short, as its own error, in place of the disk that is full.
        cause = os_error_behind(error)
        if cause is None:
            raise
        raise UserError(f"{path}: can't be written ({cause.strerror}); older files are untouched") from None


@contextmanager
def _replacing(path: str) -> Iterator[BinaryIO]:
    folder = os.path.dirname(os.path.abspath(path))
    handle, temporary = tempfile.mkstemp(prefix=f".{os.path.basename(path)}.", suffix=".tmp", dir=folder)
    try:
        with os.fdopen(handle, "wb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
        sync_folder(folder)
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)


def remove_file(path: str) -> None:
    """Deletes a file.

    Raises:
        UserError: the folder is read-only or the like.
    """
    try:
        pathmgr.rm(path)
    except OSError as error:
        raise UserError(f"{path}: can't be deleted ({error.strerror})") from None


def _umask() -> int:
    # mkstemp makes files that only their owner may read; a checkpoint is as readable as any other output.
    mask = os.umask(0)
    os.umask(mask)
    return mask


def sync_folder(folder: str) -> None:
    """Makes a rename durable: the new name is in the folder's own data."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def cache_url(path: str, cache_dir: str = "") -> str:
    """Returns a local file for `path`: itself, or the downloaded copy of a URL.

    A download is made by whoever comes first, to a temporary name, checked for its full length and renamed;
    other processes wait for it. A file already in the cache opens no connection.

    Args:
        cache_dir: folder for downloads ('': pycls in the user's cache folder).
    Raises:
        UserError: the download failed; says which file to put where by hand.
    """
    if not is_url(path):
        return path
    from pycls.core.download import fetch

    return fetch(path, cache_dir or default_cache_dir())


def safetensors(path: str):
    """The package's functions for torch, to read or write `path`.

    Raises:
        UserError: it is not installed.
    """
    try:
        from safetensors import torch as functions
    except ImportError:
        raise UserError(f"{path}: needs the package safetensors: pip install 'pycls[export]'") from None
    return functions
