"""From a reference to the sources of target and draft, without downloading weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.errors import HubError, UnknownModel
from edgespec.formats.gguf_validate import read_file
from edgespec.formats.mlx_folder import read_config
from edgespec.models.cache import RemoteModel
from edgespec.models.hub import Hub
from edgespec.models.packaged import name_packaged
from edgespec.models.references import HubFile, HubRepo, PackagedFile, parse_reference
from edgespec.models.registry import EMBEDDED_ALIAS, Registry, SamplingDefaults, load_registry
from edgespec.models.resolve import (
    LocalModel,
    detect_backend,
    fetch_source,
    find_pard_token,
    read_metadata,
    resolve_pair,
    resolve_source,
)
from edgespec.models.tokenizer_compat import find_tokenizer_mismatch
from tests.formats.ggufs import write_gguf
from tests.models.hubserver import HubServer
from tests.models.serving import FILE, REPO, serve
from tests.models.test_cache import mlx

DRAFT_REPO = "someone/Small-GGUF"


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    path = tmp_path / "models.toml"
    path.write_text(
        f'[pair.gguf]\ntarget = "hf:{REPO}/{FILE}"\ndraft = "{DRAFT_REPO}"\n[pair.sampling]\ntop_k = 5\n'
        '[parallel.gguf]\ntarget = "package:python-6m/target.gguf"\npard = "package:python-6m/draft.gguf"\n'
        'pard_token = 7\n[only-mlx.mlx]\ntarget = "mlx-community/M-4bit"\n',
        encoding="utf-8",
    )
    return load_registry(path)


def test_an_alias_gives_target_draft_and_sampling_without_a_download(
    hub: Hub, server: HubServer, root: Path, registry: Registry
) -> None:
    source = serve(root, pad_bytes=2**20)
    draft = serve(root, "small-Q4_0.gguf", repo=DRAFT_REPO)
    pair = resolve_pair("pair", "llamacpp", registry, hub)
    assert isinstance(pair.target, RemoteModel) and pair.models.draft == HubRepo(DRAFT_REPO)
    assert (pair.name, pair.sampling) == ("pair", SamplingDefaults(top_k=5))
    small = resolve_source(pair.models.draft, "llamacpp", hub)
    assert isinstance(small, RemoteModel) and small.files[0].path == "small-Q4_0.gguf"
    assert not [each for each in server.log if "/resolve/" in each.path]
    assert read_metadata(pair.target, hub).tensors == read_file(source).tensors
    assert fetch_source(pair.target, hub).read_bytes() == source.read_bytes()
    before = len(server.log)
    assert resolve_pair("pair", "llamacpp", registry, hub) == pair and len(server.log) == before, "it is cached"
    assert fetch_source(small, hub).read_bytes() == draft.read_bytes()


def test_a_repository_that_an_alias_names_brings_the_draft(hub: Hub, root: Path, registry: Registry) -> None:
    serve(root)
    serve(root, "small-Q4_0.gguf", repo=DRAFT_REPO)
    pair = resolve_pair(f"{REPO}:Q4_K_M", "llamacpp", registry, hub)
    assert pair.models.draft == HubRepo(DRAFT_REPO) and pair.sampling.top_k == 5
    other = resolve_pair(DRAFT_REPO, "llamacpp", registry, hub)
    assert other.models.draft is None and other.sampling == SamplingDefaults()


def test_an_mlx_alias(hub: Hub, root: Path, registry: Registry) -> None:
    mlx(root)
    pair = resolve_pair("only-mlx", "mlx", registry, hub)
    assert isinstance(pair.target, RemoteModel) and pair.models.draft is None
    assert {each.name for each in fetch_source(pair.target, hub).iterdir()} == {"config.json", "model.safetensors"}
    with pytest.raises(UnknownModel, match="only-mlx has no model for llamacpp") as caught:
        resolve_pair("only-mlx", "llamacpp", registry, hub)
    assert caught.value.hint == "Use --backend mlx."
    serve(root)
    with pytest.raises(UnknownModel, match="is a GGUF model, which mlx does not open"):
        resolve_pair(REPO, "mlx", registry, hub)
    with pytest.raises(UnknownModel, match="is an MLX model, which llamacpp does not open"):
        resolve_pair("mlx-community/M-4bit", "llamacpp", registry, hub)


def test_local_files_and_folders(hub: Hub, tmp_path: Path, registry: Registry) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    path = write_gguf(folder / "one.gguf")
    for text in (str(path), str(folder)):
        pair = resolve_pair(text, "llamacpp", registry, hub)
        assert pair.target == LocalModel(path, "gguf") and pair.models.draft is None
    write_gguf(folder / "two.gguf")
    with pytest.raises(UnknownModel, match="holds 2 GGUF models"):
        resolve_pair(str(folder), "llamacpp", registry, hub)
    with pytest.raises(UnknownModel, match="There is no file"):
        resolve_pair(str(folder / "three.gguf"), "llamacpp", registry, hub)
    with pytest.raises(UnknownModel, match="is a file; MLX opens a folder"):
        resolve_pair(str(path), "mlx", registry, hub)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    assert resolve_pair(str(folder), "mlx", registry, hub).target == LocalModel(folder, "mlx")


def test_the_best_backend_follows_the_format(hub: Hub, root: Path, tmp_path: Path, registry: Registry) -> None:
    def best(text: str | None, prefer_mlx: bool = False) -> str:
        return detect_backend(text, registry, hub, prefer_mlx=prefer_mlx)

    folder = tmp_path / "models"
    folder.mkdir()
    write_gguf(folder / "one.gguf")
    (folder / "config.json").write_text("{}")
    assert best(str(folder), prefer_mlx=True) == "llamacpp", "a GGUF repository may hold a config too"
    (folder / "model.safetensors").write_bytes(b"")
    assert (best(str(folder)), best(str(folder), prefer_mlx=True)) == ("llamacpp", "mlx")
    (folder / "one.gguf").unlink()
    assert best(str(folder)) == "mlx"
    assert best(str(mlx(root))) == "mlx"
    serve(root)
    assert best(REPO, prefer_mlx=True) == best(f"{REPO}:Q4_K_M", prefer_mlx=True) == "llamacpp"
    assert (best(None), best(None, prefer_mlx=True)) == ("llamacpp", "mlx")
    assert (best("pair", prefer_mlx=True), best("only-mlx")) == ("llamacpp", "mlx")


def test_a_local_split_model_opens_at_its_first_part(hub: Hub, tmp_path: Path, registry: Registry) -> None:
    first, second = (write_gguf(tmp_path / f"m-0000{part}-of-00002.gguf") for part in (1, 2))
    target = resolve_pair(str(second), "llamacpp", registry, hub).target
    assert target == LocalModel(first, "gguf")
    assert isinstance(target, LocalModel)
    assert read_metadata(target, hub).weight_bytes == 2 * read_file(first).weight_bytes
    first.unlink()
    with pytest.raises(UnknownModel, match="00001-of-00002"):
        resolve_pair(str(second), "llamacpp", registry, hub)


def test_no_name_means_the_embedded_pair(hub: Hub, server: HubServer, registry: Registry) -> None:
    pair = resolve_pair(None, "llamacpp", registry, hub)
    assert pair.models.draft == PackagedFile("python-6m/draft.gguf")
    draft = resolve_source(pair.models.draft, "llamacpp", hub)
    assert isinstance(pair.target, LocalModel) and isinstance(draft, LocalModel)
    headers = read_metadata(pair.target, hub), read_metadata(draft, hub)
    assert headers[0].weight_bytes > headers[1].weight_bytes
    assert find_tokenizer_mismatch(*headers) is None
    assert fetch_source(pair.target, hub) == pair.target.path
    assert not server.log
    with pytest.raises(UnknownModel, match=r"No installed package has package:python-6m/absent\.gguf"):
        resolve_source(parse_reference("package:python-6m/absent.gguf"), "llamacpp", hub)
    assert resolve_pair(None, "mlx", registry, hub) == pair, "one form of the weights for both runtimes"


def test_the_target_in_an_installed_package(
    hub: Hub, server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It replaces the download on both runtimes, and becomes the model that opens without a name."""
    monkeypatch.delenv("EDGESPEC_MODEL")
    text = (
        '[wrapped.gguf]\ntarget = "hf:nobody/model-GGUF/m.gguf"\npackage = "package:wrapped_weights/m.gguf"\n'
        '[wrapped.mlx]\ntarget = "nobody/model-mlx"\npackage = "package:wrapped_weights/m.gguf"\n'
    )
    (tmp_path / "models.toml").write_text(text)
    assert load_registry(tmp_path / "models.toml").get("wrapped").gguf.target == HubFile("nobody/model-GGUF", "m.gguf")  # type: ignore[union-attr]
    folder = tmp_path / "wrapped_weights"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise AssertionError('imported')\n")
    path = write_gguf(folder / "m.gguf")
    monkeypatch.syspath_prepend(tmp_path)
    registry = load_registry(tmp_path / "models.toml")
    for backend in ("llamacpp", "mlx"):
        assert resolve_pair("wrapped", backend, registry, hub).target == LocalModel(path, "gguf")
    assert name_packaged(path) == PackagedFile("wrapped_weights/m.gguf")
    only = Registry({alias: registry.entries[alias] for alias in (EMBEDDED_ALIAS, "wrapped")})
    assert only.default == "wrapped"
    assert Registry({EMBEDDED_ALIAS: registry.entries[EMBEDDED_ALIAS]}).default == EMBEDDED_ALIAS
    monkeypatch.setenv("EDGESPEC_MODEL", "elsewhere")
    assert only.default == "elsewhere"
    with pytest.raises(UnknownModel, match="EDGESPEC_MODEL names it"):
        only.get("elsewhere")
    assert not server.log


def test_a_pard_model_and_its_mask_token(hub: Hub, tmp_path: Path, registry: Registry) -> None:
    pair = resolve_pair("parallel", "llamacpp", registry, hub)
    assert (pair.models.draft, pair.models.pard, pair.models.pard_token) == (
        None,
        PackagedFile("python-6m/draft.gguf"),
        7,
    )
    assert (resolve_pair(None, "llamacpp", registry, hub).models.pard_token) is None
    stated = read_metadata(LocalModel(write_gguf(tmp_path / "stated.gguf", mask=9), "gguf"), hub)
    silent = read_metadata(LocalModel(write_gguf(tmp_path / "silent.gguf"), "gguf"), hub)
    assert (find_pard_token(stated), find_pard_token(silent)) == (9, None)


@pytest.mark.parametrize(
    ("value", "token"),
    [("151670", 151670), ("0", 0), ("-1", None), ("true", None), ('"x"', None), ("1.5", None)],
)
def test_the_mask_token_of_a_folder(tmp_path: Path, value: str, token: int | None) -> None:
    (tmp_path / "config.json").write_text(f'{{"model_type": "qwen3", "pard_token": {value}}}')
    assert find_pard_token(read_config(tmp_path, "folder", 0)) == token


def test_unknown_names_and_repositories(hub: Hub, registry: Registry) -> None:
    with pytest.raises(UnknownModel, match="Did you mean pair"):
        resolve_pair("pari", "llamacpp", registry, hub)
    with pytest.raises(HubError, match="no repository"):
        resolve_pair("no/thing", "llamacpp", registry, hub)
    with pytest.raises(UnknownModel, match="is an alias"):
        resolve_source(parse_reference("pair"), "llamacpp", hub)
