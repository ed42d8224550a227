"""Commands say which version of an adapted draft they use, or why they cannot."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from edgespec.models.versions import AdaptedDrafts, AdaptedPair
from tests.cli.conftest import Cli
from tests.gguf_models import DRAFT, TARGET
from tests.models.test_versions import CARD

RUN = ["run", "def", "--temperature", "0", "--max-tokens", "8", "--draft", "model", "--draft-max", "3", "--ctx", "128"]


@pytest.fixture
def pair(tmp_path: Path) -> AdaptedPair:
    return AdaptedDrafts(tmp_path / "data" / "adapted").pair(TARGET, DRAFT)


def test_commands_name_the_version(cli: Cli, pair: AdaptedPair) -> None:
    plain = cli(*RUN, "--threads", "1")
    assert "adapted" not in plain.stdout + plain.stderr
    card = pair.add(CARD, lambda path: shutil.copy(DRAFT, path))
    notice = f"note: Drafting with version 1 of the draft, adapted on {card.date}."
    done = cli(*RUN, "--threads", "1")
    assert done.stdout == plain.stdout and notice in done.stderr
    assert json.loads(cli(*RUN, "--threads", "1", "--json").stdout)["draft"].endswith("draft.gguf (version 1)")
    planned = cli("plan", "--no-speed")
    assert notice in planned.stderr and f"draft adapted on {card.date} (version 1)" in planned.stdout


def test_a_pair_whose_only_version_is_damaged_goes_back_to_the_base(cli: Cli, pair: AdaptedPair) -> None:
    """`use`, which the refusal names, works without a card."""
    pair.add(CARD, lambda path: shutil.copy(DRAFT, path))
    (pair.folder / "1" / "card.json").write_text("no card")
    mistyped = cli("adapt", "use", "0", "pythn-6m")
    assert mistyped.returncode == 3 and "No draft of pythn-6m is adapted." in mistyped.stderr
    assert pair.active_number() == 1
    used = cli("adapt", "use", "0")
    assert used.stdout == "the model drafts with the draft before any training\n" and pair.active_number() == 0
    (pair.folder / "active").write_text("1")
    shutil.rmtree(pair.folder / "1")
    assert cli("adapt", "list").stdout.splitlines()[-1].split() == ["*", "1", "damaged"]
    assert cli("adapt", "use", "0").returncode == 0 and pair.active() is None
    assert "No draft is adapted yet" in cli("adapt", "list").stdout
