"""Long contexts for measurements, on any runtime: filled by copies, not computed."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from edgespec.backends.llamacpp import filler
from edgespec.core.protocols import Session


@runtime_checkable
class Extendable(Protocol):
    """A session that fills its own cache."""

    def extend(self, n: int) -> int: ...


def extend_cache(session: Session, n: int) -> int:
    """Make the cache hold `n` tokens by copies of what it holds; returns how many it holds then.

    Forwards then take the time that they take after a text of that length; their scores mean nothing. `rewind(0)` drops
    the copies. The cache has to hold a token. Fewer than `n` are held where the context ends, and where the runtime
    cannot copy; see `llamacpp.filler`. Raises BackendError.
    """
    return session.extend(n) if isinstance(session, Extendable) else filler.extend_cache(session, n)
