"""Turns logits into the target distribution p, in the same order for all backends, as a function of logits and prefix.

Order: logit bias, penalties (repetition, then frequency and presence), top-k, typical, top-p, min-p, temperature.
Truncation uses probabilities at temperature 1. Temperature comes last, as in llama.cpp's default chain and in mlx-lm.
Of equal logits the lower token id comes first, so that equal logits give equal tokens on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from edgespec.errors import BackendError, InvalidRequest
from edgespec.options import LARGEST, SAMPLING

# Array types. Shapes are in the docstrings of the functions that use them.


Ints = npt.NDArray[np.int32]
Indices = npt.NDArray[np.intp]
Logits = npt.NDArray[np.float32]
# float64; exact fractions (dtype object) in the proofs of tests/core
Probs = npt.NDArray[Any]
Rng = np.random.Generator


# Random numbers of verification: drawn from a seed in production, enumerated by the proofs in tests/core.


_BLOCK = 512
_EXACT = 16_384  # weights that are summed in float64 throughout
_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15


class RandomSource(Protocol):
    """The two random decisions of an acceptance rule."""

    def accept(self, p: float, q: float) -> bool:
        """True with probability min(1, p / q); q > 0."""

    def choose(self, weights: Probs, position: int) -> int:
        """Index i with probability weights[i] / sum(weights), for the token at `position` of the sequence."""

    def uniform(self, position: int) -> float:
        """The number in [0, 1) that `choose` uses at `position`, for backends that sample on their device."""


class CounterRng:
    """A counter-based random number generator.

    `choose` depends on the seed and the position alone: a position draws the same number by plain decoding, through a
    draft, and on every backend. `accept` has its own stream.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed & _MASK

    @cached_property
    def _stream(self) -> np.random.Generator:
        """The stream of the rules that reject; making it takes 0.1 ms."""
        return np.random.Generator(np.random.PCG64([self._seed, 1]))

    def accept(self, p: float, q: float) -> bool:
        return self._stream.random() * q < p

    def choose(self, weights: Probs, position: int) -> int:
        return index_at(weights, self.uniform(position))

    def uniform(self, position: int) -> float:
        """A number in [0, 1) with 53 random bits: SplitMix64's mixer (Steele et al. 2014) over seed and position."""
        z = _mix(_mix((self._seed + _STEP) & _MASK) ^ ((position * _STEP) & _MASK))
        return (z >> 11) * 2.0**-53


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def index_at(weights: Probs, u: float) -> int:
    """Inverse of the cumulative distribution: the first i whose running sum exceeds u times the total.

    Never returns an index of weight zero. See `sum_blocks` for the precision of the running sums.
    """
    n = len(weights)
    start, before = 0, 0.0
    if n <= _BLOCK:
        inside = np.cumsum(weights, dtype=np.float64)
        level = u * inside[-1]
    else:
        blocks = np.cumsum(sum_blocks(weights))
        level = u * blocks[-1]
        b = min(int(blocks.searchsorted(level, side="right")), len(blocks) - 1)
        start, before = b * _BLOCK, blocks[b - 1] if b else 0.0
        inside = np.cumsum(weights[start : start + _BLOCK], dtype=np.float64)
    i = start + int(inside.searchsorted(level - before, side="right"))
    if i < n and weights[i] > 0:
        return i
    below = np.flatnonzero(weights[:i])  # rounding at a border: the nearest index below with a weight
    return int(below[-1]) if len(below) else int(np.flatnonzero(weights)[0])


def sum_blocks(weights: Probs) -> npt.NDArray[np.float64]:
    """The sums of 512 weights each, the last of those that are left.

    In float64, but within the blocks of more than 16,384 weights in their own type: 512 float32 weights are off by less
    than 1e-6 of their sum.
    """
    whole = len(weights) // _BLOCK * _BLOCK
    rows, rest = weights[:whole].reshape(-1, _BLOCK), weights[whole:]
    sums = np.einsum("ij->i", rows, dtype=np.float64 if len(weights) <= _EXACT else weights.dtype).astype(np.float64)
    return np.append(sums, rest.sum(dtype=np.float64)) if len(rest) else sums


# The truncations of the sampler chain: which ids stay. Of equal values the lower id stays.
#
# They run on every visited row, so none sorts a vocabulary: a bound that a pass or two over the row can give leaves few
# candidates, and only the candidates at the border are sorted.


_ROWS = 64  # that a vocabulary is folded into, for the maxima of its columns
_LOWEST = np.finfo(np.float32).min
_SLACK = 1e-6  # of the total mass: more than float32 sums and weights are off by
_LEAST_TOTAL = 1e-13  # of weights that are not scaled: they are precise, and so are those that matter beside them
_SAMPLE = 512
_SAFE_SHARE = 0.75  # of the mass that may be left out, by an estimate from the sample
_MANY = 50  # a mask with more than one hit in so many is slow to read
_FEW = 1024  # entries, which are sorted directly
_BUCKET_BITS = 18  # low bits of a float32 that are ignored; the rest gives 32 buckets for every power of two


class NonFiniteLogits(BackendError):
    """A row of logits whose maximum is NaN or infinite."""


def non_finite_error() -> NonFiniteLogits:
    return NonFiniteLogits("the model returned NaN or infinite logits.", hint="Check the file: edgespec pull --verify.")


def highest(z: Logits) -> np.float32:
    """The maximum. Raises BackendError if it is NaN or infinite, as do all functions here."""
    best: np.float32 = z.max()
    if not math.isfinite(best):
        raise non_finite_error()
    return best


def top_k(z: Logits, k: int) -> Indices:
    """The ids of the k largest values, ascending; fewer than k where the others are -inf."""
    width = len(z) // _ROWS
    if k <= width:  # the k largest column maxima are k values of z, so the k largest values reach the least of them
        columns = z[: _ROWS * width].reshape(_ROWS, width).max(axis=0)
        highest(np.append(z[_ROWS * width :], columns.max()))
        columns.partition(width - k)
        border = max(columns[width - k], _LOWEST)
    else:
        highest(z)
        border = _LOWEST
    likely: Indices = (z >= border).nonzero()[0]
    if len(likely) <= k:
        return likely
    values = z[likely]
    if len(values) <= _FEW:
        return likely[np.sort(np.argsort(-values, kind="stable")[:k])]
    border = np.partition(values, len(values) - k)[len(values) - k]
    above = np.flatnonzero(values > border)
    equal = np.flatnonzero(values == border)[: k - len(above)]
    return likely[np.sort(np.concatenate((above, equal)))]


def nucleus(z: Logits, top_p: float) -> Indices:
    """Nucleus sampling (Holtzman et al. 2020): the fewest most probable ids with `top_p` mass, ascending."""
    if len(z) <= _FEW:
        weights = np.exp(z - highest(z))
        order = np.argsort(-z, kind="stable")
        sums = np.cumsum(weights[order], dtype=np.float64)
        return np.sort(order[: int(sums.searchsorted(top_p * sums[-1])) + 1])
    with np.errstate(over="ignore"):
        weights = np.exp(z)
    total = float(sum_blocks(weights).sum())
    if not _LEAST_TOTAL < total < math.inf:  # out of range, or NaN
        weights = np.exp(z - highest(z))
        total = float(sum_blocks(weights).sum())
    likely, weights = _find_nucleus(weights, total, top_p * total)
    rank = weights.max().view(np.int32) - weights.view(np.int32)  # bits of positive floats have the order of the floats
    return likely[_shortest(rank, weights, top_p * total)]


def typical(z: Logits, typical_p: float) -> Indices:
    """Locally typical sampling (Meister et al. 2022): the ids nearest to the entropy, `typical_p` mass in all."""
    x = np.maximum(z - highest(z), _LOWEST)  # 0 * -inf is NaN
    weights = np.exp(x)
    total = float(sum_blocks(weights).sum())
    # The entropy is log(total) - mean, and the surprise of an id log(total) - x.
    mean = np.float32(np.multiply(weights, x).sum(dtype=np.float64) / total)
    distance = np.abs(np.subtract(mean, x, out=x), out=x)
    return _shortest(distance.view(np.int32), weights, typical_p * total)


def min_p(z: Logits, least: float) -> Indices:
    """The ids at least `least` times as probable as the best one, ascending."""
    kept: Indices = (z >= highest(z) + np.float32(math.log(least))).nonzero()[0]
    return kept


def _shortest(rank: npt.NDArray[np.int32], weights: Probs, mass: float) -> Indices:
    """The shortest start of the order by `rank`, then by index, whose weights reach `mass`: ascending; at least one."""
    if len(rank) <= _FEW:
        return np.sort(_start(np.argsort(rank, kind="stable"), weights, mass))
    bucket = rank >> _BUCKET_BITS
    sums = np.cumsum(np.bincount(bucket, weights))
    border = int(sums.searchsorted(max(mass, math.ulp(0.0))))
    is_kept = bucket < border
    inside = np.flatnonzero(bucket == border)
    inside = inside[np.argsort(rank[inside], kind="stable")]
    is_kept[_start(inside, weights, mass - (float(sums[border - 1]) if border else 0.0))] = True
    return _find(is_kept)


def _start(order: Indices, weights: Probs, mass: float) -> Indices:
    """The shortest start of `order` whose weights reach `mass`; at least one."""
    sums = np.cumsum(weights[order], dtype=np.float64)
    return order[: int(sums.searchsorted(mass)) + 1]


def _find_nucleus(weights: Probs, total: float, mass: float) -> tuple[Indices, Probs]:
    """The ids, ascending, and weights of all above some border, which have `mass` of `total` or more together."""
    spare = max(total - mass - _SLACK * total, 0.0)
    # Fewer than n weights, each below an n-th of what may be left out, are less than that together.
    is_likely = weights >= np.float32(spare / len(weights))
    if np.count_nonzero(is_likely) <= len(weights) // _MANY:
        likely = np.flatnonzero(is_likely)
        return likely, weights[likely]
    step = len(weights) // _SAMPLE
    sample = np.sort(weights[::step])
    at = int(np.cumsum(sample, dtype=np.float64).searchsorted(_SAFE_SHARE * spare / step))
    likely = _find(weights >= sample[min(at, len(sample) - 1)])
    chosen = weights[likely]
    if chosen.sum(dtype=np.float64) < mass:
        likely = _find(is_likely)
        chosen = weights[likely]
    return likely, chosen


def _find(mask: npt.NDArray[np.bool_]) -> Indices:
    """The indices where `mask` is true, as np.flatnonzero.

    NumPy has a loop for masks with few hits, which takes 15 ns for each, and one of half a nanosecond for each entry,
    which it uses from one hit in ten. Appended hits choose the second loop where that one is faster.
    """
    n, count = len(mask), np.count_nonzero(mask)
    if n // _MANY < count <= n // 10:
        return np.flatnonzero(np.concatenate((mask, np.ones(n // 8, np.bool_))))[:count]
    return np.flatnonzero(mask)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling options; the defaults sample from the model's own distribution. Raises InvalidRequest.

    temperature        0 is greedy
    top_k              0 keeps all; -1, as in vLLM and llama.cpp, becomes 0
    top_p, typical_p   1 keeps all
    min_p              0 keeps all
    repetition_penalty divides positive and multiplies negative logits of tokens seen (CTRL, Keskar et al. 2019)
    presence_penalty   subtracted once from the logit of a token seen; frequency_penalty once per occurrence
    penalty_window     the last tokens of the prefix, prompt included, that count as seen
    logit_bias         (token, bias) pairs; biases of the same token add up
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_window: int = 64
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        for option in SAMPLING:
            _within(option.name.replace("_", "-"), getattr(self, option.name), *option.limits)
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        _within("penalty window", self.penalty_window, 0, LARGEST)
        for token, bias in self.logit_bias:
            _within(f"logit bias of token {token}", bias, -1e4, 1e4)

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        message = f"{name} must be between {low:,.12g} and {high:,.12g}, not {value}."
        raise InvalidRequest(message, hint=f"Give another {name}.")


@dataclass(frozen=True, slots=True)
class Distribution:
    """A distribution over token ids: weights [n] >= 0, not normalised, of `ids` [n] ascending (None: 0..n-1)."""

    ids: Ints | None
    weights: Probs

    def token(self, index: int) -> int:
        return index if self.ids is None else int(self.ids[index])

    def normalised(self) -> Distribution:
        """The same distribution with weights that sum to 1, float64; exact fractions stay fractions."""
        weights = self.weights if self.weights.dtype == object else self.weights.astype(np.float64)
        return Distribution(self.ids, weights / weights.sum())

    def weight(self, token: int) -> Any:
        """The weight of a token, 0 outside `ids`: a number of the type of the weights."""
        if self.ids is None:
            return self.weights[token]
        at = int(self.ids.searchsorted(token))
        return self.weights[at] if at < len(self.ids) and self.ids[at] == token else self.weights.dtype.type(0)

    def dense(self, vocab_size: int) -> Probs:
        """[V] probabilities that sum to 1."""
        p = self.normalised().weights
        if self.ids is None:
            return p
        out = np.zeros(vocab_size, p.dtype)
        out[self.ids] = p
        return out


class Sampler:
    """Applies SamplingParams to logits. `distribution` depends on the last `window` tokens of the prefix only."""

    def __init__(self, params: SamplingParams, vocab_size: int) -> None:
        """Raises InvalidRequest if a biased token is not in the vocabulary."""
        for token, _ in params.logit_bias:
            if not 0 <= token < vocab_size:
                raise InvalidRequest(
                    f"logit bias names token {token}, but the vocabulary ends at {vocab_size - 1}.",
                    hint="Remove that bias.",
                )
        self.params = params
        self.vocab_size = vocab_size
        self.window = params.penalty_window if params.has_penalties else 0
        self._bias_ids = np.array([t for t, _ in params.logit_bias], np.int32)
        self._bias = np.array([b for _, b in params.logit_bias], np.float32)
        self._truncations = self._list_truncations()

    @property
    def row_params(self) -> SamplingParams | None:
        """The parameters if the distribution depends on the row's logits alone; else None."""
        return None if self.window or len(self._bias) else self.params

    def distribution(self, logits: Logits, prefix: Sequence[int]) -> Distribution:
        """The target distribution p for the token after `prefix`; logits [V] are not written to.

        Raises BackendError if the highest logit is NaN or infinite.
        """
        params = self.params
        z = self._adjust(logits, prefix)
        if params.temperature == 0:
            token = int(z.argmax())
            highest(z[token : token + 1])
            return Distribution(np.array([token], np.int32), np.ones(1))
        ids: Indices | None = None
        for truncate in self._truncations:
            kept = truncate(z)
            ids, z = kept if ids is None else ids[kept], z[kept]
        return Distribution(None if ids is None else ids.astype(np.int32), _weigh(z, params.temperature))

    def _adjust(self, logits: Logits, prefix: Sequence[int]) -> Logits:
        if not len(self._bias) and not self.window:
            return logits
        z = logits.copy()
        if len(self._bias):
            np.add.at(z, self._bias_ids, self._bias)
        if self.window:
            self._penalize(z, prefix[-self.window :])
        return z

    def _penalize(self, z: Logits, recent: Sequence[int]) -> None:
        """A loop over few tokens is faster here than a dozen calls of NumPy."""
        params, counts = self.params, dict.fromkeys(recent, 0)
        for token in recent:
            counts[token] += 1
        seen = np.fromiter(counts, np.intp, len(counts))
        penalty, presence, frequency = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        z[seen] = [
            (value / penalty if value > 0 else value * penalty) - presence - frequency * count
            for value, count in zip(z[seen].tolist(), counts.values(), strict=True)
        ]

    def _list_truncations(self) -> list[Callable[[Logits], Indices]]:
        """What the parameters ask for, in order: from logits [n] to the indices that stay, ascending."""
        params = self.params
        wanted: list[tuple[bool, Callable[[Logits], Indices]]] = [
            (params.top_k > 0, lambda z: top_k(z, params.top_k)),
            (params.typical_p < 1, lambda z: typical(z, params.typical_p)),
            (params.top_p < 1, lambda z: nucleus(z, params.top_p)),
            (params.min_p > 0, lambda z: min_p(z, params.min_p)),
        ]
        return [truncate for is_wanted, truncate in wanted if is_wanted]


def _weigh(z: Logits, temperature: float) -> Probs:
    """exp((z - max) / temperature) in float32."""
    weights: Probs = z - highest(z)
    if temperature != 1.0:
        with np.errstate(over="ignore"):  # a tiny temperature overflows to -inf, as it should
            np.divide(weights, np.float32(max(temperature, 1e-6)), out=weights)
    return np.exp(weights, out=weights)
