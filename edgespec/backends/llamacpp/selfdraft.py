"""Self-drafts on llama.cpp. Fewer layers or bits need a second model, less context a second cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from edgespec.backends.attached_draft import AttachedDraft, SelfDraftSpec, Unsupported
from edgespec.backends.llamacpp.lowbit import low_bit_copy
from edgespec.backends.llamacpp.prune import prune
from edgespec.backends.llamacpp.session import LlamaSession
from edgespec.backends.llamacpp.shared_kv import SLACK, SharedKVSession, SparseSession
from edgespec.backends.llamacpp.weights import LlamaWeights, load_weights
from edgespec.core.protocols import CheckCancelled, Session


class LlamaSelfDraft(AttachedDraft):
    """The target's weights or a model of its own, and the kind of session over them."""

    def __init__(self, target: LlamaWeights, model: LlamaWeights, method: SelfDraftSpec, extra_bytes: int) -> None:
        """`model` runs the drafts; `close` frees it unless it is `target`."""
        self.tokenizer = target.tokenizer
        self.name = str(method)
        self.extra_bytes = extra_bytes
        self._own = model if model is not target else None
        self._model = model
        self._method = method

    def open_session(self, target: Session, check: CheckCancelled) -> Session:
        model, method = self._model, self._method
        if method.skip is not None or model.is_recurrent:  # its cells cannot come from the target
            return model.open_session(check)
        assert isinstance(target, LlamaSession)
        if method.sparse is None:
            session = model.open_as(SharedKVSession, check)
            session.attach(target)
            return session
        sink, window = method.sparse
        sparse = model.open_as(SparseSession, check, sink + window + SLACK)
        sparse.attach(target)
        sparse.set_window(sink, window)
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
) -> AttachedDraft:
    """See backends.Model.attach."""
    if method.sparse is not None and method.skip is not None:
        raise Unsupported("llama.cpp does not combine sparse with layerskip.", hint="Use one of them.")
    if method.sparse is not None and target.is_recurrent:
        raise Unsupported(
            "sparse needs attention layers only, and this model has recurrent states.",
            hint="Use layerskip or --draft ngram.",
        )
    target.lends_cells = target.lends_cells or (method.skip is None and not target.is_recurrent)
    path = target.path
    if method.bits is not None:
        path = low_bit_copy(path, method.bits, folder, progress, check)
    if method.skip is not None:
        with prune(path, method.skip.layers(target.layer_count), check) as (part, size):
            return LlamaSelfDraft(
                target,
                load_weights(LlamaWeights, part, target.options.alone, progress=progress, check=check),
                method,
                size,
            )
    if method.bits is None:
        return LlamaSelfDraft(target, target, method, 0)
    return LlamaSelfDraft(
        target, load_weights(LlamaWeights, path, target.options.alone, check=check), method, path.stat().st_size
    )
