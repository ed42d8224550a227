"""Tests a loaded model: whether several rows score as single ones do, and whether it takes trees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from edgespec.backends.mlx.library import read
from edgespec.backends.mlx.runner import ModelRunner
from edgespec.core.arrays import Logits
from edgespec.core.protocols import Draft
from edgespec.core.tree import leaves, path_to
from edgespec.core.truncate import non_finite_error
from edgespec.errors import BackendError, EdgespecError, reason_of

# Node 5 stands in row 6 at depth 2: a model that places rows one after another puts it elsewhere.
_TREE = np.asarray([-1, -1, -1, 0, 0, 1], np.int32)
_PROMPT = 6  # tokens before the root
Share = Callable[[Any], Any]
"""Maps the scores of a forward to those that all processes of a split model go by."""


def probe(open_runner: Callable[[], ModelRunner], vocab_size: int, share: Share = lambda scores: scores) -> str | None:
    """Compare a few forwards of several rows with the same tokens one at a time; returns why it takes no trees.

    Differences of up to four times a chain's count as rounding. Raises BackendError if the model cannot decode, or if
    it scores several tokens in one forward differently from one at a time, which prompts need too.
    """
    ids = ((np.arange(_PROMPT + 1 + len(_TREE)) * 7919 + 11) % vocab_size).astype(np.int32)
    prompt, root, draft = ids[:_PROMPT].tolist(), int(ids[_PROMPT]), Draft(ids[_PROMPT + 1 :], _TREE)
    tokens = [root, int(draft.tokens[0]), int(draft.tokens[3])]

    def score(*forwards: Sequence[int]) -> Logits:
        """[n, V] of all forwards but the first, after each other."""
        runner = open_runner()
        return np.concatenate([_to_host(runner.run_chain(each), share) for each in (prompt, *forwards)])[_PROMPT:]

    try:
        single, together = score(*([token] for token in tokens)), score(tokens)
    except EdgespecError:
        raise
    except Exception as error:
        raise _model_error(_short_reason(error)) from error
    if np.isnan(single).any():
        raise non_finite_error()
    noise, spread = float(np.abs(together - single).max()), float(single.std())
    if not noise < 0.25 * spread:
        raise _model_error("its scores of several tokens at once are not those of one at a time")
    runner = open_runner()
    if not runner.caches.can_gather:
        return "its state is recurrent" if not runner.caches.can_trim else "rows of its caches cannot be moved"
    expected = np.empty((1 + len(draft), single.shape[1]), np.float32)
    try:
        for leaf in leaves(draft):
            path = path_to(draft, leaf)
            expected[[0, *(node + 1 for node in path)]] = score([root, *draft.tokens[list(path)].tolist()])
        _to_host(runner.run_chain(prompt), share)
        scores = _to_host(runner.run_tree(len(prompt), root, draft), share)
    except Exception as error:  # noqa: BLE001 - any error means that the model takes no trees
        return _short_reason(error)
    limit = max(4 * noise, 0.02 * spread)
    return None if np.abs(scores - expected).max() <= limit else "its scores of trees are not those of chains"


def _model_error(reason: str) -> BackendError:
    return BackendError(f"MLX cannot run this model: {reason}.", hint="Use --backend llamacpp, or drop --kv-type.")


def _to_host(logits: Any, share: Share) -> Logits:
    rows: Logits = read(share(logits.astype(mx.float32)))[0]
    return rows


def _short_reason(error: Exception) -> str:
    text = reason_of(error)
    return text if len(text) <= 120 else f"{text[:119]}\N{HORIZONTAL ELLIPSIS}"
