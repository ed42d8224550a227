"""A llama_context that several sessions share: each stages rows, and the first read of scores has all decoded."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec.backends.attached_draft import Unsupported
from edgespec.backends.devices import NewMemory
from edgespec.backends.head_session import Features, check_tapped_layers
from edgespec.backends.llamacpp.batch import FullBatch, NativeBatch
from edgespec.backends.llamacpp.library import Library, find_function
from edgespec.backends.llamacpp.streams import Streams
from edgespec.core.protocols import SOLO, BatchPeers, CheckCancelled
from edgespec.core.sampling import Ints, Logits, SamplingParams, non_finite_error
from edgespec.errors import BackendError, Cancelled

# A llama_context: its handle, its batch, its output buffer, and how a decode in it is cancelled.


MAX_TOKENS = 512  # of one decode: n_batch and n_ubatch
_ABORTED, _NO_KV_SLOT = 2, 1  # what llama_decode returns
_SCORE_ALL = (b"cogvlm",)  # architectures that need a FullBatch; of 0.3.36
_MAX_UNPOLLED_S = 0.1  # a decode that is expected to take no longer cannot be cancelled while it runs


class NativeContext:
    """One llama_context. `is_broken`: a decode has failed for a reason that no retry mends."""

    def __init__(
        self,
        lib: Library,
        model: Any,
        params: Any,
        vocab_size: int,
        *,
        max_outputs: int,
        sequences: int,
        is_cancelled: Callable[[], bool],
        max_tokens: int = MAX_TOKENS,
        has_streams: bool = False,
    ) -> None:
        """`params` have the sizes and types of the cache. Its buffers are for `max_tokens` rows of a decode.

        `has_streams`: each of the `sequences` has an equal part of the cells for itself. Raises BackendError.
        """
        scores_all = lib.metadata(model, b"general.architecture") in _SCORE_ALL
        max_outputs = max_tokens if scores_all else max_outputs
        params.n_batch = params.n_ubatch = max_tokens
        params.n_outputs_max = max_outputs
        params.n_seq_max = sequences
        params.kv_unified = not has_streams
        lib.log.clear_error()
        new_memory = NewMemory()
        # Advised when its size is logged: then the cache is allocated and not cleared yet.
        lib.log.on_line = lambda line: new_memory.advise() if "KV buffer size" in line else None
        self.handle = lib.api.llama_init_from_model(model, params)
        lib.log.on_line = None
        new_memory.advise()  # the buffers of forwards
        if not self.handle:
            raise BackendError(
                f"llama.cpp could not set up a context of {params.n_ctx} tokens: {lib.log.reason()}.",
                hint="Use a smaller --ctx, fewer --parallel answers, or fewer --gpu-layers.",
            )
        self.batch = (FullBatch if scores_all else NativeBatch)(lib.api, max_tokens, sequences)
        self.is_broken = False
        self._lib = lib
        self._is_cancelled = is_cancelled
        self._callback = lib.api.ggml_abort_callback(lambda _data: is_cancelled())  # llama.cpp keeps only a pointer
        self._no_callback = lib.api.ggml_abort_callback()
        self._is_installed = False
        self._row_s = math.inf  # seconds a row, of the last decode that succeeded
        self._shape = (max_outputs, vocab_size)
        self._outputs: Logits = np.empty((0, vocab_size), np.float32)
        self._address = 0  # of the buffer that it views

    @property
    def memory(self) -> Any:
        """The llama_memory_t handle of its cache."""
        return self._lib.api.llama_get_memory(self.handle)

    def decode(self, batch: NativeBatch | None = None) -> Logits:
        """Decode `batch`, or its own, clear it and wait: [n_outputs or more, V], mostly a view of llama.cpp's buffer.

        The first rows are those of the batch's outputs; the next decode overwrites them. Raises Cancelled where nobody
        wants them, BackendError.
        """
        batch = batch or self.batch
        n_tokens, asked = batch.native.n_tokens, batch.seal()
        started = perf_counter()
        self.run(self._lib.api.llama_decode, batch)
        outputs: Logits = self._find_outputs()[asked]
        self._row_s = (perf_counter() - started) / n_tokens
        return outputs

    def run(self, function: Callable[[Any, Any], int], batch: NativeBatch | None = None) -> None:
        """Have llama_decode or llama_encode run `batch`, or its own, and clear it. Raises as `decode`."""
        batch = batch or self.batch
        self._lib.log.clear_error()
        is_wanted = self._prepare_abort(batch.native.n_tokens)
        code = function(self.handle, batch.native) if is_wanted else _ABORTED
        batch.clear()
        if code:
            raise self._error(code)

    def free(self) -> None:
        self._lib.api.llama_free(self.handle)
        self.handle = None

    def _prepare_abort(self, n_tokens: int) -> bool:
        """Install ggml's abort callback for a long decode of `n_tokens` alone; returns whether to start that decode.

        ggml calls it for each node of its graph, which costs a sixth of the decode time of a model of 6M parameters.
        """
        is_long = n_tokens * self._row_s > _MAX_UNPOLLED_S
        if is_long != self._is_installed:
            self._is_installed = is_long
            callback = self._callback if is_long else self._no_callback
            self._lib.api.llama_set_abort_callback(self.handle, callback, None)
        return is_long or not self._is_cancelled()

    def _error(self, code: int) -> Exception:
        if code == _ABORTED:
            return Cancelled()
        if code == _NO_KV_SLOT:
            return BackendError("llama.cpp's cache is full.", hint="Set a larger --ctx, or start a new chat.")
        self.is_broken = True
        return BackendError(
            f"llama.cpp failed to decode (code {code}): {self._lib.log.reason()}.",
            hint="Try again; if it persists, run with --verbose and report the log.",
        )

    def _find_outputs(self) -> Logits:
        """llama_get_logits waits until an accelerator has finished."""
        pointer = self._lib.api.llama_get_logits(self.handle)
        if not pointer:
            raise BackendError("llama.cpp returned no logits.", hint="Report this as a bug, with --verbose output.")
        address = ctypes.addressof(pointer.contents)
        if address != self._address:  # making a view costs 20 us
            self._address = address
            self._outputs = np.ctypeslib.as_array(pointer, self._shape)
        return self._outputs


# Hidden states of a context's tokens, copied out of llama.cpp after each decode for a trained head.


Floats = npt.NDArray[np.float32]

# Whose graphs name the inputs of all their layers, one row of the hidden size for each token: llama.cpp aborts the
# process where others are asked for them. Of 0.3.36; qwen4exp names wider rows, which it also aborts on.
_WITH_LAYERS = frozenset(
    (
        *("bailingmoe3", "deepseek4", "gemma4", "gpt-oss", "hunyuan-dense", "hunyuan_vl", "lfm2", "lfm2moe", "llama"),
        *("mimo2", "minimax-01", "minimax-m2", "muse-glimmer", "nanbeige", "nemotron_h", "nemotron_h_moe"),
        *("qwen3", "qwen35", "qwen35moe", "qwen3moe", "qwen3next"),
    )
)
# Whose graphs name the output of the final norm (t_h_nextn), likewise. Other contexts leave the rows as they are;
# deepseek4 names wider rows, of before its norm.
_WITH_LAST_STATE = frozenset(
    (
        *("bailingmoe3", "cohere2moe", "deepseek2", "deepseek32", "gemma4", "glm-dsa", "glm4moe", "glm5-next"),
        *("gpt-oss", "hy_v3", "mimo2", "nemotron_h", "nemotron_h_moe", "qwen35", "qwen35moe", "qwen3next", "step35"),
    )
)


class HiddenStates:
    """The inputs of some layers, or the last hidden state, of a session's tokens; `features` are those of its text."""

    def __init__(self, lib: Library, context: int, layers: Sequence[int]) -> None:
        """`context` is a llama_context handle, whose decodes copy these layers from now on.

        The number of layers, or no layer at all, stands for the output of the final norm. Raises Unsupported.
        """
        api = lib.api
        model = api.llama_get_model(context)
        count: int = api.llama_model_n_layer(model)
        self._layers = tuple(layers) or (count,)
        _check_layers(lib.metadata(model, b"general.architecture").decode("utf-8", "replace"), count, self._layers)
        self.features: Features[Floats] = Features(np.concatenate)
        self._context = context
        self._size: int = api.llama_model_n_embd(model)
        self.width = len(self._layers) * self._size  # numbers a token
        self._readers = [_enable(context, layer, is_last=layer == count) for layer in self._layers]
        self._buffers: dict[int, Floats] = {}  # llama.cpp's, by address

    def read(self, first: int, n: int) -> Floats:
        """[n, width] a copy of rows `first` to `first + n - 1` of the batch that was decoded last, without an error."""
        rows = np.empty((n, len(self._readers), self._size), np.float32)
        for i, find in enumerate(self._readers):
            address = find()
            if (buffer := self._buffers.get(address)) is None:
                self._buffers[address] = buffer = float_rows(address, MAX_TOKENS, self._size)
            rows[:, i] = buffer[first : first + n]
        return rows.reshape(n, self.width)


def float_rows(address: int, n: int, size: int) -> Floats:
    """[n, size] a view of llama.cpp's memory."""
    buffer: Any = (ctypes.c_float * (n * size)).from_address(address)
    return np.frombuffer(buffer, np.float32).reshape(n, size)


def _enable(context: int, layer: int, *, is_last: bool) -> Callable[[], int]:
    """Have decodes copy a layer's input, or the last hidden state; returns what finds the address of its first row."""
    if is_last:
        find_function("llama_set_embeddings_nextn")(context, True, False)
        return partial(find_function("llama_get_embeddings_nextn"), context)
    find_function("llama_set_embeddings_layer_inp")(context, layer, True)
    return partial(find_function("llama_get_embeddings_layer_inp"), context, layer)


def _check_layers(architecture: str, count: int, layers: Sequence[int]) -> None:
    """Raises Unsupported where llama.cpp would abort, or give no rows."""
    check_tapped_layers(layers, count)
    for name, is_wanted, architectures in (
        ("hidden states", any(layer < count for layer in layers), _WITH_LAYERS),
        ("last hidden state", count in layers, _WITH_LAST_STATE),
    ):
        if is_wanted and architecture not in architectures:
            raise Unsupported(
                f"llama.cpp does not give the {name} of '{architecture}' models, which the head reads.",
                hint="Use --draft auto or --draft ngram.",
            )


# Rows staged for the next decode of a context, and the scores that it will have.


@dataclass(slots=True)
class PendingBatch:
    """What one decode computes.

    decode   has it computed
    scores   by sequence id
    outputs  [n_outputs or more, V] after the decode, until the next one of the context
    seconds  that the decode took; None before it
    error    why there are no outputs
    """

    decode: Callable[[], None]
    scores: dict[int, LlamaScores] = field(default_factory=dict)
    n_tokens: int = 0
    n_outputs: int = 0
    outputs: Logits | None = None
    seconds: float | None = None
    error: Exception | None = None


@dataclass(slots=True)
class SequenceSlot:
    """A session's place in a context.

    sequence  its id in llama.cpp
    check     raises Cancelled when nobody wants the session's forwards any more
    scores    of its last forward, until they are committed or dropped
    is_dirty  rows of it were staged that are not yet part of its text
    tap       copies hidden states of its rows, for a trained head
    """

    sequence: int
    check: CheckCancelled
    scores: LlamaScores | None = None
    is_dirty: bool = False
    tap: HiddenStates | None = None

    @property
    def is_cancelled(self) -> bool:
        try:
            self.check()
        except Cancelled:
            return True
        return False


class LlamaScores:
    """Logits [rows, V] of a decode, read from llama.cpp's own buffer. The first read has the batch decoded."""

    def __init__(
        self,
        slot: SequenceSlot,
        batch: PendingBatch,
        fill: Callable[[], None],
        n_tokens: int,
        n_outputs: int,
        *,
        is_prefill: bool,
        is_after_flush: bool,
    ) -> None:
        """Add `n_tokens` tokens of `slot`, the last `n_outputs` of which have scores, to `batch`.

        `fill` writes them to the native batch. `is_after_flush`: the context had to decode a full batch before it could
        take them. Where the slot has a tap, `states` are [n_tokens, width] once they are decoded.
        """
        self.slot = slot
        self.n_tokens, self.n_outputs = n_tokens, n_outputs
        self.is_prefill = is_prefill
        self.waited_s = self.peer_wait_s = 0.0
        self.states: Floats | None = None
        self._batch, self._fill = batch, fill
        self._rows: Logits | None = None
        self._is_after_flush = is_after_flush
        batch.scores[slot.sequence] = slot.scores = self
        batch.n_tokens += n_tokens
        batch.n_outputs += n_outputs
        slot.is_dirty = True

    @property
    def peer_rows(self) -> int | None:
        has_prefill = any(scores.is_prefill for scores in self._batch.scores.values())
        return None if has_prefill or self._is_after_flush else self._batch.n_tokens - self.n_tokens

    def argmax(self) -> Ints:
        rows = self.read()
        best: Ints = rows.argmax(axis=1).astype(np.int32)
        if not np.isfinite(rows[np.arange(len(best)), best]).all():
            raise non_finite_error()
        return best

    def logits(self, row: int) -> Logits:
        z: Logits = self.read()[row]
        return z

    def host_logits(self, row: int) -> Logits | None:
        return None if self._rows is None else self._rows[row]

    def draw(self, params: SamplingParams, uniforms: Sequence[float]) -> Ints | None:
        return None  # the logits are in host memory already

    def read(self) -> Logits:
        """[rows, V]. Raises Cancelled, BackendError."""
        if self._rows is None:
            batch = self._batch
            if batch.seconds is None:
                batch.decode()
                self.waited_s = batch.seconds or 0.0
            else:
                self.peer_wait_s = batch.seconds
            if batch.error is not None:
                raise batch.error
            assert batch.outputs is not None
            first = self._place[1]
            self._rows = batch.outputs[first : first + self.n_outputs]
        return self._rows

    def place(self, token: int, output: int) -> tuple[int, int]:
        """Write the rows behind `token` others, `output` of which have scores; returns both with these."""
        self._place = token, output
        self._fill()
        return token + self.n_tokens, output + self.n_outputs

    def copy_states(self) -> None:
        """Called after the decode, if the slot has a tap."""
        if self.slot.tap is not None:
            self.states = self.slot.tap.read(self._place[0], self.n_tokens)

    def copy_rows(self) -> None:
        """Keep the rows if they may still be read: the next decode overwrites the buffer that they are in."""
        if self.slot.scores is self and self._batch.error is None:
            self._rows = self.read().copy()


MAX_ROWS = 64  # of one session's forward: a root and 63 draft nodes
_ROWS_PER_SLOT = 8  # output rows of a shared context, where that is more
_MAX_SEQUENCES = 256  # of any llama.cpp context
_PREFILL_CHUNK_WITH_PEERS = 64  # tokens, while other sessions decode and wait for the same forward


class Context:
    """A native context with room for `slots` sessions, each of which is a sequence.

    Either all sequences are over the same cells, and a row's attention passes over those of the others too. Or there
    are streams: each sequence has cells of its own, and drafts are chains. llama.cpp then splits a batch into forwards
    of equally many rows of sequences with consecutive ids. The first `slots` sequences are those of sessions, the rest
    are spare, for the branches of draft trees.

    max_outputs  rows with scores that one decode may have
    """

    def __init__(
        self, lib: Library, model: Any, params: Any, vocab_size: int, slots: int, *, has_trees: bool, has_streams: bool
    ) -> None:
        """`params` have the sizes and types of the cache, for all slots together.

        `has_trees`: drafts may be trees, unless there are streams. Raises BackendError.
        """
        self.max_outputs = max(MAX_ROWS, _ROWS_PER_SLOT * slots)
        self.has_trees = has_trees and not has_streams
        count = min(self.max_outputs, _MAX_SEQUENCES) if self.has_trees else slots  # llama.cpp takes no more than rows
        self._slots = frozenset(range(slots))
        self._free = set(self._slots)
        self._spare = list(range(slots, count))
        self._staged, self._last = PendingBatch(self.decode), PendingBatch(self.decode)
        self.native = NativeContext(
            lib,
            model,
            params,
            vocab_size,
            max_outputs=self.max_outputs,
            sequences=count,
            is_cancelled=self._is_cancelled,
            has_streams=has_streams,
        )
        self.is_shared = slots > 1
        size = params.n_ctx // slots
        self.streams = Streams(lib.api, self.native, slots, size, MAX_TOKENS) if has_streams else None

    @property
    def has_streams(self) -> bool:
        return self.streams is not None

    @property
    def is_usable(self) -> bool:
        """Whether it can take another session."""
        return bool(self.native.handle) and not self.native.is_broken

    @property
    def max_nodes(self) -> int:
        """Nodes of one more draft, each of which may end a branch."""
        return min(MAX_ROWS - 1, len(self._spare)) if self.has_trees else MAX_ROWS - 1

    def acquire(self, check: CheckCancelled) -> SequenceSlot:
        """A slot for one more session, with the lowest id. Raises BackendError where all are taken."""
        if not self._free:
            raise BackendError("all caches of the model are in use.", hint="Use a larger --parallel.")
        sequence = min(self._free)
        self._free.remove(sequence)
        return SequenceSlot(sequence, check)

    def release(self, slot: SequenceSlot) -> None:
        """Its sequence is empty. The native context is freed with the last session."""
        self._free.add(slot.sequence)
        self._last.scores.pop(slot.sequence, None)
        if self._free == self._slots:
            self.native.free()

    def acquire_spare(self, n: int) -> list[int]:
        """[n] spare ids, all of whose cells are free; fewer where there are no more."""
        taken, self._spare = self._spare[:n], self._spare[n:]
        return taken

    def release_spare(self, ids: Sequence[int]) -> None:
        """Their cells are free again."""
        self._spare += ids

    def peers(self, slot: SequenceSlot) -> BatchPeers:
        """The other sessions with rows in the staged batch, or else in the last one."""
        if not self.is_shared:
            return SOLO
        others = self._peer_scores(slot)
        decoding = [scores.n_tokens for scores in others if not scores.is_prefill]
        return BatchPeers(len(decoding), sum(decoding), len(decoding) < len(others))

    def prefill_chunk(self, slot: SequenceSlot) -> int:
        """Prompt tokens to read in one decode: few while others decode, else an equal share among those who prefill."""
        if not self.is_shared:
            return MAX_TOKENS
        others = self._peer_scores(slot)
        n_prefills = sum(scores.is_prefill for scores in others)
        return _PREFILL_CHUNK_WITH_PEERS if n_prefills < len(others) else MAX_TOKENS // (1 + n_prefills)

    def stage_chain(
        self, slot: SequenceSlot, tokens: Sequence[int], position: int, *, outputs: int, is_prefill: bool
    ) -> LlamaScores:
        """Stage `tokens` one after another from `position` of the session's text; the last `outputs` have scores."""
        fill = partial(self.native.batch.chain, tokens, position, slot.sequence, outputs=outputs)
        return self._stage(slot, fill, len(tokens), outputs, is_prefill=is_prefill)

    def stage_tree(
        self, slot: SequenceSlot, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[Sequence[int]]
    ) -> LlamaScores:
        """Stage one row a token, each with scores, at its own position and in all of its `sequences`."""
        fill = partial(self.native.batch.tree, tokens, positions, sequences)
        return self._stage(slot, fill, len(tokens), len(tokens), is_prefill=False)

    def flush(self, slot: SequenceSlot) -> None:
        """Decode the staged batch if it has rows of `slot`."""
        if slot.sequence in self._staged.scores:
            self.decode()

    def decode(self) -> None:
        """Decode what is staged. Errors are kept in the batch, for every session that reads its scores."""
        for scores in self._last.scores.values():
            scores.copy_rows()
        self._last = batch = self._staged
        token = output = 0
        order = [*batch.scores] if self.streams is None else sorted(batch.scores)
        filled = {} if self.streams is None else self.streams.fill_gaps(order, batch.n_tokens)
        for sequence in sorted([*order, *filled]) if filled else order:
            if sequence in filled:
                self.native.batch.chain((0,), filled[sequence], sequence, outputs=0)
                token += 1
            else:
                token, output = batch.scores[sequence].place(token, output)
        started = perf_counter()
        try:
            batch.outputs = self.native.decode()
            for scores in batch.scores.values():
                scores.copy_states()
        except (Cancelled, BackendError) as error:
            batch.error = error
        batch.seconds = perf_counter() - started
        if self.streams is not None:
            self.streams.end_decode(batch.seconds if batch.error is None else None)
        self._staged = PendingBatch(self.decode)

    def _stage(
        self, slot: SequenceSlot, fill: Callable[[], None], n: int, outputs: int, *, is_prefill: bool
    ) -> LlamaScores:
        batch = self._staged
        is_full = batch.n_tokens + n > MAX_TOKENS or batch.n_outputs + outputs > self.max_outputs
        if is_full:
            self.decode()
        return LlamaScores(slot, self._staged, fill, n, outputs, is_prefill=is_prefill, is_after_flush=is_full)

    def _peer_scores(self, slot: SequenceSlot) -> list[LlamaScores]:
        """The scores of each other session in the staged batch, or else in the last one."""
        latest = {**self._last.scores, **self._staged.scores}
        return [scores for sequence, scores in latest.items() if sequence != slot.sequence]

    def _is_cancelled(self) -> bool:
        """Whether none of the sessions in the batch wants it any more."""
        return all(scores.slot.is_cancelled for scores in self._last.scores.values())
