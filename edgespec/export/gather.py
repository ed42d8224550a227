"""The pair that `edgespec chat MODEL` would use, with what is known of it. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from edgespec.autopilot.store import processor_name
from edgespec.export.measured import read_measured
from edgespec.export.paired import list_paired, require_pair
from edgespec.export.plan import Draft, ExportPlan, Weights
from edgespec.export.weights import describe_weights
from edgespec.formats.heads import HeadSpec
from edgespec.models.draft_words import AUTO
from edgespec.models.drafts import DrafterPlan
from edgespec.models.hub import Hub
from edgespec.models.learned import find_stats
from edgespec.models.load_config import LoadConfig
from edgespec.models.plan import Plan, plan
from edgespec.models.references import Alias, parse_reference
from edgespec.models.registry import Registry
from edgespec.models.resolve import LocalModel, find_local, is_here
from edgespec.models.target import choose_backend

_PREFERENCE = (
    "eagle3", "dspark", "dflash", "mtp", "gemma4-assistant", "eagle", "medusa", "hydra", "pard", "model", "self",
    "ngram", "suffix",
)  # fmt: skip


def gather(
    request: LoadConfig, registry: Registry, hub: Hub, target_id: str | None, draft_id: str | None
) -> ExportPlan:
    """What to export. `target_id` and `draft_id` name the original weights, if the user has named them.

    An alias whose files are not on this machine is taken from the registry, without the network.

    Raises UnknownModel, HubError, InvalidModelFile, DraftRefused, InvalidRequest.
    """
    backend = choose_backend(request, registry, hub)
    reference = parse_reference(request.model or registry.default)
    entry = registry.get(reference.name) if isinstance(reference, Alias) else None
    pair = require_pair(entry, backend) if entry is not None else None
    if entry is not None and pair is not None and not is_here(pair.target, hub):
        target = describe_weights(pair.target, registry, given=target_id)
        drafts = tuple(list_paired(pair, backend, registry, request.draft, draft_id))
        name = entry.alias
    else:
        planned = plan(replace(request, backend=backend, force=True), registry, hub)
        named = pair.target if pair is not None else reference
        path = find_local(planned.target, hub)
        target = describe_weights(named, registry, path=path, metadata=planned.metadata, given=target_id)
        drafts = tuple(_read_plan(planned, draft_id, registry, hub))
        name = planned.name
    ranked = sorted(drafts, key=lambda each: (*_PREFERENCE, each.method).index(each.method))
    return ExportPlan(name, backend, target, tuple(ranked), request.draft == AUTO, processor_name())


def _read_plan(planned: Plan, given: str | None, registry: Registry, hub: Hub) -> Iterator[Draft]:
    """The drafters of a planned load."""
    stats = find_stats(planned, hub)
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


def _read_weights(drafter: DrafterPlan, given: str | None, registry: Registry, hub: Hub) -> Weights | None:
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
    is_own = drafter.card is not None and not weights.is_quantized and given is None
    if is_own and isinstance(model.source, LocalModel) and model.source.kind == "mlx":  # an adapted version, of 16 bits
        return replace(weights, original=str(model.source.path.resolve()), known_from="its adapted version")
    return weights
