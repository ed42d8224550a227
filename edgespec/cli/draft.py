"""`edgespec draft`: compare drafts; train heads; prepare, list and remove self-drafts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.completion import complete_model, complete_self_drafts
from edgespec.cli.options import (
    FloatRange,
    json_option,
    load_config,
    load_options,
    model_argument,
    open_hub,
    rare_option,
)
from edgespec.cli.output import format_table, print_result
from edgespec.cli.terminal import report_activity
from edgespec.errors import DraftRefused, InvalidRequest, UnknownModel
from edgespec.units import gib

if TYPE_CHECKING:
    from edgespec.bench.compare import Answers, Compared
    from edgespec.engine.selfdraft_cache import Choice
    from edgespec.text.chat_template import Message
    from edgespec.train.run import Adaptation


@click.group("draft")
def draft_command() -> None:
    """Train a head of a model, or compare its drafts. Self-drafts: a model drafts with fewer of its layers, fewer bits
    or less context.
    """


RIVAL = "draft model"
FILE = click.Path(dir_okay=False, path_type=Path)
_COMPARED = ("chat", "qa", "maths", "summary", "code_completion")  # categories of prompts


@draft_command.command("compare")
@click.argument("target", metavar="TARGET", shell_complete=complete_model)
@click.argument("drafts", metavar="DRAFT...", nargs=-1, required=True, shell_complete=complete_model)
@click.option("--max-tokens", type=click.IntRange(8), default=64, help="Tokens of each answer.")
@json_option
@load_options
def compare_command(target: str, drafts: tuple[str, ...], max_tokens: int, as_json: bool, **options: Any) -> int:
    """Find the DRAFT with which TARGET is fastest on this machine: draft models, and self-drafts such as layerskip:8.

    TARGET answers a few prompts greedily, and each draft predicts every token of these answers. The agreement and the
    times of both give the length of drafts and the speed to expect. Sampled answers agree less.
    """
    from edgespec.bench.compare import Compared, compare_drafts
    from edgespec.cli.engine import run_work

    config = load_config(target, {**options, "draft": "none"})
    rows: list[Compared] = []
    report_activity(f"{target} answers prompts …")
    events: Iterator[Answers | Compared] = run_work(lambda: compare_drafts(config, drafts, _read_prompts(), max_tokens))
    for event in events:
        if isinstance(event, Compared):
            rows.append(event)
        else:
            answers = event
        if len(rows) < len(drafts):
            report_activity(f"draft {len(rows) + 1} of {len(drafts)} is measured …")
    report_activity("")
    rows.sort(key=lambda each: -each.trial.speedup if each.trial else 0)
    print_result(_describe_comparison(answers, rows), _format_comparison(answers, rows), as_json=as_json)
    return 0 if rows[0].trial else DraftRefused.exit_code


def _read_prompts() -> list[tuple[Message, ...]]:
    """The first shipped prompt of a few categories."""
    from edgespec.bench.prompt_sets import read_shipped_prompts, take_per_category
    from edgespec.text.chat_template import Message

    prompts = take_per_category(read_shipped_prompts(_COMPARED), 1)
    return [(Message("user", each.turns[0]),) for each in prompts]


def _describe_comparison(answers: Answers, rows: list[Compared]) -> dict[str, Any]:
    drafts = [
        {"draft": each.draft, **asdict(each.trial), "bytes": each.memory}
        if each.trial
        else {"draft": each.draft, "refused": each.refusal}
        for each in rows
    ]
    counts = {"target": answers.name, "answers": answers.answers, "tokens": answers.tokens}
    return {**counts, "best": _find_best(rows), "drafts": drafts}


def _find_best(rows: list[Compared]) -> str | None:
    """The first of `rows`, which are in the order of their speed, if it is faster than plain decoding."""
    return rows[0].draft if rows[0].trial is not None and rows[0].trial.length else None


def _format_comparison(answers: Answers, rows: list[Compared]) -> Iterator[str]:
    yield from _format_trials(rows)
    if rows[0].trial is None:
        return
    yield f"agreement with {answers.tokens} tokens of {answers.answers} greedy answers of {answers.name}"
    best = _find_best(rows)
    yield f"best: --draft {best}" if best else "no draft is expected to pay: --draft ngram costs next to nothing"


def _format_trials(rows: Sequence[Compared]) -> Iterator[str]:
    table = [("DRAFT", "AGREEMENT", "COST OF A TOKEN", "MEMORY", "LENGTH", "SPEEDUP, EXPECTED")]
    for each in rows:
        if t := each.trial:
            memory = "" if each.memory is None else gib(each.memory)
            table.append((each.draft, f"{t.agreement:.0%}", f"{t.cost:.2f}", memory, str(t.length), f"{t.speedup:.2f}"))
    if len(table) > 1:
        yield from format_table(table, frozenset(range(1, 6)))
    yield from (f"{each.draft} is refused: {each.refusal}" for each in rows if each.trial is None)


@draft_command.command("build")
@model_argument
@click.option(
    "--draft",
    "methods",
    multiple=True,
    metavar="METHOD",
    help="layerskip, qspec:BITS, sparse, joined by '+'; repeatable. [default: all]",
)
@click.option("--seconds", type=FloatRange(1), default=120, help="Time for the layer search.")
@json_option
@load_options
def build_command(model: str | None, methods: tuple[str, ...], seconds: float, as_json: bool, **options: Any) -> None:
    """Find the best self-draft of REF and remember it for `--draft auto`.

    Makes low-bit copies, searches for layers to skip, and measures each candidate and the paired draft model. Ctrl-C
    keeps the finished copies.
    """
    from edgespec.backends.attached_draft import parse
    from edgespec.bench.compare import Compared, search_self_draft
    from edgespec.cli.engine import run_work
    from edgespec.engine.open import Loader
    from edgespec.engine.selfdraft_search import SelfDraftSearch

    specs = []
    for text in methods:
        if (spec := parse(text)) is None:
            raise InvalidRequest(f"'{text}' is not a self-draft.", hint="Use layerskip, qspec or sparse.")
        specs.append(spec)
    request = load_config(model, {**options, "draft": "auto"})

    def work() -> Iterator[tuple[SelfDraftSearch, Choice]]:
        yield search_self_draft(Loader(), request, specs, seconds)

    ((search, choice),) = run_work(work)
    tried = {**search.trials, **({RIVAL: search.rival} if search.rival else {})}
    rows = [Compared(name, trial) for name, trial in sorted(tried.items(), key=lambda each: -each[1].speedup)]
    trials = {row.draft: asdict(row.trial) for row in rows if row.trial is not None}
    rival = trials.pop(RIVAL, None)
    facts = {"best": str(choice.method), "pays": choice.pays, "trials": trials, RIVAL: rival}
    best = f"best: {choice.method}" if choice.pays else "no self-draft is expected to pay; `--draft auto` uses none"
    print_result(facts, (*_format_trials(rows), best), as_json=as_json)


@draft_command.command("train")
@model_argument
@click.option("--minutes", type=FloatRange(0.1), default=60, show_default=True, help="About how long it may take.")
@click.option("--tokens", type=click.IntRange(1), default=500_000, show_default=True, help="Of answers to learn from.")
@click.option(
    "--texts", "files", multiple=True, type=FILE, help='Questions for the model first: lines of {"prompt": "..."}.'
)
@rare_option("--on-battery", is_flag=True, help="Train on battery power too.")
@json_option
@load_options
def train_command(
    model: str | None,
    minutes: float,
    tokens: int,
    files: tuple[Path, ...],
    on_battery: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Train an EAGLE-3 head for REF on this machine, and draft with it from then on if it gains.

    REF writes questions and answers by itself, and a layer learns to predict them from its hidden states. The head is
    kept if it predicts answers that were held out better than lookups and the head in use do. The training pauses while
    a model answers on this machine. Ctrl-C stops it, and the same command goes on; after its end it trains further.
    """
    from edgespec.bench.prompt_sets import read_prompts
    from edgespec.cli.adapt import TrainingReporter, describe_result, format_result, open_drafts
    from edgespec.cli.engine import run_work
    from edgespec.train.learn import is_on_battery
    from edgespec.train.new_head import HeadConfig, HeadTrainer
    from edgespec.train.options import Allowance, Throttle, lower_priority
    from edgespec.train.trainee import notice_slow_blas

    questions = [prompt.turns[0] for file in files for prompt in read_prompts(file)]
    throttle = Throttle(Allowance(60 * minutes), must_stop=(lambda: False) if on_battery else is_on_battery)
    config = HeadConfig(load_config(model, options), questions, tokens, throttle=throttle)
    reporter = TrainingReporter()
    lower_priority()

    def work() -> Iterator[Adaptation]:
        notice_slow_blas()
        yield HeadTrainer(*open_hub(), open_drafts(), reporter).run(config)

    (done,) = run_work(work, reporter, is_training=True)
    print_result(describe_result(done), [format_result(done)], as_json=as_json)
    if not as_json and done.stopped is not None:
        click.echo("note: The training ended early: the time was up.", err=True)


@draft_command.command("list")
@json_option
def list_command(as_json: bool) -> None:
    """List cached self-drafts by model."""
    from edgespec.engine.selfdraft_cache import list_cached_drafts

    found = list_cached_drafts()
    facts = [
        {"model": k.model, "bytes": k.size, "copies": [str(c) for c in k.copies], "choices": list(k.choices)}
        for k in found
    ]
    lines = [
        line
        for each in found
        for line in (
            f"{gib(each.size):>10}  {each.model}",
            *(f"{'':12}{text}" for text in (*(copy.name for copy in each.copies), *each.choices)),
        )
    ]
    lines = lines or ["No self-drafts are cached; `edgespec draft build NAME` makes them."]
    print_result(facts, lines, as_json=as_json)


@draft_command.command("rm", short_help="Remove cached self-drafts of a model, or all.")
@click.argument("model", metavar="NAME", shell_complete=complete_self_drafts)
def rm_command(model: str) -> None:
    """Remove the cached self-drafts of NAME, as `edgespec draft list` shows it; `all` removes everything."""
    from edgespec.engine.selfdraft_cache import list_cached_drafts, remove_cached_draft

    found = [each for each in list_cached_drafts() if model in ("all", each.model)]
    if not found:
        raise UnknownModel(
            f"there are no cached self-drafts of '{model}'.", hint="`edgespec draft list` shows the names."
        )
    click.echo(f"freed {gib(sum(remove_cached_draft(each) for each in found))}", err=True)
