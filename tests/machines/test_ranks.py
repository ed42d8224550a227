"""Ranks of mlx.launch: the variables that say which one a process is, and the connections between them."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgespec.cancel import cancellable
from edgespec.errors import BackendError, Cancelled, InvalidRequest
from edgespec.machines import wire as rank_link
from edgespec.machines.ranks import ADDRESS, RankAddress, Ranks, listen_for_ranks, set_rank_address, take_ranks
from edgespec.machines.wire import Follower, Leader

HOSTS = [["10.0.0.1:5000"], ["10.0.0.2:5000"], ["10.0.0.3:5000"]]
VERSIONS = {"edgespec": "1"}


def write(folder: Path, value: Any) -> str:
    path = folder / "hosts.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return str(path)


def test_a_ring_names_the_rank_and_the_meeting_point(tmp_path: Path) -> None:
    environment = {"MLX_RANK": "2", "MLX_HOSTFILE": write(tmp_path, HOSTS)}
    assert take_ranks(environment) == Ranks(2, 3, "ring", "10.0.0.1", 5500)
    assert "MLX_RANK" not in environment  # so that children are no ranks
    environment = {"MLX_RANK": "0", "MLX_HOSTFILE": write(tmp_path, HOSTS), ADDRESS: "mini.local:99"}
    assert take_ranks(environment) == Ranks(0, 3, "ring", "mini.local", 99)


def test_jaccl_names_the_rank_and_the_meeting_point(tmp_path: Path) -> None:
    devices = write(tmp_path, [[None, "rdma_en5"], ["rdma_en5", None]])
    environment = {"MLX_RANK": "1", "MLX_IBV_DEVICES": devices, "MLX_JACCL_COORDINATOR": "192.168.0.2:32323"}
    assert take_ranks(environment) == Ranks(1, 2, "jaccl", "192.168.0.2", 32823)


@pytest.mark.parametrize("hosts", ["", [["127.0.0.1:5000"]]])
def test_a_single_rank_is_none(tmp_path: Path, hosts: Any) -> None:
    assert take_ranks({"MLX_RANK": "0", "MLX_HOSTFILE": write(tmp_path, hosts)}) is None
    assert take_ranks({}) is None


@pytest.mark.parametrize(
    ("rank", "hosts", "address"),
    [
        ("x", HOSTS, None),
        ("3", HOSTS, None),
        ("-1", HOSTS, None),
        ("0", "{", None),
        ("0", {"a": 1, "b": 2}, None),
        ("0", [["nowhere"], ["b:1"]], None),
        ("0", [["a:70000"], ["b:1"]], None),
        ("0", HOSTS, "port-missing"),
    ],
)
def test_variables_that_do_not_fit_are_refused(tmp_path: Path, rank: str, hosts: Any, address: str | None) -> None:
    environment = {"MLX_RANK": rank, "MLX_HOSTFILE": write(tmp_path, hosts)}
    if address is not None:
        environment[ADDRESS] = address
    with pytest.raises(InvalidRequest, match=r"variables of mlx\.launch"):
        take_ranks(environment)


def test_other_backends_of_mlx_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="ring or jaccl only"):
        take_ranks({"MLX_RANK": "1", "NCCL_HOST_IP": "10.0.0.1"})


@pytest.fixture
def address() -> Iterator[RankAddress]:
    """Of rank 0 of two."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    address = listen_for_ranks(Ranks(0, 2, "ring", "127.0.0.1", port))
    yield address
    set_rank_address(None)
    address.server.close()


def follow(address: RankAddress, versions: dict[str, str] = VERSIONS) -> Follower:
    ranks = Ranks(1, 2, "ring", address.ranks.host, address.ranks.port)
    return Follower(ranks, versions, 5.0, lambda: None)


def test_messages_go_both_ways_and_strangers_are_ignored(address: RankAddress) -> None:
    place = (address.ranks.host, address.ranks.port)
    with socket.create_connection(place) as rude, socket.create_connection(place) as other:
        rude.sendall(b'{"rank": [1], "size": 2, "versions": {}}\n')
        other.sendall(b'{"rank": 1, "size": 7, "versions": {}}\n')
        follower = follow(address)
        leader = Leader(address, VERSIONS)
    leader.ask("load", path="a")
    assert follower.receive() == {"do": "load", "path": "a"}
    assert follower.peek() is None
    follower.reply()
    leader.gather()
    leader.ask("load", path="b")
    follower.reply(error="the file is damaged.", hint="Pull it again.")
    with pytest.raises(BackendError, match=r"rank 1: the file is damaged\.") as refusal:
        leader.gather()
    assert refusal.value.hint == "Pull it again."
    leader.gather()  # nobody is asked: no wait
    leader.close()
    with pytest.raises(BackendError, match="out of step"):
        leader.tell("forward")


def test_all_ranks_start_again_while_rank_0_loads_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    address = listen_for_ranks(Ranks(0, 4, "ring", "127.0.0.1", port))
    others = [Ranks(rank, 4, "ring", "127.0.0.1", port) for rank in (1, 2, 3)]
    try:
        assert all(rank_link.is_reachable(each) for each in others)
        followers = [Follower(each, VERSIONS, 0.0, lambda: None) for each in others]
        leader = Leader(address, VERSIONS)
        leader.tell("load")
        assert [each.receive() for each in followers] == [{"do": "load"}] * 3
        leader.close()
    finally:
        set_rank_address(None)
        address.server.close()


def test_other_versions_are_refused(address: RankAddress) -> None:
    follow(address, {"edgespec": "2"})
    with pytest.raises(BackendError, match="rank 1 has edgespec 2, and rank 0 edgespec 1"):
        Leader(address, VERSIONS)


def test_a_rank_that_does_not_come_is_named(address: RankAddress, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_link, "MEET_S", 0.3)
    with pytest.raises(BackendError, match=r"rank 1 of 2 did not come to 127\.0\.0\.1:\d+"):
        Leader(address, VERSIONS)


def test_waiting_for_ranks_can_be_cancelled(address: RankAddress) -> None:
    def cancel() -> None:
        raise Cancelled

    with pytest.raises(Cancelled), cancellable(cancel):
        Leader(address, VERSIONS)


def test_a_follower_says_which_address_it_does_not_reach() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(BackendError, match=f"rank 1 does not reach rank 0 at 127.0.0.1:{port}"):
        Follower(Ranks(1, 2, "ring", "127.0.0.1", port), VERSIONS, 0.3, lambda: None)


def test_a_follower_hears_of_the_end(address: RankAddress) -> None:
    ended = threading.Event()
    ranks = Ranks(1, 2, "ring", address.ranks.host, address.ranks.port)
    Follower(ranks, VERSIONS, 5.0, ended.set)
    Leader(address, VERSIONS).close()
    assert ended.wait(5)


def test_a_used_port_is_refused(address: RankAddress) -> None:
    with pytest.raises(InvalidRequest, match=r"cannot wait for the other ranks at [\d.:]+: Address already in use\.$"):
        listen_for_ranks(address.ranks)
