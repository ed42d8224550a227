"""How many tokens a request lets be drafted at once."""

from __future__ import annotations

from dataclasses import dataclass, replace

from edgespec.engine.drafting import MAX_DRAFT, Speculation
from edgespec.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class DraftLength:
    """Bounds of a draft, in tokens.

    longest   0 decodes plainly; None leaves it to the server
    shortest  shorter drafts are not used, unless they are drawn

    Raises InvalidRequest.
    """

    longest: int | None = None
    shortest: int = 0

    def __post_init__(self) -> None:
        if self.longest and self.shortest > self.longest:
            raise InvalidRequest("draft_min is larger than draft_max.", hint="Send a smaller draft_min.")

    def apply(self, speculation: Speculation) -> Speculation | None:
        """What replaces the server's `speculation` for the request; None where nothing does."""
        if self.longest == 0:
            return replace(speculation, draft_max=0, draft_tree=None)
        if not speculation.drafters or (self.longest is None and not self._bounds_fixed(speculation)):
            return None
        shortest = min(self.shortest, MAX_DRAFT)
        if self.longest is None:
            return replace(speculation, draft_min=shortest)
        return replace(speculation, draft_max=min(self.longest, MAX_DRAFT), draft_tree=None, draft_min=shortest)

    def warnings(self, speculation: Speculation) -> tuple[str, ...]:
        """What the server's `speculation` does not allow, in sentences."""
        if self.longest and not speculation.drafters:
            return ("draft_max is ignored: the model has no drafter.",)
        if self.longest and self.longest > MAX_DRAFT:
            return (f"draft_max is {MAX_DRAFT}, the most that is possible.",)
        if self.shortest and self.longest is None and not self._bounds_fixed(speculation):
            return ("draft_min is ignored: it needs draft_max.",)
        return ()

    def _bounds_fixed(self, speculation: Speculation) -> bool:
        """Whether `shortest` bounds the server's fixed length."""
        return self.shortest > 0 and bool(speculation.draft_max)
