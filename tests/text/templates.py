"""Small chat templates that write calls in the manner of model families."""

from __future__ import annotations

_TURNS = """
{%- for m in messages %}
{%- if m.role == 'tool' %}<|tool|>{{ m.content }}<|end|>
{%- else %}<|{{ m.role }}|>{{ m.content or '' }}
{%- if m.tool_calls %}@FIRST{% for c in m.tool_calls %}{% if not loop.first %}@BETWEEN{% endif %}@CALL{% endfor %}@LAST
{%- endif %}<|end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
SHOWN_TOOLS = "{% if tools %}<|tools|>{{ tools | tojson }}{% endif %}"


def _template(call: str, first: str = "", between: str = "", last: str = "") -> str:
    turns = _TURNS.replace("@FIRST", first).replace("@BETWEEN", between).replace("@LAST", last).replace("@CALL", call)
    return SHOWN_TOOLS + turns.replace("\n{%- if m.tool_calls", "{% if m.tool_calls")


_NAME, _ARGUMENTS = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"
_EACH = "{% for k, v in c.function.arguments.items() %}"
_RAW = "{{ v if v is string else v | tojson }}"
_OBJECT = '{"name": "' + _NAME + '", "arguments": ' + _ARGUMENTS + "}"
_QWEN = (
    f"<tool_call>\\n<function={_NAME}>\\n{_EACH}<parameter={{{{ k }}}}>\\n{_RAW}\\n</parameter>\\n"
    "{% endfor %}</function>\\n</tool_call>"
)
_PLACED = "{{ loop.index0 }}"


def _text(source: str) -> str:
    """Jinja text in which line breaks survive."""
    return source.replace("\\n", "{{ '\\n' }}")


HERMES = _template(_text("<tool_call>\\n" + _OBJECT + "\\n</tool_call>"), between=_text("\\n"))
LLAMA = _template(_OBJECT.replace('arguments"', 'parameters"'))
MISTRAL = _template(_OBJECT, "[TOOL_CALLS][", ", ", "]")
MISTRAL_ARGS = _template("[TOOL_CALLS]" + _NAME + "[ARGS]" + _ARGUMENTS)
DEEPSEEK_OLD = _template(
    _text("<|call▁begin|>function<|sep|>" + _NAME + "\\n```json\\n" + _ARGUMENTS + "\\n```<|call▁end|>"),
    "<|calls▁begin|>", _text("\\n"), "<|calls▁end|>",
)  # fmt: skip
DEEPSEEK = _template(
    "<|call▁begin|>" + _NAME + "<|sep|>" + _ARGUMENTS + "<|call▁end|>", "<|calls▁begin|>", "", "<|calls▁end|>"
)
QWEN_CODER = _template(_text(_QWEN), between=_text("\\n"))
GLM = _template(
    f"<tool_call>{_NAME}{_EACH}<arg_key>{{{{ k }}}}</arg_key><arg_value>{_RAW}</arg_value>{{% endfor %}}</tool_call>"
)
DSML = _template(
    _text(
        f'\\n<|invoke name="{_NAME}">\\n{_EACH}<|parameter name="{{{{ k }}}}" '
        f"string=\"{{{{ 'true' if v is string else 'false' }}}}\">{_RAW}</|parameter>\\n{{% endfor %}}</|invoke>"
    ),
    "<|calls>", "", _text("\\n</|calls>"),
)  # fmt: skip
KIMI = _template(
    "<|call_begin|>functions." + _NAME + ":" + _PLACED + "<|argument_begin|>" + _ARGUMENTS + "<|call_end|>",
    "<|section_begin|>", "", "<|section_end|>",
)  # fmt: skip
_LITERAL = (
    "{% for k, v in c.function.arguments.items() %}{{ k }}ASSIGN"
    "{% if v is string %}QUOTE{{ v }}QUOTE{% else %}{{ v }}{% endif %}"
    "{% if not loop.last %}COMMA{% endif %}{% endfor %}"
)
PYTHON = _template(
    _NAME + "(" + _LITERAL.replace("ASSIGN", "=").replace("QUOTE", "'").replace("COMMA", ", ") + ")",
    "<|call_start|>[", ", ", "]<|call_end|>",
)  # fmt: skip
GEMMA = _template(
    "<|call>call:"
    + _NAME
    + "{{ '{' }}"
    + _LITERAL.replace("ASSIGN", ":").replace("QUOTE", '<|"|>').replace("COMMA", ",")
    + "{{ '}' }}<call|>"
)
SOLAR = _template("<|begin|>{{ c.id }}<|name|>" + _NAME + "<|args|>" + _ARGUMENTS + "<|close|>", "<|calls|>")
HARMONY = (
    SHOWN_TOOLS
    + """{% for m in messages %}
{%- if m.role == 'tool' %}<|start|>functions.x to=assistant<|channel|>commentary<|message|>{{ m.content }}<|end|>
{%- elif m.role == 'assistant' %}
{%- if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}
{%- if m.tool_calls %}{% set c = m.tool_calls[0] %}<|start|>assistant to=functions.{{ c.function.name }}"""
    + """<|channel|>commentary json<|message|>{{ c.function.arguments | tojson }}<|call|>
{%- else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}
{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>
{%- endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"""
)
FUNCTIONARY = (
    SHOWN_TOOLS
    + """{% for m in messages %}<|{{ m.role }}|>
{%- if m.role == 'assistant' %}{% if m.content %}>>>all{{ '\n' }}{{ m.content }}{% endif %}
{%- for c in m.tool_calls or [] %}>>>{{ c.function.name + '\n' + c.function.arguments }}{% endfor %}
{%- else %}{{ m.content }}{% endif %}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>>>>{% endif %}"""
)
WITHOUT_TOOLS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FAMILIES = {
    "hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL, "mistral since 2025": MISTRAL_ARGS, "deepseek": DEEPSEEK_OLD,
    "deepseek since v3.1": DEEPSEEK, "qwen3-coder": QWEN_CODER, "glm": GLM, "dsml": DSML, "kimi": KIMI,
    "python": PYTHON, "gemma 4": GEMMA, "solar": SOLAR, "harmony": HARMONY, "functionary": FUNCTIONARY,
    "described": WITHOUT_TOOLS,
}  # fmt: skip
