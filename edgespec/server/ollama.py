"""/api/chat and /api/generate: Ollama's interface."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from edgespec.engine.events import Gap, Prompt
from edgespec.engine.structured_output import Structure, json_structure
from edgespec.errors import InvalidRequest
from edgespec.server.control_fields import DraftingBody, ThinkingBody
from edgespec.server.fields import (
    FEW,
    MANY,
    NO_LIMIT,
    AnyModelName,
    Body,
    FunctionTool,
    SamplingBody,
    Stop,
    Stops,
    refuse_fields,
)
from edgespec.server.ollama_lines import LineWriter, format_message, format_raw, format_response
from edgespec.server.residency import ResidencyBody
from edgespec.service.generation_spec import GenerationSpec, Settings, make_message, split_start
from edgespec.service.tools import format_call
from edgespec.text.chat_template import Message

_NOT_FOLLOWED = frozenset({
    "main_gpu", "mirostat", "mirostat_eta", "mirostat_tau", "num_batch", "num_ctx", "num_gpu", "num_keep", "num_thread",
    "penalize_newline", "repeat_last_n", "tfs_z", "typical_p", "use_mlock", "use_mmap",
})  # fmt: skip


class OllamaOptions(SamplingBody):
    """The `options` of a request. Those of Ollama that are not followed are named in `warnings`; others are ignored."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    repeat_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**64)] | None = None
    num_predict: Annotated[int, Field(ge=-2, le=2**31)] | None = None
    stop: Stop | Stops | None = None

    def fields(self) -> dict[str, Any]:
        """The fields of a GenerationSpec. As in Ollama, a seed of -1 is random, and num_predict below 0 no limit."""
        ignored = sorted(_NOT_FOLLOWED & set(self.model_extra or ()))
        return {
            "settings": Settings(
                self.temperature,
                self.top_p,
                self.top_k,
                self.min_p,
                self.presence_penalty,
                self.frequency_penalty,
                self.repeat_penalty,
            ),
            "seed": None if self.seed == -1 else self.seed,
            "max_tokens": NO_LIMIT if (self.num_predict or 0) < 0 else self.num_predict or None,
            "stop": (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            "warnings": tuple(f"options.{name} is ignored: {_explain(name)}" for name in ignored),
        }


def _explain(name: str) -> str:
    return "the server's --ctx sets the context." if name == "num_ctx" else "it is not supported in requests."


class OllamaBody(DraftingBody, ResidencyBody, ThinkingBody):
    """The fields that /api/chat and /api/generate share."""

    model: AnyModelName = ""
    stream: bool = True
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: bool | None = None
    n: Literal[1] = 1

    def structure(self) -> Structure | None:
        """Raises InvalidRequest."""
        if not self.format:
            return None
        return json_structure() if self.format == "json" else json_structure(self.format)

    def make_spec(self, prompt: Prompt, **more: Any) -> GenerationSpec:
        """Raises InvalidRequest."""
        refuse_fields(self, "logprobs")
        options = self.options or OllamaOptions()
        effort = self.think if isinstance(self.think, str) else None
        thinking = self.make_thinking(is_on=None if self.think is None else bool(self.think), effort=effort)
        control = {"thinking": thinking, "draft_length": self.draft_length()}
        fields = {**options.fields(), **control, "structure": self.structure(), **more}
        return GenerationSpec(prompt, **fields)


class OllamaFunction(Body):
    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class OllamaCall(Body):
    id: str = ""
    function: OllamaFunction


class OllamaMessage(Body):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Annotated[list[Any], FEW] | None = None
    tool_calls: Annotated[list[OllamaCall], MANY] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    def message(self) -> Message:
        """Raises InvalidRequest."""
        refuse_fields(self, "images")
        calls = [format_call(call.id, call.function.name, call.function.arguments) for call in self.tool_calls or ()]
        return make_message(
            self.role,
            self.content or "",
            name=self.tool_name,
            tool_calls=calls or None,
            tool_call_id=self.tool_call_id,
            reasoning_content=self.thinking or None,
        )


class OllamaChatRequest(OllamaBody):
    """The body of /api/chat. A last message of the assistant is the beginning of the answer."""

    messages: Annotated[list[OllamaMessage], MANY] = Field(default_factory=list)
    tools: Annotated[list[FunctionTool], FEW] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether the request only loads or unloads the model."""
        return not self.messages

    def writer(self) -> LineWriter:
        return LineWriter(self.model, format_message)

    def generation_specs(self) -> list[GenerationSpec]:
        """Raises InvalidRequest."""
        messages, start = tuple(each.message() for each in self.messages), None
        if self._continues():
            messages, start = split_start(messages)
        tools = tuple(each.function.tool() for each in self.tools or ())
        return [self.make_spec(messages, start=start, tools=tools)]

    def _continues(self) -> bool:
        last = self.messages[-1]
        return last.role == "assistant" and bool(last.content) and not last.tool_calls


class OllamaGenerateRequest(OllamaBody):
    """The body of /api/generate. With `raw` the prompt is text to continue, without a chat template."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: Annotated[list[Any], FEW] | None = None
    template: str | None = None
    context: Any = None

    @property
    def is_empty(self) -> bool:
        """Whether the request only loads or unloads the model."""
        return not self.prompt

    def writer(self) -> LineWriter:
        return LineWriter(self.model, format_raw if self.raw or self.suffix else format_response)

    def generation_specs(self) -> list[GenerationSpec]:
        """Raises InvalidRequest."""
        refuse_fields(self, "images", "template", "context")
        if (self.raw or self.suffix) and self.system:
            raise InvalidRequest("raw and suffix have no system message.", hint="Put it into the prompt.")
        return [self.make_spec(self._prompt())]

    def _prompt(self) -> Prompt:
        text = self.prompt or ""
        if self.suffix:
            return Gap(text, self.suffix)
        if self.raw:
            return text
        system = (make_message("system", self.system),) if self.system else ()
        return (*system, make_message("user", text))
