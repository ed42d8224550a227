"""Vectors of texts, against llama.cpp's own mean pooling."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgespec.backends.llamacpp.model import load
from edgespec.backends.options import LoadOptions
from edgespec.cancel import iterate
from edgespec.core.peers import Yield
from edgespec.engine.prompts import Embedding, embed
from edgespec.errors import Cancelled
from edgespec.text.chat_template import encode_prompt
from tests.gguf_models import MAKERS, TARGET

TEXT = "def read_lines(path):\n    with open(path) as file:\n        return [line.strip() for line in file]\n" * 3


def test_it_is_the_mean_that_llama_cpp_pools(tmp_path: Path) -> None:
    """Of weights that are not quantized: nothing turns off broken AMX tiles for `Llama`."""
    from llama_cpp import Llama

    path = tmp_path / "model.gguf"
    MAKERS["llama"](path)
    model = load(path, LoadOptions(context_size=512, threads=1))
    (ours,) = [each for each in embed(model, [TEXT]) if isinstance(each, Embedding)]
    pooled = Llama(
        str(path), n_ctx=512, n_batch=512, n_ubatch=512, n_threads=1, embedding=True, pooling_type=1, verbose=False
    )
    theirs = np.array(pooled.embed(TEXT, normalize=True))
    assert ours.tokens == len(encode_prompt(model.tokenizer, TEXT, parse_special=True)) > 64, (
        "more than is read at once"
    )
    assert float(np.array(ours.vector) @ theirs) > 0.999
    model.close()


@pytest.mark.parametrize("name", MAKERS)
def test_every_kind_of_cache(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.gguf"
    MAKERS[name](path)
    model = load(path, LoadOptions(context_size=128, threads=1))
    texts = [list(range(1, 60)) + list(range(1, 60)), [5, 6], list(range(1, 60)) + list(range(1, 60))]
    one, two, again = [each for each in embed(model, texts) if isinstance(each, Embedding)]
    assert one == again and np.abs(np.array(one.vector) - two.vector).max() > 1e-3
    model.close()


def test_it_pauses_and_can_be_cancelled() -> None:
    model = load(TARGET, LoadOptions(context_size=512, threads=1))
    gone = False

    def check() -> None:
        if gone:
            raise Cancelled

    making = iterate(embed(model, [TEXT]), check)
    assert isinstance(next(making), Yield)
    gone = True
    with pytest.raises(Cancelled):
        list(making)
    model.close()
