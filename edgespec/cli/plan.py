"""`edgespec plan`: before any download, does a model fit, what would run and draft it, and how fast would it be."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.options import load_options, open_request

if TYPE_CHECKING:
    from edgespec.core.protocols import CheckCancelled
    from edgespec.forecast import Forecast


@click.command("plan")
@click.argument("model", metavar="[REF]", required=False)
@click.option("--draft", default="auto", show_default=True, metavar="auto|model|ngram|none|REF", help="As for run.")
@click.option("--no-speed", is_flag=True, help="Leave out the measurement, which takes a few seconds.")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
@load_options
def plan_command(model: str | None, no_speed: bool, as_json: bool, **given: Any) -> None:
    """Whether REF fits, what would run and draft it, and how fast it would be here. Reads only its header.

    Speeds are put together from a few blocks of the same shape and quantization, measured on this machine.
    """
    from edgespec.cli.host import on_worker
    from edgespec.cli.terminal import TerminalReporter
    from edgespec.forecast import ACCEPTANCES, forecast
    from edgespec.planning import plan
    from edgespec.registry.fit import gib
    from edgespec.registry.gguf import Header
    from edgespec.registry.hub import Hub
    from edgespec.registry.schema import load_registry

    request = open_request(model, {**given, "force": True})
    planned = plan(request, load_registry(), Hub.from_environment(), TerminalReporter())
    context = planned.options.context_size
    assert context is not None  # planning makes it definite
    draft = planned.draft.facts if planned.draft else None
    fit = planned.fit
    facts: dict[str, Any] = {
        "name": planned.name,
        "backend": planned.backend,
        "draft": str(planned.draft.reference) if planned.draft else planned.kind,
        "context": context,
        "weights_bytes": fit.target.weights,
        "kv_bytes": fit.target.kv,
        "draft_bytes": fit.draft.total if fit.draft else 0,
        "needed_bytes": fit.needed,
        "free_bytes": fit.memory.usable,
        "fits": fit.headroom >= 0,
    }
    expected = None
    if not no_speed and isinstance(planned.facts, Header) and (draft is None or isinstance(draft, Header)):
        target, of_draft = planned.facts, draft

        def work(check: CheckCancelled) -> Iterator[Forecast | None]:
            yield forecast(target, of_draft, planned.options, check)

        (expected,) = on_worker(work)
    if expected is not None:
        low, high = expected.plain
        facts |= {
            "plain_tokens_per_second": [round(low, 2), round(high, 2)],
            "cost_of_rows": {n: round(s / expected.rows[1], 2) for n, s in expected.rows.items()},
            "drafted_token_cost": round(expected.draft_s / expected.rows[1], 3) if expected.draft_s else None,
            "speculation_pays_from_acceptance": expected.pays_from,
            "speedup_at_acceptance": {a: round(expected.speculative(a)[1], 2) for a in ACCEPTANCES},
        }
    if as_json:
        click.echo(json.dumps(facts, ensure_ascii=False))
        return
    click.echo(f"{facts['name']} on {facts['backend']}, drafted by {facts['draft']}")
    click.echo(f"  weights {gib(fit.target.weights)}, KV cache for {context:,} tokens {gib(fit.target.kv)}"
               + (f", draft {gib(fit.draft.total)}" if fit.draft else ""))  # fmt: skip
    click.echo(
        f"  {'fits' if facts['fits'] else 'DOES NOT FIT'}: needs {gib(fit.needed)} of {gib(fit.memory.usable)} free"
    )
    if expected is None:
        click.echo(
            "  speed: not foretold" + ("" if no_speed else ", since only GGUF models that fit in part can be measured")
        )
        return
    click.echo(f"  plain decoding: {low:.1f} to {high:.1f} tokens/s")
    click.echo(
        "  a forward of n rows, in plain steps: " + "  ".join(f"{n}: {v}" for n, v in facts["cost_of_rows"].items())
    )
    for acceptance in ACCEPTANCES:
        depth, speedup = expected.speculative(acceptance)
        told = f"{speedup:.2f}x plain with drafts of {depth}" if depth else "no draft pays"
        click.echo(f"  if {acceptance:.0%} of drafted tokens are right (assumed): {told}")
    if expected.pays_from is None:
        click.echo("  speculation cannot pay with this quantization on this machine")
    else:
        click.echo(f"  speculation pays from an acceptance of {expected.pays_from:.0%}")
