"""A Reporter that remembers its notices."""

from __future__ import annotations


class Heard:
    def __init__(self) -> None:
        self.notices: list[str] = []
        self.fractions: list[float] = []  # of what was loaded

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def download(self, name: str, done: int, total: int) -> None: ...

    def loading(self, name: str, fraction: float) -> None:
        self.fractions.append(fraction)
