"""The drafters for one target: those that a user names, and those that 'auto' finds."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.backends import FileBackend
from edgespec.backends.attached_draft import SelfDraftSpec, parse
from edgespec.backends.llamacpp.shape import count_blocks
from edgespec.drafters import SELF, DrafterSpec, drafter_specs, find_spec
from edgespec.errors import DraftRefused, EdgespecError, InvalidRequest, UnknownModel
from edgespec.formats.gguf import Header
from edgespec.formats.head_file import ModelMetadata
from edgespec.formats.heads import HeadKind, HeadSpec
from edgespec.hub.cache import (
    Alias,
    LocalPath,
    Reference,
    RemoteModel,
    is_model_file,
    list_parts,
    parse_reference,
)
from edgespec.hub.hub import Hub
from edgespec.planner.heads import (
    KIND_NAMES,
    check_kind,
    choose_head_drafter,
    drafter_of,
    naming_heads,
    read_draft,
    runs,
)
from edgespec.registry.adapted import BASE, NO_BASE, AdaptedDrafts, AdaptedPair, Card
from edgespec.registry.resolve import (
    LocalModel,
    ResolvedPair,
    Source,
    choose_pair,
    find_local,
    find_pard_token,
    is_head,
    is_here,
    resolve_source,
)
from edgespec.registry.schema import Registry
from edgespec.registry.tokenizer_compat import find_tokenizer_mismatch

if TYPE_CHECKING:
    from edgespec.planner.plan import LoadConfig


# What a value of --draft asks for: drafters of the registry by name, and models by reference.


AUTO, NONE = "auto", "none"
_OPTIONS = {"layerskip": "[:K]", "qspec": "[:BITS]", "sparse": "[:SINK,WINDOW]"}
_SHORT_FORM = "skip"  # accepted, but not listed


@dataclass(frozen=True, slots=True)
class PlannedDrafter:
    """A drafter before anything is loaded for it.

    reference   of the model that the user has named
    self_draft  how the target drafts for itself
    model       its draft model or trained head; for a head in the target's own file the target
    mask_token  of a PARD model
    head        what the file of `model` says, where that is a trained head
    found       of a head that 'auto' has found: a sentence for the user once it is loaded, or shown in a plan
    adaptation  the versions of `model` that were adapted to the user; None where it lies in the target or is not here
    """

    spec: DrafterSpec
    reference: str | None = None
    self_draft: SelfDraftSpec | None = None
    model: PlannedModel | None = None
    mask_token: int | None = None
    head: HeadSpec | None = None
    found: str = ""
    adaptation: Adaptation | None = None

    @property
    def label(self) -> str:
        """What the user calls it."""
        named: object = None if self.is_in_target or self.model is None else self.model.reference
        version = f" (version {self.card.version})" if self.card is not None else ""
        if self.card is not None and self.card.base == NO_BASE:  # its file has no name that the user knows
            named = f"{self.spec.name} head"
        return f"{named or self.self_draft or self.spec.name}{version}"

    @property
    def card(self) -> Card | None:
        """Describes the adapted version that is used; None for the draft itself."""
        return self.adaptation.card if self.adaptation is not None else None

    @property
    def is_in_target(self) -> bool:
        """Tells whether it is a head in the target's own file."""
        return self.head is not None and self.head.in_target


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A draft model before it is loaded."""

    reference: Reference
    source: Source
    metadata: ModelMetadata


@dataclass(frozen=True, slots=True)
class Adaptation:
    """The versions of a draft that were adapted to the user.

    active  the number of the version that was to be used when it was last looked at; None where that was not known
    card    of the version that is used; None for the draft itself
    """

    pair: AdaptedPair
    active: int | None = BASE
    card: Card | None = None


def parse_draft(text: str) -> list[PlannedDrafter]:
    """The drafters that `text` names, joined by '+': 'ngram+model', 'ngram+./draft.gguf', 'layerskip:4+qspec'.

    Methods of self-drafting together make one drafter. Whatever names no drafter is a reference to a draft model. Not
    for 'auto'. Raises InvalidRequest.
    """
    if text == NONE:
        return []
    parts = _split(text)
    methods = [part for part in parts if _find_name(part) == SELF]
    terms: dict[str, PlannedDrafter] = {}
    for part in parts:
        word, colon, rest = part.partition(":")
        spec = find_spec(word)
        if spec is None:
            term = PlannedDrafter(drafter_specs()["model"], part)
        elif spec.name == SELF:
            term = PlannedDrafter(spec, self_draft=parse("+".join(methods)))
        elif colon and spec.needs not in ("model", "head"):
            raise InvalidRequest(f"the drafter '{word}' takes no options.", hint=f"Write {word} alone.")
        else:
            term = PlannedDrafter(spec, rest if colon else None)
        key = word if term.spec.name == SELF else term.spec.name
        if key in terms:
            raise InvalidRequest(f"the draft '{text}' names '{key}' twice.", hint="Name it once.")
        terms[key] = term
    return list({term.spec.name: term for term in terms.values()}.values())


def list_words() -> list[tuple[str, DrafterSpec]]:
    """What names a drafter in --draft, without its options."""
    return [(w, spec) for spec in drafter_specs().values() for w in spec.all_words if w != _SHORT_FORM]


def complete_draft(text: str) -> Iterator[tuple[str, str]]:
    """What `text` can become with a drafter after its last '+' that is not before it, and what this one does."""
    *before, _ = text.split("+")
    taken = {part.partition(":")[0] for part in before}
    if not before:
        yield AUTO, "all that are available"
        yield NONE, "plain decoding"
    for word, spec in list_words():
        if word not in taken:
            yield "+".join([*before, word]), spec.summary


def describe_words() -> str:
    """One line for a user who chooses: what --draft takes, with trained heads as one group."""
    words = [format_word(word, spec) for word, spec in list_words() if spec.needs != "head"]
    heads = [format_word(word, spec) for word, spec in list_words() if spec.needs == "head"]
    return f"{', '.join([AUTO, NONE, *words, *heads])} (trained heads of the target), or a model; join them with '+'"


def format_word(word: str, spec: DrafterSpec) -> str:
    """`word` with the options that it takes: 'pard[:REF]'."""
    return word + ("[:REF]" if spec.needs in ("model", "head") else _OPTIONS.get(word, ""))


@contextmanager
def naming_drafters(reference: str | None) -> Iterator[None]:
    """Lists the drafters too where `reference` turns out to name no model: the user may have mistyped one."""
    try:
        yield
    except UnknownModel as error:
        if reference is None or "/" in reference or reference.lower().endswith(".gguf"):
            raise
        words = [word for word, _ in list_words()]
        near = difflib.get_close_matches(reference.partition(":")[0], [*words, AUTO, NONE], n=1)
        start = f"Did you mean {near[0]}? " if near else ""
        hint = f"{start}Drafters: {', '.join(words)}. `edgespec list` shows the models."
        raise UnknownModel(error.message, hint=hint) from None


def _split(text: str) -> list[str]:
    """The parts between '+' signs. One that names no drafter continues a draft model's path, which may contain '+'.

    Raises InvalidRequest.
    """
    parts: list[str] = []
    for part in text.split("+"):
        names_model = bool(parts) and (_find_name(parts[-1]) is None or parts[-1].startswith("model:"))
        if names_model and _find_name(part) is None:
            parts[-1] += f"+{part}"
        else:
            parts.append(part)
    if len(parts) > 1 and (AUTO in parts or NONE in parts):
        word = AUTO if AUTO in parts else NONE
        raise InvalidRequest(f"'{word}' cannot be joined with other drafters.", hint="Name them, as in ngram+model.")
    if "" in parts:
        raise InvalidRequest(f"the draft '{text}' leaves a drafter out.", hint="Name drafters as in ngram+model.")
    return parts


def _find_name(part: str) -> str | None:
    """The drafter that `part` names, with or without options."""
    spec = find_spec(part.partition(":")[0])
    return spec.name if spec is not None else None


# Trained heads in the folder of their target: GGUF files beside a GGUF file, folders beside a folder.


MAX_LOOKS = 32  # files or folders whose first bytes are read


def list_sidecars(target: Source, hub: Hub) -> list[Path]:
    """The heads beside a local target, by name. Looks into 32 files or folders at most."""
    path = find_local(target, hub)
    if path is None or (isinstance(target, RemoteModel) and target.kind == "mlx"):
        return []
    path = path.resolve() if path.is_dir() else path
    kind = "*/config.json" if target.kind == "mlx" else "*.gguf"
    found = [each.parent if target.kind == "mlx" else each for each in sorted(path.parent.glob(kind))]
    own = list_parts(path.name)
    others = [each for each in found if each.name not in own and (target.kind == "mlx" or is_model_file(each.name))]
    return [each for each in others[:MAX_LOOKS] if is_head(each)]


_MODELS = {"pard": "PARD model", "model": "draft model"}


@dataclass(frozen=True, slots=True)
class DraftFinder:
    """Finds the drafters that `request` asks for, for one target; `own_head` is the head in the target's own file."""

    request: LoadConfig
    backend: FileBackend
    target: PlannedModel
    own_head: HeadSpec | None
    pair: ResolvedPair
    registry: Registry
    hub: Hub

    def find_all(self, notice: Callable[[str], None]) -> list[PlannedDrafter]:
        """All that are available: those that need nothing, the models that the registry pairs with the target, a head.

        `notice` hears what was left out.
        """
        found = []
        has_memory = self.request.memory is not None
        for spec in drafter_specs().values():
            is_there = {"nothing": True, "memory": has_memory, "model": self._paired(spec) is not None}
            if spec.in_auto and is_there.get(spec.needs):
                try:
                    found.append(self.find(PlannedDrafter(spec)))
                except EdgespecError as refusal:
                    notice(f"Drafting without {self._paired(spec)}: {refusal.message}")
        try:
            head = self._find_head(None)
        except DraftRefused as refusal:
            notice(f"Drafting without a head: {refusal.message}")
        else:
            found += [head] if head is not None else []
        return found

    def find(self, term: PlannedDrafter) -> PlannedDrafter:
        """One that the user named. Raises DraftRefused, InvalidRequest."""
        spec = term.spec
        if spec.needs == "memory" and self.request.memory is None:
            raise DraftRefused(
                f"the drafter {spec.name} needs the memory of earlier texts, which is off.",
                hint="Draft by ngram, or turn it on.",
            )
        if spec.needs not in ("model", "head"):
            facts = self.target.metadata
            n_layers = count_blocks(facts) if isinstance(facts, Header) else facts.integer("num_hidden_layers")
            if term.self_draft is not None and term.self_draft.kept and n_layers:
                term.self_draft.layers(n_layers)  # refuses those that the target does not have
            return term
        if spec.needs == "head" and term.reference is None:
            return self._find_named_head(spec)
        with naming_drafters(term.reference):
            reference = parse_reference(term.reference) if term.reference is not None else self._paired(spec)
            if reference is None:
                raise DraftRefused(
                    f"no {_MODELS.get(spec.name, 'model')} is paired with this target.",
                    hint=f"Draft by ngram, or name one: {spec.name}:REF.",
                )
            return self._find_model(spec, reference)

    def _paired(self, spec: DrafterSpec) -> Reference | None:
        """The model that the registry names for `spec` and this target."""
        return {"pard": self.pair.models.pard, "model": self.pair.models.draft}.get(spec.name)

    def _find_model(self, spec: DrafterSpec, reference: Reference) -> PlannedDrafter:
        """Raises DraftRefused for a model or head that cannot draft for the target."""
        if isinstance(reference, Alias):
            reference = choose_pair(self.registry.get(reference.name), self.backend).target
        with naming_heads(reference):
            source = resolve_source(reference, self.backend, self.hub)
        facts, head = read_draft(source, self.hub, is_head=spec.needs == "head")
        if head is not None:
            check_kind(self.backend, str(reference), head.kind)
        if self.request.load.workers and head is not None and head.kind == "gemma4-assistant":
            message = f"{reference} reads the target's cache, a part of which is on workers."
            raise DraftRefused(message, hint="Draft by auto or ngram.")
        spec = choose_head_drafter(spec, reference, head, facts, self.target.metadata)
        has_vocabulary = head is None or isinstance(facts, Header)  # folders of heads have no tokenizer
        if has_vocabulary and (reason := find_tokenizer_mismatch(self.target.metadata, facts)):
            raise DraftRefused(
                f"{reference} cannot draft for this target: {reason}.", hint="Draft by ngram, or another."
            )
        token = find_pard_token(facts)
        if token is None and reference == self.pair.models.pard:
            token = self.pair.models.pard_token
        if spec.name == "pard" and token is None:
            raise DraftRefused(
                f"{reference} names no mask token, so it is not known to be a PARD model.",
                hint="Set pard and pard_token for the target in models.toml.",
            )
        return PlannedDrafter(spec, model=PlannedModel(reference, source, facts), mask_token=token, head=head)

    def _find_named_head(self, spec: DrafterSpec) -> PlannedDrafter:
        head = replace(self, request=replace(self.request, fetch_heads=True))._find_head(spec)
        if head is None:
            raise DraftRefused(
                f"there is no {spec.name} head in the target's file, beside it or in the registry.",
                hint=f"Draft by ngram, or name one: {spec.name}:REF.",
            )
        return replace(head, found="")

    def _find_head(self, spec: DrafterSpec | None) -> PlannedDrafter | None:
        """The first head that fits, which is one for `spec` if given.

        None where there is no head. Raises DraftRefused with the reasons where none of those that are there fits.
        """
        refusals: list[EdgespecError] = []
        for place, find in self._list_heads(spec):
            try:
                found = find()
            except EdgespecError as refusal:
                refusals.append(refusal)
                continue
            assert found.head is not None
            named = "" if found.is_in_target or found.card else f"{found.label}, "
            return replace(found, found=f"Drafting with {named}{KIND_NAMES[found.head.kind]} {place}.")
        missing = self.pair.models.with_head
        if missing and self.own_head is None and spec in (None, drafter_of("mtp")):
            message = f"the target's file was made without the model's MTP head; {missing} has it."
            refusals.append(DraftRefused(message, hint=f"Use --model {missing}."))
        if refusals:
            reasons = "; ".join(each.message.removesuffix(".") for each in refusals)
            raise DraftRefused(f"{reasons}.", hint=refusals[0].hint)
        return None

    def _list_heads(self, spec: DrafterSpec | None) -> Iterator[tuple[str, Callable[[], PlannedDrafter]]]:
        """(where it is, what reads it) of the heads that are there, the best known first.

        Reading one raises EdgespecError where it does not fit, or is not to be downloaded.
        """
        head, kind = self.pair.models.head, self.pair.models.head_kind
        is_asked = spec is not None or self.request.fetch_heads  # else nobody needs to hear of a kind that does not run
        if head and kind and spec in (None, drafter_of(kind)) and (is_asked or runs(self.backend, kind)):
            yield "that the registry pairs with the target", partial(self._read_paired_head, head, kind)
        if self.own_head is not None and spec in (None, drafter_of(self.own_head.kind)):
            yield "in the target's own file", partial(self._read_own_head, self.own_head)
        trained = self._find_trained_head() if spec in (None, drafter_of("eagle3")) else None
        if trained is not None:
            yield "that was trained on this machine", partial(self._read_trained_head, trained)
        for path in list_sidecars(self.target.source, self.hub):
            wanted = spec or drafter_specs()["model"]
            yield "that lies beside the target", partial(self._find_model, wanted, LocalPath(path))

    def _find_trained_head(self) -> AdaptedPair | None:
        """The versions of the head that `edgespec draft train` has made for the target, if one is to be used."""
        target = find_local(self.target.source, self.hub)
        folder = self.request.adapted
        pair = AdaptedDrafts(folder).new_head(target, self.backend) if folder and target else None
        return pair if pair is not None and _read_active(pair) != BASE else None

    def _read_trained_head(self, pair: AdaptedPair) -> PlannedDrafter:
        """Raises InvalidModelFile for a damaged or missing version."""
        version = pair.active()
        assert version is not None
        found = self._find_model(drafter_of("eagle3"), LocalPath(version.path))
        return replace(found, adaptation=Adaptation(pair, version.card.version, version.card))

    def _read_own_head(self, head: HeadSpec) -> PlannedDrafter:
        check_kind(self.backend, "the head in the target's file", head.kind)
        return PlannedDrafter(drafter_of(head.kind), model=self.target, head=head)

    def _read_paired_head(self, reference: Reference, kind: HeadKind) -> PlannedDrafter:
        check_kind(self.backend, str(reference), kind)
        if not self.request.fetch_heads and not is_here(reference, self.hub):
            pull = f"`edgespec pull {self.pair.name}`"
            raise DraftRefused(
                f"{reference}, {KIND_NAMES[kind]} for this target, is not downloaded; {pull} does that.",
                hint=f"Run {pull}.",
            )
        return self._find_model(drafter_of(kind), reference)


# Drafts that were adapted to their user, in place of those that they were made from.


def use_adapted(
    drafters: Iterable[PlannedDrafter], target: PlannedModel, folder: Path, hub: Hub, notice: Callable[[str], None]
) -> list[PlannedDrafter]:
    """`drafters` with the versions in use of their models, which lie in `folder`; `notice` hears of unusable ones.

    A model that is not downloaded has no versions. Raises CacheError for models that cannot be read.
    """
    found = []
    target_path = find_local(target.source, hub)
    for each in drafters:
        path = find_local(each.model.source, hub) if each.model is not None else None
        known = watch(each, target_path, path, folder)
        try:
            found.append(_use_version(known, hub))
        except EdgespecError as refusal:
            notice(f"Drafting with {each.label} itself: {refusal.message}")
            found.append(known)
    return found


def watch(drafter: PlannedDrafter, target: Path | None, draft: Path | None, folder: Path | None) -> PlannedDrafter:
    """`drafter`, whose model is at `draft`, with its versions in `folder` for the target at `target`.

    The same where a path is None, or the model is in the target's file, or it is watched already. Raises CacheError for
    models that cannot be read.
    """
    if target is None or draft is None or folder is None or drafter.is_in_target or drafter.adaptation is not None:
        return drafter
    pair = AdaptedDrafts(folder).pair(target, draft)
    return replace(drafter, adaptation=Adaptation(pair, _read_active(pair)))


def is_outdated(drafter: PlannedDrafter) -> bool:
    """Tells whether another version is in use since the drafter was last looked at."""
    known = drafter.adaptation
    return known is not None and _read_active(known.pair) != known.active


def mark_seen(drafter: PlannedDrafter) -> PlannedDrafter:
    """`drafter` as it is, which is not outdated until another version is in use than now."""
    known = drafter.adaptation
    return replace(drafter, adaptation=replace(known, active=_read_active(known.pair))) if known else drafter


def _use_version(drafter: PlannedDrafter, hub: Hub) -> PlannedDrafter:
    """`drafter` with the version of its model that is in use. Raises InvalidModelFile for a damaged or missing one."""
    known = drafter.adaptation
    version = known.pair.active() if known is not None else None
    if known is None or version is None or drafter.model is None:
        return drafter
    card, source = version.card, LocalModel(version.path, "mlx" if version.path.is_dir() else "gguf")
    facts, head = read_draft(source, hub, is_head=drafter.head is not None)
    model = replace(drafter.model, source=source, metadata=facts)
    return replace(drafter, model=model, head=head, adaptation=Adaptation(known.pair, card.version, card))


def describe_version(card: Card) -> str:
    return f"Drafting with version {card.version} of the draft, adapted on {card.date}."


def _read_active(pair: AdaptedPair) -> int | None:
    """The number of the version in use; None where that is not known."""
    try:
        return pair.active_number()
    except EdgespecError:
        return None
