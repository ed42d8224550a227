"""What a loaded model can be trusted with, found by trying it: several rows in a forward, and trees in which form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from edgespec.backends.mlx.tree_layouts import Form, ModelRunner
from edgespec.core.arrays import Logits
from edgespec.core.protocols import Draft
from edgespec.core.tree import leaves, path_to
from edgespec.errors import BackendError, EdgespecError, reason_of

# Node 5 stands in row 6 at depth 2: a model that places rows one after another puts it elsewhere.
_TREE = np.array([-1, -1, -1, 0, 0, 1], np.int32)
_PROMPT = 6  # tokens before the root


@dataclass(frozen=True, slots=True)
class Findings:
    """The form of trees that a model takes; None where it takes chains only, for the reason in `refusal`."""

    form: Form | None
    refusal: str | None


def probe(open_forwards: Callable[[], ModelRunner], vocab_size: int) -> Findings:
    """Compare a few forwards of several rows with the same tokens one at a time.

    Differences up to four times what a chain shows by rounding are rounding. Raises BackendError if the model cannot
    decode, or if its scores of several tokens are not those of one at a time, which its prompts need too.
    """
    ids = ((np.arange(_PROMPT + 1 + len(_TREE)) * 7919 + 11) % vocab_size).astype(np.int32)
    prompt, root, draft = ids[:_PROMPT].tolist(), int(ids[_PROMPT]), Draft(ids[_PROMPT + 1 :], _TREE)
    some = [root, int(draft.tokens[0]), int(draft.tokens[3])]
    expected = _one_by_one(open_forwards(), prompt, some)
    try:
        forwards = open_forwards()
        _host(forwards.chain(prompt))
        noise = float(np.abs(_host(forwards.chain(some)) - expected).max())
    except Exception as error:
        raise _unusable(f"it fails on several tokens at once ({_told(error)})") from error
    spread = float(expected.std())
    if not noise < 0.25 * spread:
        raise _unusable("its scores of several tokens at once are not those of one at a time")
    limit = max(4 * noise, 0.02 * spread)
    wanted = _by_chains(open_forwards, [*prompt, root], draft)
    refusals = []
    for form in _forms(forwards):
        found = _tried(open_forwards(), form, prompt, root, draft)
        if isinstance(found, str):
            refusals.append(f"{form}: {found}")
        elif not np.abs(found - wanted).max() <= limit:
            refusals.append(f"{form}: other scores than chains give")
        else:
            return Findings(form, None)
    return Findings(None, "; ".join(refusals) or "its caches cannot hold branches")


def _one_by_one(forwards: ModelRunner, prompt: Sequence[int], tokens: Sequence[int]) -> Logits:
    """[n, V] after each of `tokens`, by plain decoding."""
    try:
        _host(forwards.chain(prompt))
        rows = np.concatenate([_host(forwards.chain([token])) for token in tokens])
    except EdgespecError:
        raise
    except Exception as error:
        raise _unusable(_told(error)) from error
    if np.isnan(rows).any():
        raise BackendError("the model's scores are no numbers.", hint="Its weights are damaged: pull it again.")
    return rows


def _by_chains(open_forwards: Callable[[], ModelRunner], before: Sequence[int], draft: Draft) -> Logits:
    """[1 + n, V] after the root, which ends `before`, and after each node; a chain for every leaf."""
    rows: dict[int, Logits] = {}
    for leaf in leaves(draft):
        path = path_to(draft, leaf)
        scores = _host(open_forwards().chain([*before, *draft.tokens[list(path)].tolist()]))[-len(path) - 1 :]
        rows.update(zip((-1, *path), scores, strict=True))
    return np.stack([rows[node] for node in range(-1, len(draft))])


def _forms(forwards: ModelRunner) -> list[Form]:
    """What is worth trying, the cheapest first."""
    forms: list[Form] = ["row", "nodes"] if forwards.caches.gathers else []
    return [*forms, "branches"] if forwards.caches.branches else forms


def _tried(forwards: ModelRunner, form: Form, prompt: Sequence[int], root: int, draft: Draft) -> Logits | str:
    """The tree's scores in this form, or why there are none."""
    try:
        _host(forwards.chain(prompt))
        return _host(forwards.tree(form, len(prompt), root, draft))
    except Exception as error:  # noqa: BLE001 - a form that a model's code cannot take fails in any way
        return _told(error)


def _unusable(reason: str) -> BackendError:
    return BackendError(f"MLX cannot run this model: {reason}.", hint="Use --backend llamacpp.")


def _host(logits: Any) -> Logits:
    rows: Logits = np.array(logits.astype(mx.float32))
    return rows


def _told(error: Exception) -> str:
    text = reason_of(error)
    return text if len(text) <= 120 else f"{text[:119]}\N{HORIZONTAL ELLIPSIS}"
