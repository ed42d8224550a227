"""What drafters propose that are opened as for an answer: acceptance by depth."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgespec.adapt.evaluate import Matrix, find_rounds
from edgespec.adapt.texts import TrainingText
from edgespec.core.drafter import BlockSession
from edgespec.core.protocols import CheckCancelled
from edgespec.drafters.bigram import Bigram


def measure_blocks(
    session: BlockSession,
    texts: Sequence[TrainingText],
    depth: int,
    check: CheckCancelled,
    bigram: Bigram | None = None,
) -> dict[str, Matrix]:
    """The Matrix of each conversation: whether the best token of each row of a block is the text's.

    One block is proposed at each position. `session` reads the texts by itself, as a PARD model's does. Raises
    Cancelled, BackendError.
    """
    found: dict[str, list[Matrix]] = {}
    for text in texts:
        tokens, rounds = text.tokens.tolist(), find_rounds(text)
        matrix = np.zeros((len(rounds), depth), np.float32)
        session.begin(tokens[: rounds.start])
        for i, position in enumerate(rounds):
            check()
            rows = session.block(tokens[:position], position, min(depth, len(tokens) - position)) or ()
            best = -1
            for d, row in enumerate(rows):
                best = int((row if bigram is None or d == 0 else bigram.adjust(row, best)).argmax())
                matrix[i, d] = best == tokens[position + d]
        found.setdefault(text.source, []).append(matrix)
    return {source: np.concatenate(parts) for source, parts in found.items()}
