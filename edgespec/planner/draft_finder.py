"""The drafters for one target: those that a user names, and those that 'auto' finds."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.backends import FileBackend
from edgespec.backends.attached_draft import SelfDraftSpec, parse
from edgespec.drafters import SELF, DrafterSpec, drafter_specs, find_spec
from edgespec.errors import DraftRefused, EdgespecError, InvalidModelFile, InvalidRequest, UnknownModel
from edgespec.formats.gguf import Header
from edgespec.formats.head_file import ModelMetadata
from edgespec.formats.heads import HeadKind, HeadSpec
from edgespec.hub.cache import (
    Alias,
    HubFile,
    HubQuant,
    HubRepo,
    Kind,
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
    choose_head_drafter,
    drafter_of,
    read_draft,
    refuse_draft,
    refuse_kind,
    refusing_heads,
)
from edgespec.registry.adapted import BASE, AdaptedDrafts, AdaptedPair, Card
from edgespec.registry.resolve import (
    LocalModel,
    ResolvedPair,
    Source,
    choose_pair,
    find_local,
    find_pard_token,
    find_with_head,
    is_head,
    resolve_source,
)
from edgespec.registry.schema import Registry
from edgespec.registry.tokenizer_compat import find_tokenizer_mismatch

if TYPE_CHECKING:
    from edgespec.drafters.remote import RemoteDraft


# What a value of --draft asks for: drafters of the registry by name, and models by reference.


AUTO, NONE = "auto", "none"
_OPTIONS = {"layerskip": "[:K]", "qspec": "[:BITS]", "sparse": "[:SINK,WINDOW]"}
_SHORT_FORMS = ("skip", "https")  # accepted, but not listed


@dataclass(frozen=True, slots=True)
class PlannedDrafter:
    """A drafter before anything is loaded for it.

    reference   of the model that the user has named, or the address of a draft on another machine
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
        named = None if self.is_in_target or self.model is None else self.model.reference
        version = f" (version {self.card.version})" if self.card is not None else ""
        return f"{named or self.self_draft or self.reference or self.spec.name}{version}"

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

    base    the drafter with the draft that they were made from
    active  the number of the version that was to be used when it was last looked at; None where that was not known
    card    of the version that is used; None for the base draft
    """

    base: PlannedDrafter
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
    terms: dict[str, PlannedDrafter] = {}
    methods = [part for part in parts if _find_name(part) == SELF]
    words = [part.partition(":")[0] for part in parts]
    if twice := next((word for word in words if find_spec(word) and words.count(word) > 1), None):
        raise InvalidRequest(f"--draft {text} names '{twice}' twice.", hint="Name it once.")
    for part in parts:
        word, colon, rest = part.partition(":")
        spec = find_spec(word)
        if spec is None:
            term = PlannedDrafter(drafter_specs()["model"], part)
        elif spec.name == SELF:
            term = PlannedDrafter(spec, self_draft=parse("+".join(methods)))
        elif spec.needs == "server":
            term = PlannedDrafter(spec, part)
        elif colon and spec.needs not in ("model", "head"):
            raise InvalidRequest(f"the drafter '{word}' takes no options.", hint=f"Use --draft {word}.")
        else:
            term = PlannedDrafter(spec, rest if colon else None)
        if term.spec.name != SELF and term.spec.name in terms:
            raise InvalidRequest(f"--draft {text} names two draft models.", hint="Name one.")
        terms[term.spec.name] = term
    return list(terms.values())


def list_words() -> list[tuple[str, DrafterSpec]]:
    """What names a drafter in --draft, without its options."""
    return [(w, spec) for spec in drafter_specs().values() for w in spec.all_words if w not in _SHORT_FORMS]


def describe_words() -> str:
    """One line for a user who chooses: what --draft takes, with trained heads as one group."""
    words = [format_word(word, spec) for word, spec in list_words() if spec.needs != "head"]
    heads = [format_word(word, spec) for word, spec in list_words() if spec.needs == "head"]
    return f"{', '.join([AUTO, NONE, *words, *heads])} (trained heads of the target), or a model; join them with '+'"


def format_word(word: str, spec: DrafterSpec) -> str:
    """`word` with the options that it takes: 'pard[:REF]'."""
    if spec.needs == "server":
        return f"{word}://HOST:PORT"
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
        if reference == SELF:
            near = [" or ".join(word for word, spec in list_words() if spec.name == SELF)]
        start = f"Did you mean --draft {near[0]}? " if near else ""
        listed = ", ".join(words)
        raise UnknownModel(
            error.message, hint=f"{start}Drafters: {listed}. `edgespec list` shows the models."
        ) from None


def _split(text: str) -> list[str]:
    """The parts between '+' signs. One that names no drafter continues a draft model's path, which may contain '+'.

    Raises InvalidRequest.
    """
    parts: list[str] = []
    for part in text.split("+"):
        if parts and _find_name(part) is None and _names_model(parts[-1]):
            parts[-1] += f"+{part}"
        else:
            parts.append(part)
    if len(parts) > 1 and (AUTO in parts or NONE in parts):
        word = AUTO if AUTO in parts else NONE
        raise InvalidRequest(f"'{word}' cannot be joined with other drafters.", hint="Name them: --draft ngram+model.")
    if "" in parts:
        raise InvalidRequest(f"--draft '{text}' leaves a drafter out.", hint="Name drafters as in ngram+model.")
    return parts


def _find_name(part: str) -> str | None:
    """The drafter that `part` names, with or without options."""
    spec = find_spec(part.partition(":")[0])
    return spec.name if spec is not None else None


def _names_model(part: str) -> bool:
    """Tells whether `part` is a reference to a draft model, 'model:' before it or not, or names a server's draft."""
    return _find_name(part) is None or part.startswith("model:") or "/" in part.partition("://")[2]


# Trained heads in the folder of their target: GGUF files beside a GGUF file, folders beside a folder.


MAX_ENTRIES = 256  # of the target's folder
MAX_LOOKS = 32  # files or folders whose first bytes are read


def list_sidecars(target: Source, hub: Hub) -> list[Path]:
    """The heads beside a local target, by name. Looks into 32 of the folder's first 256 entries at most."""
    path = find_local(target, hub)
    if path is None or (isinstance(target, RemoteModel) and target.kind == "mlx"):
        return []
    path = path.resolve() if path.is_dir() else path
    try:
        entries = sorted(islice(path.parent.iterdir(), MAX_ENTRIES))
    except OSError:  # a folder that cannot be listed
        return []
    own = list_parts(path.name)
    others = (each for each in entries if each.name not in own and _may_hold_head(each, target.kind))
    return [each for each in islice(others, MAX_LOOKS) if is_head(each)]


def _may_hold_head(path: Path, kind: Kind) -> bool:
    if kind == "mlx":
        return (path / "config.json").is_file()
    return is_model_file(path.name) and path.is_file()


_EXAMPLES = {"pard": "pard:REF", "model": "REF"}  # how a model of the user's is named for a drafter


@dataclass(frozen=True, slots=True)
class DraftFinder:
    """Finds the drafters for one target.

    reference  what names the target
    own_head   the head in the target's own file
    may_fetch  whether 'auto' takes a head that must be downloaded
    has_memory  whether earlier texts are kept
    """

    backend: FileBackend
    target: PlannedModel
    own_head: HeadSpec | None
    pair: ResolvedPair
    registry: Registry
    hub: Hub
    may_fetch: bool = False
    has_memory: bool = False

    def find_all(self, notice: Callable[[str], None]) -> list[PlannedDrafter]:
        """All that are available: those that need nothing, the models that the registry pairs with the target, a head.

        `notice` hears what was left out.
        """
        found = []
        for spec in drafter_specs().values():
            if not spec.in_auto or (spec.needs == "memory" and not self.has_memory):
                continue
            if spec.needs in ("nothing", "memory"):
                found.append(PlannedDrafter(spec))
            elif spec.needs == "model" and (reference := self._paired(spec)) is not None:
                try:
                    found.append(self._find_model(spec, reference))
                except EdgespecError as refusal:
                    notice(f"Drafting without {reference}: {refusal.message}")
        try:
            head = self._find_head(None)
        except DraftRefused as refusal:
            notice(f"Drafting without a head: {refusal.message}")
        else:
            if head is not None:
                found.append(head)
        return found

    def find(self, terms: Sequence[PlannedDrafter]) -> list[PlannedDrafter]:
        """Those that the user named. Raises DraftRefused."""
        found = []
        for term in terms:
            if term.spec.needs == "memory" and not self.has_memory:
                raise DraftRefused(
                    f"the drafter {term.spec.name} needs the memory of earlier texts, which is off.",
                    hint="Use --draft ngram, or turn it on.",
                )
            if term.spec.needs == "server":
                open_server(term.reference).close()  # before anything is downloaded or loaded
                found.append(term)
            elif term.spec.needs not in ("model", "head"):
                found.append(term)
            elif term.reference is not None:
                with naming_drafters(term.reference):
                    found.append(self._find_model(term.spec, parse_reference(term.reference)))
            elif term.spec.needs == "head":
                found.append(self._find_named_head(term.spec))
            elif (reference := self._paired(term.spec)) is not None:
                found.append(self._find_model(term.spec, reference))
            else:
                kind = "PARD model" if term.spec.name == "pard" else "draft model"
                raise DraftRefused(
                    f"no {kind} is paired with this target.",
                    hint=f"Use --draft ngram, or name one: --draft {_EXAMPLES.get(term.spec.name, 'REF')}.",
                )
        return found

    def _paired(self, spec: DrafterSpec) -> Reference | None:
        """The model that the registry names for `spec` and this target."""
        return {"pard": self.pair.models.pard, "model": self.pair.models.draft}.get(spec.name)

    def _find_model(self, spec: DrafterSpec, reference: Reference) -> PlannedDrafter:
        """Raises DraftRefused for a model or head that cannot draft for the target."""
        if isinstance(reference, Alias):
            reference = choose_pair(self.registry.get(reference.name), self.backend).target
        with refusing_heads(reference, partial(refuse_draft, self.backend)):
            source = resolve_source(reference, self.backend, self.hub)
            facts, head = read_draft(source, self.hub, is_head=spec.needs == "head")
        if head is not None and (error := refuse_draft(self.backend, str(reference), head)):
            raise error
        spec = choose_head_drafter(spec, reference, head, facts, self.target.metadata)
        has_vocabulary = head is None or isinstance(facts, Header)  # folders of heads have no tokenizer
        if has_vocabulary and (reason := find_tokenizer_mismatch(self.target.metadata, facts)):
            raise DraftRefused(
                f"{reference} cannot draft for this target: {reason}.", hint="Use --draft ngram, or another."
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
        head = replace(self, may_fetch=True)._find_head(spec)
        if head is None:
            raise DraftRefused(
                f"there is no {spec.name} head in the target's file, beside it or in the registry.",
                hint=f"Use --draft ngram, or name one: --draft {spec.name}:REF.",
            )
        return replace(head, found="")

    def _find_head(self, spec: DrafterSpec | None) -> PlannedDrafter | None:
        """The first head that fits, which is one for `spec` if given.

        None where there is no head. Raises DraftRefused with the reasons where none of those that are there fits.
        """
        refusals = []
        for place, find in self._list_heads(spec):
            try:
                found = find()
            except EdgespecError as refusal:
                refusals.append(refusal)
                continue
            assert found.head is not None
            named = "" if found.is_in_target else f"{found.label}, "
            return replace(found, found=f"Drafting with {named}{KIND_NAMES[found.head.kind]} {place}.")
        if missing := self._find_left_out(spec):
            refusals.append(missing)
        if refusals:
            reasons = "; ".join(each.message.removesuffix(".") for each in refusals)
            raise DraftRefused(f"{reasons}.", hint=refusals[0].hint)
        return None

    def _list_heads(self, spec: DrafterSpec | None) -> Iterator[tuple[str, Callable[[], PlannedDrafter]]]:
        """(where it is, what reads it) of the heads that are there, the best known first."""
        head, kind = self.pair.models.head, self.pair.models.head_kind
        is_asked = spec is not None or self.may_fetch  # else nobody needs to hear of a kind that does not run
        if kind and not is_asked and refuse_kind(self.backend, "", kind) is not None:
            kind = None
        if head and kind and spec in (None, drafter_of(kind)):
            yield "that the registry pairs with the target", partial(self._find_paired_head, head, kind)
        if self.own_head is not None and spec in (None, drafter_of(self.own_head.kind)):
            yield "in the target's own file", partial(self._find_own_head, self.own_head)
        for path in list_sidecars(self.target.source, self.hub):
            find = partial(self._find_model, spec or drafter_specs()["model"], LocalPath(path))
            yield "that lies beside the target", find

    def _find_paired_head(self, reference: Reference, kind: HeadKind) -> PlannedDrafter:
        if error := refuse_kind(self.backend, str(reference), kind):
            raise error
        is_here = not isinstance(reference, HubRepo | HubQuant | HubFile) or self.hub.find_cached(reference) is not None
        if not is_here and not self.may_fetch:
            pull = f"`edgespec pull {self.pair.name}`"
            raise DraftRefused(
                f"{reference}, {KIND_NAMES[kind]} for this target, is not downloaded; {pull} does that.",
                hint=f"Run {pull}.",
            )
        return self._find_model(drafter_of(kind), reference)

    def _find_own_head(self, head: HeadSpec) -> PlannedDrafter:
        if error := refuse_kind(self.backend, "the head in the target's file", head.kind):
            raise error
        return PlannedDrafter(drafter_of(head.kind), model=self.target, head=head)

    def _find_left_out(self, spec: DrafterSpec | None) -> DraftRefused | None:
        """Says which repository has the MTP head that the target's GGUF file lacks."""
        model = self.target.metadata
        mtp = drafter_of("mtp")
        if spec not in (None, mtp) or not isinstance(model, Header) or self.own_head is not None:
            return None
        reference = self.pair.models.with_head or find_with_head(model, self.pair.name, self.registry)
        if reference is None or refuse_kind(self.backend, "", "mtp") is not None:
            return None
        return DraftRefused(
            f"the target's file was made without the model's MTP head; {reference} has it.",
            hint=f"Use --model {reference}.",
        )


def open_server(address: str | None) -> RemoteDraft:
    """The draft on another machine. Raises InvalidRequest, and DraftRefused where no draft server answers."""
    from edgespec.drafters.remote import RemoteDraft, parse_address

    return RemoteDraft(parse_address(address or ""))


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
        known = watch(each, target_path, path, folder) if target_path is not None else each
        try:
            found.append(choose_version(known, target.metadata, hub))
        except EdgespecError as refusal:
            notice(f"Drafting with {each.label} itself: {refusal.message}")
            found.append(mark_seen(known))
    return found


def watch(drafter: PlannedDrafter, target: Path, draft: Path | None, folder: Path | None) -> PlannedDrafter:
    """`drafter`, whose model is at `draft`, with its versions in `folder` for the target at `target`.

    The same where it has no model, or one in the target's file, or is watched already. Raises CacheError for models
    that cannot be read.
    """
    if draft is None or folder is None or drafter.is_in_target or drafter.adaptation is not None:
        return drafter
    return replace(drafter, adaptation=Adaptation(drafter, AdaptedDrafts(folder).pair(target, draft)))


def is_outdated(drafter: PlannedDrafter) -> bool:
    """Tells whether another version is in use since the drafter was last looked at."""
    return drafter.adaptation is not None and _read_active(drafter.adaptation) != drafter.adaptation.active


def mark_seen(drafter: PlannedDrafter) -> PlannedDrafter:
    """`drafter` as it is, which is not outdated until another version is in use than now."""
    known = drafter.adaptation
    return drafter if known is None else replace(drafter, adaptation=replace(known, active=_read_active(known)))


def use_base(drafter: PlannedDrafter) -> PlannedDrafter:
    """`drafter` with the draft itself, until another version is in use than it was last looked at."""
    known = drafter.adaptation
    return drafter if known is None else replace(known.base, adaptation=replace(known, card=None))


def choose_version(drafter: PlannedDrafter, target: ModelMetadata, hub: Hub) -> PlannedDrafter:
    """`drafter` with the version of its model that is in use now.

    Raises InvalidModelFile for one that is damaged or missing, DraftRefused for one of another kind or vocabulary.
    """
    known = drafter.adaptation
    if known is None or known.base.model is None:
        return drafter
    number = known.pair.active_number()
    if number == BASE:
        return replace(known.base, adaptation=replace(known, active=BASE, card=None))
    version = known.pair.read(number)
    source = LocalModel(version.path, "mlx" if version.path.is_dir() else "gguf")
    facts, head = read_draft(source, hub, is_head=drafter.head is not None)
    if (head and head.kind) != (drafter.head and drafter.head.kind):
        raise DraftRefused(f"version {number} of the draft is another kind of draft.", hint="Use another version.")
    has_vocabulary = head is None or isinstance(facts, Header)
    if has_vocabulary and (reason := find_tokenizer_mismatch(target, facts)):
        raise DraftRefused(f"version {number} of the draft has another vocabulary: {reason}.", hint="Use another one.")
    model = PlannedModel(known.base.model.reference, source, facts)
    return replace(drafter, model=model, head=head, adaptation=replace(known, active=number, card=version.card))


def describe_version(card: Card) -> str:
    """One sentence for the user."""
    return f"Drafting with version {card.version} of the draft, adapted on {card.date}."


def find_version(pair: ResolvedPair, backend: FileBackend, folder: Path, hub: Hub) -> str | None:
    """The version in use of the draft model of a pair in words, or why it cannot be used; None for none.

    Raises CacheError for models that cannot be read, and what `resolve_source` raises.
    """
    reference = pair.models.draft
    is_remote = isinstance(reference, HubRepo | HubQuant | HubFile) and hub.find_cached(reference) is None
    if reference is None or is_remote:
        return None
    target, path = find_local(pair.target, hub), find_local(resolve_source(reference, backend, hub), hub)
    if target is None or path is None:
        return None
    try:
        version = AdaptedDrafts(folder).pair(target, path).active()
    except InvalidModelFile as refusal:
        return refusal.message.removesuffix(".")
    return f"version {version.card.version} of {version.card.date}" if version is not None else None


def _read_active(known: Adaptation) -> int | None:
    """The number of the version in use; None where that is not known."""
    try:
        return known.pair.active_number()
    except EdgespecError:
        return None
