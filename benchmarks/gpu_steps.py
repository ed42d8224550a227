"""The steps of `benchmarks.gpu`: which programs run, with which models, and for how long at most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.harness import DRAFT, REPOSITORY

HEAD = REPOSITORY / "tests" / "fixtures" / "heads" / "eagle3-python-6m"
TESTS = [REPOSITORY / "tests" / name for name in ("gpu", "contract")]
RUNTIMES = "not mlx and not ranks and not toy"  # of the contract: those that llama.cpp runs
MAX_WORKERS = 8  # of the tests, since each opens the device
LOOKUPS = ("ngram", "recycling", "recycling@4/16", "lookahead@4/16")
SELF_DRAFTS = ("qspec", "layerskip:16")  # half of the layers of an 8B
CODE = ("code_completion", "code_edit")  # what the embedded pair and its head can write

STEPS = ("contract", "doctor", "large", "real", "streams", "host", "lookups", "small", "selves", "together")

Words = Sequence[object]
"""A module of this environment and its arguments."""


@dataclass(frozen=True, slots=True)
class Step:
    """Programs that run one after the other, and the share of the whole time that they get at most."""

    name: str
    share: float
    programs: tuple[Words, ...]


@dataclass(frozen=True, slots=True)
class Setting:
    """What the steps are made of. `results` is a folder for what stays, `made` one for models."""

    results: Path
    made: Path
    model: Path
    prompts: Path | None
    server: str
    large: str
    small: str
    tokens: int
    per_category: int
    context: int
    threads: int

    @property
    def head(self) -> Path:
        """That of the small model; beside the models, 'auto' would find it for each of them."""
        return self.made / "head" / "eagle3.gguf"

    def make_models(self) -> Step:
        """The models at the cost of others, the large one first."""
        self.head.parent.mkdir()
        make, small = "laboratory.cost_faithful", self.made / "small.gguf"
        draft = "own" if self.small == "own" else "100m"
        programs = (
            (make, self.large, self.made / "large.gguf", "--source", self.model),
            (make, self.small, small),
            (make, draft, self.made / "draft.gguf", "--source", DRAFT),
            ("laboratory.eagle3_gguf", HEAD, small, self.head),
        )
        return Step("models", 0.5, programs)

    def list_steps(self) -> list[Step]:
        """All other steps, by worth."""
        large, small, draft = (self.made / f"{name}.gguf" for name in ("large", "small", "draft"))
        workers = min(psutil.cpu_count() or 1, MAX_WORKERS)
        chat = ("--prompts", self.prompts) if self.prompts else ()
        lookups = (*chat, *_repeat("--drafter", *LOOKUPS), "--only", "ngram-mod")
        selves = (*chat, *_repeat("--drafter", *SELF_DRAFTS), "--only", "plain")
        head = f"eagle3:{self.head}"
        heads = ("--draft", draft, *_repeat("--drafter", head, f"{head}@4/16", "ngram"))
        raw = ("--form", "raw", *_repeat("--category", *CODE), "--only", "draft")
        questions = ("--chat", self.prompts) if self.prompts else ("--prompts", self.per_category)
        amounts = ("--tokens", self.tokens, "--threads", self.threads)
        arms = ("--repeats", 1, *_repeat("--arm", "ngram", "ngram+recycling"), *questions)
        streams = ("--streams", "1,4", "--calls", 2, "--repeats", 3, "--llama-server", self.server)
        return [
            Step("contract", 0.35, (("pytest", "-v", "-n", workers, "--dist", "loadfile", *TESTS, "-k", RUNTIMES),)),
            Step("doctor", 0.15, (("edgespec", "doctor", "--gpu"),)),
            Step("large", 0.4, (self._compare("large", large, *lookups),)),
            Step("real", 0.25, (self._compare("real", self.model, *lookups),)),
            Step("streams", 0.15, (("benchmarks.server_load", "--model", large, *amounts, *streams),)),
            Step("host", 0.05, (("benchmarks.overhead", self.model, "--repeats", 3, *amounts),)),
            Step("lookups", 0.1, (("benchmarks.lookups", "--target", self.model, *amounts, *arms),)),
            Step("small", 0.25, (self._compare("small", small, *heads, *raw),)),
            Step("selves", 0.2, (self._compare("selves", large, *selves),)),
            Step("together", 0.15, (("benchmarks.parallel", small, "--draft", draft, "--at-once", "1,4", *amounts),)),
        ]

    def _compare(self, name: str, target: Path, *more: object) -> Words:
        """A comparison with llama-server, whose rounds are a file of the results."""
        amounts = ("--per-category", self.per_category, "--tokens", self.tokens, "--threads", self.threads)
        files = ("--target", target, "--record", self.results / f"{name}.jsonl", "--llama-server", self.server)
        return ("benchmarks.peers", *files, "--ctx", self.context, *amounts, *more)


def _repeat(option: str, *values: str) -> list[str]:
    return [word for value in values for word in (option, value)]
