"""The report on a planned model: memory, drafts and expected speed, as facts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from edgespec.autopilot.acceptance_record import AcceptanceRecord
from edgespec.autopilot.settings_store import SettingsStore
from edgespec.backends.options import LoadOptions
from edgespec.backends.settings import RuntimeSettings
from edgespec.formats.gguf import Header
from edgespec.formats.head_file import ModelMetadata
from edgespec.formats.heads import HeadSpec
from edgespec.machines.memory import RAM, split_places
from edgespec.models.checklist import Practice, list_practices
from edgespec.models.fit import MemoryEstimate, estimate_head
from edgespec.models.hub import Hub
from edgespec.models.learned import find_stats
from edgespec.models.load_config import LoadConfig
from edgespec.models.mlx_speed import measure_mlx_speed, to_kinds
from edgespec.models.plan import Plan, plan
from edgespec.models.registry import Acceptance, Registry
from edgespec.models.resolve import find_local, find_template
from edgespec.models.size_facts import ModelFacts, describe_model
from edgespec.models.speed import (
    ASSUMED,
    BLOCK,
    FORWARD,
    FasterType,
    SpeedEstimate,
    count_weights,
    find_similar,
    load_speed,
    measure_speed,
    read_by_type,
    share_of_long_blocks,
)
from edgespec.progress import notice
from edgespec.text.chat_template import profile_template

NOT_FORETOLD = "`edgespec draft build` and `edgespec bench` measure them"


@dataclass(frozen=True, slots=True)
class DraftSpeed:
    """What chains of drafts are expected to gain.

    alone       the same without the time of the network, if the model has workers
    acceptance  per token, the registry's figures; None if it has none
    """

    expected: SpeedEstimate
    alone: SpeedEstimate | None
    acceptance: Acceptance | None

    @property
    def token_cost(self) -> float | None:
        """Plain steps that a drafted token takes; None if drafts cost nothing."""
        return self.expected.draft_s / self.expected.rows[1] if self.expected.draft_s else None

    @property
    def rates(self) -> tuple[float, ...]:
        """The acceptance rates that gains are told for."""
        return tuple(self.acceptance or ASSUMED)

    @property
    def pays_when_free(self) -> float | None:
        """The acceptance from which drafts that cost nothing pay; None if none do."""
        return replace(self.expected, draft_s=None).pays_from

    def to_dict(self) -> dict[str, Any]:
        chains = {rate: self.expected.speculative(rate) for rate in self.rates}
        facts = {
            "drafted_token_cost": None if self.token_cost is None else round(self.token_cost, 3),
            "acceptance_known": self.acceptance is not None,
            "speculation_pays_from_acceptance": self.expected.pays_from,
            "pays_with_free_drafts_from": self.pays_when_free,
            "speedup_at_acceptance": {rate: round(speedup, 2) for rate, (_, speedup) in chains.items()},
            "drafts_at_acceptance": {rate: depth for rate, (depth, _) in chains.items()},
        }
        if self.alone is not None:
            facts["speedup_without_network"] = {r: round(self.alone.speculative(r)[1], 2) for r in self.rates}
        return facts


@dataclass(frozen=True, slots=True)
class Speed:
    """The expected speed of forwards, with `draft_speed`, or the reason `no_draft_speed` why there is none."""

    expected: SpeedEstimate
    model: ModelFacts
    faster: FasterType | None
    draft_speed: DraftSpeed | None = None
    no_draft_speed: str = ""

    @property
    def read_bytes(self) -> float:
        """Bytes of weights that a token reads."""
        return sum(n for kind, n in self.model.read.items() if kind not in (FORWARD, BLOCK))

    @property
    def operations_per_byte(self) -> float | None:
        weights = count_weights(self.model.read)
        return 2 * weights / self.read_bytes if weights else None

    @property
    def costs(self) -> dict[int, float]:
        """Plain steps that a forward takes, by its rows."""
        return {n: seconds / self.expected.rows[1] for n, seconds in self.expected.rows.items()}

    @property
    def faster_type(self) -> str | None:
        return None if self.faster is None else f"{self.faster}; look for a {self.faster.name} file of this model"

    def to_dict(self) -> dict[str, Any]:
        per_byte = self.operations_per_byte
        facts = {
            "plain_tokens_per_second": [float(f"{each:.3g}") for each in self.expected.plain],
            "cost_of_rows": {n: round(cost, 2) for n, cost in self.costs.items()},
            "bytes_per_token": round(self.read_bytes),
            "bytes_per_second": float(f"{self.read_bytes / self.expected.rows[1]:.3g}"),
            "operations_per_byte": None if per_byte is None else round(per_byte, 2),
            "mixture": self.model.mixture,
            "faster_type": self.faster_type,
        }
        drafts = self.draft_speed.to_dict() if self.draft_speed is not None else {}
        return facts | drafts | ({"drafts_not_foretold": self.no_draft_speed} if self.no_draft_speed else {})


@dataclass(frozen=True, slots=True)
class PlanReport:
    """A plan with what is known of its speed.

    heads     the trained heads among its drafters, with their memory
    settings  of llama.cpp, as measured; None before that, and on other runtimes
    speed     None if it is not asked for, or a reason why none can be told
    records   of its drafters in earlier answers, by their names
    """

    planned: Plan
    heads: tuple[tuple[str, HeadSpec, MemoryEstimate], ...]
    settings: RuntimeSettings | None
    speed: Speed | str | None = None
    records: Mapping[str, AcceptanceRecord] = field(default_factory=dict)

    @property
    def checklist(self) -> list[Practice]:
        """What decides whether drafts pay; empty without speeds."""
        if not isinstance(speed := self.speed, Speed):
            return []
        return list(list_practices(speed.expected, self.planned.fit, self.planned.drafters, self.records))

    @property
    def fits(self) -> bool:
        return self.planned.fit.fits

    @property
    def fits_without_draft(self) -> bool:
        return replace(self.planned.fit, draft=None).fits

    @property
    def draft_models(self) -> list[str]:
        return [str(each.model.reference) for each in self.planned.drafters if each.model and not each.head]

    @property
    def has_settings(self) -> bool:
        return self.planned.backend == "llamacpp"

    @property
    def lacking_here(self) -> int:
        """Bytes that this machine lacks, if workers have a part of the model."""
        return max(0, -self.planned.fit.own_headroom) if self.planned.network is not None else 0

    def to_dict(self) -> dict[str, Any]:
        """What `edgespec plan --json` states."""
        planned, fit, network = self.planned, self.planned.fit, self.planned.network
        facts: dict[str, Any] = {
            "name": planned.name,
            "backend": planned.backend,
            "draft": "+".join(each.label for each in planned.drafters) or "none",
            "draft_models": self.draft_models,
            "heads": [_describe_head(*each) for each in self.heads],
            "adapted_drafts": [
                {
                    "base": card.base,
                    "version": card.version,
                    "date": card.date,
                    "tokens_per_round": card.gain.after,
                    "tokens_per_round_of_base": card.gain.before,
                }
                for card in planned.cards
            ],
            "context": fit.context,
            "weights_bytes": fit.target.weights,
            "kv_bytes": fit.target.kv,
            "draft_bytes": fit.draft.total if fit.draft else 0,
            "needed_bytes": fit.needed,
            "free_bytes": fit.memory.usable,
            "fits": self.fits,
            "fits_without_draft": self.fits_without_draft,
            **({"lacking_here_bytes": self.lacking_here, **network.to_dict()} if network is not None else {}),
        }
        if self.has_settings:
            facts["settings"] = asdict(self.settings) if self.settings is not None else None
        if isinstance(self.speed, str):
            facts["not_foretold"] = self.speed
        if isinstance(self.speed, Speed):
            facts |= self.speed.to_dict() | {"checklist": [asdict(each) for each in self.checklist]}
        return facts


def report_plan(
    request: LoadConfig,
    registry: Registry,
    hub: Hub,
    report: Callable[[str], None] = lambda text: None,
    *,
    measure: bool = True,
) -> Iterator[PlanReport]:
    """The report on a plan: first without speeds, then with them if `measure`.

    `report` gets what is being done, in words. Raises any EdgespecError, Cancelled.
    """
    planned = plan(request, registry, hub)
    for told in (*planned.findings, *_find_tools_notice(planned)):
        notice(told)
    stats = find_stats(planned, hub)
    records = stats.records if stats is not None else {}
    found = replace(describe_plan(planned), settings=_load_settings(planned, hub), records=records)
    yield found
    if measure:
        yield replace(found, speed=_estimate_speed(planned, report))


def describe_plan(planned: Plan) -> PlanReport:
    """What needs no measurement and no look at the disk."""
    options, context = planned.options, planned.fit.context
    heads = tuple(
        (
            each.label,
            each.head,
            estimate_head(each.model.metadata, each.head, context, options.kv_type, options.caches),
        )
        for each in planned.drafters
        if each.head is not None and each.model is not None
    )
    return PlanReport(planned, heads, None)


def _find_tools_notice(planned: Plan) -> list[str]:
    """A sentence for those who will give tools to a model whose template has none."""
    source = find_template(planned.metadata)
    told = profile_template(source).tools_notice if source is not None else ""
    return [f"Tools: {told}"] if told else []


def _describe_head(label: str, head: HeadSpec, cost: MemoryEstimate) -> dict[str, Any]:
    return {
        "head": label,
        "kind": head.kind,
        "in_target": head.in_target,
        "weights_bytes": cost.weights,
        "kv_bytes": cost.kv,
        "scratch_bytes": cost.compute,
    }


def _load_settings(planned: Plan, hub: Hub) -> RuntimeSettings | None:
    """The stored settings of a target on llama.cpp; None if they are not measured yet. Raises CacheError."""
    path = find_local(planned.target, hub) if planned.backend == "llamacpp" else None
    return SettingsStore(path).load(planned.backend, planned.options) if path is not None else None


def _estimate_speed(planned: Plan, report: Callable[[str], None]) -> Speed | str:
    """The expected speed, or the reason why there is none. Raises Cancelled."""
    models = {each.spec.name: each.model.metadata for each in planned.drafters if each.model is not None}
    draft = models.get("model")
    if planned.backend == "mlx":
        return _estimate_mlx_speed(planned, report)
    if not isinstance(planned.metadata, Header):
        return "its runtime has none to measure"
    if planned.fit.memory.devices and _is_split(planned.options, planned.metadata):
        return "a part of it is on the GPU and the processor computes the rest"
    target, drafted = describe_model(planned.metadata), read_by_type(draft) if isinstance(draft, Header) else {}
    types = {*target.read, *find_similar(target.read), *drafted}
    machine = measure_speed(types, report, planned.options)
    alone = machine.estimate(target.read, drafted)
    if alone is None:
        return "its type of weights could not be measured on this machine"
    network = planned.network
    expected = alone.with_network(network.wait_s) if network is not None else alone
    speed = Speed(expected, target, machine.find_faster(target.read, target.long_blocks))
    is_apart = bool(planned.fit.memory.devices) and planned.options.gpu_layers_draft == 0  # rates are of one place
    drafts = DraftSpeed(expected, alone if network is not None else None, planned.acceptance)
    return _add_drafts(speed, drafts, planned, can_tell=not models or (draft is not None and not is_apart))


def _estimate_mlx_speed(planned: Plan, report: Callable[[str], None]) -> Speed | str:
    """`_estimate_speed` on MLX. Raises Cancelled."""
    models = {each.spec.name: each.model.metadata for each in planned.drafters if each.model is not None}
    draft = models.get("model")
    facts = describe_model(planned.metadata)
    target = replace(facts, read=to_kinds(facts.read))
    drafted = to_kinds(describe_model(draft).read) if draft is not None else {}
    expected = measure_mlx_speed({*target.read, *drafted}, report).estimate(target.read, drafted)
    if expected is None:
        return "its kind of weights could not be measured on this machine"
    drafts = DraftSpeed(expected, None, planned.acceptance)
    return _add_drafts(Speed(expected, target, None), drafts, planned, can_tell=not models or draft is not None)


def _add_drafts(speed: Speed, drafts: DraftSpeed, planned: Plan, *, can_tell: bool) -> Speed:
    if not planned.drafters:
        return speed
    if planned.self_draft is not None or not can_tell:
        return replace(speed, no_draft_speed=NOT_FORETOLD)
    return replace(speed, draft_speed=drafts)


def _is_split(options: LoadOptions, target: Header) -> bool:
    """Whether GPUs compute a part of the target's layers or experts, if no workers share it."""
    layers, count = options.gpu_layers, target.own("block_count") or 0
    has_some = layers is not None and 0 < layers <= count
    in_ram = bool(options.n_cpu_moe) or any(name == RAM for _, name in split_places(options.override_tensor))
    return not options.workers and (has_some or in_ram)


def describe_faster(target: ModelMetadata) -> str | None:
    """A sentence on another type of weights that would be much faster, at about the same size; None if none is.

    Only what is stored of this machine is used.
    """
    if not isinstance(target, Header):
        return None
    faster = load_speed().find_faster(read_by_type(target), share_of_long_blocks(target))
    return None if faster is None else f"{faster}; look for a {faster.name} file of this model"
