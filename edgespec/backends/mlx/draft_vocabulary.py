"""The tokens that a head scores on MLX: all of the target's, those of its own file, or the frequent ones alone.

A head with the target's whole vocabulary spends most of its time on the output matrix. Frequency-ranked drafting
(FR-Spec, Zhao et al. 2025, arXiv:2502.14856) multiplies the rows of frequent tokens alone. The target still scores all
tokens, so the text stays the same; a token that is left out is never drafted.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from edgespec.backends.attached_draft import Features
from edgespec.backends.mlx.session import MlxSession
from edgespec.core.drafter import BlockSession, DraftSession
from edgespec.core.protocols import CheckCancelled, Draft, Session
from edgespec.core.verify import read_prompt
from edgespec.text.tokenizer import Tokenizer

_RECENT = 256  # tokens of a text that tell which vocabulary it needs


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """The tokens that a head scores. `ids` [W] are the target's; None where the head has all V."""

    ids: Any
    vocab_size: int

    @property
    def size(self) -> int:
        """W"""
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


def choose_scorer(network: Any, text: Sequence[int]) -> Any:
    """`network`, or what scores frequent tokens alone if that suits `text`."""
    short = network.short
    return short.network if short is not None and short.suits(text) else network


def take_rows(multiply: Callable[[Any], Any], ids: Any) -> Callable[[Any], Any]:
    """What multiplies by the rows `ids` [W] of an output matrix, which are copied.

    `multiply` is a linear layer, or `as_linear` of embeddings; either may be quantized. Raises ValueError for others.
    """
    module = getattr(multiply, "__self__", multiply)
    if not isinstance(module, nn.Linear | nn.QuantizedLinear | nn.Embedding | nn.QuantizedEmbedding):
        raise ValueError(f"{type(module).__name__} has no rows to take")
    rows = copy.copy(module)
    for name in rows.parameters():
        rows[name] = module[name][ids]
    mx.eval(rows.parameters())
    return rows.as_linear if isinstance(rows, nn.Embedding | nn.QuantizedEmbedding) else rows  # type: ignore[no-any-return]


SHARE = 4  # one in so many tokens is kept
_LEAST = 65_536  # tokens; a quarter of smaller vocabularies lacks one in seven tokens of an English text
_TEXT, _DRAFT, _REPEATS = 8, 3, 3  # tokens of the text and of a draft; rounds, of which the shortest counts

Opener = Callable[[Any, MlxSession, Features[Any], CheckCancelled], DraftSession | BlockSession]
"""Opens a session of a network for a target's session and its features, whose tap ends with the new session."""


def shorten(
    network: Any,
    opener: Opener,
    open_target: Callable[[CheckCancelled], Session],
    tokenizer: Tokenizer,
    check: CheckCancelled,
) -> int:
    """Give `network` a short vocabulary, if it scores all tokens of a large one and a round is shorter so.

    Returns the bytes of its rows. Raises BackendError, Cancelled, Unsupported.
    """
    vocabulary = network.vocabulary
    if vocabulary.ids is not None or vocabulary.vocab_size < _LEAST:
        return 0
    ids, before = choose_frequent(tokenizer, vocabulary.vocab_size // SHARE), int(mx.get_active_memory())
    network.short = find_short(network, opener, open_target, ids, check)
    return int(mx.get_active_memory()) - before if network.short else 0


def find_short(
    network: Any,
    opener: Opener,
    open_target: Callable[[CheckCancelled], Session],
    ids: npt.NDArray[np.int32],
    check: CheckCancelled,
) -> ShortVocabulary | None:
    """`network` with the tokens `ids` [W] alone, and the measured share of a round that is saved; None for no share.

    Raises BackendError, Cancelled, Unsupported.
    """
    try:
        short = network.shorten(mx.array(ids))
    except ValueError:  # another kind of output matrix
        return None
    (draft_s, target_s), (short_s, _) = (time_round(each, opener, open_target, check) for each in (network, short))
    is_kept = np.zeros(network.vocabulary.vocab_size, bool)
    is_kept[ids] = True
    saved = (draft_s - short_s) / (draft_s + target_s)
    return ShortVocabulary(short, is_kept, saved) if saved > 0 else None


def time_round(
    network: Any, opener: Opener, open_target: Callable[[CheckCancelled], Session], check: CheckCancelled
) -> tuple[float, float]:
    """(seconds of a draft of three tokens, seconds of the target's forward on it)"""
    text, times = list(range(_TEXT)), []
    with ExitStack() as closing:
        session = open_target(check)
        closing.callback(session.close)
        assert isinstance(session, MlxSession)
        draft = opener(network, session, session.tap(network.layers), check)
        closing.callback(draft.close)
        read_prompt(session, text[:-1])
        draft.begin(text)
        for _ in range(_REPEATS):
            check()
            started = perf_counter()
            tokens = _draft(draft, text)
            drafted = perf_counter()
            next_token = int(session.forward(text[-1], Draft.chain(tokens)).argmax()[0])
            times.append((drafted - started, perf_counter() - drafted))
            session.commit(())
            text.append(next_token)
    first, second = zip(*times, strict=True)
    return min(first), min(second)


def _draft(draft: DraftSession | BlockSession, text: list[int]) -> list[int]:
    """At most three tokens after `text`, read from the device."""
    if isinstance(draft, BlockSession):
        return [int(row.argmax()) for row in draft.block(text, len(text), _DRAFT) or ()]
    found = draft.rollout(text, len(text), _DRAFT)
    return [] if found is None else found[0].tokens.tolist()
