"""Weights of heads in files of their own, which must be for the target's sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from edgespec.backends.attached_draft import Unsupported
from edgespec.backends.llamacpp.weights import LlamaWeights, load_weights
from edgespec.core.protocols import CheckCancelled
from edgespec.formats.heads import HeadSpec

OTHER_HEAD = "Use a head that was trained for this model, or --draft auto."


def require_size(spec: HeadSpec, target: LlamaWeights, path: Path) -> None:
    """Raises Unsupported for a head that reads hidden states of another size than the target's."""
    if spec.hidden_size != target.hidden_size:
        raise Unsupported(
            f"{path.name} is a head for a hidden size of {spec.hidden_size}; the model has {target.hidden_size}.",
            hint=OTHER_HEAD,
        )


def load_head_weights(
    path: Path, target: LlamaWeights, progress: Callable[[float], None], check: CheckCancelled, *, mtp: bool = False
) -> LlamaWeights:
    """Load the head in a GGUF file; `mtp`: with its MTP layers. Raises Unsupported, and what `load_weights` raises."""
    options = replace(target.options.alone, mtp=mtp)
    weights = load_weights(LlamaWeights, path, options, progress=progress, check=check)
    if weights.tokenizer.vocab_size != target.tokenizer.vocab_size:
        weights.close()
        raise Unsupported(f"{path.name} has another vocabulary than the model.", hint=OTHER_HEAD)
    return weights
