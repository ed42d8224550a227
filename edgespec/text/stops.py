"""Stop strings, found across token boundaries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from edgespec.errors import InvalidRequest

MAX_STOPS = 16
MAX_STOP_CHARS = 256


@dataclass(frozen=True, slots=True)
class StopResult:
    """Text before any stop string, and the stop string that ended the stream, if one did."""

    text: str
    stop: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether the stream has ended; all later text is dropped."""
        return self.stop is not None


class StopStrings:
    """Finds stop strings in a stream of text; the stop string itself is not part of the text.

    The earliest match wins, and of several at one place the shortest. A match therefore waits while an earlier one may
    still be completed, so that the result does not depend on how the stream is cut. Raises InvalidRequest for more than
    MAX_STOPS strings, for an empty one, and for one longer than MAX_STOP_CHARS.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if len(stops) > MAX_STOPS:
            raise InvalidRequest(f"{len(stops)} stop strings are too many.", hint=f"Give at most {MAX_STOPS}.")
        if not all(0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
            raise InvalidRequest(
                "A stop string is empty or too long.", hint=f"Give stop strings of 1 to {MAX_STOP_CHARS} characters."
            )
        self._stops = tuple(sorted(stops, key=len))
        self._held = ""
        self._stop: str | None = None

    def push(self, text: str) -> StopResult:
        """Add `text`; returns the text that is certain. An end that may become a stop string is held back."""
        return self._advance(text, final=False)

    def finish(self) -> StopResult:
        """End the stream; returns the text that was held back. A match that was waiting for an earlier one counts."""
        return self._advance("", final=True)

    def _advance(self, text: str, *, final: bool) -> StopResult:
        if self._stop is not None:
            return StopResult("", self._stop)
        held = self._held + text
        found = [(start, stop) for stop in self._stops if (start := held.find(stop)) >= 0]
        end, stop = min(found, key=lambda match: match[0], default=(len(held), None))
        maybe = len(held) if final else find_unfinished(held, self._stops)
        if maybe < end:
            end = maybe
        else:
            self._stop = stop
        self._held = held[end:]
        return StopResult(held[:end], self._stop)


def find_unfinished(text: str, markers: Iterable[str]) -> int:
    """The start of the longest suffix of `text` that is a proper prefix of a marker; len(text) if there is none."""
    first = len(text)
    for marker in markers:
        for start in range(max(0, len(text) - len(marker) + 1), first):
            if marker.startswith(text[start:]):
                first = start
                break
    return first
