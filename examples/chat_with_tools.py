"""A conversation in which the model calls a function and receives its result."""

import json

import edgespec

FILES = {"main.py": "import setup\n\nprint(setup.NAME)\n", "setup.py": 'NAME = "demo"\nVERSION = 1\n'}


def count_lines(name: str) -> int:
    """The tool: the number of lines of a file."""
    return len(FILES[name].splitlines())


TOOL = {
    "type": "function",
    "function": {
        "name": "count_lines",
        "description": "Count the lines of a file.",
        "parameters": {
            "type": "object",
            "properties": {"name": {"enum": list(FILES)}},
            "required": ["name"],
            "additionalProperties": False,
        },
    },
}

messages: list[dict[str, object]] = [{"role": "user", "content": "How many lines does setup.py have?"}]
with edgespec.load() as model:
    # The embedded model was not trained for tools, so the call is required; an instruct model decides by itself.
    reply = model.chat(messages, tools=[TOOL], tool_choice="required", max_tokens=256, temperature=0, seed=1)
    messages.append(reply.message)
    for i, call in enumerate(reply.tool_calls):
        arguments = json.loads(call.arguments)
        result = count_lines(**arguments)
        print(f"{call.name}({arguments}) -> {result}")
        messages.append({"role": "tool", "tool_call_id": f"call_{i}", "content": str(result)})
    answer = model.chat(messages, max_tokens=32, temperature=0)

print(f"The answer has {len(answer.tokens)} tokens.")
