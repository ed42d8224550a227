"""The drafters for one target: those that a user names, and those that 'auto' finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.backends import FileBackend
from edgespec.backends.llamacpp.rewrite import count_blocks
from edgespec.drafters.registry import DrafterSpec, drafter_specs
from edgespec.errors import DraftRefused, EdgespecError
from edgespec.formats.gguf import Header
from edgespec.formats.heads import HeadKind, HeadSpec
from edgespec.models.adapted import read_active
from edgespec.models.cache import RemoteModel
from edgespec.models.draft_words import naming_drafters
from edgespec.models.drafts import Adaptation, DrafterPlan, PlannedModel
from edgespec.models.file_selection import is_model_file, list_parts
from edgespec.models.head_files import is_head
from edgespec.models.heads import (
    KIND_NAMES,
    check_kind,
    choose_head_drafter,
    drafter_of,
    naming_heads,
    read_draft,
    runs,
)
from edgespec.models.hub import Hub
from edgespec.models.references import Alias, LocalPath, Reference, parse_reference
from edgespec.models.registry import Registry
from edgespec.models.resolve import (
    ResolvedPair,
    Source,
    choose_pair,
    find_local,
    find_pard_token,
    is_here,
    resolve_source,
)
from edgespec.models.tokenizer_compat import find_tokenizer_mismatch
from edgespec.models.versions import BASE, AdaptedDrafts, AdaptedPair
from edgespec.progress import notice

if TYPE_CHECKING:
    from edgespec.models.load_config import LoadConfig

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

    def find_all(self) -> list[DrafterPlan]:
        """All that are available: those that need nothing, the models that the registry pairs with the target, a head.

        The user is told what was left out.
        """
        found = []
        has_memory = self.request.memory is not None
        for spec in drafter_specs().values():
            is_there = {"nothing": True, "memory": has_memory, "model": self._paired(spec) is not None}
            if spec.in_auto and is_there.get(spec.needs):
                try:
                    found.append(self.find(DrafterPlan(spec)))
                except EdgespecError as refusal:
                    notice(f"Drafting without {self._paired(spec)}: {refusal.message}")
        try:
            head = self._find_head(None)
        except DraftRefused as refusal:
            notice(f"Drafting without a head: {refusal.message}")
        else:
            found += [head] if head is not None else []
        return found

    def find(self, term: DrafterPlan) -> DrafterPlan:
        """Complete the plan of a drafter that the user named. Raises DraftRefused, InvalidRequest."""
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

    def _find_model(self, spec: DrafterSpec, reference: Reference) -> DrafterPlan:
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
        return DrafterPlan(spec, model=PlannedModel(reference, source, facts), mask_token=token, head=head)

    def _find_named_head(self, spec: DrafterSpec) -> DrafterPlan:
        head = replace(self, request=replace(self.request, fetch_heads=True))._find_head(spec)
        if head is None:
            raise DraftRefused(
                f"there is no {spec.name} head in the target's file, beside it or in the registry.",
                hint=f"Draft by ngram, or name one: {spec.name}:REF.",
            )
        return replace(head, found="")

    def _find_head(self, spec: DrafterSpec | None) -> DrafterPlan | None:
        """The first head that fits, which is one for `spec` if given.

        None if there is no head. Raises DraftRefused with the reasons if none of those that are there fits.
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

    def _list_heads(self, spec: DrafterSpec | None) -> Iterator[tuple[str, Callable[[], DrafterPlan]]]:
        """(where it is, what reads it) of the heads that are there, the best known first.

        Reading one raises EdgespecError if it does not fit, or is not to be downloaded.
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
        return pair if pair is not None and read_active(pair) != BASE else None

    def _read_trained_head(self, pair: AdaptedPair) -> DrafterPlan:
        """Raises InvalidModelFile for a damaged or missing version."""
        version = pair.active()
        assert version is not None
        found = self._find_model(drafter_of("eagle3"), LocalPath(version.path))
        return replace(found, adaptation=Adaptation(pair, version.card.version, version.card))

    def _read_own_head(self, head: HeadSpec) -> DrafterPlan:
        check_kind(self.backend, "the head in the target's file", head.kind)
        return DrafterPlan(drafter_of(head.kind), model=self.target, head=head)

    def _read_paired_head(self, reference: Reference, kind: HeadKind) -> DrafterPlan:
        check_kind(self.backend, str(reference), kind)
        if not self.request.fetch_heads and not is_here(reference, self.hub):
            pull = f"`edgespec pull {self.pair.name}`"
            raise DraftRefused(
                f"{reference}, {KIND_NAMES[kind]} for this target, is not downloaded; {pull} does that.",
                hint=f"Run {pull}.",
            )
        return self._find_model(drafter_of(kind), reference)
