"""Plans with adapted drafts: the version in use takes the place of its base draft, and is told of."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from edgespec.backends import FileBackend
from edgespec.backends.options import LoadOptions
from edgespec.formats.gguf_validate import read_file
from edgespec.models.adapted import is_outdated
from edgespec.models.drafts import DrafterPlan
from edgespec.models.hub import Hub
from edgespec.models.load_config import LoadConfig
from edgespec.models.plan import Plan, plan
from edgespec.models.registry import load_registry
from edgespec.models.report import describe_plan
from edgespec.models.resolve import LocalModel, find_pard_token
from edgespec.models.versions import BASE, AdaptedDrafts, AdaptedPair
from tests.formats.head_files import H, V, write, write_eagle3
from tests.gguf_models import DRAFT, REPOSITORY, TARGET, llama
from tests.models.test_versions import CARD
from tests.reporter import Heard

PARD = REPOSITORY / "tests" / "fixtures" / "pard" / "model.gguf"
Planned = Callable[..., Plan]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "adapted"


@pytest.fixture
def pair(folder: Path) -> AdaptedPair:
    return AdaptedDrafts(folder).pair(TARGET, DRAFT)


@pytest.fixture
def hub(tmp_path: Path) -> Hub:
    return Hub("https://nowhere.invalid", tmp_path / "hub", offline=True)


@pytest.fixture
def planned(tmp_path: Path, folder: Path, hub: Hub, heard: Heard) -> Planned:
    def plan_it(draft: str = "auto", *, backend: FileBackend = "llamacpp", model: Path | None = None) -> Plan:
        options = LoadOptions(threads=1, context_size=128)
        name = None if model is None else str(model)
        request = LoadConfig(name, backend, draft, load=options, adapted=folder)
        return plan(request, load_registry(tmp_path / "none.toml"), hub)

    return plan_it


def save_model(path: Path) -> None:
    """A draft with the vocabulary of the pair."""
    llama(path)


def model_of(found: Plan) -> DrafterPlan:
    (drafter,) = [each for each in found.drafters if each.spec.name == "model"]
    return drafter


@pytest.mark.parametrize(
    ("draft", "backend"), [("auto", "llamacpp"), ("model", "llamacpp"), (str(DRAFT), "llamacpp"), ("auto", "mlx")]
)
def test_the_version_in_use_takes_the_place_of_its_base(
    planned: Planned, pair: AdaptedPair, heard: Heard, draft: str, backend: FileBackend
) -> None:
    before = planned(draft, backend=backend)
    assert before.findings == [] and model_of(before).card is None and "version" not in model_of(before).label
    card = pair.add(CARD, save_model)
    found = planned(draft, backend=backend)
    drafter = model_of(found)
    version = pair.active()
    assert version is not None and drafter.model is not None
    assert drafter.model.source == LocalModel(version.path, "gguf") and drafter.card == card
    assert drafter.label == f"{model_of(before).label} (version 1)"
    assert found.findings == [f"Drafting with version 1 of the draft, adapted on {card.date}."]
    assert found.fit.draft != before.fit.draft, "the memory of the version's own file"
    assert describe_plan(before).to_dict()["adapted_drafts"] == [] and describe_plan(found).to_dict()[
        "adapted_drafts"
    ] == [{"base": "draft", "version": 1, "date": card.date, "tokens_per_round": 2.5, "tokens_per_round_of_base": 2.0}]
    assert found.sources == [found.target, LocalModel(version.path, "gguf")] and heard.notices == []
    pair.use(BASE)
    assert model_of(planned(draft, backend=backend)).label == model_of(before).label


def test_another_target_has_versions_of_its_own(planned: Planned, pair: AdaptedPair, tmp_path: Path) -> None:
    pair.add(CARD, save_model)
    target = tmp_path / "target.gguf"
    shutil.copy(TARGET, target)
    assert model_of(planned(str(DRAFT), model=target)).card is not None, "the same model at another place"
    llama(target)
    assert model_of(planned(str(DRAFT), model=target)).card is None


def truncate(pair: AdaptedPair) -> None:
    (pair.folder / "1" / "draft.gguf").write_bytes(b"GGUF")


def forget_choice(pair: AdaptedPair) -> None:
    (pair.folder / "active").write_text("?")


def damage_header(pair: AdaptedPair) -> None:
    def save(path: Path) -> None:
        path.write_bytes(b"no model")

    pair.add(CARD, save)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (truncate, "the files of version 1 of the draft are damaged."),
        (forget_choice, "it is not known which version of the draft is in use."),
        (damage_header, "'draft.gguf' is not a GGUF file"),
    ],
)
def test_the_base_is_used_where_a_version_cannot_be(
    planned: Planned, pair: AdaptedPair, heard: Heard, damage: Callable[[AdaptedPair], None], told: str
) -> None:
    base = model_of(planned())
    pair.add(CARD, save_model)
    damage(pair)
    found = model_of(planned())
    assert found.model is not None and base.model is not None
    assert (found.model.source, found.label, found.card) == (base.model.source, base.label, None)
    (notice,) = heard.notices
    assert notice.startswith(f"Drafting with {base.label} itself: {told}")
    assert not is_outdated(found), "it is not tried again"
    pair.use(BASE)
    assert not is_outdated(model_of(planned()))


def test_an_engine_hears_of_another_version(planned: Planned, pair: AdaptedPair) -> None:
    drafter = model_of(planned())
    assert not is_outdated(drafter)
    pair.add(CARD, save_model)
    assert is_outdated(drafter) and not is_outdated(model_of(planned()))
    pair.use(BASE)
    assert not is_outdated(drafter)
    (pair.folder / "active").write_text("?")
    assert is_outdated(drafter)


def test_a_head_and_a_pard_model_have_versions(planned: Planned, folder: Path, heard: Heard, tmp_path: Path) -> None:
    target = write(tmp_path / "target.gguf", "llama", {"embedding_length": H}, {"token_embd.weight": (V, H)})
    head = write_eagle3(tmp_path / "head.gguf")
    pair = AdaptedDrafts(folder).pair(target, head)
    card = pair.add(CARD, lambda path: shutil.copy(head, path))
    found = planned(model=target)
    drafter = found.drafters[-1]
    assert drafter.spec.name == "eagle3" and drafter.card == card and drafter.label == f"{head} (version 1)"
    assert found.findings == [
        f"Drafting with {head}, an EAGLE-3 head that lies beside the target.",
        f"Drafting with version 1 of the draft, adapted on {card.date}.",
    ]
    versions = AdaptedDrafts(folder).pair(TARGET, PARD)
    versions.add(CARD, lambda path: shutil.copy(PARD, path))
    (pard,) = planned(f"pard:{PARD}").drafters
    assert pard.card is not None and pard.mask_token == find_pard_token(read_file(PARD))
