"""Long contexts for measurements, on any runtime: filled by copies, not computed."""

from __future__ import annotations

from collections.abc import Callable

from edgespec.core.protocols import Session


def extend_cache(session: Session, n: int) -> int:
    """Make the cache hold `n` tokens by copies of what it holds; returns how many it holds then.

    Forwards then take the time that they take after a text of that length; their scores mean nothing. `rewind(0)` drops
    the copies. The cache has to hold a token. Fewer than `n` are held if the context ends before, or if the runtime
    cannot copy. Raises BackendError.
    """
    extend: Callable[[int], int] | None = getattr(session, "extend", None)
    return session.position if extend is None else extend(n)
