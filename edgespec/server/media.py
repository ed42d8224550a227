"""Refuses content that is not text, such as images, in the turn that brings it. In later turns it is only left out.

Agents keep refused content in their history, and some append the next question to the message that holds it. So content
counts as new until the assistant has answered, or until it comes back in a turn with other text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from itertools import dropwhile, takewhile

from edgespec.errors import InvalidRequest
from edgespec.server.fields import TEXT_ONLY, ContentPart, Said

_MAX_REFUSED = 1024
_NOT_ASKED = ("tool", "system", "developer")  # messages that may change between requests, as by the time of day
_REFUSED: dict[bytes, bytes] = {}
"""What was refused lately: a digest of its sender, the text next to it and the content itself -> a digest of its turn.
"""


def require_text(said: Iterable[Said], owner: str) -> None:
    """Raise InvalidRequest if the newest turn has new content that is not text. Results of tools may have it.

    said   all messages
    owner  who sends them; see Caller.owner
    """
    # A last message of the assistant is the beginning of the answer.
    backwards = dropwhile(lambda each: each.role == "assistant", reversed([*said]))
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
    """Whether this part is to be refused: it was never refused with the same text near it or with none, or it was
    refused in this very turn, which is sent again. `key` is the digest of the part, and `now` the digest of the turn.
    """
    turns = [_REFUSED[each] for each in (key, _digest([owner, "", part.dump()])) if each in _REFUSED]
    return not turns or now in turns


def _list_unread(pieces: list[str | ContentPart], owner: str) -> Mapping[bytes, ContentPart]:
    """The parts that are not text, by a digest of the sender, the text near the part, and the part. The text near it is
    the last one before it, else the first one behind it.
    """
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
