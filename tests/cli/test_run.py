"""`edgespec run` on the embedded pair."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from edgespec.chat import Store
from edgespec.cli.main import OUTPUT_LOST
from tests.cli.conftest import COMMAND, Cli
from tests.gguf_models import DRAFT, TARGET

PROMPT = "def fibonacci(n):\n    "
METRICS = {
    "prompt_tokens", "emitted_tokens", "target_forwards", "drafted_tokens", "accepted_tokens", "tau", "acceptance_rate",
    "alpha_by_depth", "tokens_per_second", "ttft_s", "tpot_s", "step_p50_s", "step_p99_s", "prefill_s", "draft_s",
    "verify_s", "sample_s", "commit_s", "speedup", "cached_tokens", "reasoning_tokens",
}  # fmt: skip


def test_text_on_stdout_statistics_on_stderr(cli: Cli) -> None:
    done = cli("run", PROMPT, "--max-tokens", "12", "--temperature", "0", "--threads", "1", "--draft-max", "3")
    assert done.returncode == 0
    assert done.stdout.strip()
    assert "tok/s" not in done.stdout
    assert re.search(r"12 tokens, [\d.]+ tok/s, \d+ of \d+ drafted accepted; cut at its limit\n", done.stderr)
    done = cli("run", PROMPT, "--max-tokens", "12", "--temperature", "0", "--threads", "1", "--draft", "none")
    assert re.search(r"12 tokens, [\d.]+ tok/s; cut at its limit\n", done.stderr)


def test_a_question_to_a_model_that_completes_code_is_told_so(cli: Cli) -> None:
    options = ("--max-tokens", "4", "--temperature", "0", "--threads", "1", "--draft", "none")
    told = "note: python-6m completes Python code; `edgespec chat` lists models that one can talk to."
    assert told in cli("run", "hello", *options).stderr
    assert told not in cli("run", PROMPT, *options).stderr


def test_an_answer_that_repeats_itself_is_ended(cli: Cli) -> None:
    only = ("--backend", "toy", "--temperature", "0", "--logit-bias", "97=1000", "--no-memory")
    done = cli("run", "linear", "hello", *only, "--max-tokens", "2000")
    assert done.returncode == 0 and done.stdout.count("a") == 256
    assert "256 tokens" in done.stderr and "; the answer repeats itself\n" in done.stderr
    assert json.loads(cli("run", "linear", "hello", *only, "--json").stdout)["finish_reason"] == "repetition"


def test_json_is_one_object_with_everything(cli: Cli) -> None:
    done = cli("run", PROMPT, "--max-tokens", "12", "--seed", "7", "--json", "--threads", "1", "--no-memory")
    result = json.loads(done.stdout)
    assert [*result] == ["text", "tokens", "finish_reason", "backend", "model", "draft", "settings", "seed", "metrics"]
    metrics = result["metrics"]
    assert set(metrics) == METRICS and done.stderr == ""
    assert (result["backend"], result["model"], result["seed"]) == ("llamacpp", "python-6m", 7)
    assert len(result["tokens"]) == metrics["emitted_tokens"] <= 12
    assert metrics["tau"] == pytest.approx((metrics["emitted_tokens"] - 1) / metrics["target_forwards"])


def test_every_draft_gives_the_same_greedy_text(cli: Cli) -> None:
    base = ("run", PROMPT, "--max-tokens", "32", "--temperature", "0", "--json", "--threads", "1", "--exact")
    plain = json.loads(cli(*base, "--draft", "none").stdout)
    assert plain["metrics"]["tau"] == 1.0
    tree = ["auto", "--draft-max", "3", "--draft-tree", "6"]
    for draft in (["model"], ["ngram"], tree, [str(DRAFT), "--draft-max", "3"], ["model", "--draft-max", "0"]):
        result = json.loads(cli(*base, "--draft", *draft).stdout)
        assert (result["tokens"], result["text"]) == (plain["tokens"], plain["text"]), draft


def test_a_prompt_comes_from_an_argument_a_file_or_standard_input_in_this_order(
    cli: Cli, environment: dict[str, str], tmp_path: Path
) -> None:
    """The toy's tokens are bytes, so their number tells what it has read."""
    toy = ("run", "--backend", "toy", "--model", "linear", "--draft", "none", "--max-tokens", "1", "--json")
    (tmp_path / "text").write_text("abc\n")
    joined = len("abc\n\nWhy?")
    for n_prompt, arguments, stdin in (
        (4, ("Why?",), ""),
        (4, ("--file", "text"), "not read"),
        (4, (), "Why?"),
        (4, ("-",), "Why?"),
        (joined, ("Why?",), "abc\n"),
        (joined, ("Why?", "--file", "-"), "abc\n"),
        (joined, ("Why?", "--file", "text"), "not read"),
        (4, ("Why?",), " \n"),
    ):
        read = json.loads(cli(*toy, *arguments, stdin=stdin).stdout)["metrics"]["prompt_tokens"]
        assert read == n_prompt, (arguments, stdin)

    # A pipe that its other end neither writes to nor closes, as schedulers leave it.
    idle = subprocess.Popen([*COMMAND, *toy, "Why?"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, env=environment, text=True)  # fmt: skip
    assert idle.stdout is not None and idle.stderr is not None and idle.wait(timeout=60) == 0
    assert json.loads(idle.stdout.read())["metrics"]["prompt_tokens"] == len("Why?")
    assert "nothing came for 3 s" in idle.stderr.read()
    for pipe in (idle.stdin, idle.stdout, idle.stderr):
        assert pipe is not None
        pipe.close()


def test_an_answer_has_no_limit_but_the_context_or_what_the_model_recommends(cli: Cli) -> None:
    toy = ("run", "Why?", "--backend", "toy", "--model", "linear", "--draft", "none", "--logit-bias", "256=-1000")
    endless = json.loads(cli(*toy, "--json", "--ctx", "700").stdout)
    assert len(endless["tokens"]) == 700 + 1 - len("Why?") and endless["finish_reason"] == "length"
    demo = json.loads(cli("run", PROMPT, "--json", "--temperature", "0", "--threads", "1").stdout)
    assert len(demo["tokens"]) <= 256


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("--draft none --acceptance block", "--acceptance block has no effect, since there is no draft"),
        ("--draft none --draft-max 4", "--draft-max 4 has no effect, since there is no draft"),
        ("--draft-max 0 --acceptance block", "--acceptance block has no effect, since --draft-max is 0"),
        ("--draft none --draft-max 0", None),
        ("--gpu-layers 5", "--gpu-layers has no effect, since llama.cpp uses no GPU"),
        ("--gpu-layers 0", None),
    ],
)  # fmt: skip
def test_options_without_an_effect_are_told(cli: Cli, given: str, told: str | None) -> None:
    done = cli("run", "x", "--max-tokens", "2", "--threads", "1", "--ctx", "64", *given.split())
    assert done.returncode == 0
    assert f"note: {told}.\n" in done.stderr if told else "no effect" not in done.stderr


def test_models_by_path_and_stop_strings(cli: Cli) -> None:
    done = cli("run", "import os\n", "--model", str(TARGET), "--draft", "ngram", "--temperature", "0", "--json",
               "--max-tokens", "40", "--stop", "\n", "--threads", "1")  # fmt: skip
    result = json.loads(done.stdout)
    assert "\n" not in result["text"]
    assert result["finish_reason"] in ("stop", "length")
    assert result["model"] == str(TARGET)


def test_interrupt_stops_keeps_the_text_and_exits_130(environment: dict[str, str], tmp_path: Path) -> None:
    child = subprocess.Popen(  # at temperature 0 the toy's text repeats and never ends
        [*COMMAND, "run", PROMPT, "--max-tokens", "900000", "--ctx", "1000000", "--temperature", "0",
         "--backend", "toy", "--model", "linear", "--draft", "none"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, cwd=tmp_path, text=True,
    )  # fmt: skip
    assert child.stdout is not None
    first = child.stdout.read(1)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert first + out.strip()
    assert "; stopped" in err and "Traceback" not in err


def test_a_reader_that_leaves_is_no_error(environment: dict[str, str], tmp_path: Path) -> None:
    child = subprocess.Popen(
        [*COMMAND, "run", PROMPT, "--max-tokens", "2000", "--backend", "toy"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, cwd=tmp_path, text=True,
    )  # fmt: skip
    assert child.stdout is not None
    child.stdout.read(1)
    child.stdout.close()
    assert child.stderr is not None
    err = child.stderr.read()
    assert child.wait(timeout=60) == OUTPUT_LOST
    assert "Traceback" not in err and "Exception" not in err


def test_a_model_may_stand_in_front_of_the_prompt(cli: Cli) -> None:
    """As users of other programs type it."""
    options = ("--max-tokens", "4", "--temperature", "0", "--threads", "1", "--draft", "none")
    named = cli("run", "python-6m", PROMPT, *options)
    assert named.returncode == 0 and named.stdout == cli("run", PROMPT, "--model", "python-6m", *options).stdout
    absent = cli("run", "no-such-model", PROMPT, *options)
    assert absent.returncode == 3 and "no-such-model" in absent.stderr
    several = cli("run", "two", "words", "more", *options)
    assert several.returncode == 2 and "put the prompt in quotes" in several.stderr
    assert cli("ls").stdout == cli("list").stdout


def test_the_last_conversation_goes_on(cli: Cli, tmp_path: Path) -> None:
    toy = ("--backend", "toy", "--draft", "none", "--max-tokens", "8", "--temperature", "0")
    refused = cli("run", "-c", "more")
    assert refused.returncode == 2 and "There is no conversation to continue." in refused.stderr
    cli("run", "hello", "-m", "tree", *toy)
    assert cli("run", "-c", "more").returncode == 2, "a pipe saves nothing"
    with closing(Store.open(tmp_path / "data" / "conversations.db")) as store:
        begun = store.new("python-6m", None)
        store.add(begun, None, "user", "def f(x):")
    done = cli("run", "-c", "return", "-s", "Code.", "--max-tokens", "4", "--threads", "1", "--draft", "none")
    with closing(Store.open(tmp_path / "data" / "conversations.db")) as store:
        saved = store.resume(begun.id)
        *_, question, answer = store.path(saved.leaf)
    assert (question.text, answer.text) == ("return", done.stdout.removesuffix("\n")) and saved.system == "Code."
    assert answer.metrics["emitted_tokens"] == 4 and answer.settings["model"] == "python-6m"


@pytest.mark.parametrize(("option", "value"), [("--format", "json"), ("--schema", "size.json")])
def test_an_answer_in_json(cli: Cli, tmp_path: Path, option: str, value: str) -> None:
    sizes = {"size": {"enum": [1, 2]}}
    schema = {"type": "object", "properties": sizes, "required": ["size"], "additionalProperties": False}
    (tmp_path / "size.json").write_text(json.dumps(schema))
    done = cli("run", PROMPT, option, value, "--max-tokens", "80", "--threads", "1", "--no-memory")
    if option == "--schema":
        assert json.loads(done.stdout)["size"] in (1, 2)
    else:
        assert done.stdout.startswith("{")
    (tmp_path / "bad.json").write_text("{")
    refused = cli("run", PROMPT, "--schema", "bad.json")
    assert refused.returncode == 2 and "ad.json is not JSON" in refused.stderr
