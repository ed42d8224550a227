"""Self-drafts on llama.cpp. Fewer layers or bits need a second model, less context a second cache."""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from edgespec.backends.attached_draft import AttachedDraft, SelfDraftSpec, Unsupported
from edgespec.backends.llamacpp.context import MAX_ROWS
from edgespec.backends.llamacpp.low_bit import low_bit_copy
from edgespec.backends.llamacpp.model import LlamaModel, load
from edgespec.backends.llamacpp.prune import Part, prune
from edgespec.backends.llamacpp.session import LlamaSession
from edgespec.backends.options import LoadOptions
from edgespec.backends.sequence import check_prompt, shared_prefix
from edgespec.core.decoding import read_prompt
from edgespec.core.peers import Yield
from edgespec.core.protocols import Draft, PrefillProgress, Session
from edgespec.core.scores import HostScores, Scores
from edgespec.errors import BackendError, InvalidModelFile, RollbackError
from edgespec.isolated import ChildDied, run_in_child

SLACK = 2 * MAX_ROWS  # cells of a sparse cache beyond its sink and window


class SharedKVSession(LlamaSession):
    """Copies the cells of a target whose cache has equal layers and types, and never holds less text than it."""

    def __init__(self, target: LlamaSession, *parts: Any) -> None:
        """Drafts for `target`. `parts` are the arguments of LlamaSession."""
        super().__init__(*parts)
        self._target = target
        self.capabilities = replace(self.capabilities, shares_kv=True)
        self._target_revision = -1  # the last one whose text is held

    @property
    def position(self) -> int:
        """The tokens in the cache, once it has what the target holds. Each forward asks for it before it starts."""
        self._sync()
        return len(self.tokens)

    def prefill(self, tokens: Sequence[int]) -> Generator[PrefillProgress | Yield, None, Scores]:
        """The scores have no row if the target holds all of `tokens`."""
        check_prompt(tokens, self.capabilities)
        self._sync()
        target_tokens = self._target.tokens
        if len(self.tokens) < len(tokens) or shared_prefix(target_tokens, tokens, len(tokens)) < len(tokens):
            self._trim_to(shared_prefix(self.tokens, tokens, len(tokens) - 1))
            return (yield from super().prefill(tokens))
        self._trim_to(len(target_tokens))
        yield PrefillProgress(len(tokens), len(tokens))
        return HostScores(())

    def rewind(self, position: int) -> int:
        self._sync()
        return self._trim_to(max(position, len(self._target.tokens)))

    def _sync(self) -> None:
        """Hold what the target holds, if it has changed."""
        target = self._target
        if self._target_revision == target.revision or self._is_closed:
            return
        self._target_revision = target.revision
        tokens = target.tokens
        held = self._trim_to(shared_prefix(self.tokens, tokens, len(tokens)))
        if held < len(tokens) and self._copy_cells(self._missing_positions(held, len(tokens))):
            self.tokens = list(tokens)

    def _trim_to(self, position: int) -> int:
        """`LlamaSession.rewind`, which may go below the target's position."""
        return super().rewind(position)

    def _missing_positions(self, start: int, end: int) -> list[range]:
        """The positions to copy after the target went on from `start` to `end`."""
        return [range(start, end)]

    def _copy_cells(self, positions: list[range]) -> bool:
        """Copy these cells of the target; False if llama.cpp cannot, and the text has to be computed."""
        api, context, target = self._lib.api, self.context, self._target.context
        if target.has_streams:  # a part of a sequence cannot be copied out of its stream
            return False
        (source,), (copy,) = target.acquire_spare(1), context.acquire_spare(1)
        saved = self._target.save_cells(source, positions)
        is_copied = bool(saved and api.llama_state_seq_set_data(context.native.handle, saved, len(saved), copy))
        if is_copied:
            api.llama_memory_seq_cp(context.native.memory, copy, self.sequence, -1, -1)
        api.llama_memory_seq_rm(context.native.memory, copy, -1, -1)
        target.release_spare([source])
        context.release_spare([copy])
        return is_copied


class SparseSession(SharedKVSession):
    """Sees only the first `sink` and about the last `window` tokens, in a cache of sink + window + SLACK cells."""

    def __init__(self, sink: int, window: int, *parts: Any) -> None:
        """`parts` are the arguments of SharedKVSession."""
        super().__init__(*parts)
        self._sink, self._window = sink, window
        self._window_start = sink  # position of the first cell behind the sink

    def forward(self, root: int, draft: Draft, *, run_ahead: bool = False) -> Scores:
        self._sync()
        self._reserve(1 + len(draft))
        return super().forward(root, draft)

    def _take_chunk(self, tokens: Sequence[int], start: int) -> Sequence[int]:
        chunk = tokens[start : start + MAX_ROWS]
        self._reserve(len(chunk))
        return chunk

    def _trim_to(self, position: int) -> int:
        if position < self._window_start:  # llama.cpp needs consecutive positions: without the window, only the sink
            position = min(position, self._sink)
            self._window_start = self._sink
        return super()._trim_to(position)

    def _missing_positions(self, start: int, end: int) -> list[range]:
        first = max(self._window_start, end - self._window)
        self._drop_middle(first)
        return [span for span in (range(start, min(end, self._sink)), range(max(start, first), end)) if span]

    def _reserve(self, rows: int) -> None:
        """Make the cache take `rows` more."""
        if len(self.tokens) + rows - self._window_start > self._window + SLACK:
            self._drop_middle(len(self.tokens) - self._window)

    def _drop_middle(self, first: int) -> None:
        """Drop the cells between the sink and position `first`."""
        if first > self._window_start:
            memory = self.context.native.memory
            if not self._lib.api.llama_memory_seq_rm(memory, self.sequence, self._window_start, first):
                raise RollbackError("llama.cpp could not drop the middle of its cache.", hint="Use --draft ngram.")
            self._window_start = first


class LlamaSelfDraft(AttachedDraft):
    """The target's weights or a model of its own, and the kind of session over them."""

    def __init__(self, target: LlamaModel, model: LlamaModel, method: SelfDraftSpec, extra_bytes: int) -> None:
        """`model` runs the drafts; `close` frees it unless it is `target`."""
        self.tokenizer = target.tokenizer
        self.name = str(method)
        self.extra_bytes = extra_bytes
        self._own = model if model is not target else None
        self._lender = target if method.kept is None and not target.is_recurrent else None
        if self._lender is not None:
            self._lender.lends_cells += 1
        self._model = model
        self._method = method

    def open_session(self, target: Session) -> Session:
        model, method = self._model, self._method
        if method.kept is not None or model.is_recurrent:  # its cells cannot come from the target
            return model.open_session()
        target = getattr(target, "inner", target)
        assert isinstance(target, LlamaSession)
        if method.sparse is None:
            return model.open_as(partial(SharedKVSession, target))
        return model.open_as(partial(SparseSession, *method.sparse, target), sum(method.sparse) + SLACK)

    def close(self) -> None:
        if self._lender is not None:
            self._lender.lends_cells -= 1
            self._lender = None
        if self._own is not None:
            self._own.close()


def open_self_draft(target: LlamaModel, method: SelfDraftSpec, folder: Path) -> AttachedDraft:
    if method.sparse is not None and method.kept is not None:
        raise Unsupported("llama.cpp does not combine sparse with layerskip.", hint="Use one of them.")
    if method.sparse is not None and target.is_recurrent:
        raise Unsupported(
            "sparse needs attention layers only, and this model has recurrent states.",
            hint="Use layerskip or --draft ngram.",
        )
    path, given = target.path, target.options
    options = replace(
        given.alone,
        gpu_layers=given.gpu_layers,
        n_cpu_moe=given.n_cpu_moe and target.layer_count,  # the GPU had no memory for all of the target's
        override_tensor=given.override_tensor,
    )
    if method.bits is not None:
        path = low_bit_copy(path, method.bits, folder)
    if method.kept is not None:
        kept = method.layers(target.layer_count)
        with prune(path, kept) as part:
            if target.is_recurrent or target.has_window or not part.has_equal_blocks:
                _require_runnable(part, target.path.name, kept)
            model = load(part.path, options)
            return LlamaSelfDraft(target, model, method, part.nbytes)
    if method.bits is None:
        return LlamaSelfDraft(target, target, method, 0)
    return LlamaSelfDraft(target, load(path, options), method, path.stat().st_size)


def _require_runnable(part: Part, name: str, kept: Sequence[int]) -> None:
    """Try a part of the model `name` in a process of its own: llama.cpp aborts without a layer of each kind of cache.

    Raises Unsupported, DoesNotFit, Cancelled.
    """
    try:
        run_in_child(_decode, part.path)
    except (ChildDied, InvalidModelFile, BackendError) as error:
        layers = "layer" if len(kept) == 1 else "layers"
        raise Unsupported(
            f"llama.cpp cannot run {name} with only its {layers} {', '.join(map(str, kept))}.",
            hint="Keep layers of every kind that the model has, or use --draft ngram.",
        ) from error


def _decode(path: Path) -> None:
    """Decode a few tokens of the model at `path`, without a word on stderr. Raises InvalidModelFile, BackendError."""
    os.environ["GGML_NO_BACKTRACE"] = "1"
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    model = load(path, LoadOptions(context_size=256, threads=1, gpu_layers=0))
    session = model.open_session()
    read_prompt(session, [0, 1])
    session.forward(0, Draft.chain([1])).argmax()
    session.commit(())
    session.close()
    model.close()
