"""Errors that are the user's to fix: one line each, never a traceback."""

import difflib
from typing import Iterable, Mapping, TypeVar

T = TypeVar("T")


class UserError(ValueError):
    """A mistake in a config, a file or a command; the message names it and what is allowed.

    The command line prints the message as a single line and exits with code 2.
    """


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns ' (did you mean X?)' for the known name closest to `name`, or ''."""
    known = list(known)
    folded = {k.lower(): k for k in known}
    close = difflib.get_close_matches(str(name).lower(), list(folded), n=1, cutoff=0.6)
    return f" (did you mean {folded[close[0]]}?)" if close else ""


def look_up(registry: Mapping[str, T], name: str, key: str) -> T:
    """Returns `registry[name]`; an unknown name is answered with the known ones.

    Args:
        registry: what is known, by name.
        name: the value of the config key `key`.
    Raises:
        UserError: `name` is not in the registry.
    """
    if name not in registry:
        known = ", ".join(sorted(registry)) or "none"
        raise UserError(f"{key}: unknown value {name!r}{nearest(name, registry)}; known: {known}")
    return registry[name]
