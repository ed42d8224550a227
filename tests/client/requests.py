"""What tests ask of an EngineClient over the toy runtime."""

from __future__ import annotations

from collections.abc import Iterator

from edgespec.backends.options import LoadOptions
from edgespec.client.stream import Stream
from edgespec.core.sampling import SamplingParams
from edgespec.engine.events import Event, Finished, Request
from edgespec.models.load_config import LoadConfig
from edgespec.text.stream import Piece

TOY = LoadConfig(model="tree", backend="toy", draft_max=3, load=LoadOptions(context_size=200_000))
GREEDY = SamplingParams(temperature=0.0, logit_bias=((256, -1000.0),))  # 256 ends a text


class Heard:
    """A Reporter that remembers."""

    def __init__(self) -> None:
        self.notices: list[str] = []
        self.fractions: list[float] = []

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def download(self, name: str, done: int, total: int) -> None:
        raise AssertionError("nothing is downloaded")

    def loading(self, name: str, fraction: float) -> None:
        self.fractions.append(fraction)


def request(text: str = "hello", tokens: int = 40) -> Request:
    return Request(text, GREEDY, tokens, seed=1)


def endless() -> Request:
    return request(tokens=150_000)


def tokens_of(job: Stream[Event]) -> tuple[int, ...]:
    (finished,) = [event for event in job if isinstance(event, Finished)]
    return finished.tokens


def until_it_speaks(job: Stream[Event]) -> Iterator[Event]:
    events = iter(job)
    while not isinstance(next(events), Piece):
        pass
    return events
