"""From logits to the target distribution p, in the same order for all backends. A function of logits and prefix.

Order: logit bias, penalties (repetition, then frequency and presence), top-k, typical, top-p, min-p, temperature.
Truncation uses probabilities at temperature 1. Temperature comes last, as in llama.cpp's default chain and in mlx-lm.
Of equal logits the lower token id comes first, so that equal logits give equal tokens on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgespec.core.arrays import Indices, Ints, Logits, Probs
from edgespec.errors import BackendError, InvalidRequest


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling options; the defaults sample from the model's own distribution. Raises InvalidRequest.

    temperature        0 is greedy
    top_k              0 keeps all
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
        _within("temperature", self.temperature, 0.0, 100.0)
        _within("top-k", self.top_k, 0, 2**31 - 1)
        _within("top-p", self.top_p, 0.0, 1.0)
        _within("min-p", self.min_p, 0.0, 1.0)
        _within("typical-p", self.typical_p, 0.0, 1.0)
        _within("repetition penalty", self.repetition_penalty, 0.01, 100.0)
        _within("presence penalty", self.presence_penalty, -100.0, 100.0)
        _within("frequency penalty", self.frequency_penalty, -100.0, 100.0)
        _within("penalty window", self.penalty_window, 0, 2**31 - 1)
        for token, bias in self.logit_bias:
            _within(f"logit bias of token {token}", bias, -1e4, 1e4)

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be between {low:g} and {high:g}, not {value}.", hint=f"Give another {name}.")


@dataclass(frozen=True, slots=True)
class Distribution:
    """A distribution over token ids: weights [n] >= 0, not normalised, of `ids` [n] ascending (None: 0..n-1)."""

    ids: Ints | None
    weights: Probs

    def token(self, index: int) -> int:
        return index if self.ids is None else int(self.ids[index])

    def dense(self, vocab_size: int) -> Probs:
        """[V] probabilities that sum to 1."""
        weights = self.weights if self.weights.dtype == object else self.weights.astype(np.float64)
        p: Probs = weights / weights.sum()
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

    @property
    def is_argmax(self) -> bool:
        """Whether sampling is the argmax of the raw logits, so that rows need not leave the device."""
        return self.params.temperature == 0 and not self.window and not len(self._bias)

    @property
    def row_params(self) -> SamplingParams | None:
        """The parameters if the distribution depends on the row's logits alone; else None."""
        return None if self.window or len(self._bias) else self.params

    def distribution(self, logits: Logits, prefix: Sequence[int]) -> Distribution:
        """The target distribution p for the token after `prefix`; logits [V] are not written to."""
        params = self.params
        z = self._adjust(logits, prefix)
        if params.temperature == 0:
            return Distribution(np.array([z.argmax()], np.int32), np.ones(1))
        ids: Ints | None = None
        if 0 < params.top_k < len(z):
            ids = top_k(z, params.top_k)
        for keep in (self._typical, self._top_p, self._min_p):
            kept = keep(z if ids is None else z[ids])
            if kept is not None:
                ids = kept.astype(np.int32) if ids is None else ids[kept]
        return Distribution(ids, _softmax_weights(z if ids is None else z[ids], params.temperature))

    def _adjust(self, logits: Logits, prefix: Sequence[int]) -> Logits:
        if not len(self._bias) and not self.window:
            return logits
        z = logits.copy()
        np.add.at(z, self._bias_ids, self._bias)
        if self.window:
            seen, counts = np.unique(np.asarray(prefix[-self.window :], np.int64), return_counts=True)
            if len(seen):
                picked = z[seen]
                rep = np.float32(self.params.repetition_penalty)
                picked = np.where(picked > 0, picked / rep, picked * rep)
                z[seen] = picked - counts * self.params.frequency_penalty - self.params.presence_penalty
        return z

    def _typical(self, z: Logits) -> Indices | None:
        """Locally typical sampling (Meister et al. 2022): the ids nearest to the entropy, `typical_p` mass in all."""
        if self.params.typical_p >= 1:
            return None
        w = _softmax_weights(z, 1.0).astype(np.float64)
        p = w / w.sum()
        surprise = -np.log(np.maximum(p, 1e-300))
        order = np.argsort(np.abs(surprise - (p * surprise).sum()), kind="stable")
        return _prefix_with_mass(order, p, self.params.typical_p)

    def _top_p(self, z: Logits) -> Indices | None:
        """Nucleus sampling (Holtzman et al. 2020): the fewest most probable ids with `top_p` mass."""
        if self.params.top_p >= 1:
            return None
        w = _softmax_weights(z, 1.0)
        mass = self.params.top_p * float(w.sum(dtype=np.float64))
        # Sorting a vocabulary takes milliseconds. The nucleus lies within any {w >= border} of at least its mass.
        border = np.float32(1 / 8)
        while (likely := np.flatnonzero(w >= border)).size < w.size and w[likely].sum(dtype=np.float64) < mass:
            border = border / 8 if border > 1e-30 else np.float32(0)
        order = likely[np.argsort(-w[likely], kind="stable")]
        return _prefix_with_mass(order, w, mass)

    def _min_p(self, z: Logits) -> Indices | None:
        """Ids at least `min_p` times as probable as the best one."""
        if self.params.min_p <= 0:
            return None
        return np.flatnonzero(z >= z.max() + np.float32(math.log(self.params.min_p)))


def top_k(z: Logits, k: int) -> Ints:
    """[k] ids of the k largest, ascending; equal logits at the border go to the lower id."""
    border = np.partition(z, len(z) - k)[len(z) - k]
    above = np.flatnonzero(z > border)
    equal = np.flatnonzero(z == border)[: k - len(above)]
    return np.sort(np.concatenate([above, equal])).astype(np.int32)


def non_finite_error() -> BackendError:
    """The error for a row of logits whose maximum is NaN or infinite."""
    return BackendError("the model returned NaN or infinite logits.", hint="Check the file: edgespec pull --verify.")


def _prefix_with_mass(order: Indices, p: Probs, mass: float) -> Indices:
    """The shortest prefix of `order` whose weights reach `mass`, as ascending indices; at least one."""
    n = int(np.searchsorted(np.cumsum(p[order], dtype=np.float64), mass, side="left")) + 1
    return np.sort(order[:n])


def _softmax_weights(z: Logits, temperature: float) -> Probs:
    """exp((z - max) / temperature) in float32. Raises BackendError if the maximum is not finite."""
    best = z.max()
    if not np.isfinite(best):
        raise non_finite_error()
    scaled = z - best
    if temperature != 1.0:
        with np.errstate(over="ignore"):  # a tiny temperature overflows to -inf, as it should
            scaled = scaled / np.float32(max(temperature, 1e-6))
    weights: Probs = np.exp(scaled)
    return weights
