"""`edgespec plan` and `edgespec tune` on the embedded pair and on files."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from edgespec.models.report import DraftSpeed, Speed
from edgespec.models.report_text import format_speed
from edgespec.models.size_facts import ModelFacts
from edgespec.models.speed import SpeedEstimate
from tests.cli.conftest import COMMAND, Cli
from tests.gguf_models import TARGET
from tests.mlx_models import DENSE, make_folder


def test_plan_says_what_to_expect(cli: Cli) -> None:
    done = cli("plan", "--json", "--threads", "1", "--ctx", "512")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["fits"] and facts["backend"] == "llamacpp" and facts["draft"] == "ngram+package:python-6m/draft.gguf"
    assert facts["draft_models"] == ["package:python-6m/draft.gguf"]
    assert facts["needed_bytes"] > facts["weights_bytes"] + facts["kv_bytes"] > facts["weights_bytes"] > 5_000_000
    low, high = facts["plain_tokens_per_second"]
    assert 0 < low < high
    assert facts["cost_of_rows"]["1"] == 1.0 and len(facts["cost_of_rows"]) >= 4
    assert facts["drafted_token_cost"] > 0
    assert facts["acceptance_known"] and len(facts["speedup_at_acceptance"]) == 2
    assert [each["question"] for each in facts["checklist"]] == [
        "price of rows", "kind of work", "acceptance of python-6m/draft", "answers at once", "length of answers",
        "memory left",
    ]  # fmt: skip
    shown = cli("plan", "--threads", "1").stdout
    assert "  what decides here:\n    price of rows: four take " in shown
    assert "the registry's low figure" in shown and "the registry's high figure" in shown and "e+0" not in shown
    target = r"weights ([\d.]+) MiB, KV cache .* tokens ([\d.]+) MiB, scratch memory ([\d.]+) MiB"
    parts = re.search(target + r"\n  draft model: ([\d.]+) MiB", shown)
    needed = re.search(r"needs ([\d.]+) MiB", shown)
    assert parts and needed and sum(map(float, parts.groups())) == pytest.approx(float(needed[1]), abs=0.2)
    told = cli("plan", "--threads", "1", "--draft", "ngram").stdout
    assert "tokens are accepted (assumed)" in told
    assert "drafted by ngram" in told and "plain decoding:" in told and "fits: needs" in told
    told = cli("plan", "--threads", "1", "--draft", "layerskip:2").stdout
    # A self-draft promises nothing.
    assert "drafted by layerskip:2" in told and "plain decoding:" in told and "`edgespec draft build`" in told
    assert "tokens are accepted" not in told
    assert "tokens are accepted" not in cli("plan", "--threads", "1", "--draft", "none").stdout
    refused = cli("plan", "--draft", "layerskip:99")
    assert refused.returncode == 2 and "the model has 6 layers" in refused.stderr.lower()


def test_plan_without_speed_and_beyond_memory(cli: Cli) -> None:
    done = cli("plan", str(TARGET), "--no-speed", "--ctx", "16000000")
    assert done.returncode == 0, done.stderr
    assert "DOES NOT FIT" in done.stdout and "speed: no estimate" in done.stdout
    assert "settings of llama.cpp: not measured yet" in done.stdout
    assert "llama.cpp" not in cli("plan", "--backend", "mlx", "--no-speed").stdout


def test_a_plan_on_mlx_tells_a_speed(cli: Cli, tmp_path: Path) -> None:
    """Of a folder, and of the packaged pair, whose draft model is told too."""
    path = make_folder(tmp_path / "model", {**DENSE, "hidden_size": 128}, bits=4)
    found = json.loads(cli("plan", str(path), "--backend", "mlx", "--json").stdout)
    low, high = found["plain_tokens_per_second"]
    assert 0 < low < high and found["cost_of_rows"]["1"] == 1.0
    told = cli("plan", "--backend", "mlx").stdout
    assert "plain decoding: " in told and "cost of a draft token" in told
    assert cli("plan", "no-such-model").returncode == 3


def test_offline_the_registry_answers_for_an_alias(cli: Cli) -> None:
    told = cli("plan", "llama-3.2-3b-q4", "--backend", "llamacpp", "--no-speed")
    assert told.returncode == 0 and "offline mode is on. These are estimates from the registry." in told.stderr
    shown = dict(line.split(maxsplit=1) for line in told.stdout.splitlines()[1:])
    assert "Llama-3.2-3B-Instruct" in shown["model"] and "Llama-3.2-1B" in shown["draft"]
    assert shown["download"].startswith("~2") and shown["memory"].startswith("about ")
    facts = json.loads(cli("plan", "llama-3.2-3b-q4", "--backend", "llamacpp", "--no-speed", "--json").stdout)
    assert facts["name"] == "llama-3.2-3b-q4" and facts["estimated_sizes"] and facts["memory_bytes"] > 2**31
    refused = cli("run", "x", "-m", "llama-3.2-3b-q4", "--backend", "llamacpp")
    assert refused.returncode == 4 and "hint: `edgespec plan llama-3.2-3b-q4` tells without a network" in refused.stderr
    for said in ("llama-3.2-3b-q4 is hf:", "Llama-3.2-3B-Instruct", "with the draft hf:", "not downloaded yet"):
        assert said in refused.stderr
    assert cli("plan", "somebody/else-GGUF", "--backend", "llamacpp", "--no-speed").returncode == 4


@pytest.mark.parametrize(
    ("rows", "draft_s", "said"),
    [
        ({1: 1.0, 2: 1.5, 4: 2.5}, 0.985, "draft model, which is as slow as its target; drafts that cost nothing"),
        ({1: 1.0, 2: 1.5, 4: 2.5}, 0.6, "which is too slow for its target"),
        ({1: 1.0, 2: 2.1, 4: 4.2}, 0.05, "cannot pay with this type of weights on this machine"),
        ({1: 1.0, 2: 1.1, 4: 1.2}, 0.2, "c, in plain steps: 0.200"),
    ],
)
def test_the_cause_is_named(rows: dict[int, float], draft_s: float, said: str) -> None:
    expected = SpeedEstimate(rows, draft_s)
    model = ModelFacts(10**9, 10**9, {"Q4_0": 9e8}, 1.6, mixture=False)
    speed = Speed(expected, model, None, DraftSpeed(expected, None, None))
    told = "\n".join(format_speed(speed, fits=True))
    assert said in told and "0.9 GB/s, 3.6 operations a byte" in told


def test_an_interrupt_is_one_word(environment: dict[str, str], tmp_path: Path) -> None:
    """A terminal sends Ctrl-C to the process that measures, too."""
    child = subprocess.Popen(
        [*COMMAND, "plan", "--threads", "1"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, cwd=tmp_path, text=True,
        start_new_session=True,
    )  # fmt: skip
    until = time.monotonic() + 60
    while not any("serve_once" in " ".join(p.cmdline()) for p in psutil.Process(child.pid).children(recursive=True)):
        assert child.poll() is None and time.monotonic() < until
        time.sleep(0.02)
    time.sleep(0.3)  # into its imports
    os.killpg(child.pid, signal.SIGINT)
    out, err = child.communicate(timeout=60)
    *notes, last = err.splitlines()
    assert (child.returncode, out, last) == (130, "", "interrupted")
    assert all(note.startswith("note: ") for note in notes)


def test_chains_of_a_forecast() -> None:
    flat = SpeedEstimate(dict.fromkeys(range(1, 10), 1.0), 0.0)
    assert flat.speculative(0.5) == (8, pytest.approx(sum(0.5**n for n in range(9))))
    assert flat.pays_from == 0.05
    steep = SpeedEstimate({n: float(n) for n in range(1, 10)}, 0.1)
    assert steep.speculative(0.9) == (0, 1.0)
    assert steep.pays_from is None
    barely = SpeedEstimate({1: 1.0, 2: 1.497}, 0.0)
    assert barely.speculative(0.5) == (0, 1.0) and barely.pays_from == 0.55
    tiles = SpeedEstimate({1: 1.0, 2: 1.9, 3: 2.8, 4: 1.3, 5: 3.0}, 0.05)
    assert tiles.speculative(0.6)[0] == 3


@pytest.mark.parametrize("command", ["run", "plan"])
@pytest.mark.parametrize(
    ("names", "words"), [("CUDA9", "llama.cpp finds no GPU 'CUDA9'"), ("CUDA0,", "A device has no name")]
)
def test_a_device_that_there_is_not(command: str, names: str, words: str, cli: Cli) -> None:
    refused = cli(command, "python-6m", *(["def"] if command == "run" else []), "--device", names)
    assert refused.returncode == 2 and words in refused.stderr and "edgespec doctor" in refused.stderr


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--tensor-split", "3,x", "'3,x' are no shares of GPUs"),
        ("--tensor-split", "0", "'0' are no shares of GPUs"),
        ("--tensor-split", "1,1", "--tensor-split has 2 shares, and there are 0 GPUs"),
        ("--override-tensor", "blk", "'blk' places no tensors"),
        ("--override-tensor", "([=CPU", "'([' is no regular expression"),
        ("--override-tensor", "(?i)blk=CPU", "'(?i)blk' is no regular expression: llama.cpp has no '(?i'"),
        ("--override-tensor", "blk.*=CUDA9", "llama.cpp finds no GPU 'CUDA9'"),
        ("--override-tensor", "a=cpu,b=CUDA0 --device CUDA1", "places tensors on CUDA0, and --device leaves it out"),
    ],
)
def test_places_that_there_are_not(option: str, value: str, words: str, cli: Cli) -> None:
    refused = cli("run", "hi", "--model", "python-6m", "--no-memory", option, *value.split())
    assert refused.returncode == 2 and words in refused.stderr and "hint: " in refused.stderr
    if option == "--tensor-split":
        assert cli("plan", "--no-speed", option, value).stderr == refused.stderr


def test_tensors_may_be_said_to_lie_in_ram(cli: Cli) -> None:
    words = ("run", "def f():", "--model", "python-6m", "--no-memory", "--temperature", "0", "--max-tokens", "4")
    places = ("--override-tensor", r"blk\.[0-9]{1,2}\.(?:f|a)=cpu,out.*=CPU")
    texts = [cli(*words, *options).stdout for options in ((), places)]
    assert texts[0] == texts[1] != ""


def test_tune_is_kept_for_later_runs(cli: Cli) -> None:
    done = cli("tune", "--seconds", "1", "--max-tokens", "4", "--threads", "1", "--json")
    assert done.returncode == 0, done.stderr
    state = json.loads(done.stdout)
    assert state["rows"]["1"] > 0 and state["drafts"]["model"]["units"]["1"] > 0 and not state["interrupted"]
    assert {
        f"{name}; {sampling}, answer" for name in ("ngram", "model") for sampling in ("sample at 0.0", "block at 0.7")
    } <= state["drafters"].keys()
    settings = state["settings"]
    assert settings["flash_attention"] in (None, False) and list(settings["without_flash"]) == ["952", "100"]
    planned = cli("plan", "--no-speed", "--threads", "1", "--json")
    assert json.loads(planned.stdout)["settings"] == settings
    assert re.search(
        r"\n  flash attention (off|as llama.cpp decides; off): \d+\.\d\dx at 100 tokens, \d+\.\d\dx at 952 tokens\n",
        cli("plan", "--no-speed", "--threads", "1").stdout,
    )
    told = cli("tune", "--seconds", "1", "--max-tokens", "2", "--threads", "1", "--no-flash-attention")
    assert told.returncode == 0 and "flash attention" not in told.stdout, "what is set is not measured"
    again = cli("run", "def f(x):", "--max-tokens", "4", "--threads", "1", "--temperature", "0")
    assert again.returncode == 0 and "measuring" not in again.stderr
    refused = cli("tune", "--draft", "none")
    assert refused.returncode == 2 and "nothing to tune" in refused.stderr
