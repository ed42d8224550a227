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

from edgespec.planner.memory import ModelFacts
from edgespec.planner.report import _describe_drafts, _describe_forwards, format_facts
from edgespec.planner.speed import SpeedEstimate
from tests.cli.conftest import COMMAND, Cli
from tests.models import TARGET


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
    shown = cli("plan", "--threads", "1").stdout
    sizes = {name: re.search(rf"\n{name} bytes +([\d.]+) MiB", shown) for name in ("weights", "kv", "draft", "needed")}
    assert all(sizes.values()) and "e+0" not in shown and re.search(r"\nspeedup at acceptance +0.22: ", shown)
    told = cli("plan", "--threads", "1", "--draft", "ngram").stdout
    assert re.search(r"\ndraft +ngram\n", told) and re.search(r"\nacceptance known +no\n", told)
    assert re.search(r"\nplain tokens per second +\d[\d,]*; \d[\d,]*\n", told) and re.search(r"\nfits +yes\n", told)
    told = cli("plan", "--threads", "1", "--draft", "layerskip:2").stdout
    # A self-draft promises nothing.
    assert "layerskip:2" in told and "plain tokens per second" in told and "`edgespec draft build`" in told
    assert "acceptance" not in told


def test_plan_without_speed_and_beyond_memory(cli: Cli) -> None:
    done = cli("plan", str(TARGET), "--no-speed", "--ctx", "16000000")
    assert done.returncode == 0, done.stderr
    assert re.search(r"\nfits +no\n", done.stdout) and "tokens per second" not in done.stdout
    assert re.search(r"\nsettings +not measured yet\n", done.stdout)
    assert "settings" not in cli("plan", "--backend", "mlx", "--no-speed").stdout
    assert cli("plan", "no-such-model").returncode == 3


def test_an_alias_that_cannot_be_read(cli: Cli) -> None:
    done = cli("plan", "llama-3.2-3b-q4", "--backend", "llamacpp", "--no-speed")
    assert done.returncode == 4 and "`edgespec recommend` estimates the models of the registry" in done.stderr


def test_what_drafts_gain() -> None:
    rows = {1: 1.0, 2: 1.5, 4: 2.5}
    cheap = _describe_drafts(SpeedEstimate(rows, 0.1), None)
    assert cheap["drafted_token_cost"] == 0.1 and cheap["speculation_pays_from_acceptance"] == 0.65
    assert cheap["speedup_at_acceptance"] == {0.5: 1.0, 0.8: pytest.approx(1.125, abs=0.01)}
    assert cheap["drafts_at_acceptance"] == {0.5: 0, 0.8: 1} and not cheap["acceptance_known"]
    slow = _describe_drafts(SpeedEstimate(rows, 2.0), (0.5, 0.8))
    assert slow["speculation_pays_from_acceptance"] is None and slow["drafts_at_acceptance"] == {0.5: 0, 0.8: 0}
    model = ModelFacts(10**9, 10**9, {"Q4_0": 9e8}, 1.6, mixture=True)
    forwards = _describe_forwards(SpeedEstimate(rows, None), model)
    assert forwards["bytes_per_token"] == 9e8 == forwards["bytes_per_second"] and forwards["mixture"]
    assert list(format_facts({"cost_of_rows": forwards["cost_of_rows"], "bytes_per_token": 9e8})) == [
        "cost of rows     1: 1, 2: 1.5, 4: 2.5",
        "bytes per token  0.8 GiB",
    ]


def test_an_interrupt_is_one_word(environment: dict[str, str], tmp_path: Path) -> None:
    """A terminal sends Ctrl-C to the process that measures, too."""
    child = subprocess.Popen(
        [*COMMAND, "plan", "--threads", "1"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, cwd=tmp_path, text=True,
        start_new_session=True,
    )  # fmt: skip
    until = time.monotonic() + 60
    while not any("serve_once" in " ".join(p.cmdline()) for p in psutil.Process(child.pid).children()):
        assert child.poll() is None and time.monotonic() < until
        time.sleep(0.02)
    time.sleep(0.3)  # into its imports
    os.killpg(child.pid, signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out, err.strip()) == (130, "", "interrupted")


def test_chains_of_a_forecast() -> None:
    flat = SpeedEstimate(dict.fromkeys(range(1, 10), 1.0), 0.0)
    assert flat.speculative(0.5) == (8, pytest.approx(sum(0.5**n for n in range(9))))
    assert flat.pays_from == 0.05
    steep = SpeedEstimate({n: float(n) for n in range(1, 10)}, 0.1)
    assert steep.speculative(0.9) == (0, 1.0)
    assert steep.pays_from is None
    tiles = SpeedEstimate({1: 1.0, 2: 1.9, 3: 2.8, 4: 1.3, 5: 3.0}, 0.05)
    assert tiles.speculative(0.6)[0] == 3


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
        r"\nsettings +flash attention (off|as llama.cpp decides; off): \d+\.\d\dx at 100 tokens, \d+\.\d\dx at 952",
        cli("plan", "--no-speed", "--threads", "1").stdout,
    )
    told = cli("tune", "--seconds", "1", "--max-tokens", "2", "--threads", "1", "--no-flash-attention")
    assert told.returncode == 0 and "flash attention" not in told.stdout, "what is set is not measured"
    again = cli("run", "def f(x):", "--max-tokens", "4", "--threads", "1", "--temperature", "0")
    assert again.returncode == 0 and "measuring" not in again.stderr
    refused = cli("tune", "--draft", "none")
    assert refused.returncode == 2 and "nothing to tune" in refused.stderr
