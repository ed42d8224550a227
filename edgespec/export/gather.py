"""The pair that `edgespec chat MODEL` would use, with what is known of it. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from edgespec import __version__
from edgespec.backends import FileBackend
from edgespec.controller.stats import DraftStats
from edgespec.controller.store import ProfileStore, processor_name
from edgespec.errors import CacheError
from edgespec.export.engines import Choice, Engine, compare_vocabularies
from edgespec.export.plan import Draft, Exported, ExportPlan, Weights, read_measured
from edgespec.export.weights import RegistryPair, describe_weights, require_pair
from edgespec.formats.heads import HeadSpec
from edgespec.hub.cache import Alias, HubFile, HubQuant, HubRepo, Reference, parse_reference
from edgespec.hub.hub import Hub
from edgespec.planner.adapted import find_local
from edgespec.planner.draft_finder import AUTO, PlannedDrafter
from edgespec.planner.plan import LoadConfig, Plan, Reporter, choose_backend, plan
from edgespec.registry.resolve import LocalMlx
from edgespec.registry.schema import Entry, Registry

_PREFERENCE = (
    "eagle3", "dspark", "dflash", "mtp", "gemma4-assistant", "eagle", "medusa", "hydra", "pard", "model", "self",
    "ngram", "suffix",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class GivenIds:
    """Original weights that the user names, of the target and of its draft: a repository or a folder."""

    target: str | None = None
    draft: str | None = None


def gather(request: LoadConfig, ids: GivenIds, registry: Registry, hub: Hub, reporter: Reporter) -> ExportPlan:
    """What to export. An alias whose files are not on this machine is taken from the registry, without the network.

    Raises UnknownModel, HubError, InvalidModelFile, DraftRefused, InvalidRequest.
    """
    backend = choose_backend(request, registry, hub)
    reference = parse_reference(request.model or registry.default)
    entry = registry.get(reference.name) if isinstance(reference, Alias) else None
    pair = require_pair(entry, backend) if entry is not None else None
    if entry is not None and pair is not None and not _is_here(pair.target, hub):
        target = describe_weights(pair.target, registry, given=ids.target)
        drafts = tuple(RegistryPair(pair, backend, registry, ids.draft).list_drafts(request.draft))
        name, hints = entry.alias, tuple(_list_hints(entry, backend))
    else:
        planned = plan(replace(request, backend=backend, force=True), registry, hub, reporter)
        named = pair.target if pair is not None else reference
        path = find_local(planned.target, hub)
        target = describe_weights(named, registry, path=path, metadata=planned.metadata, given=ids.target)
        drafts = tuple(_read_plan(planned, path, ids.draft, registry, hub))
        name, hints = planned.name, tuple(_list_hints(entry, backend))
    ranked = sorted(drafts, key=lambda each: (*_PREFERENCE, each.method).index(each.method))
    return ExportPlan(name, backend, target, tuple(ranked), request.draft == AUTO, processor_name(), hints)


def _is_here(reference: Reference, hub: Hub) -> bool:
    return not isinstance(reference, HubRepo | HubQuant | HubFile) or hub.find_cached(reference) is not None


def _list_hints(entry: Entry | None, backend: FileBackend) -> Iterator[str]:
    """Trained drafts that the registry pairs with the target on the other runtime alone."""
    other: FileBackend = "mlx" if backend == "llamacpp" else "llamacpp"
    own, others = (entry.pair(backend), entry.pair(other)) if entry is not None else (None, None)
    for role in ("head", "pard"):
        if own is not None and others is not None and getattr(own, role) is None and getattr(others, role) is not None:
            kind, reference = others.head_kind if role == "head" else "pard", getattr(others, role)
            yield f"models.toml has {reference} ({kind}) for this model: --backend {other} exports that pair."


def _read_plan(planned: Plan, target: Path | None, given: str | None, registry: Registry, hub: Hub) -> Iterator[Draft]:
    """The drafters of a planned load; `target` is the target's path, where it is on this machine."""
    stats = _load_stats(planned, target, hub)
    for each in planned.drafters:
        method = each.spec.name if each.head is None else each.head.kind
        yield Draft(
            method,
            _read_weights(each, given, registry, hub),
            _count_block(each.head),
            each.card.version if each.card is not None else None,
            planned.acceptance if method == "model" else None,
            read_measured(stats, each.spec.name) if stats is not None else None,
        )


def _count_block(head: HeadSpec | None) -> int | None:
    """The tokens that a head drafts at once; None for one that drafts them one by one."""
    if head is None or head.block_size == 1:
        return None
    return head.block_size if head.predicts_at_root else head.block_size - 1


def _read_weights(drafter: PlannedDrafter, given: str | None, registry: Registry, hub: Hub) -> Weights | None:
    model = drafter.model
    if model is None or drafter.is_in_target:
        return None
    weights = describe_weights(
        model.reference,
        registry,
        path=find_local(model.source, hub),
        metadata=model.metadata,
        given=given,
        is_head=drafter.spec.name != "model",
    )
    if drafter.card is None or weights.bits is not None or given is not None:
        return weights
    if isinstance(model.source, LocalMlx):  # an adapted version of 16 bits, which others load too
        return replace(weights, original=str(model.source.path.resolve()), known_from="its adapted version")
    return weights


def _load_stats(planned: Plan, target: Path | None, hub: Hub) -> DraftStats | None:
    """The newest statistics of this pair on this processor, under whatever settings; None where there are none."""
    paths = [find_local(each.model.source, hub) for each in planned.drafters if each.model is not None]
    here = [path for path in paths if path is not None]
    if target is None or len(here) < len(paths):
        return None
    versions = [f"version {each.card.version}" for each in planned.drafters if each.card is not None]
    try:
        return ProfileStore(target, here, "+".join(versions)).load_newest()
    except CacheError:
        return None


# What a user has to know of an export: figures, where they hold, and what stays behind.


_DEPTHS = 4  # of drafted tokens whose acceptance is shown


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
    yield from (f"Stays behind: {each}." for each in _list_lost(plan, engine, choice))
    if engine.backend is None:
        yield from plan.hints


def _describe_draft(draft: Draft, length: int | None, engine: Engine) -> Iterator[str]:
    name = draft.label
    if engine.backend is None and draft.weights is not None:
        name = f"{draft.weights.original} ({draft.method}; named by {draft.weights.known_from})"
        if draft.version is not None and not draft.weights.is_folder:
            yield (
                f"The draft in use is version {draft.version}, adapted on this machine; {engine.title} cannot load it "
                "and gets the draft that it was made from."
            )
    measured = draft.measured
    if length is None:
        yield f"Drafts: {name}, of lengths that {engine.title} finds."
    elif measured is not None and measured.length == length:
        yield (
            f"Drafts: {name}, {length} tokens: the fastest fixed length by what was measured here, "
            f"{measured.speedup:.2f} times plain decoding."
        )
    elif measured is not None and measured.length:
        yield f"Drafts: {name}, {length} tokens, those of its block; {measured.length} would be the fastest here."
    elif measured is not None:
        yield f"Drafts: {name}, {length} tokens, a usual number: here such drafts are not faster than plain decoding."
    elif length == draft.block:
        yield f"Drafts: {name}, {length} tokens, those of its block: not enough was measured here; see `edgespec tune`."
    else:
        yield f"Drafts: {name}, {length} tokens, a usual number: not enough was measured here; see `edgespec tune`."


def _describe_figures(draft: Draft, plan: ExportPlan, engine: Engine) -> Iterator[str]:
    measured = draft.measured
    if measured is not None:
        rate = measured.acceptance
        depths = ", ".join(f"{rate**depth:.0%}" for depth in range(1, _DEPTHS + 1))
        yield (
            f"Acceptance measured here ({measured.sampling}): {rate:.0%} of the tokens that follow accepted ones. At "
            f"that rate drafts are right up to tokens 1, 2, 3 and 4 in {depths} of the rounds."
        )
    elif draft.acceptance is not None:
        low, high = draft.acceptance
        yield f"Acceptance by the registry, of the quantized pair: {low:.0%} to {high:.0%} of the drafted tokens."
    if measured is not None or draft.acceptance is not None:
        where = f" ({plan.machine})" if measured is not None else ""
        others = ", and for the files in use, not for the original weights" if engine.backend is None else ""
        yield f"These figures are for one request at a time on one machine{where}{others}: measure again there."
    if engine.measure:
        yield f"To see the acceptance: {engine.measure}."


def _list_lost(plan: ExportPlan, engine: Engine, choice: Choice) -> Iterator[str]:
    """What edgespec does with the pair and the engine does not."""
    if choice.draft is None:
        return
    yield f"the autopilot; {engine.title} drafts also where that does not pay"
    yield "draft trees; a chain is exported"
    yield "earlier texts, and drafts that learn from answers"
    yield "tokens that a JSON schema forces, which edgespec drafts without a model"
