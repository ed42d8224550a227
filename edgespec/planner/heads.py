"""Trained heads among the models that a user names: found by their metadata, and refused where they cannot draft."""

from __future__ import annotations

from edgespec.drafters import DrafterSpec, drafter_specs
from edgespec.errors import DraftRefused
from edgespec.formats.gguf import Header
from edgespec.formats.head_file import read_head
from edgespec.formats.head_gguf import read_gguf_head
from edgespec.formats.heads import HeadSpec
from edgespec.formats.metadata import ModelMetadata
from edgespec.hub.reference import Reference

_OTHER = "Use --draft ngram, or another."


def find_head(metadata: ModelMetadata) -> HeadSpec | None:
    """The trained head that is all that a file or folder holds; None for a model. Raises InvalidModelFile."""
    head = read_gguf_head(metadata) if isinstance(metadata, Header) else read_head(metadata.path)
    return head if head is not None and not head.in_target else None


def choose_head_drafter(
    spec: DrafterSpec, reference: Reference, head: HeadSpec | None, target: ModelMetadata
) -> DrafterSpec:
    """The drafter for the draft at `reference`, which the user has asked for as `spec`: that of a head, if it is one.

    Raises DraftRefused for heads that edgespec cannot run, or not on this target.
    """
    if head is None:
        if spec.needs == "head":
            raise DraftRefused(
                f"{reference} is no trained head.", hint=f"Use --draft {reference}, without '{spec.name}:'."
            )
        return spec
    runnable = {name: each for name, each in drafter_specs().items() if each.needs == "head"}
    if head.kind not in runnable or spec.name not in ("model", head.kind):
        wanted = "" if spec.name in ("model", head.kind) else f", no '{spec.name}'"
        cannot = "" if head.kind in runnable else ", which edgespec cannot run yet"
        raise DraftRefused(f"{reference} is a trained head of the kind '{head.kind}'{wanted}{cannot}.", hint=_OTHER)
    size = _hidden_size(target)
    if size is not None and head.hidden_size and head.hidden_size != size:
        raise DraftRefused(
            f"{reference} is a head for a hidden size of {head.hidden_size:,}; the target has {size:,}.", hint=_OTHER
        )
    return runnable[head.kind]


def _hidden_size(metadata: ModelMetadata) -> int | None:
    """Of a model, where its metadata says."""
    found = metadata.own("embedding_length") if isinstance(metadata, Header) else metadata.integer("hidden_size")
    return found if isinstance(found, int) else None
