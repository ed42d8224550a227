"""Finds the reading of a trained head that agrees best with its target.

A reading is a HeadSpec: the conventions, such as layers and norms, by which a runtime runs the head. If a file states
one of them wrongly, nothing but a lower agreement shows it.

A fixed text is read by target and head (teacher forcing). At each position the head's first choices for the next two
tokens are compared with the target's own first choices there. All readings are compared at the same positions. Another
reading than the stated one is taken only if that is significant by a sign test over positions (McNemar 1947).

The text is edgespec's calibration text and not the target's own continuations: small models repeat themselves, and
then any reading is right. It also costs no decoding.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec.backends import BackendName, Model
from edgespec.cancel import check_cancelled
from edgespec.core.arrays import Ints, Logits
from edgespec.core.decoding import decode_one, read_prompt
from edgespec.core.drafter import BlockSession, DraftSession
from edgespec.core.protocols import Draft, Session
from edgespec.core.truncate import NonFiniteLogits, non_finite_error
from edgespec.errors import DraftRefused, EdgespecError, InvalidRequest
from edgespec.formats.heads import HEAD_HINT, HeadKind, HeadSpec
from edgespec.progress import loading, report_loaded
from edgespec.text.chat_template import encode_prompt
from edgespec.text.tokenizer import Tokenizer

_FLAGS = {  # field of a HeadSpec -> key of files
    "norm_before_residual": "norm_before_residual",
    "feeds_normed": "norm_output",
    "predicts_at_root": "sample_from_anchor",
}
# What may be wrong with a head's spec and makes a difference on a runtime; what matters most comes first. llama.cpp
# takes norms and feedback from the file itself. Two more conventions need no probe, since tensors tell: ids of a
# reduced vocabulary ascend in one reading only, and norms' weights that are stored less 1 have means near 0.
_CONVENTIONS: Mapping[tuple[HeadKind, BackendName], tuple[str, ...]] = {
    ("eagle3", "llamacpp"): ("layers",),
    ("eagle3", "mlx"): ("norm_before_residual", "feeds_normed", "layers"),
    ("eagle", "mlx"): ("final norm",),
    ("mtp", "mlx"): ("final norm", "feeds_normed"),
    ("dflash", "llamacpp"): ("layers",),
    ("dflash", "mlx"): ("layers",),
    ("dspark", "llamacpp"): ("predicts_at_root", "layers"),
    ("dspark", "mlx"): ("predicts_at_root", "layers"),
}


def list_readings(spec: HeadSpec, backend: BackendName, n_layers: int) -> list[HeadSpec]:
    """The readings that differ from `spec` in one convention, of a head whose target has so many layers."""
    found: list[HeadSpec] = []
    for convention in _CONVENTIONS.get((spec.kind, backend), ()):
        if convention == "layers":  # the inputs of layers instead of their outputs, or the reverse
            shifted = [tuple(layer + by for layer in spec.layers or ()) for by in (1, -1)]
            allowed = range(n_layers + 1)
            found += [replace(spec, layers=each) for each in shifted if each and all(i in allowed for i in each)]
        elif convention == "final norm":  # the last hidden state before it instead of after it, or the reverse
            found.append(replace(spec, layers=() if spec.layers else (n_layers,)))
        else:
            flipped: dict[str, Any] = {convention: not getattr(spec, convention)}
            found.append(replace(spec, **flipped))
    return found


def describe_reading(spec: HeadSpec) -> str:
    """A reading in a few words: 'layers 1, 3, 5, norm_output'."""
    layers = f"layers {', '.join(map(str, spec.layers))}" if spec.layers else "the last hidden state"
    flags = [key for name, key in _FLAGS.items() if getattr(spec, name)]
    return ", ".join(["layers that it does not name" if spec.layers is None else layers, *flags])


N_TOKENS = 256  # of the text
MIN_TOKENS = 32
_DEPTH = 2  # compared tokens after each position
_FIRST = 2  # tokens of the text before the first position
_CHANCE = 0.01  # a reading is better if equally good ones had its lead with at most this probability
_ROWS = 64  # of a forward whose scores are read
Hits = npt.NDArray[np.bool_]
"""[positions, depths] which choices are right."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A reading that was tried.

    agreement  share of positions at which the head's first choice is the target's, at depths 1 and 2
    """

    spec: HeadSpec
    agreement: tuple[float, float]


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a probe has found.

    stated   as the file says; None if the runtime cannot run the head so
    chosen   the best reading: the stated one, or one that is significantly better
    """

    stated: Trial | None
    chosen: Trial

    @property
    def is_corrected(self) -> bool:
        """Tells whether the head is read otherwise than its file says."""
        return self.chosen != self.stated


@dataclass(frozen=True)
class HeadProbe:
    """Tries the readings of one head beside a loaded target, on the target's thread. No other session is touched."""

    target: Model
    path: Path
    backend: BackendName
    n_tokens: int = N_TOKENS

    def run(self, stated: HeadSpec) -> ProbeResult:
        """Try `stated`, what the file says, and the readings that differ from it in one convention.

        From a better reading it goes on until none is better. Raises InvalidRequest for a context without room for the
        text, Cancelled, and if no reading can be run what `Model.load_head` and sessions raise, or DraftRefused for a
        head whose scores are not numbers.
        """
        n_layers = self.target.layer_count
        choices = self._find_choices()
        stated = best = stated.complete(n_layers)
        hits: dict[HeadSpec, Hits] = {}
        refused: dict[HeadSpec, EdgespecError] = {}
        reading: HeadSpec | None = stated
        while reading is not None:
            try:
                hits[reading] = self._measure(reading, choices)
            except EdgespecError as refusal:
                refused[reading] = refusal
            else:
                if best not in hits or is_better(hits[reading], hits[best]):
                    best = reading
            others = list_readings(best, self.backend, n_layers)
            reading = next((each for each in others if each not in hits and each not in refused), None)
        if best not in hits:
            raise refused[best]
        return ProbeResult(_summarize(stated, hits[stated]) if stated in hits else None, _summarize(best, hits[best]))

    def _measure(self, spec: HeadSpec, choices: Ints) -> Hits:
        text, hits, name = self._text, [], f"{self.path.name} as {describe_reading(spec)}"
        head = self.target.load_head(spec, self.path)
        with (
            closing(head),
            closing(self.target.open_session()) as session,
            closing(head.open_session(session)) as draft,
            loading(name),
        ):
            read_prompt(session, text[: _FIRST - 1] if head.shares_kv else text[:-1])
            draft.begin(text[:_FIRST])
            for i in range(len(choices) - 1):
                check_cancelled()
                report_loaded(i / len(choices))
                try:
                    chosen = _choose(draft, text[: _FIRST + i], text[_FIRST + i])
                except NonFiniteLogits:
                    message = f"{self.path.name} gives scores that are not numbers (NaN)."
                    raise DraftRefused(message, hint=HEAD_HINT) from None
                if head.shares_kv:
                    decode_one(session, text[_FIRST + i - 1])
                hits.append([each == right for each, right in zip(chosen, choices[i : i + 2], strict=True)])
            report_loaded(1.0)
        return np.array(hits)

    @cached_property
    def _text(self) -> list[int]:
        text = read_calibration(self.target.tokenizer)[: min(self.n_tokens, self.target.context_size - _DEPTH)]
        if len(text) < MIN_TOKENS:
            raise InvalidRequest(
                f"a probe needs a text of {MIN_TOKENS} tokens, and has {len(text)}.", hint="Set a larger --ctx."
            )
        return text

    def _find_choices(self) -> Ints:
        """[len(text) - 1] the target's first choices after the first two tokens, the first three and so on."""
        with closing(self.target.open_session()) as session:
            read_prompt(session, self._text[: _FIRST - 1])
            return read_choices(session, self._text)


def read_calibration(tokenizer: Tokenizer) -> list[int]:
    """The tokens of edgespec's calibration text."""
    text = importlib.resources.files("edgespec").joinpath("assets/calibration.txt").read_text(encoding="utf-8")
    return [int(token) for token in encode_prompt(tokenizer, text, parse_special=False)]


def read_choices(session: Session, text: Sequence[int]) -> Ints:
    """[rows] the most probable tokens after each token of `text` that the session has not read yet."""
    best: list[Ints] = []
    while (at := session.position) < len(text):
        check_cancelled()
        n = min(len(text) - at, session.draft_limit + 1, _ROWS)
        best.append(session.forward(text[at], Draft.chain(text[at + 1 : at + n])).argmax())
        session.commit(range(n - 1))
    return np.concatenate(best)


def is_better(a: Hits, b: Hits) -> bool:
    """Tells whether `a` is right more often than `b`, at the same positions, by more than chance."""
    lead = a.sum(axis=1, dtype=int) - b.sum(axis=1, dtype=int)
    wins, losses = int((lead > 0).sum()), int((lead < 0).sum())
    n = wins + losses
    return wins > losses and sum(comb(n, k) for k in range(wins, n + 1)) <= _CHANCE * 2**n


def _choose(draft: DraftSession | BlockSession, text: Sequence[int], token: int) -> tuple[int, int]:
    """The first choices after `text`, and after `token` that follows it, which a block does not see; -1 for none.

    Raises NonFiniteLogits.
    """
    rows: list[Logits | None]
    if isinstance(draft, BlockSession):
        rows = [*(draft.block(text, len(text), _DEPTH) or ()), None, None]
    else:
        first = draft.read(text, len(text))
        rows = [first, None if first is None else draft.step(token)]
    if any(row is not None and np.isnan(row.max()) for row in rows):
        raise non_finite_error()
    one, two = (-1 if row is None else int(row.argmax()) for row in rows[:_DEPTH])
    return one, two


def _summarize(spec: HeadSpec, hits: Hits) -> Trial:
    first, second = hits.mean(axis=0).tolist()
    return Trial(spec, (first, second))
