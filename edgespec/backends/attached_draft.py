"""Drafts on a loaded target: the model itself with fewer layers, bits or context; trained heads."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

from edgespec.core.drafter import BlockSession, DraftSession
from edgespec.core.protocols import Session
from edgespec.errors import InvalidRequest
from edgespec.formats.heads import HeadKind
from edgespec.text.tokenizer import Tokenizer

SINK, WINDOW = 4, 256  # default tokens of context that a sparse draft sees
_KINDS = "layerskip, layerskip:K, layerskip:I,J,... (ascending), qspec, qspec:2 to qspec:6, sparse, sparse:SINK,WINDOW"
_PART = re.compile(r"\w+(?::(\d{1,7}(?:,\d{1,7})*))?", re.ASCII)
_MAX_CONTEXT = 2**20


@dataclass(frozen=True, slots=True)
class SelfDraftSpec:
    """How a model drafts for itself. Whether parts can be combined depends on the runtime.

    kept    layers, ascending: a range for the first ones; () if a search finds them; None for all
    bits    of a weight; None for the target's own, 0 for half of them
    sparse  (sink, window): tokens of context seen at its start and its end; None for all
    """

    kept: range | tuple[int, ...] | None = None
    bits: int | None = None
    sparse: tuple[int, int] | None = None

    def __str__(self) -> str:
        values = {
            "layerskip": (len(self.kept),) if isinstance(self.kept, range) else self.kept,
            "qspec": None if self.bits is None else ((self.bits,) if self.bits else ()),
            "sparse": self.sparse,
        }
        named = {name: ",".join(map(str, each)) for name, each in values.items() if each is not None}
        return "+".join(f"{name}:{text}" if text else name for name, text in named.items())

    def layers(self, count: int) -> tuple[int, ...]:
        """The kept layers of a model with `count`. Raises InvalidRequest if it has no such layers."""
        if self.kept is None:
            return tuple(range(count))
        assert self.kept, "the search comes first"
        if self.kept[-1] >= count or len(self.kept) == count:
            raise InvalidRequest(
                f"the model has {count} layers, numbered 0 to {count - 1}; a draft must keep fewer of them.",
                hint=f"Use layerskip:{max(1, count // 3)}, or layerskip alone for a search.",
            )
        return tuple(self.kept)


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
    def open_session(self, target: Session) -> Session:
        """A session for a `target` of the same model, or a FixedWidthSession's `inner` one. Raises BackendError."""

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
    def open_session(self, target: Session) -> DraftSession | BlockSession:
        """A session for a `target` of the same model that holds no tokens. Raises BackendError, Unsupported."""

    def shorten(self) -> None:  # noqa: B027 - most heads cannot
        """Have texts that it suits drafted from frequent tokens only. Called at most once; raises BackendError."""

    @abstractmethod
    def close(self) -> None:
        """Free its memory. Sessions are closed before, the target after."""


OTHER_HEAD = "Use a head that was trained for this model, or --draft auto."


def parse(text: str) -> SelfDraftSpec | None:
    """The self-draft that a value of --draft names; None for other values, such as a model's. Raises InvalidRequest."""
    spec = SelfDraftSpec()
    for part in text.split("+"):
        kind = part.partition(":")[0]
        if kind not in ("layerskip", "skip", "qspec", "sparse"):
            return None
        found = _PART.fullmatch(part)
        numbers = tuple(map(int, found[1].split(","))) if found and found[1] else ()
        changes: dict[str, Any] = {}
        match kind, numbers:
            case _, _ if found is None:
                pass
            case "layerskip" | "skip", (exit_,) if exit_:
                changes["kept"] = range(exit_)
            case "layerskip" | "skip", () | (_, _, *_) if sorted(set(numbers)) == list(numbers):
                changes["kept"] = numbers
            case "qspec", () | (2 | 3 | 4 | 5 | 6,):
                changes["bits"] = numbers[0] if numbers else 0
            case "sparse", () | (_, _):
                sink, window = numbers or (SINK, WINDOW)
                if window and sink + window <= _MAX_CONTEXT:
                    changes["sparse"] = sink, window
        if not changes or any(getattr(spec, name) is not None for name in changes):
            raise InvalidRequest(f"'{part}' is not a self-draft.", hint=f"Use {_KINDS}; join them with '+'.")
        spec = replace(spec, **changes)
    return spec
