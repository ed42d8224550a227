"""Functions of a draft tree: depths, leaves, branches, paths, validity."""

from __future__ import annotations

import numpy as np

from edgespec.core.arrays import Ints
from edgespec.core.protocols import Draft


def depths(draft: Draft) -> Ints:
    """[n] the depth of each node; 1 for children of the root."""
    depth = np.empty(len(draft), np.int32)
    for i, parent in enumerate(draft.parents.tolist()):
        depth[i] = 1 if parent < 0 else depth[parent] + 1
    return depth


def path_to(draft: Draft, node: int) -> tuple[int, ...]:
    """The nodes from the root's child down to `node`."""
    path: list[int] = []
    while node >= 0:
        path.append(node)
        node = int(draft.parents[node])
    return tuple(reversed(path))


def leaves(draft: Draft) -> list[int]:
    """Nodes without children, in draft order."""
    inner = set(draft.parents.tolist())
    return [i for i in range(len(draft)) if i not in inner]


def branches(draft: Draft) -> list[list[int]]:
    """[n] the branches that each node is part of, as indices into `leaves`."""
    member: list[list[int]] = [[] for _ in range(len(draft))]
    for b, leaf in enumerate(leaves(draft)):
        for node in path_to(draft, leaf):
            member[node].append(b)
    return member


def is_path(draft: Draft, path: tuple[int, ...]) -> bool:
    """Whether `path` starts at a child of the root and each further node is a child of the one before."""
    at = -1
    for node in path:
        if not 0 <= node < len(draft) or draft.parents[node] != at:
            return False
        at = node
    return True


def check_draft(draft: Draft, vocab_size: int) -> None:
    """Raise ValueError unless `draft` is in topological order, its tokens in the vocabulary and siblings distinct."""
    n = len(draft)
    if draft.tokens.shape != (n,) or draft.parents.shape != (n,):
        raise ValueError(f"tokens and parents must both be [n]: {draft.tokens.shape}, {draft.parents.shape}")
    if n == 0:
        return
    if draft.tokens.min() < 0 or draft.tokens.max() >= vocab_size:
        raise ValueError(f"token ids must be in 0..{vocab_size - 1}")
    if (draft.parents < -1).any() or (draft.parents >= np.arange(n)).any():
        raise ValueError("parents must come before their children, and -1 is the root")
    if draft.q is None:
        if len(set(zip(draft.parents.tolist(), draft.tokens.tolist(), strict=True))) != n:
            raise ValueError("deterministic siblings must be distinct tokens")
    elif draft.q.shape != (n, vocab_size):
        raise ValueError(f"q must be [{n}, {vocab_size}], not {draft.q.shape}")
    elif (draft.q[np.arange(n), draft.tokens] <= 0).any():
        raise ValueError("q is zero for a token that was sampled from it")
