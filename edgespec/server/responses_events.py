"""The answers of /v1/responses: the response, and the events of its stream."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from edgespec.server.http import format_event
from edgespec.service.response import Done, Part, ReasoningDelta, Started, TextDelta, count_usage, new_id
from edgespec.text.tool_formats import CallDelta, CallEnd, CallStart


class ResponsesWriter:
    """One response, as a body or as events."""

    def __init__(self, namespaces: Mapping[str, Mapping[str, str]], **fields: Any) -> None:
        """`namespaces`: from a function's name for the model to its `name` and `namespace`. `fields` of the request are
        repeated in the response.
        """
        self._namespaces = namespaces
        self._head: dict[str, Any] = {
            "id": new_id("resp_"),
            "object": "response",
            "created_at": int(time.time()),
            "error": None,
            "metadata": {},
            **fields,
        }
        self._items: list[dict[str, Any]] = []
        self._is_open = False  # whether the last item may still grow
        self._n_events = 0
        self._end: Done | None = None

    def add(self, index: int, part: Part) -> None:
        for _ in self.chunks(index, part):  # builds the items of the body
            pass

    def response_body(self) -> dict[str, Any]:
        for _ in self._close():
            pass
        return self._response()

    def chunks(self, index: int, part: Part) -> Iterator[bytes]:
        if isinstance(part, Started):
            yield self._event("response.created", response=self._response())
            yield self._event("response.in_progress", response=self._response())
        elif isinstance(part, TextDelta):
            if not self._grows("message"):
                yield from self._begin_message()
            self._items[-1]["content"][0]["text"] += part.text
            yield self._content_event("output_text.delta", delta=part.text, logprobs=[])
        elif isinstance(part, ReasoningDelta):
            if not self._grows("reasoning"):
                content = {"type": "reasoning_text", "text": ""}
                yield from self._begin({"type": "reasoning", "id": new_id("rs_"), "summary": [], "content": [content]})
            self._items[-1]["content"][0]["text"] += part.text
            yield self._content_event("reasoning_text.delta", delta=part.text)
        elif isinstance(part, CallStart):
            name = self._namespaces.get(part.name, {"name": part.name})
            item = {"type": "function_call", "id": new_id("fc_"), "call_id": new_id("call_"), **name}
            yield from self._begin({**item, "arguments": "", "status": "in_progress"})
        elif isinstance(part, CallDelta):
            self._items[-1]["arguments"] += part.arguments
            yield self._item_event("function_call_arguments.delta", delta=part.arguments)
        elif isinstance(part, CallEnd):
            yield from self._close(is_cut=part.is_cut)
        elif isinstance(part, Done):
            self._end = part

    def finish(self) -> Iterator[bytes]:
        yield from self._close()
        response = self._response()
        yield self._event(f"response.{response['status']}", response=response)

    def fail(self, error: dict[str, Any]) -> bytes:
        """An error event and response.failed. `error` inside of the first is what OpenAI's clients raise an exception
        for; the fields beside it are the documented ones.
        """
        reason = error["error"]
        stated = {key: reason[key] for key in ("code", "message", "param")}
        failure = {"code": reason["code"] or "server_error", "message": reason["message"]}
        response = {**self._response(), "status": "failed", "error": failure, "output": self._items}
        return self._event("error", **stated, **error) + self._event("response.failed", response=response)

    def _response(self) -> dict[str, Any]:
        end = self._end
        if end is None:
            return {**self._head, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
        usage = count_usage([end])
        cut = {"length": "max_output_tokens", "content_filter": "content_filter"}.get(end.reason)
        return {
            **self._head,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": cut} if cut else None,
            "output": self._items,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "output_tokens": usage["completion_tokens"],
                "total_tokens": usage["total_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens_details": usage["completion_tokens_details"],
            },
            **end.extensions(),
        }

    def _begin_message(self) -> Iterator[bytes]:
        item = {"type": "message", "id": new_id("msg_"), "role": "assistant", "status": "in_progress", "content": []}
        yield from self._begin(item)
        content = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._items[-1]["content"].append(content)
        yield self._content_event("content_part.added", part=content)

    def _grows(self, kind: str) -> bool:
        """Whether the last item is of this type and may still grow."""
        return self._is_open and self._items[-1]["type"] == kind

    def _begin(self, item: dict[str, Any]) -> Iterator[bytes]:
        yield from self._close()
        self._items.append(item)
        self._is_open = True
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=item)

    def _close(self, *, is_cut: bool = False) -> Iterator[bytes]:
        """End the last item, unless it has ended. `is_cut`: it is not complete."""
        if not self._is_open:
            return
        self._is_open = False
        item = self._items[-1]
        if item["type"] == "message":
            content = item["content"][0]
            yield self._content_event("output_text.done", text=content["text"], logprobs=[])
            yield self._content_event("content_part.done", part=content)
        elif item["type"] == "reasoning":
            yield self._content_event("reasoning_text.done", text=item["content"][0]["text"])
        else:
            call = {key: item[key] for key in ("name", "arguments")}
            yield self._item_event("function_call_arguments.done", **call)
        if "status" in item:
            item["status"] = "incomplete" if is_cut else "completed"
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _content_event(self, kind: str, **data: Any) -> bytes:
        """An event of the last item's content."""
        return self._item_event(kind, content_index=0, **data)

    def _item_event(self, kind: str, **data: Any) -> bytes:
        """An event of the last item."""
        item = self._items[-1]
        return self._event(f"response.{kind}", item_id=item["id"], output_index=len(self._items) - 1, **data)

    def _event(self, kind: str, **data: Any) -> bytes:
        self._n_events += 1
        return format_event({"type": kind, "sequence_number": self._n_events - 1, **data})
