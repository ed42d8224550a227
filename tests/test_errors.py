"""What errors quote of files and servers."""

from __future__ import annotations

import pickle

import pytest

from edgespec.errors import EdgespecError, InvalidModelFile


@pytest.mark.parametrize("quoted", ["\x1b[2J", "\u202e", "\ud800", "\x00", "\x9b31m"])
def test_nothing_in_a_message_steers_a_terminal(quoted: str) -> None:
    error = InvalidModelFile(f"the key '{quoted}' is unknown.", hint=f"Remove '{quoted}'.")
    assert all(c.isprintable() for c in error.message + error.hint) and str(error) == error.message
    assert "\N{REPLACEMENT CHARACTER}" in error.message
    again = pickle.loads(pickle.dumps(error))
    assert (again.message, again.hint) == (error.message, error.hint)


def test_names_of_all_languages_stay_as_they_are() -> None:
    name = "Mes\u00a0modèles/m\u200ci/模型\u3000大/\U0001f468\u200d\U0001f469"
    assert InvalidModelFile(f"{name} is missing.", hint="").message == f"{name} is missing."


def test_a_message_has_a_bounded_length() -> None:
    message = EdgespecError(f"begin {'x' * 10**6} end.", hint="").message
    assert len(message) < 2100 and message.startswith("begin x") and message.endswith("x end.")
    assert EdgespecError("y" * 2000, hint="").message == "y" * 2000
