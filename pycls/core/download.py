"""Downloads of published weights (by iopath): one process fetches, nobody ever sees half a file."""

import logging
import os
import socket
import sys
import urllib.error
from contextlib import contextmanager
from typing import Iterator
from urllib.parse import urlparse

import portalocker
from iopath.common.download import download

from pycls.core.errors import UserError

_TIMEOUT_SECONDS = 30


def cached_path(url: str, cache_dir: str) -> str:
    """Where `url` lies in the cache: host and path, so that equal names from two places stay apart."""
    parts = urlparse(url)
    return os.path.join(cache_dir, parts.netloc.replace(":", "_"), *parts.path.strip("/").split("/"))


def fetch(url: str, cache_dir: str) -> str:
    """Returns the cached copy of `url`, downloading it first if it is not there.

    iopath writes to a temporary name, checks the announced length and renames.

    Raises:
        UserError: offline, cut short, or the cache can't be written.
    """
    path = cached_path(url, cache_dir)
    if os.path.exists(path):
        return path
    folder, name = os.path.split(path)
    try:
        os.makedirs(folder, exist_ok=True)
        # Whoever comes second waits here, and then finds the file.
        with portalocker.Lock(path + ".lock", timeout=3600), _bounded_waits():
            download(url, folder, filename=name, progress=sys.stderr.isatty())
    except (OSError, urllib.error.URLError, portalocker.LockException) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        message = f"{url}: can't be downloaded ({reason}); put that file at {path} by hand and try again"
        raise UserError(message) from None
    return path


@contextmanager
def _bounded_waits() -> Iterator[None]:
    """Lets no connection wait for ever, and the error be told once, by us."""
    timeout, logger = socket.getdefaulttimeout(), logging.getLogger("iopath.common.download")
    socket.setdefaulttimeout(_TIMEOUT_SECONDS)
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        socket.setdefaulttimeout(timeout)
        logger.setLevel(logging.NOTSET)
