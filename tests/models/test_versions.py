"""Versions of adapted drafts on disk: added whole or not at all, chosen, and told of where they are damaged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from edgespec.errors import CacheError, EdgespecError, InvalidModelFile, InvalidRequest
from edgespec.models.versions import BASE, KEPT, AdaptedDrafts, AdaptedPair, Card, Gain

GAIN = Gain(before=2.0, after=2.5, low=0.3, high=0.7, n_conversations=9)
CARD = Card("model", "draft", "target", 34_000, GAIN, 30.0, {"rank": 16})
Save = Callable[[Path], None]


def keep_trainings(data: Path) -> tuple[Path, Path, Path]:
    """Files that trainings leave that have not ended: of a draft, of a new head, and the texts written for that."""
    folder = data / "adapted"
    adapted, head = folder / "draft" / "training-newest" / "part.npz", folder / "head" / "training" / "part.npz"
    files = adapted, head, folder / "head" / "texts.jsonl"
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("a text")
    return files


@pytest.fixture
def pair(tmp_path: Path) -> AdaptedPair:
    return open_pair(tmp_path)


def open_pair(tmp_path: Path, draft: bytes = b"base draft") -> AdaptedPair:
    for name, data in (("target.gguf", b"target"), ("draft.gguf", draft)):
        (tmp_path / name).write_bytes(data)
    return AdaptedDrafts(tmp_path / "adapted").pair(tmp_path / "target.gguf", tmp_path / "draft.gguf")


def writing(data: bytes) -> Save:
    def save(path: Path) -> None:
        path.write_bytes(data)

    return save


def save_folder(path: Path) -> None:
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"weights")


def test_a_new_version_is_used(pair: AdaptedPair, tmp_path: Path) -> None:
    assert pair.active() is None and pair.versions() == {} and pair.active_number() == BASE
    card = pair.add(CARD, writing(b"one"))
    assert (card.version, card.base, card.gain) == (1, "draft", GAIN) and card.created_s > 1.7e9
    found = open_pair(tmp_path).active()
    assert found is not None and found.card == card and found.path.read_bytes() == b"one"
    assert found.path.name == "draft.gguf"
    assert pair.add(CARD, save_folder).version == 2
    found = pair.active()
    assert found is not None and found.path.is_dir() and found.card.version == 2
    assert found.card.date == card.date and len(card.date) == 10
    assert pair.versions() == {1: card, 2: found.card}


def test_versions_belong_to_a_pair(pair: AdaptedPair, tmp_path: Path) -> None:
    pair.add(CARD, writing(b"one"))
    other = open_pair(tmp_path, draft=b"another draft")
    assert other.active() is None
    other.add(CARD, writing(b"two"))
    drafts = AdaptedDrafts(tmp_path / "adapted")
    assert {each.folder for each in drafts.pairs()} == {pair.folder, other.folder}


def test_use(pair: AdaptedPair) -> None:
    for data in (b"one", b"two", b"three"):
        pair.add(CARD, writing(data))
    assert pair.active_number() == 3
    pair.use(1)
    found = pair.active()
    assert found is not None and found.path.read_bytes() == b"one"
    pair.use(BASE)
    assert pair.active() is None
    with pytest.raises(InvalidRequest, match="there is no version 4 of this draft") as refusal:
        pair.use(4)
    assert refusal.value.hint == "Versions: there are 1, 2, 3."
    assert pair.add(CARD, writing(b"four")).version == 4


def test_old_versions_are_removed(pair: AdaptedPair) -> None:
    for _ in range(KEPT + 1):
        pair.add(CARD, writing(b"draft"))
    assert list(pair.versions()) == [2, 3, 4, 5, 6]
    pair.use(2)
    pair.add(CARD, writing(b"draft"))
    assert list(pair.versions()) == [2, 3, 4, 5, 6, 7], "an engine may still use version 2"
    pair.use(BASE)
    assert pair.add(CARD, writing(b"draft")).version == 8
    assert list(pair.versions()) == [4, 5, 6, 7, 8]


def test_a_pair_without_versions(pair: AdaptedPair) -> None:
    pair.use(BASE)
    assert not pair.folder.exists()
    with pytest.raises(InvalidRequest, match="no version 1") as refusal:
        pair.use(1)
    assert refusal.value.hint == "Versions: there are none."


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("card.json", b"{", "the card of version 2 of the draft is damaged."),
        ("card.json", b'{"gain": {}}', "the card of version 2 of the draft is damaged."),
        ("card.json", None, "the card of version 2 of the draft is damaged."),
        ("draft.gguf", b"tw", "the files of version 2 of the draft are damaged."),
        ("draft.gguf", None, "the files of version 2 of the draft are missing."),
    ],
)
def test_damage_is_told_in_a_sentence(pair: AdaptedPair, name: str, content: bytes | None, told: str) -> None:
    for data in (b"one", b"two", b"three"):
        pair.add(CARD, writing(data))
    pair.use(2)
    place = pair.folder / "2" / name
    place.unlink()
    if content is not None:
        place.write_bytes(content)
    with pytest.raises(InvalidModelFile) as refusal:
        pair.active()
    assert refusal.value.message == told and "edgespec adapt use" in refusal.value.hint
    assert [card is None for card in pair.versions().values()] == [False, True, False]
    pair.use(3)
    with pytest.raises(InvalidModelFile):
        pair.use(2)


@pytest.mark.parametrize("wrong", [{"created_s": 1e300}, {"gain": {**asdict(GAIN), "low": "much"}}])
def test_values_that_no_card_has_are_damage(pair: AdaptedPair, wrong: dict[str, object]) -> None:
    path = pair.folder / str(pair.add(CARD, writing(b"one")).version) / "card.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | wrong))
    with pytest.raises(InvalidModelFile, match="the card of version 1 of the draft is damaged"):
        pair.active()


def test_a_card_of_an_earlier_release_has_more_fields(pair: AdaptedPair) -> None:
    card = pair.add(CARD, writing(b"one"))
    path = pair.folder / "1" / "card.json"
    more = {"n_texts": 12, "first_s": 1e9, "last_s": 2e9, "loss": "forward-kl"}  # of 0.2.0
    path.write_text(json.dumps(json.loads(path.read_text()) | more))
    found = pair.active()
    assert found is not None and found.card == card and pair.versions() == {1: card}


def test_a_damaged_choice(pair: AdaptedPair) -> None:
    pair.add(CARD, writing(b"one"))
    (pair.folder / "active").write_text("one")
    with pytest.raises(InvalidModelFile, match="it is not known which version of the draft is in use"):
        pair.active()
    pair.use(BASE)
    assert pair.active() is None


def test_only_its_user_can_read_it(pair: AdaptedPair) -> None:
    before = os.umask(0)
    try:
        pair.add(CARD, save_folder)
        pair.add(CARD, writing(b"two"))
    finally:
        os.umask(before)
    for path in (pair.folder.parent, *pair.folder.parent.rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_a_draft_that_cannot_be_saved_changes_nothing(pair: AdaptedPair) -> None:
    pair.add(CARD, writing(b"one"))

    def fill_the_disk(path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(CacheError, match="No space left on device"):
        pair.add(CARD, fill_the_disk)

    def refuse(path: Path) -> None:
        raise EdgespecError("no.", hint="Try again.")

    with pytest.raises(EdgespecError, match="no"):
        pair.add(CARD, refuse)
    assert list(pair.versions()) == [1] and pair.active_number() == 1
    assert sorted(path.name for path in pair.folder.iterdir()) == ["1", "active", "lock"]


KILLED = """
import os, signal, sys
from pathlib import Path
from edgespec.models.versions import AdaptedPair
from tests.models.test_versions import CARD

def save(path):
    path.write_bytes(b"half of the")
    os.kill(os.getpid(), signal.SIGKILL)

AdaptedPair(Path(sys.argv[1])).add(CARD, save)
"""


def test_a_process_that_is_killed_leaves_the_present_version(pair: AdaptedPair) -> None:
    pair.add(CARD, writing(b"one"))
    child = subprocess.run(
        [sys.executable, "-c", KILLED, str(pair.folder)], capture_output=True, text=True, check=False
    )
    assert child.returncode == -9, child.stderr
    assert (pair.folder / ".partial" / "draft").exists()
    found = pair.active()
    assert found is not None and found.path.read_bytes() == b"one" and list(pair.versions()) == [1]
    assert pair.add(CARD, writing(b"two")).version == 2, "the dead process holds no lock"
    assert not (pair.folder / ".partial").exists()


ADDING = """
import sys
from pathlib import Path
from edgespec.models.versions import AdaptedPair
from tests.models.test_versions import CARD, writing

for _ in range(5):
    print(AdaptedPair(Path(sys.argv[1])).add(CARD, writing(b"draft")).version)
"""


def test_processes_that_add_at_the_same_time(pair: AdaptedPair) -> None:
    command = [sys.executable, "-c", ADDING, str(pair.folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        added = [pair.add(CARD, writing(b"draft")).version for _ in range(5)]
        while child.poll() is None:
            added.append(pair.add(CARD, writing(b"draft")).version)
        added += map(int, child.communicate()[0].split())
        assert child.returncode == 0
    assert sorted(added) == list(range(1, len(added) + 1))
    assert all(card is not None for card in pair.versions().values()) and pair.active_number() == len(added)
