"""Ranks of MLX on this machine: processes joined by a ring over loopback, as mlx.launch starts them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from edgespec.backends import Model
from edgespec.backends.options import LoadOptions
from edgespec.engine import team as lead
from edgespec.machines.ranks import ADDRESS, listen_for_ranks, set_rank_address, take_ranks
from edgespec.models.resolve import LocalModel
from tests.mlx_models import CONFIGS, DENSE

# Of classes that mlx-lm splits.
RANK_CONFIGS: dict[str, dict[str, Any]] = {
    # every second layer sees a window of 24 tokens
    "windows": {**DENSE, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24},
    # every second layer has a recurrent state
    "gated-delta": {**CONFIGS["hybrid"], "model_type": "qwen3_5", "num_experts": 0, "full_attention_interval": 2},
}
COMMAND = (sys.executable, "-m", "edgespec")


def write_hosts(folder: Path, n: int) -> dict[str, str]:
    """The variables of `n` ranks, but for each one's number, on ports that are free."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(n + 1)]
        ports = [each.getsockname()[1] for each in sockets]
    path = folder / "hosts.json"
    path.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports[:n]]))
    return {"MLX_HOSTFILE": str(path), ADDRESS: f"127.0.0.1:{ports[n]}"}


def start_rank(
    rank: int, hosts: Mapping[str, str], arguments: Sequence[str] = ("run", "x"), **options: object
) -> subprocess.Popen[str]:
    """The command on one rank."""
    environment = {**os.environ, **hosts, "MLX_RANK": str(rank)}
    pipe = subprocess.PIPE
    return subprocess.Popen(  # type: ignore[call-overload,no-any-return]
        [*COMMAND, *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        text=True,
        **{"stdout": pipe, "stderr": pipe, **options},
    )


class Reporter:
    """Says nothing."""

    def notice(self, text: str) -> None: ...

    def download(self, name: str, done: int, total: int) -> None: ...

    def loading(self, name: str, fraction: float) -> None: ...


@cache
def _join_two() -> tuple[object, ...]:
    """This process becomes rank 0 of two, once. Returns what has to live as long; the other rank ends with it."""
    folder = TemporaryDirectory(prefix="edgespec-ranks-")
    hosts = write_hosts(Path(folder.name), 2)
    ranks = take_ranks({**hosts, "MLX_RANK": "0"})
    assert ranks is not None
    follower = start_rank(1, hosts, stdout=None, stderr=None)
    os.environ.update(hosts)  # read by MLX
    listen_for_ranks(ranks)
    lead.mlx_leader()
    set_rank_address(None)  # other tests of this process load models as ever
    return folder, follower


def load_on_two_ranks(path: Path, options: LoadOptions) -> Model:
    """An MLX model of which this process has one half, and a child the other."""
    _join_two()
    source = LocalModel(path, "mlx") if path.is_dir() else LocalModel(path, "gguf")
    return lead.load_leading(source, path, options)
