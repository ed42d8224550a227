"""`--draft` with drafts of the model itself, and `edgespec draft`."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cli.conftest import COMMAND, Cli
from tests.formats.ggufs import TOKENS, write_gguf
from tests.gguf_models import DRAFT, TARGET, mamba
from tests.mlx_models import DENSE, make_folder

SHORT = ("--max-tokens", "24", "--temperature", "0", "--threads", "1", "--ctx", "256")


def test_drafts_of_the_model_itself(cli: Cli) -> None:
    plain = cli("run", "def fibonacci(n):", "--draft", "none", *SHORT)
    selves = ("layerskip:0,1,4,5", "sparse:4,32", "qspec:2+skip:3", "layerskip:2+ngram")
    for draft in selves:
        done = cli("run", "def fibonacci(n):", "--draft", draft, "--draft-max", "3", *SHORT)
        assert done.returncode == 0, (draft, done.stderr)
        assert done.stdout == plain.stdout, draft
        assert re.search(r" [1-9]\d* of \d+ drafted accepted", done.stderr), draft


def test_build_list_and_rm(cli: Cli, tmp_path: Path) -> None:
    assert "No self-drafts are cached" in cli("draft", "list").stdout
    done = cli("draft", "build", "--threads", "1", "--json", "--draft", "qspec:2", "--draft", "layerskip:2")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found["trials"]) == {"qspec:2", "layerskip:2"} and found["best"] in found["trials"]
    assert 0 < found["draft model"]["agreement"] < 1
    (listed,) = json.loads(cli("draft", "list", "--json").stdout)
    assert listed["model"] == "python-6m" and listed["bytes"] > 1_000_000 and len(listed["copies"]) == 1
    assert "target-q2_k.gguf" in cli("draft", "list").stdout
    table = cli("draft", "build", "--threads", "1", "--draft", "sparse").stdout
    assert "sparse:4,256" in table and "draft model" in table
    assert cli("draft", "rm", "nothing").returncode == 3
    assert "freed" in cli("draft", "rm", "python-6m").stderr
    assert json.loads(cli("draft", "list", "--json").stdout) == []


def test_drafts_of_one_target_are_compared(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "other.gguf", tokens=TOKENS[::-1])
    drafts = (str(DRAFT), str(TARGET), "layerskip:2", "other.gguf", "ngram", "layerskip")
    given = ("draft", "compare", "python-6m", *drafts, "--threads", "1", "--ctx", "1024", "--max-tokens", "24")
    done = cli(*given, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["target"] == "python-6m" and 2 <= found["answers"] <= 5 and found["tokens"] <= 24 * found["answers"]
    by_name = {each["draft"]: each for each in found["drafts"]}
    assert set(by_name) == set(drafts)
    own, twin, skipped, *refused = (by_name[name] for name in drafts)
    assert own["agreement"] < 1 and skipped["agreement"] < 1 == twin["agreement"], "the target agrees with itself"
    assert own["cost"] < twin["cost"] and 0 < skipped["bytes"] < own["bytes"] < twin["bytes"]
    speeds = [each["speedup"] for each in found["drafts"] if "speedup" in each]
    assert speeds == sorted(speeds, reverse=True) and found["best"] in (None, found["drafts"][0]["draft"])
    assert "cannot draft for this target" in refused[0]["refused"]
    assert "edgespec bench" in refused[1]["refused"] and "layerskip:K" in refused[2]["refused"]
    told: list[str] = []
    monkeypatch.setattr("edgespec.cli.draft.report_activity", told.append)
    done = cli("draft", "compare", "python-6m", "ngram", "other.gguf", "--threads", "1", "--ctx", "256")
    assert told == ["python-6m answers prompts …"] and done.returncode == 5 and not done.stdout
    assert "; ngram is refused: neither a draft model nor a self-draft" in done.stderr
    assert "; other.gguf is refused: " in done.stderr
    done = cli("draft", "compare", "python-6m", "layerskip:2", "--threads", "1", "--ctx", "256", "--max-tokens", "8")
    assert done.returncode == 0 and told[1:] == ["python-6m answers prompts …", "draft 1 of 1 is measured …", ""]


def test_drafts_are_compared_on_mlx(cli: Cli, tmp_path: Path) -> None:
    """A model agrees with itself, and its first layer, which shares its weights, does not always."""
    target, twin = (str(make_folder(tmp_path / name, DENSE)) for name in ("target", "twin"))
    given = ("--backend", "mlx", "--ctx", "1024", "--max-tokens", "16", "--json")
    done = cli("draft", "compare", target, twin, "layerskip:1", "ngram", *given)
    assert done.returncode == 0, done.stderr
    by_name = {each["draft"]: each for each in json.loads(done.stdout)["drafts"]}
    assert by_name[twin]["agreement"] == 1 > by_name["layerskip:1"]["agreement"] and by_name[twin]["cost"] > 0
    assert by_name["layerskip:1"]["bytes"] == 0 < by_name[twin]["bytes"] and "refused" in by_name["ngram"]


@pytest.mark.parametrize(
    ("draft", "code", "told"),
    [
        ("layerskip:6", 2, "the model has 6 layers"),
        ("planes", 3, "there is no model called 'planes'"),
        ("ngram+qspek:2", 3, "did you mean qspec? drafters: ngram, "),
        ("ngram+ngram", 2, "The draft 'ngram+ngram' names 'ngram' twice"),
        ("pard", 5, "no pard model is paired with this target"),
        ("qspec:9", 2, "'qspec:9' is not a self-draft"),
        ("sparse:4", 2, "'sparse:4' is not a self-draft"),
        ("layerskip:two", 2, "'layerskip:two' is not a self-draft"),
    ],
)
def test_what_cannot_be_is_one_sentence(cli: Cli, draft: str, code: int, told: str) -> None:
    done = cli("run", "x", "--draft", draft, *SHORT)
    assert done.returncode == code and told.lower() in done.stderr.lower() and "hint: " in done.stderr


def test_a_model_that_cannot_skip_layers(cli: Cli, tmp_path: Path) -> None:
    mamba(tmp_path / "mamba.gguf")
    refused = cli("run", "x", "--model", str(tmp_path / "mamba.gguf"), "--draft", "layerskip", *SHORT)
    assert refused.returncode == 2 and "too few to skip any" in refused.stderr


def test_a_build_that_is_killed_leaves_no_copy(environment: dict[str, str], cli: Cli, tmp_path: Path) -> None:
    drafts, until = tmp_path / "cache" / "drafts", time.monotonic() + 100
    while not list(drafts.glob("*/.*.gguf.*")):  # once more where the copy was complete before the signal came
        assert time.monotonic() < until
        shutil.rmtree(drafts, ignore_errors=True)
        child = subprocess.Popen(
            [*COMMAND, "draft", "build", "--threads", "1", "--draft", "qspec:2"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment, cwd=tmp_path, start_new_session=True,
        )  # fmt: skip
        while not list(drafts.glob("*/.*.gguf.*")) and child.poll() is None:
            pass
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    assert len(list(drafts.glob("*/.*.gguf.*"))) == 1 and list(drafts.glob("*/*.gguf")) == []
    done = cli("run", "def add(a, b):", "--draft", "qspec:2", *SHORT)
    assert done.returncode == 0, done.stderr
    assert list(drafts.glob("*/.*.gguf.*")) == [] and len(list(drafts.glob("*/*.gguf"))) == 1


def test_a_disk_that_is_full(environment: dict[str, str], tmp_path: Path) -> None:
    """A limit on the size of files makes the write fail midway, as a full disk would."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))"
    limited = f"{limit}\nfrom edgespec.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", limited, "run", "x", "--draft", "qspec:2", *SHORT],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 7 and "could not" in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert [each.name for each in (tmp_path / "cache" / "drafts").glob("*/*")] == ["lock"]
