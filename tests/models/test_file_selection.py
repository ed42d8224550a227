"""What a reference chooses, other layouts, offline use, and refusals, with the real client and a real local server."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.errors import CacheError, HubError, InvalidModelFile
from edgespec.models.hub import Hub
from edgespec.models.hub_errors import HubUnreachable
from edgespec.models.references import HubFile, HubQuant, HubRepo
from tests.formats.ggufs import REPOSITORY
from tests.models.hubserver import HubServer
from tests.models.hubstate import Fault
from tests.models.serving import FILE, REPO, serve


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (HubQuant(REPO, "q4_k_m"), "m-Q4_K_M.gguf"),
        (HubQuant(REPO, "UD-Q4_K_M"), "m-UD-Q4_K_M.gguf"),
        (HubQuant(REPO, "Q4_0"), "m-Q4_0.gguf"),
        (HubQuant(REPO, "Q8_0"), "m-Q8_0.gguf"),
        (HubRepo(REPO), "m-Q4_K_M.gguf"),
    ],
)
def test_a_quantisation_picks_the_plainest_matching_file(
    hub: Hub, root: Path, wanted: HubQuant | HubRepo, found: str
) -> None:
    names = ["m-Q4_K_M.gguf", "m-UD-Q4_K_M.gguf", "m-Q4_0.gguf", "m-Q4_0_8_8.gguf", "m-Q8_0.gguf", "MTP/mtp-Q8_0.gguf"]
    for name in [*names, "mmproj-Q4_K_M.gguf"]:
        serve(root, name)
    assert [file.path for file in hub.resolve(wanted).files] == [found]


def test_a_repository_without_the_quantisation(hub: Hub, root: Path) -> None:
    for name in ("m-Q8_0.gguf", "m-Q5_K_M.gguf", "m-IQ2_XS.gguf"):
        serve(root, name)
    with pytest.raises(HubError, match=r"has no Q6_K\.") as caught:
        hub.resolve(HubQuant(REPO, "Q6_K"))
    assert caught.value.hint == "Choose one of IQ2_XS, Q5_K_M, Q8_0."
    assert hub.resolve(HubRepo(REPO)).files[0].path == "m-Q5_K_M.gguf", "the nearest to the usual one"


def test_an_mlx_repository_gives_its_folder(hub: Hub, server: HubServer, root: Path) -> None:
    folder = root / "mlx-community" / "Model-4bit"
    folder.mkdir(parents=True)
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    for name in shards.values():
        (folder / name).write_bytes(os.urandom(5000))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    for name in ("config.json", "tokenizer.json", "chat_template.jinja", "merges.txt", "tokenizer.model", "README.md"):
        (folder / name).write_text(json.dumps({"name": name}))
    reference = HubRepo("mlx-community/Model-4bit")
    model = hub.resolve(reference)
    assert model.kind == "mlx"
    place = hub.fetch(model)
    assert {each.name for each in place.iterdir()} == {each.name for each in folder.iterdir()} - {"README.md"}
    assert all((place / each.name).read_bytes() == (folder / each.name).read_bytes() for each in place.iterdir())
    assert hub.find_cached(reference) == model
    (place / shards["b"]).unlink()
    assert hub.find_cached(reference) is None


def test_an_mlx_repository_with_an_index_of_other_weights_is_whole(hub: Hub, root: Path) -> None:
    folder = root / "mlx-community" / "Model-4bit"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"a": 1}')
    (folder / "model.safetensors").write_bytes(bytes(100))
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    model = hub.resolve(HubRepo("mlx-community/Model-4bit"))
    hub.fetch(model)
    assert hub.find_cached(HubRepo("mlx-community/Model-4bit")) == model


def test_a_repository_of_an_adapter(hub: Hub, root: Path) -> None:
    folder = root / "me" / "lora"
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(bytes(100))
    with pytest.raises(HubError, match="me/lora holds a LoRA adapter"):
        hub.resolve(HubRepo("me/lora"))


def test_corruption_of_a_small_file_is_noticed_by_its_git_hash(hub: Hub, server: HubServer, root: Path) -> None:
    folder = root / "mlx-community" / "Model-4bit"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"a": 1}')
    (folder / "model.safetensors").write_bytes(bytes(100))
    server.fault("mlx-community/Model-4bit", "config.json", Fault("corrupt", at=3))
    with pytest.raises(InvalidModelFile, match=r"config\.json is damaged: its hash"):
        hub.fetch(hub.resolve(HubRepo("mlx-community/Model-4bit")))


def test_the_cache_serves_without_a_hub(hub: Hub, server: HubServer, root: Path) -> None:
    serve(root)
    offline, reference = replace(hub, offline=True), HubQuant(REPO, "Q4_K_M")
    with pytest.raises(HubUnreachable, match=f"{REPO} is not in the cache at .*, and offline mode is on") as caught:
        offline.resolve(reference)
    assert "HF_HUB_OFFLINE" in caught.value.hint and not server.log
    listed = hub.resolve(HubFile(REPO, FILE))
    for work in (Hub.fetch, Hub.header):
        with pytest.raises(HubError, match=f"{FILE} of {REPO} is not in the cache"):
            work(offline, listed)
    path, before = hub.fetch(listed), len(server.log)
    assert offline.fetch(offline.resolve(reference)) == path and len(server.log) == before
    gone = Hub("http://127.0.0.1:9", hub.cache_dir)
    assert gone.fetch(gone.resolve(HubFile(REPO, FILE))) == path
    with pytest.raises(HubError, match=r"127\.0\.0\.1:9 cannot be reached"):
        gone.resolve(HubFile("someone/else", FILE))


def test_a_full_disk_during_the_download(hub: Hub, root: Path) -> None:
    source = serve(root, pad_bytes=6 * 2**20)
    model, limit = hub.resolve(HubFile(REPO, FILE)), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 * 2**20, limit[1]))  # a write beyond is an error, as on a full disk
    try:
        with pytest.raises(CacheError, match=r"The disk of .* is full") as caught:
            hub.fetch(model)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert "HF_HOME" in caught.value.hint
    assert hub.fetch(model).read_bytes() == source.read_bytes()


def test_a_file_larger_than_the_disk_is_refused_before_the_download(hub: Hub, server: HubServer, root: Path) -> None:
    """The server claims a GiB more than this machine's disk has free."""
    serve(root)
    free = shutil.disk_usage(root).free
    server.fault(REPO, FILE, Fault("oversize", at=free + 2**30))
    model = hub.resolve(HubFile(REPO, FILE))
    with pytest.raises(CacheError, match=r"needs .* GiB more and the disk of .* has .* GiB free"):
        hub.fetch(model)
    assert not server.downloads(FILE)


def test_a_file_too_large_for_plain_http_goes_through_the_client(
    hub: Hub, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client's limit of 50 GB is lowered; there is no Xet storage behind this server."""
    serve(root)
    monkeypatch.setattr("huggingface_hub.constants.MAX_HTTP_DOWNLOAD_SIZE", 1000)
    with pytest.raises(HubError, match=f"{FILE} is too large for a plain download") as caught:
        hub.fetch(hub.resolve(HubFile(REPO, FILE)))
    assert "hf_xet" in caught.value.hint


def test_an_unwritable_cache(hub: Hub, root: Path) -> None:
    """A file stands where the cache folder should be: it fails for root too, whom permissions do not bind."""
    serve(root)
    hub.cache_dir.write_text("in the way")
    with pytest.raises(CacheError, match="cannot be used") as caught:
        hub.fetch(hub.resolve(HubFile(REPO, FILE)))
    assert "HF_HOME" in caught.value.hint


def test_the_environment_is_read_when_a_hub_is_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    assert Hub.from_environment() == Hub("https://huggingface.co", tmp_path / "home" / "hub")
    monkeypatch.setenv("HF_ENDPOINT", "http://localhost:1/")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "other"))
    assert Hub.from_environment() == Hub("http://localhost:1", tmp_path / "other", offline=True)


def test_importing_the_registry_loads_no_client() -> None:
    code = "import sys, edgespec.models.resolve; print([m for m in ('huggingface_hub', 'httpx') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
