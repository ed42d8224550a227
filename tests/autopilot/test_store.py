"""The profile store: entries are found under the same key alone, and a damaged file only costs a measurement."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from edgespec.autopilot.adaptive import Adaptive
from edgespec.autopilot.profile import DraftCost, Profile
from edgespec.autopilot.stats import DraftStats
from edgespec.autopilot.store import ProfileStore, current_setting, describe_machine, list_builds
from edgespec.backends.options import LoadOptions
from edgespec.backends.toy_session import ToyModel, ToySession
from edgespec.core.loop import speculate
from edgespec.core.protocols import Step
from edgespec.core.rng import CounterRng
from edgespec.core.sampling import Sampler, SamplingParams
from edgespec.core.verify import SampleMatching
from edgespec.drafters.block import BlockDrafter
from edgespec.drafters.ngram import NgramDrafter
from edgespec.drafters.pard import PardSession
from edgespec.drafters.sequential import ModelDraftSession, SequentialDrafter
from tests.core.toys import decode

HERE = current_setting("llamacpp", LoadOptions(threads=2))
LOOKUP, MODEL_KEY = "ngram; sample at 0.0, answer", "model; block at 0.8, answer"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def written(path: Path, content: bytes = b"weights") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@pytest.fixture
def store(tmp_path: Path) -> ProfileStore:
    return ProfileStore(written(tmp_path / "target.gguf", b"target"), [written(tmp_path / "draft.gguf", b"draft")])


def learned(plain_s: float = 0.02) -> DraftStats:
    drafts = {"model": DraftCost({1: 0.003}, 0.0004), "pard": DraftCost({1: 0.003, 4: 0.005}, 0.0)}
    draft_stats = DraftStats(Profile({1: plain_s, 4: 0.03, 16: 0.07}, drafts))
    lookup, model = draft_stats.drafter(LOOKUP, "length"), draft_stats.drafter(MODEL_KEY, "probability")
    for right in (True, True, False):
        lookup.acceptance.observe(7, right)
        model.acceptance.observe(0.4, right)
        model.gain(0).observe(-1.5 * right)
    return draft_stats


def plain_of(found: DraftStats | None) -> float:
    assert found is not None
    return found.costs.profile.rows[1]


def test_saved_statistics_are_loaded(store: ProfileStore, cache: Path) -> None:
    assert store.load(HERE) is None
    saved = learned()
    store.save(HERE, saved)
    assert [store.path] == [*cache.rglob("*.json")]
    found = store.load(HERE)
    assert found is not None
    assert found.to_dict() == saved.to_dict()
    assert found.costs.profile == saved.costs.profile
    rate = found.drafter(LOOKUP, "length").acceptance.rate(7)
    assert rate == pytest.approx(saved.drafter(LOOKUP, "length").acceptance.rate(7), abs=0.1)
    assert rate != DraftStats(saved.costs.profile).drafter("", "length").acceptance.rate(7)
    store.save(HERE, learned(0.5))
    assert plain_of(store.load(HERE)) == 0.5, "the last one counts"


def test_each_key_has_its_own_statistics(store: ProfileStore) -> None:
    one = {**HERE, "threads": 1}
    store.save(one, learned())
    for other in (HERE, {**one, "kv_type": "q8_0"}, {**one, "processor": "Z80"}):
        assert store.load(other) is None
    store.save(HERE, learned(0.5))
    assert (plain_of(store.load(one)), plain_of(store.load(HERE))) == (0.02, 0.5), "both are kept"


def test_the_newest_statistics_of_this_processor_are_found_under_any_setting(store: ProfileStore) -> None:
    assert store.load_newest() is None
    for key, plain_s in ((HERE, 0.1), ({**HERE, "threads": 1}, 0.2), ({**HERE, "processor": "Z80"}, 0.3)):
        store.save(key, learned(plain_s))
    assert plain_of(store.load_newest()) == 0.2


def test_the_current_key_describes_this_machine() -> None:
    assert (HERE["threads"], HERE["kv_type"], HERE["exact"]) == (2, "f16", False)
    assert HERE["runtime"].startswith("llama-cpp-python 0.")
    assert HERE["processor"] and HERE["processor"] == describe_machine()["processor"]
    toy = {**current_setting("toy", LoadOptions()), "threads": 2}
    assert toy["runtime"].startswith("edgespec ")
    versions = describe_machine()["versions"]
    assert versions["edgespec"] and HERE["runtime"] == f"llama-cpp-python {versions['llama-cpp-python']}"


def test_the_runtime_is_named_with_the_accelerators_it_was_built_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "packages" / "llama_cpp"
    written(package / "__init__.py", b"")
    for name in ("base", "cpu", "vulkan", "cuda"):
        written(package / "lib" / f"libggml-{name}.so")
    monkeypatch.delitem(sys.modules, "llama_cpp", raising=False)
    monkeypatch.syspath_prepend(package.parent)
    assert list_builds() == " (cuda, vulkan)"
    assert current_setting("llamacpp", LoadOptions())["runtime"].endswith(" (cuda, vulkan)")
    assert "cuda" not in current_setting("toy", LoadOptions())["runtime"]


def test_entries_that_are_saved_at_the_same_time_are_all_kept(store: ProfileStore) -> None:
    keys = [{**HERE, "threads": threads} for threads in range(1, 8)]
    with ThreadPoolExecutor(7) as pool:
        list(pool.map(lambda key: store.save(key, learned()), keys))
    assert all(store.load(key) is not None for key in keys)


def test_eight_settings_are_kept(store: ProfileStore) -> None:
    for threads in range(1, 11):
        store.save({**HERE, "threads": threads}, learned(threads / 10))
    store.save({**HERE, "threads": 3}, learned(3.3))  # used again: no longer the oldest
    store.save({**HERE, "threads": 11}, learned(1.1))
    found = {threads: store.load({**HERE, "threads": threads}) for threads in range(1, 12)}
    kept = {threads: plain_of(each) for threads, each in found.items() if each is not None}
    assert kept == {3: 3.3, 5: 0.5, 6: 0.6, 7: 0.7, 8: 0.8, 9: 0.9, 10: 1.0, 11: 1.1}


def entry(**changes: Any) -> dict[str, Any]:
    """The stored entry of `learned()`; keywords replace parts of the statistics."""
    return {"setting": HERE, "experience": learned().to_dict() | changes}


def cost(unit_s: Any, read_s: Any = 0.0) -> dict[str, Any]:
    """The stored cost of a drafter."""
    return {"model": {"units": {"1": unit_s}, "read_s": read_s}}


def drafter(rates: list[Any], confidence: str = "length") -> dict[str, Any]:
    """Stored statistics of a drafter."""
    return {LOOKUP: {"confidence": confidence, "is_trusted": False, "rates": rates}}


def of(*entries: object) -> str:
    return json.dumps({"entries": entries})


DAMAGED = {
    "empty": "",
    "cut off": of(entry())[:-40],
    "not UTF-8": b"\xff\xfe\x00{",
    "null": "null",
    "deep": "[" * 100_000,
    "no entries": "{}",
    "entries are an object": '{"entries": {"a": 1}}',
    "an entry without a setting": of({"experience": entry()["experience"]}),
    "an entry without an experience": of({"setting": HERE}),
    "a setting that is a list": of({"setting": [], "experience": {}}),
    "an experience that is text": of({"setting": HERE, "experience": "much"}),
    "an experience of nothing": of({"setting": HERE, "experience": {}}),
    "no row": of(entry(rows={})),
    "not one row": of(entry(rows={"2": 0.1})),
    "seconds below zero": of(entry(rows={"1": -0.1})),
    "seconds of reading that are null": of(entry(drafts=cost(0.003, None))),
    "a drafter without units": of(entry(drafts={"model": {"read_s": 0.0}})),
    "NaN": of(entry(rows={"1": float("nan")})),
    "infinity": of(entry(drafts=cost(float("inf")))),
    "an integer too large": of(entry(rows={"1": 10**400})),
    "an integer too long": of(entry(drafts=cost(7))).replace('"1": 7', '"1": ' + "7" * 5000),
    "evidence too short": of(entry(drafters=drafter([[1, 1]]))),
    "evidence of negative weight": of(entry(drafters=drafter([[1, -5.0]] * 15))),
    "more right than seen": of(entry(drafters=drafter([[2, 1]] * 15))),
    "another kind of confidence": of(entry(drafters=drafter([[0, 0]] * 15, confidence="mood"))),
    "no trust": of(entry(drafters={LOOKUP: {"confidence": "length", "rates": [[0, 0]] * 15}})),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_as_none_and_written_over(store: ProfileStore, name: str) -> None:
    content = DAMAGED[name]
    written(store.path, content if isinstance(content, bytes) else content.encode())
    assert store.load(HERE) is None
    store.save(HERE, learned())
    assert plain_of(store.load(HERE)) == 0.02


def test_damage_to_one_entry_spares_the_others(store: ProfileStore) -> None:
    other = {**HERE, "threads": 1}
    written(store.path, of(5, {**entry(), "setting": other}, entry(rows={})).encode())
    assert store.load(HERE) is None
    assert plain_of(store.load(other)) == 0.02
    assert store.load({**HERE, "threads": 4}) is None
    store.save(HERE, learned(0.5))
    assert (plain_of(store.load(HERE)), plain_of(store.load(other))) == (0.5, 0.02)


def test_the_autopilot_runs_with_any_statistics_that_load(store: ProfileStore) -> None:
    rng = random.Random(0)
    whole = of(entry()).encode()
    outcomes = Counter[type]()
    for i in range(160):
        content = bytearray(whole)
        numbers = [at for at, byte in enumerate(content) if byte in b"0123456789"]
        for at in rng.sample(numbers, 2) if i % 2 else [rng.randrange(len(content))]:
            content[at] = rng.choice(b"0123456789eE-." if i % 2 else b'09e-+.,:[]{}"nulNaIfity\x00\xff')
        written(store.path, bytes(content))
        found = store.load(HERE)
        outcomes[type(found)] += 1
        if found is not None:
            assert generated(found) == TEXT
    assert min(outcomes.values()) > 5 and set(outcomes) == {DraftStats, type(None)}, outcomes


V = 6
MODEL, GREEDY, PROMPT = ToyModel(1, V), Sampler(SamplingParams(temperature=0), V), [1, 2, 3, 1, 2]
TEXT = decode(MODEL, GREEDY, 0, PROMPT, 14, frozenset(), 64)


def generated(draft_stats: DraftStats) -> list[int]:
    """A text of the toy model, with the autopilot over lookups and the model itself."""
    model = SequentialDrafter("model", ModelDraftSession(ToySession(MODEL, context_size=64), V))
    pard = BlockDrafter("pard", PardSession(ToySession(MODEL, context_size=64), V, mask_token=1))
    controller = Adaptive([NgramDrafter(), model, pard], draft_stats, "sample at 0.0", V, takes_trees=lambda: True)
    session, verifier = ToySession(MODEL, context_size=64), SampleMatching(GREEDY, CounterRng(0))
    events = speculate(session, controller, verifier, PROMPT, max_tokens=14, stop=frozenset())
    return [token for event in events if isinstance(event, Step) for token in event.tokens]


def test_a_folder_that_cannot_be_written_to_is_no_error(store: ProfileStore, cache: Path) -> None:
    written(cache, b"a file where the folder should be")
    store.save(HERE, learned())
    assert store.load(HERE) is None
    cache.unlink()
    store.path.mkdir(parents=True)  # a folder where the file should be
    store.save(HERE, learned())
    assert store.load(HERE) is None
