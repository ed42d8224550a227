"""`edgespec draft train`: texts, training and judgement of a new head, kills in each stage, and its use by `auto`."""

from __future__ import annotations

import email
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from edgespec.backends import open_tokenizer
from edgespec.models.versions import AdaptedDrafts, AdaptedPair
from edgespec.train import head_files, new_head, own_texts
from edgespec.train.own_texts import Conversation, ConversationFile
from tests.cli.conftest import Cli
from tests.gguf_models import TARGET, mamba
from tests.models.test_versions import CARD
from tests.train.chatty import make_chatty
from tests.trained_heads import EAGLE3, convert

FAST = ("--threads", "1", "--on-battery")
SMALL = {"_LEAST": 50, "_EACH": 2, "MIN_HELD_OUT": 2}  # fewer and shorter texts suffice
VOCABULARY = 256  # tokens that a new head scores
CHILD = f"""
import sys
from edgespec.train import head_files, new_head
vars(new_head).update({SMALL | {"_EPOCHS": 500}})
head_files.DRAFT_VOCABULARY = {VOCABULARY}
from edgespec.cli.main import main
sys.argv[0] = "edgespec"
main()
"""
RUN = ("run", "def f(x):", "--temperature", "0", "--max-tokens", "40", "--no-memory", "--threads", "1")
N_TEXTS, V = 8, 4096


@pytest.fixture
def chatty(tmp_path: Path) -> Path:
    return make_chatty(tmp_path / "chatty.gguf")


def open_pair(tmp_path: Path, target: Path) -> AdaptedPair:
    pair = AdaptedDrafts(tmp_path / "data" / "adapted").new_head(target, "llamacpp")
    pair.folder.mkdir(parents=True, exist_ok=True)
    return pair


def keep_texts(pair: AdaptedPair, n: int = N_TEXTS, size: int = 40) -> Path:
    """Texts as an earlier run has left them: parts of Python's own code."""
    file = ConversationFile(pair.folder / "texts.jsonl", V)
    with open_tokenizer("llamacpp", TARGET) as tokenizer:
        code = "".join(path.read_text() for path in sorted(Path(email.__file__).parent.glob("*.py")))
        tokens = tokenizer.encode(code, parse_special=False)
    for i in range(n):
        file.add(Conversation(i, 20, tokens[i * size : (i + 1) * size]))
    return pair.folder / "texts.jsonl"


def shrink(monkeypatch: pytest.MonkeyPatch, **more: int) -> None:
    for name, value in {**SMALL, **more}.items():
        monkeypatch.setattr(new_head, name, value)
    monkeypatch.setattr(head_files, "DRAFT_VOCABULARY", VOCABULARY)


def add_head(pair: AdaptedPair, tmp_path: Path, noise: float = 0.0) -> None:
    """The EAGLE-3 head of the tests as the version in use, with noise on its first matrix."""
    folder = Path(shutil.copytree(EAGLE3, tmp_path / "head"))
    weights = load_file(folder / "model.safetensors")
    fc = weights["fc.weight"]
    drawn = np.random.default_rng(0).standard_normal(fc.shape) * noise * fc.std()
    save_file({**weights, "fc.weight": (fc + drawn).astype(fc.dtype)}, folder / "model.safetensors")
    pair.add(CARD, lambda path: shutil.copyfile(convert(folder), path))


def test_a_model_writes_and_a_head_is_judged(
    cli: Cli, tmp_path: Path, chatty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few steps are too few: it is not used, and stays with the texts for the next time."""
    shrink(monkeypatch, _EPOCHS=1)
    monkeypatch.setattr(own_texts, "_MAX_ANSWER", 80)
    monkeypatch.setattr(own_texts, "_MAX_QUESTION", 30)
    (tmp_path / "questions.jsonl").write_text('{"prompt": "Return the largest of three numbers."}\n')
    asked = ("draft", "train", str(chatty), "--tokens", "900", "--texts", "questions.jsonl", *FAST)
    first = cli(*asked, "--minutes", "2", "--json")
    assert first.returncode == 0, first.stderr
    done = json.loads(first.stdout)
    assert (done["kept"], done["version"]) == (False, None) and done["gain_low"] <= 0
    pair = open_pair(tmp_path, chatty)
    file = ConversationFile(pair.folder / "texts.jsonl", V)
    assert file.n_tokens >= 900 and not (pair.folder / "training").exists()
    assert {each.stat().st_mode & 0o077 for each in pair.folder.rglob("*")} == {0}
    assert cli("adapt", "list", "--json").stdout.strip() == "[]" and done["goes_on"]
    head = pair.folder / "first.gguf"
    trained = head.read_bytes()
    second = cli(*asked, "--minutes", "2")
    assert second.stdout.startswith("not used yet, because no gain is certain: ")
    assert second.stdout.endswith("; the same command trains the head further\n")
    assert head.read_bytes() != trained, "it went on from there"
    cli("memory", "clear", "--yes")
    assert not head.exists() and not (pair.folder / "texts.jsonl").exists()


def test_a_head_is_trained_further_and_used(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)
    pair = open_pair(tmp_path, TARGET)
    add_head(pair, tmp_path, noise=1.0)
    keep_texts(pair, 60, 60)
    plain = cli(*RUN, "--draft", "none")
    before = cli(*RUN, "--draft", "eagle3", "--draft-max", "3")
    assert before.stdout == plain.stdout
    done = cli("draft", "train", "python-6m", "--tokens", "100", "--minutes", "0.5", *FAST)
    assert done.stdout.startswith("kept as version 2: ") and "the head in use 1." in done.stdout
    for draft in ("auto", "eagle3"):
        drafted = cli(*RUN, "--draft", draft)
        assert drafted.stdout == plain.stdout
    assert "an EAGLE-3 head that was trained on this machine" in cli(*RUN, "--draft", "auto").stderr
    assert "eagle3 head (version 2)" in json.loads(cli(*RUN, "--draft", "auto", "--json").stdout)["draft"]
    rows = json.loads(cli("adapt", "list", "--json").stdout)
    assert [(row["version"], row["active"]) for row in rows] == [(1, False), (2, True)]
    assert "use 1 --method" not in cli("adapt", "use", "0", "--method", "eagle3").stderr
    assert "no eagle3 head" in cli(*RUN, "--draft", "eagle3").stderr
    cli("adapt", "use", "2")
    (pair.folder / "2" / "card.json").write_text("{}")
    damaged = cli(*RUN, "--draft", "auto")
    assert damaged.stdout == plain.stdout and "Drafting without a head: the card of version 2" in damaged.stderr


def test_what_a_model_has_written_is_removed_once_that_is_confirmed(cli: Cli, tmp_path: Path, chatty: Path) -> None:
    texts = keep_texts(open_pair(tmp_path, chatty))
    asked = cli("memory", "clear", stdin="n\n")
    assert "Remove what trainings have written and kept?" in asked.stderr and texts.exists()
    assert cli("memory", "clear", "--corpus", "--yes").stdout.startswith("there is nothing") and texts.exists()
    assert cli("memory", "clear", stdin="y\n").stdout == "removed what trainings have written and kept\n"
    assert not texts.exists()
    assert cli("memory", "clear").stdout.startswith("there is nothing")


def test_a_model_that_has_a_head_gets_no_other(cli: Cli, tmp_path: Path, chatty: Path) -> None:
    convert(Path(shutil.copytree(EAGLE3, tmp_path / "beside")))
    refused = cli("draft", "train", str(chatty), *FAST)
    assert refused.returncode != 0 and "beside.gguf is a head for this model already" in refused.stderr


Stage = Callable[[Path], bool]
STAGES: dict[str, Stage] = {
    "writing": lambda folder: len((folder / "texts.jsonl").read_bytes().splitlines()) > N_TEXTS + 1,
    "reading": lambda folder: len(list(folder.glob("training/*.npz"))) > 2,
    "training": lambda folder: (folder / "training" / "checkpoint").exists(),
}


def test_a_killed_run_goes_on(
    cli: Cli, environment: dict[str, str], tmp_path: Path, chatty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = open_pair(tmp_path, chatty)
    texts = keep_texts(pair)
    shrink(monkeypatch, _EPOCHS=500)
    n = len(ConversationFile(texts, V).conversations)
    for stage, is_reached in STAGES.items():
        tokens = "100000" if stage == "writing" else "100"
        command = [sys.executable, "-c", CHILD, "draft", "train", str(chatty)]
        command += ["--tokens", tokens, "--minutes", "60", *FAST]
        deadline = monotonic() + 120
        with subprocess.Popen(command, env=environment, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as training:
            while not is_reached(pair.folder) and monotonic() < deadline:
                assert training.poll() is None, training.communicate()[1]
                sleep(0.02)
            training.kill()
        assert is_reached(pair.folder), stage
        now = len(ConversationFile(texts, V).conversations)
        assert now > n if stage == "writing" else now == n, "what was written stays, and nothing is added to it"
        n = now
    kept = len(list(pair.folder.glob("training/*.npz")))
    done = cli("draft", "train", str(chatty), "--minutes", "0.1", *FAST, "--json")
    assert json.loads(done.stdout)["held_out_conversations"] > 1 and kept > 2
    assert len(ConversationFile(texts, V).conversations) == n, "a training that has begun goes on with its texts"


def test_a_writer_that_is_too_slow_stops_in_time(cli: Cli, chatty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new_head, "_LEAST", 300_000)
    done = cli("draft", "train", str(chatty), "--minutes", "0.1", *FAST)
    assert done.returncode != 0
    told = r"error: The time is up: [\d,]+ of the 600,000 tokens that are needed are written\.\nhint: The same command"
    assert re.search(told, done.stderr), done.stderr


def test_what_cannot_have_a_head_is_said(cli: Cli, tmp_path: Path, chatty: Path) -> None:
    def refuse(*arguments: str, **extra: str) -> str:
        done = cli("draft", "train", *arguments, *FAST, **extra)
        assert done.returncode != 0 and "hint: " in done.stderr and not done.stdout
        return done.stderr

    assert "no chat template" in refuse("python-6m")
    other = tmp_path / "mamba.gguf"
    mamba(other)
    assert "No head is trained for mamba.gguf" in refuse(str(other))
    (tmp_path / "bad.jsonl").write_text("{}\n")
    assert "line 1 is not a prompt" in refuse(str(chatty), "--texts", "bad.jsonl")
    few = open_pair(tmp_path, chatty)
    keep_texts(few)
    assert "10,000 and 40 are needed" in refuse(str(chatty), "--tokens", "100")
    assert not (few.folder / "training").exists()
    (few.folder / "training").write_text("")
    assert "cannot be written" in refuse(str(chatty), "--tokens", "100")
