"""An answer that follows a JSON schema. Drafting changes neither the schema's hold nor the distribution."""

import json

import edgespec

SCHEMA = {
    "type": "object",
    "properties": {
        "language": {"enum": ["Python", "C", "Rust"]},
        "lines": {"type": "integer", "minimum": 1, "maximum": 999},
        "is_tested": {"type": "boolean"},
    },
    "required": ["language", "lines", "is_tested"],
    "additionalProperties": False,
}

with edgespec.load() as model:
    reply = model.chat("Describe the file read_lines.py.", schema=SCHEMA, max_tokens=256, temperature=0, seed=1)

if reply.finish_reason == "stop":  # an answer that max_tokens cut off is not complete JSON
    print(json.dumps(json.loads(reply.text), indent=2))
