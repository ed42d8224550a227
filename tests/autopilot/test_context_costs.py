"""Costs after long contexts: what is measured, on real sessions, and what the cost model makes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from edgespec.autopilot.cost_model import CostModel
from edgespec.autopilot.marginal_cost import MarginalCost
from edgespec.autopilot.profile import DraftCost, Profile
from edgespec.autopilot.profiler import choose_contexts, measure_contexts, measure_rows
from edgespec.backends import Model
from edgespec.backends.attached_draft import parse
from edgespec.backends.llamacpp.model import load
from edgespec.backends.mlx.model import load as load_mlx
from edgespec.backends.options import LoadOptions
from edgespec.backends.toy_session import ToyModel, ToySession
from edgespec.cancel import cancellable
from edgespec.core.decoding import read_prompt
from edgespec.core.protocols import Draft, Session
from edgespec.errors import Cancelled
from tests.core.toys import Alarm
from tests.gguf_models import DRAFT, TARGET
from tests.mlx_models import CONFIGS, make_folder

CONTEXT = 640
SHORT = Profile({1: 1e-4, 4: 2e-4, 16: 4e-4}, {"self": DraftCost({1: 1e-4})})
Open = Callable[[Path], Model]


def llama(folder: Path) -> Model:
    return load(TARGET, LoadOptions(threads=1, context_size=CONTEXT))


def mlx(folder: Path) -> Model:
    return load_mlx(DRAFT, LoadOptions(context_size=CONTEXT))


def mlx_sliding(folder: Path) -> Model:
    return load_mlx(make_folder(folder, CONFIGS["sliding-window"]), LoadOptions(context_size=CONTEXT))


def mlx_hybrid(folder: Path) -> Model:
    return load_mlx(make_folder(folder, CONFIGS["hybrid"]), LoadOptions(context_size=CONTEXT))


@pytest.fixture(scope="module", params=[llama, mlx, mlx_sliding, mlx_hybrid])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    opened = request.param(tmp_path_factory.mktemp("model"))
    yield opened
    opened.close()


def answer(session: Session) -> np.ndarray:
    """Logits [3, V] after a text that begins as the measured one does."""
    read_prompt(session, [11, 5, 7, 9])
    scores = session.forward(3, Draft.chain([4, 5]))
    rows = np.stack([scores.logits(i).copy() for i in range(3)])
    session.commit(())
    return rows


def test_longer_contexts_are_measured_and_leave_the_session_clean(model: Model) -> None:
    fresh, session = model.open_session(), model.open_session()
    expected = answer(fresh)
    profile = measure_contexts(session, SHORT, (128, 256, 2048), 60.0, {})
    assert session.position == 0
    assert list(profile.longer) == [128, 256, CONTEXT - 96], "the last as long as the context allows"
    for each in profile.longer.values():
        assert {1, 16} <= each.rows.keys() <= {1, 2, 4, 8, 16} and all(0 < s < 10 for s in each.rows.values())
    assert profile.rows == SHORT.rows and profile.drafts == SHORT.drafts
    assert np.abs(answer(session) - expected).max() < 1e-3
    session.close()
    fresh.close()


@pytest.mark.parametrize("calls", [2, 7])
def test_a_measurement_that_is_cancelled_leaves_the_session_clean(model: Model, calls: int) -> None:
    fresh, session = model.open_session(), model.open_session()
    with pytest.raises(Cancelled), cancellable(Alarm(calls)):
        measure_contexts(session, SHORT, (128, 256), 60.0, {})
    assert session.position == 0
    assert np.abs(answer(session) - answer(fresh)).max() < 1e-3
    session.close()
    fresh.close()


@pytest.mark.parametrize(("open_model", "method"), [(llama, "qspec:4"), (llama, "sparse:4,60"), (mlx, "layerskip:1")])
def test_drafts_that_share_the_cache_are_measured_with_it(open_model: Open, method: str, tmp_path: Path) -> None:
    target, spec = open_model(tmp_path), parse(method)
    assert spec is not None
    draft = target.make_self_draft(spec, folder=tmp_path)
    session = target.open_session()
    profile = measure_contexts(session, SHORT, (128, 256), 60.0, {"self": draft})
    assert session.position == 0
    for each in profile.longer.values():
        assert list(each.drafts) == ["self"]
        assert each.drafts["self"].units[1] >= SHORT.drafts["self"].units[1]
    beside = draft.open_session(session)
    read_prompt(session, [11, 5, 7])
    assert beside.position == 3, "drafts from what the target holds"
    for each in (beside, session, draft, target):
        each.close()


def test_what_does_not_fit_the_budget_is_left_out() -> None:
    target = load(TARGET, LoadOptions(threads=1, context_size=CONTEXT))
    session = target.open_session()
    slow = Profile({1: 1.0, 16: 4.0})
    assert measure_contexts(session, slow, (128,), 3.0, {}).longer == {}
    assert measure_contexts(session, SHORT, (128,), 0.0, {}).longer == {}
    assert measure_contexts(session, Profile({1: 1e-4, 4: 2e-4}), (128,), 3.0, {}).longer == {}, "16 rows are unknown"
    assert session.position == 0
    target.close()


def test_a_runtime_that_cannot_copy_has_no_longer_contexts() -> None:
    session = ToySession(ToyModel(1, 12), context_size=CONTEXT)
    assert measure_contexts(session, Profile(measure_rows(session, 0.1)), (128,), 1.0, {}).longer == {}
    assert session.position == 0


def test_contexts_within_the_size() -> None:
    assert choose_contexts((4096, 16384, 32768), 100_000) == [4096, 16384, 32768]
    assert choose_contexts((4096, 16384, 32768), 32768) == [4096, 16384, 32672]
    assert choose_contexts((4096, 16384, 32768), 8192) == [4096, 8096]
    assert choose_contexts((4096, 16384), 4608) == [4096], "4,512 would add little"
    assert choose_contexts((2048,), 2048) == [1952]
    assert choose_contexts((2048,), 128) == []


ROWS = (1, 2, 3, 4, 8, 16)


def true_s(rows: int, context: int) -> float:
    """(a + b m) + c (d + e m), with a step as the kernels of llama.cpp have it."""
    weights = 30.0 + 10.0 * rows + (20.0 if rows in (2, 3) else 0.0)
    return weights + context * (0.002 + 0.006 * rows)


def make_profile(*contexts: int) -> Profile:
    longer = {c: Profile({m: true_s(m, c) for m in (1, 4, 16)}) for c in contexts}
    return Profile({m: true_s(m, 0) for m in ROWS}, longer=longer)


@pytest.mark.parametrize("contexts", [(2048,), (4096, 16384)])
@pytest.mark.parametrize("position", [0, 500, 3000, 8000, 32000])
def test_unseen_contexts_are_predicted(contexts: tuple[int, ...], position: int) -> None:
    costs = CostModel(make_profile(*contexts))
    costs.move_to(position)
    for rows in range(1, 17):
        assert costs.seconds(rows) == pytest.approx(true_s(rows, position), rel=0.001), rows


def test_a_round_costs_what_its_context_does() -> None:
    cost = MarginalCost(CostModel(make_profile(4096)))
    for position in (8000, 0):
        cost.begin_round(position)
        assert cost.seconds(4) == pytest.approx(true_s(4, position))


def test_attention_is_that_of_one_row_at_least_and_of_each_row_at_most() -> None:
    short = {1: 10.0, 16: 40.0}
    assert Profile(short, longer={1000: Profile({1: 12.0, 16: 400.0})}).seconds(16, 1000) == 40.0 + 16 * 2.0
    assert Profile(short, longer={1000: Profile({1: 12.0, 16: 39.0})}).seconds(16, 1000) == 42.0
    assert Profile(short, longer={1000: Profile({1: 9.0, 16: 50.0})}).seconds(16, 1000) == 40.0, "noise"
    assert Profile(short, longer={1000: Profile({1: 12.0})}).seconds(16, 2000) == 40.0 + 16 * 4.0


def test_a_wrong_slope_is_learned_in_its_band_alone() -> None:
    """A profile that knows no longer context: at 8,000 tokens one row takes 2.3 times as long, 16 rows 5.6 times."""
    rng = np.random.default_rng(1)
    costs = CostModel(make_profile())
    for position, rounds in ((500, 60), (8000, 60)):
        for at in range(rounds):
            rows = (1, 1, 4, 16)[at % 4]
            slow = 8.0 if at % 20 == 13 else 1.0
            costs.observe(rows, position + at, true_s(rows, position + at) * rng.lognormal(0, 0.03) * slow)
    for position in (8100, 500):
        costs.move_to(position)
        for rows in (1, 4, 16):
            assert costs.seconds(rows) == pytest.approx(true_s(rows, position), rel=0.1), (position, rows)


def test_drafting_costs_by_context() -> None:
    longer = {4000: Profile({1: 20.0}, {"self": DraftCost({1: 6.0}), "block": DraftCost({1: 3.0, 8: 9.0})})}
    drafts = {"self": DraftCost({1: 2.0}, 0.5), "block": DraftCost({1: 3.0, 8: 5.0}), "sparse": DraftCost({1: 2.0})}
    costs = CostModel(Profile({1: 10.0}, drafts, longer))
    costs.move_to(8000)
    assert (costs.unit_s("self"), costs.unit_s("block", 8), costs.unit_s("sparse")) == (10.0, 13.0, 2.0)
    assert costs.read_s("self") == 0.5
    for _ in range(15):
        costs.observe_drafting("self", 30.0, costs.predict_unit_s("self"))
    assert costs.unit_s("self") == pytest.approx(30.0)
    costs.move_to(2000)
    assert costs.unit_s("self") == pytest.approx(12.0), "as far off the profile as in the nearest band"
    costs.observe_drafting("self", 4.0, costs.predict_unit_s("self"))
    costs.observe_drafting("self", 4.0, costs.predict_unit_s("self"))
    assert costs.unit_s("self") == pytest.approx(4.0), "this band has its own"


def test_a_profile_of_contexts_without_tokens_is_refused() -> None:
    for longer in ({0: SHORT}, {-1: SHORT}, {5: Profile({1: 1.0}, longer={9: SHORT})}):
        with pytest.raises(ValueError, match="longer context"):
            Profile({1: 1.0}, longer=longer)
