"""Errors that are the user's to fix: one line each, never a traceback."""

import difflib
from typing import Iterable, Mapping, Optional, TypeVar

T = TypeVar("T")
# How the one line begins that says so.
OUT_OF_MEMORY = "out of memory"


class UserError(ValueError):
    """A mistake in a config, a file or a command; the message names it and what is allowed.

    The command line prints the message as a single line and exits with code 2.
    """


class FaultError(RuntimeError):
    """A fault outside this process, e.g. another rank that died; the run can be taken up again.

    The command line prints the message as a single line, unless another rank has `told` better, and exits with this
    code.
    """

    code = 3

    def __init__(self, message: str, told: bool = False):
        super().__init__(message)
        self.told = told


def os_error_behind(error: BaseException) -> Optional[OSError]:
    """The system's error that `error` is, holds or arose from: libraries hide it in exceptions of their own."""
    if isinstance(error, OSError):
        return error
    others = (*error.args, error.__cause__, error.__context__)
    return next((found for e in others if isinstance(e, BaseException) and (found := os_error_behind(e))), None)


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns ' (did you mean X?)' for the known name closest to `name`, or ''."""
    known = list(known)
    folded = {k.lower(): k for k in known}
    close = difflib.get_close_matches(str(name).lower(), list(folded), n=1, cutoff=0.6)
    return f" (did you mean {folded[close[0]]}?)" if close else ""


def look_up(registry: Mapping[str, T], name: str, key: str, hint: str = "") -> T:
    """Returns `registry[name]`; an unknown name is answered with the known ones.

    Args:
        registry: what is known, by name.
        name: the value of the config key `key`.
        hint: said after the known ones.
    Raises:
        UserError: `name` is not in the registry.
    """
    if name not in registry:
        known = ", ".join(sorted(registry)) or "none"
        raise UserError(f"{key}: unknown value {name!r}{nearest(name, registry)}; known: {known}{hint}")
    return registry[name]
