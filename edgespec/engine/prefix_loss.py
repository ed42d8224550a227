"""Why the beginning of a prompt was read again although an earlier text had it: the reason of a lost prefix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from edgespec.backends.sequence import cheap_prefill
from edgespec.core.arrays import Ints
from edgespec.engine.events import PrefixLoss, Prompt
from edgespec.memory.prefix_files import count_common
from edgespec.text.chat_template import Message
from edgespec.text.tokenizer import Tokenizer, token_bytes

LEAST_LOSS = 64  # tokens that are worth a sentence
_LEAST_SHARE = 20  # of a prompt, of which 1 / 20 is worth a sentence
_MOST_COMPARED = 4  # texts, of those with the longest common beginning
_RUN = 16  # tokens in a row that count as text which both have
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_SHOWN = 48  # characters of the text at the first difference
Place = Literal["own", "other", "given"]
_CAUSES: dict[Place, Literal["rollback", "busy", "evicted"]] = {"own": "rollback", "other": "busy", "given": "evicted"}


@dataclass(frozen=True, slots=True)
class EarlierText:
    """A text that a slot holds, or held.

    tokens  of prompt and answer
    place   'own': the slot of the request had it; 'other': another slot has it; 'given': its slot was given to others
    """

    tokens: Sequence[int]
    place: Place


def explain_loss(
    prompt: Sequence[int],
    reused: int,
    earlier: Sequence[EarlierText],
    request: Prompt,
    tokenizer: Tokenizer,
    context_size: int,
) -> PrefixLoss | None:
    """Why tokens of a prompt behind the `reused` ones were read, although texts `earlier` had them.

    None if they had not, or if the tokens are too few to matter. `request` is what the prompt was made from, for a
    cache of `context_size`.
    """
    if len(prompt) - reused < max(LEAST_LOSS, len(prompt) // _LEAST_SHARE):
        return None
    tokens = np.asarray(prompt, np.int32)
    texts = [np.asarray(each.tokens, np.int32) for each in earlier]
    near = sorted([(count_common(tokens, text), i) for i, text in enumerate(texts)], reverse=True)
    losses = [_compare(tokens, reused, texts[i], at, earlier[i].place) for at, i in near[:_MOST_COMPARED]]
    lost, kept, at, place = max(losses, key=lambda loss: loss[:2], default=(0, 0, 0, "own"))
    if lost < LEAST_LOSS:
        return None
    if kept >= lost - kept:
        if place == "other" and lost <= cheap_prefill(context_size):  # less than a copy costs
            return None
        return PrefixLoss(lost, _CAUSES[place], reused)
    where, text = _locate(prompt, at, request, tokenizer)
    return PrefixLoss(lost, "changed", at, where, text)


def _compare(prompt: Ints, reused: int, before: Ints, at: int, place: Place) -> tuple[int, int, int, Place]:
    """(tokens lost, how many of them come before `at`, `at` itself, which is the first difference, `place`)"""
    kept = max(0, min(at, len(prompt) - 1) - reused)
    return kept + _count_shared(before[at:], prompt[max(at, reused) :]), kept, at, place


def _count_shared(before: Ints, after: Ints) -> int:
    """How many tokens of `after` are in runs that `before` has too, at whatever place."""
    if min(len(before), len(after)) < _RUN:
        return 0
    known = set(_hash_runs(before).tolist())
    # Not np.isin, which imports numpy.ma: that takes as long as some tokens, in the middle of an answer.
    found = np.array([i for i, each in enumerate(_hash_runs(after).tolist()) if each in known], int)
    is_shared = np.zeros(len(after), bool)
    for i in range(_RUN):
        is_shared[found + i] = True
    return int(is_shared.sum())


def _hash_runs(tokens: Ints) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """[n - 15] a hash of each run of tokens."""
    values, n = tokens.astype(np.uint64) + np.uint64(1), len(tokens) - _RUN + 1
    hashes = np.zeros(n, np.uint64)
    for i in range(_RUN):
        hashes = hashes * _FACTOR + values[i : i + n]
    return hashes


def _locate(prompt: Sequence[int], at: int, request: Prompt, tokenizer: Tokenizer) -> tuple[str, str]:
    """(the message that token `at` of the prompt is in, the text before and from there on)"""
    before, after = (
        b"".join(token_bytes(tokenizer, each) for each in part).decode("utf-8", "replace")
        for part in (prompt[:at], prompt[at : at + _SHOWN])
    )
    where = "the prompt"
    if isinstance(request, tuple):
        where = _find_message(before, before + after, request)
    return where, f"{before[-_SHOWN // 2 :]!r} comes before {after[:_SHOWN]!r}"


def _find_message(before: str, text: str, messages: tuple[Message, ...]) -> str:
    """The last message that begins in `before`, by its number and role. `text` goes on a little behind that."""
    found, at = "what the chat template writes before the messages", 0
    for number, message in enumerate(messages, 1):
        content = message.content.strip()
        start = text.find(content[:_SHOWN], at) if content else -1
        if start > len(before):
            break
        if start >= 0:
            at = start + len(content)
            found = f"{'what follows ' if at < len(before) else ''}message {number} ({message.role})"
    return found
