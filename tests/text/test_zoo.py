"""Chat templates of real models: nothing of a conversation is lost, and calls are read as the templates write them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from edgespec.answers.call_structure import build_call_structure
from edgespec.answers.tools import Tool
from edgespec.backends.options import LoadOptions
from edgespec.backends.toy import load
from edgespec.engine.grammar_compiler import GrammarCompiler
from edgespec.text.call_format import NAME
from edgespec.text.chat_template import ChatTemplate
from laboratory.templates import ARGUMENTS, BOS, CONVERSATIONS, EOS, find_fault, find_misread, make_schema, write_answer
from tests.gguf_models import REPOSITORY

FOLDER = Path(os.environ.get("EDGESPEC_TEST_ZOO", REPOSITORY.parent / "shared" / "zoo")) / "templates"
PATHS = sorted(FOLDER.glob("*.jinja"))
# Minimax M3's template leaves out arguments that are null.
UNWRITTEN = {("MiniMax-M3", "booleans and null")}

if not PATHS:
    pytest.skip(f"no chat templates of real models in {FOLDER}", allow_module_level=True)


@pytest.fixture(scope="module", params=PATHS, ids=lambda path: path.stem)
def template(request: pytest.FixtureRequest) -> ChatTemplate:
    return ChatTemplate(request.param.read_text(encoding="utf-8"), BOS, EOS)


def name(template: ChatTemplate) -> str:
    return next(path.stem for path in PATHS if path.read_text(encoding="utf-8") == template.source)


def test_nothing_that_was_said_is_missing(template: ChatTemplate) -> None:
    assert {each: fault for each in CONVERSATIONS if (fault := find_fault(template, each))} == {}


def test_calls_are_read_as_the_template_writes_them(template: ChatTemplate) -> None:
    """Whole and cut, one and two, with text before them."""
    counts = (1, 2) if template.profile.shows_several else (1,)
    written = [(case, n) for case in ARGUMENTS for n in counts if (name(template), case) not in UNWRITTEN]
    assert {each: fault for each in written if (fault := find_misread(template, each[0], n=each[1]))} == {}


# Of these, the grammar of a forced call does not take what the template writes, for the reason given.
OTHERWISE_FORCED = {
    "CohereForAI-c4ai-command-r-plus-tool_use": "its JSON is indented",
    "LFM2.5-8B-A1B": "its strings have unescaped quotes",
    "Reka-Edge": "its JSON escapes other scripts",
    "openai-gpt-oss-120b": "the recipient stands in front of the channel there",
}
FORCED = ("text and number", "none", "numbers", "quotes", "braces", "line breaks", "other scripts", "markup")


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    with closing(GrammarCompiler(load("tree", LoadOptions()).tokenizer)) as made:
        yield made


def test_a_forced_call_is_one_that_the_template_writes(template: ChatTemplate, compiler: GrammarCompiler) -> None:
    form = template.profile.calls
    refused = []
    for case in FORCED:
        text = write_answer(template, [ARGUMENTS[case]])
        assert text is not None
        tool = Tool("tool_0", "", make_schema(ARGUMENTS[case]))
        matcher = compiler.compile(build_call_structure(form, [tool])).result()
        whole = form.address.replace(NAME, tool.name) + text.strip().removeprefix(form.address) + "\n"
        taken = matcher.try_consume_tokens([*whole.encode()])
        refused += [case] if whole.encode()[taken:].strip() else []
    assert bool(refused) == (name(template) in OTHERWISE_FORCED), refused
