"""Every class of mlx-lm answers by a schema, and with a forced call of a tool, whatever its caches are."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

import edgespec
from tests.backends.test_mlx_zoo import REFUSED, UNMADE
from tests.backends.zoo import class_names, describe, tiny
from tests.gguf_models import vocabulary_fields
from tests.mlx_models import save

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}\n</tool_call>{% endfor %}"
    "\n{% endfor %}<assistant>"
)
SCHEMA = {
    "type": "object",
    "properties": {
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["size", "tags"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "resize", "parameters": SCHEMA}}
# Of published configs, which transformers reads and mlx-lm does not.
MORE = {"exaone4": {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]}}
SAMPLING = {"max_tokens": 120, "temperature": 1.0, "seed": 1}


@pytest.mark.parametrize("name", [name for name in class_names() if name not in UNMADE | set(REFUSED)])
def test_class(name: str, tmp_path: Path) -> None:
    config = describe(name, len(vocabulary_fields()["tokens"]))
    written = {**config, **MORE.get(name, {}), "model_type": name, "eos_token_id": 0, "bos_token_id": 0}
    save(tmp_path, tiny(name, config), written)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    with edgespec.load(tmp_path, backend="mlx", ctx=512, draft="ngram", draft_max=3) as model:
        reply = model.generate("x = 1 x = 1 x =", schema=SCHEMA, **SAMPLING)
        jsonschema.validate(json.loads(reply.text), SCHEMA)
        (call,) = model.chat("resize it", tools=[TOOL], tool_choice="resize", **SAMPLING).tool_calls
        assert call.name == "resize"
        jsonschema.validate(json.loads(call.arguments), SCHEMA)
