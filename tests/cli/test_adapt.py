"""`edgespec adapt`: training on the texts of the memory, versions of the draft, and refusals."""

from __future__ import annotations

import itertools
import json
import pty
import re
import select
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from time import monotonic, sleep

import pytest

from edgespec.backends import open_tokenizer
from edgespec.cli.adapt import TrainingReporter
from edgespec.memory.administration import DEFAULT_LIMIT_BYTES
from edgespec.memory.memory import Memory
from edgespec.models.tokenizer_compat import identify_tokenizer
from edgespec.models.versions import AdaptedDrafts, AdaptedPair
from edgespec.train import texts
from tests.cli.conftest import Cli
from tests.gguf_models import DRAFT, TARGET, llama
from tests.models.test_versions import CARD

N_CONVERSATIONS, N_PROMPT = 40, 20
SOURCES = Path(json.__file__).parent
PARD = Path(__file__).parents[1] / "fixtures" / "pard" / "model.gguf"
HEAD = PARD.parents[1] / "heads" / "mtp-python-6m"
FAST = ("--epochs", "1", "--threads", "1", "--on-battery", "--json")


def keep_texts(data: Path, n_answer: int | None = None, most: int = 350) -> None:
    """Fill the user's memory with 40 conversations: parts of Python's own code, of `most` tokens.

    The last `n_answer` tokens are the answers; all but the first 20 if None.
    """
    with open_tokenizer("llamacpp", TARGET) as tokenizer:
        code = "".join(path.read_text() for path in sorted(SOURCES.glob("*.py")))
        tokens = tokenizer.encode(code, parse_special=False)
        size = min(len(tokens) // N_CONVERSATIONS, most)
        with closing(Memory(data / "memory", identify_tokenizer(tokenizer), DEFAULT_LIMIT_BYTES)) as memory:
            memory.name_model("python-6m")
            for i in range(N_CONVERSATIONS):
                n_prompt = N_PROMPT if n_answer is None else size - n_answer
                memory.space("").add(tokens[i * size : (i + 1) * size], n_prompt, f"chat:{i + 1}")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> int:
    """The tokens of a conversation where fewer of them suffice to train on."""
    monkeypatch.setattr(texts, "MIN_TOKENS", 2000)
    return 100


@pytest.fixture
def draft(tmp_path: Path) -> str:
    """A draft with random weights, for the embedded target."""
    path = tmp_path / "draft.gguf"
    llama(path, layers=1, width=32)
    return str(path)


def test_a_draft_is_trained_used_and_put_back(cli: Cli, tmp_path: Path, draft: str, few: int) -> None:
    keep_texts(tmp_path / "data", most=few)
    unasked = cli("adapt", "--draft", draft, *FAST)
    assert unasked.returncode == 2 and "--yes" in unasked.stderr and "stay on this machine" in unasked.stderr

    trained = json.loads(cli("adapt", "--draft", draft, "--learning-rate", "0.1", "--yes", *FAST).stdout)
    assert (trained["kept"], trained["version"], trained["stopped"]) == (True, 1, None)
    assert trained["tokens_before"] < 1.001 and trained["gain_low"] > 0
    (pair,) = (path for path in (tmp_path / "data" / "adapted").iterdir() if path.is_dir())
    assert not (pair / "training").exists()
    options = json.loads((pair / "1" / "card.json").read_bytes())["options"]
    assert (options["epochs"], options["learning_rate"], options["muon_rate"]) == (1, 0.1, 0)
    assert {each.stat().st_mode & 0o077 for each in (pair.parent, *pair.parent.rglob("*"))} == {0}

    changed = ("--method", "lora", "--learning-rate", "1e-8")
    useless = json.loads(cli("adapt", "--draft", draft, *changed, *FAST).stdout)
    assert (useless["kept"], useless["version"]) == (False, None)
    assert useless["tokens_before"] == pytest.approx(trained["tokens_after"], abs=1e-3)  # it went on from version 1

    ask = ("run", "def f(x):", "--temperature", "0", "--max-tokens", "30", "--no-memory", "--threads", "1")
    plain = cli(*ask, "--draft", "none")
    drafted = cli(*ask, "--draft", draft, "--draft-max", "3")
    assert drafted.stdout == plain.stdout and "version 1 of the draft" in drafted.stderr
    assert cli("adapt", "use", "0").stdout == "python-6m drafts with the draft before any training\n"
    assert "version 1" not in cli(*ask, "--draft", draft, "--draft-max", "3").stderr
    assert cli("adapt", "use", "1", "python-6m").stdout == "python-6m drafts with version 1\n"
    table = cli("adapt", "list").stdout.splitlines()
    assert table[1].split()[:2] == ["*", "1"] and table[1].endswith(f"python-6m  {draft}")
    (row,) = json.loads(cli("adapt", "list", "--json").stdout)
    assert row["active"] and row["tokens"] > 2000 and row["model"] == "python-6m"
    assert cli("adapt", "use", "2").returncode == 2

    pair_of(tmp_path, draft).add(CARD, lambda path: llama(path, layers=1, width=32))  # as bad as the base
    newest = cli("adapt", "--draft", draft, "--newest", "--learning-rate", "0.1", *FAST)
    returned = json.loads(newest.stdout)
    assert returned["returned"] == 1 and returned["version"] in (None, 3)
    assert returned["tokens_before"] > 1.01, "it goes on from version 1"

    assert cli("memory", "clear", "--yes").stdout.startswith("removed ")
    assert "--yes" in cli("adapt", "--draft", draft, *FAST).stderr, "it asks again"
    assert "0 tokens" in cli("adapt", "--draft", draft, "--yes", *FAST).stderr


def pair_of(tmp_path: Path, draft: str) -> AdaptedPair:
    return AdaptedDrafts(tmp_path / "data" / "adapted").pair(TARGET, Path(draft))


def test_answers_of_one_token_measure_no_gain(cli: Cli, tmp_path: Path, draft: str, few: int) -> None:
    keep_texts(tmp_path / "data", 1, few)
    refused = cli("adapt", "--draft", draft, "--yes", *FAST)
    assert refused.returncode == 2 and "too short to measure the gain" in refused.stderr


def test_what_cannot_be_trained_is_said(cli: Cli, tmp_path: Path, draft: str) -> None:
    def refuse(*arguments: str) -> str:
        done = cli("adapt", *arguments)
        assert done.returncode != 0 and "hint: " in done.stderr and not done.stdout
        assert "The draft will be trained" not in done.stderr, "nothing is asked"
        return done.stderr

    assert "no draft of llama is adapted" in refuse_choice(cli, "use", "1", "llama")
    assert "no draft is adapted" in refuse_choice(cli, "use", "0")
    for other in ("ngram", f"pard:{PARD}"):
        assert "There is no draft of python-6m that can be trained" in refuse("--draft", other)
    assert "learning-rate" in refuse("--learning-rate", "7")
    assert "nan is " in refuse("--minutes", "nan")
    assert "not downloaded" in refuse("llama-70b-q4") or "offline" in refuse("llama-70b-q4")
    assert "0 tokens" in refuse("--yes")
    keep_texts(tmp_path / "data")
    assert "trained whole" in refuse("--draft", str(HEAD), "--backend", "mlx", "--method", "lora", "--on-battery")
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(DRAFT.read_bytes()[:5000])
    assert "damaged.gguf" in refuse("--draft", str(damaged))
    (tmp_path / "data" / "adapted").rename(tmp_path / "data" / "old")
    (tmp_path / "data" / "adapted").write_text("")
    assert "adapted" in refuse("--draft", draft, "--yes")


def test_a_training_ends_when_its_texts_are_cleared(cli: Cli, environment: dict[str, str], tmp_path: Path) -> None:
    """While the target reads them, too: nothing is kept of them."""
    keep_texts(tmp_path / "data")
    command = (sys.executable, "-m", "edgespec", "adapt", "--yes", "--epochs", "1000", "--threads", "1", "--on-battery")
    with subprocess.Popen(command, env=environment, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as training:
        deadline = monotonic() + 60
        while not list((tmp_path / "data").glob("adapted/*/training/lock")) and monotonic() < deadline:
            sleep(0.02)
        assert cli("memory", "clear", "--yes").stdout.startswith("removed ")
        _, told = training.communicate(timeout=60)
    assert training.returncode == 2
    assert "may no longer be trained on" in told or "0 tokens" in told, "the second: it had not read them yet"
    assert not [path for path in (tmp_path / "data" / "adapted").rglob("*") if path.is_file()]


@pytest.mark.parametrize("columns", [80, 70])
def test_progress_fits_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    clock = itertools.count(0, 0.6)  # the time that remains is shown after a second
    monkeypatch.setattr("time.time", lambda: next(clock))
    monkeypatch.setenv("COLUMNS", str(columns))
    with open(ours, "rb", buffering=0) as screen, open(theirs, "w", encoding="utf-8") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        reporter = TrainingReporter()
        for i in range(1, 4):
            reporter.reading(i, 100)
        for i in range(1, 4):
            reporter.training(i, 100, 10.123, 2.5)
        reporter.training(4, 5, 10.123, 2.5)
        terminal.flush()
        drawn = ""
        while select.select([screen], [], [], 0)[0]:
            drawn += screen.read(2**16).decode()
    lines = [re.sub(r"\x1b\[[?0-9]*[a-zA-Z]", "", line) for line in re.split(r"[\r\n]+", drawn)]
    assert "80%" in drawn, "of the steps that the time allows"
    assert "2.50 tokens a round" in drawn and "00:0" in drawn and 40 < max(map(len, lines)) <= columns


def refuse_choice(cli: Cli, *arguments: str) -> str:
    done = cli("adapt", *arguments)
    assert done.returncode != 0
    return done.stderr.lower()
