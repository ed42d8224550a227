"""The report on a planned model: memory, draft and expected speed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from edgespec.backends.options import RuntimeSettings
from edgespec.controller.cost_model import Profile
from edgespec.controller.store import SettingsStore
from edgespec.core.protocols import CheckCancelled
from edgespec.formats.gguf import Header
from edgespec.hub.cache import shorten_names
from edgespec.hub.errors import HubUnreachable
from edgespec.hub.hub import Hub
from edgespec.planner.memory import ModelFacts, describe_model, estimate_head
from edgespec.planner.plan import LoadConfig, Plan, Reporter, plan
from edgespec.planner.speed import (
    ASSUMED,
    SpeedEstimate,
    measure_speed,
    read_by_type,
)
from edgespec.registry.resolve import find_local
from edgespec.registry.schema import Acceptance, Registry
from edgespec.units import gib, significant

_TABLE_ROWS = (1, 4, 16)
_NOT_FORETOLD = {"drafts_not_foretold": "`edgespec draft build` and `edgespec bench` measure them after a download"}


def report_plan(
    request: LoadConfig,
    registry: Registry,
    hub: Hub,
    reporter: Reporter,
    check: CheckCancelled,
    report: Callable[[str], None] = lambda text: None,
    *,
    measure: bool = True,
) -> Iterator[dict[str, Any]]:
    """The facts of a plan, which `format_facts` shows: first without speeds, then with them if `measure`.

    `report` is told in words what is being done. Raises any EdgespecError, Cancelled.
    """
    try:
        planned = plan(request, registry, hub, reporter)
    except HubUnreachable as error:
        hint = f"{error.hint} `edgespec recommend` estimates the models of the registry without the hub."
        raise HubUnreachable(error.message, hint=hint) from error
    for told in planned.findings:
        reporter.notice(told)
    facts = describe_plan(planned) | _describe_settings(planned, hub)
    yield facts
    if measure:
        yield facts | _describe_speed(planned, check, report)


def describe_plan(planned: Plan) -> dict[str, Any]:
    """Memory, draft models and trained heads, which need no measurement."""
    fit, network = planned.fit, planned.network
    cards = [each.card for each in planned.drafters if each.card]
    return {
        "name": planned.name,
        "backend": planned.backend,
        "draft": "+".join(each.label for each in planned.drafters) or "none",
        "draft_models": [str(each.model.reference) for each in planned.drafters if each.model and not each.head],
        "heads": list(_describe_heads(planned)),
        "adapted_drafts": [
            {
                "base": card.base,
                "version": card.version,
                "date": card.date,
                "tokens_per_round": card.gain.after,
                "tokens_per_round_of_base": card.gain.before,
            }
            for card in cards
        ],
        "context": fit.context,
        "weights_bytes": fit.target.weights,
        "kv_bytes": fit.target.kv,
        "draft_bytes": fit.draft.total if fit.draft else 0,
        "needed_bytes": fit.needed,
        "free_bytes": fit.memory.usable,
        "fits": fit.headroom >= 0,
        "fits_without_draft": fit.target.total <= fit.memory.usable,
        **(network.to_dict() if network else {}),
    }


def _describe_heads(planned: Plan) -> Iterator[dict[str, Any]]:
    options, context = planned.options, planned.fit.context
    for each in planned.drafters:
        if each.head is not None and each.model is not None:
            cost = estimate_head(each.model.metadata, each.head, context, options.kv_type, options.caches)
            yield {
                "head": each.label,
                "kind": each.head.kind,
                "in_target": each.head.in_target,
                "weights_bytes": cost.weights,
                "kv_bytes": cost.kv,
                "scratch_bytes": cost.compute,
            }


def _describe_settings(planned: Plan, hub: Hub) -> dict[str, Any]:
    """The stored RuntimeSettings of a target on llama.cpp; None where they are not measured yet. Raises CacheError."""
    if planned.backend != "llamacpp":
        return {}
    path = find_local(planned.target, hub)
    stored = SettingsStore(path).load(planned.backend, planned.options) if path is not None else None
    return {"settings": stored.to_dict() if stored is not None else None}


def _describe_speed(planned: Plan, check: CheckCancelled, report: Callable[[str], None]) -> dict[str, Any]:
    """The expected speed, or `not_foretold` with the reason why there is none. Raises Cancelled."""
    models = {each.spec.name: each.model.metadata for each in planned.drafters if each.model is not None}
    draft = models.get("model")
    if not isinstance(planned.metadata, Header) or not (draft is None or isinstance(draft, Header)):
        return {"not_foretold": "only GGUF models can be measured"}
    target, drafted = describe_model(planned.metadata), read_by_type(draft) if draft is not None else {}
    speed = measure_speed({*target.read, *drafted}, report, check, planned.options)
    expected = speed.estimate(target.read, drafted)
    if expected is None:
        return {"not_foretold": "its type of weights could not be measured on this machine"}
    if planned.network is not None:
        expected = expected.with_network(planned.network.wait_s)
    facts = _describe_forwards(expected, target)
    if planned.self_draft is not None or (models and draft is None):
        return facts | _NOT_FORETOLD
    return facts | _describe_drafts(expected, planned.acceptance)


def _describe_forwards(expected: SpeedEstimate, model: ModelFacts) -> dict[str, Any]:
    """What forwards without drafts take, and what they read."""
    low, high = expected.plain
    read_bytes = sum(model.read.values())
    return {
        "plain_tokens_per_second": [float(f"{low:.3g}"), float(f"{high:.3g}")],
        "cost_of_rows": {n: round(s / expected.rows[1], 2) for n, s in expected.rows.items()},
        "bytes_per_token": round(read_bytes),
        "bytes_per_second": float(f"{read_bytes / expected.rows[1]:.3g}"),
        "mixture": model.mixture,
    }


def _describe_drafts(expected: SpeedEstimate, acceptance: Acceptance | None) -> dict[str, Any]:
    """What chains of drafts gain."""
    chains = {a: expected.speculative(a) for a in acceptance or ASSUMED}
    return {
        "drafted_token_cost": round(expected.draft_s / expected.rows[1], 3) if expected.draft_s else None,
        "acceptance_known": acceptance is not None,
        "speculation_pays_from_acceptance": expected.pays_from,
        "speedup_at_acceptance": {a: round(speedup, 2) for a, (_, speedup) in chains.items()},
        "drafts_at_acceptance": {a: depth for a, (depth, _) in chains.items()},
    }


def format_facts(facts: Mapping[str, Any]) -> Iterator[str]:
    """Lines of a name and a value, such as the text of `plan` and `show`."""
    names = {key: _name(key) for key in facts}
    width = max(map(len, names.values()))
    for key, value in facts.items():
        yield f"{names[key]:{width}}  {_format(key, value)}"


def _name(key: object) -> str:
    return str(key).replace("_", " ")


def _format(key: object, value: Any) -> str:
    """Numbers of bytes by their key, and what is in a table or a list with commas between."""
    if key == "settings":
        return "; ".join(RuntimeSettings.from_dict(value).describe()) if value else "not measured yet"
    if isinstance(value, Mapping):
        return ", ".join(f"{_name(name)}: {_format(name, each)}" for name, each in value.items())
    if isinstance(value, list | tuple):
        return "; ".join(_format(key, each) for each in value) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return gib(int(value)) if "bytes" in str(key) else significant(value)
    return "none" if value is None else shorten_names(value) if key in ("name", "draft") else str(value)


def format_costs(profile: Profile) -> Iterator[str]:
    """Lines of milliseconds of a forward by tokens of context and rows, with what was measured."""
    yield "milliseconds of a forward of n rows, by tokens of context:"
    for context, by_rows in {0: profile.rows, **{n: each.rows for n, each in profile.longer.items()}}.items():
        rows = "  ".join(f"{n}: {significant(s * 1e3)}" for n, s in by_rows.items() if n in _TABLE_ROWS)
        yield f"  {context:7,}  {rows}"
