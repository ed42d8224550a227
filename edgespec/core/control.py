"""How much to draft each step."""

from __future__ import annotations

from edgespec.core.protocols import Budget, Step


class FixedBudget:
    """The same budget at every step; depth 0 is plain decoding."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget

    def budget(self) -> Budget:
        return self._budget

    def record(self, step: Step) -> None:
        """Nothing to learn from."""
