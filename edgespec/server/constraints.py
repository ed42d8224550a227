"""What a request demands of the text of the answer: response_format, and fields of llama.cpp's server and vLLM."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import Field, StringConstraints

from edgespec.engine.structured_output import Structure, Text, grammar_structure, json_structure, regex_structure
from edgespec.errors import InvalidRequest
from edgespec.server.fields import CompletionBody, ResponseFormat
from edgespec.server.residency import ResidencyBody

GrammarText = Annotated[str, StringConstraints(min_length=1, max_length=2**16)]
Choices = Annotated[list[Annotated[str, StringConstraints(min_length=1, max_length=4096)]], Field(max_length=256)]


class ConstrainedBody(CompletionBody, ResidencyBody):
    """The fields of a body of which at most one constrains the answer.

    `grammar` and `json_schema` are llama.cpp's, `guided_json`, `guided_regex`, `guided_choice` and `guided_grammar`
    vLLM's. Grammars are GBNF or llguidance's Lark.
    """

    response_format: ResponseFormat | None = None
    grammar: GrammarText | None = None
    json_schema: dict[str, Any] | bool | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: GrammarText | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = None

    def structure(self) -> Structure | None:
        """The constraint, if there is one. Raises InvalidRequest for two, and for one that cannot be read."""
        made = {
            "response_format": self.response_format.structure() if self.response_format else None,
            "grammar": grammar_structure(self.grammar) if self.grammar else None,
            "json_schema": json_structure(self.json_schema) if self.json_schema is not None else None,
            "guided_json": json_structure(_parse(self.guided_json)) if self.guided_json is not None else None,
            "guided_regex": regex_structure(self.guided_regex) if self.guided_regex else None,
            "guided_choice": Structure(tuple((Text(each),) for each in self.guided_choice or ())),
            "guided_grammar": grammar_structure(self.guided_grammar) if self.guided_grammar else None,
        }
        found = {name: structure for name, structure in made.items() if structure and structure.alternatives}
        if len(found) > 1:
            raise InvalidRequest(f"{' and '.join(found)} both constrain the answer.", hint="Send one of them.")
        return next(iter(found.values()), None)


def _parse(schema: dict[str, Any] | bool | str) -> Any:
    """vLLM takes the schema as text too."""
    if not isinstance(schema, str):
        return schema
    try:
        return json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("guided_json is not valid JSON.", hint="Send the schema as an object.") from error
