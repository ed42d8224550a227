"""ShownScores: the scores of the tokens that are in the text of an answer."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections import deque
from collections.abc import Iterator, Sequence

from edgespec.engine.events import Scored
from edgespec.text.stream import Piece

_Utf8 = getincrementaldecoder("utf-8")


class ShownScores:
    """Scores of tokens, each given out once it is known that its token is in the text.

    A token that ends the answer is not, nor are those of a stop string. If text is held back, since a stop string
    may have begun, so are the scores of its tokens.
    """

    def __init__(self) -> None:
        self._held: deque[tuple[int, Scored]] = deque()  # with the characters before each token, since one was held
        self._decoder = _Utf8("replace")
        self._n_characters = 0  # of the held tokens
        self._n_shown = 0  # of these characters

    def take(self, scores: Sequence[Scored], pieces: Sequence[Piece], *, holds_text: bool) -> Iterator[Scored]:
        """The scores of the tokens that are now in the text. `scores` and `pieces` are the next token's: its score, if
        it has text, and the text that it makes certain. `holds_text`: some text is not certain yet.
        """
        for score in scores:
            self._held.append((self._n_characters, score))
            self._n_characters += len(self._decoder.decode(score.text))
        self._n_shown += sum(len(piece.text) for piece in pieces)
        while self._held and (not holds_text or self._held[0][0] < self._n_shown):
            yield self._held.popleft()[1]
        if not holds_text:
            self._n_characters = self._n_shown = 0
            self._decoder.reset()
