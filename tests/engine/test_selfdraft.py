"""Self-drafts through the whole engine on llama.cpp: the text is plain decoding's, whatever drafts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from edgespec.autopilot.speculation import Speculation
from edgespec.backends import Model, open_model
from edgespec.backends.attached_draft import parse
from edgespec.backends.options import LoadOptions
from edgespec.core.sampling import SamplingParams
from edgespec.engine.engine import Engine
from edgespec.engine.events import Finished, Request
from tests.engine.conftest import PLAIN, eager, generate, list_loaded
from tests.engine.prompts import CODE
from tests.gguf_models import TARGET

GREEDY = SamplingParams(temperature=0)
METHODS = ["layerskip:2", "layerskip:0,1,4,5+qspec:2", "qspec:4+sparse:2,24"]


@pytest.fixture(scope="module")
def target() -> Iterator[Model]:
    """In the mode whose results do not depend on the number of rows, so that texts can be compared to the last one."""
    options = LoadOptions(threads=1, context_size=512, exact=True)
    model = open_model("llamacpp", TARGET, options)
    yield model
    model.close()


@pytest.fixture(scope="module")
def plain() -> dict[Request, tuple[str, Finished]]:
    """What plain decoding says, asked once for each request."""
    return {}


@pytest.fixture(params=METHODS)
def engine(target: Model, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    method = parse(request.param)
    assert method is not None
    folder = tmp_path_factory.getbasetemp() / "drafts"  # copies are made once
    draft = target.make_self_draft(method, folder=folder)
    opened = Engine(target, list_loaded(self=draft), PLAIN)
    yield opened
    opened.release_draft()


@pytest.mark.parametrize(
    "speculation",
    [Speculation(("self",), 3), Speculation(("self",), 2, 5), Speculation(("ngram", "self"))],
    ids=["chain", "tree", "autopilot"],
)
@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=0.8)], ids=["greedy", "drawn"])
def test_the_text_is_plain_decodings(
    engine: Engine, speculation: Speculation, sampling: SamplingParams, plain: dict[Request, tuple[str, Finished]]
) -> None:
    for prompt in CODE[:2]:
        request = Request(prompt, sampling, max_tokens=40, seed=7)
        if request not in plain:
            engine.speculation = PLAIN
            plain[request] = generate(engine, request)
        engine.speculation = speculation
        text, finished = generate(engine, request)
        assert (text, finished.tokens) == (plain[request][0], plain[request][1].tokens)
        if speculation.draft_max is not None:
            assert finished.metrics.accepted_tokens > 0


def test_a_long_text_leaves_the_window(engine: Engine) -> None:
    prompt = "\n".join(CODE[:6])
    engine.speculation = PLAIN
    expected, _ = generate(engine, Request(prompt, GREEDY, max_tokens=100))
    engine.speculation = Speculation(("self",), 4)
    text, finished = generate(engine, Request(prompt, GREEDY, max_tokens=100))
    assert text == expected and finished.metrics.drafted_tokens > 50


@pytest.mark.parametrize("read_s", [0.0, 1.0])
def test_the_autopilot_asks_whatever_reading_takes(engine: Engine, read_s: float) -> None:
    """A draft that is not worth reading the text for is given its end alone; a follower has it anyway."""
    request = Request("\n".join(CODE[:4]), GREEDY, max_tokens=60)
    engine.speculation = PLAIN
    expected, _ = generate(engine, request)
    engine.speculation = Speculation(("ngram", "self"))
    engine.draft_stats = eager(read_s)
    text, finished = generate(engine, request)
    assert text == expected and finished.metrics.drafted_tokens > 20
