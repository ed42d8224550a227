"""Plan a load before any weights: resolve target and draft, check files, tokenizers and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from edgespec.backends import FileBackend
from edgespec.backends.attached_draft import SelfDraftSpec
from edgespec.backends.options import DEFAULT_CONTEXT, LoadOptions
from edgespec.drafters.registry import LOOKUPS
from edgespec.errors import DoesNotFit, InvalidModelFile, UnknownModel
from edgespec.formats.gguf import Header
from edgespec.formats.head_file import ModelMetadata
from edgespec.machines.memory import Memory, split_shares
from edgespec.machines.ranks import count_ranks
from edgespec.models.adapted import describe_version, use_adapted
from edgespec.models.draft_finder import DraftFinder
from edgespec.models.draft_words import AUTO, parse_draft
from edgespec.models.drafts import DrafterPlan, PlannedModel
from edgespec.models.fit import Fit, check_fit, estimate_memory, read_memory, score_bytes, shares_context
from edgespec.models.gpu_layers import Placement, place_layers
from edgespec.models.heads import KIND_NAMES, find_head, naming_heads
from edgespec.models.hub import Hub
from edgespec.models.load_config import LoadConfig
from edgespec.models.network import PROCESS_BYTES, Network, find_network
from edgespec.models.references import Alias, HubFile, HubQuant, HubReference, HubRepo, parse_reference
from edgespec.models.registry import Acceptance, Registry, SamplingDefaults
from edgespec.models.resolve import Source, fetch_source, read_metadata, resolve_pair
from edgespec.models.target import choose_backend, naming_entry
from edgespec.models.versions import Card
from edgespec.progress import notice
from edgespec.units import count


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
    drafters: tuple[DrafterPlan, ...]
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
        """Sentences on the heads that 'auto' found and the adapted drafts in use; loading reports them too."""
        return [*(each.found for each in self.drafters if each.found), *map(describe_version, self.cards)]

    @property
    def cards(self) -> list[Card]:
        """The adapted versions of drafts that are used."""
        return [each.card for each in self.drafters if each.card is not None]

    @property
    def self_draft(self) -> SelfDraftSpec | None:
        """How the target drafts for itself, if that was asked for."""
        return next((each.self_draft for each in self.drafters if each.self_draft is not None), None)


def plan(request: LoadConfig, registry: Registry, hub: Hub, *, opened: Plan | None = None, stays: bool = False) -> Plan:
    """Choose the runtime, resolve the models, read their headers, compare tokenizers, check memory.

    `opened` is the plan of a model that is open, whose memory counts as free. If it `stays`, that model is the target
    itself, and keeps its caches, layers and workers; else it will have been closed before the load.

    Raises UnknownModel, HubError, InvalidModelFile, DraftRefused, DoesNotFit.
    """
    reference = parse_reference(request.model or registry.default)
    with naming_heads(reference), naming_entry(request, registry):
        backend = choose_backend(request, registry, hub)
        resolved = resolve_pair(request.model, backend, registry, hub)
        facts = read_metadata(resolved.target, hub)
    own_head = find_head(facts)
    if own_head is not None and not own_head.in_target:
        raise InvalidModelFile(
            f"{reference} is {KIND_NAMES[own_head.kind]}; it drafts for a model and writes no text by itself.",
            hint="Name the model that it was trained for.",
        )
    target = PlannedModel(reference, resolved.target, facts)
    finder = DraftFinder(request, backend, target, own_head, resolved, registry, hub)
    is_auto = request.draft == AUTO
    drafters = finder.find_all() if is_auto else list(map(finder.find, parse_draft(request.draft)))
    if request.adapted is not None:
        drafters = use_adapted(drafters, target, request.adapted, hub)
    options = _set_context_size(request.load, facts)
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
    drafters, fit = _check_memory(request, options, memory, facts, drafters, part, least)
    options = _keep_flash_attention(replace(options, caches=fit.caches), facts, fit)
    if network is None:
        options = _place(options, facts, fit, opened.options if opened is not None and stays else None)
    if network is None and backend == "llamacpp":
        options, fit = _add_tree_cache(options, facts, fit, drafters)
    options = replace(options, mtp=backend == "llamacpp" and any(each.is_in_target for each in drafters))
    drafts = [each.model.reference for each in drafters if each.model and each.spec.name == "model"]
    acceptance = resolved.models.acceptance if resolved.models.draft in drafts else None
    sampling = resolved.sampling
    return Plan(
        resolved.name, backend, resolved.target, tuple(drafters), options, sampling, facts, fit, acceptance, network
    )


def fetch_all(request: LoadConfig, registry: Registry, hub: Hub) -> list[Path]:
    """Download what `request` names and what drafts for it. Memory is not checked: a load does that.

    Raises UnknownModel, HubError, CacheError, InvalidModelFile, DraftRefused, Cancelled.
    """
    planned = plan(replace(request, force=True, fetch_heads=True), registry, hub)
    return [fetch_source(source, hub) for source in planned.sources]


def _set_context_size(options: LoadOptions, facts: ModelMetadata) -> LoadOptions:
    trained = max(facts.trained_context or DEFAULT_CONTEXT, 8)
    size = options.context_for(trained)
    if size > trained:
        notice(f"The model was trained for {trained:,} tokens; beyond them its answers lose quality.")
    return replace(options, context_size=size)


def _free(own: Memory, opened: Fit, stays: bool) -> Memory:
    """`own`, this machine's memory, as it was before a model was opened; its devices as they were then.

    If the model `stays`, its mapped weights count as available RAM already.
    """
    memory, share = opened.own or (opened.memory, 1.0)
    in_ram = max(0, opened.needed_here - memory.own_device_bytes)
    if stays and in_ram:
        in_ram = int(share * (opened.target.total - opened.target.weights) * in_ram / opened.needed_here)
    known = {device.name: device for device in memory.devices}
    devices = tuple(known.get(device.name, device) for device in own.devices)
    return replace(own, ram_available=own.ram_available + in_ram, devices=devices)


def _without_ram(own: Memory, options: LoadOptions) -> Memory:
    """`own` as far as it holds layers beside workers: GPUs, if there are any, take all of this machine's part."""
    return replace(own, ram_available=0) if options.gpu_layers is None and own.own_devices else own


def _place(options: LoadOptions, target: ModelMetadata, fit: Fit, opened: LoadOptions | None) -> LoadOptions:
    """`options` with the layers that accelerators have memory for, if the user has not set them, or as they are in a
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
        notice("The draft stays in RAM, since the GPU has no memory for it beside the model.")
        options = replace(options, gpu_layers_draft=0)
    count = target.own("block_count") or 0
    if opened is None and placed.layers is not None:
        there = max(placed.layers - 1, 0)  # the output matrix counts as one
        notice(f"The GPU has memory for {there} of {count} layers; the processor computes the rest.")
    if opened is None and placed.in_ram is not None:
        experts = f"the experts of {placed.in_ram} of {count} layers"
        notice(f"The GPU has no memory for {experts}; they stay in RAM.")
    shares = None if placed.shares is None else ",".join(map(str, placed.shares))
    return replace(options, gpu_layers=placed.layers, n_cpu_moe=placed.in_ram, tensor_split=shares)


def _is_together(options: LoadOptions, target: ModelMetadata) -> bool:
    """Whether all caches of `target` are in one llama.cpp context."""
    return shares_context(target) and not options.exact


def _add_tree_cache(
    options: LoadOptions, target: ModelMetadata, fit: Fit, drafters: Sequence[DrafterPlan]
) -> tuple[LoadOptions, Fit]:
    """`options` and `fit` with a cache more for a text that is alone, if there is memory left and a draft grows trees.

    Of lookups there are too few branches for it to pay.
    """
    grows_trees = any(each.spec.name not in LOOKUPS for each in drafters)
    if fit.caches == 1 or not grows_trees or not _is_together(options, target):
        return options, fit
    one = estimate_memory(target, fit.context, options.kv_type, flash=options.flash_attention is not False)
    needed = replace(fit, tree_cache=replace(one, weights=0))
    spills = options.gpu_layers is not None or options.n_cpu_moe is not None  # layers have filled the accelerators
    return (options, fit) if spills or not needed.fits else (replace(options, tree_cache=True), needed)


def _keep_flash_attention(options: LoadOptions, target: ModelMetadata, fit: Fit) -> LoadOptions:
    """`options` with flash attention on if there is no memory for what a processor holds without it: by default it
    is turned off if that was measured to be faster.
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
    drafters: list[DrafterPlan],
    own: tuple[Memory, float] | None,
    least: int,
) -> tuple[list[DrafterPlan], Fit]:
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
                notice(f"Drafting without {models[-1].label}: it does not fit in memory with the target.")
                drafters = [each for each in drafters if each is not models[-1]]
            elif caches > least:
                caches -= 1
            else:
                raise
        else:
            if caches < options.caches:
                notice(
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
