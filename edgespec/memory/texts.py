"""Texts as they are stored: runs of tokens that no earlier text of the same space has after the same beginning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]
Kind = Literal["answer", "prompt", "corpus"]
Tokens = npt.NDArray[np.uint32]
SEPARATOR = 0xFFFF_FFFF
"""What stands before each text and after the last one in an index; no match reaches beyond it."""

MAX_MATCH = 32
"""Tokens: positions are ordered by so many of the tokens before them, and longer matches count as this long."""

BLOCK = 64  # tokens
_KEY_BYTES = 8


class SpaceKey(NamedTuple):
    """The texts that belong together: of one tokenizer and one namespace."""

    tokenizer: str
    namespace: str


@dataclass(frozen=True, slots=True)
class Origin:
    """The source of a text.

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
    n_lead  how many of the first tokens an earlier run has too; they are the context by which the others are found
    answer  the position where a model's answer starts; n if there is none
    keys    [blocks] see `block_keys`
    id      the row in the database, in the order of storing; 0 until it is stored, -1 if it must not be
    """

    tokens: Tokens
    n_lead: int
    answer: int
    origin: Origin
    keys: Keys
    id: int = 0

    def parts(self) -> Iterator[tuple[Kind, list[int]]]:
        """(kind, tokens) of each part that is new in this run: of a prompt and an answer, or of a document."""
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


def split_new(tokens: Tokens, n_prompt: int, known: set[int], origin: Origin) -> list[StoredText]:
    """The runs of blocks of a text whose keys are not `known` yet, which they are from then on.

    The first `n_prompt` tokens are the prompt, the others the answer.
    """
    keys = block_keys(tokens)
    is_new = [*(key not in known for key in keys), False]
    known.update(keys)
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
