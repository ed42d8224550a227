"""Trained heads named as the target, and those named as the draft for which there is no drafter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from edgespec.drafters import drafter_specs
from edgespec.errors import DraftRefused, EdgespecError, InvalidModelFile, UnknownModel
from edgespec.formats.head_file import read_head
from edgespec.formats.heads import HeadSpec
from edgespec.formats.metadata import ModelMetadata
from edgespec.hub.reference import LocalPath, Reference, parse_reference
from edgespec.planner.heads import find_head

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

Refusal = Callable[[str, HeadSpec], EdgespecError | None]


def refuse_target(name: str, head: HeadSpec) -> EdgespecError:
    """The error for a head that is given as the model."""
    return InvalidModelFile(
        f"{name} is {_describe(head)}; it drafts for a model and writes no text by itself.",
        hint="Name the model that it was trained for.",
    )


def refuse_draft(name: str, head: HeadSpec) -> EdgespecError | None:
    """The error for a head that is given as the draft; None where a drafter bears the name of its kind."""
    if head.kind in drafter_specs():
        return None
    return DraftRefused(
        f"{name} is {_describe(head)}, which this edgespec cannot run yet.",
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
    except (InvalidModelFile, UnknownModel):
        head = _read_local(named)
        if head and not head.in_target and (error := refuse(str(named), head)):
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
