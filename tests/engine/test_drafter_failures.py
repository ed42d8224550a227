"""Drafters that fail or cannot be opened cost their proposals, never the answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from edgespec.autopilot.speculation import Speculation
from edgespec.cancel import iterate
from edgespec.core.draft_tree import DraftTree
from edgespec.core.drafter import Drafter
from edgespec.core.protocols import Budget, Session
from edgespec.drafters.registry import SlotResources
from edgespec.engine.events import Finished
from edgespec.errors import BackendError, EdgespecError, InvalidRequest
from tests.core.toys import Alarm
from tests.engine.conftest import PLAIN
from tests.engine.packages import ADAPTIVE, FIXED, TALE, Faults, Flaky, add_package, answer, open_toy

METHODS = ("begin", "unread", "draft_async", "expand", "observe")


@pytest.mark.parametrize(
    ("method", "length"),
    [(method, length) for method in METHODS for length in (FIXED, ADAPTIVE) if (method, length) != ("unread", FIXED)],
)  # a fixed length reads whatever there is
def test_a_failing_drafter_is_told_of_once_and_opened_anew(method: str, length: int | None) -> None:
    faults = Faults(method, 2)
    is_async = method == "draft_async" and length is None
    engine = open_toy(add_package("flaky", lambda resources: Flaky(faults, is_async=is_async)))
    expected = answer(engine, TALE).tokens
    alone = Speculation(("flaky",), length)
    first, second, third = (answer(engine, TALE, alone) for _ in range(3))
    assert [each.tokens for each in (first, second, third)] == [expected] * 3
    assert first.notices == ("The drafter flaky failed and was left out: Something broke.",)
    assert second.notices == third.notices == ()
    assert faults.left == 0 and faults.opened > 1 and faults.closed == faults.opened - 1
    assert third.drafters == {"flaky"} and sum(step.n_accepted for step in third.steps) > 0
    engine.close()
    assert faults.closed == faults.opened


@pytest.mark.parametrize("length", [FIXED, ADAPTIVE])
def test_the_others_draft_on_when_one_fails(length: int | None) -> None:
    engine = open_toy(add_package("flaky", lambda resources: Flaky(Faults("expand", 1000), is_free=True)))
    expected = answer(engine, TALE).tokens
    speculation = Speculation(("flaky", "ngram", "model"), length)
    found = [answer(engine, TALE, speculation) for _ in range(2)]
    assert [each.tokens for each in found] == [expected] * 2
    assert len(found[0].notices) == 1 and not found[1].notices
    for each in found:
        assert each.drafters and "flaky" not in each.drafters
        assert not any(ord("?") in step.tokens for step in each.steps), "what the failed unit had added is taken back"
    engine.close()


@pytest.mark.parametrize("length", [FIXED, ADAPTIVE])
def test_a_token_that_does_not_exist_is_a_failure(length: int | None) -> None:
    class Stranger(Drafter):
        name = "stranger"
        is_free = True

        def expand(self, tree: DraftTree, text: Sequence[int], limit: Budget) -> Iterator[None]:
            tree.add(-1, 257, self.name, 0.99)
            yield

    engine = open_toy(add_package("stranger", lambda resources: Stranger()))
    expected = answer(engine, TALE).tokens
    found = answer(engine, TALE, Speculation(("stranger", "ngram"), length))
    assert found.tokens == expected and found.drafters == {"ngram"}
    (notice,) = found.notices
    assert notice.startswith("The drafter stranger failed and was left out: ") and "token 257" in notice
    engine.close()


@pytest.mark.parametrize(
    "error",
    [ValueError("no table."), OSError("no file"), InvalidRequest("no luck.", hint="None."), SystemExit("not here")],
    ids=str,
)
def test_a_drafter_that_cannot_be_opened_is_left_out(error: BaseException) -> None:
    tried = 0

    def refuse(resources: SlotResources) -> Drafter:
        nonlocal tried
        tried += 1
        raise error

    engine = open_toy(add_package("refusing", refuse))
    engine.speculation = Speculation(("refusing", "ngram", "model"), FIXED)
    first, second = answer(engine, TALE), answer(engine, TALE)
    reason = (error.message if isinstance(error, EdgespecError) else str(error)).rstrip(".")
    assert first.notices == (f"The drafter refusing cannot be used: {reason}.",)
    assert second.notices == () and tried == 1
    assert first.tokens == second.tokens == answer(engine, TALE, PLAIN).tokens
    assert first.drafters and "refusing" not in first.drafters
    alone = answer(engine, TALE, Speculation(("refusing",), FIXED))
    assert alone.tokens == first.tokens and alone.drafters == set(), "plain decoding is left"
    engine.close()


def test_without_memory_for_a_new_slots_draft_no_slot_is_opened() -> None:
    engine = open_toy()

    def refuse() -> Session:
        raise BackendError("no memory.", hint="None.")

    source = engine.drafters["model"].source
    assert source is not None
    source.open_session = refuse  # type: ignore[method-assign, assignment]
    with pytest.raises(BackendError, match="no memory"):
        answer(engine, TALE)
    engine.close()


def test_an_error_of_the_target_is_no_failure_of_a_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is a cancelled draft."""
    engine = open_toy(add_package("flaky", lambda resources: Flaky(Faults("none", 0))))
    engine.speculation = Speculation(("flaky", "ngram", "model"), FIXED)
    expected = answer(engine, TALE)

    def break_down(*_: object, **__: object) -> None:
        raise BackendError("broken.", hint="None.")

    (slot,) = engine._slots._kept
    monkeypatch.setattr(slot.target, "forward", break_down)
    with pytest.raises(BackendError, match="broken"):
        answer(engine, TALE)
    assert not engine._slots._kept
    for calls in range(1, 40, 7):
        *_, last = iterate(engine.stream(TALE), Alarm(calls))
        assert isinstance(last, Finished)
    again = answer(engine, TALE)
    assert again.tokens == expected.tokens and again.notices == () and again.drafters == expected.drafters
    engine.close()


@pytest.mark.parametrize(
    ("attribute", "value", "said"),
    [("block_size", None, "its block size is None"), ("confidence", "votes", "its confidence is 'votes'")],
)
def test_what_a_drafter_says_of_itself_is_checked(attribute: str, value: object, said: str) -> None:
    class Vague(Drafter):
        name = "vague"

        def expand(self, tree: DraftTree, text: Sequence[int], limit: Budget) -> Iterator[None]:
            yield

    def open_vague(resources: object) -> Drafter:
        drafter = Vague()
        setattr(drafter, attribute, value)
        return drafter

    engine = open_toy(add_package("vague", open_vague))
    found = answer(engine, TALE, Speculation(("vague", "ngram"), None))
    assert found.tokens == answer(engine, TALE).tokens
    (notice,) = found.notices
    assert said in notice
    engine.close()
