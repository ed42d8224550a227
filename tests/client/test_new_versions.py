"""Adapted drafts in engines: loaded, passed over where they are damaged, changed while streams go on."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep

import pytest

from edgespec.backends.options import LoadOptions
from edgespec.client.client import EngineClient, require_model
from edgespec.client.local import LocalEngine
from edgespec.client.process import EngineProcess
from edgespec.client.stream import Stream
from edgespec.core.sampling import SamplingParams
from edgespec.engine.events import Event, Finished, Notice, Request
from edgespec.engine.open import Loader
from edgespec.models.load_config import LoadConfig
from edgespec.models.versions import BASE, AdaptedDrafts, AdaptedPair
from edgespec.progress import reporting
from tests.gguf_models import DRAFT, TARGET, llama
from tests.models.test_versions import CARD
from tests.reporter import Heard

PROMPTS = ("def read_lines(path):", "import os\n\n", "class Stack:\n    def push(", "for i in range(10):\n    ")
N_TOKENS = 40
PATIENCE_S = 60


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.client.local._LOOK_S", 0.01)
    for name in ("DATA", "CACHE", "CONFIG"):
        monkeypatch.setenv(f"EDGESPEC_{name}_DIR", str(tmp_path / name.lower()))


@pytest.fixture
def config(tmp_path: Path) -> LoadConfig:
    """The pair with a fixed length, so that nothing is measured; its greedy texts do not depend on the draft."""
    options = LoadOptions(threads=1, context_size=256, caches=4, exact=True)
    return LoadConfig(draft="model", draft_max=3, load=options, adapted=tmp_path / "adapted")


@pytest.fixture
def pair(tmp_path: Path) -> AdaptedPair:
    return AdaptedDrafts(tmp_path / "adapted").pair(TARGET, DRAFT)


@pytest.fixture
def client() -> Iterator[LocalEngine]:
    with closing(LocalEngine()) as made:
        yield made


def save_copy(path: Path) -> None:
    """A draft as good as the base."""
    shutil.copy(DRAFT, path)


def save_stranger(path: Path) -> None:
    """A draft that is hardly ever right."""
    llama(path)


def save_without_weights(path: Path) -> None:
    """A draft with a header that can be read, and a matrix too few."""
    path.write_bytes(DRAFT.read_bytes().replace(b"blk.1.ffn_up", b"blk.9.ffn_up"))


def ask(prompt: str) -> Request:
    return Request(prompt, SamplingParams(temperature=0.0), N_TOKENS)


def answer(client: EngineClient, prompt: str = PROMPTS[0]) -> tuple[Finished, list[str]]:
    """The end of an answer, and the notices in it."""
    events = list(client.stream(ask(prompt)))
    assert isinstance(events[-1], Finished)
    return events[-1], [event.text for event in events if isinstance(event, Notice)]


def wait_for_a_look() -> None:
    sleep(0.02)


@pytest.fixture
def plain(config: LoadConfig) -> dict[str, tuple[int, ...]]:
    """The texts of plain decoding."""
    with closing(LocalEngine()) as engine:
        engine.open(without_draft(config), Heard()).result()
        return {prompt: answer(engine, prompt)[0].tokens for prompt in PROMPTS}


def without_draft(config: LoadConfig) -> LoadConfig:
    return replace(config, draft="none", draft_max=None)


def test_the_version_in_use_is_loaded(config: LoadConfig, pair: AdaptedPair) -> None:
    heard = Heard()
    with reporting(heard):
        base = Loader().load(config)
    base.engine.close()
    assert heard.notices == []
    stores = [base.store]
    for save in (save_copy, save_stranger, save_stranger):
        card = pair.add(CARD, save)
        with reporting(heard):
            loaded = Loader().load(config)
        loaded.engine.close()
        assert heard.notices.pop() == f"Drafting with version {card.version} of the draft, adapted on {card.date}."
        assert loaded.info.drafters["model"].endswith(f" (version {card.version})")
        assert not loaded.is_outdated
        stores.append(loaded.store)
    assert len({store.path for store in stores if store is not None}) == 4, "what is learned of each is kept apart"


def test_a_version_that_cannot_be_loaded_is_passed_over(config: LoadConfig, pair: AdaptedPair) -> None:
    heard = Heard()
    pair.add(CARD, save_without_weights)
    with reporting(heard):
        loaded = Loader().load(config)
    loaded.engine.close()
    assert not loaded.is_outdated
    (notice,) = heard.notices
    assert notice.startswith("Drafting without what was adapted: ") and notice.endswith(".")
    assert "version" not in loaded.info.draft


def test_an_engine_changes_to_another_version(
    client: EngineClient, config: LoadConfig, pair: AdaptedPair, plain: dict[str, tuple[int, ...]]
) -> None:
    client.open(config, Heard()).result()
    before, notices = answer(client)
    assert before.tokens == plain[PROMPTS[0]] and notices == []
    card = pair.add(CARD, save_stranger)
    wait_for_a_look()
    after, notices = answer(client)
    assert notices == [f"Drafting with version 1 of the draft, adapted on {card.date}."]
    assert after.tokens == before.tokens
    assert after.metrics.accepted_tokens < before.metrics.accepted_tokens / 4, "the new draft has drafted"
    assert require_model(client).draft.endswith(" (version 1)")
    assert answer(client)[1] == []
    pair.use(BASE)
    wait_for_a_look()
    again, notices = answer(client)
    assert again.metrics.accepted_tokens == before.metrics.accepted_tokens and notices == []
    assert "version" not in require_model(client).draft


@pytest.mark.parametrize("fault", ["load", "files", "choice"])
def test_the_base_draft_is_used_where_another_version_cannot_be_loaded(
    client: EngineClient, config: LoadConfig, pair: AdaptedPair, fault: str
) -> None:
    client.open(config, Heard()).result()
    before, _ = answer(client)
    pair.add(CARD, save_without_weights)
    if fault == "files":
        (pair.folder / "1" / "draft.gguf").unlink()
    elif fault == "choice":
        (pair.folder / "active").write_text("?")
    wait_for_a_look()
    after, notices = answer(client)
    (notice,) = notices
    assert notice.startswith("Drafting with") and notice.endswith(".")
    assert after.tokens == before.tokens and after.metrics.accepted_tokens == before.metrics.accepted_tokens
    assert "version" not in require_model(client).draft
    wait_for_a_look()
    assert answer(client)[1] == [], "it is not tried again"
    pair.add(CARD, save_copy)
    wait_for_a_look()
    assert len(answer(client)[1]) == 1 and require_model(client).draft.endswith(" (version 2)")


class Asking(threading.Thread):
    """A user who asks the same again and again."""

    def __init__(self, client: EngineClient, prompt: str) -> None:
        super().__init__(daemon=True)
        self.prompt = prompt
        self.texts: list[tuple[int, ...]] = []
        self.notices: list[str] = []
        self.is_done = False
        self._client = client

    def run(self) -> None:
        while not self.is_done:
            finished, notices = answer(self._client, self.prompt)
            self.texts.append(finished.tokens)
            self.notices += notices


def test_the_draft_changes_while_four_users_ask(
    config: LoadConfig, pair: AdaptedPair, plain: dict[str, tuple[int, ...]]
) -> None:
    """With --exact all answers are plain decoding's to the last bit."""
    with closing(EngineProcess()) as client:
        client.open(config, Heard()).result()
        users = [Asking(client, prompt) for prompt in PROMPTS]
        for user in users:
            user.start()

        def wait(draft: str) -> None:
            """Until the engine has this draft, and each user another two answers."""
            end, seen = monotonic() + PATIENCE_S, None
            while seen is None or any(len(user.texts) < n + 2 for user, n in zip(users, seen, strict=True)):
                assert monotonic() < end and all(user.is_alive() for user in users)
                if seen is None and require_model(client).draft.endswith(draft):
                    seen = [len(user.texts) for user in users]
                sleep(0.02)

        wait("draft.gguf")
        pair.add(CARD, save_stranger)
        wait(" (version 1)")
        pair.add(CARD, save_copy)
        wait(" (version 2)")
        pair.use(BASE)
        wait("draft.gguf")
        for user in users:
            user.is_done = True
        for user in users:
            user.join(PATIENCE_S)
    told = sorted(notice for user in users for notice in user.notices)
    assert [notice.partition(" of ")[0] for notice in told] == ["Drafting with version 1", "Drafting with version 2"]
    for user in users:
        assert len(user.texts) >= 8 and set(user.texts) == {plain[user.prompt]}


def test_a_long_answer_keeps_its_draft(config: LoadConfig, pair: AdaptedPair) -> None:
    """What runs ends with the draft that it has begun with; what is asked meanwhile gets the new one."""
    with closing(LocalEngine()) as engine:
        engine.open(config, Heard()).result()
        base, _ = answer(engine)
        long: Stream[Event] = engine.stream(replace(ask(PROMPTS[0]), max_tokens=200))
        events = iter(long)
        next(events)
        pair.add(CARD, save_stranger)
        wait_for_a_look()
        after, notices = answer(engine)
        (last,) = [event for event in events if isinstance(event, Finished)]
        assert last.tokens[: len(base.tokens)] == base.tokens == after.tokens and len(notices) == 1
        assert last.metrics.accepted_tokens > base.metrics.accepted_tokens > 4 * after.metrics.accepted_tokens
