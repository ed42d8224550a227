"""What there is to choose from, with real files: the packaged pair, a hub's cache, MLX folders, other programs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from edgespec.backends import FileBackend
from edgespec.cancel import cancellable
from edgespec.errors import Cancelled
from edgespec.formats.gguf_validate import read_file
from edgespec.formats.mlx_folder import read_folder
from edgespec.machines.memory import RESERVE_BYTES, Memory
from edgespec.models import catalogue as module
from edgespec.models import size_facts
from edgespec.models.catalogue import Candidate, Catalogue
from edgespec.models.external_models import ExternalModel
from edgespec.models.fit import estimate_memory
from edgespec.models.hub import Hub
from edgespec.models.references import HubFile, HubQuant, HubReference, HubRepo, LocalPath, parse_reference
from edgespec.models.registry import load_registry
from edgespec.units import GIB
from tests.cli.conftest import Cli, cli, environment  # noqa: F401 - fixtures
from tests.formats.head_files import write_eagle3, write_mtp
from tests.gguf_models import DRAFT, TARGET
from tests.mlx_models import DENSE, make_folder
from tests.models.hubserver import HubServer
from tests.models.serving import FILE, REPO, serve
from tests.models.stores import ollama, ollama_manifest, put

SMALL, MLX = "someone/Small-GGUF", "mlx-community/M-4bit"
OTHER_FILE = "Model-Q8_0.gguf"
PAIR = f'[pair.gguf]\ntarget = "hf:{REPO}/{FILE}"\ndraft = "{SMALL}:Q4_0"\n'
HUGE = f'{{"model_type": "m", "n_layer": 2, "n_embd": {10**400}}}'
ROOMY = Memory(RESERVE_BYTES + GIB)

Shown = Callable[..., list[Candidate]]


@pytest.fixture(autouse=True)
def elsewhere_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other programs' folders are below `tmp_path`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path / "llama.cpp"))


@pytest.fixture
def shown(hub: Hub, tmp_path: Path) -> Shown:
    """The catalogue with `toml` laid over the shipped aliases, without those but the embedded pair."""
    shipped = set(load_registry(tmp_path / "none").entries) - {"python-6m"}

    def show(toml: str = "", backend: FileBackend = "llamacpp", memory: Memory = ROOMY) -> list[Candidate]:
        (tmp_path / "models.toml").write_text(toml, encoding="utf-8")
        found = Catalogue(load_registry(tmp_path / "models.toml"), hub, backend, memory).list_local()
        return [entry for entry in found if entry.name not in shipped]

    return show


def fetch(hub: Hub, reference: HubReference) -> Path:
    return hub.fetch(hub.resolve(reference))


def usable(count: int) -> Memory:
    return Memory(RESERVE_BYTES + count)


def test_aliases_then_downloads_then_other_programs(hub: Hub, root: Path, tmp_path: Path) -> None:
    for name, used in (("a-Q8_0.gguf", 1000), ("b-Q8_0.gguf", 3000), ("c-Q8_0.gguf", 2000)):
        serve(root, name, pad_bytes=used)
        os.utime(fetch(hub, HubFile(REPO, name)), (used, used))
    put(DRAFT, tmp_path / ".lmstudio" / "models" / "me" / "r" / "x.gguf").with_name("same.gguf").symlink_to(
        fetch(hub, HubFile(REPO, "a-Q8_0.gguf"))
    )
    (tmp_path / "models.toml").write_text(f"[first.gguf]\ntarget = '{TARGET}'\n")
    registry = load_registry(tmp_path / "models.toml")
    found = Catalogue(registry, hub, "llamacpp", ROOMY).list_local()
    aliases = [*load_registry(tmp_path / "none").entries, "first"]
    downloads = [f"hf:{REPO}/{letter}-Q8_0.gguf" for letter in "bca"]
    assert [entry.name for entry in found] == [*aliases, *downloads, "lm studio: me/r/x"]
    assert [entry.origin for entry in found] == ["alias"] * len(aliases) + ["cache"] * 3 + ["elsewhere"]
    here = {"python-6m", "smollm2-135m", "first", *downloads, "lm studio: me/r/x"}
    assert {entry.name for entry in found if entry.here} == here
    sized = [entry for entry in found if entry.origin == "alias" and not entry.here]
    assert sized and all(entry.fit and entry.missing and not entry.target.size for entry in sized), "by the registry"


def test_it_can_be_cancelled(shown: Shown) -> None:
    """In the threads that read headers too."""

    def cancel() -> None:
        raise Cancelled

    with pytest.raises(Cancelled), cancellable(cancel):
        shown()


@pytest.mark.parametrize("backend", ["llamacpp", "mlx"])
def test_the_embedded_pair_is_here(shown: Shown, backend: FileBackend) -> None:
    (entry,) = shown(backend=backend)
    assert (entry.name, entry.opens, entry.backend, entry.fit) == ("python-6m", "python-6m", backend, "fits")
    assert entry.here and "Python" in entry.description
    assert entry.target.size == TARGET.stat().st_size
    assert entry.draft is not None and entry.draft.size == DRAFT.stat().st_size


def test_an_alias_as_its_files_arrive(hub: Hub, root: Path, server: HubServer, shown: Shown) -> None:
    """Its downloads are shown with it, not again by themselves; nothing is asked of the hub."""
    target = serve(root, pad_bytes=4096)
    draft = serve(root, "small-Q4_0.gguf", repo=SMALL)
    absent = shown(PAIR)[1]
    assert (absent.name, absent.here, absent.target.size, absent.fit) == ("pair", False, None, None)
    assert absent.draft is not None and not absent.draft.here and not server.log
    fetch(hub, HubQuant(SMALL, "Q4_0"))
    _, half = shown(PAIR)
    assert half.draft is not None and half.draft.size == draft.stat().st_size
    assert (half.here, half.target.here, half.fit) == (False, False, None)
    fetch(hub, HubFile(REPO, FILE))
    asked = len(server.log)
    _, whole = shown(PAIR)
    assert whole.here and whole.target.size == target.stat().st_size and whole.fit == "fits"
    hub.remove(HubQuant(SMALL, "Q4_0"))
    _, alone = shown(PAIR)
    assert (alone.here, alone.target.here, alone.fit) == (False, True, "fits")
    assert len(server.log) == asked


def test_an_alias_without_a_model_for_this_runtime(shown: Shown) -> None:
    both = f'[a.mlx]\ntarget = "{MLX}"\n[b.gguf]\ntarget = "{SMALL}"\n[b.mlx]\ntarget = "{MLX}"\n'
    on = {
        name: {e.name: (e.backend, str(e.target.reference)) for e in shown(both, name)} for name in ("llamacpp", "mlx")
    }
    assert on["llamacpp"]["a"] == on["mlx"]["a"] == on["mlx"]["b"] == ("mlx", MLX)
    assert on["llamacpp"]["b"] == ("llamacpp", SMALL)


def test_a_folder_from_the_hub(hub: Hub, root: Path, shown: Shown) -> None:
    """A whole MLX model; an alias that shows a GGUF file here does not hide it."""
    price_of = estimate_memory(read_folder(make_folder(root / MLX, DENSE)), 2048)
    fetch(hub, HubRepo(MLX))
    size = sum(file.stat().st_size for file in (root / MLX).iterdir())
    toml = f'[a.gguf]\ntarget = "{SMALL}"\n[a.mlx]\ntarget = "{MLX}"\ndraft = "{SMALL}"\n'
    _, alias, download = shown(toml, memory=usable(price_of.total))
    assert not alias.here
    assert (download.opens, download.backend, download.target.size, download.fit) == (MLX, "mlx", size, "tight")
    assert shown(toml, memory=usable(price_of.total - 1))[2].fit == "does not fit"
    _, alias = shown(toml, "mlx")
    assert alias.target.size == size and alias.fit == "fits"
    assert not shown(f'[wrong.gguf]\ntarget = "{MLX}"\n')[1].here, "llama.cpp does not open it"


def test_what_an_alias_names_on_this_machine(tmp_path: Path, shown: Shown) -> None:
    folder = make_folder(tmp_path / "folder", DENSE)
    file = put(TARGET, tmp_path / "llama.cpp" / "own.gguf")
    toml = f"[own.gguf]\ntarget = '{file}'\n[folder.mlx]\ntarget = '{folder}'\n[gone.gguf]\ntarget = '{file}x.gguf'\n"
    _, own, mlx, gone = shown(toml)
    assert own.target.size == file.stat().st_size and own.fit == "fits", "and not again among llama.cpp's"
    assert mlx.target.size == (folder / "model.safetensors").stat().st_size and mlx.fit == "fits"
    assert not gone.here and gone.fit is None
    (folder / "model.safetensors").unlink()
    file.write_bytes(b"else")
    assert [(entry.here, entry.fit) for entry in shown(toml)[1:]] == [(False, None)] * 3


def test_the_fit_of_a_pair_at_its_thresholds(shown: Shown) -> None:
    target, draft = (estimate_memory(read_file(path), 2048).total for path in (TARGET, DRAFT))

    def fit(count: int) -> str | None:
        return shown(memory=usable(count))[0].fit

    comfortable = -(-(target + draft) * 8 // 7)
    assert (fit(comfortable), fit(comfortable - 1)) == ("fits", "tight")
    assert (fit(target), fit(target - 1), fit(0)) == ("tight", "does not fit", "does not fit")


def test_models_of_other_programs(tmp_path: Path, shown: Shown) -> None:
    ollama(tmp_path / "ollama", "registry.ollama.ai/library/python/6m", ollama_manifest(TARGET, tmp_path / "ollama"))
    path = put(DRAFT, tmp_path / "llama.cpp" / "draft.gguf")
    _, cpp, other = shown(backend="mlx")
    assert (cpp.name, cpp.opens, cpp.backend) == ("llama.cpp: draft", str(path), "llamacpp")
    assert (other.name, other.target.size, other.fit) == ("ollama: python:6m", TARGET.stat().st_size, "fits")
    for entry in (cpp, other):
        assert entry.here and entry.draft is None
        assert parse_reference(entry.opens) == entry.target.reference == LocalPath(Path(entry.opens))


def test_split_files_are_priced_together(tmp_path: Path, shown: Shown) -> None:
    for part in (1, 2):
        put(DRAFT, tmp_path / "llama.cpp" / f"big-0000{part}-of-00002.gguf")
    once = estimate_memory(read_file(DRAFT), 2048)
    exactly = once.total + once.weights
    assert [shown(memory=usable(n))[1].fit for n in (exactly, exactly - 1)] == ["tight", "does not fit"]
    assert shown()[1].target.size == 2 * DRAFT.stat().st_size


def test_a_broken_header_is_a_model_of_unknown_fit(tmp_path: Path, shown: Shown) -> None:
    whole = put(TARGET, tmp_path / "whole.gguf")
    cut = tmp_path / "llama.cpp" / "cut.gguf"
    put(TARGET, cut).write_bytes(TARGET.read_bytes()[:5000])
    _, pair, entry = shown(f"[pair.gguf]\ntarget = '{whole}'\ndraft = '{cut}'\n[x.gguf]\ntarget = '{cut}'\n")
    assert entry.here and entry.target.size == 5000 and entry.fit is None
    assert pair.here and pair.fit == "fits", "by its target alone"
    _, other = shown()
    assert (other.origin, other.fit) == ("elsewhere", None)


@pytest.mark.parametrize("config", ["{", HUGE])
def test_a_broken_config_is_a_model_of_unknown_fit(tmp_path: Path, shown: Shown, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "model.safetensors").write_bytes(bytes(100))
    _, entry = shown(f"[m.mlx]\ntarget = '{tmp_path}'\n", "mlx")
    assert entry.here and entry.target.size == 100 and entry.fit is None


def test_removed_between_listing_and_reading(tmp_path: Path, shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    other, listed = put(DRAFT, tmp_path / "llama.cpp" / "draft.gguf"), module.find_external_models

    def then_gone(exclude: set[Path]) -> list[ExternalModel]:
        found = listed(exclude=exclude)
        other.unlink()
        return found

    monkeypatch.setattr(module, "find_external_models", then_gone)
    _, late = shown()
    assert late.name == "llama.cpp: draft" and late.fit is None


def test_a_header_is_read_again_only_where_the_file_changed(
    tmp_path: Path, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, reads = put(DRAFT, tmp_path / "llama.cpp" / "m.gguf"), []
    monkeypatch.setattr(size_facts, "read_parts", lambda path: reads.append(path) or read_file(path))
    memory = usable(estimate_memory(read_file(DRAFT), 2048).total * 8 // 7 + 1)
    assert [shown(memory=memory)[1].fit for _ in range(2)] == ["fits", "fits"] and reads.count(path) == 1
    put(TARGET, path)
    assert shown(memory=memory)[1].fit == "does not fit" and reads.count(path) == 2
    os.utime(path, ns=(1, 1))
    assert shown(memory=memory)[1].fit == "does not fit" and reads.count(path) == 3


def test_heads_are_not_to_choose(shown: Shown, hub: Hub, root: Path, tmp_path: Path) -> None:
    (others := tmp_path / "llama.cpp").mkdir()
    for write in (write_eagle3, partial(write_mtp, trunk=False)):
        (root / SMALL).mkdir(parents=True, exist_ok=True)
        write(root / SMALL / "head-Q8_0.gguf")
        fetch(hub, HubFile(SMALL, "head-Q8_0.gguf"))
        write(others / "head.gguf")
        assert [entry.name for entry in shown()] == ["python-6m"]
        hub.remove(HubFile(SMALL, "head-Q8_0.gguf"))
    write_mtp(others / "whole.gguf", trunk=True)
    assert [entry.name for entry in shown()] == ["python-6m", "llama.cpp: whole"], "a model with its head"


def test_list_has_three_sections(cli: Cli, hub: Hub, root: Path, tmp_path: Path) -> None:  # noqa: F811
    size = serve(root).stat().st_size
    fetch(hub, HubFile(REPO, FILE))
    path = put(DRAFT, tmp_path / "llama.cpp" / "draft.gguf")
    settings = {name: os.environ[name] for name in ("OLLAMA_MODELS", "LLAMA_CACHE")}
    lines = cli("list", HF_HUB_CACHE=str(hub.cache_dir), **settings).stdout.splitlines()
    aliases = lines[1 : lines.index("")]
    assert [line.split()[0] for line in aliases] == list(load_registry(tmp_path / "none").entries)
    assert [line.split() for line in lines[len(aliases) + 2 :]] == [
        ["Downloaded:"],
        [f"hf:{REPO}/{FILE}", f"{size / 2**20:.1f}", "MiB", "fits", "yes"],
        [],
        ["Other", "programs'", "models;", "--model", "PATH", "loads", "them:"],
        ["llama.cpp:", "draft", "1.1", "MiB", "fits", "yes", str(path)],
    ]
    nothing = cli(
        "list", "--json", HF_HUB_CACHE=str(tmp_path / "no"), OLLAMA_MODELS=str(tmp_path / "no"), LLAMA_CACHE="/no"
    )
    listed = json.loads(nothing.stdout)
    assert list(listed) == ["aliases", "cached", "heads", "elsewhere"] and len(listed["aliases"]) == len(aliases)
    assert not listed["heads"] and not listed["cached"] and not listed["elsewhere"]
