"""Array types; shapes stand in the docstrings of those who use them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]
Indices = npt.NDArray[np.intp]
Logits = npt.NDArray[np.float32]
# Probabilities are float64 in production and exact fractions (dtype object) in the proofs.
Probs = npt.NDArray[Any]
Rng = np.random.Generator
