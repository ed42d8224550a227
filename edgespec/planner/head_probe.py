"""Finds the reading of a trained head that agrees best with its target: nothing else shows a convention stated wrongly.

A fixed text is read by target and head (teacher forcing). At each position the head's first choices for the next two
tokens are compared with the target's own first choices there. All readings are compared at the same positions. Another
reading than the stated one is taken only if that is significant by a sign test over positions (McNemar 1947).

The text is edgespec's calibration text and not the target's own continuations: small models repeat themselves, and
then any reading is right. It also costs no decoding.
"""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import comb
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec.backends import BackendName, Model
from edgespec.controller.store import calibration_folder, load_entry, save_entry
from edgespec.core.drafter import BlockSession, DraftSession
from edgespec.core.protocols import Budget, CheckCancelled, Draft, Session
from edgespec.core.sampling import Ints, Logits, NonFiniteLogits, non_finite_error
from edgespec.core.tree import DraftTree
from edgespec.core.verify import decode_one, read_prompt
from edgespec.drafters.ngram import NgramDrafter
from edgespec.errors import DraftRefused, EdgespecError, InvalidRequest
from edgespec.formats.heads import HEAD_HINT, HeadKind, HeadSpec, usual_layers
from edgespec.formats.mlx_folder import fingerprint_weights
from edgespec.text.chat_template import encode_prompt

Convention = Callable[[HeadSpec, int], list[HeadSpec]]
"""The other readings of one convention, of a head whose target has so many layers."""


def list_conventions(kind: HeadKind, backend: BackendName) -> tuple[Convention, ...]:
    """What may be wrong with a head's spec and makes a difference on `backend`.

    llama.cpp takes norms and feedback from the file itself. Medusa and Hydra heads have one convention. Two more need
    no probe, since tensors tell: ids of a reduced vocabulary ascend in one reading only, and norms' weights that are
    stored less 1 have means near 0.
    """
    return _CONVENTIONS.get(kind, {}).get(backend, ())


def complete(spec: HeadSpec, n_layers: int) -> HeadSpec:
    """`spec` with the usual layers of a target with `n_layers` where the file names none."""
    return replace(spec, layers=usual_layers(n_layers)) if spec.layers is None else spec


def describe_reading(spec: HeadSpec) -> str:
    """A reading in a few words: 'layers 1, 3, 5, norm_output'."""
    word = "layer" if spec.layers and len(spec.layers) == 1 else "layers"
    parts = [f"{word} {_join(spec.layers)}" if spec.layers else _join(spec.layers)]
    return ", ".join(parts + [words for name, words in _FLAGS.items() if getattr(spec, name)])


def describe_change(stated: HeadSpec, chosen: HeadSpec) -> str:
    """How `chosen` differs from what the file says, as the end of "the head's ..."; empty where it does not."""
    changes = []
    if stated.layers != chosen.layers:
        says = "names none" if stated.layers is None else f"says {_join(stated.layers)}"
        changes.append(f"layers were read as {_join(chosen.layers)} (the file {says})")
    for name, key in _FLAGS.items():
        was, says = (str(getattr(spec, name)).lower() for spec in (chosen, stated))
        if was != says:
            changes.append(f"{key} was read as {was} (the file says {says})")
    return ", and ".join(changes)


def _shift_layers(spec: HeadSpec, n_layers: int) -> list[HeadSpec]:
    """Inputs for outputs, and the reverse."""
    shifted = [tuple(layer + by for layer in spec.layers or ()) for by in (1, -1)]
    return [replace(spec, layers=each) for each in shifted if each and min(each) >= 0 and max(each) <= n_layers]


def _flip(name: str) -> Convention:
    def flip(spec: HeadSpec, _n_layers: int) -> list[HeadSpec]:
        flipped: dict[str, Any] = {name: not getattr(spec, name)}
        return [replace(spec, **flipped)]

    return flip


def _swap_final_norm(spec: HeadSpec, n_layers: int) -> list[HeadSpec]:
    """The last hidden state before the final norm for that after it, and the reverse."""
    return [replace(spec, layers=() if spec.layers else (n_layers,))]


def _join(layers: Sequence[int] | None) -> str:
    return ", ".join(map(str, layers)) if layers else "the last hidden state"


_FLAGS = {  # by the keys of files
    "norm_before_residual": "norm_before_residual",
    "feeds_normed": "norm_output",
    "predicts_at_root": "sample_from_anchor",
}
_BLOCK = (_flip("predicts_at_root"), _shift_layers)
_CONVENTIONS: Mapping[HeadKind, Mapping[BackendName, tuple[Convention, ...]]] = {  # what matters most comes first
    "eagle3": {
        "llamacpp": (_shift_layers,),
        "mlx": (_flip("norm_before_residual"), _flip("feeds_normed"), _shift_layers),
    },
    "eagle": {"mlx": (_swap_final_norm,)},
    "mtp": {"mlx": (_swap_final_norm, _flip("feeds_normed"))},
    "dflash": {"llamacpp": (_shift_layers,), "mlx": (_shift_layers,)},
    "dspark": {"llamacpp": _BLOCK, "mlx": _BLOCK},
}


N_TOKENS = 256  # of the text
MIN_TOKENS = 32
_DEPTH = 2  # compared tokens after each position
_FIRST = 2  # tokens of the text before the first position
_SWITCH = 0.01  # chance of such a lead if both readings were equally good, at which the better one is taken
_GIVE_UP = 0.001  # and at which the worse one is compared no further
_ROWS = 64  # of a forward whose scores are read
_LOOK = 32  # positions between two looks at whether a reading is worse beyond doubt

Hits = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Trial:
    """A reading that was tried.

    agreement  share of positions at which the head's first choice is the target's, at depths 1 and 2
    positions  compared ones; fewer where the reading was soon seen to be worse
    """

    spec: HeadSpec
    agreement: tuple[float, float]
    positions: int


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a probe has found.

    stated   as the file says; None where the runtime cannot run the head so
    chosen   the best reading: the stated one, or one that is significantly better
    lookups  agreement of n-gram lookups at depth 1 at the same positions
    own      agreement of the chosen reading and of lookups at depth 1, where the text before is what the target would
             have chosen: the others are hard for heads that do not see the last token, such as Medusa's
    trials   in the order of trying, `chosen` among them; empty where the result was stored by an earlier load
    """

    stated: Trial | None
    chosen: Trial
    lookups: float
    own: tuple[float, float]
    seconds: float
    trials: tuple[Trial, ...] = ()

    @property
    def is_corrected(self) -> bool:
        """Tells whether the head is read otherwise than its file says."""
        return self.chosen != self.stated

    @property
    def is_useless(self) -> bool:
        """Tells whether the head agrees less than lookups."""
        return self.own[0] < self.own[1]


class HeadProbe:
    """Tries the readings of one head beside a loaded target, on the target's thread. No other session is touched."""

    def __init__(
        self,
        target: Model,
        path: Path,
        backend: BackendName,
        check: CheckCancelled,
        progress: Callable[[str, float], None] = lambda name, fraction: None,
        n_tokens: int = N_TOKENS,
    ) -> None:
        """`progress` gets the reading that is tried and the part done, 0.0 to 1.0.

        Raises InvalidRequest for a context without room for the text.
        """
        text = importlib.resources.files("edgespec").joinpath("assets/calibration.txt").read_text(encoding="utf-8")
        found = encode_prompt(target.tokenizer, text, parse_special=False)
        self._text = [int(token) for token in found[: min(n_tokens, target.context_size - _DEPTH)]]
        if len(self._text) < MIN_TOKENS:
            raise InvalidRequest(
                f"a probe needs a text of {MIN_TOKENS} tokens, and has {len(self._text)}.", hint="Set a larger --ctx."
            )
        self._target = target
        self._path = path
        self._backend = backend
        self._check = check
        self._progress = progress
        self._choices: Ints = np.empty(0, np.int32)
        self._refusal: EdgespecError | None = None  # of the last reading that could not be run

    def run(self, spec: HeadSpec) -> ProbeResult:
        """Try `spec`, what the file says, and the readings that differ from it in one convention.

        From a better reading it goes on until none is better. Raises Cancelled, and if no reading can be run what
        `Model.load_head` and sessions raise, or DraftRefused for a head whose scores are not numbers.
        """
        started = perf_counter()
        n_layers = self._target.layer_count
        stated = best = complete(spec, n_layers)
        tried = {best: self._try(best, None)}
        was_changed = True
        while was_changed:
            was_changed = False
            for convention in list_conventions(stated.kind, self._backend):
                for reading in convention(best, n_layers):
                    if reading in tried:
                        continue
                    hits, other = tried[best], self._try(reading, tried[best])
                    tried[reading] = other
                    if other is not None and (hits is None or is_better(other, hits, _SWITCH)):
                        best, was_changed = reading, True
        trials = {each: _summarize(each, hits) for each, hits in tried.items() if hits is not None}
        if best not in trials and self._refusal is not None:
            raise self._refusal
        lookups, own, hits = self._follow_lookups(), self._find_own(), tried[best]
        assert hits is not None
        shares = [float(each[own].mean()) if own.any() else 0.0 for each in (hits[:, 0], lookups)]
        return ProbeResult(
            trials.get(stated),
            trials[best],
            float(lookups.mean()),
            (shares[0], shares[1]),
            perf_counter() - started,
            tuple(trials.values()),
        )

    def _try(self, spec: HeadSpec, rival: Hits | None) -> Hits | None:
        """[positions, 2] which choices are right; None where the head cannot be run so."""
        try:
            return self._measure(spec, rival)
        except EdgespecError as refusal:
            self._refusal = refusal
            return None

    def _measure(self, spec: HeadSpec, rival: Hits | None) -> Hits:
        """Ends early where `rival`, the best reading so far, is better beyond doubt."""
        text, hits, name = self._text, [], f"{self._path.name} as {describe_reading(spec)}"
        with ExitStack() as undo:
            head = self._target.load_head(spec, self._path, progress=lambda fraction: None, check=self._check)
            undo.callback(head.close)
            if not len(self._choices):  # not before a head was loaded, since it may be none that can be
                self._choices = self._find_choices()
            n = len(self._choices) - 1
            session = self._target.open_session(self._check)
            undo.callback(session.close)
            draft = head.open_session(session, self._check)
            undo.callback(draft.close)
            read_prompt(session, text[: _FIRST - 1] if head.shares_kv else text[:-1])
            draft.begin(text[:_FIRST])
            for i in range(n):
                self._check()
                try:
                    chosen = _choose(draft, text[: _FIRST + i], text[_FIRST + i])
                except NonFiniteLogits:
                    raise DraftRefused(
                        f"{self._path.name} gives scores that are not numbers (NaN).", hint=HEAD_HINT
                    ) from None
                if head.shares_kv:
                    decode_one(session, text[_FIRST + i - 1])
                hits.append([each == right for each, right in zip(chosen, self._choices[i : i + 2], strict=True)])
                if i % _LOOK == _LOOK - 1:
                    self._progress(name, i / n)
                    if rival is not None and is_better(rival, np.array(hits), _GIVE_UP):
                        break
        self._progress(name, 1.0)
        return np.array(hits)

    def _find_choices(self) -> Ints:
        """[len(text) - 1] the target's first choices after the first two tokens, the first three and so on."""
        session = self._target.open_session(self._check)
        try:
            read_prompt(session, self._text[: _FIRST - 1])
            return read_choices(session, self._text, self._check)
        finally:
            session.close()

    def _follow_lookups(self) -> Hits:
        """[positions] where their proposal is right."""
        drafter = NgramDrafter()
        drafter.begin(self._text[:_FIRST], None)
        hits = []
        for i, choice in enumerate(self._choices[:-1]):
            tree = DraftTree()
            for _ in drafter.expand(tree, self._text[: _FIRST + i], Budget(depth=1, nodes=1)):
                pass
            hits.append(tree.tokens[:1] == [choice])
        return np.array(hits)

    def _find_own(self) -> Hits:
        """[positions] whether the last token before each is the target's own first choice there."""
        before = np.array(self._text[_FIRST - 1 : -1])
        return np.concatenate([[False], before[1:] == self._choices[:-2]])


def read_choices(session: Session, text: Sequence[int], check: CheckCancelled) -> Ints:
    """[rows] the most probable tokens after each token of `text` that the session has not read yet."""
    best: list[Ints] = []
    while (at := session.position) < len(text):
        check()
        n = min(len(text) - at, session.draft_limit + 1, _ROWS)
        best.append(session.forward(text[at], Draft.chain(text[at + 1 : at + n])).argmax())
        session.commit(range(n - 1))
    return np.concatenate(best)


def is_better(a: Hits, b: Hits, chance: float) -> bool:
    """Tells whether `a` is right more often than `b` where both have positions, with at most this chance by luck."""
    n = min(len(a), len(b))
    lead = a[:n].sum(axis=1, dtype=int) - b[:n].sum(axis=1, dtype=int)
    wins, losses = int((lead > 0).sum()), int((lead < 0).sum())
    n = wins + losses
    return wins > losses and sum(comb(n, k) for k in range(wins, n + 1)) <= chance * 2**n


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
    return Trial(spec, (first, second), len(hits))


# Probes on disk: how a head is read beside a target, by the digests of both.


_VERSION = 1  # of the file format and of the probe


class ProbeStore:
    """The file of a pair. What the head's file says is part of the key."""

    def __init__(self, target: Path, head: Path) -> None:
        """Raises CacheError if the weights cannot be read."""
        self.path = calibration_folder() / f"head-{fingerprint_weights(target)}-{fingerprint_weights(head)}.json"

    def load(self, backend: BackendName, spec: HeadSpec) -> ProbeResult | None:
        """What was found for `spec`, without the trials; None if nothing was. A damaged entry reads as None."""
        return load_entry(self.path, "probe", _setting(backend, spec), partial(_from_dict, spec))

    def save(self, backend: BackendName, spec: HeadSpec, result: ProbeResult) -> None:
        """Store `result`. If the folder cannot be written, the next load probes again."""
        save_entry(self.path, {"setting": _setting(backend, spec), "probe": _to_dict(spec, result)}, "probe")


def _to_dict(spec: HeadSpec, result: ProbeResult) -> dict[str, Any]:
    """`result` as JSON has it, without the trials; readings are what differs from `spec`, what the head's file says."""

    def trial(tried: Trial) -> dict[str, Any]:
        stated = asdict(spec)
        reading = {name: value for name, value in asdict(tried.spec).items() if value != stated[name]}
        return {"reading": reading, "agreement": list(tried.agreement), "positions": tried.positions}

    return {
        "chosen": trial(result.chosen),
        "stated": trial(result.stated) if result.stated else None,
        "lookups": result.lookups,
        "own": list(result.own),
        "seconds": result.seconds,
    }


def _from_dict(spec: HeadSpec, found: dict[str, Any]) -> ProbeResult:
    """Raises KeyError, TypeError, ValueError for values of other types."""

    def trial(tried: dict[str, Any]) -> Trial:
        reading = dict(tried["reading"])
        if "layers" in reading:
            reading["layers"] = tuple(map(int, reading["layers"]))
        first, second = map(float, tried["agreement"])
        return Trial(replace(spec, **reading), (first, second), int(tried["positions"]))

    own, lookups = map(float, found["own"])
    stated = None if found["stated"] is None else trial(found["stated"])
    return ProbeResult(stated, trial(found["chosen"]), float(found["lookups"]), (own, lookups), float(found["seconds"]))


def _setting(backend: BackendName, spec: HeadSpec) -> dict[str, Any]:
    """Returns the key of an entry as JSON reads it back."""
    setting: dict[str, Any] = json.loads(json.dumps({"version": _VERSION, "backend": backend, "stated": asdict(spec)}))
    return setting
