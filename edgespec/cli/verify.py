"""`edgespec verify`: the same requests with and without drafts, in one table."""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.interrupts import INTERRUPTED, interruptible
from edgespec.cli.options import json_option, load_config, load_options, model_argument, offer
from edgespec.cli.output import format_table
from edgespec.cli.terminal import TerminalReporter
from edgespec.errors import Cancelled, InvalidRequest
from edgespec.options import DRAFT

if TYPE_CHECKING:
    from edgespec.bench.runner import Arm, Skipped
    from edgespec.bench.verify import Case, Outcome, Row
    from edgespec.client.local import LocalEngine
    from edgespec.client.stream import Stream

_TOOLS = ("calls demanded", "calls free")
_SHIPPED = ("code_completion", "code_edit", "chat", "long_context")  # of `edgespec bench`
_FORM = 'Write the body of a /v1/chat/completions request a line: {"messages": [...], "tools": [...]}.'


@click.command("verify")
@model_argument
@offer(DRAFT, help="Drafters to verify, joined by '+' ('edgespec doctor' lists them), or a draft model.")
@click.option(
    "--requests",
    "file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="JSONL file of your own requests, each the body of a chat completion; 'category' names its kind.",
)
@click.option("--per-category", type=click.IntRange(1), default=10, help="Requests of each kind.")
@click.option("--max-tokens", type=click.IntRange(2), default=96, help="Tokens per answer.")
@json_option
@load_options
def verify_command(
    model: str | None, file: Path | None, per_category: int, max_tokens: int, as_json: bool, **options: Any
) -> int:
    """Check that answers and tool calls are the same with drafts as without.

    60 requests, tool calls, JSON, code and chats, are answered at temperature 0 by plain decoding, by the autopilot,
    and by each drafter with four tokens in every round. An answer that differs is judged by the target's scores where
    it begins to: two that are nearer to each other than their rounding are a near-tie. The exit code is 1 if any answer
    differs by more.
    """
    from edgespec.bench.verify import choose_arms
    from edgespec.cli.engine import open_engine
    from edgespec.client.client import require_model

    if options["draft"] == "none":
        raise InvalidRequest("there is nothing to verify without a draft.", hint="Use --draft auto or ngram.")
    cases = _take(read_requests(file) if file else list_cases(), per_category)
    with closing(open_engine(load_config(model, options), verbose=options["verbose"])) as local:
        info = require_model(local)
        arms = choose_arms(info.speculation.drafters)
        outcomes, is_whole = run_cases(local, cases, arms, max_tokens)
    rows, lines = _summarize(outcomes, [arm.name for arm in arms])
    if as_json:
        found = {name: asdict(row) for name, row in rows.items()}
        head = {"model": info.name, "draft": info.draft, "backend": info.backend, "complete": is_whole}
        click.echo(json.dumps({**head, "rows": found, "answers": [each.describe() for each in outcomes]}))
    else:
        click.echo("\n".join(lines))
    if not is_whole:
        return INTERRUPTED
    return int(any(each.is_fault for each in outcomes))


def run_cases(local: LocalEngine, cases: list[Case], arms: list[Arm], max_tokens: int) -> tuple[list[Outcome], bool]:
    """Verify with the engine of `local`. Returns the outcomes, and whether they are complete: Ctrl-C keeps those so
    far.
    """
    from edgespec.bench.runner import Skipped
    from edgespec.bench.verify import verify
    from edgespec.client.client import require_model

    engine, info = local.require_loaded().engine, require_model(local)
    outcomes: list[Outcome] = []
    reporter = TerminalReporter()

    def work() -> Iterator[Outcome | Skipped]:
        yield from verify(engine, info, arms, cases, max_tokens)

    found: Stream[Outcome | Skipped] = local.submit(work)
    try:
        for each in interruptible(found):
            if isinstance(each, Skipped):
                reporter.notice(f"{each.prompt} is left out: {each.reason}")
                continue
            outcomes.append(each)
            reporter.draw("verifying", len(outcomes), len(arms) * len(cases), f"{each.case} {each.arm}")
    except Cancelled:
        return outcomes, False
    finally:
        reporter.end_bar()
    return outcomes, True


def list_cases() -> list[Case]:
    """The requests that come with edgespec: those with tools twice, with a call demanded and with a free choice."""
    from edgespec.answers.generation_spec import GenerationSpec
    from edgespec.bench.prompt_sets import read_shipped_prompts
    from edgespec.bench.verify import Case
    from edgespec.text.chat_template import Message

    file = importlib.resources.files("edgespec.bench") / "verify_data" / "cases.jsonl"
    bodies = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    cases = []
    for choice, kind in zip(("required", "auto"), _TOOLS, strict=True):
        cases += [_read_case({**each, "category": kind, "tool_choice": choice}) for each in bodies if "tools" in each]
    cases += [_read_case(each) for each in bodies if "tools" not in each]
    shipped = read_shipped_prompts(_SHIPPED)
    return cases + [Case(each.id, each.category, GenerationSpec((Message("user", each.turns[0]),))) for each in shipped]


def read_requests(path: Path) -> list[Case]:
    """The requests of a JSONL file. Raises InvalidRequest."""
    from edgespec.bench.prompt_sets import read_lines

    cases = []
    for number, line in read_lines(path):
        try:
            cases.append(_read_case({"id": f"line {number}", "category": "own", **json.loads(line)}))
        except (ValueError, TypeError, RecursionError) as error:
            raise InvalidRequest(f"'{path}', line {number} is not a request.", hint=_FORM) from error
    if not cases:
        raise InvalidRequest(f"'{path}' has no requests.", hint=_FORM)
    return cases


def _read_case(body: dict[str, Any]) -> Case:
    from edgespec.bench.verify import Case
    from edgespec.server.openai import ChatRequest

    name, kind = str(body.pop("id")), str(body.pop("category"))
    (spec,) = ChatRequest.model_validate(body).generation_specs()
    return Case(name, kind, spec)


def _take(cases: Sequence[Case], limit: int) -> list[Case]:
    by_kind: dict[str, list[Case]] = {}
    for case in cases:
        by_kind.setdefault(case.kind, []).append(case)
    return [case for each in by_kind.values() for case in each[:limit]]


def _summarize(outcomes: list[Outcome], arms: list[str]) -> tuple[dict[str, Row], list[str]]:
    """The rows by arm and by kind, and the lines to print."""
    from edgespec.bench.verify import sum_up

    plain = [each for each in outcomes if each.arm == arms[0]]
    tool_kinds = {each.kind for each in outcomes if each.calls or each.kind in _TOOLS}
    drafted = [each for each in outcomes if each.arm != arms[0]]
    groups = {arm: [each for each in outcomes if each.arm == arm] for arm in arms}
    groups |= {kind: [each for each in drafted if each.kind == kind] for kind in dict.fromkeys(e.kind for e in drafted)}
    rows = {name: sum_up(each, plain, sorted(tool_kinds)) for name, each in groups.items() if each}
    heads = ("", "SAME", "NEAR-TIE", "DIFFERENT", "CALLS", "LEAKS", "ACCEPTED", "TAU", "SPEEDUP", "WORST")
    lines = [*format_table([heads, *(_format_row(name, row) for name, row in rows.items())]), ""]
    lines += [_describe_difference(each) for each in drafted if not each.is_same]
    lines += [
        f"{each.case} ({each.kind}), {each.arm}: a call stayed text: {each.leaked!r}"
        for each in outcomes
        if each.leaked
    ]
    return rows, lines


def _format_row(name: str, row: Row) -> tuple[str, ...]:
    same = row.answers - row.near_ties - row.faults

    def figure(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    return (
        name,
        f"{same} of {row.answers}",
        str(row.near_ties),
        str(row.faults),
        f"{row.calls} of {row.asked}" if row.asked else "-",
        str(row.leaks) if row.asked else "-",
        f"{row.accepted} of {row.drafted}" if row.drafted else "-",
        figure(row.tau),
        figure(row.speedup),
        figure(row.worst),
    )


def _describe_difference(outcome: Outcome) -> str:
    if (fork := outcome.fork) is None:
        return f"{outcome.case} ({outcome.kind}), {outcome.arm}: ends at another token."
    what = "a near-tie" if fork.is_near_tie else "DIFFERENT"
    return (
        f"{outcome.case} ({outcome.kind}), {outcome.arm}: {what} at token {fork.position}, where the scores of both"
        f" tokens differ by {fork.gap:.2g} and rounding changes a score by up to {fork.noise:.2g}."
    )
