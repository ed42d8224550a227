"""Checks that every session makes before it computes."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.core.protocols import Capabilities, Draft, Session
from edgespec.core.tree import check_draft, is_path
from edgespec.errors import ContextOverflow, RollbackError


def check_ids(tokens: Sequence[int], vocab_size: int) -> None:
    """Raises ValueError for an id outside the vocabulary."""
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        raise ValueError(f"token ids must be in 0..{vocab_size - 1}")


def check_forward(session: Session, root: int, draft: Draft, *, is_on_device: bool = False) -> None:
    """Raises ValueError for ids outside the vocabulary and invalid drafts, ContextOverflow for drafts that do not fit.

    Does not read the tokens of a draft that `is_on_device`.
    """
    limits, position = session.capabilities, session.position
    check_ids((root,), limits.vocab_size)
    if len(draft) > session.draft_limit or position >= limits.context_size:
        raise ContextOverflow(f"{len(draft)} drafted tokens do not fit after {position}.", hint="Report this as a bug.")
    if not (limits.tree or draft.is_chain):
        raise ValueError("this session takes chains only")
    if not is_on_device:
        check_draft(draft, limits.vocab_size)


def kept_tokens(pending: tuple[int, Draft] | None, path: Sequence[int]) -> list[int]:
    """What a commit of `path` keeps of a forward. Raises RollbackError if there is none, ValueError for no path."""
    if pending is None:
        raise RollbackError("nothing was forwarded to commit.", hint="Report this as a bug.")
    root, draft = pending
    if not is_path(draft, tuple(path)):
        raise ValueError(f"{tuple(path)} is not a path of the draft")
    return [root, *draft.tokens[list(path)].tolist()]


def check_committed(pending: object, purpose: str = "the next") -> None:
    """Raises RollbackError if a forward is pending."""
    if pending is not None:
        raise RollbackError(f"a forward was not committed before {purpose}.", hint="Report this as a bug.")


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


def cheap_prefill(context_size: int) -> int:
    """Tokens that are read again rather than copying a cache of `context_size` tokens."""
    return max(64, context_size // 64)
