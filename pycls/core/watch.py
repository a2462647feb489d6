"""Who holds up the others: ranks watch each other, so that one that hangs or dies is named in one line.

A thread of each rank writes once a second to the rendezvous store how many collectives the rank has entered and where
its main thread is. The step does nothing for it: process groups count by themselves, and the thread looks. A rank
whose count stands still for DIST_TIMEOUT reads what the others wrote; those that have entered fewer collectives, or
have stopped writing, are the ones waited for. It works alike for gloo and NCCL, for local ranks and under a launcher.

All times are those of the reader's own monotonic clock; clocks of different machines are never compared.
"""

import contextlib
import json
import os
import re
import signal
import sys
import sysconfig
import threading
import time
from datetime import timedelta
from typing import Dict, List, Tuple

import torch.distributed as dist

from pycls.core.errors import FaultError

# Seconds between two beats of a rank, and for how long a living rank may go without one.
PERIOD, SILENCE = 1.0, 4.0
# Until a rank's first step is done, others are waited for at least this many seconds: data sets are listed, weights
# downloaded and models compiled.
START_SECONDS = 1800.0
# A record's `end`: left as it should, failed and said why, lost its connection to the others.
DONE, FAILED, LOST = "done", "failed", "lost"

_LIBRARIES = (sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"])
_OUR_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# What gloo, NCCL and the store say when the other side is gone or late; torch has no class for gloo's.
_BROKEN = re.compile(
    r"\bgloo\b|NCCL|nccl|pair closure|connection (was )?(closed|reset)|broken pipe|socket|timed out waiting", re.I
)

# Where this rank is in its run: (epoch, iteration), both from 0, and how many such marks came before.
_position = None
_marks = 0
# A client of the rendezvous store, used by nobody else.
_store = None


def mark(epoch: int, iteration: int) -> None:
    """Notes where this rank is, for messages only; costs an assignment."""
    global _position, _marks
    _position = (epoch, iteration)
    _marks += 1


def meet(host: str, port: int, prefix: str) -> None:
    """Connects to the rendezvous store, where names of ours begin with `prefix`.

    A connection of its own: that of the process group is busy while the main thread waits in it.
    """
    global _store
    client = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=60))
    _store = dist.PrefixStore(prefix, client)


def first_to_speak() -> bool:
    """Whether no other rank has told what went wrong: when one fails the others fail too, waiting for it."""
    try:
        return _store is None or _store.add("spoken", 1) == 1
    except RuntimeError:
        # Whoever served the store is gone and can't say anything.
        return True


def is_broken_collective(error: BaseException) -> bool:
    """Whether `error` says that another rank, or the way to it, is gone or late."""
    if isinstance(error, FaultError):
        return False
    known = tuple(t for t in (getattr(dist, n, None) for n in ("DistError", "DistBackendError")) if t)
    return isinstance(error, known) or (isinstance(error, RuntimeError) and bool(_BROKEN.search(str(error))))


class Watch:
    """The watch of one rank, from when it has met the others in the store and in the group until it leaves.

    Args:
        limit: seconds for which this rank waits for others in a collective.
    """

    def __init__(self, rank: int, world_size: int, limit: float):
        self.store, self.rank, self.world_size, self.limit = _store, rank, world_size, limit
        self._main, self._leaving = threading.main_thread().ident, threading.Event()
        self._beats = 0
        self._publish()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    # --------------------------------------------------------------- own state

    def _publish(self, end: str = "") -> None:
        self._beats += 1
        self.store.set(str(self.rank), json.dumps([self._beats, _collectives_entered(), self._where(), end]))

    def _where(self) -> str:
        position = f", epoch {_position[0] + 1}, iteration {_position[1] + 1}" if _position else ""
        return describe_stack(sys._current_frames().get(self._main)) + position

    # -------------------------------------------------------------- the thread

    def _run(self) -> None:
        # Without a store there is nobody to watch: whoever served it is gone, so collectives break by themselves.
        with contextlib.suppress(RuntimeError):
            self._watch()

    def _watch(self) -> None:
        count, since = -1, time.monotonic()
        while not self._leaving.wait(PERIOD):
            self._publish()
            if (now_entered := (_collectives_entered(), _marks)) != count:
                count, since = now_entered, time.monotonic()
            limit = self.limit if _marks > 1 else max(self.limit, START_SECONDS)
            if time.monotonic() - since > limit and (line := self._held_up_by(limit)):
                self._end(line)

    def _held_up_by(self, limit: float) -> str:
        """Names the ranks that this one waits for; '' when there are none (it just takes long by itself)."""
        silent = self._silent()
        records = self._records()
        behind = [r for r, (_, count, _, end) in records.items() if count < records[self.rank][1] and not end]
        if self._leaving.is_set() or not (silent or behind):
            return ""
        culprits = silent or behind
        where = records[culprits[0]][2]
        state = f"does not answer any more, and was last {where}" if silent else f"is {where}"
        more = f" (and {len(culprits) - 1} more)" if len(culprits) > 1 else ""
        return (
            f"rank {culprits[0]}{more} hangs: rank {self.rank} has waited {limit:g} s (DIST_TIMEOUT) for it "
            f"{records[self.rank][2]}; rank {culprits[0]} {state}. The same command goes on from the last checkpoint"
        )

    def _end(self, line: str) -> None:
        """Ends the process, whose main thread can't: it sits in the backend."""
        if first_to_speak():
            os.write(2, f"pycls: error: {line}\n".encode())
        self._publish(FAILED)
        os._exit(FaultError.code)

    # ------------------------------------------------------------- the others

    def _records(self) -> Dict[int, List]:
        """[beats, collectives entered, where, end] of each rank that has written."""
        ranks = [r for r in range(self.world_size) if self.store.check([str(r)])]
        return dict(zip(ranks, map(json.loads, self.store.multi_get([str(r) for r in ranks]))))

    def _silent(self, until: float = SILENCE) -> List[int]:
        """The ranks that neither beat during `until` seconds nor said that they leave."""
        before = self._records()
        deadline = time.monotonic() + until
        while time.monotonic() < deadline:
            if self._leaving.wait(PERIOD / 2):
                time.sleep(PERIOD / 2)
            if threading.current_thread() is self._thread:
                self._publish()
        after = self._records()
        return [r for r in after if r != self.rank and after[r][0] == before.get(r, [-1])[0] and not after[r][3]]

    # ---------------------------------------------------------------- leaving

    def leave(self, end: str = DONE) -> None:
        """Stops watching and tells the others how this rank ended."""
        self._leaving.set()
        self._thread.join(timeout=2 * SILENCE)
        # The store may be gone before its last client: nobody is left to be told.
        with contextlib.suppress(RuntimeError):
            self._publish(end)

    def explained(self, error: BaseException) -> BaseException:
        """Leaves because of `error`; returns what to raise: a broken collective becomes a line naming who broke it."""
        if not is_broken_collective(error):
            self.leave(FAILED)
            return error
        where = self._where_of(error)
        # A launcher now ends the ranks that are left; the seconds that it takes to find out why are needed first.
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.leave(LOST)
        try:
            who, how = self._who_failed()
        except RuntimeError:
            who, how = "", "the rendezvous store is gone too, and with it the rank or launcher that served it"
        how = how or f"no other rank has failed, so the network may have: {str(error).splitlines()[0][:200]}"
        return FaultError(
            f"rank {self.rank} lost the connection to the others {where}: {who} {how}".replace(":  ", ": ")
            + ". The same command goes on from the last checkpoint",
            told=how == FAILED,
        )

    def _where_of(self, error: BaseException) -> str:
        position = f", epoch {_position[0] + 1}, iteration {_position[1] + 1}" if _position else ""
        frames, trace = [], error.__traceback__
        while trace:
            frames.append((trace.tb_frame, trace.tb_lineno))
            trace = trace.tb_next
        return _describe(reversed(frames)) + position

    def _who_failed(self) -> Tuple[str, str]:
        """Waits a moment for a rank to tell, or to fall silent; returns ('rank 1', how it ended), or two ''."""
        deadline = time.monotonic() + 2 * PERIOD
        while time.monotonic() < deadline:
            for rank, (_, _, _, end) in self._records().items():
                if end not in ("", DONE, LOST):
                    return f"rank {rank}", end
            time.sleep(PERIOD / 10)
        silent = self._silent()
        more = f" (and {len(silent) - 1} more)" if len(silent) > 1 else ""
        return (f"rank {silent[0]}{more}", "was killed, or its machine is gone") if silent else ("", "")


def note_death(store, rank: int, how: str) -> bool:
    """Tells the ranks that `rank` died, e.g. 'was killed by SIGKILL'; returns whether nobody told of a failure yet."""
    store.set(str(rank), json.dumps([0, 0, "", how]))
    return store.add("spoken", 1) == 1


def _collectives_entered() -> int:
    """How many collectives this rank has entered, over all its groups."""
    groups = list(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else []
    return sum(group._get_sequence_number_for_group() for group in groups)


# --------------------------------------------------------------------- where a stack is


def describe_stack(frame) -> str:
    """Where a thread is, as a person would say it: 'in all_reduce (fetch, meters.py line 99)'."""
    frames = []
    while frame is not None:
        frames.append((frame, frame.f_lineno))
        frame = frame.f_back
    return _describe(frames)


def _describe(frames) -> str:
    """Args: frames: (frame, line), innermost first."""
    doing = ""
    for frame, line in frames:
        path, name = frame.f_code.co_filename.replace(os.sep, "/"), frame.f_code.co_name
        if path.startswith(_OUR_PACKAGE) or not (path.startswith(_LIBRARIES) or path.startswith("<")):
            if path.endswith("pycls/core/distributed.py"):
                continue
            place = f"{name}, {os.path.basename(path)} line {line}"
            return f"in {doing} ({place})" if doing else f"in {place}"
        doing = _library_work(path, name, doing)
    return f"in {doing}" if doing else "at an unknown place"


def _library_work(path: str, name: str, doing: str) -> str:
    """What a library's frame does; outer frames say it better than inner ones."""
    if path.endswith("torch/distributed/distributed_c10d.py"):
        return doing if name.startswith("_") or name == "wrapper" else name
    if "/torch/distributed/fsdp/" in path or "/torch/distributed/_composable/" in path:
        return "the exchange of sharded weights"
    if path.endswith(("torch/autograd/graph.py", "torch/autograd/__init__.py", "torch/_tensor.py")):
        return "the backward pass and its exchange of gradients" if "backward" in name else doing
    if "/torch/utils/data/" in path:
        return "its wait for a batch from the loader"
    return doing
