"""What is recommended: the registry and a search of a hub, by sizes alone, in order of use on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.machines.memory import RESERVE_BYTES, DeviceMemory, Memory
from edgespec.models.catalogue import Candidate, Catalogue, Query, Recommendations
from edgespec.models.hub import Hub
from edgespec.models.references import HubRepo
from edgespec.models.registry import load_registry
from edgespec.models.speed import MachineSpeed, find_main_type, save_speed
from edgespec.units import GIB
from tests.gguf_models import DRAFT, TARGET
from tests.models.hubserver import HubServer
from tests.models.hubstate import Fault

PAIR = """
[coder]
description = "A coder"
parameters = 0.006
license = "MIT"
tasks = ["code"]
[coder.gguf]
target = "me/coder-GGUF"
draft = "me/small-GGUF"
acceptance = [0.2, 0.9]

[giant]
description = "A giant"
parameters = 900
active = 20
tasks = ["chat"]
[giant.gguf]
target = "me/giant-GGUF"
"""


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def served(root: Path) -> Path:
    """Three repositories."""
    for repo, model in (("coder", TARGET), ("small", DRAFT), ("other", TARGET)):
        folder = root / "me" / f"{repo}-GGUF"
        folder.mkdir(parents=True)
        (folder / "model-Q8_0.gguf").write_bytes(model.read_bytes())
    return root


def set_rate(byte_s: float) -> None:
    """Store a measurement of Q8_0 weights, whose rows cost little."""
    save_speed(MachineSpeed({"Q8_0": {rows: byte_s * (1 + rows / 100) for rows in range(1, 9)}}))


def recommend(hub: Hub, tmp_path: Path, query: Query = Query(), memory: Memory | None = None) -> Recommendations:  # noqa: B008
    """With the aliases of PAIR alone, unless the embedded pair matches too."""
    (tmp_path / "models.toml").write_text(PAIR)
    registry = load_registry(tmp_path / "models.toml")
    shipped = [name for name in registry.entries if name not in ("coder", "giant")]
    for name in shipped:
        del registry.entries[name]  # type: ignore[attr-defined]
    roomy = memory or Memory(RESERVE_BYTES + GIB)
    return Catalogue(registry, hub, "llamacpp", roomy).recommend(query, measure=False)


def by_name(found: Recommendations) -> dict[str, Candidate]:
    return {each.name: each for each in found.models}


def test_sizes_alone_tell_fit_and_speed(hub: Hub, served: Path, server: HubServer, tmp_path: Path) -> None:
    set_rate(1e-9)
    found = recommend(hub, tmp_path)
    coder, giant = found.models
    assert (coder.name, giant.name) == ("coder", "giant") and not found.notices
    facts = coder.target.facts
    assert facts is not None and not facts.exact and find_main_type(facts.read) == "Q8_0"
    assert coder.missing == TARGET.stat().st_size + DRAFT.stat().st_size
    assert (coder.fit, coder.group, coder.quality) == ("fits", "fast", "toy")
    assert coder.plain is not None and 100 < coder.plain < 170, "6 MB at 1 GB/s, with the time of the loop"
    assert coder.drafted is not None
    low, high = coder.drafted
    assert low >= coder.plain and high > 1.5 * coder.plain
    assert (giant.fit, giant.group, giant.plain, giant.quality) == ("does not fit", "too large", None, "best")
    assert not [each for each in server.log if each.path.endswith(".gguf")], "no file is read"


def test_a_model_that_is_slow_and_one_whose_speed_is_unknown(hub: Hub, served: Path, tmp_path: Path) -> None:
    unknown = by_name(recommend(hub, tmp_path))["coder"]
    assert (unknown.group, unknown.plain, unknown.drafted) == ("unknown", None, None)
    set_rate(1e-7)
    slow = by_name(recommend(hub, tmp_path))["coder"]
    assert slow.group == "slow" and slow.plain is not None and slow.plain < 3
    device = DeviceMemory("small", RESERVE_BYTES + 2**20, GIB)  # the model would lie in two memories
    split = by_name(recommend(hub, tmp_path, memory=Memory(RESERVE_BYTES + GIB, (device,))))["coder"]
    assert (split.group, split.plain) == ("unknown", None)
    tight = by_name(recommend(hub, tmp_path, memory=Memory(RESERVE_BYTES + 8 * 2**20)))["coder"]
    assert tight.fit == "tight", "the draft does not fit with it"


def test_a_search_adds_repositories_of_the_hub(hub: Hub, served: Path, server: HubServer, tmp_path: Path) -> None:
    set_rate(1e-9)
    server.state.cards["me/other-GGUF"] = {"downloads": 1234, "tags": ["license:apache-2.0", "code"]}
    server.state.cards["me/coder-GGUF"] = {"downloads": 9, "tags": ["code"]}
    found = by_name(recommend(hub, tmp_path, Query("gguf")))
    assert [*found] == ["me/coder-GGUF", "me/other-GGUF", "me/small-GGUF"], "no alias is called so"
    other = found["me/other-GGUF"]
    assert (other.about.license, other.downloads) == ("apache-2.0", 1234)
    assert other.target.reference == HubRepo("me/other-GGUF") and other.missing == TARGET.stat().st_size
    assert other.group == "fast" and other.draft_by == ""
    coded = recommend(hub, tmp_path, Query(task="code"))
    assert [*by_name(coded)] == ["coder", "me/other-GGUF"], "an alias stands for its repository"
    assert [*by_name(recommend(hub, tmp_path, Query("gguf", max_bytes=TARGET.stat().st_size - 1)))] == ["me/small-GGUF"]


def test_a_hub_that_fails(hub: Hub, served: Path, server: HubServer, tmp_path: Path) -> None:
    server.fault("models", "", Fault("status", code=400))
    refused = recommend(hub, tmp_path, Query("coder"))
    assert "was not searched" in refused.notices[0] and [*by_name(refused)] == ["coder"]
    server.fault("me/coder-GGUF", "", Fault("status", code=403, error_code="GatedRepo"))
    gated = by_name(recommend(hub, tmp_path))["coder"]
    assert "gated" in gated.problem and gated.target.facts is not None and not gated.target.facts.exact


@pytest.mark.parametrize("how", ["offline", "away"])
def test_without_the_hub_the_registry_answers(hub: Hub, tmp_path: Path, how: str) -> None:
    gone = (
        Hub(hub.endpoint, hub.cache_dir, offline=True) if how == "offline" else Hub("http://127.0.0.1:9", hub.cache_dir)
    )
    found = recommend(gone, tmp_path, Query("a", task="code"))
    assert [*by_name(found)] == ["coder"]
    coder = found.models[0]
    facts = coder.target.facts
    assert facts is not None and not facts.exact and coder.missing == facts.weights
    (notice,) = found.notices
    assert "This is the registry alone; sizes with ~ are estimates." in notice
    assert ("Offline mode is on." in notice) == (how == "offline")


def test_what_is_downloaded_is_here(hub: Hub, served: Path, tmp_path: Path) -> None:
    for repo in ("coder", "small"):
        hub.fetch(hub.resolve(HubRepo(f"me/{repo}-GGUF")))
    offline = Hub(hub.endpoint, hub.cache_dir, offline=True)
    coder = by_name(recommend(offline, tmp_path))["coder"]
    assert coder.missing == 0 and coder.target.facts is not None and coder.target.facts.exact


def test_the_registry_foretells_a_pair_and_another_type_of_weights(hub: Hub, tmp_path: Path) -> None:
    """Offline: the small model's own entry says how large the draft is, and the names of the files say their types."""
    save_speed(MachineSpeed({"Q4_0": {1: 1e-10, 2: 1.1e-10, 4: 1.2e-10}, "Q4_K": {1: 1.6e-10, 2: 2e-10, 4: 3e-10}}))
    offline, roomy = Hub(hub.endpoint, hub.cache_dir, offline=True), Memory(RESERVE_BYTES + 100 * GIB)
    catalogue = Catalogue(load_registry(tmp_path / "models.toml"), offline, "llamacpp", roomy)
    (told,) = catalogue.recommend(Query("8b"), measure=False).advice
    assert told.startswith("Q4_0 weights are 1.6 times as fast as Q4_K weights")
    assert ":Q4_0 for llama-8b-q4, where there is one" in told
    pair = next(each for each in catalogue.recommend(Query(), measure=False).models if each.name == "qwen3-4b-q4")
    assert pair.faster is None
    facts = pair.target.facts
    assert facts is not None and not facts.exact and find_main_type(facts.read) == "Q4_0"
    assert pair.drafted is not None and pair.plain is not None and pair.drafted[1] > pair.plain
    assert pair.missing is not None and pair.missing > facts.weights
