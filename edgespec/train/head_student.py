"""Training of heads that read their own hidden states from the second drafted token on: MTP and EAGLE.

Released heads were mostly trained for one token, and are then fed what they have said themselves. Here several passes
over a text train this: the first reads the target's hidden states, each further one the head's own of the row before.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from edgespec.backends.head_session import check_hidden_size
from edgespec.backends.mlx.caches import KeyValues
from edgespec.backends.mlx.forward import ForwardContext
from edgespec.backends.mlx.heads.draft_vocabulary import DraftVocabulary
from edgespec.backends.mlx.heads.networks import PairNetwork, find_shifts
from edgespec.backends.mlx.heads.parts import read_layer_shape
from edgespec.backends.mlx.heads.target_parts import TargetParts
from edgespec.backends.mlx.heads.weights import HeadWeights, read_arrays
from edgespec.backends.mlx.library import map_errors
from edgespec.cancel import check_cancelled
from edgespec.core.arrays import Ints
from edgespec.errors import DraftRefused
from edgespec.files import new_folder
from edgespec.formats.head_tensors import HEAD_NAMES
from edgespec.formats.heads import HeadKind, HeadSpec
from edgespec.formats.mlx_folder import read_json
from edgespec.train.evaluate import Matrix, find_rounds
from edgespec.train.head_arrays import read_gguf_arrays
from edgespec.train.objectives import forward_kl
from edgespec.train.parts import Parts
from edgespec.train.student import report_unwritable, require_finite, rewrite_gguf, write_tensors
from edgespec.train.teacher import Part

_KINDS: tuple[HeadKind, ...] = ("mtp", "eagle", "eagle3")
_SHARED = ("embedding", "output", "d2t")  # large matrices and tables, which are not trained

Maker = Callable[[Mapping[str, Any]], PairNetwork]
"""Builds a head from tensors by the names of its file."""


class _LoadedWeights(HeadWeights):
    """Arrays that may be differentiated."""

    def load(self) -> None:
        return


class HeadNetwork(nn.Module):  # type: ignore[misc]
    """The tensors of a head as parameters."""

    def __init__(self, trained: Mapping[str, Any], arrays: Mapping[str, Any], make: Maker, output: str | None) -> None:
        """`arrays` are all of the file, `trained` those that are trained, both by their names; `output` is that of the
        output matrix, if the head has its own.
        """
        super().__init__()
        self._output = output
        self._names = list(trained)
        self._others = {name: each for name, each in arrays.items() if name not in trained}
        self._make = make
        self.tensors = list(trained.values())

    @property
    def trained(self) -> dict[str, Any]:
        """The tensors that are trained, by the names of the file."""
        return dict(zip(self._names, self.tensors, strict=True))

    @property
    def arrays(self) -> dict[str, Any]:
        """All tensors of the head by the names of the file."""
        return {**self._others, **self.trained}

    def is_inner(self, path: str, weight: mx.array) -> bool:
        """Whether the parameter at `path` is a matrix, and not the output matrix."""
        return weight.ndim == 2 and self._names[int(path.rpartition(".")[2])] != self._output

    def build(self) -> PairNetwork:
        return self._make(self.arrays)


class HeadStudent:
    """An MTP, EAGLE or EAGLE-3 head beside its target. All is trained but embeddings and an output matrix of its own,
    which is trained if the head `is_new`.

    network  its tensors in single precision
    layers   of the target, whose hidden states it reads; as formats.heads.HeadSpec
    """

    def __init__(self, path: Path, spec: HeadSpec, target: TargetParts, n_layers: int, *, is_new: bool = False) -> None:
        """`path` is a folder, or the GGUF file of an EAGLE-3 head; `target` has `n_layers`.

        Raises DraftRefused for heads that are not trained here, Unsupported for a head of another target;
        InvalidModelFile, CacheError, BackendError.
        """
        if spec.kind not in _KINDS or (path.is_file() and spec.kind != "eagle3"):
            raise DraftRefused(
                f"{path.name} cannot be trained: it is neither an EAGLE-3 head nor a folder with an MTP or EAGLE head.",
                hint="Use the folder with config.json and safetensors that the head was released as.",
            )
        spec = spec.complete(n_layers)
        if path.is_dir():
            arrays, shape = read_arrays(path), read_layer_shape(path)
            names = HEAD_NAMES[spec.kind](arrays)
        else:
            arrays, names, shape = read_gguf_arrays(path)
        if "router" in names:
            raise DraftRefused(
                f"{path.name} is a mixture of experts, which cannot be trained here.", hint="Use a dense head."
            )
        roles = [role for role in _SHARED if role in names and not (is_new and role == "output")]
        shared = {key for role in roles for key in _find_parts(arrays, names[role])}
        own = {key for name in names.values() for key in _find_parts(arrays, name)} - shared
        if any(name.endswith(".scales") for name in own):
            raise DraftRefused(
                f"{path.name} is quantized, and cannot be trained.", hint="Use its release in half precision."
            )
        self.layers = spec.layers or ()
        self._path = path
        self._dtypes = {name: each.dtype for name, each in arrays.items()}
        with map_errors():
            check_hidden_size(path.name, spec, target.hidden_size)
            shifts = find_shifts(HeadWeights(arrays, names)) if spec.kind == "mtp" else None

            def make(arrays: Mapping[str, Any]) -> PairNetwork:
                return PairNetwork(spec, shape, _LoadedWeights(arrays, names), target, shifts)

            trained = {name: each.astype(mx.float32) for name, each in arrays.items() if name in own}
            self.network = HeadNetwork(trained, arrays, make, names.get("output"))
            self.network.build()  # checks the shapes
            mx.eval(self.network.parameters())

    def save(self, path: Path) -> None:
        """Write a file as the base is, or a folder of the head alone, with the number types of the base.

        At once or not at all, for its owner only; a folder must not exist. Raises BackendError for weights that are not
        finite, CacheError.
        """
        with map_errors():
            require_finite(self.network.tensors)
            trained = {name: np.array(each) for name, each in self.network.trained.items()}
        if self._path.is_file():
            with report_unwritable(path):
                rewrite_gguf(gguf.GGUFReader(self._path), path, trained.get)
            return
        with map_errors():
            arrays = {name: each.astype(self._dtypes[name]) for name, each in self.network.arrays.items()}
        config = read_json(self._path / "config.json")
        with report_unwritable(path), new_folder(path) as partial:
            (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            write_tensors(partial / "model.safetensors", arrays, {"format": "mlx"})


def _find_parts(arrays: Mapping[str, Any], name: str) -> list[str]:
    """The names of a matrix, of its bias, and of what it is quantized with."""
    stem = name.removesuffix(".weight")
    return [key for key in (name, *(f"{stem}.{part}" for part in ("bias", "scales", "biases"))) if key in arrays]


DEPTH = 4  # passes
DECAY = 0.8  # of the weight of each further pass
_LEAST = -1e4  # for a score that is -inf


class PassKeys(KeyValues):
    """Keys and values of one layer in several passes over the same pairs.

    Row p of pass d came from row p - 1 of the pass before: it sees the pairs of the first pass up to p - d, which the
    target has accepted, and the one row of each later pass that it descends from.
    """

    def __init__(self) -> None:
        super().__init__(ForwardContext())
        self._passes: list[tuple[Any, Any]] = []

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        self._passes.append((keys, values))
        both = zip(*self._passes, strict=True)
        keys, values = (mx.concatenate(each, axis=2) for each in both)
        return keys, values

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        depth, row, column = len(self._passes), mx.arange(N)[:, None], mx.arange(N)[None]
        first = column <= row - depth
        return mx.concatenate([first, *(column == row - depth + i for i in range(1, depth + 1))], axis=1)


def run_passes(network: PairNetwork, tokens: Any, features: Any, depth: int, rows: Any = slice(None)) -> list[Any]:
    """Scores of `rows` of [n - 1, W] in each of `depth` passes, for tokens [n] and features [n, width]; W: the head's
    vocabulary.

    Row p of pass d predicts token p + 2 as the head does after d tokens of its own, all of which are in the text. The
    first d rows of pass d are not those of any draft.
    """
    states, keys, scores = network.fuse(features[:-1]), [PassKeys() for _ in range(network.depth)], []
    for _ in range(depth):
        output = network.run(tokens[1:], states, keys)
        scores.append(network.score_known(output[rows]))
        states = network.feed_back(output)
        states = mx.concatenate([mx.zeros_like(states[:1]), states[:-1]])
    return scores


def recursion(network: HeadNetwork, batch: Sequence[Part], depth: int = DEPTH) -> mx.array:
    """The objective of a head: the scores of each of `depth` passes are compared with the target's."""
    head, total = network.build(), mx.array(0.0)
    for text in batch:
        ids, log_probs, is_known = find_known(head.vocabulary, text.ids[1:], text.log_probs[1:])
        rows = np.flatnonzero(text.mask[1:] * is_known)
        if not len(rows):
            continue
        known = mx.array(ids[None, rows]), mx.array(log_probs[None, rows])
        passes = run_passes(head, mx.array(text.tokens), mx.array(text.features), depth, mx.array(rows))
        for d, scores in enumerate(passes):
            scores = mx.concatenate([scores, mx.full((len(scores), 1), _LEAST)], axis=-1)
            total = total + DECAY**d * forward_kl(scores[None], *known, mx.array(rows[None] >= d))
    return total / (len(batch) * sum(DECAY**d for d in range(depth)))


def find_known(
    vocabulary: DraftVocabulary, ids: Ints, log_probs: npt.NDArray[np.floating]
) -> tuple[Ints, npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    """What a head of `vocabulary` [W] should say if its target says `ids` and `log_probs` [n, K]; see Part.

    Returns the indices [n, K] in the vocabulary, W for tokens that it lacks; the log probabilities [n, K] among those
    that it has; and whether it has the most probable one [n]. A row without that has nothing to be trained on.
    """
    log_probs = log_probs.astype(np.float32)
    if vocabulary.ids is None:
        return ids, log_probs, np.ones(len(ids), bool)
    index = np.full(vocabulary.vocab_size, vocabulary.size, np.int32)
    index[np.array(vocabulary.ids)] = np.arange(vocabulary.size)
    found = index[ids]
    is_there = found < vocabulary.size
    unknown = (np.exp(log_probs) * ~is_there).sum(-1, keepdims=True)
    shares = np.where(is_there, log_probs - np.log(np.maximum(1 - unknown, 1e-3)), _LEAST)
    return found, shares.astype(np.float32), is_there[:, 0]


def measure_heads(network: HeadNetwork, texts: Parts, depth: int, n: int) -> dict[str, Matrix]:
    """The Matrix of each conversation of the first `n` texts, for drafts of `depth` tokens.

    An entry says whether the head's best token at that depth is the text's, if all drafted tokens before it were.
    Passes over a text give this for all of its positions at once. Raises Cancelled, BackendError.
    """
    head, found = network.build(), dict[str, list[Matrix]]()
    for index, window in enumerate(texts.windows):
        if window.text >= n:
            break
        check_cancelled()
        text, part = texts.texts[window.text], texts.read(index)
        passes = run_passes(head, mx.array(part.tokens), mx.array(part.features), depth)
        best = np.array(mx.argmax(mx.stack(passes), axis=-1))  # [depth, n - 1]
        if head.vocabulary.ids is not None:
            best = np.array(head.vocabulary.ids)[best]
        rounds = np.arange(max(window.first + 1, find_rounds(text).start), window.stop + 1)[:, None]
        at = rounds + np.arange(depth)  # the token of each depth
        rows = at - 2 - window.start  # of the pass that predicts it
        is_known = (rounds >= window.start + 2) & (at <= window.stop)
        at, rows = np.minimum(at, window.stop), np.clip(rows, 0, best.shape[1] - 1)
        hits = is_known & (best[np.arange(depth), rows] == text.tokens[at])
        found.setdefault(text.source, []).append(hits.astype(np.float32))
    return {source: np.concatenate(parts) for source, parts in found.items()}
