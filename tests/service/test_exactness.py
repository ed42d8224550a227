"""The width of --exact on load: chosen, shown, kept by another draft, refused where it cannot keep the promise."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edgespec.backends.options import LoadOptions
from edgespec.errors import InvalidRequest
from edgespec.planner.plan import LoadConfig
from edgespec.service.load import LoadedModel, Loader
from tests.models import MAKERS, TARGET
from tests.reporter import Heard


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def heard() -> Iterator[Heard]:
    yield Heard()


def load(heard: Heard, path: Path, width: int | None = None, draft: str = "ngram") -> LoadedModel:
    options = LoadOptions(threads=1, context_size=128, exact=True, exact_width=width)
    return Loader(heard, lambda: None).load(LoadConfig(str(path), load=options, draft=draft, draft_max=3))


def test_quantized_weights_on_a_cpu_need_no_width(heard: Heard) -> None:
    loaded = load(heard, TARGET)
    assert loaded.info.exact_width is None and loaded.engine.target.is_row_invariant
    assert loaded.engine.target.no_tree_reason is None
    loaded.engine.close()


def test_another_draft_keeps_the_width(heard: Heard) -> None:
    loaded = load(heard, TARGET, width=4)
    assert loaded.info.exact_width == loaded.key.exact_width == 4 and loaded.info.context_size == 125
    config = LoadConfig(
        str(TARGET), load=LoadOptions(threads=1, context_size=128, exact=True, exact_width=4), draft="none"
    )
    changed = Loader(heard, lambda: None).change_draft(loaded, config)
    assert changed.info.exact_width == changed.key.exact_width == 4
    changed.engine.close()


def test_a_tree_is_said_to_become_a_chain(heard: Heard) -> None:
    config = LoadConfig(
        str(TARGET),
        load=LoadOptions(threads=1, context_size=128, exact=True, exact_width=2),
        draft="ngram",
        draft_max=2,
        draft_tree=4,
    )
    loaded = Loader(heard, lambda: None).load(config)
    assert any("chains, not trees" in text for text in heard.notices)
    loaded.engine.close()


def test_models_that_run_accepted_tokens_again_draft_nothing(heard: Heard, tmp_path: Path) -> None:
    path = tmp_path / "mamba.gguf"
    MAKERS["mamba"](path)
    with pytest.raises(InvalidRequest, match="4 rows"):
        load(heard, path, width=4)
    loaded = load(heard, path)
    assert loaded.info.exact_width == 1 and any("nothing is drafted" in text for text in heard.notices)
    loaded.engine.close()


@pytest.mark.parametrize(("exact", "width"), [(True, 3), (True, 16), (False, 4)])
def test_other_widths_are_refused(exact: bool, width: int) -> None:
    with pytest.raises(InvalidRequest, match="1, 2, 4 or 8, with --exact"):
        LoadOptions(exact=exact, exact_width=width)
