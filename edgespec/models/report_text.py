"""The text of a report on a planned model."""

from __future__ import annotations

from collections.abc import Iterator

from edgespec.models.network import Network
from edgespec.models.report import DraftSpeed, PlanReport, Speed
from edgespec.models.short_names import shorten_names
from edgespec.units import gib, significant

_SLOW_DRAFT = 0.8  # from this cost on, a draft model is as slow as its target


def format_plan(report: PlanReport) -> Iterator[str]:
    planned = report.planned
    draft = "+".join(each.label for each in planned.drafters) or "none"
    yield f"{shorten_names(planned.name)} on {planned.backend}, drafted by {shorten_names(draft)}"
    yield from _format_memory(report)
    if isinstance(report.speed, Speed):
        yield from format_speed(report.speed, fits=report.fits)
        yield "  what decides here:"
        yield from (f"    {each}" for each in report.checklist)
    else:
        yield "  speed: no estimate" + (f", since {report.speed}" if report.speed is not None else "")


def _format_memory(report: PlanReport) -> Iterator[str]:
    planned, fit = report.planned, report.planned.fit
    draft = fit.draft.total if fit.draft is not None else 0
    trees = fit.tree_cache.total if fit.tree_cache is not None else 0
    scratch = fit.needed - fit.target.weights - fit.target.kv - draft - trees
    yield (
        f"  target: weights {gib(fit.target.weights)}, "
        f"KV cache for {fit.context:,} tokens {gib(fit.target.kv)}, scratch memory {gib(scratch)}"
    )
    if trees:
        yield f"  a cache for trees, while one answer is written alone: {gib(trees)}"
    models = "draft models" if len(report.draft_models) > 1 else "draft model"
    if report.draft_models:
        own = draft - sum(cost.total for _, _, cost in report.heads)
        yield f"  {models}: {gib(own)} (weights, KV cache, scratch memory)"
    for _, head, cost in report.heads:
        place = "in the target's file" if head.in_target else f"weights {gib(cost.weights)}"
        cache = f"KV cache{' and states' if planned.backend == 'mlx' else ''} {gib(cost.kv)}"
        yield f"  {head.kind} head: {place}, {cache}, scratch memory {gib(cost.compute)}"
    for card in planned.cards:
        rounds = f"{card.gain.after:.2f}, before {card.gain.before:.2f}"
        yield f"  draft adapted on {card.date} (version {card.version}): tokens per round {rounds}"
    if report.has_settings:
        known = report.settings
        lines = known.describe() if known is not None else ["settings of llama.cpp: not measured yet"]
        yield from (f"  {line}" for line in lines)
    yield f"  {'fits' if report.fits else 'DOES NOT FIT'}: needs {gib(fit.needed)} of {gib(fit.memory.usable)} free"
    if report.lacking_here:
        yield f"  this machine lacks {gib(report.lacking_here)} for its layers and the drafts"
    if not report.fits and report.fits_without_draft:
        added = " and ".join([models] * bool(report.draft_models) + ["head"] * bool(report.heads))
        yield f"  fits without the {added}, which --draft auto leaves out"
        yield "  --draft ngram needs no memory, --draft layerskip:2 that of the target's first two layers"
    if planned.network is not None:
        yield from _format_workers(planned.network)


def format_speed(speed: Speed, *, fits: bool) -> Iterator[str]:
    low, high = speed.expected.plain
    condition = "" if fits else " with enough memory"
    yield f"  plain decoding{condition}: {significant(low)} to {significant(high)} tokens/s"
    if speed.operations_per_byte is not None:
        rate = speed.read_bytes / speed.expected.rows[1] / 1e9
        yield (
            f"  a token reads {gib(round(speed.read_bytes))} of weights: {significant(rate)} GB/s, "
            f"{speed.operations_per_byte:.1f} operations a byte, and n times as many in a forward of n rows"
        )
    if speed.faster_type is not None:
        yield f"  {speed.faster_type}"
    costs = "  ".join(f"{n}: {cost:.2f}" for n, cost in speed.costs.items())
    yield f"  cost of a forward of n rows, T(n), in plain steps: {costs}"
    if speed.model.mixture:
        yield "  estimated with the same experts for all rows; rows that route to other experts cost more"
    if speed.no_draft_speed:
        yield f"  drafts: {speed.no_draft_speed}"
    elif speed.draft_speed is not None:
        yield from _format_drafts(speed.draft_speed)


def _format_drafts(drafts: DraftSpeed) -> Iterator[str]:
    cost = drafts.token_cost
    if cost is not None:
        yield f"  cost of a draft token, c, in plain steps: {cost:.3f}"
    registered = ("the registry's low figure", "the registry's high figure")
    sources = registered if drafts.acceptance is not None else ("assumed", "assumed")
    for rate, source in zip(drafts.rates, sources, strict=False):
        depth, speedup = drafts.expected.speculative(rate)
        result = f"{speedup:.2f}x plain with drafts of {depth}" if depth else "no draft pays"
        if drafts.alone is not None:
            result += f"; without the network's time {drafts.alone.speculative(rate)[1]:.2f}x"
        yield f"  if {rate:.0%} of draft tokens are accepted ({source}): {result}"
    if drafts.expected.pays_from is not None:
        yield f"  speculation pays from an acceptance of {drafts.expected.pays_from:.0%}"
    elif drafts.pays_when_free is not None:
        slow = "is as slow as its target" if cost and cost >= _SLOW_DRAFT else "is too slow for its target"
        free = f"drafts that cost nothing, such as n-grams, pay from {drafts.pays_when_free:.0%}"
        yield f"  speculation cannot pay with this draft model, which {slow}; {free}"
    else:
        yield "  speculation cannot pay with this type of weights on this machine"


def _format_workers(network: Network) -> Iterator[str]:
    yield f"  layers: {network.split.here} here"
    for worker, layers in zip(network.workers, network.split.remote, strict=True):
        memory = "this machine's memory" if worker.is_here else f"{gib(worker.free)} free"
        trip = f"round trip {significant(worker.round_trip_s * 1e3)} ms"
        yield f"          {layers} on {worker.address} ({memory}, {trip})"
    wait, row = significant(network.wait_s * 1e3), network.row_bytes / 1024
    yield f"  network: {wait} ms in every forward, however many rows it has, and {row:.0f} KiB for each row"
