"""Trained heads among the models that a user names: found by their metadata, and refused where they cannot draft."""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
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
from edgespec.drafters import DrafterSpec, drafter_specs
from edgespec.drafters.ngram import NgramDrafter
from edgespec.errors import DraftRefused, EdgespecError, InvalidModelFile, InvalidRequest, UnknownModel
from edgespec.formats.gguf import Header
from edgespec.formats.head_file import ModelMetadata, find_weights, read_gguf_head, read_head
from edgespec.formats.head_tensors import HEAD_HINT
from edgespec.formats.heads import HeadKind, HeadSpec, read_config_head, usual_layers
from edgespec.formats.mlx_folder import fingerprint_weights, read_config
from edgespec.hub.cache import LocalPath, Reference, RemoteModel, parse_reference
from edgespec.hub.hub import Hub
from edgespec.registry.resolve import LocalModel, Source, read_metadata
from edgespec.text.chat_template import encode_prompt

_OTHER = "Use --draft ngram, or another."
_RUNNABLE: dict[BackendName, list[HeadKind]] = {
    "llamacpp": ["eagle3", "mtp", "gemma4-assistant", "dflash", "dspark"],
    "mlx": ["eagle3", "eagle", "mtp", "gemma4-assistant", "dflash", "dspark", "medusa", "hydra"],
    "toy": [],
}
_RUNTIMES: Mapping[BackendName, str] = {"llamacpp": "llama.cpp", "mlx": "MLX", "toy": "the toy runtime"}
KIND_NAMES = {
    "eagle3": "an EAGLE-3 head",
    "eagle": "an EAGLE head",
    "mtp": "an MTP head",
    "gemma4-assistant": "a Gemma 4 assistant",
    "dflash": "a DFlash head",
    "dspark": "a DSpark head",
    "medusa": "a set of Medusa heads",
    "hydra": "a set of Hydra heads",
}
# llama.cpp has no graph for these. With numpy on one thread, an output matrix of 128,256 x 4,096 takes 97 ms a head,
# and five of them are 10.5 GB to read, twice an 8B model of 4 bits a weight.
_OUTSIDE = ": its matrices would be multiplied outside of llama.cpp, which takes longer than it saves"
_REASONS: Mapping[tuple[BackendName, HeadKind], str] = {
    ("llamacpp", "medusa"): _OUTSIDE,
    ("llamacpp", "hydra"): _OUTSIDE,
}

Refusal = Callable[[str, HeadSpec], EdgespecError | None]


def find_head(metadata: ModelMetadata) -> HeadSpec | None:
    """The trained head that a file or folder holds, beside a model or alone. Raises InvalidModelFile, CacheError."""
    return read_gguf_head(metadata) if isinstance(metadata, Header) else read_head(metadata.path)


def read_draft(source: Source, hub: Hub, *, is_head: bool) -> tuple[ModelMetadata, HeadSpec | None]:
    """The metadata of a draft, and what it says of the trained head if that is all that the file or folder holds.

    Folders of heads need no tokenizer. Of a folder on the hub the tensors' shapes are read where its config names a
    head, or where it `is_head` as the user says. Raises as read_metadata does.
    """
    if isinstance(source, LocalModel) and source.kind == "mlx":
        if (head := _alone(read_head(source.path))) is None:
            return read_metadata(source, hub), None
        size = sum(file.stat().st_size for file in find_weights(source.path))
        return read_config(source.path, source.path.name, size), head
    metadata = read_metadata(source, hub)
    if isinstance(metadata, Header):
        return metadata, _alone(read_gguf_head(metadata))
    head = read_config_head(metadata.config, {})
    if isinstance(source, RemoteModel) and (is_head or head is not None):
        head = read_config_head(metadata.config, hub.shapes(source))
    return metadata, _alone(head)


def choose_head_drafter(
    spec: DrafterSpec, reference: Reference | str, head: HeadSpec | None, model: ModelMetadata, target: ModelMetadata
) -> DrafterSpec:
    """The drafter for the draft at `reference`, which the user has asked for as `spec`: that of a head, if it is one.

    `model` is the metadata of the draft. Heads of kinds that do not run are refused before, see `refuse_draft`. Raises
    DraftRefused for a head that does not fit.
    """
    if head is None:
        if spec.needs == "head":
            raise DraftRefused(
                f"{reference} is no trained head.", hint=f"Use --draft {reference}, without '{spec.name}:'."
            )
        return spec
    drafter = drafter_of(head.kind)
    if spec.name not in ("model", drafter.name):
        raise DraftRefused(f"{reference} is a head of the kind '{head.kind}', no {spec.name}.", hint=_OTHER)
    for what, theirs, ours in (
        ("hidden size", head.hidden_size, _hidden_size(target)),
        ("vocabulary", _vocab_size(model, head), _vocab_size(target)),
    ):
        if ours and theirs and theirs != ours:
            raise DraftRefused(
                f"{reference} is {KIND_NAMES[head.kind]} for a {what} of {theirs:,}; the target has {ours:,}.",
                hint=_OTHER,
            )
    return drafter


def drafter_of(kind: HeadKind) -> DrafterSpec:
    """The drafter for heads of `kind`; a Gemma 4 assistant is an MTP head."""
    return drafter_specs()["mtp" if kind == "gemma4-assistant" else kind]


def _alone(head: HeadSpec | None) -> HeadSpec | None:
    """A head that does not lie in its target's file; else None."""
    return head if head is not None and not head.in_target else None


def _hidden_size(metadata: ModelMetadata) -> int | None:
    """Reads the hidden size of a model; None where its metadata does not say."""
    found = metadata.own("embedding_length") if isinstance(metadata, Header) else metadata.integer("hidden_size")
    return found if isinstance(found, int) else None


def _vocab_size(model: ModelMetadata, head: HeadSpec | None = None) -> int | None:
    """Reads the vocabulary of a target, or that of the target of `head`; None where its metadata does not say.

    Vocabularies of GGUF files are compared whole. A head may score only a part of its target's tokens.
    """
    if isinstance(model, Header):
        tokens = model.metadata.get("tokenizer.ggml.tokens")
        return len(tokens) if head is None and isinstance(tokens, list) else None
    inner = model.config.get("transformer_layer_config")
    stated = inner.get("vocab_size") if isinstance(inner, dict) else None
    return stated if isinstance(stated, int) else model.integer("vocab_size")


def refuse_target(name: str, head: HeadSpec) -> EdgespecError:
    """The error for a head that is given as the model."""
    return InvalidModelFile(
        f"{name} is {describe(head)}; it drafts for a model and writes no text by itself.",
        hint="Name the model that it was trained for.",
    )


def refuse_draft(backend: BackendName, name: str, head: HeadSpec) -> EdgespecError | None:
    """The error for a head that is given as the draft; None where `backend` runs heads of its kind."""
    return refuse_kind(backend, name, head.kind, describe(head))


def refuse_kind(backend: BackendName, name: str, kind: HeadKind, described: str = "") -> EdgespecError | None:
    """Does the same as `refuse_draft` for a head whose files are not read."""
    if kind in _RUNNABLE[backend]:
        return None
    reason = _REASONS.get((backend, kind), "")
    return DraftRefused(
        f"{name} is {described or KIND_NAMES[kind]}, which edgespec does not run on {_RUNTIMES[backend]}{reason}.",
        hint="Use --draft ngram, or name a draft model.",
    )


@contextmanager
def refusing_heads(named: Reference | str | None, refuse: Refusal) -> Iterator[None]:
    """Raises the error of `refuse` where a local file or folder turns out to hold a head and no model.

    Heads that lie in their target's file are part of a model. A head that `refuse` lets pass has the format of another
    runtime.
    """
    try:
        yield
    except (InvalidModelFile, UnknownModel) as first:
        path = _find_local(named)
        try:
            head = _alone(read_head(path)) if path is not None else None
        except InvalidModelFile:
            if isinstance(first, InvalidModelFile):  # which says more of a damaged model
                raise first from None
            raise
        if path is None or head is None:
            raise
        if error := refuse(str(named), head):
            raise error from None
        if isinstance(first, UnknownModel):
            raise refuse_format(str(named), head.kind, is_folder=path.is_dir()) from None
        raise


def refuse_format(name: str, kind: HeadKind, *, is_folder: bool) -> DraftRefused:
    """The error for a folder that is named on llama.cpp, or a GGUF file on MLX."""
    if is_folder:
        return DraftRefused(
            f"{name} is {KIND_NAMES[kind]} in Hugging Face's format; llama.cpp reads heads as GGUF files.",
            hint="Convert it: convert_hf_to_gguf.py HEAD --target-model-dir TARGET, of llama.cpp.",
        )
    return DraftRefused(
        f"{name} is {KIND_NAMES[kind]} in a GGUF file; MLX reads heads as folders with config.json and safetensors.",
        hint="Name the folder that the file was made from, or use --backend llamacpp.",
    )


def _find_local(named: Reference | str | None) -> Path | None:
    if isinstance(named, str):
        with suppress(UnknownModel):
            named = parse_reference(named)
    return named.path if isinstance(named, LocalPath) else None


def describe(head: HeadSpec) -> str:
    """What a head is, in a few words."""
    size = f" for a model of hidden size {head.hidden_size:,}" if head.hidden_size else ""
    return KIND_NAMES[head.kind] + size


# The plausible readings of a head: what its file may have meant where it states a convention wrongly.


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


# Which reading of a head agrees best with its target: conventions that files state wrongly show in no other way.
#
# A fixed text is read by target and head (teacher forcing). At each position the head's first choices for the next two
# tokens are compared with the target's own first choices there. All readings are compared at the same positions.
# Another
# reading than the stated one is taken only if that is significant by a sign test over positions (McNemar 1947).
#
# The text is edgespec's calibration text and not the target's own continuations: small models repeat themselves, and
# then any reading is right. It also costs no decoding.


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
