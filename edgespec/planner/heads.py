"""Trained heads among the models that a user names: found by their metadata, and refused where they cannot draft."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from edgespec.backends import BackendName
from edgespec.drafters import DrafterSpec, drafter_specs
from edgespec.errors import DraftRefused, EdgespecError, InvalidModelFile, UnknownModel
from edgespec.formats.gguf import Header
from edgespec.formats.head_file import ModelMetadata, find_weights, read_gguf_head, read_head
from edgespec.formats.heads import HeadKind, HeadSpec, read_config_head
from edgespec.formats.mlx_folder import read_config
from edgespec.hub.cache import LocalPath, Reference, RemoteModel, parse_reference
from edgespec.hub.hub import Hub
from edgespec.registry.resolve import LocalModel, Source, read_metadata

_OTHER = "Use --draft ngram, or another."
_RUNNABLE: dict[BackendName, list[HeadKind]] = {
    "llamacpp": ["eagle3", "mtp", "gemma4-assistant", "dflash", "dspark"],
    "mlx": ["eagle3", "eagle", "mtp", "gemma4-assistant", "dflash", "dspark", "medusa", "hydra"],
    "toy": [],
}
_RUNTIMES: Mapping[BackendName, str] = {"llamacpp": "llama.cpp", "mlx": "MLX", "toy": "the toy runtime"}
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
# llama.cpp has no graph for these. With numpy on one thread, an output matrix of 128,256 x 4,096 takes 97 ms a head,
# and five of them are 10.5 GB to read, twice an 8B model of 4 bits a weight.
_OUTSIDE = ": its matrices would be multiplied outside of llama.cpp, which takes longer than it saves"

Refusal = Callable[[str, HeadSpec], EdgespecError | None]


def find_head(metadata: ModelMetadata) -> HeadSpec | None:
    """The trained head that a file or folder holds, beside a model or alone. Raises InvalidModelFile, CacheError."""
    return read_gguf_head(metadata) if isinstance(metadata, Header) else read_head(metadata.path)


def read_draft(source: Source, hub: Hub, *, is_head: bool) -> tuple[ModelMetadata, HeadSpec | None]:
    """The metadata of a draft, and what it says of the trained head if that is all that the file or folder holds.

    Folders of heads need no tokenizer. Of a folder on the hub the tensors' shapes are read where its config names a
    head, or where it `is_head` as the user says. Raises as read_metadata does.
    """
    if isinstance(source, LocalModel) and source.kind == "mlx":
        if (head := _alone(read_head(source.path))) is None:
            return read_metadata(source, hub), None
        size = sum(file.stat().st_size for file in find_weights(source.path))
        return read_config(source.path, source.path.name, size), head
    metadata = read_metadata(source, hub)
    if isinstance(metadata, Header):
        return metadata, _alone(read_gguf_head(metadata))
    head = read_config_head(metadata.config, {})
    if isinstance(source, RemoteModel) and (is_head or head is not None):
        head = read_config_head(metadata.config, hub.shapes(source))
    return metadata, _alone(head)


def choose_head_drafter(
    spec: DrafterSpec, reference: Reference | str, head: HeadSpec | None, model: ModelMetadata, target: ModelMetadata
) -> DrafterSpec:
    """The drafter for the draft at `reference`, which the user has asked for as `spec`: that of a head, if it is one.

    `model` is the metadata of the draft. Heads of kinds that do not run are refused before, see `refuse_draft`. Raises
    DraftRefused for a head that does not fit.
    """
    if head is None:
        if spec.needs == "head":
            raise DraftRefused(
                f"{reference} is no trained head.", hint=f"Use --draft {reference}, without '{spec.name}:'."
            )
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


def _alone(head: HeadSpec | None) -> HeadSpec | None:
    """A head that does not lie in its target's file; else None."""
    return head if head is not None and not head.in_target else None


def _hidden_size(metadata: ModelMetadata) -> int | None:
    """Reads the hidden size of a model; None where its metadata does not say."""
    found = metadata.own("embedding_length") if isinstance(metadata, Header) else metadata.integer("hidden_size")
    return found if isinstance(found, int) else None


def _vocab_size(model: ModelMetadata, head: HeadSpec | None = None) -> int | None:
    """Reads the vocabulary of a target, or that of the target of `head`; None where its metadata does not say.

    Vocabularies of GGUF files are compared whole. A head may score only a part of its target's tokens.
    """
    if isinstance(model, Header):
        return len(model.tokens) if head is None else None
    inner = model.config.get("transformer_layer_config")
    stated = inner.get("vocab_size") if isinstance(inner, dict) else None
    return stated if isinstance(stated, int) else model.integer("vocab_size")


def refuse_target(name: str, head: HeadSpec) -> EdgespecError:
    """The error for a head that is given as the model."""
    return InvalidModelFile(
        f"{name} is {_describe(head.kind, head.hidden_size)}; it drafts for a model and writes no text by itself.",
        hint="Name the model that it was trained for.",
    )


def refuse_kind(backend: BackendName, name: str, kind: HeadKind, hidden_size: int = 0) -> EdgespecError | None:
    """The error for a head that is given as the draft; None where `backend` runs heads of its kind."""
    if kind in _RUNNABLE[backend]:
        return None
    reason = _OUTSIDE if backend == "llamacpp" and kind in ("medusa", "hydra") else ""
    return DraftRefused(
        f"{name} is {_describe(kind, hidden_size)}, which edgespec does not run on {_RUNTIMES[backend]}{reason}.",
        hint="Use --draft ngram, or name a draft model.",
    )


def refuse_draft(backend: BackendName, name: str, head: HeadSpec) -> EdgespecError | None:
    """Does the same as `refuse_kind` for a head whose files were read."""
    return refuse_kind(backend, name, head.kind, head.hidden_size)


@contextmanager
def refusing_heads(named: Reference | str | None, refuse: Refusal) -> Iterator[None]:
    """Raises the error of `refuse` where a local file or folder turns out to hold a head and no model.

    Heads that lie in their target's file are part of a model. A head that `refuse` lets pass has the format of another
    runtime.
    """
    try:
        yield
    except (InvalidModelFile, UnknownModel) as first:
        path = _find_local(named)
        try:
            head = _alone(read_head(path)) if path is not None else None
        except InvalidModelFile:
            if isinstance(first, InvalidModelFile):  # which says more of a damaged model
                raise first from None
            raise
        if path is None or head is None:
            raise
        if error := refuse(str(named), head):
            raise error from None
        if isinstance(first, UnknownModel):
            raise refuse_format(str(named), head.kind, is_folder=path.is_dir()) from None
        raise


def refuse_format(name: str, kind: HeadKind, *, is_folder: bool) -> DraftRefused:
    """The error for a folder that is named on llama.cpp, or a GGUF file on MLX."""
    if is_folder:
        return DraftRefused(
            f"{name} is {KIND_NAMES[kind]} in Hugging Face's format; llama.cpp reads heads as GGUF files.",
            hint="Convert it: convert_hf_to_gguf.py HEAD --target-model-dir TARGET, of llama.cpp.",
        )
    return DraftRefused(
        f"{name} is {KIND_NAMES[kind]} in a GGUF file; MLX reads heads as folders with config.json and safetensors.",
        hint="Name the folder that the file was made from, or use --backend llamacpp.",
    )


def _find_local(named: Reference | str | None) -> Path | None:
    if isinstance(named, str):
        with suppress(UnknownModel):
            named = parse_reference(named)
    return named.path if isinstance(named, LocalPath) else None


def _describe(kind: HeadKind, hidden_size: int) -> str:
    """What a head is, in a few words."""
    return KIND_NAMES[kind] + (f" for a model of hidden size {hidden_size:,}" if hidden_size else "")
