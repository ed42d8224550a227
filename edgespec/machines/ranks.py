"""The processes that mlx.launch starts on several machines: which one this is, and where rank 0 meets the others.

MLX names them ranks. Rank 0 runs the command. The others run what rank 0 tells them, over a connection of their own
beside MLX's: a rank that waits there takes no processor time, and both ends notice when the other has ended.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from edgespec.errors import InvalidRequest, reason_of

RANK = "MLX_RANK"
ADDRESS = "EDGESPEC_RANK0"
"""HOST:PORT at which rank 0 waits for the others, if its address for MLX cannot be reached from all of them."""

_OFFSET = 500  # from MLX's port of rank 0 to ours
_BACKLOG = 128  # ranks that start again come twice each, and wait until rank 0 loads the next model
_HINT = "Start all ranks with mlx.launch."


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process' place: `rank` of `size`. Rank 0 waits for the others at `host` and `port`."""

    rank: int
    size: int
    backend: Literal["ring", "jaccl"]
    host: str
    port: int

    @property
    def address(self) -> str:
        """HOST:PORT at which rank 0 waits."""
        return f"{self.host}:{self.port}"

    def export(self) -> None:
        """Set what `take_ranks` has removed; MLX reads it when a group is made, and a restarted process."""
        os.environ[RANK] = str(self.rank)


def take_ranks(environment: MutableMapping[str, str] = os.environ) -> Ranks | None:
    """This process' place; None if it is the only one. Raises InvalidRequest for variables that do not fit together.

    Removes the variable of the rank, so that programs which this process starts are no ranks.
    """
    text = environment.pop(RANK, None)
    if text is None:
        return None
    hostfile, devices = environment.get("MLX_HOSTFILE"), environment.get("MLX_IBV_DEVICES")
    if hostfile is None and devices is None:
        raise InvalidRequest("edgespec runs under mlx.launch with --backend ring or jaccl only.", hint=_HINT)
    try:
        rank, hosts = int(text), json.loads(Path(hostfile or str(devices)).read_text() or "[0]")
        if len(hosts) == 1:
            return None
        first = environment["MLX_JACCL_COORDINATOR"] if hostfile is None else hosts[0][0]
        stated = environment.get(ADDRESS)
        host, _, port = (stated or first).rpartition(":")
        number = int(port) + (0 if stated else _OFFSET)
        if not 0 <= rank < len(hosts) or not host or not 0 < number < 2**16:
            raise ValueError(f"rank {rank} of {len(hosts)} at {host}:{number}")
    except (OSError, ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
        raise InvalidRequest(f"the variables of mlx.launch cannot be used ({reason_of(error)}).", hint=_HINT) from error
    return Ranks(rank, len(hosts), "jaccl" if hostfile is None else "ring", host, number)


@dataclass(frozen=True, slots=True)
class RankAddress:
    """The socket at which rank 0 waits for the others, which may be given to a process that is being started."""

    ranks: Ranks
    server: socket.socket


_address: RankAddress | None = None


def listen_for_ranks(ranks: Ranks) -> RankAddress:
    """Wait at rank 0's address from now on. Raises InvalidRequest if that is not possible."""
    family = socket.AF_INET6 if ":" in ranks.host else socket.AF_INET
    try:
        server = socket.create_server((ranks.host.strip("[]"), ranks.port), family=family, backlog=_BACKLOG)
    except OSError as error:
        reason = reason_of(error).partition(" (while")[0]  # Python adds the address
        raise InvalidRequest(
            f"rank 0 cannot wait for the other ranks at {ranks.address}: {reason}.",
            hint=f"Use other ports (mlx.launch --starting-port), or another address (--env {ADDRESS}=HOST:PORT).",
        ) from error
    address = RankAddress(ranks, server)
    set_rank_address(address)
    return address


def set_rank_address(address: RankAddress | None) -> None:
    global _address
    _address = address


def get_rank_address() -> RankAddress | None:
    """The address at which this process meets the other ranks; None if there are none."""
    return _address


def count_ranks() -> int:
    """The machines that a model of this process is split over."""
    return _address.ranks.size if _address is not None else 1
