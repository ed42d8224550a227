"""Chat templates of real models: nothing of a conversation is lost, and calls are read as the templates write them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edgespec.text.chat_template import ChatTemplate
from laboratory.templates import ARGUMENTS, BOS, CONVERSATIONS, EOS, find_fault, find_misread
from tests.models import REPOSITORY

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
