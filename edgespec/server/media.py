"""Content that is not text, such as images: it is refused in the turn that brings it, and the session goes on after it.

Agents keep what was refused in their history, and some join the next question to the message that has it. So content is
new only until the assistant has answered, or until it comes back in a turn that has more to say.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from itertools import dropwhile, takewhile

from edgespec.errors import InvalidRequest
from edgespec.server.fields import TEXT_ONLY, ContentPart, Said

_MAX_REFUSED = 1024
_NOT_ASKED = ("tool", "system", "developer")  # their messages may change from request to request, as by the time
_REFUSED: dict[bytes, bytes] = {}
"""What was refused lately: from a digest of it with the text next to it and its sender, to one of its turn."""


def require_text(said: Iterable[Said], owner: str) -> None:
    """Raise InvalidRequest if the newest turn has new content that is not text. Results of tools may have it.

    said   all messages
    owner  whose texts the sender's are
    """
    backwards = dropwhile(lambda each: each.role == "assistant", reversed([*said]))  # which begins the answer
    turn = [*takewhile(lambda each: each.role != "assistant", backwards)][::-1]
    pieces = [piece for each in turn if each.role not in _NOT_ASKED for piece in each.pieces]
    unread = _list_unread(pieces, owner)
    if not unread:
        return
    now = _digest([piece if isinstance(piece, str) else piece.dump() for piece in pieces])
    new = [part for key, part in unread.items() if _is_new(part, key, owner, now)]
    if not new:
        return
    for key in unread:
        _REFUSED.pop(key, None)  # the newest are the last
        _REFUSED[key] = now
    for oldest in [*_REFUSED][: max(0, len(_REFUSED) - _MAX_REFUSED)]:
        del _REFUSED[oldest]
    raise InvalidRequest(
        f"content of type '{new[0].type[:100]}' is not supported: {TEXT_ONLY}.",
        hint="Go on with text: the prompt then says that it was left out.",
    )


def _is_new(part: ContentPart, key: bytes, owner: str, now: bytes) -> bool:
    """Whether it was not refused before, with the same text near it or with none, in another turn than `now`."""
    turns = [_REFUSED[each] for each in (key, _digest([owner, "", part.dump()])) if each in _REFUSED]
    return not turns or now in turns


def _list_unread(pieces: list[str | ContentPart], owner: str) -> Mapping[bytes, ContentPart]:
    """The parts that are not text. What each is known by has the text before it, or the first one behind it."""
    texts = [piece.strip() for piece in pieces if isinstance(piece, str)]
    near, found = next(filter(None, texts), ""), {}
    for piece in pieces:
        if isinstance(piece, str):
            near = piece.strip() or near
        else:
            found[_digest([owner, near, piece.dump()])] = piece
    return found


def warn_of_media(said: Iterable[Said]) -> tuple[str, ...]:
    """A warning for each kind of content that the prompt names in place of showing it."""
    pieces = (piece for each in said for piece in each.pieces)
    kinds = dict.fromkeys(piece.kind for piece in pieces if not isinstance(piece, str))
    return tuple(f"{kind} content is left out: {TEXT_ONLY}." for kind in kinds)


def _digest(value: object) -> bytes:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).digest()
