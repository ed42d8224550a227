"""`edgespec tune`: measure a model's costs and draft acceptance in advance, for later runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import asdict
from itertools import product
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.interrupts import INTERRUPTED, interruptible
from edgespec.cli.options import (
    FloatRange,
    json_option,
    load_config,
    load_options,
    model_argument,
    offer,
    worker_options,
)
from edgespec.cli.output import print_result
from edgespec.cli.terminal import TerminalReporter
from edgespec.errors import ContextOverflow, InvalidRequest
from edgespec.options import DRAFT
from edgespec.units import significant

if TYPE_CHECKING:
    from edgespec.autopilot.profile import Profile
    from edgespec.client.local import LocalEngine

_TABLE_ROWS = (1, 4, 16)


@click.command("tune")
@model_argument
@offer(DRAFT, help="As for run.")
@click.option("--seconds", type=FloatRange(1), default=20, help="Time for measuring costs.")
@click.option("--max-tokens", type=click.IntRange(2), default=64, help="Tokens per practice answer.")
@json_option
@load_options
@worker_options
def tune_command(model: str | None, seconds: float, max_tokens: int, as_json: bool, **options: Any) -> int:
    """Measure the cost of REF's forwards, train the autopilot on prompts of each category, and save both.

    Every run does this as it goes; tune does it in advance. Ctrl-C keeps the results so far.
    """
    from edgespec.autopilot.profiler import CONTEXTS
    from edgespec.autopilot.stats import DraftStats
    from edgespec.cli.engine import open_engine

    if options["draft"] == "none":
        raise InvalidRequest("there is nothing to tune without a draft.", hint="Use --draft auto or ngram.")
    share = seconds / 3  # of the time, for the runtime's settings
    with closing(open_engine(load_config(model, options), verbose=options["verbose"], settings_s=share)) as local:
        loaded = local.require_loaded()
        engine = loaded.engine

        def measure() -> Iterator[Profile]:
            yield engine.measure(seconds - share, CONTEXTS)

        (profile,) = interruptible(local.submit(measure))
        engine.draft_stats = DraftStats(profile)
        interrupted = _practise(local, max_tokens)
        state, settings = engine.draft_stats.to_dict(), loaded.settings
    chosen = asdict(settings) if settings is not None else None
    facts = {"model": loaded.info.name, "interrupted": interrupted, "settings": chosen, **state}
    drafts = (
        f"{1000 * cost.seconds(1):.2f} ms for a token or block of {name}" for name, cost in profile.drafts.items()
    )
    lines = [*(settings.describe() if settings is not None else ()), *drafts, *_format_costs(profile)]
    speed = f"{loaded.info.name}: {1 / profile.rows[1]:.1f} tokens/s plain"
    print_result(facts, (speed, *(f"  {line}" for line in lines)), as_json=as_json)
    return INTERRUPTED if interrupted else 0


def _practise(local: LocalEngine, max_tokens: int) -> bool:
    """Answer a prompt of each category, greedily and not; returns whether Ctrl-C ended that early."""
    from edgespec.bench.prompt_sets import CATEGORIES, read_shipped_prompts
    from edgespec.core.sampling import SamplingParams
    from edgespec.engine.events import Finished, Request
    from edgespec.text.chat_template import Message

    reporter, answers = TerminalReporter(), [*product(CATEGORIES, (0.0, 0.7))]
    try:
        for i, (category, temperature) in enumerate(answers):
            message = Message("user", read_shipped_prompts([category])[0].turns[0])
            request = Request((message,), SamplingParams(temperature=temperature), max_tokens)
            with suppress(ContextOverflow):  # the prompt is longer than the context
                for event in interruptible(local.stream(request)):
                    if isinstance(event, Finished) and event.reason == "cancelled":
                        return True
            reporter.draw("tuning", i + 1, len(answers), category)
    finally:
        reporter.end_bar()
    return False


def _format_costs(profile: Profile) -> Iterator[str]:
    """Lines of milliseconds of a forward by tokens of context and rows, with what was measured."""
    yield "milliseconds of a forward of n rows, by tokens of context:"
    for context, by_rows in {0: profile.rows, **{n: each.rows for n, each in profile.longer.items()}}.items():
        rows = "  ".join(f"{n}: {significant(s * 1e3)}" for n, s in by_rows.items() if n in _TABLE_ROWS)
        yield f"  {context:7,}  {rows}"
