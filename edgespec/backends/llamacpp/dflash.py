"""DFlash and DSpark heads on llama.cpp: several tokens in one forward over hidden states of the target.

A block has the root and a mask token for each of the positions after it. Its rows see each other and the target's
states before the root. DSpark adds to the logits of a row a bias that depends on the token before, for which the graph
takes the most probable one of the row before (SpecForge's Markov head).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.backends.attached_draft import AttachedHead, Unsupported
from edgespec.backends.features import Features
from edgespec.backends.llamacpp.dflash_context import BlockContext
from edgespec.backends.llamacpp.dflash_file import check_file
from edgespec.backends.llamacpp.draft_context import MAX_ROWS
from edgespec.backends.llamacpp.head_weights import load_head_weights, require_size
from edgespec.backends.llamacpp.library import Library
from edgespec.backends.llamacpp.session import LlamaSession
from edgespec.backends.llamacpp.taps import Floats
from edgespec.backends.llamacpp.weights import LlamaWeights
from edgespec.backends.sequence import shared_prefix
from edgespec.core.arrays import Logits
from edgespec.core.protocols import CheckCancelled, Session
from edgespec.errors import BackendError
from edgespec.formats.gguf import Header
from edgespec.formats.gguf_validate import read_file
from edgespec.formats.heads import HeadSpec


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

    def unread(self, text: Sequence[int]) -> int:
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


def open_head(
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
