"""What `list` shows of the shared cache and what `rm` takes out of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.errors import HubError
from edgespec.models.hub import Hub
from edgespec.models.references import HubFile, HubQuant, HubRepo
from tests.models.hubstate import commit_of
from tests.models.serving import REPO, serve

FOUR, EIGHT = "m-Q4_K_M.gguf", "m-Q8_0.gguf"


def mlx(root: Path, repo: str = "mlx-community/M-4bit") -> HubRepo:
    folder = root / repo
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(1000))
    return HubRepo(repo)


def fetch(hub: Hub, reference: HubFile | HubQuant | HubRepo) -> Path:
    return hub.fetch(hub.resolve(reference))


def test_each_model_is_listed_once_with_a_reference_that_opens_it(hub: Hub, root: Path) -> None:
    assert hub.list_models() == []
    four, eight = serve(root, FOUR), serve(root, EIGHT, pad_bytes=4096)
    parts = [serve(root, f"big-Q6_K-0000{part}-of-00002.gguf") for part in (1, 2)]
    folder = mlx(root)
    for reference in (HubFile(REPO, FOUR), HubQuant(REPO, "Q8_0"), HubQuant(REPO, "Q6_K"), folder):
        fetch(hub, reference)
    listed = {str(each.reference): each for each in hub.list_models()}
    assert {name: each.size for name, each in listed.items()} == {
        f"hf:{REPO}/{FOUR}": four.stat().st_size,
        f"hf:{REPO}/{EIGHT}": eight.stat().st_size,
        f"hf:{REPO}/{parts[0].name}": sum(part.stat().st_size for part in parts),
        "mlx-community/M-4bit": 1002,
    }
    for each in listed.values():
        found = hub.find_cached(each.reference)
        assert found is not None and (found.commit, found.size) == (each.commit, each.size)
        assert each.path.exists() and each.last_used_s > 0


def test_a_pinned_revision_is_listed_with_its_commit(hub: Hub, root: Path) -> None:
    serve(root, FOUR)
    serve(root, FOUR, repo=f"{REPO}@v1", pad_bytes=4096)
    fetch(hub, HubFile(REPO, FOUR, "v1"))
    assert [each.reference for each in hub.list_models()] == [HubFile(REPO, FOUR, commit_of(REPO, "v1"))]
    fetch(hub, HubFile(REPO, FOUR, commit_of(REPO)))
    commits = {commit_of(REPO), commit_of(REPO, "v1")}
    assert {str(each.reference) for each in hub.list_models()} == {f"hf:{REPO}@{each}/{FOUR}" for each in commits}


def test_other_repositories_and_half_models_are_left_out(hub: Hub, root: Path) -> None:
    first = serve(root, "big-Q6_K-00001-of-00002.gguf")
    serve(root, "big-Q6_K-00002-of-00002.gguf")
    place = fetch(hub, HubQuant(REPO, "Q6_K"))
    place.with_name("big-Q6_K-00002-of-00002.gguf").unlink()
    other = hub.cache_dir / "models--bert--base" / "snapshots" / ("0" * 40)
    other.mkdir(parents=True)
    (other / "pytorch_model.bin").write_bytes(b"x")
    assert first.exists() and hub.list_models() == []


def test_removing_one_quantisation_leaves_the_other(hub: Hub, root: Path) -> None:
    size = serve(root, FOUR).stat().st_size
    serve(root, EIGHT, pad_bytes=4096)
    kept = fetch(hub, HubFile(REPO, EIGHT))
    gone = fetch(hub, HubFile(REPO, FOUR))
    assert hub.remove(HubQuant(REPO, "Q4_K_M")) == size
    assert not gone.exists() and kept.is_file()
    assert [str(each.reference) for each in hub.list_models()] == [f"hf:{REPO}/{EIGHT}"]
    hub.remove(HubRepo(REPO))
    assert not (hub.cache_dir / "models--someone--Model-GGUF").exists(), "with the last model goes the folder"


def test_a_blob_that_another_revision_uses_stays(hub: Hub, root: Path) -> None:
    serve(root, FOUR)
    serve(root, FOUR, repo=f"{REPO}@v1")
    fetch(hub, HubFile(REPO, FOUR))
    shared = fetch(hub, HubFile(REPO, FOUR, "v1"))
    assert hub.remove(HubFile(REPO, FOUR, commit_of(REPO))) == 0
    assert shared.is_file()
    assert hub.remove(HubFile(REPO, FOUR)) > 0
    assert not hub.list_models()


@pytest.mark.parametrize("reference", [HubFile(REPO, FOUR), HubQuant(REPO, "Q8_0"), HubRepo("no/thing")])
def test_removing_what_is_not_there_says_so(hub: Hub, root: Path, reference: HubFile | HubQuant | HubRepo) -> None:
    serve(root, "x-Q2_K.gguf")
    fetch(hub, HubFile(REPO, "x-Q2_K.gguf"))
    with pytest.raises(HubError, match="is not in the cache") as caught:
        hub.remove(reference)
    assert "edgespec list" in caught.value.hint
    assert len(hub.list_models()) == 1
