"""Options of a training run. Nothing here needs MLX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from edgespec.errors import InvalidRequest

LossName = Literal["forward-kl", "reverse-kl", "jsd", "tv"]
LOSS_NAMES: tuple[LossName, ...] = get_args(LossName)
Weights = Literal["full", "lora", "bigram"]
WEIGHTS: tuple[Weights, ...] = get_args(Weights)
"""What is trained: all weights, low-rank changes of them, or, for PARD models, a term for pairs of tokens alone."""


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """How a network is trained. Raises InvalidRequest for values out of range.

    loss           distance of the draft's distribution from the target's
    learning_rate  the highest one, at the end of the warm-up; it then falls to 0 as a half cosine
    epochs         how often every text is read, where the time allows it
    warm_up        share of the steps in which the learning rate rises
    weight_decay   AdamW's
    max_norm       the gradient is scaled down to this norm
    checkpoint_s   seconds between two checkpoints
    seed           of the order of the texts, and of MLX's random numbers
    """

    loss: LossName = "forward-kl"
    learning_rate: float = 1e-4
    epochs: int = 3
    warm_up: float = 0.05
    weight_decay: float = 0.01
    max_norm: float = 1.0
    checkpoint_s: float = 60.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("learning rate", self.learning_rate, 1e-8, 1.0),
            ("number of epochs", self.epochs, 1, 1000),
            ("warm-up", self.warm_up, 0.0, 1.0),
            ("weight decay", self.weight_decay, 0.0, 1.0),
            ("gradient norm", self.max_norm, 1e-6, 1e6),
            ("checkpoint interval", self.checkpoint_s, 0.0, 86_400.0),
            ("seed", self.seed, 0, 2**31 - 1),
        ):
            if not low <= value <= high:
                hint = f"Choose a number from {low:g} to {high:g}."
                raise InvalidRequest(f"the {name} must be {low:g} to {high:g}, not {value:g}.", hint=hint)
