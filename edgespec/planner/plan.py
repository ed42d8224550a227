"""Plan a load before any weights: resolve target and draft, check files, tokenizers and memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from edgespec.backends import BackendName, FileBackend, open_tokenizer, prefers_mlx
from edgespec.backends.attached_draft import SelfDraftSpec
from edgespec.backends.devices import DeviceMemory, Memory, split_shares
from edgespec.backends.llamacpp.rpc import Split, split_layers
from edgespec.backends.options import DEFAULT_CONTEXT, LoadOptions
from edgespec.backends.ranks import count_ranks
from edgespec.backends.workers import Worker, find_workers
from edgespec.core.protocols import CheckCancelled
from edgespec.engine.drafting import Rule
from edgespec.errors import DoesNotFit, HubError, InvalidModelFile, InvalidRequest, UnknownModel
from edgespec.formats.gguf import Header
from edgespec.formats.head_file import ModelMetadata
from edgespec.hub.cache import Alias, HubFile, HubQuant, HubReference, HubRepo, parse_reference
from edgespec.hub.errors import HubUnreachable
from edgespec.hub.hub import Hub
from edgespec.memory.store import DEFAULT_LIMIT_BYTES
from edgespec.planner.draft_finder import (
    AUTO,
    DraftFinder,
    PlannedDrafter,
    PlannedModel,
    describe_version,
    parse_draft,
    use_adapted,
)
from edgespec.planner.heads import KIND_NAMES, find_head, naming_heads
from edgespec.planner.memory import Fit, Placement, check_fit, place_layers, read_memory, score_bytes, shares_context
from edgespec.registry.resolve import Source, detect_backend, fetch_source, read_metadata, resolve_pair
from edgespec.registry.schema import Acceptance, Entry, Registry, SamplingDefaults
from edgespec.text.tokenizer import Tokenizer
from edgespec.units import count

PROCESS_BYTES = 128 * 2**20
"""What the interpreter and a runtime take beside a model: 75 MiB with llama.cpp, 110 with MLX."""

# What a model's workers add: memory, the split of its layers, and the network's part of a forward.


_FLOAT = 4  # bytes of a number between layers


@dataclass(frozen=True, slots=True)
class Network:
    """Workers that have answered, and what they compute.

    Every device with layers adds a round trip to a forward, whatever the number of its rows: llama.cpp sends the rows
    and the graph without a wait, and asks for the result.
    """

    workers: tuple[Worker, ...]
    split: Split
    row_bytes: int

    @property
    def wait_s(self) -> float:
        """Seconds that the round trips add to a forward."""
        used = zip(self.workers, self.split.workers, strict=True)
        return sum(worker.round_trip_s * sum(n > 0 for n in counts) for worker, counts in used)

    def describe(self) -> str:
        return f"{self.split.describe(self.workers)}; the network adds {self.wait_s * 1e3:.2g} ms to a forward."

    def to_dict(self) -> dict[str, Any]:
        """Returns what `edgespec plan --json` states."""
        return {
            "layers_here": self.split.here,
            "workers": [
                {
                    "address": worker.address,
                    "layers": layers,
                    "free_bytes": worker.free,
                    "is_this_machine": worker.is_here,
                    "round_trip_ms": round(worker.round_trip_s * 1e3, 3),
                }
                for worker, layers in zip(self.workers, self.split.remote, strict=True)
            ],
            "network_ms": round(self.wait_s * 1e3, 3),
            "network_bytes_per_row": self.row_bytes,
        }


def find_network(
    options: LoadOptions, backend: FileBackend, target: ModelMetadata, memory: Memory, known: Network | None = None
) -> tuple[Network | None, Memory]:
    """The workers of `options`, and `memory` with theirs; those of `known` are not asked again.

    Raises InvalidRequest, BackendError.
    """
    if not options.workers:
        return None, memory
    if backend != "llamacpp" or not isinstance(target, Header):
        raise InvalidRequest(
            "workers compute with llama.cpp, not MLX.", hint="Drop --workers, or add --backend llamacpp."
        )
    workers = known.workers if known is not None else find_workers(options.workers)
    split = split_layers(target.own("block_count") or 0, workers, memory, options.gpu_layers)
    row_bytes = split.hops * 2 * _FLOAT * (target.own("embedding_length") or 0)
    lent = (
        DeviceMemory(worker.address, free, total, shares_ram=worker.is_here)
        for worker in workers
        for free, total in worker.devices
    )
    return known or Network(workers, split, row_bytes), replace(memory, devices=(*memory.devices, *lent), limit=None)


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """The folder of earlier texts, and how many bytes of them are kept at most.

    keeps_caches  whether the KV caches of texts are kept in files when a model is closed
    """

    folder: Path
    limit_bytes: int = DEFAULT_LIMIT_BYTES
    keeps_caches: bool = True


@dataclass(frozen=True, slots=True)
class LearnOptions:
    """When the draft of an open model is trained on the newest texts.

    new_tokens  of answers that have been stored since the last training
    idle_s      seconds for which the engine has been idle
    minutes     of a training at most
    training    further options of `edgespec adapt`
    """

    new_tokens: int = 4000
    idle_s: float = 10.0
    minutes: float = 10.0
    training: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """What to load.

    model       a reference, or None for the registry's default
    backend     None: the best for this machine
    draft       'auto' (all drafters that are available), 'none', or drafters as draft_finder.parse_draft takes them
    draft_max   maximum draft depth; None: the autopilot decides
    draft_tree  maximum draft tokens in all; None: as many as draft_max, a chain
    acceptance  the acceptance rule, see engine.drafting.Speculation
    is_paused   nothing is drafted until `/spec on`
    max_bytes   that the process of the model may take; None: what is free
    force       load even if it does not fit in memory
    fetch_heads  'auto' takes the head that the registry pairs with the target even if it is not downloaded yet
    memory      where earlier texts are kept; None: they are not, and nothing drafts from them
    adapted     the folder of drafts that were adapted to their user; None: they are not used
    learn       when the draft is trained while the engine is idle; None: it is not
    """

    model: str | None = None
    backend: BackendName | None = None
    draft: str = "auto"
    draft_max: int | None = None
    draft_tree: int | None = None
    acceptance: Rule = "auto"
    is_paused: bool = False
    load: LoadOptions = field(default_factory=LoadOptions)
    max_bytes: int | None = None
    force: bool = False
    fetch_heads: bool = False
    memory: MemoryOptions | None = None
    adapted: Path | None = None
    learn: LearnOptions | None = None


class Reporter(Protocol):
    """Receives the progress of a load."""

    def notice(self, text: str) -> None:
        """One sentence for the user, such as why a draft was rejected."""

    def download(self, name: str, done: int, total: int) -> None:
        """`done` of `total` bytes of a file are downloaded."""

    def loading(self, name: str, fraction: float) -> None:
        """`fraction` of a model is loaded, 0.0 to 1.0."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be loaded.

    drafters    none: plain decoding
    options     with a definite context size
    acceptance  the registry's figures for `draft`, if it is the draft model that the registry pairs with the target
    network     the workers that compute a part of the target; None without them
    """

    name: str
    backend: FileBackend
    target: Source
    drafters: tuple[PlannedDrafter, ...]
    options: LoadOptions
    sampling: SamplingDefaults
    metadata: ModelMetadata
    fit: Fit
    acceptance: Acceptance | None = None
    network: Network | None = None

    @property
    def models(self) -> list[PlannedModel]:
        """The draft models and trained heads; the target itself for a head in its own file."""
        return [each.model for each in self.drafters if each.model is not None]

    @property
    def sources(self) -> list[Source]:
        """What has to be downloaded, each once: a head may be in the target's own file."""
        return list(dict.fromkeys([self.target, *(each.source for each in self.models)]))

    @property
    def alone(self) -> Plan:
        """The same for models that this machine computes alone: drafts."""
        return replace(self, options=self.options.alone, network=None)

    @property
    def findings(self) -> list[str]:
        """Sentences that say which heads 'auto' has found, and which adapted drafts are used; a load says them too."""
        cards = [each.card for each in self.drafters if each.card is not None]
        return [*(each.found for each in self.drafters if each.found), *map(describe_version, cards)]

    @property
    def self_draft(self) -> SelfDraftSpec | None:
        """How the target drafts for itself, if that was asked for."""
        return next((each.self_draft for each in self.drafters if each.self_draft is not None), None)


def plan(
    request: LoadConfig,
    registry: Registry,
    hub: Hub,
    reporter: Reporter,
    *,
    opened: Plan | None = None,
    stays: bool = False,
) -> Plan:
    """Choose the runtime, resolve the models, read their headers, compare tokenizers, check memory.

    `opened` is that of a model that is open, whose memory counts as free. Where it `stays`, it is the target itself,
    which keeps its caches, layers and workers; else it will have been closed before the load.

    Raises UnknownModel, HubError, InvalidModelFile, DraftRefused, DoesNotFit.
    """
    reference = parse_reference(request.model or registry.default)
    with naming_heads(reference), _naming_entry(request, registry):
        backend = choose_backend(request, registry, hub)
        resolved = resolve_pair(request.model, backend, registry, hub)
        facts = read_metadata(resolved.target, hub, reporter.download)
    own_head = find_head(facts)
    if own_head is not None and not own_head.in_target:
        raise InvalidModelFile(
            f"{reference} is {KIND_NAMES[own_head.kind]}; it drafts for a model and writes no text by itself.",
            hint="Name the model that it was trained for.",
        )
    target = PlannedModel(reference, resolved.target, facts)
    finder = DraftFinder(request, backend, target, own_head, resolved, registry, hub)
    is_auto = request.draft == AUTO
    drafters = finder.find_all(reporter.notice) if is_auto else list(map(finder.find, parse_draft(request.draft)))
    if request.adapted is not None:
        drafters = use_adapted(drafters, target, request.adapted, hub, reporter.notice)
    options = _set_context_size(request.load, facts, reporter)
    if opened is not None and stays:
        options = replace(options, caches=opened.options.caches)
    limit = None if request.max_bytes is None else max(0, request.max_bytes - PROCESS_BYTES)
    own = replace(read_memory(backend, request.load.device), limit=limit, process=PROCESS_BYTES)
    if backend == "llamacpp":
        split_shares(options.tensor_split, len(own.devices))  # refuses more than there are GPUs
    if request.load.gpu_layers == 0:
        own = replace(own, devices=())
    if opened is not None:
        own = _free(own, opened.fit, stays)
    network, memory = find_network(options, backend, facts, own, opened.network if opened else None)
    least = options.caches if stays else 1
    part = None if network is None else (_without_ram(own, options), network.split.share)
    drafters, fit = _check_memory(request, options, memory, facts, drafters, reporter, part, least)
    options = _keep_flash_attention(replace(options, caches=fit.caches), facts, fit)
    if network is None:
        options = _place(options, facts, fit, reporter, opened.options if opened is not None and stays else None)
    options = replace(options, mtp=backend == "llamacpp" and any(each.is_in_target for each in drafters))
    drafts = [each.model.reference for each in drafters if each.model and each.spec.name == "model"]
    acceptance = resolved.models.acceptance if resolved.models.draft in drafts else None
    sampling = resolved.sampling
    return Plan(
        resolved.name, backend, resolved.target, tuple(drafters), options, sampling, facts, fit, acceptance, network
    )


def fetch(source: Source, hub: Hub, reporter: Reporter, check: CheckCancelled = lambda: None) -> Path:
    """The file to load, downloaded if necessary. Raises HubError, CacheError, InvalidModelFile, Cancelled."""

    def progress(name: str, done: int, total: int) -> None:
        check()
        reporter.download(name, done, total)

    return fetch_source(source, hub, progress)


def fetch_all(
    request: LoadConfig, registry: Registry, hub: Hub, reporter: Reporter, check: CheckCancelled
) -> list[Path]:
    """Download what `request` names and what drafts for it. Memory is not checked: a load does that.

    Raises UnknownModel, HubError, CacheError, InvalidModelFile, DraftRefused, Cancelled.
    """
    planned = plan(replace(request, force=True, fetch_heads=True), registry, hub, reporter)
    return [fetch(source, hub, reporter, check) for source in planned.sources]


def choose_backend(request: LoadConfig, registry: Registry, hub: Hub) -> FileBackend:
    """The requested runtime, else MLX on Apple Silicon if it is installed and has the model, else llama.cpp.

    Raises UnknownModel, HubError.
    """
    if request.backend in ("llamacpp", "mlx"):
        return request.backend
    if request.load.workers:
        return "llamacpp"
    return detect_backend(request.model, registry, hub, prefer_mlx=prefers_mlx())


def _set_context_size(options: LoadOptions, facts: ModelMetadata, reporter: Reporter) -> LoadOptions:
    trained = max(facts.trained_context or DEFAULT_CONTEXT, 8)
    size = options.context_for(trained)
    if size > trained:
        reporter.notice(f"The model was trained for {trained:,} tokens; beyond them its answers lose quality.")
    return replace(options, context_size=size)


def _free(own: Memory, opened: Fit, stays: bool) -> Memory:
    """`own`, this machine's memory, as it was before a model was opened; its devices as they were then.

    Where the model `stays`, its mapped weights count as available RAM already.
    """
    memory, share = opened.own or (opened.memory, 1.0)
    in_ram = max(0, opened.needed_here - memory.own_device_bytes)
    if stays and in_ram:
        in_ram = int(share * (opened.target.total - opened.target.weights) * in_ram / opened.needed_here)
    known = {device.name: device for device in memory.devices}
    devices = tuple(known.get(device.name, device) for device in own.devices)
    return replace(own, ram_available=own.ram_available + in_ram, devices=devices)


def _without_ram(own: Memory, options: LoadOptions) -> Memory:
    """`own` as far as it holds layers beside workers: GPUs, where there are any, take all of this machine's part."""
    return replace(own, ram_available=0) if options.gpu_layers is None and own.own_devices else own


def _place(
    options: LoadOptions, target: ModelMetadata, fit: Fit, reporter: Reporter, opened: LoadOptions | None
) -> LoadOptions:
    """`options` with the layers that accelerators have memory for, where the user has not set them, or as they are in a
    target that is `opened` already. A draft for which a target would have to make room is in RAM.
    """
    chosen = (options.gpu_layers, options.n_cpu_moe, options.tensor_split, options.override_tensor)
    if not isinstance(target, Header) or any(each is not None for each in chosen):
        return options
    alone, flash = replace(fit, draft=None), bool(options.flash_attention) or options.kv_type != "f16"
    placed = beside = place_layers(target, fit if options.gpu_layers_draft != 0 else alone, flash=flash)
    may_move = options.gpu_layers_draft is None and fit.draft is not None and fit.draft.weights > 0
    if opened is not None:
        placed = Placement(opened.gpu_layers, opened.n_cpu_moe, split_shares(opened.tensor_split) or None)
    elif may_move:
        placed = place_layers(target, alone, flash=flash)
    if may_move and beside != placed:
        reporter.notice("The draft stays in RAM, since the GPU has no memory for it beside the model.")
        options = replace(options, gpu_layers_draft=0)
    count = target.own("block_count") or 0
    if opened is None and placed.layers is not None:
        there = max(placed.layers - 1, 0)  # the output matrix counts as one
        reporter.notice(f"The GPU has memory for {there} of {count} layers; the processor computes the rest.")
    if opened is None and placed.in_ram is not None:
        experts = f"the experts of {placed.in_ram} of {count} layers"
        reporter.notice(f"The GPU has no memory for {experts}; they stay in RAM.")
    shares = None if placed.shares is None else ",".join(map(str, placed.shares))
    return replace(options, gpu_layers=placed.layers, n_cpu_moe=placed.in_ram, tensor_split=shares)


def _is_together(options: LoadOptions, target: ModelMetadata) -> bool:
    """Whether all caches of `target` are in one llama.cpp context."""
    return shares_context(target) and not options.exact


def _keep_flash_attention(options: LoadOptions, target: ModelMetadata, fit: Fit) -> LoadOptions:
    """`options` with flash attention on where there is no memory for what a processor holds without it: by default it
    is turned off where that was measured to be faster.
    """
    scores = (1 if _is_together(options, target) else fit.caches) * score_bytes(target, fit.context)
    if options.flash_attention is None and not fit.memory.devices and scores > max(fit.headroom, 0):
        return replace(options, flash_attention=True)
    return options


def _check_memory(
    request: LoadConfig,
    options: LoadOptions,
    memory: Memory,
    target: ModelMetadata,
    drafters: list[PlannedDrafter],
    reporter: Reporter,
    own: tuple[Memory, float] | None,
    least: int,
) -> tuple[list[PlannedDrafter], Fit]:
    """The drafters, and the fit. So that the target fits, 'auto' drops draft models, the last one first; then there are
    fewer KV caches, `least` at least.

    `own` as in `check_fit`. Raises DoesNotFit.
    """
    context = options.context_size
    assert context is not None  # set by _set_context_size
    caches = options.caches
    while True:
        models = [each for each in drafters if each.model is not None]
        try:
            fit = check_fit(
                target,
                [(each.model.metadata, each.head) for each in models if each.model is not None],
                context=context,
                memory=memory,
                own=own,
                kv_type=options.kv_type,
                caches=caches,
                flash=options.flash_attention is not False,
                together=_is_together(options, target),
                ranks=count_ranks(),
                force=request.force,
            )
        except DoesNotFit:
            if models and request.draft == AUTO:
                reporter.notice(f"Drafting without {models[-1].label}: it does not fit in memory with the target.")
                drafters = [each for each in drafters if each is not models[-1]]
            elif caches > least:
                caches -= 1
            else:
                raise
        else:
            if caches < options.caches:
                reporter.notice(
                    f"Memory holds {count(caches, 'KV cache')} of {context:,} tokens, not {options.caches}."
                    " A smaller --ctx allows more."
                )
            return drafters, fit


def resolve_download(request: LoadConfig, registry: Registry, hub: Hub) -> HubReference:
    """The model of the hub that `request` names; an alias names its target alone. Raises UnknownModel, HubError."""
    reference = parse_reference(request.model or "")
    if isinstance(reference, Alias):
        pair = registry.get(reference.name).pair(choose_backend(request, registry, hub))
        reference = pair.target if pair else reference
    if not isinstance(reference, HubRepo | HubQuant | HubFile):
        raise UnknownModel(
            f"{request.model} is not a downloaded model.", hint="`edgespec list` shows the downloaded models."
        )
    return reference


class Quiet:
    """A Reporter that says nothing."""

    def notice(self, text: str) -> None: ...

    def download(self, name: str, done: int, total: int) -> None: ...

    def loading(self, name: str, fraction: float) -> None: ...


# What is known of a model on this machine before it is opened.


def check_target(request: LoadConfig, registry: Registry, hub: Hub) -> None:
    """Raise UnknownModel, InvalidModelFile, BackendUnavailable or CacheError for a model that no load could open, as
    far as that is known without the network: a model that is not downloaded may still be.
    """
    with suppress(HubError):
        if request.backend != "toy":
            _find_target(request, registry, hub)


@contextmanager
def _naming_entry(request: LoadConfig, registry: Registry) -> Iterator[None]:
    """An unreachable hub is told with what an alias stands for, and with what answers without a network."""
    try:
        yield
    except HubUnreachable as error:
        name = request.model or registry.default
        entry = registry.entries.get(name)
        if entry is None:
            raise
        raise HubUnreachable(
            f"{name} is {_list_files(entry)}, not downloaded yet: {error.message}",
            hint=f"`edgespec plan {name}` tells without a network what to expect of it.",
        ) from error


def _list_files(entry: Entry) -> str:
    """The target and the draft model of an alias, and the number of its parameters."""
    pair = entry.gguf or entry.mlx
    assert pair is not None
    size = f" ({entry.about.parameters:g} billion parameters)" if entry.about.parameters else ""
    return f"{pair.target}{size} with the draft {pair.draft}" if pair.draft else f"{pair.target}{size}"


def _find_target(request: LoadConfig, registry: Registry, hub: Hub) -> tuple[FileBackend, Source]:
    """The runtime and the target, whose metadata were checked; no request is sent."""
    offline = replace(hub, offline=True)
    backend = choose_backend(request, registry, offline)
    target = resolve_pair(request.model, backend, registry, offline).target
    read_metadata(target, offline)
    return backend, target


@contextmanager
def open_vocabulary(request: LoadConfig, registry: Registry, hub: Hub) -> Iterator[Tokenizer]:
    """The tokenizer of the target that `request` names, valid inside of the block. Sends no request.

    Raises UnknownModel, also for a model that is not downloaded, InvalidModelFile, BackendUnavailable, CacheError.
    """
    try:
        backend, target = _find_target(request, registry, hub)
        path = fetch_source(target, replace(hub, offline=True))
    except HubUnreachable as error:
        command = f"edgespec pull {request.model}"
        raise UnknownModel(f"{request.model} is not downloaded.", hint=f"Run `{command}` first.") from error
    with open_tokenizer(backend, path) as tokenizer:
        yield tokenizer
