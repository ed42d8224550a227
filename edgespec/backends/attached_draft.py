"""Drafts on a loaded target: the model itself with fewer layers, bits or context; trained heads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

from edgespec.core.drafter import BlockSession, DraftSession
from edgespec.core.protocols import CheckCancelled, Session
from edgespec.errors import InvalidRequest
from edgespec.formats.heads import HeadKind
from edgespec.text.tokenizer import Tokenizer

SINK, WINDOW = 4, 256  # default tokens of context that a sparse draft sees
_KINDS = "layerskip, layerskip:K, layerskip:I,J,..., qspec, qspec:BITS, sparse, sparse:SINK,WINDOW"
_MAX_CONTEXT = 2**20


@dataclass(frozen=True, slots=True)
class Skip:
    """The layers that a draft keeps: the first `exit`, or `kept` (ascending). Both None: a search finds them."""

    exit: int | None = None
    kept: tuple[int, ...] | None = None

    def layers(self, count: int) -> tuple[int, ...]:
        """The kept layers of a model with `count`. Raises InvalidRequest where it has no such layers."""
        kept = self.kept if self.exit is None else tuple(range(self.exit))
        assert kept is not None, "the search comes first"
        if kept[-1] >= count or len(kept) == count:
            raise InvalidRequest(
                f"the model has {count} layers, numbered 0 to {count - 1}; a draft must keep fewer of them.",
                hint=f"Use layerskip:{max(1, count // 3)}, or layerskip alone for a search.",
            )
        return kept


@dataclass(frozen=True, slots=True)
class SelfDraftSpec:
    """How a model drafts for itself. Whether parts can be combined depends on the runtime.

    skip    which layers are kept; None for all
    bits    of a weight; None for the target's own, 0 for half of them
    sparse  (sink, window): tokens of context seen at its start and its end; None for all
    """

    skip: Skip | None = None
    bits: int | None = None
    sparse: tuple[int, int] | None = None

    def __str__(self) -> str:
        parts = []
        if self.skip is not None:
            kept = self.skip.kept
            which = self.skip.exit if kept is None else ",".join(map(str, kept))
            parts.append("layerskip" + ("" if which is None else f":{which}"))
        if self.bits is not None:
            parts.append(f"qspec:{self.bits}" if self.bits else "qspec")
        if self.sparse is not None:
            parts.append("sparse:{},{}".format(*self.sparse))
        return "+".join(parts)


class Unsupported(InvalidRequest):
    """This model or runtime cannot draft in this way; the message says why."""


class AttachedDraft(ABC):
    """A draft that is made of, or attached to, a loaded target. The target's thread uses it.

    Its sessions follow the target's: they take its keys and values inside the backend, and are saved, rewound
    and dropped with it. A session that shares the target's cache has a `position` that is never below the target's, so
    it has nothing to read after a reused prefix.
    """

    tokenizer: Tokenizer
    name: str
    extra_bytes: int  # of memory, in addition to the target's weights and cache

    @abstractmethod
    def open_session(self, target: Session, check: CheckCancelled) -> Session:
        """A session that drafts for `target`, a session of the same model. Raises BackendError."""

    @abstractmethod
    def close(self) -> None:
        """Free its memory. Sessions are closed before, the target after."""


class AttachedHead(ABC):
    """A trained head beside a loaded target, from whose hidden states it drafts. The target's thread uses it.

    shares_kv  whether it reads the target's cache, so that it drafts only after all that the target holds
    """

    def __init__(self, kind: HeadKind, tokenizer: Tokenizer, extra_bytes: int) -> None:
        """`extra_bytes` of memory, in addition to the target's weights and cache."""
        self.name = "mtp" if kind == "gemma4-assistant" else kind
        self.shares_kv = kind == "gemma4-assistant"
        self.tokenizer = tokenizer
        self.extra_bytes = extra_bytes

    @abstractmethod
    def open_session(self, target: Session, check: CheckCancelled) -> DraftSession | BlockSession:
        """A session that drafts for `target`, a session of the same model that holds no tokens.

        Raises BackendError, Unsupported.
        """

    def adjust(  # noqa: B027 - most heads have nothing to choose
        self, open_target: Callable[[CheckCancelled], Session], check: CheckCancelled
    ) -> None:
        """Measure on this machine what makes drafts shorter, beside sessions of the target that it closes again.

        Called at most once, before a session is opened. Raises BackendError, Unsupported, Cancelled.
        """

    @abstractmethod
    def close(self) -> None:
        """Free its memory. Sessions are closed before, the target after."""


OTHER_HEAD = "Use a head that was trained for this model, or --draft auto."


def parse(text: str) -> SelfDraftSpec | None:
    """The self-draft that a value of --draft names; None for other values, such as a model's. Raises InvalidRequest."""
    spec = SelfDraftSpec()
    for part in text.split("+"):
        kind, colon, values = part.partition(":")
        if kind not in ("layerskip", "skip", "qspec", "sparse"):
            return None
        numbers = _parse_numbers(part, values) if colon else ()
        if kind in ("layerskip", "skip") and spec.skip is None:
            spec = replace(spec, skip=_parse_skip(part, numbers))
        elif kind == "qspec" and len(numbers) <= 1 and spec.bits is None:
            if numbers and not 2 <= numbers[0] <= 6:
                raise InvalidRequest(f"a draft cannot have {numbers[0]} bits.", hint="Use qspec:2 to qspec:6.")
            spec = replace(spec, bits=numbers[0] if numbers else 0)
        elif kind == "sparse" and len(numbers) in (0, 2) and spec.sparse is None:
            sink, window = numbers or (SINK, WINDOW)
            if not window or sink + window > _MAX_CONTEXT:
                raise InvalidRequest(f"{part} leaves no window of context.", hint="Use sparse:4,256.")
            spec = replace(spec, sparse=(sink, window))
        else:
            raise InvalidRequest(f"'{part}' is not a self-draft.", hint=f"Use {_KINDS}; join them with '+'.")
    return spec


def _parse_numbers(part: str, values: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(each) for each in values.split(","))
    except ValueError:
        numbers = (-1,)
    if min(numbers) < 0:
        raise InvalidRequest(f"'{part}' needs whole numbers.", hint=f"Use {_KINDS}.")
    return numbers


def _parse_skip(part: str, numbers: tuple[int, ...]) -> Skip:
    if not numbers:
        return Skip()
    if len(numbers) == 1 and numbers[0] > 0:
        return Skip(exit=numbers[0])
    if len(numbers) > 1 and sorted(set(numbers)) == list(numbers):
        return Skip(kept=numbers)
    raise InvalidRequest(f"'{part}' keeps no layers.", hint="Use a number of layers, or ascending layers: 0,1,5.")
