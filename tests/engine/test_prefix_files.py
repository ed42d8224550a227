"""Caches that outlive their engine: what the next one reads, whose they are, and what is never kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.autopilot.speculation import Speculation
from edgespec.backends import open_model
from edgespec.backends.options import LoadOptions
from edgespec.backends.toy import load
from edgespec.cancel import cancellable, iterate
from edgespec.core.protocols import Session
from edgespec.core.sampling import SamplingParams
from edgespec.engine.engine import Engine
from edgespec.engine.events import Finished, MemoryUse, Request
from edgespec.errors import Cancelled
from edgespec.memory.administration import TextStore
from edgespec.memory.memory import Memory
from edgespec.memory.prefix_files import PrefixFiles
from tests.engine.conftest import list_loaded
from tests.gguf_models import TARGET

TEXT = " ".join(f"line {i} of a long text" for i in range(40))
OWN = MemoryUse(source="chat:1")


@contextmanager
def open_engine(folder: Path, kind: str = "tree", key: str = "toy", slots: int = 2) -> Iterator[Engine]:
    target, draft = (load(name, LoadOptions(context_size=4096)) for name in (kind, "draft"))
    drafters = list_loaded(model=draft)
    speculation = Speculation(("ngram", "model"), 3)
    memory, files = Memory(folder, "letters", 2**24), PrefixFiles(folder, key)
    engine = Engine(target, drafters, speculation, slots, memory, files)
    try:
        yield engine
    finally:
        engine.close()


def ask(engine: Engine, prompt: str, use: MemoryUse | None = OWN) -> Finished:
    request = Request(prompt, SamplingParams(temperature=0), 20, seed=1, memory=use)
    (finished,) = [event for event in engine.stream(request) if isinstance(event, Finished)]
    return finished


def list_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.prefix"))


@pytest.mark.parametrize("kind", ["tree", "recurrent"])
def test_the_next_engine_goes_on_and_says_the_same(kind: str, tmp_path: Path) -> None:
    with open_engine(tmp_path, kind) as engine:
        first = ask(engine, TEXT)
    held = TEXT + bytes(first.tokens[:-1]).decode()
    with open_engine(tmp_path, kind) as engine:
        warm = ask(engine, held + " and on")
    with open_engine(tmp_path / "elsewhere", kind) as engine:
        cold = ask(engine, held + " and on")
    assert warm.metrics.cached_tokens == len(held) and warm.loss is None
    assert cold.metrics.cached_tokens == 0 and cold.tokens == warm.tokens


def test_a_conversation_has_one_file(tmp_path: Path) -> None:
    for turn in range(3):
        with open_engine(tmp_path) as engine:
            ask(engine, TEXT + " more" * turn)
    assert len(list_files(tmp_path)) == 1


def test_what_may_not_be_kept_is_not(tmp_path: Path) -> None:
    with open_engine(tmp_path) as engine:
        ask(engine, TEXT, None)
        ask(engine, "a short text")
    assert not list_files(tmp_path)
    with open_engine(tmp_path) as engine:
        ask(engine, TEXT)
    assert list_files(tmp_path)
    with open_engine(tmp_path) as engine:
        assert ask(engine, TEXT + " more", None).metrics.cached_tokens == 0, "such a request reads none either"


def test_namespaces_and_settings_are_apart(tmp_path: Path) -> None:
    with open_engine(tmp_path) as engine:
        ask(engine, TEXT, MemoryUse("key:a"))
    for use, key in ((MemoryUse("key:b"), "toy"), (MemoryUse("key:a"), "other settings")):
        with open_engine(tmp_path, key=key) as engine:
            assert ask(engine, TEXT + " more", use).metrics.cached_tokens == 0
    with open_engine(tmp_path) as engine:
        assert ask(engine, TEXT + " more", MemoryUse("key:a")).metrics.cached_tokens >= len(TEXT)


def test_a_text_that_is_forgotten_meanwhile_is_not_kept(tmp_path: Path) -> None:
    with open_engine(tmp_path) as engine:
        ask(engine, TEXT)
        assert engine.memory is not None
        engine.memory.flush()
        store = TextStore.open(tmp_path)
        store.forget("chat:1")
        store.close()
    assert not list_files(tmp_path)


def test_what_is_cancelled_costs_no_cache(tmp_path: Path) -> None:
    """A request that is cancelled at once, and the close of an engine whose work is cancelled by then."""

    def cancel() -> None:
        raise Cancelled

    with open_engine(tmp_path) as engine:
        ask(engine, TEXT)
        request = Request(TEXT + " more", SamplingParams(temperature=0), 20, seed=1, memory=OWN)
        *_, last = iterate(engine.generate(request), cancel)
        assert isinstance(last, Finished) and last.reason == "cancelled"
        assert ask(engine, TEXT + " and on").metrics.cached_tokens >= len(TEXT)
        with cancellable(cancel):
            engine.close()
    assert list_files(tmp_path)


def test_a_request_that_is_cancelled_while_a_file_is_read_gives_its_slot_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the ranks of a team read it."""

    def cancel(files: PrefixFiles, path: Path) -> None:
        raise Cancelled

    with open_engine(tmp_path) as engine:
        ask(engine, TEXT)
    monkeypatch.setattr(PrefixFiles, "read", cancel)
    with open_engine(tmp_path, slots=1) as engine:
        assert ask(engine, TEXT).reason == "cancelled"
        (slot,) = engine.slots
        assert not slot.is_busy


def test_a_file_that_the_runtime_refuses_is_read_as_tokens(tmp_path: Path) -> None:
    """Its checksum is right, and what it holds is of other tokens."""
    with open_engine(tmp_path) as engine:
        wanted = ask(engine, TEXT)
    PrefixFiles(tmp_path, "toy").write("", list(TEXT.encode()), b"of another length")
    (tmp_path / "elsewhere").mkdir()
    for path in list_files(tmp_path):
        if b"of another length" not in path.read_bytes():
            path.unlink()
    with open_engine(tmp_path) as engine:
        found = ask(engine, TEXT)
        assert not list_files(tmp_path), "it is not tried again"
    assert found.metrics.cached_tokens == 0 and found.tokens == wanted.tokens


def test_a_cache_that_can_only_go_back_to_nothing_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_engine(tmp_path, "recurrent") as engine:
        ask(engine, TEXT)
    monkeypatch.setattr(PrefixFiles, "read", None)
    with open_engine(tmp_path, "recurrent") as engine:
        assert ask(engine, TEXT + " other").metrics.cached_tokens == 0


def test_a_text_that_is_forgotten_while_it_is_written_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = PrefixFiles.write

    def write(files: PrefixFiles, namespace: str, tokens: Sequence[int], cache: memoryview) -> Path | None:
        store = TextStore.open(tmp_path)
        store.forget("chat:1")
        store.close()
        return original(files, namespace, tokens, cache)

    monkeypatch.setattr(PrefixFiles, "write", write)
    with open_engine(tmp_path) as engine:
        ask(engine, TEXT)
        assert engine.memory is not None
        engine.memory.flush()
    assert not list_files(tmp_path)


def test_a_file_is_preferred_to_a_copy_of_less_in_a_shared_context(tmp_path: Path) -> None:
    """With a stream for each slot, llama.cpp copies cells before the next decode: over those that a file has set."""
    head = "import os\n\n\ndef read_lines(path):\n" + "    total = total + 1\n" * 20
    mine, other = head + "    # mine\n" + "    value = value * 2\n" * 80, head + "    # other\n" * 60

    def open_shared(folder: Path) -> Engine:
        options = LoadOptions(threads=1, context_size=1024, caches=16)
        target = open_model("llamacpp", TARGET, options)
        return Engine(target, [], Speculation(), 16, Memory(folder, "python", 2**24), PrefixFiles(folder, "shared"))

    with closing(open_shared(tmp_path)) as engine:
        ask(engine, mine)
    with closing(open_shared(tmp_path)) as engine:
        ask(engine, other)
        warm = ask(engine, mine + "    return")
    with closing(open_shared(tmp_path / "elsewhere")) as engine:
        cold = ask(engine, mine + "    return")
    assert warm.tokens == cold.tokens and warm.metrics.cached_tokens > 400 and not cold.metrics.cached_tokens


def test_what_a_slot_holds_is_not_read_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_engine(tmp_path) as engine:
        ask(engine, TEXT)
    read: list[Path] = []
    original = PrefixFiles.read

    def watched(files: PrefixFiles, path: Path) -> tuple[list[int], memoryview] | None:
        read.append(path)
        return original(files, path)

    monkeypatch.setattr(PrefixFiles, "read", watched)
    with open_engine(tmp_path) as engine:
        for more in ("", " one", " two"):
            ask(engine, TEXT + more, replace(OWN))
        assert len(read) == 1


class Unsaved:
    """A session that cannot be kept."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __getattr__(self, name: str) -> object:
        if name in ("save_state", "restore_state"):
            raise AttributeError(name)
        return getattr(self._session, name)


def test_sessions_that_cannot_be_kept(tmp_path: Path) -> None:
    with open_engine(tmp_path) as engine:
        opened = engine.target.open_session
        engine.target.open_session = lambda *a, **o: Unsaved(opened(*a, **o))  # type: ignore[method-assign,assignment,return-value]
        ask(engine, TEXT)
    assert not list_files(tmp_path)
