"""With forwards of one width no drafter changes a text, on weights whose kernels change with the rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from edgespec.autopilot.speculation import Speculation
from edgespec.backends import open_model
from edgespec.backends.attached_draft import parse
from edgespec.backends.fixed_width import FixedWidthModel
from edgespec.backends.llamacpp.quantize import quantize
from edgespec.backends.options import LoadOptions
from edgespec.core.sampling import SamplingParams
from edgespec.engine.engine import Engine
from edgespec.engine.events import Request
from edgespec.engine.structure import json_structure
from tests.engine.conftest import PLAIN, eager, generate, list_loaded
from tests.engine.prompts import CODE
from tests.gguf_models import DRAFT, TARGET

DRAFTS = {
    "ngram": Speculation(("ngram",), 7, 7),
    "model": Speculation(("model",), 3, 3),
    "tree": Speculation(("model",), 3, 8),
    "self": Speculation(("self",), 3, 3),
    "autopilot": Speculation(("ngram", "model", "self")),
}
WAYS = (SamplingParams(temperature=0), SamplingParams(temperature=0.9, top_p=0.95))


@pytest.fixture(scope="module", params=[2, 4])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("weights")
    quantize(TARGET, folder / "floats.gguf", "F16")
    options = LoadOptions(threads=1, context_size=512)
    target, draft = (open_model("llamacpp", path, options) for path in (folder / "floats.gguf", DRAFT))
    fixed = FixedWidthModel(target, request.param)
    method = parse("layerskip:2")
    assert method is not None
    attached = fixed.make_self_draft(method, folder=folder)
    opened = Engine(fixed, list_loaded(model=draft, self=attached), PLAIN)
    yield opened
    opened.close()


@pytest.mark.parametrize("name", DRAFTS)
def test_a_text_does_not_depend_on_the_drafter(engine: Engine, name: str) -> None:
    engine.draft_stats = eager()
    accepted = 0
    for seed, prompt in enumerate(CODE[:2]):
        for sampling in WAYS:
            request = Request(prompt, sampling, max_tokens=40, seed=seed)
            engine.speculation = PLAIN
            expected = generate(engine, request)[1]
            engine.speculation = DRAFTS[name]
            finished = generate(engine, request)[1]
            assert finished.tokens == expected.tokens
            accepted += finished.metrics.accepted_tokens
    assert accepted > 3


def test_forced_tokens_change_nothing(engine: Engine) -> None:
    properties = {"a_long_name": {"type": "integer", "maximum": 99}}
    schema = {"type": "object", "properties": properties, "required": ["a_long_name"]}
    texts = set()
    for speculation in (PLAIN, DRAFTS["ngram"], DRAFTS["model"]):
        engine.speculation = speculation
        request = Request("x = ", WAYS[1], max_tokens=30, seed=5, structure=json_structure(schema))
        texts.add(generate(engine, request)[1].tokens)
    assert len(texts) == 1


def test_a_prompt_gives_the_same_text_again(engine: Engine) -> None:
    """Also after other texts, whose prefix it shares: what is reused was read in the same chunks."""
    engine.speculation = PLAIN
    first = generate(engine, Request(CODE[0], WAYS[0], max_tokens=24))[1].tokens
    for prompt in (CODE[0], CODE[0] + CODE[1], CODE[2]):
        generate(engine, Request(prompt, WAYS[0], max_tokens=8))
        assert generate(engine, Request(CODE[0], WAYS[0], max_tokens=24))[1].tokens == first
