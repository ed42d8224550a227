"""A conversation in which the model calls a function and is given its result."""

import json

import edgespec


def count_lines(name: str, start: int) -> int:
    """What the tool does; a real one would read the file."""
    return len(name) + start


TOOL = {
    "type": "function",
    "function": {
        "name": "count_lines",
        "description": "Count the lines of a file, from line `start` on.",
        "parameters": {
            "type": "object",
            "properties": {
                "name": {"enum": ["setup.py", "main.py"]},
                "start": {"type": "integer", "minimum": 0, "maximum": 99},
            },
            "required": ["name", "start"],
            "additionalProperties": False,
        },
    },
}

messages: list[dict[str, object]] = [{"role": "user", "content": "How many lines does main.py have?"}]
with edgespec.load() as model:
    # The embedded model was not trained for tools, so the call is demanded; an instruct model decides by itself.
    reply = model.chat(messages, tools=[TOOL], tool_choice="required", max_tokens=256, temperature=0, seed=1)
    messages.append(reply.message)
    for i, call in enumerate(reply.tool_calls):
        arguments = json.loads(call.arguments)
        result = count_lines(**arguments)
        print(f"{call.name}({arguments}) -> {result}")
        messages.append({"role": "tool", "tool_call_id": f"call_{i}", "content": str(result)})
    answer = model.chat(messages, max_tokens=32, temperature=0)

print(f"The answer has {len(answer.tokens)} tokens.")
