"""The report on a planned model: memory, draft and expected speed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from edgespec.autopilot.profile import Profile
from edgespec.autopilot.settings_store import SettingsStore
from edgespec.backends.options import LoadOptions
from edgespec.backends.settings import RuntimeSettings
from edgespec.formats.gguf import GGML_NAMES, Header
from edgespec.formats.head_file import ModelMetadata
from edgespec.machines.memory import RAM, split_places
from edgespec.models.fit import ModelFacts, describe_model, estimate_head
from edgespec.models.hub import Hub
from edgespec.models.load_config import LoadConfig
from edgespec.models.plan import Plan, plan
from edgespec.models.references import shorten_names
from edgespec.models.registry import Acceptance, Registry
from edgespec.models.resolve import find_local, find_template
from edgespec.models.speed import (
    ASSUMED,
    FasterType,
    SpeedEstimate,
    count_weights,
    find_similar,
    load_speed,
    measure_speed,
    read_by_type,
)
from edgespec.progress import notice
from edgespec.text.chat_template import profile_template
from edgespec.units import gib, significant

_TABLE_ROWS = (1, 4, 16)
_SLOW_DRAFT = 0.8  # from this cost on, a draft model is as slow as its target
_ROWS_PAY, _ROWS_COST = 1.5, 2.0  # plain steps of four rows
_NOT_FORETOLD = {"drafts_not_foretold": "`edgespec draft build` and `edgespec bench` measure them"}


def report_plan(
    request: LoadConfig,
    registry: Registry,
    hub: Hub,
    report: Callable[[str], None] = lambda text: None,
    *,
    measure: bool = True,
) -> Iterator[dict[str, Any]]:
    """The facts of a plan, which `format_plan` shows: first without speeds, then with them if `measure`.

    `report` is told in words what is being done. Raises any EdgespecError, Cancelled.
    """
    planned = plan(request, registry, hub)
    for told in (*planned.findings, *_find_tools_notice(planned)):
        notice(told)
    facts = describe_plan(planned) | _describe_settings(planned, hub)
    yield facts
    if measure:
        yield facts | _describe_speed(planned, report)


def _find_tools_notice(planned: Plan) -> list[str]:
    """A sentence for those who will give tools to a model whose template has none."""
    source = find_template(planned.metadata)
    notice = profile_template(source).tools_notice if source is not None else ""
    return [f"Tools: {notice}"] if notice else []


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
        "fits": fit.fits,
        "fits_without_draft": replace(fit, draft=None).fits,
        **({"lacking_here_bytes": max(0, -fit.own_headroom), **network.to_dict()} if network else {}),
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
    return {"settings": asdict(stored) if stored is not None else None}


def _describe_speed(planned: Plan, report: Callable[[str], None]) -> dict[str, Any]:
    """The expected speed, or `not_foretold` with the reason why there is none. Raises Cancelled."""
    models = {each.spec.name: each.model.metadata for each in planned.drafters if each.model is not None}
    draft = models.get("model")
    if planned.backend != "llamacpp" or not isinstance(planned.metadata, Header):
        return {"not_foretold": "only models on llama.cpp can be measured"}
    if planned.fit.memory.devices and _is_split(planned.options, planned.metadata):
        return {"not_foretold": "a part of it is on the GPU and the processor computes the rest"}
    target, drafted = describe_model(planned.metadata), read_by_type(draft) if isinstance(draft, Header) else {}
    types = {*target.read, *find_similar(target.read), *drafted}
    speed = measure_speed(types, report, planned.options)
    alone = speed.estimate(target.read, drafted)
    if alone is None:
        return {"not_foretold": "its type of weights could not be measured on this machine"}
    expected = alone.with_network(planned.network.wait_s) if planned.network is not None else alone
    facts = _describe_forwards(expected, target, speed.find_faster(target.read))
    if not planned.drafters:
        return facts
    is_apart = bool(planned.fit.memory.devices) and planned.options.gpu_layers_draft == 0
    if planned.self_draft is not None or (models and (draft is None or is_apart)):  # rates are those of one place
        return facts | _NOT_FORETOLD
    facts |= _describe_drafts(expected, planned.acceptance)
    if planned.network is not None:
        without = {a: round(alone.speculative(a)[1], 2) for a in planned.acceptance or ASSUMED}
        facts["speedup_without_network"] = without
    return facts


def _is_split(options: LoadOptions, target: Header) -> bool:
    """Whether GPUs compute a part of the target's layers or experts, where no workers share it."""
    layers, count = options.gpu_layers, target.own("block_count") or 0
    has_some = layers is not None and 0 < layers <= count
    in_ram = bool(options.n_cpu_moe) or any(name == RAM for _, name in split_places(options.override_tensor))
    return not options.workers and (has_some or in_ram)


def describe_faster(target: ModelMetadata) -> str | None:
    """A sentence on another type of weights that would be much faster, at about the same size; None where none is.

    Only what is stored of this machine is used.
    """
    faster = load_speed().find_faster(read_by_type(target)) if isinstance(target, Header) else None
    return None if faster is None else f"{faster}; look for a {faster.name} file of this model"


def _describe_forwards(expected: SpeedEstimate, model: ModelFacts, faster: FasterType | None) -> dict[str, Any]:
    """What forwards without drafts take, and what they read."""
    low, high = expected.plain
    read_bytes = sum(n for kind, n in model.read.items() if kind in GGML_NAMES)
    return {
        "plain_tokens_per_second": [float(f"{low:.3g}"), float(f"{high:.3g}")],
        "cost_of_rows": {n: round(s / expected.rows[1], 2) for n, s in expected.rows.items()},
        "bytes_per_token": round(read_bytes),
        "bytes_per_second": float(f"{read_bytes / expected.rows[1]:.3g}"),
        "operations_per_byte": round(2 * count_weights(model.read) / read_bytes, 2) if read_bytes else None,
        "mixture": model.mixture,
        "faster_type": None if faster is None else f"{faster}; look for a {faster.name} file of this model",
    }


def _describe_drafts(expected: SpeedEstimate, acceptance: Acceptance | None) -> dict[str, Any]:
    """What chains of drafts gain, and why they do not."""
    chains = {a: expected.speculative(a) for a in acceptance or ASSUMED}
    return {
        "drafted_token_cost": round(expected.draft_s / expected.rows[1], 3) if expected.draft_s else None,
        "acceptance_known": acceptance is not None,
        "speculation_pays_from_acceptance": expected.pays_from,
        "pays_with_free_drafts_from": replace(expected, draft_s=None).pays_from,
        "speedup_at_acceptance": {a: round(speedup, 2) for a, (_, speedup) in chains.items()},
        "drafts_at_acceptance": {a: depth for a, (depth, _) in chains.items()},
    }


def format_plan(facts: dict[str, Any]) -> Iterator[str]:
    yield f"{shorten_names(facts['name'])} on {facts['backend']}, drafted by {shorten_names(facts['draft'])}"
    yield from _format_memory(facts)
    yield from _format_speed(facts)


def _format_memory(facts: dict[str, Any]) -> Iterator[str]:
    scratch = facts["needed_bytes"] - facts["weights_bytes"] - facts["kv_bytes"] - facts["draft_bytes"]
    yield (
        f"  target: weights {gib(facts['weights_bytes'])}, "
        f"KV cache for {facts['context']:,} tokens {gib(facts['kv_bytes'])}, scratch memory {gib(scratch)}"
    )
    heads, parts = facts["heads"], ("weights_bytes", "kv_bytes", "scratch_bytes")
    heads_bytes = sum(head[part] for head in heads for part in parts)
    models = "draft models" if len(facts["draft_models"]) > 1 else "draft model"
    if facts["draft_models"]:
        yield f"  {models}: {gib(facts['draft_bytes'] - heads_bytes)} (weights, KV cache, scratch memory)"
    for head in heads:
        place = "in the target's file" if head["in_target"] else f"weights {gib(head['weights_bytes'])}"
        states = " and states" if facts["backend"] == "mlx" else ""
        cache = f"KV cache{states} {gib(head['kv_bytes'])}"
        yield f"  {head['kind']} head: {place}, {cache}, scratch memory {gib(head['scratch_bytes'])}"
    for version in facts["adapted_drafts"]:
        rounds = f"{version['tokens_per_round']:.2f}, before {version['tokens_per_round_of_base']:.2f}"
        yield f"  draft adapted on {version['date']} (version {version['version']}): tokens per round {rounds}"
    if "settings" in facts:
        stored = facts["settings"]
        lines = RuntimeSettings.from_dict(stored).describe() if stored else ["settings of llama.cpp: not measured yet"]
        yield from (f"  {line}" for line in lines)
    fits = "fits" if facts["fits"] else "DOES NOT FIT"
    yield f"  {fits}: needs {gib(facts['needed_bytes'])} of {gib(facts['free_bytes'])} free"
    if facts.get("lacking_here_bytes"):
        yield f"  this machine lacks {gib(facts['lacking_here_bytes'])} for its layers and the drafts"
    if not facts["fits"] and facts["fits_without_draft"]:
        added = " and ".join([models] * bool(facts["draft_models"]) + ["head"] * bool(heads))
        yield f"  fits without the {added}, which --draft auto leaves out"
        yield "  --draft ngram needs no memory, --draft layerskip:2 that of the target's first two layers"
    if "workers" in facts:
        yield from _format_workers(facts)


def _format_speed(facts: dict[str, Any]) -> Iterator[str]:
    if "plain_tokens_per_second" not in facts:
        yield "  speed: no estimate" + (f", since {facts['not_foretold']}" if "not_foretold" in facts else "")
        return
    low, high = facts["plain_tokens_per_second"]
    condition = "" if facts["fits"] else " with enough memory"
    yield f"  plain decoding{condition}: {significant(low)} to {significant(high)} tokens/s"
    if facts["operations_per_byte"]:
        rate, each = facts["bytes_per_second"] / 1e9, facts["operations_per_byte"]
        yield (
            f"  a token reads {gib(facts['bytes_per_token'])} of weights: {significant(rate)} GB/s, "
            f"{each:.1f} operations a byte, and n times as many in a forward of n rows"
        )
    if facts["faster_type"]:
        yield f"  {facts['faster_type']}"
    costs = "  ".join(f"{n}: {cost:.2f}" for n, cost in facts["cost_of_rows"].items())
    yield f"  cost of a forward of n rows, T(n), in plain steps: {costs}"
    yield from _judge_rows(facts["cost_of_rows"])
    if facts["mixture"]:
        yield "  estimated with the same experts for all rows; rows that route to other experts cost more"
    if "drafts_not_foretold" in facts:
        yield f"  drafts: {facts['drafts_not_foretold']}"
    elif "speedup_at_acceptance" in facts:
        yield from _format_drafts(facts)


def _format_drafts(facts: dict[str, Any]) -> Iterator[str]:
    cost = facts["drafted_token_cost"]
    if cost is not None:
        yield f"  cost of a draft token, c, in plain steps: {cost:.3f}"
    registered = ("the registry's low figure", "the registry's high figure")
    sources = registered if facts["acceptance_known"] else ("assumed", "assumed")
    for (acceptance, speedup), source in zip(facts["speedup_at_acceptance"].items(), sources, strict=False):
        depth = facts["drafts_at_acceptance"][acceptance]
        result = f"{speedup:.2f}x plain with drafts of {depth}" if depth else "no draft pays"
        if "speedup_without_network" in facts:
            result += f"; without the network's time {facts['speedup_without_network'][acceptance]:.2f}x"
        yield f"  if {float(acceptance):.0%} of draft tokens are accepted ({source}): {result}"
    if facts["speculation_pays_from_acceptance"] is not None:
        yield f"  speculation pays from an acceptance of {facts['speculation_pays_from_acceptance']:.0%}"
    elif facts["pays_with_free_drafts_from"] is not None:
        slow = "is as slow as its target" if cost >= _SLOW_DRAFT else "is too slow for its target"
        free = f"drafts that cost nothing, such as n-grams, pay from {facts['pays_with_free_drafts_from']:.0%}"
        yield f"  speculation cannot pay with this draft model, which {slow}; {free}"
    else:
        yield "  speculation cannot pay with this type of weights on this machine"


def _judge_rows(costs: Mapping[Any, float]) -> Iterator[str]:
    """What four rows say of drafts; `costs` by rows, whose keys are text after a way through JSON."""
    four = {int(n): cost for n, cost in costs.items()}.get(4)
    if four is not None and four > _ROWS_COST:
        yield "  four rows cost much more than one: computing takes the time here, and drafts save only reading"
    elif four is not None and four < _ROWS_PAY:
        yield "  four rows cost little more than one: reading the weights takes the time here, and drafts save that"


def _format_workers(facts: dict[str, Any]) -> Iterator[str]:
    yield f"  layers: {facts['layers_here']} here"
    for worker in facts["workers"]:
        memory = "this machine's memory" if worker["is_this_machine"] else f"{gib(worker['free_bytes'])} free"
        trip = f"round trip {significant(worker['round_trip_ms'])} ms"
        yield f"          {worker['layers']} on {worker['address']} ({memory}, {trip})"
    wait, row = significant(facts["network_ms"]), facts["network_bytes_per_row"] / 1024
    yield f"  network: {wait} ms in every forward, however many rows it has, and {row:.0f} KiB for each row"


def format_facts(facts: Mapping[str, Any]) -> Iterator[str]:
    """Lines of a name and a value, such as the text of `show`."""
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
