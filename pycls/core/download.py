"""Downloads of published weights: one process fetches, nobody ever sees half a file."""

import os
import urllib.error
import urllib.request
from urllib.parse import urlparse

import portalocker

from pycls.core.errors import UserError
from pycls.core.io import atomic_write
from pycls.core.logging import get_logger

logger = get_logger(__name__)

_TIMEOUT_SECONDS = 30
_CHUNK_BYTES = 1 << 20


def cached_path(url: str, cache_dir: str) -> str:
    """Where `url` lies in the cache: host and path, so that equal names from two places stay apart."""
    parts = urlparse(url)
    return os.path.join(cache_dir, parts.netloc.replace(":", "_"), *parts.path.strip("/").split("/"))


def fetch(url: str, cache_dir: str) -> str:
    """Returns the cached copy of `url`, downloading it first if it is not there.

    Raises:
        UserError: offline, cut short, or the cache can't be written.
    """
    path = cached_path(url, cache_dir)
    if os.path.exists(path):
        return path
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with portalocker.Lock(path + ".lock", timeout=3600):
            if not os.path.exists(path):
                _download(url, path)
    except (OSError, urllib.error.URLError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise UserError(
            f"{url}: can't be downloaded ({reason}); put that file at {path} by hand and try again"
        ) from None
    return path


def _download(url: str, path: str) -> None:
    """Streams `url` to a temporary file that becomes `path` only if every announced byte has come."""
    logger.info("Downloading %s to %s", url, path)
    with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as response, atomic_write(path) as f:
        announced, got = response.headers.get("Content-Length"), 0
        while chunk := response.read(_CHUNK_BYTES):
            f.write(chunk)
            got += len(chunk)
        if announced is not None and got != int(announced):
            raise OSError(f"only {got} of {announced} bytes came")
