"""Checks that every session makes before it computes, and the length of a reusable prefix."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.core.protocols import Capabilities
from edgespec.errors import ContextOverflow


def check_ids(tokens: Sequence[int], vocab_size: int) -> None:
    """Raises ValueError for an id outside the vocabulary."""
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        raise ValueError(f"token ids must be in 0..{vocab_size - 1}")


def check_prompt(tokens: Sequence[int], capabilities: Capabilities) -> None:
    """Raises ContextOverflow for a prompt that is empty or too long, ValueError for ids outside the vocabulary."""
    size = capabilities.context_size
    if not 0 < len(tokens) <= size:
        raise ContextOverflow(
            f"the prompt has {len(tokens)} tokens, the context holds {size}.",
            hint="Shorten the prompt, or set a larger --ctx.",
        )
    check_ids(tokens, capabilities.vocab_size)


def shared_prefix(cached: Sequence[int], tokens: Sequence[int], limit: int) -> int:
    """How many leading tokens agree, at most `limit`. A prompt's limit is its length - 1: its last token is scored."""
    n = min(len(cached), limit)
    for i in range(n):
        if cached[i] != tokens[i]:
            return i
    return n
