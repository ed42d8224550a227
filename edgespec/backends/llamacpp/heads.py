"""Trained heads on llama.cpp, by kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from edgespec.backends.attached_draft import AttachedHead, Unsupported
from edgespec.backends.llamacpp import assistant, dflash, eagle3, mtp
from edgespec.backends.llamacpp.weights import LlamaWeights
from edgespec.core.protocols import CheckCancelled
from edgespec.formats.heads import HeadKind, HeadSpec

Opener = Callable[[LlamaWeights, Path, HeadSpec, Callable[[float], None], CheckCancelled], AttachedHead]

_OPENERS: dict[HeadKind, Opener] = {
    "eagle3": eagle3.open_head,
    "mtp": mtp.open_head,
    "gemma4-assistant": assistant.open_head,
    "dflash": dflash.open_head,
    "dspark": dflash.open_head,
}


def open_head(
    target: LlamaWeights, path: Path, spec: HeadSpec, progress: Callable[[float], None], check: CheckCancelled
) -> AttachedHead:
    """Load the head in a GGUF file, which `spec` describes, for `target`.

    Raises Unsupported for a head that llama.cpp cannot run on this target, InvalidModelFile, Cancelled.
    """
    opener = _OPENERS.get(spec.kind)
    if opener is None:
        raise Unsupported(f"llama.cpp runs no heads of the kind '{spec.kind}'.", hint="Use --draft ngram, or another.")
    return opener(target, path, spec, progress, check)
