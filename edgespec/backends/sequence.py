"""What every session checks before it computes, and how much of a cached sequence a new prompt can use again."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.core.protocols import Capabilities
from edgespec.errors import ContextOverflow


def check_ids(tokens: Sequence[int], vocab_size: int) -> None:
    """Raises ValueError for an id that the model does not have."""
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        raise ValueError(f"token ids must be in 0..{vocab_size - 1}")


def check_prompt(tokens: Sequence[int], capabilities: Capabilities) -> None:
    """Raises ContextOverflow for an empty or too long prompt, ValueError for ids that the model does not have."""
    size = capabilities.context_size
    if not 0 < len(tokens) <= size:
        raise ContextOverflow(
            f"the prompt has {len(tokens)} tokens, the context holds {size}.",
            hint="Shorten the prompt, or set a larger --ctx.",
        )
    check_ids(tokens, capabilities.vocab_size)


def shared_prefix(cached: Sequence[int], tokens: Sequence[int], most: int) -> int:
    """How many leading tokens agree, at most `most`: the last one is always run, for its scores."""
    n = min(len(cached), most)
    for i in range(n):
        if cached[i] != tokens[i]:
            return i
    return n
