"""How many tokens of a text a draft predicts, and whether an adapted draft predicts more of texts that are held out.

The texts are the target's own answers. A drafted token is accepted if it is the next token of the text, as greedy
decoding and matching of samples accept it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec.cancel import check_cancelled
from edgespec.core.arrays import Ints
from edgespec.errors import InvalidRequest
from edgespec.models.versions import BASE, AdaptedPair, Gain
from edgespec.train.parts import cut_windows
from edgespec.train.texts import TrainingText

Matrix = npt.NDArray[np.float32]
"""[positions, depth] whether, or how probably, the token of each depth is accepted if those before it were.

A position is a token of an answer before which a round may begin. Behind the end of a text nothing is accepted.
"""

_RESAMPLES = 4000
_INTERVAL = 2.5, 97.5  # percentiles
_WINDOW = 512  # tokens that are read at once


def find_rounds(text: TrainingText) -> range:
    """The positions of the tokens that drafting may predict: those of the answer but its first, without the lead.

    The first token of an answer comes from reading the prompt.
    """
    return range(max(text.answer + 1, text.n_lead, 1), len(text.tokens))


def find_hits(best: Ints, text: TrainingText) -> npt.NDArray[np.bool_]:
    """[positions of find_rounds] whether the draft's best token is the text's; `best` [n] has it after each token."""
    rounds = find_rounds(text)
    hits: npt.NDArray[np.bool_] = best[rounds.start - 1 : -1] == text.tokens[rounds.start :]
    return hits


def chain_matrix(hits: npt.NDArray[np.bool_], depth: int) -> Matrix:
    """The Matrix of a draft that predicts one token after the other, from its hits in one text."""
    padded = np.concatenate([hits, np.zeros(depth - 1, bool)]).astype(np.float32)
    return np.lib.stride_tricks.sliding_window_view(padded, depth) if len(hits) else np.zeros((0, depth), np.float32)


def measure_chains(network: Any, texts: Sequence[TrainingText], depth: int) -> dict[str, Matrix]:
    """The Matrix of each conversation.

    `network` is MLX's, tokens int32 [B, T] to logits [B, T, V]. Raises Cancelled.
    """
    found: dict[str, list[Matrix]] = {}
    for text, best in zip(texts, read_best(network, texts), strict=True):
        found.setdefault(text.source, []).append(chain_matrix(find_hits(best, text), depth))
    return {source: np.concatenate(parts) for source, parts in found.items()}


def read_best(network: Any, texts: Sequence[TrainingText]) -> list[Ints]:
    """[n] the network's best token after each token of each text; -1 in the lead and behind the last token.

    Raises Cancelled.
    """
    import mlx.core as mx

    best = [np.full(len(text.tokens), -1, np.int32) for text in texts]
    for window in cut_windows(texts, _WINDOW):
        check_cancelled()
        part = texts[window.text].tokens[window.start : window.stop]
        logits = network(mx.array(part[None]))
        rows = np.array(mx.argmax(logits[0], axis=-1)).astype(np.int32)
        best[window.text][window.first : window.stop] = rows[window.first - window.start :]
    return best


def expected_tokens(matrices: Iterable[Matrix]) -> float:
    """Tokens of a round in conversations, with drafts as deep as the matrices: those accepted and one of the target."""
    sizes = [(len(matrix), count_rounds(matrix)) for matrix in matrices]
    return sum(n for n, _ in sizes) / sum(rounds for _, rounds in sizes)


def count_rounds(matrix: Matrix) -> float:
    """The rounds, in expectation, that emit the tokens of all positions; one begins behind the tokens of another.

    They are fewer than the mean over positions suggests if a draft is right in long runs: rounds mostly begin outside.
    """
    depth = matrix.shape[1]
    at_least = np.cumprod(matrix, axis=1, dtype=np.float64)
    accepted = -np.diff(at_least, axis=1, prepend=1, append=0)  # [positions, depth + 1] probability of 0 to depth
    begins = np.zeros(len(matrix) + depth + 1)
    begins[0] = 1
    for at, row in enumerate(accepted):
        begins[at + 1 : at + depth + 2] += begins[at] * row
    return float(begins[: len(matrix)].sum())


def require_positions(matrices: Mapping[str, Matrix]) -> None:
    """Raise InvalidRequest if no conversation has a position."""
    if not any(map(len, matrices.values())):
        raise InvalidRequest(
            "the answers that are held out are too short to measure the gain.", hint="Use the model for longer."
        )


def compare(before: Mapping[str, Matrix], after: Mapping[str, Matrix]) -> Gain:
    """The gain of `after` over `before` in expected tokens of a round. Both have the Matrix of each conversation, for
    the same positions and depth.

    The interval is a paired bootstrap over conversations, because the positions of one resemble each other. Raises
    InvalidRequest if no conversation has a position.
    """
    require_positions(before)
    names = [name for name, each in before.items() if len(each)]
    sizes = np.array([len(before[name]) for name in names], np.float64)
    first, second = (np.array([count_rounds(part[name]) for name in names]) for part in (before, after))
    n = len(names)
    drawn = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), size=_RESAMPLES).astype(np.float64)
    gains = (drawn @ sizes) / (drawn @ second) - (drawn @ sizes) / (drawn @ first)
    low, high = np.percentile(gains, _INTERVAL)
    total = sizes.sum()
    return Gain(float(total / first.sum()), float(total / second.sum()), float(low), float(high), n)


Measure = Callable[[Path], Mapping[str, Matrix]]
"""The matrices of the draft at a path on the texts that are held out."""


@dataclass(frozen=True, slots=True)
class Return:
    """Another version was put in use: it predicts the newest texts better than the one that was, by `gain`."""

    version: int
    gain: Gain


def return_to_best(pair: AdaptedPair, base: Path, measure: Measure) -> Return | None:
    """Put the base draft or the version before in use if it predicts better than the one in use, beyond chance.

    Raises CacheError, InvalidModelFile, and what `measure` raises.
    """
    active = pair.active()
    if active is None:
        return None
    present = measure(active.path)
    before = [version for version, card in pair.versions().items() if card and version < active.card.version][-1:]
    best: Return | None = None
    for version in (BASE, *before):
        gain = compare(present, measure(base if version == BASE else pair.read(version).path))
        if gain.is_better and (best is None or gain.after > best.gain.after):
            best = Return(version, gain)
    if best is not None:
        pair.use(best.version)
    return best
