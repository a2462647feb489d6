"""Where the ranks of a group meet: a key-value store whose address they learn, and that no former group has used."""

import json
import os
import socket
import time
import uuid
from datetime import timedelta
from typing import Any, Dict, Sequence, Tuple

import torch.distributed as dist

from pycls.core.errors import UserError
from pycls.core.io import atomic_write

# ---------------------------------------------------------------- through a file


def meet(path: str, rank: int, node: int, addresses: Sequence[str], timeout: timedelta) -> dist.Store:
    """Joins a store that rank 0 serves, on a port that its system picks.

    Rank 0 writes port and addresses to a file; the others try these in turn. A secret in the file and in the store
    makes sure that they found rank 0 and nobody else.

    Args:
        path: the file, in a folder that all nodes see; new for every start of the group.
        rank: of this process. node: which of the nodes it runs on. addresses: of this node, the likeliest first.
    Raises:
        UserError: rank 0's addresses can't be reached from here, or are not known in time.
    """
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        secret = uuid.uuid4().hex
        store.set("secret", secret)
        with atomic_write(path) as f:
            f.write(json.dumps({"hosts": addresses, "port": store.port, "node": node, "secret": secret}).encode())
        return store
    address = _read_address(path, timeout)
    port, problems = address["port"], []
    for host in ["127.0.0.1"] if address["node"] == node else address["hosts"]:
        try:
            # Refused or unroutable addresses are found out by this at once, by the store only after its time-out.
            socket.create_connection((host, port), timeout=10).close()
            store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=30))
            if store.get("secret").decode() == address["secret"]:
                store.set_timeout(timeout)
                return store
            problems.append(f"{host} (another program answers)")
        except (OSError, RuntimeError) as error:
            problems.append(f"{host} ({str(error).splitlines()[0]})")
    raise UserError(f"LAUNCH.MODE: {socket.gethostname()} can't reach rank 0 at port {port} of {', '.join(problems)}")


def _read_address(path: str, timeout: timedelta) -> Dict[str, Any]:
    """Waits for rank 0's address."""
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        # Listing the folder makes a network file system look again.
        if os.path.basename(path) in os.listdir(os.path.dirname(path)):
            with open(path, encoding="utf-8") as f:
                return json.load(f)
        time.sleep(0.2)
    raise UserError(f"LAUNCH.FOLDER: rank 0 wrote no {path} in time; all nodes must see this folder")


# -------------------------------------------------------- in torchrun's own store


def join_torchrun(rank: int, world_size: int, timeout: timedelta) -> Tuple[dist.Store, str]:
    """Joins the store that torchrun serves; returns a part of it that is this group's alone, and its name.

    A group that torchrun starts anew gets the store of the former one, whose keys would be taken for its own
    (https://github.com/pytorch/pytorch/issues/135712); and torchrun's count of restarts differs between machines.
    So rank 0 announces a new part, every other rank answers there with a word of its own, and goes on once rank 0 has
    repeated that word: which the rank 0 of a former group can't.
    """
    store = next(dist.rendezvous("env://", rank, world_size, timeout=timeout))[0]
    store.set_timeout(timeout)
    word = uuid.uuid4().hex
    if rank == 0:
        store.set("pycls/part", word)
        for other in range(1, world_size):
            store.set(f"pycls/{word}/repeated/{other}", store.get(f"pycls/{word}/answer/{other}"))
        return dist.PrefixStore(word, store), word
    answered, deadline = "", time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        part = store.get("pycls/part").decode()
        if part != answered:
            store.set(f"pycls/{part}/answer/{rank}", word)
            answered = part
        repeated = f"pycls/{part}/repeated/{rank}"
        if store.check([repeated]) and store.get(repeated).decode() == word:
            return dist.PrefixStore(part, store), part
        time.sleep(0.05)
    raise RuntimeError(f"rank {rank} waited {timeout} for rank 0")
