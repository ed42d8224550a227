"""The pair that `edgespec chat MODEL` would use, with what is known of it. Nothing is downloaded."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from edgespec.backends import FileBackend
from edgespec.controller.stats import DraftStats
from edgespec.controller.store import ProfileStore, processor_name
from edgespec.errors import CacheError, InvalidRequest, UnknownModel
from edgespec.formats.gguf import Header
from edgespec.formats.head_file import ModelMetadata
from edgespec.formats.heads import HeadSpec
from edgespec.hub.cache import Alias, HubFile, HubQuant, HubRepo, LocalPath, Reference, parse_reference
from edgespec.hub.hub import Hub
from edgespec.planner.draft_finder import AUTO, PlannedDrafter, parse_draft
from edgespec.planner.heads import drafter_of, runs
from edgespec.planner.plan import LoadConfig, Plan, Reporter, choose_backend, plan
from edgespec.registry.resolve import LocalModel, find_local, is_here
from edgespec.registry.schema import (
    Acceptance,
    Entry,
    Pair,
    Registry,
    find_original,
    is_repository,
    read_folder_original,
    read_gguf_original,
)

# What is exported, and the result, apart from any engine.


@dataclass(frozen=True, slots=True)
class Weights:
    """One model, in the forms in which engines load it.

    files         the GGUF file or MLX folder in use: a path where it is on this machine
    original      `user/repo` on Hugging Face, or the path of a folder in its format; None where it is not known
    known_from    what names `original`, for a remark
    is_quantized  whether the originals have weights of more bits than `files`
    vocab_size    rows of its embedding; None where that is not known
    """

    reference: Reference
    files: HubRepo | HubQuant | HubFile | LocalPath
    original: str | None = None
    known_from: str = ""
    is_quantized: bool = False
    vocab_size: int | None = None

    @property
    def is_folder(self) -> bool:
        return self.original is not None and self.original.startswith("/")

    def require_original(self) -> str:
        """`original`, where an engine that loads it has been checked to know it."""
        assert self.original is not None
        return self.original


@dataclass(frozen=True, slots=True)
class Measured:
    """What the autopilot has learned of a drafter on this machine, one answer at a time.

    acceptance  of a drafted token after which only accepted ones came, 0 to 1
    sampling    under which most of it was learned, such as 'sample at 0.0, answer'
    """

    acceptance: float
    sampling: str


@dataclass(frozen=True, slots=True)
class Draft:
    """One drafter of the pair.

    method      its name in `--draft`, or the kind of a trained head
    weights     None for lookups, self-drafts, and heads in the target's own files
    block       tokens that a head drafts at once; None for others, and where its files were not read
    version     of a draft that was adapted to the user; None for others
    acceptance  of the registry, on less and on more predictable texts
    """

    method: str
    weights: Weights | None = None
    block: int | None = None
    version: int | None = None
    acceptance: Acceptance | None = None
    measured: Measured | None = None

    @property
    def label(self) -> str:
        version = f", version {self.version}" if self.version is not None else ""
        return self.method if self.weights is None else f"{self.weights.reference} ({self.method}{version})"


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """A target with what drafts for it.

    drafts   the preferred one first
    is_auto  whether the drafters were found, and not named by the user
    machine  the processor that figures were measured on
    """

    name: str
    backend: FileBackend
    target: Weights
    drafts: tuple[Draft, ...]
    is_auto: bool
    machine: str


@dataclass(frozen=True, slots=True)
class Exported:
    """What an engine needs to serve a pair.

    commands  in order, as words; the last one serves
    files     by name, beside which the commands are run
    remarks   sentences of this engine
    """

    commands: tuple[tuple[str, ...], ...]
    files: Mapping[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()


# What the autopilot has stored of a drafter, as the figures of an export.


_MIN_EVIDENCE = 6.0  # tokens, discounted: those of one answer


def read_measured(stats: DraftStats, drafter: str) -> Measured | None:
    """Read what is known of `drafter` under its most frequent way of sampling; None where it was hardly ever asked."""
    found = [
        (key, each.first_choice.evidence) for key, each in stats.drafters.items() if key.startswith(f"{drafter}; ")
    ]
    if not found:
        return None
    key, (accepted, tested) = max(found, key=lambda each: each[1][1])
    if tested < _MIN_EVIDENCE:
        return None
    acceptance = min(accepted / tested, 1.0)
    return Measured(acceptance, key.partition("; ")[2])


_PREFERENCE = (
    "eagle3", "dspark", "dflash", "mtp", "gemma4-assistant", "eagle", "medusa", "hydra", "pard", "model", "self",
    "ngram", "suffix",
)  # fmt: skip


def gather(
    request: LoadConfig, registry: Registry, hub: Hub, reporter: Reporter, target_id: str | None, draft_id: str | None
) -> ExportPlan:
    """What to export; the ids are what the user says of the original weights.

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
        planned = plan(replace(request, backend=backend, force=True), registry, hub, reporter)
        named = pair.target if pair is not None else reference
        path = find_local(planned.target, hub)
        target = describe_weights(named, registry, path=path, metadata=planned.metadata, given=target_id)
        drafts = tuple(_read_plan(planned, path, draft_id, registry, hub))
        name = planned.name
    ranked = sorted(drafts, key=lambda each: (*_PREFERENCE, each.method).index(each.method))
    return ExportPlan(name, backend, target, tuple(ranked), request.draft == AUTO, processor_name())


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
    is_own = drafter.card is not None and not weights.is_quantized and given is None
    if is_own and isinstance(model.source, LocalModel) and model.source.kind == "mlx":  # an adapted version, of 16 bits
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


# One model in the forms in which engines load it.


_QUANTIZED = re.compile(r"(?:\b|_)(?:UD-)?(?:I?Q|NVFP)\d|\b\d[-_]?bit", re.IGNORECASE)


def describe_weights(
    reference: Reference,
    registry: Registry,
    *,
    path: Path | None = None,
    metadata: ModelMetadata | None = None,
    given: str | None = None,
    is_head: bool = False,
) -> Weights:
    """The model that `reference` names, which lies at `path` if it is on this machine.

    `given` is what the user says of its original weights. Of a head and a PARD model the base model is another model.
    Raises InvalidRequest for a `given` that is neither a repository nor a folder.
    """
    if path is None and isinstance(reference, LocalPath):
        path = reference.path
    original, known_from = _find_original(reference, registry, path, metadata, given, is_head)
    if path is not None and not (isinstance(reference, HubRepo) and path.is_dir()):
        files: HubRepo | HubQuant | HubFile | LocalPath = LocalPath(path.absolute())
    else:
        assert isinstance(reference, HubRepo | HubQuant | HubFile)
        files = reference
    return Weights(reference, files, original, known_from, _is_quantized(reference, metadata), _count_rows(metadata))


def _find_original(
    reference: Reference,
    registry: Registry,
    path: Path | None,
    metadata: ModelMetadata | None,
    given: str | None,
    is_head: bool,
) -> tuple[str | None, str]:
    if given is not None:
        return _check_given(given), "you"
    if known := find_original(reference, registry, is_head=is_head):
        return known, "models.toml"
    if isinstance(metadata, Header):
        return (None if is_head else read_gguf_original(metadata)) or (None, "")
    if metadata is None:
        return None, ""
    if isinstance(metadata.config.get("quantization"), dict):
        return (None if is_head else read_folder_original(metadata)) or (None, "")
    if isinstance(reference, HubRepo):  # in half precision, as it was released
        return reference.repo, "its name"
    return (str(path.resolve()), "its path") if path is not None else (None, "")


def _check_given(text: str) -> str:
    if is_repository(text):
        return text
    folder = Path(text).expanduser()
    if (folder / "config.json").is_file():
        return str(folder.resolve())
    raise InvalidRequest(
        f"{text!a} is neither a repository nor a folder with config.json.",
        hint="Write USER/REPO, such as Qwen/Qwen3-32B.",
    )


def _is_quantized(reference: Reference, metadata: ModelMetadata | None) -> bool:
    """Whether most weights have 8 bits or fewer; MXFP4, in which models are released, does not count."""
    if isinstance(metadata, Header):
        n_weights = sum(math.prod(tensor.shape) for tensor in metadata.tensors)
        return 8 * metadata.weight_bytes < 12 * n_weights and not any(
            tensor.type.name == "MXFP4" for tensor in metadata.tensors
        )
    named = bool(_QUANTIZED.search(str(reference)))
    stated = named if metadata is None else isinstance(metadata.config.get("quantization"), dict)
    return stated and "mxfp4" not in str(reference).lower()


def _count_rows(metadata: ModelMetadata | None) -> int | None:
    """Rows of the embedding, `vocab_size` of config.json, where the metadata says."""
    if isinstance(metadata, Header):
        return next((tensor.shape[-1] for tensor in metadata.tensors if tensor.name == "token_embd.weight"), None)
    return metadata.integer("vocab_size") if metadata is not None else None


# The drafters of a target whose files are not on this machine, by what the registry says of it.


def list_paired(pair: Pair, backend: FileBackend, registry: Registry, draft: str, given: str | None) -> Iterator[Draft]:
    """The drafters that a value of `--draft` asks for; `given` is what the user says of the draft's original weights.

    Raises UnknownModel, InvalidRequest.
    """

    def describe(method: str, reference: Reference) -> Draft:
        weights = describe_weights(reference, registry, given=given, is_head=method != "model")
        return Draft(method, weights, acceptance=pair.acceptance if reference == pair.draft else None)

    paired = {"ngram": Draft("ngram")}
    if pair.with_head is not None and _find_repo(pair.with_head) == _find_repo(pair.target):
        paired["mtp"] = Draft("mtp")
    for method, reference in (("model", pair.draft), ("pard", pair.pard)):
        if reference is not None:
            paired[method] = describe(method, reference)
    if pair.head is not None and pair.head_kind is not None and runs(backend, pair.head_kind):
        paired[drafter_of(pair.head_kind).name] = describe(pair.head_kind, pair.head)
    if draft == AUTO:
        yield from paired.values()
        return
    for term in parse_draft(draft):
        name, needs_model = term.spec.name, term.spec.needs in ("model", "head")
        if needs_model and term.reference is not None:
            reference = parse_reference(term.reference)
            if isinstance(reference, Alias):
                reference = require_pair(registry.get(reference.name), backend).target
            is_paired_head = reference == pair.head and pair.head_kind is not None
            yield describe(pair.head_kind or name if is_paired_head else name, reference)
        elif name in paired or not needs_model:
            yield paired.get(name, Draft(name))
        else:
            raise UnknownModel(
                f"models.toml pairs no {name} with this target.",
                hint=f"Name one: --draft {name}:REF, or use --draft auto.",
            )


def _find_repo(reference: Reference) -> str | None:
    return getattr(reference, "repo", None)


def require_pair(entry: Entry, backend: FileBackend) -> Pair:
    """The pair for `backend`. Raises UnknownModel where there is none."""
    pair = entry.pair(backend)
    if pair is None:
        kind = "GGUF file" if backend == "llamacpp" else "MLX folder"
        raise UnknownModel(
            f"models.toml names no {kind} of {entry.alias}.",
            hint="Name a path, or export it to vllm, sglang or tensorrt-llm, which load the original weights.",
        )
    return pair
