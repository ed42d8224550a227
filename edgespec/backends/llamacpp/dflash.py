"""DFlash and DSpark heads on llama.cpp: several tokens in one forward over hidden states of the target.

A block has the root and a mask token for each of the positions after it. Its rows see each other and the target's
states before the root. DSpark adds to the logits of a row a bias that depends on the token before, for which the graph
takes the most probable one of the row before (SpecForge's Markov head).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.backends.attached_draft import AttachedHead, Features, Unsupported
from edgespec.backends.llamacpp.context import Floats, NativeBatch
from edgespec.backends.llamacpp.library import Library
from edgespec.backends.llamacpp.pair_session import MAX_ROWS, DraftContext, check_ids, load_head_weights, require_size
from edgespec.backends.llamacpp.session import LlamaSession
from edgespec.backends.llamacpp.weights import LlamaWeights
from edgespec.backends.sequence import shared_prefix
from edgespec.core.protocols import CheckCancelled, Session
from edgespec.core.sampling import Logits
from edgespec.errors import BackendError
from edgespec.formats.gguf import Header
from edgespec.formats.gguf_validate import read_file
from edgespec.formats.heads import HeadSpec

# A llama_context over a DFlash head: the target's hidden states become keys and values that a block attends to.


_ROPE_SECTIONS = 4  # positions of a row of states where the rotary embedding has sections


class BlockContext(DraftContext):
    """Its cache has the keys and values of the target's states by position, and while it drafts those of a block.

    Follows src/models/dflash.cpp of llama.cpp, which takes the embeddings and the output matrix of `ctx_other` where
    the head has none.
    """

    def __init__(
        self,
        lib: Library,
        model: Any,
        params: Any,
        *,
        width: int,
        vocab_size: int,
        is_causal: bool,
        check: CheckCancelled,
    ) -> None:
        """`width`: numbers of a target's row. `is_causal`: whether a block's rows see only those before.

        Raises BackendError.
        """
        super().__init__(lib, model, params, vocab_size=vocab_size, check=check)
        lib.api.llama_set_causal_attn(self._native.handle, is_causal)
        self._features = np.zeros((MAX_ROWS, width), np.float32)
        self._positions = np.zeros(_ROPE_SECTIONS * MAX_ROWS, np.int32)
        self._states = NativeBatch(lib.api, MAX_ROWS, 1)
        self._states.native.token = None
        self._states.native.embd = self._features.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        self._states.native.pos = self._positions.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))

    def inject(self, features: Floats, position: int) -> None:
        """Add the target's rows [n, width] of consecutive positions, at most MAX_ROWS. Raises Cancelled, BackendError.

        Where the rotary embedding has sections, those of text have one position and the last has none.
        """
        n = len(features)
        self._features[:n] = features
        self._states.chain([0] * n, position, 0, outputs=0)
        sections = self._positions[: _ROPE_SECTIONS * n].reshape(_ROPE_SECTIONS, n)
        sections[:-1] = np.arange(position, position + n)
        sections[-1] = 0
        self._native.decode(self._states)

    def draft(self, tokens: Sequence[int], position: int) -> Logits:
        """[n, V] of the rows of a block: a view that the next call overwrites. Its rows stay in the cache until `trim`.

        Raises Cancelled, BackendError.
        """
        self._native.batch.chain(tokens, position, 0, outputs=len(tokens))
        return self._native.decode()[: len(tokens)]


# Checks of DFlash and DSpark files on which llama.cpp would abort the process, later than it loads them.


def check_file(header: Header, path: Path, vocab_size: int) -> None:
    """That llama.cpp runs the head for a target with `vocab_size` tokens. Raises InvalidModelFile, Unsupported."""
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    for name, found in (
        ("DFlash2", "selector_hidden.weight" in shapes),  # which drafts by its selector and not by its logits
        ("DeepSeek V4's DSpark", bool(header.own("hyper_connection_count"))),
    ):
        if found:
            raise Unsupported(f"{path.name} is a head of the kind {name}, which is not run.", hint="Use --draft auto.")
    _check_attention(header)
    _check_rope(header)
    if (d2t := next((tensor for tensor in header.tensors if tensor.name == "d2t"), None)) is not None:
        if "output.weight" not in shapes:
            raise header.invalid("it has a reduced vocabulary and no output matrix")
        check_ids(header, path, d2t, shapes["output.weight"][-1], vocab_size)


def _check_attention(header: Header) -> None:
    if header.own("attention.key_length") != header.own("attention.value_length"):
        raise header.invalid("its keys and values differ in size")
    heads, kv_heads = header.per_block("attention.head_count"), header.per_block("attention.head_count_kv")
    n, n_kv = set(heads or (0,)), set(kv_heads or heads or (0,))
    if len(n) > 1 or len(n_kv) > 1 or min(*n, *n_kv) < 1 or max(n) % max(n_kv):
        raise header.invalid("its layers differ in their heads, or heads do not share keys evenly")


def _check_rope(header: Header) -> None:
    heads = header.per_block("attention.head_count") or (1,)
    width = header.own("attention.key_length") or (header.own("embedding_length") or 0) // heads[0]
    rotated = header.own("rope.dimension_count")
    if not 0 <= (rotated := width if rotated is None else rotated) <= width or rotated % 2:
        raise header.invalid(f"it rotates {rotated} of {width} numbers of a key")
    sections = header.metadata.get("dflash.rope.dimension_sections")
    if isinstance(sections, int | np.ndarray):  # one number stands for all of them
        numbers = [sections] * 4 if isinstance(sections, int) else [int(number) for number in sections]
        if any(numbers) and (numbers[0] <= 0 or min(numbers) < 0 or sum(numbers) > width):
            raise header.invalid(f"its rotary embedding has the sections {numbers} of {width} numbers")


@dataclass(frozen=True, slots=True)
class Block:
    """The rows of a block.

    size        rows, the root among them
    mask_token  stands at every position but the root's
    first       the row that predicts the token after the root; those before predict nothing
    is_causal   whether rows see only those before
    """

    size: int
    mask_token: int
    first: int
    is_causal: bool


class DflashSession:
    """A BlockSession. Its cache has the target's states by position, up to the last token but the root.

    A block always has the rows that the head was trained with, even if fewer are asked for: they see each other, so
    the logits of the first ones depend on how many follow.
    """

    def __init__(self, head: BlockContext, target: LlamaSession, features: Features[Floats], block: Block) -> None:
        """`features` are those of `target`, whose tap ends with this session.

        `head` holds as many rows as the target tokens and a block, and is freed.
        """
        self.block_size = block.size - block.first
        self._head = head
        self._target = target
        self._features = features
        self._block = block
        self._text: list[int] = []  # the tokens whose states are held, from `_first` on
        self._first = 0

    def begin(self, text: Sequence[int]) -> None:
        """Keeps the states of the prefix that `text` shares with the last one."""
        del self._text[shared_prefix(self._text, text, len(text)) :]

    def pending_tokens(self, text: Sequence[int]) -> int:
        """Tokens of `text` whose states are not in the cache; the root is always one of them."""
        return len(text) - max(self._settle(len(text) - 1), self._features.start)

    def block(self, text: Sequence[int], window: int, n: int) -> list[Logits] | None:
        """As core.drafter.BlockSession. Each row is a distribution of its own, whatever the others turn out to be.

        Where the target has gone back behind states that were released, those before are not read.
        """
        self._read(text, window)
        masks = [self._block.mask_token] * (self._block.size - 1)
        rows = self._head.draft([text[-1], *masks], len(text) - 1)[self._block.first :]
        return [row.copy() for row in rows[:n]]

    def close(self) -> None:
        self._target.untap()
        self._head.free()

    def _read(self, text: Sequence[int], window: int) -> None:
        """Hold the states of all tokens but the last, or of the end of the text that is in the window."""
        last = len(text) - 1
        held = self._settle(last)
        if self._features.end < last:
            raise BackendError("the head has no hidden states of the text.", hint="Report this as a bug.")
        first = max(held, self._features.start)
        if first > held or len(text) - first > window:
            self._text = []
            self._first = first = max(self._features.start, len(text) - max(1, window))
            held = 0
        self._head.trim(held)
        for start in range(first, last, MAX_ROWS):
            end = min(start + MAX_ROWS, last)
            self._head.inject(self._features.take(start, end), start)
        self._text = list(text[:last])
        self._features.release(last)

    def _settle(self, last: int) -> int:
        """Forget what is held from position `last` on; returns the position after the last state."""
        del self._text[last:]
        if len(self._text) <= self._first:
            self._text, self._first = [], 0
        return len(self._text)


class LlamaBlockHead(AttachedHead):
    """A DFlash or DSpark head beside its target."""

    def __init__(self, target: LlamaWeights, head: LlamaWeights, spec: HeadSpec, block: Block) -> None:
        """`close` frees `head`."""
        self.tokenizer = target.tokenizer
        self.name = spec.kind
        self.extra_bytes = head.path.stat().st_size
        self._head = head
        self._layers: Sequence[int] = spec.layers or ()
        self._width = len(self._layers) * spec.hidden_size
        self._block = block

    def open_session(self, target: Session, check: CheckCancelled) -> DflashSession:
        """A BlockSession for `target`, which holds no tokens yet. Raises BackendError, Unsupported."""
        assert isinstance(target, LlamaSession)
        features = target.tap(self._layers)

        def make(lib: Library, model: Any, params: Any) -> BlockContext:
            params.n_ctx += self._block.size
            vocab_size, is_causal = self.tokenizer.vocab_size, self._block.is_causal
            return BlockContext(
                lib, model, params, width=self._width, vocab_size=vocab_size, is_causal=is_causal, check=check
            )

        try:
            context = self._head.open_beside(target, make)
        except BaseException:
            target.untap()
            raise
        return DflashSession(context, target, features, self._block)

    def close(self) -> None:
        self._head.close()


def open_dflash(
    target: LlamaWeights,
    path: Path,
    spec: HeadSpec,
    progress: Callable[[float], None] = lambda fraction: None,
    check: CheckCancelled = lambda: None,
) -> LlamaBlockHead:
    """Load the DFlash or DSpark head in a GGUF file, which `spec` describes, for `target`.

    Raises Unsupported for a head that llama.cpp cannot run on this target, InvalidModelFile, Cancelled.
    """
    require_size(spec, target, path)
    header = read_file(path)
    check_file(header, path, target.tokenizer.vocab_size)
    block = _read_block(header, path, spec, target.tokenizer.vocab_size)
    head = load_head_weights(path, target, progress, check)
    return LlamaBlockHead(target, head, spec, block)


def _read_block(header: Header, path: Path, spec: HeadSpec, vocab_size: int) -> Block:
    if not 2 <= spec.block_size <= MAX_ROWS:
        raise Unsupported(
            f"{path.name} drafts blocks of {spec.block_size} positions; those of 2 to {MAX_ROWS} are run.",
            hint="Use --draft auto.",
        )
    if spec.mask_token is None or spec.mask_token >= vocab_size:
        stated = "none" if spec.mask_token is None else spec.mask_token
        raise header.invalid(f"its mask token is {stated}, and the model has the tokens 0 to {vocab_size - 1}")
    is_causal = header.metadata.get("dflash.attention.causal") is True
    return Block(spec.block_size, spec.mask_token, 0 if spec.predicts_at_root else 1, is_causal)
