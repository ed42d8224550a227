"""The messages between a target's machine and one that runs `edgespec draft serve`.

`GET /v1/draft` describes the draft as JSON: `protocol`, `model`, `drafter`, `tokenizer` (the hash of
`registry.tokenizer_compat.hash_vocabulary`), `context_size`, `parallel` and `in_use`. `POST /v1/draft` opens a session,
which has one cache of the draft until the connection ends. Its query has `protocol`, `tokenizer` and `vocab_size`, both
the target's, and `guesses`, how many the server may make after each message. Both are authenticated like every request
of `edgespec serve`. The bodies of the POST and of its response stay open, in chunks; each carries messages. A message
is its length without these four bytes (u32), its kind (u8) and its fields, all little-endian:

to the server
    1  Begin  number u32, keep u32, crc u32, seed u64, n u32, sampling [n] JSON or nothing, ids i32[]
    2  Ask    number u32, keep u32, crc u32, depth u16, nodes u16, reach f32, is_held u8, ids i32[]
from the server
    3  Drafted  number u32, n_emitted u16, n u16, is_guess u8, is_drawn u8, emitted i32[n_emitted], tokens i32[n],
                parents i16[n], confidences f32[n]; where is_drawn, for each token: m u16, ids i32[m], q f32[m]
    4  Fault  a sentence in UTF-8; the server then closes the connection

Both sides hold the text. Begin and Ask replace what follows its first `keep` tokens by `ids`; `crc` is that of all its
tokens as int32, so that a difference ends the session. Begin starts a generation: with `sampling` the draft is drawn at
random, else its best tokens are proposed. Ask wants a draft after the text, of `depth` tokens on a path and about
`nodes` in all; a path may end where its probability falls below `reach`. The server replies with a Drafted of the same
number, unless `is_held`: the client has a draft already. An Ask of depth 0 wants none: the server reads the
text, and sends its best next token as a guess when it has.

After a Begin and after other Asks the server guesses what the target will emit next, and sends drafts for that, too: a
Drafted that is_guess continues the text of the Begin or Ask of its number by `emitted`, and then by its own tokens.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec.core.sampling import Ints, Probs, SamplingParams
from edgespec.errors import reason_of

PROTOCOL = 1
PATH = "/v1/draft"
MAX_MESSAGE = 2**23
"""Bytes of a message: two million tokens of text."""
MAX_DEPTH = 16
"""Tokens on a path of a draft, at most."""
MAX_NODES = 63
MAX_GUESSES = 6
"""Drafts for what is guessed after a message, at most."""
_HEAD = struct.Struct("<IB")
_BEGIN = struct.Struct("<IIIQI")
_ASK = struct.Struct("<IIIHHfB")
_DRAFTED = struct.Struct("<IHHBB")
_COUNT = struct.Struct("<H")
_BEGIN_KIND, _ASK_KIND, _DRAFTED_KIND, _FAULT_KIND = 1, 2, 3, 4


class BadMessage(ValueError):
    """A message that does not follow the protocol; its text is a sentence without the full stop."""


@dataclass(frozen=True, slots=True)
class Change:
    """The text is its first `keep` tokens and then `ids`; `crc` is that of the whole."""

    keep: int
    ids: Sequence[int]
    crc: int


@dataclass(frozen=True, slots=True)
class Begin:
    """A generation starts; `sampling` is None for drafts of best tokens."""

    number: int
    change: Change
    sampling: SamplingParams | None
    seed: int


@dataclass(frozen=True, slots=True)
class Ask:
    """A draft after the text is wanted, or, where it `is_held`, was taken from a guess; none if `depth` is 0."""

    number: int
    change: Change
    depth: int
    nodes: int
    reach: float = 0.0
    is_held: bool = False


@dataclass(frozen=True, slots=True)
class Drafted:
    """A draft; see the module.

    tokens       [n] ids
    parents      [n] nodes; -1 is the root
    confidences  [n] the draft's probability of each
    q            [n] of drawn tokens: the ids [m] and probabilities [m] of the distribution that each was drawn from
    """

    number: int
    emitted: Sequence[int]
    tokens: Sequence[int]
    parents: Sequence[int]
    confidences: Sequence[float]
    q: Sequence[tuple[Ints, Probs]] | None = None
    is_guess: bool = False

    def is_enough(self, depth: int, reach: float) -> bool:
        """Whether its longest path has `depth` tokens, or ends where it is less probable than `reach`."""
        found, probability = measure_path(self.parents, self.confidences)
        return found >= depth or (found > 0 and probability < reach)

    def after(self, emitted: Sequence[int]) -> Drafted | None:
        """What it says where the text goes on with `emitted`; None if nothing. A drawn chain is taken whole."""
        start = len(self.emitted)
        if tuple(emitted[:start]) != tuple(self.emitted) or (self.q is not None and len(emitted) > start):
            return None
        children = dict(zip(zip(self.parents, self.tokens, strict=True), range(len(self.tokens)), strict=True))
        root = -1
        for token in emitted[start:]:
            if (child := children.get((root, token))) is None:
                return None
            root = child
        if root < 0:
            return self
        place = {root: -1}
        for node, parent in enumerate(self.parents):
            if parent in place:
                place[node] = len(place) - 1
        kept = [*place][1:]
        parents = [place[self.parents[node]] for node in kept]
        tokens, confidences = [self.tokens[node] for node in kept], [self.confidences[node] for node in kept]
        return Drafted(self.number, emitted, tokens, parents, confidences) if kept else None


@dataclass(frozen=True, slots=True)
class Fault:
    """The server ends the session because of `reason`."""

    reason: str


Message = Begin | Ask | Drafted | Fault


def measure_path(parents: Sequence[int], confidences: Sequence[float]) -> tuple[int, float]:
    """(tokens, probability) of the longest path of a draft, of several the most probable; (0, 1.0) without tokens."""
    paths = {-1: (0, 1.0)}
    for node, parent in enumerate(parents):
        above, probability = paths.get(parent, (0, 1.0))
        paths[node] = above + 1, probability * confidences[node]
    return max(paths.values())


def encode(message: Message) -> bytes:
    """The bytes of a message, with their length in front."""
    match message:
        case Begin(number, change, sampling, seed):
            told = b"" if sampling is None else json.dumps(asdict(sampling)).encode()
            fields = _BEGIN.pack(number, change.keep, change.crc, seed, len(told)) + told + pack_ids(change.ids)
            kind = _BEGIN_KIND
        case Ask(number, change, depth, nodes, reach, is_held):
            fields = _ASK.pack(number, change.keep, change.crc, depth, nodes, reach, is_held) + pack_ids(change.ids)
            kind = _ASK_KIND
        case Drafted():
            fields, kind = _encode_draft(message), _DRAFTED_KIND
        case Fault(reason):
            fields, kind = reason.encode(), _FAULT_KIND
    return _HEAD.pack(1 + len(fields), kind) + fields


def split(received: bytearray) -> list[Message]:
    """Take the whole messages off the front of `received`. Raises BadMessage."""
    found: list[Message] = []
    while len(received) >= _HEAD.size:
        length, kind = _HEAD.unpack_from(received)
        if not 1 <= length <= MAX_MESSAGE:
            raise BadMessage(f"a message of {length:,} bytes is not allowed; the limit is {MAX_MESSAGE:,}")
        if len(received) < 4 + length:
            break
        found.append(_decode(kind, bytes(received[_HEAD.size : 4 + length])))
        del received[: 4 + length]
    return found


def _encode_draft(draft: Drafted) -> bytes:
    drawn = draft.q is not None
    parts = [
        _DRAFTED.pack(draft.number, len(draft.emitted), len(draft.tokens), draft.is_guess, drawn),
        pack_ids(draft.emitted),
        pack_ids(draft.tokens),
        np.asarray(draft.parents, "<i2").tobytes(),
        np.asarray(draft.confidences, "<f4").tobytes(),
    ]
    for ids, q in draft.q or ():
        parts += [_COUNT.pack(len(ids)), pack_ids(ids), np.asarray(q, "<f4").tobytes()]
    return b"".join(parts)


def _decode(kind: int, fields: bytes) -> Message:
    """Raises BadMessage."""
    if (decode := _DECODERS.get(kind)) is None:
        raise BadMessage(f"there are no messages of kind {kind}")
    try:
        return decode(fields)
    except Exception as error:  # of struct, NumPy, JSON and the sampling parameters
        raise BadMessage(f"a message of kind {kind} is malformed: {reason_of(error)}") from error


def _decode_begin(fields: bytes) -> Begin:
    number, keep, crc, seed, n = _BEGIN.unpack_from(fields)
    told = fields[_BEGIN.size : _BEGIN.size + n]
    if len(told) < n:
        raise ValueError("its sampling is cut")
    ids = _Reader(fields, _BEGIN.size + n).take("<i4", -1)
    sampling = _read_sampling(json.loads(told)) if told else None
    return Begin(number, Change(keep, ids.tolist(), crc), sampling, seed)


def _decode_ask(fields: bytes) -> Ask:
    number, keep, crc, depth, nodes, reach, is_held = _ASK.unpack_from(fields)
    ids = _Reader(fields, _ASK.size).take("<i4", -1)
    return Ask(number, Change(keep, ids.tolist(), crc), depth, nodes, reach, bool(is_held))


def _read_sampling(told: dict[str, object]) -> SamplingParams:
    bias = told.pop("logit_bias", ())
    if not isinstance(bias, list | tuple) or not all(isinstance(each, int | float) for each in told.values()):
        raise ValueError("its sampling is not one of numbers")
    return SamplingParams(**told, logit_bias=tuple((int(token), float(by)) for token, by in bias))  # type: ignore[arg-type]


def _decode_draft(fields: bytes) -> Drafted:
    number, n_emitted, n, is_guess, is_drawn = _DRAFTED.unpack_from(fields)
    reader = _Reader(fields, _DRAFTED.size)
    emitted, tokens = reader.take("<i4", n_emitted), reader.take("<i4", n)
    parents, confidences = reader.take("<i2", n), reader.take("<f4", n)
    q = None
    if is_drawn:
        q = []
        for _ in range(n):
            (m,) = reader.take("<u2", 1)
            q.append((reader.take("<i4", m), reader.take("<f4", m)))
    return Drafted(number, emitted.tolist(), tokens.tolist(), parents.tolist(), confidences.tolist(), q, bool(is_guess))


class _Reader:
    """Arrays of a message, one after the other; `n` of -1 takes the rest. Raises ValueError beyond its end."""

    def __init__(self, fields: bytes, at: int) -> None:
        self._fields = fields
        self._at = at

    def take(self, kind: str, n: int) -> npt.NDArray[Any]:
        found = np.frombuffer(self._fields, kind, n, self._at)
        self._at += found.nbytes
        return found


def pack_ids(ids: Sequence[int] | Ints) -> bytes:
    return np.asarray(ids, "<i4").tobytes()


_DECODERS: dict[int, Callable[[bytes], Message]] = {
    _BEGIN_KIND: _decode_begin,
    _ASK_KIND: _decode_ask,
    _DRAFTED_KIND: _decode_draft,
    _FAULT_KIND: lambda fields: Fault(fields.decode("utf-8", "replace")),
}
