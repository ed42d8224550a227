"""The drafter contract over every drafter of the registry on every runtime that has it; ids name both."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from edgespec.autopilot.profiler import measure_drafters
from edgespec.backends import BackendName
from edgespec.backends.attached_draft import Unsupported
from edgespec.drafters.registry import drafter_specs
from edgespec.models import heads as planner_heads
from tests.contract import drafter_answers, drafters
from tests.contract.drafter_subjects import ADOPTING, METHODS, NAMES, TOYS, Loader, Subject, installed


@pytest.fixture(scope="module")
def loader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loader]:
    folder = tmp_path_factory.mktemp("drafters")
    with installed(folder / "plugin", "automaton = edgespec_automaton:SPEC"):
        opened = Loader(folder)
        yield opened
        opened.close()


@pytest.fixture(scope="module", params=NAMES)
def subject(request: pytest.FixtureRequest, loader: Loader) -> Subject:
    return loader.load(request.param)


def test_every_drafter_of_the_registry_is_run_on_toy_and_other_runtimes(loader: Loader) -> None:
    """A drafter that needs a part of the target is run where the runtime has such parts; a head where it is run."""
    names: dict[BackendName, str] = {"llamacpp": "llama.cpp", "mlx": "mlx"}
    runnable = planner_heads._RUNNABLE
    for spec in drafter_specs().values():
        runs = {name.split(" on ")[1] for name in NAMES if loader.load(name).drafter == spec.name}
        if spec.needs == "head":
            assert runs == {names[backend] for backend in names if spec.name in runnable[backend]}, spec.name
        else:
            assert runs == ({*METHODS} if spec.needs == "target" else {*TOYS, *METHODS}), spec.name


def test_the_toy_has_no_drafts_of_its_parts(loader: Loader) -> None:
    for draft in ("layerskip:1", "eagle3"):
        with pytest.raises(Unsupported):
            loader.load(f"{draft} on toy-linear")


ROUNDS = [
    drafters.keeps_in_step,
    drafters.continues_every_path,
    drafters.hears_of_every_round,
    drafters.may_stop_anywhere,
    drafters.knows_what_is_unread,
    drafters.reuses_prefixes,
    drafters.stays_within_limits,
    drafters.draws_its_chains,
]


ANSWERS = [
    drafter_answers.says_what_plain_decoding_says,
    drafter_answers.serves_every_rule,
    drafter_answers.survives_other_texts,
    drafter_answers.survives_structure,
    drafter_answers.survives_cancels,
]
# These draft by the classes and sessions of others on the same runtime: ngram, model, eagle3, medusa and qspec.
ALIKE = (
    *(f"{each} on mlx" for each in ("suffix", "automaton", "eagle", "mtp", "hydra", "sparse:4,250")),
    *(f"{each} on llama.cpp" for each in ("suffix", "automaton", "mtp")),
)
FAILING = [name for name in NAMES if name.endswith(TOYS)]
FAILING += [f"{each} on llama.cpp" for each in ("ngram", "layerskip:2", "eagle3", "dflash")]  # one of each class
FAILING += [f"{each} on mlx" for each in ("layerskip:1", "eagle3", "dflash")]


@pytest.mark.parametrize("check", ROUNDS, ids=lambda check: check.__name__)
def test_round_by_round(check: Callable[[Subject], None], subject: Subject) -> None:
    check(subject)


@pytest.mark.parametrize("check", ANSWERS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ALIKE])
def test_answers(loader: Loader, name: str, check: Callable[[Subject], None]) -> None:
    check(loader.load(name))


def test_its_cost_is_measured(subject: Subject) -> None:
    """A drafter without a cost is never asked by the autopilot."""
    target = subject.target.open_session()
    drafter = subject.open(target)
    found, failures = measure_drafters([drafter], target)
    assert not failures and (drafter.is_free or found[subject.drafter].units)
    drafter.close()
    target.close()


@pytest.mark.parametrize("name", FAILING)
def test_errors(loader: Loader, name: str) -> None:
    """The errors are those of a drafter, not of its session."""
    drafter_answers.survives_errors(loader.load(name))


@pytest.mark.parametrize("name", ADOPTING)
def test_adoption(loader: Loader, name: str) -> None:
    drafter_answers.survives_adoption(loader.load(name))
