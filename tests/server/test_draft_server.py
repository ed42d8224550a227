"""A draft server over real sockets: what it answers, and what it refuses."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from math import prod
from typing import Any

import numpy as np
import pytest

from edgespec.backends.options import LoadOptions
from edgespec.backends.toy import LetterModel, ToyRuntimeModel
from edgespec.core.protocols import Budget
from edgespec.core.sampling import Sampler, SamplingParams
from edgespec.core.tree import DraftTree
from edgespec.drafters.remote import RemoteDrafter, checksum
from edgespec.drafters.sequential import RequestDraw
from edgespec.server.draft import TruncatedDraw
from tests.core.stats import assert_follows
from tests.draft_server import PROMPT, DraftServer, V, load_letters


@pytest.fixture
def server() -> Iterator[DraftServer]:
    opened = DraftServer(load_letters, parallel=2)
    yield opened
    opened.close()


class Client:
    """A client that is not ours."""

    def __init__(self, server: DraftServer) -> None:
        self.server = server
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)

    def ask(self, **fields: Any) -> tuple[int, dict[str, Any]]:
        """(status, answer) of a request that is sound but for `fields`."""
        body = {
            "protocol": 2, "tokenizer": self.server.model.tokenizer, "vocab_size": V, "session": "a",
            "keep": 0, "crc": 0, "ids": PROMPT, "depth": 4, "nodes": 4, **fields,
        }  # fmt: skip
        self._connection.request("POST", "/v1/draft", json.dumps(body), {"content-type": "application/json"})
        response = self._connection.getresponse()
        return response.status, json.loads(response.read())

    def close(self) -> None:
        self._connection.close()


@pytest.fixture
def client(server: DraftServer) -> Iterator[Client]:
    opened = Client(server)
    yield opened
    opened.close()


@pytest.mark.parametrize(
    ("fields", "status", "told"),
    [
        ({"protocol": 1}, 400, "protocol: "),
        ({"tokenizer": "x"}, 409, "the tokenizer of a draft is not the target's"),
        ({"vocab_size": 0}, 400, "vocab_size: "),
        ({"vocab_size": 2**40}, 400, "vocab_size: "),
        ({"session": "a" * 65}, 400, "session: "),
        ({"keep": -1}, 400, "keep: "),
        ({"keep": 3}, 412, "the text that is kept is not known"),
        ({"crc": 5}, 412, "the text that is kept is not known"),
        ({"ids": []}, 400, "ids of 0 to 256, one at least"),
        ({"ids": [V]}, 400, "ids of 0 to 256"),
        ({"ids": [-1]}, 400, "ids.0: "),
        ({"ids": ["a"]}, 400, "ids.0: "),
        ({"depth": 0}, 400, "depth: "),
        ({"depth": 17}, 400, "depth: "),
        ({"nodes": 64}, 400, "nodes: "),
        ({"seed": 2**63}, 400, "seed: "),
        ({"sampling": {"temperature": -1}}, 400, "temperature must be between"),
        ({"sampling": {"temperature": "warm"}}, 400, "sampling.temperature: "),
        ({"sampling": {"logit_bias": [[V, 1]]}}, 400, f"logit bias names token {V}"),
    ],
)
def test_requests_that_are_refused(client: Client, fields: dict[str, Any], status: int, told: str) -> None:
    found, answer = client.ask(**fields)
    assert found == status and told in answer["error"]["message"]
    assert client.ask()[0] == 200, "the next one is answered"


def test_other_paths_are_refused(server: DraftServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    connection.request("GET", "/v1/models")
    assert connection.getresponse().status == 404
    connection.close()


def test_the_text_grows(client: Client) -> None:
    """A request holds what is new, and its answer is the one to the whole text."""
    whole = [*PROMPT, 32, 101]
    assert client.ask()[0] == 200
    status, grown = client.ask(keep=len(PROMPT), crc=checksum(PROMPT), ids=[32, 101])
    assert (status, grown) == client.ask(session="b", ids=whole)
    status, cut = client.ask(keep=4, crc=checksum(whole[:4]), ids=[97])
    assert (status, cut) == client.ask(session="b", ids=[*whole[:4], 97])


def test_the_client_that_has_waited_longest_loses_its_cache(server: DraftServer, client: Client) -> None:
    for session in ("a", "b", "a", "c"):
        assert client.ask(session=session)[0] == 200
    assert server.model.describe()["in_use"] == 2
    known = {"keep": len(PROMPT), "crc": checksum(PROMPT), "ids": [97]}
    assert [client.ask(session=session, **known)[0] for session in ("a", "b", "c")] == [200, 412, 200]


def test_targets_of_other_sizes_take_turns(client: Client) -> None:
    for size in (V, V - 1, V):
        for session in ("a", "b", "c"):
            assert client.ask(session=session, vocab_size=size)[1]["tokens"]


def test_drawn_tokens_have_their_distributions(client: Client) -> None:
    """One seed gives one draft, and float32 probabilities come as they are."""
    fields: dict[str, Any] = {"depth": 8, "nodes": 8, "reach": 0.99, "seed": 7}
    fields["sampling"] = asdict(SamplingParams(temperature=1.5, logit_bias=((97, 0.5),)))
    _, answer = client.ask(**fields)
    assert answer == client.ask(session="b", **fields)[1]
    assert answer["parents"] == [*range(-1, 7)], "how many tokens are drawn must not depend on them"
    for token, confidence, (ids, weights) in zip(answer["tokens"], answer["confidences"], answer["q"], strict=True):
        assert [float(np.float32(each)) for each in weights] == weights and len(ids) == len(weights) <= 64
        assert sum(weights) == pytest.approx(1, abs=1e-6) and confidence == weights[ids.index(token)]
    assert answer != client.ask(**{**fields, "seed": 8})[1]


def test_a_path_ends_where_it_is_improbable(client: Client) -> None:
    whole, cut = (client.ask(depth=8, nodes=8, reach=reach)[1] for reach in (0.0, 0.3))
    paths = [[each["confidences"][node] for node in list_path(each)] for each in (whole, cut)]
    assert len(paths[0]) == 8 and prod(paths[0]) < 0.3
    assert 0 < len(paths[1]) < 8 and prod(paths[1]) < 0.3 <= prod(paths[1][:-1])


def list_path(answer: dict[str, Any]) -> list[int]:
    """The nodes of the path that goes on."""
    node, path = len(answer["parents"]) - 1, []
    node = max(range(node + 1), key=lambda each: (depth_of(answer["parents"], each), answer["confidences"][each]))
    while node >= 0:
        path.append(node)
        node = answer["parents"][node]
    return path[::-1]


def depth_of(parents: list[int], node: int) -> int:
    return 0 if node < 0 else 1 + depth_of(parents, parents[node])


def test_a_text_longer_than_the_draft_reads_its_end() -> None:
    server = DraftServer(lambda: ToyRuntimeModel("tree", LetterModel(), LoadOptions(context_size=32)))
    client = Client(server)
    assert max(client.ask(ids=PROMPT * 20, depth=3)[1]["parents"]) > 0
    client.close()
    server.close()


def test_a_draft_of_the_drafter_is_the_one_of_the_server(server: DraftServer, client: Client) -> None:
    for draw in (None, RequestDraw(Sampler(SamplingParams(temperature=1.5), V), np.random.default_rng(0))):
        drafter, tree = server.open_drafter(), DraftTree()
        drafter.begin(PROMPT, draw)
        assert sum(1 for _ in drafter.expand(tree, PROMPT, Budget(5, 5))) == 1
        assert tree.depths[-1] == 5 and all((q is None) == (draw is None) for q in tree.q)
        if draw is None:
            answer = client.ask(depth=5, nodes=5)[1]
            assert (tree.tokens, tree.parents) == (answer["tokens"], answer["parents"])
        drafter.close()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda answer: answer.pop("parents"),
        lambda answer: answer["parents"].__setitem__(0, 3),
        lambda answer: answer["confidences"].__setitem__(0, None),
        lambda answer: answer.update(tokens=[97] * 6, parents=[-1, 0, 1, 2, 3, 4], confidences=[0.5] * 6),
    ],
)
def test_an_answer_that_is_no_draft_is_refused(
    server: DraftServer, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[dict[str, Any]], Any]
) -> None:
    drafter = server.open_drafter()
    add = RemoteDrafter._add

    def add_spoiled(self: RemoteDrafter, tree: DraftTree, found: dict[str, Any], depth: int) -> None:
        spoil(found)
        add(self, tree, found, depth)

    monkeypatch.setattr(RemoteDrafter, "_add", add_spoiled)
    with pytest.raises((KeyError, TypeError, ValueError)):
        list(drafter.expand(DraftTree(), PROMPT, Budget(5, 5)))
    drafter.close()


def test_a_truncated_draw_follows_what_it_says() -> None:
    """The distribution that is given is the one that decides."""
    logits = np.random.default_rng(3).normal(0, 2, 50).astype(np.float32)
    sampler = Sampler(SamplingParams(1.3), 50)
    draw = TruncatedDraw(sampler, np.random.default_rng(5), 6)
    counts, q = np.zeros(50, int), np.zeros(50)
    for _ in range(2000):
        token, q = draw.draw(logits, [1, 2, 3])
        counts[token] += 1
    kept = np.flatnonzero(q)
    assert set(kept) == set(np.argsort(-logits)[:6]) and q.sum() == pytest.approx(1, abs=1e-6)
    assert_follows(counts[kept].tolist(), (q[kept] / q[kept].sum(dtype=float)).tolist())
    assert counts.sum() == counts[kept].sum()
