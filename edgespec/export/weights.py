"""One model in the forms in which engines load it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgespec.backends import FileBackend
from edgespec.errors import InvalidRequest, UnknownModel
from edgespec.export.plan import Container, Draft, ExportPlan, Weights, list_weights
from edgespec.formats.gguf import Header
from edgespec.formats.head_file import ModelMetadata
from edgespec.hub.cache import Alias, HubFile, HubQuant, HubRepo, LocalPath, Reference, parse_reference
from edgespec.planner.draft_finder import AUTO, DraftTerm, parse_draft
from edgespec.planner.heads import drafter_of, refuse_kind
from edgespec.registry.originals import find_original, is_repository, read_folder_original, read_gguf_original
from edgespec.registry.schema import Entry, Pair, Registry

_BITS = re.compile(r"(?:\b|_)(?:UD-)?(?:I?Q|NVFP)(\d)|\b(\d)[-_]?bit", re.IGNORECASE)


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
    return Weights(reference, files, original, known_from, _count_bits(reference, metadata), _count_rows(metadata))


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


def _count_bits(reference: Reference, metadata: ModelMetadata | None) -> int | None:
    """Whole bits of a weight, where it is quantized; None for others, and for MXFP4, in which models are released."""
    if "mxfp4" in str(reference).lower():
        return None
    if isinstance(metadata, Header):
        if any(tensor.type.name == "MXFP4" for tensor in metadata.tensors):
            return None
        mean = 8 * metadata.weight_bytes / sum(math.prod(tensor.shape) for tensor in metadata.tensors)
        return int(mean) if mean < 12 else None
    if metadata is not None:
        found = metadata.config.get("quantization")
        bits = found.get("bits") if isinstance(found, dict) else None
        return bits if isinstance(bits, int) else None
    match = _BITS.search(str(reference))
    return int(match[1] or match[2]) if match else None


def _count_rows(metadata: ModelMetadata | None) -> int | None:
    """Rows of the embedding, `vocab_size` of config.json, where the metadata says."""
    if isinstance(metadata, Header):
        return next((tensor.shape[-1] for tensor in metadata.tensors if tensor.name == "token_embd.weight"), None)
    return metadata.integer("vocab_size") if metadata is not None else None


# Words that the engines of original weights share.


_CACHE = ("huggingface", "/root/.cache/huggingface")


def name_original(weights: Weights) -> str:
    """The repository or folder of the original weights, which is known: `engines.export` has checked."""
    assert weights.original is not None
    return weights.original


def own_or_original(plan: ExportPlan, draft: Draft) -> str | None:
    """What to load for `draft`; None for lookups, and for a head in the target's own files."""
    is_own = draft.method == "mtp" and draft.weights is not None and draft.weights.original == plan.target.original
    return None if draft.weights is None or is_own else name_original(draft.weights)


def hint_quantization(plan: ExportPlan, option: str) -> tuple[str, ...]:
    """How to have weights of about the size of those in use; `option` quantizes to 8 bits when the engine starts."""
    bits = plan.target.bits
    if bits is None or bits > 8:
        return ()
    if bits > 5 and option:
        return (f"The model in use has weights of about {bits} bits, the originals 16; {option} gives 8.",)
    kinds = "FP8" if bits > 5 else "AWQ, GPTQ or NVFP4"
    start = f", or add {option} for 8 bits" if option else ""
    return (
        f"The model in use has weights of about {bits} bits, the originals 16: serve a repository of it in {kinds} "
        f"instead{start}.",
    )


def run_on_gpu(
    plan: ExportPlan,
    draft: Draft | None,
    image: str,
    command: Sequence[str],
    port: int,
    volumes: Sequence[tuple[str, str]] = (),
) -> Container:
    """`command` in a container with all GPUs; local folders are mounted at their own paths."""
    used = [name_original(each) for each in list_weights(plan, draft) if each.is_folder]
    folders = [(path, path) for path in dict.fromkeys(used)]
    everywhere = (*command[1:], "--host", "0.0.0.0", "--port", str(port))
    return Container(image, everywhere, port, (_CACHE, *folders, *volumes), entrypoint=(command[0],))


# The drafters of a target whose files are not on this machine, by what the registry says of it.


@dataclass(frozen=True, slots=True)
class RegistryPair:
    """A pair of models.toml; `given` is what the user says of the original weights of its draft."""

    pair: Pair
    backend: FileBackend
    registry: Registry
    given: str | None

    def list_drafts(self, text: str) -> Iterator[Draft]:
        """The drafters that a value of `--draft` asks for. Raises UnknownModel, InvalidRequest."""
        if text == AUTO:
            yield from self._list_all()
        else:
            yield from map(self._find, parse_draft(text))

    def _list_all(self) -> Iterator[Draft]:
        pair = self.pair
        yield Draft("ngram")
        if pair.draft is not None:
            yield self._describe("model", pair.draft)
        if pair.pard is not None:
            yield self._describe("pard", pair.pard)
        if pair.head is not None and pair.head_kind and not refuse_kind(self.backend, "", pair.head_kind):
            yield self._describe(pair.head_kind, pair.head)
        elif self._has_own_head:
            yield Draft("mtp")

    def _find(self, term: DraftTerm) -> Draft:
        name, pair = term.spec.name, self.pair
        if term.spec.needs not in ("model", "head"):
            return Draft(name)
        if term.reference is not None:
            reference = parse_reference(term.reference)
            if isinstance(reference, Alias):
                reference = require_pair(self.registry.get(reference.name), self.backend).target
            is_paired_head = reference == pair.head and pair.head_kind is not None
            return self._describe(pair.head_kind or name if is_paired_head else name, reference)
        if name == "mtp" and self._has_own_head:
            return Draft(name)
        if pair.head is not None and pair.head_kind is not None and drafter_of(pair.head_kind).name == name:
            return self._describe(pair.head_kind, pair.head)
        paired = {"model": pair.draft, "pard": pair.pard}.get(name)
        if paired is None:
            raise UnknownModel(
                f"models.toml pairs no {name} with this target.",
                hint=f"Name one: --draft {name}:REF, or use --draft auto.",
            )
        return self._describe(name, paired)

    @property
    def _has_own_head(self) -> bool:
        """Whether the target's own file holds an MTP head."""
        repo = getattr(self.pair.with_head, "repo", None)
        return repo is not None and repo == getattr(self.pair.target, "repo", None)

    def _describe(self, method: str, reference: Reference) -> Draft:
        weights = describe_weights(reference, self.registry, given=self.given, is_head=method != "model")
        return Draft(method, weights, acceptance=self.pair.acceptance if reference == self.pair.draft else None)


def require_pair(entry: Entry, backend: FileBackend) -> Pair:
    """The pair for `backend`. Raises UnknownModel where there is none."""
    pair = entry.pair(backend)
    if pair is None:
        kind = "GGUF file" if backend == "llamacpp" else "MLX folder"
        raise UnknownModel(
            f"models.toml names no {kind} of {entry.alias}.",
            hint="Name a path, or export it to vllm, sglang, tensorrt-llm or tgi, which load the original weights.",
        )
    return pair
