"""The drafter contract must fail for plausible bugs, each in the function that is about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.contract.drafter_mutants import MUTATIONS, SOUND
from tests.contract.drafter_subjects import Loader
from tests.contract.test_drafters import ROUNDS


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loader]:
    opened = Loader(tmp_path_factory.mktemp("drafters"))
    yield opened
    opened.close()


@pytest.mark.parametrize("name", SOUND)
def test_the_same_on_the_toy_without_a_bug(toys: Loader, name: str) -> None:
    drafter, open_drafter = SOUND[name]
    subject = toys.load(f"{drafter} on toy-tree")
    for check in ROUNDS:
        check(subject.replaced(replace(subject.loaded.spec, open=open_drafter)))


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_bug_on_the_toy_is_noticed(toys: Loader, name: str) -> None:
    mutation = MUTATIONS[name]
    subject = toys.load(f"{mutation.drafter} on toy-tree")
    with pytest.raises((AssertionError, ValueError)):  # the drafter may notice it too
        mutation.check(subject.replaced(replace(subject.loaded.spec, open=mutation.open)))
