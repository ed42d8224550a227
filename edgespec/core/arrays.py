"""Types of arrays. Shapes are in the docstrings of the functions that use them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]
Indices = npt.NDArray[np.intp]
Logits = npt.NDArray[np.float32]
# float64; exact fractions (dtype object) in the proofs of tests/core
Probs = npt.NDArray[Any]
