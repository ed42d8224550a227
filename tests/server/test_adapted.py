"""A server changes to another version of an adapted draft while it answers."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic

from edgespec.models.versions import BASE, AdaptedDrafts
from tests.gguf_models import DRAFT, TARGET
from tests.models.test_versions import CARD
from tests.server.serving import EMBEDDED, Server, serving

NAME = "embedded"
PROMPTS = ("def read_lines(path):", "import os\n\n")


def ask(server: Server, prompt: str) -> str:
    """The text of an answer, streamed."""
    client = server.openai()
    parts = client.completions.create(model=NAME, prompt=prompt, max_tokens=24, temperature=0, stream=True)
    return "".join(part.choices[0].text for part in parts)


def test_the_draft_changes_while_answers_stream(tmp_path: Path) -> None:
    pair = AdaptedDrafts(tmp_path / "data" / "adapted").pair(TARGET, DRAFT)
    with serving(tmp_path, *EMBEDDED, "--exact") as server:
        plain = [server.openai().completions.create(model=NAME, prompt=prompt, max_tokens=24, temperature=0,
                 extra_body={"draft_max": 0}).choices[0].text for prompt in PROMPTS]  # fmt: skip
        assert server.model(NAME)["draft"].endswith("draft.gguf")

        def ask_until(prompt: str, draft: str) -> set[str]:
            """The texts of answers up to the first one after the server has this draft."""
            texts, end = set(), monotonic() + 60
            while not server.model(NAME)["draft"].endswith(draft):
                assert monotonic() < end
                texts.add(ask(server, prompt))
            return texts | {ask(server, prompt)}

        with ThreadPoolExecutor() as pool:
            for change, draft in ((lambda: pair.add(CARD, lambda path: shutil.copy(DRAFT, path)), "(version 1)"),
                                  (lambda: pair.use(BASE), "draft.gguf")):  # fmt: skip
                change()
                found = pool.map(ask_until, PROMPTS, [draft] * len(PROMPTS))
                assert list(found) == [{text} for text in plain]
