"""benchmarks.peers: what it reads of a server, the file of rounds, the tables, and a run on the packaged model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from click import ClickException
from click.testing import CliRunner

from benchmarks import plain_speed
from benchmarks.harness import CODE
from benchmarks.peers import NO_PEER, main, split_size
from benchmarks.peers_arms import MIN_PLAIN, Generation, PeerFailed, measure_plain
from benchmarks.peers_server import list_draft_modes, read_stream
from benchmarks.peers_tables import ALL, Record, Round, Run, format_first, format_markdown, list_first, summarize
from edgespec.core.protocols import Step
from tests.benchmarks.conftest import Program
from tests.benchmarks.conftest import Run as RunModule
from tests.gguf_models import DRAFT, TARGET

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


def test_a_build_that_drafts_by_default_is_told_not_to() -> None:
    help_text = HELP.replace("(default: none)", "(default:\n    ngram-mod)") + "--no-spec-type LIST  types not to use\n"
    modes = list_draft_modes(help_text, kind="simple")
    assert modes["plain"] == ["--no-spec-type", "ngram-mod"]
    assert modes["ngram-simple"] == ["--no-spec-type", "ngram-mod", "--spec-type", "ngram-simple"]
    assert modes["draft"] == ["--no-spec-type", "ngram-mod", "--spec-type", "draft-simple"]
    assert modes["ngram-mod"] == ["--spec-type", "ngram-mod"]


def test_a_token_a_chunk() -> None:
    found = read(
        chunk([], 0), chunk([5], 1), b"\n", chunk([6], 2), chunk([7], 3), end(3, predicted_ms=9.0), b"data: [DONE]"
    )
    assert found == Generation((5, 6, 7), ((1.0, 1), (3.0, 2), (4.0, 3)), 2, 0, 0)
    assert (found.later, found.wall_s) == (2, 3.0)


def test_several_tokens_a_chunk() -> None:
    found = read(chunk([5], 1), chunk([6, 7, 8], 4), end(4, draft_n=3, draft_n_accepted=2))
    assert found.tokens == (5, 6, 7, 8) and found.later == 3 and found.rounds == 1
    assert (found.drafted, found.accepted, found.wall_s) == (3, 2, 1.0)


def test_bursts_that_are_counted_before_they_are_sent() -> None:
    found = read(chunk([5], 1), chunk([6], 3), chunk([7], 3), end(3))
    assert found.tokens == (5, 6, 7) and found.arrivals == ((0.0, 1), (1.0, 3))


def test_tokens_within_a_character_are_counted_but_not_sent() -> None:
    found = read(chunk([5], 1), chunk([8], 4), end(5))
    assert found.tokens == (5, None, None, 8, None)
    assert (found.later, found.wall_s) == (4, 2.0)  # the last one is known by the end of the stream


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


def make_run(arm: str, seconds: float, tokens: tuple[int | None, ...], rounds: int, drafted: int = 0) -> Run:
    later = len(tokens) - 1
    return Run(arm, tokens, later, seconds, seconds, rounds, drafted, accepted=later - rounds)


def make_round(prompt: str, category: str, auto_s: float, auto: tuple[int, ...], form: str = "chat") -> Round:
    text = tuple(range(17))
    runs = make_run("edgespec plain", 16.0, text, 16), make_run("edgespec auto", auto_s, auto, 8, 10)
    peers = make_run("llama-server plain", 32.0, (*text[:-1], None), 16), make_run("llama-server fast", 8.0, text, 4)
    return Round(form, prompt, category, 0, (*runs, *peers))


ROUNDS = [
    make_round("a", "writing", 4.0, tuple(range(17))),
    make_round("b", "stem", 16.0, (*range(16), 99)),
    make_round("c", "rag", 2.0, (1, 2, 3, 4, 5, 1, 2, 3, 4)),
    make_round("a", "writing", 16.0, tuple(range(17)), form="raw"),
]


def test_rows_pair_the_runs_of_one_prompt() -> None:
    whole, mt_bench, rag, raw = summarize(ROUNDS)
    assert [(g.form, g.name, g.prompts) for g in (whole, mt_bench, rag, raw)] == [
        ("chat", ALL, 3), ("chat", "mt_bench", 2), ("chat", "rag", 1), ("raw", ALL, 1)
    ]  # fmt: skip
    row = mt_bench.row("edgespec auto")
    assert row is not None and row.own is not None and row.peer is not None and row.best is not None
    assert (row.own.mean, row.peer.mean, row.best.mean) == pytest.approx((2.0, 4.0, 1.0))
    assert (mt_bench.best, row.worst, row.tau, row.accepted, row.same) == ("llama-server fast", 1.0, 2.0, 0.8, 1)
    short, peer = rag.row("edgespec auto"), rag.row("llama-server plain")
    assert short is not None and short.worst is None and short.repeated == pytest.approx(1 / 6)
    assert peer is not None and peer.same == 1, "a token that was not sent agrees with any"


def test_the_tables_have_a_row_for_each_arm_and_category() -> None:
    text = format_markdown(summarize(ROUNDS))
    chat, raw = text.split("Prompts written as ")[1:]
    assert "| edgespec auto |" in chat and "| mt_bench | 2 | 2.00 | 80% | 2.00 (1.00 to 4.00) |" in chat
    assert "by category" not in raw and "| 1/1 |" in raw
    assert format_markdown(summarize([Round("raw", "a", "qa", 0, ROUNDS[0].runs[:2])])), "without a peer"


def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    first = Record(path, {"tokens": 8})
    first.add(ROUNDS[0])
    with path.open("a", encoding="utf-8") as file:
        file.write('{"form": "chat", "pro')
    again = Record(path, {"tokens": 8})
    assert again.rounds == ROUNDS[:1] and again.has("chat", "a", 0) and not again.has("raw", "a", 0)
    again.add(ROUNDS[3])
    assert Record(path, {"tokens": 8}).rounds == [ROUNDS[0], ROUNDS[3]]
    with pytest.raises(ClickException, match="other settings"):
        Record(path, {"tokens": 9})


def test_no_peer(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["--target", str(TARGET), "--llama-server", str(tmp_path / "nowhere")])
    assert result.exit_code == 1 and NO_PEER in result.output


def test_a_run_on_the_packaged_model(program: Program, tmp_path: Path) -> None:
    """Alone where there is no llama-server; the second time nothing is left to run."""
    prompts, record, table = (tmp_path / name for name in ("prompts.jsonl", "rounds.jsonl", "table.md"))
    lines = [{"question_id": n, "category": "coding", "turns": [text, "More."]} for n, text in enumerate(CODE[:2])]
    prompts.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    command = [
        "--target",
        TARGET,
        "--prompts",
        prompts,
        "--form",
        "chat",
        "--form",
        "raw",
        "--tokens",
        8,
        "--threads",
        1,
    ]
    command += ["--llama-server", shutil.which("llama-server") or "none", "--only", "ngram-mod", "--drafter", "ngram"]
    command += ["--drafter", "recycling", "--drafter", "recycling@2/5", "--draft-tree", 8]
    command += ["--threads", 1, "--draft", DRAFT, "--processor-time", "--record", record, "--table", table]
    first = program("benchmarks.peers", *command)
    arms = {"plain", "auto", "model", "ngram", "recycling", "recycling@2/5"}
    assert {f"edgespec {arm}" for arm in arms} <= {row["arm"] for row in first["groups"][0]["rows"]}
    assert [(group["form"], group["prompts"]) for group in first["groups"]] == [("chat", 2), ("raw", 2)]
    rounds = record.read_text(encoding="utf-8")
    assert len(rounds.splitlines()) == 5 and table.read_text(encoding="utf-8").count("| edgespec model |") == 2
    assert program("benchmarks.peers", *command)["groups"] == first["groups"]
    assert record.read_text(encoding="utf-8") == rounds


def test_a_drafter_with_sizes_of_its_own() -> None:
    assert split_size("ngram") == ("ngram", []) and split_size("recycling@3") == ("recycling", [3])
    assert split_size("eagle3:a@home/head.gguf@4/16") == ("eagle3:a@home/head.gguf", [4, 16])


def test_plain_speed(program: Program, run_module: RunModule) -> None:
    if shutil.which("llama-bench"):
        result = program("benchmarks.plain_speed", TARGET, "--context", 16, "--tokens", 8, "--repeats", 1)
        assert result["contexts"][0]["ratio"] > 0
    else:
        done = run_module("benchmarks.plain_speed", TARGET)
        assert done.returncode == 1 and done.stderr == f"Error: {plain_speed.NO_PEER}\n"


def test_first_answers_beside_plain_decoding() -> None:
    """Plain decoding took a second by either time, and its controller a hundredth of a round."""

    def made(prompt: str, busy_s: float, clock_s: float, own: float | None, repeat: int = 0) -> Round:
        plain = Run("edgespec plain", (1,) * 33, 32, 1.0, 1.0, 32, 0, 0, 0.01 / 32)
        plain_s = None if own is None else own * clock_s / 32 - 0.01 / 32
        auto = Run("edgespec auto", (1,) * 33, 32, busy_s, clock_s, 16, 20, 10, 0.02, plain_s)
        return Round("chat", prompt, "qa", repeat, (plain, auto))

    alone = Round("chat", "alone", "qa", 0, (Run("edgespec auto", (1,) * 33, 32, 9.0, 9.0, 16, 20, 10),))
    again = made("again", 9.0, 9.0, 0.1, repeat=1)
    short = [made("machine", 1.25, 1.6, 1.0), made("own", 1.25, 1.3, 0.9), made("few plain rounds", 0.5, 0.5, None)]
    answers = list_first([alone, *short, again])
    assert [(each.prompt, pytest.approx(each.own), each.busy, each.tau) for each in answers] == [
        ("own", 0.9, 0.8, 2.0),
        ("machine", 1.0, 0.8, 2.0),
        ("few plain rounds", 2.0, 2.0, 2.0),
    ]
    table = format_first(answers)
    assert (
        "| own rounds | 0.920 | 0.900 | 1.000 | 1 |" in table and "| processor | 0.800 | 0.800 | 0.800 | 2 |" in table
    )
    assert "| own | 0.90 | 0.80 | 0.77 | 2.00 | 10/20 |" in table and "| few plain rounds |" not in table


def test_an_answer_beside_its_own_rounds_without_a_draft() -> None:
    plain = Step(1, (5,), 0, 0, 0, 0.0, draft_s=0.1, verify_s=0.7, sample_s=0.2, commit_s=0.1)
    drafted = replace(plain, tokens=(5, 6, 7), n_drafted=2, verify_s=1.7)
    after = replace(plain, verify_s=9.0)  # is slow because of the draft before it, which is the draft's cost
    n = MIN_PLAIN + 1
    assert measure_plain([plain] * n, 1.1 * n) == pytest.approx(1.0)
    assert measure_plain([plain] * MIN_PLAIN, 1.1 * MIN_PLAIN) is None
    assert measure_plain([*[plain] * n, drafted, after], 1.1 * n + 2.1 + 9.4 + 0.1 * (n + 2)) == pytest.approx(1.1)
