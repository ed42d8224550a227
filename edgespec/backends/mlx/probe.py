"""Tests a loaded model: whether several rows score as single ones do, and which tree layout it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from edgespec.backends.mlx.cached_tokens import ModelRunner, TreeLayout
from edgespec.backends.mlx.library import read
from edgespec.core.protocols import Draft
from edgespec.core.sampling import Logits, non_finite_error
from edgespec.core.tree import leaves, path_to
from edgespec.errors import BackendError, EdgespecError, reason_of

# Node 5 stands in row 6 at depth 2: a model that places rows one after another puts it elsewhere.
_TREE = np.array([-1, -1, -1, 0, 0, 1], np.int32)
_PROMPT = 6  # tokens before the root


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The tree layout that a model takes; None where it takes chains only, for the reason in `no_tree_reason`."""

    tree_layout: TreeLayout | None
    no_tree_reason: str | None


Share = Callable[[Any], Any]
"""Maps the scores of a forward to those that all processes of a split model go by."""


def probe(open_runner: Callable[[], ModelRunner], vocab_size: int, share: Share = lambda scores: scores) -> ProbeResult:
    """Compare a few forwards of several rows with the same tokens one at a time.

    Differences of up to four times a chain's count as rounding. Raises BackendError if the model cannot decode, or if
    it scores several tokens in one forward differently from one at a time, which prompts need too.
    """
    ids = ((np.arange(_PROMPT + 1 + len(_TREE)) * 7919 + 11) % vocab_size).astype(np.int32)
    prompt, root, draft = ids[:_PROMPT].tolist(), int(ids[_PROMPT]), Draft(ids[_PROMPT + 1 :], _TREE)
    tokens = [root, int(draft.tokens[0]), int(draft.tokens[3])]
    expected = _score_singly(open_runner(), prompt, tokens, share)
    try:
        runner = open_runner()
        _to_host(runner.run_chain(prompt), share)
        noise = float(np.abs(_to_host(runner.run_chain(tokens), share) - expected).max())
    except Exception as error:
        raise _model_error(f"it fails on several tokens at once ({_short_reason(error)})") from error
    spread = float(expected.std())
    if not noise < 0.25 * spread:
        raise _model_error("its scores of several tokens at once are not those of one at a time")
    limit = max(4 * noise, 0.02 * spread)
    expected_tree = _score_chains(open_runner, [*prompt, root], draft, share)
    reasons = []
    for layout in _candidate_layouts(runner):
        scores = _try_layout(open_runner(), layout, prompt, root, draft, share)
        if isinstance(scores, str):
            reasons.append(f"{layout}: {scores}")
        elif not np.abs(scores - expected_tree).max() <= limit:
            reasons.append(f"{layout}: its scores are not those of chains")
        else:
            return ProbeResult(layout, None)
    return ProbeResult(None, "; ".join(reasons) or "its caches cannot hold branches")


def _score_singly(runner: ModelRunner, prompt: Sequence[int], tokens: Sequence[int], share: Share) -> Logits:
    """[n, V] after each of `tokens`, by plain decoding. Raises BackendError."""
    try:
        _to_host(runner.run_chain(prompt), share)
        rows = np.concatenate([_to_host(runner.run_chain([token]), share) for token in tokens])
    except EdgespecError:
        raise
    except Exception as error:
        raise _model_error(_short_reason(error)) from error
    if np.isnan(rows).any():
        raise non_finite_error()
    return rows


def _score_chains(open_runner: Callable[[], ModelRunner], before: Sequence[int], draft: Draft, share: Share) -> Logits:
    """[1 + n, V] after the root, the last of `before`, and after each node; one chain for each leaf."""
    rows: dict[int, Logits] = {}
    for leaf in leaves(draft):
        path = path_to(draft, leaf)
        tokens = [*before, *draft.tokens[list(path)].tolist()]
        scores = _to_host(open_runner().run_chain(tokens), share)[-len(path) - 1 :]
        rows.update(zip((-1, *path), scores, strict=True))
    return np.stack([rows[node] for node in range(-1, len(draft))])


def _candidate_layouts(runner: ModelRunner) -> list[TreeLayout]:
    """The layouts that its caches allow, the cheapest first."""
    layouts: list[TreeLayout] = ["row", "nodes"] if runner.caches.can_gather else []
    return [*layouts, "branches"] if runner.caches.can_branch else layouts


def _try_layout(
    runner: ModelRunner, layout: TreeLayout, prompt: Sequence[int], root: int, draft: Draft, share: Share
) -> Logits | str:
    """The scores of the tree in this layout, or why there are none."""
    try:
        _to_host(runner.run_chain(prompt), share)
        return _to_host(runner.run_tree(layout, len(prompt), root, draft), share)
    except Exception as error:  # noqa: BLE001 - any error means that the model does not take the layout
        return _short_reason(error)


def _model_error(reason: str) -> BackendError:
    return BackendError(f"MLX cannot run this model: {reason}.", hint="Use --backend llamacpp.")


def _to_host(logits: Any, share: Share) -> Logits:
    rows: Logits = read(share(logits.astype(mx.float32)))[0]
    return rows


def _short_reason(error: Exception) -> str:
    text = reason_of(error)
    return text if len(text) <= 120 else f"{text[:119]}\N{HORIZONTAL ELLIPSIS}"
