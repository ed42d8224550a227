"""What benchmarks.peers reads: a server's --help and its stream; and its message without a peer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count, pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.peers import NO_PEER, Run, common_prefix, format_table, main, summarize
from benchmarks.peers_arms import Generation, PeerFailed, Prompt
from benchmarks.peers_categories import compare_by_category, format_ratio
from benchmarks.peers_prompts import (
    AGENT_TURNS,
    REQUEST,
    make_agent_turns,
    read_candidates,
    split_warm,
    take_candidates,
)
from benchmarks.peers_server import list_draft_modes, read_stream
from tests.models import TARGET

HELP = """\
--spec-draft-model, -md, --model-draft FNAME
                                        draft model for speculative decoding (default: unused)
--spec-type none,draft-simple,draft-eagle3,ngram-simple,ngram-map-k,ngram-mod
                                        comma-separated list of types of speculative decoding to use
                                        (default: none)
                                        (env: LLAMA_ARG_SPEC_TYPE)
--cache-ram N                           see --spec-type for more
"""


def chunk(tokens: list[int], predicted: int, **more: object) -> bytes:
    return b"data: " + json.dumps({"tokens": tokens, "tokens_predicted": predicted, "stop": False, **more}).encode()


def end(predicted: int, **timings: float) -> bytes:
    return chunk([], predicted, stop=True, timings=timings)


def read(*lines: bytes) -> Generation:
    seconds = count()
    return read_stream(lines, lambda: float(next(seconds)))


def test_every_draft_mode_without_a_trained_head() -> None:
    assert list_draft_modes(HELP, kind="simple") == {
        "plain": [],
        "draft": ["--spec-type", "draft-simple"],
        "ngram-simple": ["--spec-type", "ngram-simple"],
        "ngram-map-k": ["--spec-type", "ngram-map-k"],
        "ngram-mod": ["--spec-type", "ngram-mod"],
        "draft + ngram-simple": ["--spec-type", "draft-simple,ngram-simple"],
        "draft + ngram-mod": ["--spec-type", "draft-simple,ngram-mod"],
    }
    assert list(list_draft_modes(HELP, kind=None)) == ["plain", "ngram-simple", "ngram-map-k", "ngram-mod"]


def test_draft_modes_with_a_trained_head() -> None:
    modes = list_draft_modes(HELP, kind="eagle3")
    assert modes["draft"] == ["--spec-type", "draft-eagle3"]
    assert modes["draft + ngram-mod"] == ["--spec-type", "draft-eagle3,ngram-mod"]
    assert "draft" not in list_draft_modes(HELP, kind="medusa")


def test_draft_modes_of_other_builds() -> None:
    assert list_draft_modes("-md,   --model-draft FNAME   draft model", kind="simple") == {"plain": [], "draft": []}
    assert list_draft_modes("usage: llama-server", kind="simple") == {"plain": []}
    assert list(list_draft_modes("--spec-type [none|ngram-cache|ngram-mod]", kind=None))[1:] == [
        "ngram-cache",
        "ngram-mod",
    ]


def test_a_token_a_chunk() -> None:
    found = read(
        chunk([], 0), chunk([5], 1), b"\n", chunk([6], 2), chunk([7], 3), end(3, predicted_ms=9.0), b"data: [DONE]"
    )
    assert found == Generation((5, 6, 7), ((1.0, 1), (3.0, 2), (4.0, 3)), 2, 0, 0, {"predicted_ms": 9.0})
    assert found.tokens_per_second == pytest.approx(2 / 3)


def test_several_tokens_a_chunk() -> None:
    found = read(chunk([5], 1), chunk([6, 7, 8], 4), end(4, draft_n=3, draft_n_accepted=2))
    assert found.tokens == (5, 6, 7, 8) and found.later == 3 and found.rounds == 1
    assert (found.drafted, found.accepted, found.tokens_per_second) == (3, 2, 3.0)


def test_bursts_that_are_counted_before_they_are_sent() -> None:
    found = read(chunk([5], 1), chunk([6], 3), chunk([7], 3), end(3))
    assert found.tokens == (5, 6, 7) and found.arrivals == ((0.0, 1), (1.0, 3))


def test_tokens_within_a_character_are_counted_but_not_sent() -> None:
    found = read(chunk([5], 1), chunk([8], 4), end(5))
    assert found.tokens == (5, None, None, 8, None)
    assert found.tokens_per_second == 4 / 2  # the last one is known by the end of the stream
    assert common_prefix((5, 6, 7, 8, 9), found.tokens) == 5
    assert common_prefix((5, 6, 7, 9, 9), found.tokens) == 3


def test_processor_time_counts_from_the_first_token() -> None:
    seconds = [0.0]

    def lines() -> Iterator[bytes]:
        for line in (b":\n", chunk([], 0), chunk([5], 1), chunk([6], 2), end(2)):
            seconds[0] += 10.0
            yield line

    assert read_stream(lines(), processor=lambda: seconds[0]).busy_s == 20.0


@pytest.mark.parametrize(
    "lines",
    [
        [chunk([5], 1)],
        [],
        [end(0)],
        [chunk([5], 1), b'data: {"error": {"code": 500, "message": "x"}}'],
        [b'error: {"code": 500}'],
    ],
)
def test_a_stream_that_breaks(lines: list[bytes]) -> None:
    with pytest.raises(PeerFailed):
        read(*lines)


def test_rows_pair_runs_of_one_prompt() -> None:
    class Named:
        own_plain = "plain"

        def __init__(self, name: str) -> None:
            self.name = name

        def generate(self, prompt: Prompt, tokens: int, temperature: float) -> Generation:
            raise NotImplementedError

    def run(arm: str, prompt: str, seconds: float, tokens: tuple[int, ...]) -> Run:
        return Run(arm, Prompt(prompt, "qa", "", [1]), 0, Generation(tokens, ((0.0, 1), (seconds, 3)), 1, 4, 1))

    runs = [run("plain", "a", 2, (1, 2, 3)), run("other", "a", 1, (1, 2, 3))]
    runs += [run("plain", "b", 1, (4, 5, 6)), run("other", "b", 2, (4, 9, 6))]
    rows = summarize([Named("plain"), Named("other")], runs, greedy=True)
    assert rows["other"] == {
        "tokens/s": 1.5, "own": None, "x plain": 1.0, "x own": 1.0,
        "tau": 2.0, "accepted": 0.25, "same": "1/2", "from": 1,
    }  # fmt: skip
    assert [line.split()[0] for line in format_table(rows).splitlines()] == ["arm", "plain", "other"]


def test_no_peer(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["--target", str(TARGET), "--llama-server", str(tmp_path / "nowhere")])
    assert result.exit_code == 1 and NO_PEER in result.output


def test_ratios_by_category() -> None:
    prompts = [Prompt(f"{name}-{n}", name, "", [1]) for name in ("chat", "rag") for n in range(3)]
    runs = [
        (prompt, arm, speed) for prompt in prompts for arm, speed in (("auto", 30.0), ("auto", 50.0), ("other", 20.0))
    ]
    runs += [(prompts[0], "late", 10.0), (prompts[1], "late", None)]
    found = compare_by_category(runs, "auto")
    assert list(found) == ["chat", "all", "rag"] and found["rag"] == {"other": (2.0, 2.0, 2.0)}
    assert found["chat"]["late"] == (4.0, 4.0, 4.0), "of the prompts that both have answered"
    assert format_ratio("other", (1.5, 1.2, 1.9)) == "other 1.50 (1.20 to 1.90)"


def test_the_first_prompts_of_each_category_warm_the_memories() -> None:
    prompts = [Prompt(f"{name}-{n}", name, "", [1]) for n in range(3) for name in ("chat", "rag")]
    earlier, others = split_warm(prompts, 1)
    assert [each.id for each in earlier] == ["chat-0", "rag-0"] and len(others) == 4
    assert split_warm(prompts, 0) == ([], prompts)


def test_turns_of_an_agent_edit_a_file_of_300_lines() -> None:
    texts = [turn.turns[0] for turn in make_agent_turns()]
    files = [text.removesuffix(REQUEST).splitlines() for text in texts]
    assert len(files) == 5 and {len(lines) for lines in files} == {300}
    for earlier, later in pairwise(files):
        changed = [n for n, pair in enumerate(zip(earlier, later, strict=True)) if pair[0] != pair[1]]
        assert changed and changed[0] >= 200, "the beginning can stay in the cache"


def test_all_turns_of_an_agent_are_taken() -> None:
    taken = [prompt.id for prompt in take_candidates(read_candidates(["chat", AGENT_TURNS]), 2)]
    assert taken == ["chat-1", "chat-2", *(f"{AGENT_TURNS}-{n}" for n in range(1, 6))]
