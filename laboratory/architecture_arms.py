"""The arms of a sweep of architectures: a model's answers with a draft, with two slots or by a schema."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jsonschema

import edgespec
from benchmarks.harness import load_model
from edgespec.backends.options import LoadOptions
from edgespec.bench.divergence import first_divergence
from edgespec.errors import EdgespecError

ARMS: dict[str, dict[str, Any]] = {
    "plain": {"draft": "none"},
    "ngram": {"draft": "ngram", "draft_max": 4},
    "memory": {"draft": "suffix", "draft_max": 6, "memory": True},  # the last answer was given before
    "tree": {"draft": "ngram+recycling", "draft_max": 4, "draft_tree": 12},
    "itself": {"draft": "{model}", "draft_max": 4, "draft_tree": 12},  # as its own draft model
    # Two caches of 256 tokens would be more than the models were trained for, and would not be shared.
    "slots": {"draft": "ngram", "draft_max": 3, "parallel": 2, "ctx": 128},
    "plain slots": {"draft": "none", "parallel": 2, "ctx": 128},
    "layerskip:1": {"draft": "layerskip:1", "draft_max": 3},
    "qspec:4": {"draft": "qspec:4", "draft_max": 3},
    "sparse:4,16": {"draft": "sparse:4,16", "draft_max": 3},
    "auto": {"draft": "auto"},
    "schema": {"draft": "ngram", "draft_max": 3},
}
_PROMPT = "ab cd ef gh ab cd ef gh ab cd ef gh ab cd "
_PROMPTS = (_PROMPT, _PROMPT[:20] + "xyz ab cd ef", _PROMPT)
_TOKENS = 40
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "size", "tags"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class End:
    """What became of an arm: `said` is the reason, `tau` the tokens of a forward in its last answer."""

    end: str
    said: str = ""
    tau: float | None = None


def decode_arms(model: Path, arms: Sequence[str], record: Path) -> None:
    """Append the end of each arm to `record`, as JSON lines; what the runtime says goes to a file beside it."""
    os.environ["GGML_NO_BACKTRACE"] = "1"
    os.dup2(os.open(record.with_suffix(".stderr"), os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), 2)
    plain: dict[str, edgespec.Reply] = {}
    for arm in arms:
        try:
            plain = plain or {prompt: answer(model, (prompt,), draft="none")[0] for prompt in _PROMPTS}
            if arm == "schema":
                end = answer_by_schema(model)
            else:
                end = compare(model, [plain[prompt] for prompt in _PROMPTS], answer(model, _PROMPTS, **ARMS[arm]))
        except EdgespecError as error:
            end = End("refused", f"{error.message} {error.hint}".strip())
        except Exception as error:  # noqa: BLE001 - it is counted
            end = End("error", repr(error))
        with record.open("a") as file:
            file.write(json.dumps([arm, asdict(end)]) + "\n")


def answer(model: Path, prompts: Sequence[str], **options: Any) -> list[edgespec.Reply]:
    """Greedy answers to `prompts`, of as many at once as `options` have slots. Raises EdgespecError."""
    draft = options.pop("draft").format(model=model)
    with edgespec.load(model, draft=draft, **{"threads": 1, "ctx": 256, **options}) as loaded:

        def ask(prompt: str) -> edgespec.Reply:
            return loaded.generate(prompt, max_tokens=_TOKENS, temperature=0)

        with ThreadPoolExecutor(options.get("parallel", 1)) as threads:
            return list(threads.map(ask, prompts))


def compare(model: Path, plain: Sequence[edgespec.Reply], others: Sequence[edgespec.Reply]) -> End:
    """Whether the answers have the tokens of plain decoding. Raises EdgespecError."""
    tau = others[-1].stats.tau
    for prompt, one, other in zip(_PROMPTS, plain, others, strict=True):
        if one.tokens == other.tokens:
            continue
        loaded = load_model("llamacpp", model, LoadOptions(context_size=256, threads=1))
        session = loaded.open_session()
        tokens = loaded.tokenizer.encode(prompt, parse_special=True)
        fork = first_divergence(session, tokens, one.tokens, other.tokens)
        session.close()
        loaded.close()
        if fork is None:
            return End("differs", f"{len(one.tokens)} tokens against {len(other.tokens)}", tau)
        said = f"at token {fork.position}, logits {fork.gap:.2g} apart, which rounding changes by {fork.noise:.2g}"
        return End("near tie" if fork.is_near_tie else "differs", said, tau)
    return End("same", tau=tau)


def answer_by_schema(model: Path) -> End:
    """Whether two drawn answers follow the schema, one after the other in one cache. Raises EdgespecError."""
    with edgespec.load(model, threads=1, ctx=256, **ARMS["schema"]) as loaded:
        for seed in (1, 2):
            reply = loaded.generate(_PROMPT, max_tokens=120, temperature=1, seed=seed, schema=_SCHEMA)
            if not is_valid(reply.text):
                return End("invalid", reply.text)
    return End("same", tau=reply.stats.tau)


def is_valid(text: str) -> bool:
    """Whether `text` follows the schema."""
    try:
        jsonschema.validate(json.loads(text), _SCHEMA)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True
