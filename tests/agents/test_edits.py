"""Agents of others edit a file, each in three formats of calls, with a model that writes what a script says.

The model goes from step to step by words that only results and calls can bring into its prompt. If a prompt lacks one,
the model does the step before again, and the agent does not end.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import gguf
import pytest

from edgespec.text.chat_template import ChatTemplate
from laboratory.templates import BOS, EOS, write_turn
from tests.agents.conftest import launch, require
from tests.agents.programs import AFTER, AGENTS, BEFORE, FILE, TASK, Agent, Call, write_sentence
from tests.gguf_models import REPOSITORY
from tests.scripted_model import Step, write_scripted_model
from tests.server.serving import Server, serving
from tests.zygote import run_command

TEMPLATES = Path(os.environ.get("EDGESPEC_TEST_ZOO", REPOSITORY.parent / "shared" / "zoo")) / "templates"
DONE = "The word in the file is right now."
SERVE = ("--draft", "none", "--threads", "1")


class Format(NamedTuple):
    """A format of calls: a template of the zoo that shows it, and the control tokens of its models."""

    template: str
    control: tuple[str, ...] = ()


FORMATS = {
    "own": Format(""),  # of SmolLM2, whose template has no tools: the server describes them
    "gemma": Format("google-gemma-4-31B-it", ("<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|tool_call>",
                    "<tool_call|>", "<|tool_response>", "<tool_response|>", "<|channel>", "<channel|>", '<|"|>')),
    "glm": Format("GLM-4.6", ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")),
}  # fmt: skip


class Read(NamedTuple):
    """The tokens of a prompt, and those of them that were in the cache."""

    prompt: int
    cached: int


def read_template(name: str, vocabulary: Path) -> str:
    if not name:
        return str(gguf.GGUFReader(vocabulary).fields["tokenizer.chat_template"].contents())
    path = TEMPLATES / f"{name}.jinja"
    if not path.is_file():
        pytest.skip(f"there is no {path}, a chat template of a real model")
    return path.read_text(encoding="utf-8")


def write_step(template: ChatTemplate, step: Call | str, folder: Path) -> str:
    """What the model writes: a call in the format of its template, or a text."""
    if isinstance(step, str):
        return step
    tool, arguments = step
    written = write_turn(template, [(tool, json.loads(json.dumps(arguments).replace("FOLDER/", f"{folder}/")))])
    assert written is not None
    return written


def read_lengths(server: Server) -> list[Read]:
    """Those of the session's prompts, which are longer than those of titles and messages of commits, in order."""
    lines = [line for line in server.log if " POST " in line and " prompt_tokens=" in line]
    assert all(re.search(r" POST \S+ 200 ", line) for line in lines), lines
    found = [dict(re.findall(r"(prompt_tokens|cached)=(\d+)", line)) for line in lines]
    reads = [Read(int(each["prompt_tokens"]), int(each.get("cached", 0))) for each in found]
    longest = max(each.prompt for each in reads)
    return sorted(each for each in reads if each.prompt > longest / 2)


def read_prompts(folder: Path) -> str:
    """What the memory of the server has kept of prompts: each text once, in order."""
    variables = {**os.environ, **{f"EDGESPEC_{each}_DIR": str(folder / each.lower()) for each in ("CACHE", "DATA")}}
    exported = run_command(("memory", "export", "-"), variables, folder)
    assert exported.returncode == 0, exported.stderr
    kept = map(json.loads, exported.stdout.splitlines())
    return "".join(each["text"] for each in kept if each["kind"] == "prompt")


def check_prompts(prompts: str, written: Sequence[str]) -> None:
    """What the model has written at each step comes back in a later prompt, in order and as it was written."""
    at = 0
    for text in written:
        at = prompts.index(text.strip(), at)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
def test_an_agent_edits_a_file(agent: Agent, form: str, vocabulary: Path, tmp_path: Path) -> None:
    require(agent)
    source = read_template(FORMATS[form].template, vocabulary)
    template = ChatTemplate(source, BOS, EOS)
    home, work, model = (tmp_path / name for name in ("home", "work", "scripted.gguf"))
    home.mkdir()
    subprocess.run(["git", "init", "-q", work], check=True)
    (work / FILE).write_text(write_sentence(BEFORE))
    steps = [Step(word, write_step(template, step, work)) for word, step in agent.steps]
    write_scripted_model(model, vocabulary, source, [*steps, Step(AFTER, DONE)], control=FORMATS[form].control)
    with serving(tmp_path, str(model), *SERVE, "--ctx", str(agent.context)) as server:
        start = agent.prepare(launch(agent, server, tmp_path), home)
        done = agent.run(f"{start} {agent.options} '{TASK}'", home, work)
    reads = read_lengths(server)
    print(f"\n{agent.name}, {form}: " + ", ".join(f"{each.cached:,} of {each.prompt:,} cached" for each in reads))
    told = f"{done.stdout}\n{done.stderr}\n{''.join(server.log)}"
    assert done.returncode == 0 and (work / FILE).read_text() == write_sentence(AFTER), told
    written = [step.text for step in steps]
    if agent.has_tools:  # the last step is answered too
        assert DONE in done.stdout, told
    else:
        written.pop()
    check_prompts(read_prompts(tmp_path), written)
    assert len(reads) == len(written) + 1, told
    for before, after in pairwise(reads):
        assert after.cached >= agent.reused * before.prompt, told
