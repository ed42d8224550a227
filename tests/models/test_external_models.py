"""Models of LM Studio, Ollama and llama.cpp: found, named, opened, and never a reason to fail."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from edgespec.models import external_models as module
from edgespec.models.external_models import (
    ExternalModel,
    ModelFolder,
    find_external_models,
    list_model_folders,
    read_gguf_size,
)
from tests.cli.conftest import Cli, cli, environment  # noqa: F401 - fixtures
from tests.gguf_models import DRAFT, TARGET
from tests.models.stores import MODEL_LAYER, ollama, ollama_blob, ollama_manifest, put

LIBRARY = "registry.ollama.ai/library"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "ollama"


def names(*places: ModelFolder) -> list[str]:
    return [model.name for model in find_external_models(places)]


def test_an_lm_studio_file(tmp_path: Path) -> None:
    path = put(DRAFT, tmp_path / "someone" / "Model-GGUF" / "Model-Q8_0.gguf")
    put(DRAFT, tmp_path / "someone" / "Model-GGUF" / "mmproj-Model.gguf")
    path.with_name("notes.gguf").write_text("not a model")
    path.with_name("empty.gguf").touch()
    found = find_external_models([ModelFolder("lm studio", tmp_path)])
    assert found == [ExternalModel("lm studio: someone/Model-GGUF/Model-Q8_0", path, DRAFT.stat().st_size)]


def test_parts_count_once_and_only_together(tmp_path: Path) -> None:
    parts = [put(DRAFT, tmp_path / "a" / f"big-Q4_0-0000{n}-of-00002.gguf") for n in (1, 2)]
    place = ModelFolder("lm studio", tmp_path)
    assert find_external_models([place]) == [ExternalModel("lm studio: a/big-Q4_0", parts[0], 2 * DRAFT.stat().st_size)]
    parts[1].write_bytes(b"GG")
    assert not find_external_models([place])
    parts[1].unlink()
    assert not find_external_models([place]) and read_gguf_size(parts[0]) is None


def test_ollama_names_follow_its_own(store: Path) -> None:
    manifest = ollama_manifest(DRAFT, store)
    names_by_file = {
        f"{LIBRARY}/llama3.1/8b": "llama3.1:8b",
        "registry.ollama.ai/me/mine/latest": "me/mine:latest",
        "hf.co/user/repo-GGUF/Q4_K_M": "hf.co/user/repo-GGUF:Q4_K_M",
        "10.0.0.1%3A5000/ns/model/latest": "10.0.0.1:5000/ns/model:latest",
    }
    for n, (file, shown) in enumerate(names_by_file.items()):
        other = ollama_blob(store, DRAFT.read_bytes() + bytes([n]))
        path = ollama(store, file, {"layers": [{"mediaType": MODEL_LAYER, "digest": other}]})
        assert names(ModelFolder("ollama", store)) == [f"ollama: {shown}"]
        path.unlink()
    ollama(store, f"{LIBRARY}/one/8b", manifest)
    ollama(store, f"{LIBRARY}/one/latest", manifest)
    (found,) = find_external_models([ModelFolder("ollama", store)])
    assert found.name == "ollama: one:8b", "two tags of one blob are one model"
    assert found.path.parent == store / "blobs" and found.size == DRAFT.stat().st_size


def test_newer_ollama_manifests(store: Path) -> None:
    """Linked to blobs, lists of manifests for several runners, in a folder of their own that goes first."""
    old, new = ollama_manifest(DRAFT, store), ollama_manifest(TARGET, store)
    ollama(store, f"{LIBRARY}/moved/1b", old)
    blob = store / "blobs" / ollama_blob(store, json.dumps(new).encode()).replace(":", "-")
    link = store / "manifests-v2" / "ollama.com" / "library" / "moved" / "1b"
    link.parent.mkdir(parents=True)
    link.symlink_to(os.path.relpath(blob, link.parent))
    (found,) = find_external_models([ModelFolder("ollama", store)])
    assert (found.name, found.size) == ("ollama: moved:1b", TARGET.stat().st_size)
    tensors = {"runner": "mlx", "layers": [{"mediaType": "application/vnd.ollama.image.tensor", "digest": "x"}]}
    for child in (old, {"runner": "ollama", "digest": ollama_blob(store, json.dumps(old).encode())}):
        ollama(store, "ollama.com/library/listed/1b", {"manifests": ["?", tensors, child]}, "manifests-v2")
        assert names(ModelFolder("ollama", store)) == ["ollama: listed:1b", "ollama: moved:1b"]


def test_an_ollama_model_with_an_adapter_is_left_out(store: Path) -> None:
    manifest = ollama_manifest(DRAFT, store)
    adapter = {"mediaType": "application/vnd.ollama.image.adapter", "digest": manifest["layers"][0]["digest"]}
    ollama(store, f"{LIBRARY}/tuned/1b", {**manifest, "layers": [*manifest["layers"], adapter]})
    ollama(store, f"{LIBRARY}/several/1b", {**manifest, "layers": manifest["layers"] * 2})
    ollama(store, f"{LIBRARY}/text/1b", {"layers": [{"mediaType": MODEL_LAYER, "digest": ollama_blob(store, b"no")}]})
    assert not find_external_models([ModelFolder("ollama", store)])


@pytest.mark.parametrize(
    "manifest",
    [
        "", "[]", "null", "{", "[" * 100_000, '{"layers": 7}', '{"layers": [null, 3, {}]}', '{"manifests": {}}',
        json.dumps({"layers": [{"mediaType": MODEL_LAYER}]}),
        json.dumps({"layers": [{"mediaType": MODEL_LAYER, "digest": 5}]}),
        json.dumps({"layers": [{"mediaType": MODEL_LAYER, "digest": "sha256:../../secret"}]}),
        json.dumps({"layers": [{"mediaType": MODEL_LAYER, "digest": "sha256:" + "0" * 64}]}),
        json.dumps({"manifests": [{"digest": "sha256:" + "0" * 64}]}),
    ],
    ids=range(13),
)  # fmt: skip
def test_a_broken_manifest_is_skipped(store: Path, manifest: str) -> None:
    ollama(store, f"{LIBRARY}/broken/1b", manifest)
    ollama(store, f"{LIBRARY}/sound/1b", ollama_manifest(DRAFT, store))
    ollama(store, "too/short", ollama_manifest(DRAFT, store))
    assert names(ModelFolder("ollama", store)) == ["ollama: sound:1b"]


def test_llama_cpp_files_and_repositories(tmp_path: Path) -> None:
    flat = put(DRAFT, tmp_path / "user_repo_model-q8_0.gguf")
    blob = put(TARGET, tmp_path / "models--u--r-GGUF" / "blobs" / "0123")
    snapshot = tmp_path / "models--u--r-GGUF" / "snapshots" / "abc" / "r-Q8_0.gguf"
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(blob)
    place = ModelFolder("llama.cpp", tmp_path)
    assert names(place) == ["llama.cpp: u/r-GGUF/r-Q8_0", "llama.cpp: user_repo_model-q8_0"]
    known = find_external_models([place], exclude=[blob])
    assert [model.path for model in known] == [flat], "what is known is left out"


def test_damaged_entries_raise_nothing(tmp_path: Path) -> None:
    good = put(DRAFT, tmp_path / "a" / "good.gguf")
    (tmp_path / "a" / "again").symlink_to(tmp_path)
    (tmp_path / "a" / "itself").symlink_to("itself")
    (tmp_path / "a" / "itself.gguf").symlink_to("itself.gguf")
    (tmp_path / "a" / "gone.gguf").symlink_to("nowhere")
    (tmp_path / "a" / "folder.gguf").mkdir()
    os.mkfifo(tmp_path / "a" / "silent.gguf")
    put(DRAFT, tmp_path / "a" / "two\nlines.gguf").write_bytes(DRAFT.read_bytes() + b"x")
    locked = put(DRAFT, tmp_path / "locked" / "hidden.gguf")
    locked.parent.chmod(0)
    absent = [ModelFolder("ollama", tmp_path / "absent"), ModelFolder("ollama", good)]
    try:
        found = find_external_models([ModelFolder("lm studio", tmp_path), *absent])
    finally:
        locked.parent.chmod(0o700)
    assert {model.path for model in found} - {locked} == {good}


def test_a_huge_tree_is_read_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ENTRIES", 300)
    for n in range(400):
        (tmp_path / f"{n}").mkdir()
    put(DRAFT, tmp_path / "0" / "late.gguf")
    deep = put(DRAFT, tmp_path.joinpath(*"abcdefgh") / "deep.gguf")
    assert not find_external_models([ModelFolder("lm studio", tmp_path)])
    assert not find_external_models([ModelFolder("lm studio", tmp_path / "a")]), "too deep"
    assert [model.path for model in find_external_models([ModelFolder("lm studio", deep.parents[2])])] == [deep]


def test_folders_follow_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OLLAMA_MODELS", "LLAMA_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("sys.platform", "linux")
    studio, moved = tmp_path / ".lmstudio", tmp_path / "moved"
    plain = {ModelFolder("lm studio", studio / "models"), ModelFolder("ollama", tmp_path / ".ollama" / "models"),
             ModelFolder("lm studio", tmp_path / ".cache" / "lm-studio" / "models"),
             ModelFolder("ollama", Path("/usr/share/ollama/.ollama/models")),
             ModelFolder("llama.cpp", tmp_path / ".cache" / "llama.cpp")}  # fmt: skip
    assert set(list_model_folders()) == plain
    studio.mkdir()
    for settings in ("{", "[]", '{"downloadsFolder": 3}', '{"downloadsFolder": "relative"}', '{"downloadsFolder": ""}'):
        (studio / "settings.json").write_text(settings)
        assert set(list_model_folders()) == plain
    (studio / "settings.json").write_text('{"downloadsFolder": "\\u0000\\ud800/~"}')
    assert not [
        model for model in find_external_models() if not model.name.startswith("ollama")
    ]  # Ollama's service may be here
    (studio / "settings.json").write_text(json.dumps({"downloadsFolder": str(moved)}))
    assert set(list_model_folders()) - plain == {ModelFolder("lm studio", moved)}
    (tmp_path / ".lmstudio-home-pointer").write_text(f"{moved}\n")
    assert ModelFolder("lm studio", moved / "models") in list_model_folders()
    monkeypatch.setenv("OLLAMA_MODELS", f' "{moved}" ')
    monkeypatch.setenv("LLAMA_CACHE", str(moved))
    found = list_model_folders()
    assert [folder.path for folder in found if folder.program != "lm studio"] == [moved, moved]
    monkeypatch.delenv("LLAMA_CACHE")
    monkeypatch.setattr("sys.platform", "darwin")
    assert ModelFolder("llama.cpp", tmp_path / "Library" / "Caches" / "llama.cpp") in list_model_folders()


def test_list_shows_them_and_run_opens_them(cli: Cli, tmp_path: Path) -> None:  # noqa: F811
    store, studio = tmp_path / ".ollama" / "models", tmp_path / ".lmstudio" / "models"
    ollama(store, f"{LIBRARY}/python/6m", ollama_manifest(TARGET, store))
    put(DRAFT, studio / "me" / "python-GGUF" / "draft.gguf")
    unset = {"OLLAMA_MODELS": "", "LLAMA_CACHE": ""}
    listed = {each["name"]: each for each in json.loads(cli("list", "--json", **unset).stdout)["elsewhere"]}
    assert listed["lm studio: me/python-GGUF/draft"]["path"] == str(studio / "me" / "python-GGUF" / "draft.gguf")
    blob = listed["ollama: python:6m"]
    assert blob["bytes"] == TARGET.stat().st_size
    options = ("--max-tokens", "2", "--draft", "none", "--threads", "1")
    done = cli("run", "def f", "--model", blob["path"], *options)
    assert done.returncode == 0, done.stderr
