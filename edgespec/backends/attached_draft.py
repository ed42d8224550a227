"""Drafts of a model by less of its own work: fewer layers, fewer bits, less of the context."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

from edgespec.core.protocols import CheckCancelled, Session
from edgespec.errors import InvalidRequest
from edgespec.text.tokenizer import Tokenizer

SINK, WINDOW = 4, 256  # tokens of context that a sparse draft sees unless told otherwise
_KINDS = "layerskip, layerskip:K, layerskip:I,J,..., qspec, qspec:BITS, planes, sparse, sparse:SINK,WINDOW"
_MOST = 2**20


@dataclass(frozen=True, slots=True)
class Skip:
    """Which layers a draft keeps: the first `exit`, or those of `kept` (ascending); both None: to be searched."""

    exit: int | None = None
    kept: tuple[int, ...] | None = None

    def layers(self, count: int) -> tuple[int, ...]:
        """The layers kept of `count`. Raises InvalidRequest where the model has no such layers."""
        kept = self.kept if self.exit is None else tuple(range(self.exit))
        assert kept is not None, "searched before"
        if kept[-1] >= count or len(kept) == count:
            raise InvalidRequest(
                f"the model has {count} layers; a draft that skips some keeps fewer, of 0 to {count - 1}.",
                hint=f"Use layerskip:{max(1, count // 3)}, or layerskip alone to have them searched.",
            )
        return kept


@dataclass(frozen=True, slots=True)
class SelfDraftSpec:
    """How a model drafts for itself; parts may be combined where the runtime does it.

    skip    layers left out
    bits    of a weight; None as they are; 0 as many as half of the target's
    planes  whether the low-bit weights are the high bits of the target's own, which then take no memory
    sparse  (sink, window): tokens of context seen at its beginning and end; None for all
    """

    skip: Skip | None = None
    bits: int | None = None
    planes: bool = False
    sparse: tuple[int, int] | None = None

    def __str__(self) -> str:
        parts = []
        if self.skip is not None:
            kept = self.skip.kept
            which = self.skip.exit if kept is None else ",".join(map(str, kept))
            parts.append("layerskip" + ("" if which is None else f":{which}"))
        if self.planes:
            parts.append("planes")
        elif self.bits is not None:
            parts.append(f"qspec:{self.bits}" if self.bits else "qspec")
        if self.sparse is not None:
            parts.append("sparse:{},{}".format(*self.sparse))
        return "+".join(parts)


class Unsupported(InvalidRequest):
    """This model or runtime does not draft in this way; the message says why."""


class SelfDraftModel(ABC):
    """What a model needs to draft for itself, loaded. The thread of its target uses it.

    Sessions are followers: what they hold of the target's text they may take from the target's session instead of
    computing it, and where they share its cache their `position` is never below the target's.
    """

    tokenizer: Tokenizer
    name: str
    extra_bytes: int  # beside the target's weights and cache, as counted when it was loaded

    @abstractmethod
    def open_session(self, target: Session, check: CheckCancelled) -> Session:
        """A session that drafts beside `target`, a session of the model that this was made from."""

    @abstractmethod
    def close(self) -> None:
        """Free what it holds; sessions are closed before, the target after."""


def parse(text: str) -> SelfDraftSpec | None:
    """What such a --draft asks for; None for anything else, such as a model's name. Raises InvalidRequest."""
    found = SelfDraftSpec()
    for part in text.split("+"):
        kind, colon, given = part.partition(":")
        if kind not in ("layerskip", "skip", "qspec", "planes", "sparse"):
            return None
        numbers = _numbers(part, given) if colon else ()
        if kind in ("layerskip", "skip") and found.skip is None:
            found = replace(found, skip=_skip(part, numbers))
        elif kind == "qspec" and len(numbers) <= 1 and found.bits is None:
            if numbers and not 2 <= numbers[0] <= 6:
                raise InvalidRequest(f"a draft of {numbers[0]} bits is not made.", hint="Use qspec:2 to qspec:6.")
            found = replace(found, bits=numbers[0] if numbers else 0)
        elif part == "planes" and found.bits is None:
            found = replace(found, bits=0, planes=True)
        elif kind == "sparse" and len(numbers) in (0, 2) and found.sparse is None:
            sink, window = numbers or (SINK, WINDOW)
            if not window or sink + window > _MOST:
                raise InvalidRequest(f"{part} leaves no window of context.", hint="Use sparse:4,256 to begin with.")
            found = replace(found, sparse=(sink, window))
        else:
            raise InvalidRequest(f"'{part}' is no self-draft.", hint=f"There are {_KINDS}; join them with '+'.")
    return found


def _numbers(part: str, given: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(each) for each in given.split(","))
    except ValueError:
        numbers = (-1,)
    if min(numbers) < 0:
        raise InvalidRequest(f"'{part}' needs whole numbers.", hint=f"There are {_KINDS}.")
    return numbers


def _skip(part: str, numbers: tuple[int, ...]) -> Skip:
    if not numbers:
        return Skip()
    if len(numbers) == 1 and numbers[0] > 0:
        return Skip(exit=numbers[0])
    if len(numbers) > 1 and sorted(set(numbers)) == list(numbers):
        return Skip(kept=numbers)
    raise InvalidRequest(f"'{part}' keeps no layers.", hint="Give a number of layers, or ascending ones: 0,1,5.")
