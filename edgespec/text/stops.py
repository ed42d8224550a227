"""Ends the text at the first stop string, however tokens cut it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from edgespec.errors import InvalidRequest

MAX_STOPS = 16
MAX_STOP_CHARS = 256


@dataclass(frozen=True, slots=True)
class StopResult:
    """Text that is certain to precede every stop string, and the stop string that ended the stream, if one did."""

    text: str
    stop: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether the stream has ended; all later text is dropped."""
        return self.stop is not None


class StopStrings:
    """Looks for stop strings in a stream of text; the stop string itself is never part of the text.

    The match that starts earliest in the whole text wins, and of those the shortest; the result does not depend on
    how the text is cut. A match therefore waits while an earlier one may still be completed. Raises InvalidRequest
    for more than MAX_STOPS strings, and for empty ones or ones longer than MAX_STOP_CHARS.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if len(stops) > MAX_STOPS:
            raise InvalidRequest(f"{len(stops)} stop strings given", hint=f"give at most {MAX_STOPS}")
        if not all(0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
            raise InvalidRequest(
                "a stop string is empty or too long", hint=f"give stop strings of 1 to {MAX_STOP_CHARS} characters"
            )
        self._stops = tuple(sorted(stops, key=len))
        self._held = ""
        self._stop: str | None = None

    def push(self, text: str) -> StopResult:
        """Adds `text`; returns what may be shown, without the shortest end that may still become a stop string."""
        return self._advance(text, final=False)

    def finish(self) -> StopResult:
        """Ends the stream and releases what was held back; a match that was waiting for an earlier one counts now."""
        return self._advance("", final=True)

    def _advance(self, text: str, *, final: bool) -> StopResult:
        if self._stop is not None:
            return StopResult("", self._stop)
        held = self._held + text
        found = [(start, stop) for stop in self._stops if (start := held.find(stop)) >= 0]
        end, stop = min(found, key=lambda match: match[0], default=(len(held), None))
        maybe = len(held) if final else unfinished(held, self._stops)
        if maybe < end:
            end = maybe
        else:
            self._stop = stop
        self._held = held[end:]
        return StopResult(held[:end], self._stop)


def unfinished(text: str, markers: Iterable[str]) -> int:
    """Where the longest end of `text` that is the beginning, but not the whole, of a marker starts; else len(text)."""
    first = len(text)
    for marker in markers:
        for start in range(max(0, len(text) - len(marker) + 1), first):
            if marker.startswith(text[start:]):
                first = start
                break
    return first
