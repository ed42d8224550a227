"""Turns logits into the target distribution p, in the same order for all backends, as a function of logits and prefix.

Order: logit bias, penalties (repetition, then frequency and presence), top-k, typical, top-p, min-p, temperature.
Truncation uses probabilities at temperature 1. Temperature comes last, as in llama.cpp's default chain and in mlx-lm.
Of equal logits the lower token id comes first, so that equal logits give equal tokens on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgespec.core.arrays import Indices, Ints, Logits, Probs
from edgespec.core.truncate import highest, min_p, nucleus, top_k, typical
from edgespec.errors import InvalidRequest
from edgespec.options import LARGEST, SAMPLING


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling options; the defaults sample from the model's own distribution.

    Raises InvalidRequest for a value outside of its limits.

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
        raise InvalidRequest(message)


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
        """Apply the penalties of the `recent` tokens to `z` [V] in place.

        A loop over few tokens is faster here than a dozen calls of NumPy.
        """
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
        """The truncations that the parameters ask for, in order. Each maps logits [n] to the ascending indices kept."""
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
