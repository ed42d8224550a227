"""The tokens that a trained head scores: all of the target's, those of its own file, or the frequent ones alone.

A head with the target's whole vocabulary spends most of its time on the output matrix. Frequency-ranked drafting
(FR-Spec, Zhao et al. 2025, arXiv:2502.14856) multiplies the rows of frequent tokens alone. The target still scores
all tokens, so the text stays the same; a token that is left out is never drafted.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from edgespec.backends.attached_draft import OTHER_HEAD, Unsupported
from edgespec.text.tokenizer import Tokenizer

_RECENT = 256  # tokens of a text that tell which vocabulary it needs


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """The tokens that a head scores. `ids` [W] are the target's; None if the head has all V."""

    ids: Any
    vocab_size: int

    @property
    def size(self) -> int:
        """W, the number of tokens that the head scores."""
        return self.vocab_size if self.ids is None else int(self.ids.size)

    def spread(self, scores: Any) -> Any:
        """Logits [n, V] of `scores` [n, W]; -inf for tokens that the head does not know."""
        if self.ids is None:
            return scores
        whole = mx.full((scores.shape[0], self.vocab_size), -mx.inf)
        whole[:, self.ids] = scores
        return whole


@dataclass(frozen=True, slots=True)
class ShortVocabulary:
    """A head that scores frequent tokens alone.

    network  the head
    is_kept  [V] which tokens it scores
    saved    share of a round's time that it saves
    """

    network: Any
    is_kept: npt.NDArray[np.bool_]
    saved: float

    def suits(self, text: Sequence[int]) -> bool:
        """Whether less of the last tokens of `text` is left out than time is saved.

        An answer goes on in the language of its text. A token that is left out ends a draft, so that a share of such
        tokens costs about the same share of the tokens that a round emits.
        """
        recent = self.is_kept[np.array(text[-_RECENT:], np.intp)]
        return int(np.count_nonzero(~recent)) < self.saved * len(recent)


def choose_frequent(tokenizer: Tokenizer, count: int) -> npt.NDArray[np.int32]:
    """The ids [count] of frequent tokens, ascending: what spells single ASCII characters, then the lowest ids.

    Vocabularies of byte-pair encodings list their merges by frequency. SentencePiece puts single characters last.
    """
    characters = [*map(chr, range(32, 127)), "\n", "\t"]
    spelled = {token for each in characters for token in tokenizer.encode(f"x{each} {each}", parse_special=False)}
    rest = (token for token in range(tokenizer.vocab_size) if token not in spelled)
    kept = [*spelled, *(token for token, _ in zip(rest, range(count - len(spelled)), strict=False))]
    return np.sort(np.array(kept, np.int32))


def take_rows(multiply: Callable[[Any], Any], ids: Any) -> tuple[Callable[[Any], Any], int]:
    """(a function that multiplies by the rows `ids` [W] of an output matrix, the bytes of these rows). They are copied.

    `multiply` is a linear layer, or `as_linear` of embeddings; either may be quantized. Raises Unsupported for others.
    """
    module = getattr(multiply, "__self__", multiply)
    if not isinstance(module, nn.Linear | nn.QuantizedLinear | nn.Embedding | nn.QuantizedEmbedding):
        raise Unsupported(f"{type(module).__name__} has no rows to take.", hint=OTHER_HEAD)
    rows = copy.copy(module)
    for name in rows.parameters():
        rows[name] = module[name][ids]
    mx.eval(rows.parameters())
    is_embedding = isinstance(rows, nn.Embedding | nn.QuantizedEmbedding)
    return rows.as_linear if is_embedding else rows, sum(rows[name].nbytes for name in rows.parameters())
