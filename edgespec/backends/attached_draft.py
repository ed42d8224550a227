"""Drafts on a loaded target: the model itself with fewer layers, bits or context; trained heads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from edgespec.core.drafter import BlockSession, DraftSession
from edgespec.core.protocols import CheckCancelled, Session
from edgespec.errors import InvalidRequest
from edgespec.formats.heads import HeadSpec
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

    tokenizer: Tokenizer
    name: str
    extra_bytes: int  # of memory, in addition to the target's weights and cache
    shares_kv: bool = False

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


_MAX_BLOCK = 64  # positions; targets score no more rows in one forward
OTHER_HEAD = "Use a head that was trained for this model, or --draft auto."


@dataclass(frozen=True, slots=True)
class Block:
    """The rows that a head runs after the root to draft several tokens at once.

    n_rows      the root and masks
    first_row   that predicts the token after the root: 0 or 1
    mask_token  the id of a mask
    """

    n_rows: int
    first_row: int
    mask_token: int

    @property
    def n_drafts(self) -> int:
        """The tokens that a block drafts."""
        return self.n_rows - self.first_row

    def fill(self, root: int) -> list[int]:
        """[n_rows] the ids of the rows."""
        return [root, *[self.mask_token] * (self.n_rows - 1)]


def read_block(spec: HeadSpec, vocab_size: int) -> Block:
    """The block of a head. Raises Unsupported where it has no mask, or too many positions."""
    mask = spec.mask_token
    if mask is None or mask >= vocab_size:
        named = "none" if mask is None else f"{mask:,} of {vocab_size:,}"
        raise Unsupported(
            f"the head fills its blocks with a token of the model, and its file names {named}.", hint=OTHER_HEAD
        )
    if not 2 <= spec.block_size <= _MAX_BLOCK:
        raise Unsupported(
            f"the head has blocks of {spec.block_size:,} positions; those of 2 to {_MAX_BLOCK} are run.",
            hint=OTHER_HEAD,
        )
    return Block(spec.block_size, 0 if spec.predicts_at_root else 1, mask)


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


# Hidden states of a session's tokens, kept for a trained head until it has read them.


_MOST_KEPT = 2048  # rows; of a long prompt a head that is not asked would keep hundreds of MB
A = TypeVar("A")  # an array with rows: numpy's or MLX's


class Features(Generic[A]):
    """Rows [width] of the tokens in a session's cache, from position `start` on.

    The session appends them as it commits tokens and drops them as it is rewound; the head takes and releases them.
    Those more than 2,048 positions back are released too: a head that has not read them begins behind them.
    """

    def __init__(self, join: Callable[[Sequence[A]], A]) -> None:
        """`join` concatenates arrays along their rows."""
        self._join = join
        self._chunks = deque[tuple[int, A]]()  # (position of the first row, [n, width])
        self.start = self.end = 0

    def append(self, rows: A, n: int) -> None:
        """Keep `rows` [n, width] of the next `n` positions, which must stay valid."""
        if n:
            self._chunks.append((self.end, rows))
            self.end += n
            self.release(self.end - _MOST_KEPT)

    def rewind(self, position: int) -> None:
        """Drop the rows from `position` on."""
        while self._chunks and self._chunks[-1][0] >= position:
            self._chunks.pop()
        if self._chunks and position < self.end:
            first, rows = self._chunks[-1]
            self._chunks[-1] = first, rows[: position - first]  # type: ignore[index]
        self.end = min(self.end, position)
        self.start = min(self.start, self.end)

    def take(self, first: int, last: int) -> A:
        """[last - first, width]. Raises ValueError for positions that are not kept."""
        if not self.start <= first < last <= self.end:
            raise ValueError(f"rows {first} to {last} are not among those kept, {self.start} to {self.end}")
        found = []
        for at, rows in self._chunks:
            low, high = max(first - at, 0), last - at
            if high > 0 and low < len(rows):  # type: ignore[arg-type]
                found.append(rows[low:high])  # type: ignore[index]
        return found[0] if len(found) == 1 else self._join(found)

    def release(self, position: int) -> None:
        """Free the rows before `position`."""
        position = min(position, self.end)
        while self._chunks and self._chunks[0][0] + len(self._chunks[0][1]) <= position:  # type: ignore[arg-type]
            self._chunks.popleft()
        self.start = max(self.start, position)
