"""Trained heads on llama.cpp, opened by their kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from edgespec.backends.attached_draft import OTHER_HEAD, AttachedHead, Unsupported
from edgespec.backends.head_session import BlockHeadSession, HeadSession, check_hidden_size
from edgespec.backends.llamacpp.heads.assistant import prepare_assistant
from edgespec.backends.llamacpp.heads.checks import OpenContext
from edgespec.backends.llamacpp.heads.dflash import prepare_dflash
from edgespec.backends.llamacpp.heads.eagle3 import prepare_eagle3
from edgespec.backends.llamacpp.heads.mtp import prepare_mtp
from edgespec.backends.llamacpp.model import LlamaModel, load
from edgespec.backends.llamacpp.session import LlamaSession
from edgespec.core.drafter import BlockSession, DraftSession
from edgespec.core.protocols import Session
from edgespec.formats.heads import HeadKind, HeadSpec


class LlamaHead(AttachedHead):
    """A head beside its target."""

    def __init__(self, spec: HeadSpec, target: LlamaModel, weights: LlamaModel, open_context: OpenContext) -> None:
        """`close` frees `weights`, unless they are the target's."""
        super().__init__(spec.kind, target.tokenizer, 0 if weights is target else weights.path.stat().st_size)
        self._spec, self._weights, self._open_context = spec, weights, open_context

    def open_session(self, target: Session) -> DraftSession | BlockSession:
        assert isinstance(target, LlamaSession)
        sequence = {"sequence": target.sequence} if self.shares_kv else {}
        more_cells = self._spec.block_size if self._spec.block_size > 1 else 0
        features = target.tap(self._spec.layers or ())
        try:
            context = self._weights.open_beside(
                target, self._open_context, is_mtp=self._spec.kind in _MTP_KINDS, more_cells=more_cells, **sequence
            )
        except BaseException:
            target.untap()
            raise
        kind = HeadSession if context.reads_pairs else BlockHeadSession
        return kind(context, target, features)

    def close(self) -> None:
        if not self._spec.in_target:
            self._weights.close()


_MTP_KINDS = ("mtp", "gemma4-assistant")  # run by the MTP graph of a file, not by the graph of its model
_KINDS: dict[HeadKind, Callable[[LlamaModel, Path, HeadSpec], OpenContext]] = {
    "eagle3": prepare_eagle3,
    "mtp": prepare_mtp,
    "gemma4-assistant": prepare_assistant,
    "dflash": prepare_dflash,
    "dspark": prepare_dflash,
}
"""Check a head's file, and return how it is opened. Raise Unsupported, InvalidModelFile."""


def open_head(target: LlamaModel, path: Path, spec: HeadSpec) -> LlamaHead:
    """Load the head in a GGUF file, perhaps the target's, which `spec` describes, for `target`.

    Raises Unsupported for a head that llama.cpp cannot run on this target, InvalidModelFile, Cancelled.
    """
    if spec.kind not in _KINDS:
        raise Unsupported(f"llama.cpp runs no heads of the kind '{spec.kind}'.", hint="Use --draft ngram, or another.")
    check_hidden_size(path.name, spec, target.hidden_size)
    spec = spec.complete(target.layer_count)
    open_context, weights = _KINDS[spec.kind](target, path, spec), target
    if not spec.in_target:
        options = replace(target.options.alone, mtp=spec.kind in _MTP_KINDS)
        weights = load(path, options, sees_gpus=not target.options.on_host)
        if weights.tokenizer.vocab_size != target.tokenizer.vocab_size:
            weights.close()
            raise Unsupported(f"{path.name} has another vocabulary than the model.", hint=OTHER_HEAD)
    return LlamaHead(spec, target, weights, open_context)
