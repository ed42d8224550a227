"""`edgespec tune`: measure a model's costs and draft acceptance in advance, for later runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.completers import complete_model
from edgespec.cli.options import draft_option, load_config, load_options, worker_options

if TYPE_CHECKING:
    from edgespec.controller.cost_model import Profile
    from edgespec.core.protocols import CheckCancelled


@click.command("tune")
@click.argument("model", metavar="[REF]", required=False, shell_complete=complete_model)
@draft_option("As for run.")
@click.option("--seconds", type=click.FloatRange(1), default=20, show_default=True, help="Time for measuring costs.")
@click.option("--max-tokens", type=click.IntRange(2), default=64, show_default=True, help="Tokens per practice answer.")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
@load_options
@worker_options
def tune_command(model: str | None, seconds: float, max_tokens: int, as_json: bool, **options: Any) -> int:
    """Measure the cost of REF's forwards, train the autopilot on prompts of each category, and save both.

    Every run does this as it goes; tune does it in advance. Ctrl-C keeps the results so far.
    """
    from edgespec.bench.prompt_sets import CATEGORIES, read_shipped_prompts
    from edgespec.cli.engine import open_engine
    from edgespec.cli.interrupts import INTERRUPTED, interruptible
    from edgespec.cli.terminal import Progress
    from edgespec.controller.profiler import CONTEXTS
    from edgespec.controller.stats import DraftStats
    from edgespec.core.sampling import SamplingParams
    from edgespec.engine.events import Finished, Request
    from edgespec.errors import ContextOverflow, InvalidRequest
    from edgespec.planner.report import format_costs
    from edgespec.text.chat_template import Message

    if options["draft"] == "none":
        raise InvalidRequest("there is nothing to tune without a draft.", hint="Use --draft auto or ngram.")
    share = seconds / 3  # of the time, for the runtime's settings
    local = open_engine(load_config(model, options), verbose=options["verbose"], settings_s=share)
    loaded, progress = local.require_loaded(), Progress("tuning")
    engine = loaded.engine

    def measure(check: CheckCancelled) -> Iterator[Profile]:
        yield engine.measure(seconds - share, check, CONTEXTS)

    (profile,) = interruptible(local.submit(measure))
    engine.draft_stats = DraftStats(profile)
    interrupted = False
    temperatures = (0.0, 0.7)
    progress.expect(len(CATEGORIES) * len(temperatures))
    with progress:
        for category in CATEGORIES:
            message = Message("user", read_shipped_prompts([category])[0].turns[0])
            for temperature in temperatures if not interrupted else ():
                request = Request((message,), SamplingParams(temperature=temperature), max_tokens)
                try:
                    for event in interruptible(local.stream(request)):
                        interrupted |= isinstance(event, Finished) and event.reason == "cancelled"
                except ContextOverflow:
                    pass  # the prompt is longer than the context
                progress.step(category)
    state = engine.draft_stats.to_dict()
    local.close()  # saves the statistics
    if as_json:
        chosen = loaded.settings.to_dict() if loaded.settings is not None else None
        facts = {"model": loaded.info.name, "interrupted": interrupted, "settings": chosen}
        click.echo(json.dumps(facts | state))
    else:
        click.echo(f"{loaded.info.name}: {1 / profile.rows[1]:.1f} tokens/s plain")
        for line in loaded.settings.describe() if loaded.settings is not None else ():
            click.echo(f"  {line}")
        steps = "  ".join(f"{n}: {s / profile.rows[1]:.2f}" for n, s in profile.rows.items())
        click.echo(f"  cost of a forward of n rows, in plain steps: {steps}")
        for name, cost in profile.drafts.items():
            units = "  ".join(f"{n}: {s / profile.rows[1]:.3f}" for n, s in cost.units.items())
            click.echo(f"  cost of {name} by drafted tokens, in plain steps: {units}")
        click.echo("\n".join(f"  {line}" for line in format_costs(profile)))
    return INTERRUPTED if interrupted else 0
