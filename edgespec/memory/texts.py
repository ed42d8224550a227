"""Texts as they are stored: runs of tokens that no earlier text of the same place has at the same spot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

import numpy as np
import numpy.typing as npt

from edgespec.memory.suffixes import MAX_MATCH, Tokens

Keys = npt.NDArray[np.uint64]
Kind = Literal["answer", "prompt", "corpus"]

BLOCK = 64  # tokens
_KEY_BYTES = 8


@dataclass(frozen=True, slots=True)
class SpaceKey:
    """The texts that belong together: of one tokenizer and one namespace."""

    tokenizer: str
    namespace: str


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a text is from.

    source     the conversation or file, if any
    time       seconds since the epoch
    epoch      how many times texts had been forgotten when the text was begun
    is_corpus  whether it is a document
    """

    source: str | None
    time: float
    epoch: int = 0
    is_corpus: bool = False


@dataclass(slots=True)
class StoredText:
    """A run of tokens of one text.

    tokens  [n] uint32
    n_lead  the first so many are stored elsewhere too, and give the others something to be found by
    answer  the position where a model's answer starts; n where there is none
    keys    [blocks] see `block_keys`
    id      the row in the database, in the order of storing; 0 until it is stored, -1 where it must not be
    """

    tokens: Tokens
    n_lead: int
    answer: int
    origin: Origin
    keys: Keys
    id: int = 0

    def parts(self) -> Iterator[tuple[Kind, list[int]]]:
        """What is new in it, by kind."""
        split = max(self.n_lead, self.answer)
        for kind, part in (("prompt", self.tokens[self.n_lead : split]), ("answer", self.tokens[split:])):
            if len(part):
                yield ("corpus" if self.origin.is_corpus else kind), part.tolist()  # type: ignore[misc]


def block_keys(tokens: Tokens) -> list[int]:
    """A hash of each block of BLOCK tokens, the last one maybe shorter, and of all that precedes it in the text."""
    data, key, keys = tokens.tobytes(), b"", []
    step = BLOCK * tokens.itemsize
    for start in range(0, len(data), step):
        key = blake2b(key + data[start : start + step], digest_size=_KEY_BYTES).digest()
        keys.append(int.from_bytes(key, "little"))
    return keys


class KnownBlocks:
    """The keys of the blocks that are stored."""

    def __init__(self, keys: Keys | None = None) -> None:
        """`keys`: [n] uint64 of the texts stored so far."""
        self._old = np.sort(np.zeros(0, np.uint64) if keys is None else keys)
        self._new: set[int] = set()

    def add(self, keys: Iterable[int]) -> None:
        self._new.update(keys)

    def remove(self, keys: Keys) -> None:
        self._old = self._old[~np.isin(self._old, keys)]
        self._new.difference_update(keys.tolist())

    def find_new(self, keys: Sequence[int]) -> list[bool]:
        """Whether each is not known."""
        wanted = np.array(keys, np.uint64)
        places = np.searchsorted(self._old, wanted)
        is_old = np.zeros(len(keys), bool)
        inside = places < len(self._old)
        is_old[inside] = self._old[places[inside]] == wanted[inside]
        return [not old and key not in self._new for key, old in zip(keys, is_old.tolist(), strict=True)]


def split_new(tokens: Tokens, n_prompt: int, known: KnownBlocks, origin: Origin) -> list[StoredText]:
    """The runs of blocks of a text that are not `known` yet, which they are from then on.

    The first `n_prompt` tokens are the prompt, the others the answer.
    """
    keys = block_keys(tokens)
    is_new = [*known.find_new(keys), False]
    known.add(keys)
    texts = []
    first: int | None = None
    for i, new in enumerate(is_new):
        if new and first is None:
            first = i
        elif not new and first is not None:
            start, stop = first * BLOCK, min(i * BLOCK, len(tokens))
            lead = min(start, MAX_MATCH)
            run = tokens[start - lead : stop]
            answer = min(max(n_prompt - start + lead, 0), len(run))
            texts.append(StoredText(run, lead, answer, origin, np.array(keys[first:i], np.uint64)))
            first = None
    return texts
