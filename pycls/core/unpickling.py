"""Pickles that others wrote: damage in one is an error, never gigabytes of memory."""

import io
import pickle
import pickletools


class CheckedUnpickler(pickle.Unpickler):
    """Reads a pickle whose sizes are sound; what it may name is up to `find_class` of a subclass.

    A pickle announces lengths and numbers its values, and Python makes room for both before it looks for the values
    themselves: one damaged byte asks for more memory than the machine has.
    """

    def __init__(self, data: bytes, **options):
        """Args: data: the pickle, whole; options: those of `pickle.Unpickler`.

        Raises:
            ValueError: a length goes beyond the data, a number beyond the values so far, or an opcode is none.
        """
        _check_sizes(data)
        super().__init__(io.BytesIO(data), **options)


def _check_sizes(data: bytes) -> None:
    # genops itself refuses unknown opcodes and lengths beyond the data.
    for so_far, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and argument > so_far:
            raise pickle.UnpicklingError(f"it numbers a value {argument} after {so_far} of them")
