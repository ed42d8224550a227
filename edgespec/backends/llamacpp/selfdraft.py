"""Self-drafts on llama.cpp: fewer layers or bits are a second model, less context is a second cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from edgespec.backends.attached_draft import SelfDraftModel, SelfDraftSpec, Unsupported
from edgespec.backends.llamacpp.lowbit import low_bit
from edgespec.backends.llamacpp.prune import pruned
from edgespec.backends.llamacpp.session import LlamaSession
from edgespec.backends.llamacpp.shared_kv import SLACK, SharedKVSession, SparseSession
from edgespec.backends.llamacpp.weights import LlamaWeights, load_weights
from edgespec.core.protocols import CheckCancelled, Session


class LlamaSelfDraft(SelfDraftModel):
    """Weights, the target's or some of their own, and the kind of cache over them."""

    def __init__(self, target: LlamaWeights, model: LlamaWeights, method: SelfDraftSpec, extra_bytes: int) -> None:
        """`model` runs the drafts; it is freed with this where it is not the `target`."""
        self.tokenizer = target.tokenizer
        self.name = str(method)
        self.extra_bytes = extra_bytes
        self._own = model if model is not target else None
        self._model = model
        self._method = method

    def open_session(self, target: Session, check: CheckCancelled) -> Session:
        model, method = self._model, self._method
        if method.skip is not None or model.is_recurrent:  # other layers, or a state that is no cells
            return model.open_session(check)
        assert isinstance(target, LlamaSession)
        if method.sparse is None:
            session = model.open_as(SharedKVSession, check)
            session.follow(target)
            return session
        sink, window = method.sparse
        sparse = model.open_as(SparseSession, check, sink + window + SLACK)
        sparse.follow(target)
        sparse.keep_to(sink, window)
        return sparse

    def close(self) -> None:
        if self._own is not None:
            self._own.close()


def open_self_draft(
    target: LlamaWeights,
    method: SelfDraftSpec,
    folder: Path,
    progress: Callable[[float], None],
    check: CheckCancelled,
) -> SelfDraftModel:
    """See backends.Model.self_draft."""
    if method.planes:
        raise Unsupported("llama.cpp cannot read a part of its weights' bits.", hint="Use --draft qspec.")
    if method.sparse is not None and method.skip is not None:
        raise Unsupported("on llama.cpp sparse is not combined with layerskip.", hint="Use one of them.")
    if method.sparse is not None and target.is_recurrent:
        raise Unsupported("a recurrent state has no tokens to leave out.", hint="Use layerskip or --draft ngram.")
    path = target.path
    if method.bits is not None:
        path = low_bit(path, method.bits, folder, progress, check)
    if method.skip is not None:
        with pruned(path, method.skip.layers(target.layer_count), check) as (part, size):
            return LlamaSelfDraft(
                target, load_weights(LlamaWeights, part, target.options, progress=progress, check=check), method, size
            )
    if method.bits is None:
        return LlamaSelfDraft(target, target, method, 0)
    return LlamaSelfDraft(
        target, load_weights(LlamaWeights, path, target.options, check=check), method, path.stat().st_size
    )
