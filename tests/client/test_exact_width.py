"""The width of --exact on load: chosen, shown, kept by another draft, refused where it cannot keep the promise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgespec.autopilot.settings_store import SettingsStore
from edgespec.backends.options import LoadOptions
from edgespec.backends.settings import RuntimeSettings
from edgespec.engine.loaded_model import LoadedModel
from edgespec.engine.open import Loader
from edgespec.errors import InvalidRequest
from edgespec.formats.fingerprint import fingerprint_weights
from edgespec.models.load_config import LoadConfig
from tests.gguf_models import MAKERS, TARGET
from tests.reporter import Heard


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path / "cache"))


def load(heard: Heard, path: Path, width: int | None = None, draft: str = "ngram") -> LoadedModel:
    options = LoadOptions(threads=1, context_size=128, exact=True, exact_width=width)
    return Loader().load(LoadConfig(str(path), load=options, draft=draft, draft_max=3))


def test_quantized_weights_on_a_cpu_need_no_width(heard: Heard) -> None:
    loaded = load(heard, TARGET)
    assert loaded.info.exact_width is None and loaded.engine.target.is_row_invariant
    assert loaded.engine.target.no_tree_reason is None
    loaded.engine.close()


def test_another_draft_keeps_the_width(heard: Heard) -> None:
    loaded = load(heard, TARGET, width=4)
    assert loaded.info.exact_width == loaded.key["exact_width"] == 4 and loaded.info.context_size == 125
    config = LoadConfig(
        str(TARGET), load=LoadOptions(threads=1, context_size=128, exact=True, exact_width=4), draft="none"
    )
    changed = Loader().change_draft(loaded, config)
    assert changed.info.exact_width == changed.key["exact_width"] == 4
    changed.engine.close()


def test_models_that_run_accepted_tokens_again_draft_nothing(heard: Heard, tmp_path: Path) -> None:
    path = tmp_path / "mamba.gguf"
    MAKERS["mamba"](path)
    with pytest.raises(InvalidRequest, match="4 rows"):
        load(heard, path, width=4)
    loaded = load(heard, path)
    assert loaded.info.exact_width == 1 and any("the width 1" in text for text in heard.notices)
    loaded.engine.close()


@pytest.mark.parametrize(("exact", "width"), [(True, 3), (False, 4)])
def test_other_widths_are_refused(exact: bool, width: int) -> None:
    with pytest.raises(InvalidRequest, match="1, 2, 4 or 8, with --exact"):
        LoadOptions(exact=exact, exact_width=width)


def test_measured_threads_do_not_change_the_width(heard: Heard, tmp_path: Path) -> None:
    """Else a text would change with the cores that happen to be idle."""
    path = tmp_path / "floats.gguf"
    MAKERS["llama"](path)
    options = LoadOptions(context_size=128, exact=True)
    widths = tmp_path / "cache" / "calibration" / f"{fingerprint_weights(path)}-exact.json"
    found = []
    for settings in (RuntimeSettings(), RuntimeSettings(threads=1, batch_threads=1)):
        SettingsStore(path).save("llamacpp", options, settings)
        loaded = Loader().load(LoadConfig(str(path), load=options, draft="ngram", draft_max=3))
        found.append((loaded.key["batch_threads"], loaded.info.exact_width))
        loaded.engine.close()
    assert [threads for threads, _ in found] == [None, 1]
    assert len(json.loads(widths.read_text())["entries"]) == 1 and found[0][1] == found[1][1]


@pytest.mark.parametrize("width", [True, 3, None])
def test_a_damaged_width_is_measured_again(heard: Heard, tmp_path: Path, width: object) -> None:
    path = tmp_path / "floats.gguf"
    MAKERS["llama"](path)
    loaded = load(heard, path)
    chosen = loaded.info.exact_width
    loaded.engine.close()
    widths = tmp_path / "cache" / "calibration" / f"{fingerprint_weights(path)}-exact.json"
    entries = json.loads(widths.read_text())
    assert entries["entries"][0]["exact"] == {"width": chosen}
    entries["entries"][0]["exact"]["width"] = width
    widths.write_text(json.dumps(entries))
    loaded = load(heard, path)
    assert type(loaded.info.exact_width) is int
    loaded.engine.close()


def test_a_context_without_room_beside_the_rows_is_refused(heard: Heard) -> None:
    options = LoadOptions(threads=1, context_size=8, exact=True, exact_width=8)
    with pytest.raises(InvalidRequest, match="no room for a text beside forwards of 8 rows") as refused:
        Loader().load(LoadConfig(str(TARGET), load=options, draft="none"))
    assert refused.value.hint == "Set a larger --ctx."
