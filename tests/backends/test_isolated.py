"""Functions in processes of their own, which leave other children of this process alone."""

from __future__ import annotations

from multiprocessing import get_context
from time import sleep

import pytest

from edgespec.backends.isolated import run_in_child
from edgespec.errors import Cancelled


def test_cancelling_ends_its_own_process_alone() -> None:
    other = get_context("spawn").Process(target=sleep, args=(60,))
    other.start()
    n_checks = 0

    def check() -> None:
        nonlocal n_checks
        n_checks += 1
        if n_checks > 2:
            raise Cancelled

    with pytest.raises(Cancelled):
        run_in_child(sleep, 60, check=check)
    other.join(0.5)
    assert other.is_alive()
    other.kill()
    other.join()
