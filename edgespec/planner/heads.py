"""Trained heads among the models that a user names: found by their metadata, and refused where they cannot draft."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from edgespec.backends import BackendName
from edgespec.drafters import DrafterSpec, drafter_specs
from edgespec.errors import DraftRefused, EdgespecError, InvalidModelFile, UnknownModel
from edgespec.formats.gguf import Header
from edgespec.formats.head_file import read_head
from edgespec.formats.head_gguf import read_gguf_head
from edgespec.formats.heads import HeadKind, HeadSpec
from edgespec.formats.metadata import ModelMetadata
from edgespec.formats.mlx_folder import read_config
from edgespec.hub.hub import Hub
from edgespec.hub.reference import LocalPath, Reference, parse_reference
from edgespec.registry.resolve import LocalMlx, Source, read_metadata

_OTHER = "Use --draft ngram, or another."
_RUNNABLE: dict[BackendName, list[HeadKind]] = {
    "llamacpp": ["eagle3", "dflash", "dspark"],
    "mlx": ["eagle3", "medusa", "hydra"],
    "toy": [],
}
_RUNTIMES: Mapping[BackendName, str] = {"llamacpp": "llama.cpp", "mlx": "MLX", "toy": "the toy runtime"}
_NAMES = {
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
_REASONS: Mapping[tuple[BackendName, HeadKind], str] = {
    ("llamacpp", "medusa"): _OUTSIDE,
    ("llamacpp", "hydra"): _OUTSIDE,
}

Refusal = Callable[[str, HeadSpec], EdgespecError | None]


def find_head(metadata: ModelMetadata) -> HeadSpec | None:
    """The trained head that is all that a file or folder holds; None for a model. Raises InvalidModelFile."""
    head = read_gguf_head(metadata) if isinstance(metadata, Header) else read_head(metadata.path)
    return _alone(head)


def read_draft(source: Source, hub: Hub) -> tuple[ModelMetadata, HeadSpec | None]:
    """The metadata of a draft, and what it says of the trained head if that is all that the file or folder holds.

    Folders of heads need no tokenizer. Raises as read_metadata does.
    """
    if isinstance(source, LocalMlx) and (head := _alone(read_head(source.path))) is not None:
        size = sum(file.stat().st_size for file in source.path.glob("*.safetensors"))
        return read_config(source.path, source.path.name, size), head
    metadata = read_metadata(source, hub)
    return metadata, find_head(metadata)


def choose_head_drafter(
    spec: DrafterSpec, reference: Reference, head: HeadSpec | None, target: ModelMetadata
) -> DrafterSpec:
    """The drafter for the draft at `reference`, which the user has asked for as `spec`: that of a head, if it is one.

    Heads of other kinds are refused before, see `refuse_draft`. Raises DraftRefused for a head that does not fit.
    """
    if head is None:
        if spec.needs == "head":
            raise DraftRefused(
                f"{reference} is no trained head.", hint=f"Use --draft {reference}, without '{spec.name}:'."
            )
        return spec
    if spec.name not in ("model", head.kind):
        raise DraftRefused(f"{reference} is a head of the kind '{head.kind}', no {spec.name}.", hint=_OTHER)
    size = _hidden_size(target)
    if size is not None and head.hidden_size and head.hidden_size != size:
        raise DraftRefused(
            f"{reference} is a head for a hidden size of {head.hidden_size:,}; the target has {size:,}.", hint=_OTHER
        )
    return drafter_specs()[head.kind]


def _alone(head: HeadSpec | None) -> HeadSpec | None:
    """A head that does not lie in its target's file; else None."""
    return head if head is not None and not head.in_target else None


def _hidden_size(metadata: ModelMetadata) -> int | None:
    """Of a model, where its metadata says."""
    found = metadata.own("embedding_length") if isinstance(metadata, Header) else metadata.integer("hidden_size")
    return found if isinstance(found, int) else None


def refuse_target(name: str, head: HeadSpec) -> EdgespecError:
    """The error for a head that is given as the model."""
    return InvalidModelFile(
        f"{name} is {_describe(head)}; it drafts for a model and writes no text by itself.",
        hint="Name the model that it was trained for.",
    )


def refuse_draft(backend: BackendName, name: str, head: HeadSpec) -> EdgespecError | None:
    """The error for a head that is given as the draft; None where `backend` runs heads of its kind."""
    if head.kind in _RUNNABLE[backend]:
        return None
    reason = _REASONS.get((backend, head.kind), "")
    return DraftRefused(
        f"{name} is {_describe(head)}, which edgespec does not run on {_RUNTIMES[backend]}{reason}.",
        hint="Use --draft ngram, or name a draft model.",
    )


@contextmanager
def refusing_heads(
    named: Reference | str | None, refuse: Refusal
) -> Iterator[Callable[[ModelMetadata], ModelMetadata]]:
    """Yield a check that passes a model's metadata on and raises the error of `refuse` for those of a head.

    A local file or folder that turns out to be no model is refused in the same way where it holds a head. Heads that
    lie in their target's file are part of a model.
    """

    def check(model: ModelMetadata) -> ModelMetadata:
        if (head := find_head(model)) and (error := refuse(str(named), head)):
            raise error
        return model

    try:
        yield check
    except (InvalidModelFile, UnknownModel) as first:
        try:
            head = _alone(_read_local(named))
        except InvalidModelFile:
            if isinstance(first, InvalidModelFile):  # which says more of a damaged model
                raise first from None
            raise
        if head and (error := refuse(str(named), head)):
            raise error from None
        raise


def _read_local(named: Reference | str | None) -> HeadSpec | None:
    if isinstance(named, str):
        with suppress(UnknownModel):
            named = parse_reference(named)
    return read_head(named.path) if isinstance(named, LocalPath) else None


def _describe(head: HeadSpec) -> str:
    size = f" for a model of hidden size {head.hidden_size:,}" if head.hidden_size else ""
    return _NAMES[head.kind] + size
