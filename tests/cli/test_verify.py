"""`edgespec verify`: requests that are answered alike, one that is not, tool calls, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.answers.generation_spec import GenerationSpec
from edgespec.answers.tools import make_tool
from edgespec.autopilot.speculation import Speculation
from edgespec.backends.options import LoadOptions
from edgespec.backends.toy import load
from edgespec.bench.divergence import Divergence, first_divergence
from edgespec.bench.runner import Skipped
from edgespec.bench.verify import Case, Outcome, choose_arms, sum_up, verify
from edgespec.cli.verify import list_cases
from edgespec.core.protocols import Session
from edgespec.engine.engine import Engine
from edgespec.engine.events import AnswerStart, Event, Finished, Request
from edgespec.engine.loaded_model import describe_model
from tests.cli.conftest import Cli
from tests.engine.conftest import list_loaded

SIZE = {"type": "object", "properties": {"size": {"enum": [1, 2]}}, "required": ["size"]}
TOOL = {"type": "function", "function": {"name": "set_size", "parameters": SIZE}}
ASKED: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "def set_size(size):"}], "tools": [TOOL], "tool_choice": "required"},
    {"prompt": "", "messages": [{"role": "user", "content": "def read_lines(path):"}], "category": "code"},
    {"messages": [{"role": "user", "content": "size = "}], "response_format": {"type": "json_object", "schema": SIZE}},
]
QUICK = ("--threads", "1", "--max-tokens", "40")


def test_own_requests(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text("\n".join(map(json.dumps, ASKED)) + "\n\n")
    done = cli("verify", "python-6m", "--requests", str(file), *QUICK, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["complete"] and list(found["rows"]) == ["plain", "autopilot", "ngram 4", "model 4", "own", "code"]
    rows, answers = found["rows"], found["answers"]
    assert len(answers) == 12 and not any(each["is_fault"] for each in answers)
    assert rows["model 4"]["answers"] == 3 and 0 < rows["model 4"]["accepted"] < rows["model 4"]["drafted"]
    assert rows["plain"]["tau"] == 1 < rows["model 4"]["tau"] and rows["plain"]["speedup"] == 1
    calls = {tuple(each["calls"]) for each in answers if each["case"] == "line 1"}
    assert len(calls) == 1 and json.loads(calls.pop()[0].removeprefix("set_size(")[:-1])["size"] in (1, 2)


def test_the_table_has_arms_and_kinds(cli: Cli) -> None:
    done = cli("verify", "python-6m", "--draft", "ngram", "--per-category", "1", *QUICK)
    assert done.returncode == 0, done.stdout + done.stderr
    head, *rows = done.stdout.splitlines()
    assert head.split() == ["SAME", "NEAR-TIE", "DIFFERENT", "CALLS", "LEAKS", "ACCEPTED", "TAU", "SPEEDUP", "WORST"]
    names = [row[:17].strip() for row in rows[:9]]
    kinds = ["calls demanded", "calls free", "json", "chat", "code_completion", "code_edit"]
    assert names == ["plain", "autopilot", "ngram 4", *kinds] and "6 of 6" in rows[2]
    assert "note: long_context-1 is left out: the prompt has" in done.stderr, "the context of the model is short"


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "has no requests"), ("{", "line 1 is not a request"), ('{"messages": []}', "line 1 is not a request"),
     ('{"messages": 3}', "line 1 is not a request"), ("[1]", "line 1 is not a request")],
)  # fmt: skip
def test_files_that_are_no_requests(text: str, said: str, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text(text)
    done = cli("verify", "python-6m", "--requests", "mine.jsonl", *QUICK)
    assert done.returncode == 2 and said in done.stderr and "hint:" in done.stderr


def test_without_a_draft_there_is_nothing_to_verify(cli: Cli) -> None:
    done = cli("verify", "python-6m", "--draft", "none", *QUICK)
    assert done.returncode == 2 and "nothing to verify" in done.stderr
    assert cli("verify", "python-6m", "--requests", "absent.jsonl", *QUICK).returncode == 2


def test_sixty_requests_of_their_kinds() -> None:
    cases = list_cases()
    assert len({(case.id, case.kind) for case in cases}) == len(cases) == 60
    demanded = [case for case in cases if case.kind == "calls demanded"]
    assert len(demanded) == 10 and all(case.spec.must_call for case in demanded)


def test_a_request_that_the_template_refuses_is_left_out() -> None:
    engine = Engine(load("tree", LoadOptions(context_size=512)), list_loaded(), Speculation(("ngram",)))
    info = describe_model(engine, "toy", None, None)
    wrong = GenerationSpec("x", tools=(make_tool("f", None, {"type": "wrong"}),), tool_choice="required")
    found = list(
        verify(
            engine, info, choose_arms(["ngram"]), [Case("a", "own", wrong), Case("b", "own", GenerationSpec("y"))], 4
        )
    )
    assert [each.prompt for each in found if isinstance(each, Skipped)] == ["a"] and len(found) == 4
    engine.close()


class Wrong(Engine):
    """A toy engine whose drafted answers avoid a token that plain decoding has."""

    def __init__(self) -> None:
        target, draft = (load(name, LoadOptions(context_size=512)) for name in ("tree", "draft"))
        super().__init__(target, list_loaded(model=draft), Speculation(("ngram", "model")))
        self.banned: int | None = None

    def stream(self, request: Request) -> Iterator[Event]:
        if not self.speculation.is_plain and self.banned is not None:
            bias = ((self.banned, -1000.0),)
            request = replace(request, sampling=replace(request.sampling, logit_bias=bias))
        for event in super().stream(request):
            if isinstance(event, Finished) and self.speculation.is_plain:
                self.banned = event.tokens[3]
            yield event


def test_an_answer_that_differs_is_found() -> None:
    engine = Wrong()
    info = describe_model(engine, "toy", None, None)
    arms, cases = (
        choose_arms(["model"]),
        [Case("a", "own", GenerationSpec("a tale of two")), Case("b", "own", GenerationSpec("x" * 600))],
    )
    found = list(verify(engine, info, arms, cases, 12))
    assert [each.prompt for each in found if isinstance(each, Skipped)] == ["b"]
    plain, *drafted = [each for each in found if isinstance(each, Outcome)]
    assert plain.is_same and not plain.is_fault and len(drafted) == 2
    for each in drafted:
        assert each.is_fault and each.fork is not None and each.fork.position <= 3 and each.fork.gap > each.fork.noise
    row = sum_up(drafted, [plain], [])
    assert (row.answers, row.faults, row.near_ties) == (2, 2, 0)
    assert engine.speculation == Speculation(("ngram", "model")), "it is as it was"
    engine.close()


def test_a_fault_is_exit_code_1(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, banned = Engine.stream, []

    def stream(engine: Engine, request: Request) -> Iterator[Event]:
        if not engine.speculation.is_plain and banned:
            request = replace(request, sampling=replace(request.sampling, logit_bias=((banned[-1], -1000.0),)))
        for event in right(engine, request):
            if isinstance(event, Finished) and engine.speculation.is_plain:
                banned.append(event.tokens[3])
            yield event

    (tmp_path / "own.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "def f(x):"}]}))
    command = ("verify", "python-6m", "--requests", "own.jsonl", "--max-tokens", "12", "--draft", "ngram")
    assert cli(*command).returncode == 0
    monkeypatch.setattr(Engine, "stream", stream)
    assert cli(*command).returncode == 1


def test_an_answer_that_was_begun_is_judged_behind_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Wrong()
    info = describe_model(engine, "toy", None, None)
    judged: list[list[int]] = []

    def judge(session: Session, prompt: list[int], *answers: Sequence[int]) -> Divergence | None:
        judged.append(prompt)
        return first_divergence(session, prompt, *answers)

    monkeypatch.setattr("edgespec.bench.verify.first_divergence", judge)
    begun = GenerationSpec("a tale", start=AnswerStart(text=" of two"))
    assert list(verify(engine, info, choose_arms(["model"]), [Case("a", "own", begun)], 4))
    assert judged == 3 * [engine.encode("a tale of two")]
    engine.close()
