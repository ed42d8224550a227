"""Whether a head on MLX drafts sooner with frequent tokens alone: measured when it is loaded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from time import perf_counter
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from edgespec.backends.features import Features
from edgespec.backends.mlx.draft_vocabulary import ScoringNetwork, ShortVocabulary, choose_frequent
from edgespec.backends.mlx.session import MlxSession
from edgespec.core.drafter import BlockSession, DraftSession
from edgespec.core.greedy import read_prompt
from edgespec.core.protocols import CheckCancelled, Draft, Session
from edgespec.text.tokenizer import Tokenizer

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
    network: ScoringNetwork,
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
