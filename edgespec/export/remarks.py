"""What a user has to know of an export: figures, where they hold, and what stays behind."""

from __future__ import annotations

from collections.abc import Iterator

from edgespec import __version__
from edgespec.export.engine import Choice, Engine
from edgespec.export.engines import compare_vocabularies
from edgespec.export.plan import Draft, Exported, ExportPlan


def list_remarks(plan: ExportPlan, engine: Engine, choice: Choice, exported: Exported) -> Iterator[str]:
    """Sentences, the most important ones first."""
    yield f"{plan.name} for {engine.title}, written by edgespec {__version__}."
    if engine.backend is None:
        yield f"Weights: {plan.target.original} (named by {plan.target.known_from})."
    if choice.draft is None:
        yield "Drafts: none."
    else:
        yield from _describe_draft(choice.draft, choice.length, engine)
        yield from _describe_figures(choice.draft, plan, engine)
        if None in (compare_vocabularies(plan, choice.draft, engine) or ()):
            yield (
                f"{engine.title} refuses to start if vocab_size in the config.json of target and draft differs; that "
                "is not known here. If it does, export with --draft ngram."
            )
    yield from exported.remarks
    for label, reason in choice.refusals.items():
        yield f"Left out: {label}: {reason}."
    if choice.draft is not None:
        yield (
            "Stays behind: the autopilot, which drafts only where that pays; draft trees; earlier texts, and drafts "
            "that learn from answers; tokens that a JSON schema forces."
        )


def _describe_draft(draft: Draft, length: int | None, engine: Engine) -> Iterator[str]:
    name = draft.label
    if engine.backend is None and draft.weights is not None:
        name = f"{draft.weights.original} ({draft.method}; named by {draft.weights.known_from})"
        if draft.version is not None and not draft.weights.is_folder:
            yield (
                f"The draft in use is version {draft.version}, adapted on this machine; {engine.title} cannot load it "
                "and gets the draft that it was made from."
            )
    if length is None:
        yield f"Drafts: {name}, of lengths that {engine.title} finds."
        return
    kind = "those of its block" if length == draft.block else "a usual number"
    yield f"Drafts: {name}, {length} tokens, {kind}."


def _describe_figures(draft: Draft, plan: ExportPlan, engine: Engine) -> Iterator[str]:
    others = ", and for the files in use, not for the original weights" if engine.backend is None else ""
    again = f"That is for one request at a time{others}: measure again there."
    if draft.measured is not None:
        yield (
            f"Acceptance measured here ({plan.machine}; {draft.measured.sampling}): {draft.measured.acceptance:.0%} of "
            f"the tokens that follow accepted ones. {again}"
        )
    elif draft.acceptance is not None:
        low, high = draft.acceptance
        yield f"Acceptance by the registry, of the quantized pair: {low:.0%} to {high:.0%} of the tokens. {again}"
    if engine.measure:
        yield f"To see the acceptance: {engine.measure}."
