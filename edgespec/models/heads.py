"""Trained heads among the models that a user names: found by their metadata, and refused if they cannot draft."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from edgespec.backends import BackendName
from edgespec.drafters.registry import DrafterSpec, drafter_specs
from edgespec.errors import DraftRefused, InvalidModelFile, UnknownModel
from edgespec.formats.gguf import Header
from edgespec.formats.head_config import read_config_head
from edgespec.formats.head_file import ModelMetadata, find_weights, read_gguf_head, read_head
from edgespec.formats.heads import HeadKind, HeadSpec
from edgespec.formats.mlx_folder import read_config
from edgespec.models.cache import RemoteModel
from edgespec.models.head_files import is_head
from edgespec.models.hub import Hub
from edgespec.models.references import LocalPath, Reference
from edgespec.models.resolve import LocalModel, Source, read_metadata

_OTHER = "Draft by ngram, or another."
# llama.cpp has no graph for the others: their matrices would be multiplied outside of it, which takes longer than it
# saves. With numpy on one thread, an output matrix of 128,256 x 4,096 takes 97 ms a head, and five of them are 10.5 GB
# to read, twice an 8B model of 4 bits a weight.
_RUNNABLE: dict[BackendName, list[HeadKind]] = {
    "llamacpp": ["eagle3", "mtp", "gemma4-assistant", "dflash", "dspark"],
    "mlx": ["eagle3", "eagle", "mtp", "gemma4-assistant", "dflash", "dspark", "medusa", "hydra"],
    "toy": [],
}
KIND_NAMES = {
    "eagle3": "an EAGLE-3 head",
    "eagle": "an EAGLE head",
    "mtp": "an MTP head",
    "gemma4-assistant": "a Gemma 4 assistant",
    "dflash": "a DFlash head",
    "dspark": "a DSpark head",
    "medusa": "a set of Medusa heads",
    "hydra": "a set of Hydra heads",
}


def find_head(metadata: ModelMetadata) -> HeadSpec | None:
    """The trained head that a file or folder holds, beside a model or alone. Raises InvalidModelFile, CacheError."""
    return read_gguf_head(metadata) if isinstance(metadata, Header) else read_head(metadata.path)


def read_draft(source: Source, hub: Hub, *, is_head: bool) -> tuple[ModelMetadata, HeadSpec | None]:
    """The metadata of a draft, and the spec of its trained head if the file or folder holds nothing else.

    Folders of heads need no tokenizer. The tensor shapes of a hub folder are read if its config names a head or the
    user calls it one (`is_head`). Raises the errors of read_metadata.
    """
    head = read_head(source.path) if isinstance(source, LocalModel) and source.kind == "mlx" else None
    if isinstance(source, LocalModel) and head is not None and not head.in_target:
        size = sum(file.stat().st_size for file in find_weights(source.path))
        return read_config(source.path, source.path.name, size), head
    metadata = read_metadata(source, hub)
    if isinstance(metadata, Header):
        head = read_gguf_head(metadata)
    elif isinstance(source, RemoteModel):
        head = read_config_head(metadata.config, {})
        if is_head or head is not None:
            head = read_config_head(metadata.config, hub.shapes(source))
    return metadata, None if head is None or head.in_target else head


def choose_head_drafter(
    spec: DrafterSpec, reference: Reference | str, head: HeadSpec | None, model: ModelMetadata, target: ModelMetadata
) -> DrafterSpec:
    """The drafter for the draft at `reference`, which the user has asked for as `spec`: that of a head, if it is one.

    `model` is the metadata of the draft. Raises DraftRefused for a head that does not fit.
    """
    if head is None:
        if spec.needs == "head":
            raise DraftRefused(f"{reference} is no trained head.", hint=f"Name {reference} without '{spec.name}:'.")
        return spec
    drafter = drafter_of(head.kind)
    if spec.name not in ("model", drafter.name):
        raise DraftRefused(f"{reference} is a head of the kind '{head.kind}', no {spec.name}.", hint=_OTHER)
    for what, theirs, ours in (
        ("hidden size", head.hidden_size, _hidden_size(target)),
        ("vocabulary", _vocab_size(model, head), _vocab_size(target)),
    ):
        if ours and theirs and theirs != ours:
            raise DraftRefused(
                f"{reference} is {KIND_NAMES[head.kind]} for a {what} of {theirs:,}; the target has {ours:,}.",
                hint=_OTHER,
            )
    return drafter


def drafter_of(kind: HeadKind) -> DrafterSpec:
    """The drafter for heads of `kind`; a Gemma 4 assistant is an MTP head."""
    return drafter_specs()["mtp" if kind == "gemma4-assistant" else kind]


def _hidden_size(metadata: ModelMetadata) -> int | None:
    """Reads the hidden size of a model; None if its metadata does not say."""
    found = metadata.own("embedding_length") if isinstance(metadata, Header) else metadata.integer("hidden_size")
    return found if isinstance(found, int) else None


def _vocab_size(model: ModelMetadata, head: HeadSpec | None = None) -> int | None:
    """The size of a target's vocabulary, or of the vocabulary of the target that `head` was trained for. None if the
    metadata does not say.

    Vocabularies of GGUF files are compared whole. A head may score only a part of its target's tokens.
    """
    if isinstance(model, Header):
        return len(model.tokens) if head is None else None
    inner = model.config.get("transformer_layer_config")
    stated = inner.get("vocab_size") if isinstance(inner, dict) else None
    return stated if isinstance(stated, int) else model.integer("vocab_size")


def runs(backend: BackendName, kind: HeadKind) -> bool:
    return kind in _RUNNABLE[backend]


def check_kind(backend: BackendName, name: str, kind: HeadKind) -> None:
    """Raises DraftRefused for a head that does not run on `backend`; `name` is what the user calls it."""
    if not runs(backend, kind):
        raise DraftRefused(
            f"{name} is {KIND_NAMES[kind]}, which edgespec does not run on {backend}.",
            hint="Use --draft ngram, or name a draft model.",
        )


@contextmanager
def naming_heads(named: Reference) -> Iterator[None]:
    """Says that `named` is a head if it is refused as a model: a folder on llama.cpp, a GGUF file on MLX."""
    try:
        yield
    except (InvalidModelFile, UnknownModel) as error:
        path = named.path if isinstance(named, LocalPath) else None
        is_damaged = isinstance(error, InvalidModelFile) and path is not None and path.is_file()
        if path is None or is_damaged or not is_head(path):
            raise
        raise InvalidModelFile(
            f"{named} is a trained head, and no model; llama.cpp reads heads as GGUF files, MLX as folders with "
            "config.json and safetensors.",
            hint="Convert a folder with an EAGLE-3, DFlash, DFlash2 or DSpark head by convert_hf_to_gguf.py HEAD "
            "--target-model-dir TARGET of llama.cpp; Medusa, Hydra and EAGLE-1 and 2 run on MLX alone.",
        ) from None
