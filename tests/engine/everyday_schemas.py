"""Schemas as people send them: written by pydantic, and as zod 4 and OpenAI's helpers write them."""

from __future__ import annotations

import datetime
import decimal
import enum
import ipaddress
import pathlib
import uuid
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    AnyUrl,
    AwareDatetime,
    Base64Bytes,
    BaseModel,
    ConfigDict,
    Field,
    FilePath,
    Json,
    NonNegativeInt,
    PositiveInt,
    RootModel,
    SecretStr,
    StringConstraints,
    TypeAdapter,
    conint,
    conlist,
    constr,
)
from typing_extensions import TypedDict

DRAFT = "https://json-schema.org/draft/2020-12/schema"


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(ge=0, le=9)


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str = Field(min_length=1, max_length=8)


class Home(BaseModel):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]


class Step(BaseModel):
    explanation: str
    output: str


class Tree(BaseModel):
    value: int
    children: list[Tree] = Field(default_factory=list, max_length=2)


class Point(NamedTuple):
    x: float
    y: float


class Movie(TypedDict, total=False):
    title: str
    year: int


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")
    a: int
    b: str | None = None


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    a: int


class Event(BaseModel):
    """As in OpenAI's guide to structured outputs."""

    name: str
    date: str
    participants: list[str]


TYPES: dict[str, Any] = {
    "str": str, "int": int, "float": float, "bool": bool, "none": None, "any": Any, "bytes": bytes,
    "decimal": decimal.Decimal, "bounded decimal": Annotated[decimal.Decimal, Field(gt=0, max_digits=5)],
    "list": list[int], "set": set[int], "set of few": set[Literal["a", "b", "c"]], "frozenset": frozenset[str],
    "set of an enum": set[Colour], "tuple": tuple[int, str], "long tuple": tuple[int, ...], "dict": dict[str, int],
    "dict of an enum": dict[Colour, int], "dict of literals": dict[Literal["a", "b"], str],
    "dict of ids": dict[uuid.UUID, int], "dict of numbers": dict[int, str], "dict of dates": dict[datetime.date, int],
    "dict of patterns": dict[constr(pattern="^[a-c]{1,3}$"), int],  # type: ignore[misc]
    "dict of short names": dict[constr(min_length=1, max_length=3), int],  # type: ignore[misc]
    "optional": int | None, "union": int | str, "nested union": list[int | list[str]], "literal": Literal["a", 1, None],
    "enum": Colour, "int enum": Level, "datetime": datetime.datetime, "date": datetime.date, "time": datetime.time,
    "timedelta": datetime.timedelta, "aware": AwareDatetime, "uuid": uuid.UUID, "url": AnyUrl,
    "path": pathlib.Path, "file": FilePath, "secret": SecretStr, "json": Json[list[int]], "base64": Base64Bytes,
    "ipv4": ipaddress.IPv4Address, "ipv6": ipaddress.IPv6Address,
    "any ip": ipaddress.IPv4Address | ipaddress.IPv6Address, "ipv4 network": ipaddress.IPv4Network,
    "positive": PositiveInt, "non-negative": NonNegativeInt,
    "int range": conint(gt=2, lt=9), "multiple": conint(multiple_of=5, ge=0, le=50),
    "list range": conlist(int, min_length=1, max_length=3), "pattern": constr(pattern=r"^\d{3}-[A-Z]+$"),
    "look-ahead": Annotated[str, Field(json_schema_extra={"pattern": r"^(?=.*\d).{4,8}$"})],
    "stripped": Annotated[str, StringConstraints(strip_whitespace=True, max_length=4)],
    "model": Step, "home": Home, "tree": Tree, "point": Point, "movie": Movie, "closed": Closed, "open": Open,
    "event": Event, "root": RootModel[list[Step]], "models by name": dict[str, Cat],
    "either model": Cat | Dog | None, "email": Annotated[str, Field(json_schema_extra={"format": "email"})],
}  # fmt: skip


def of_pydantic() -> dict[str, Any]:
    """JSON schemas by name."""
    return {f"pydantic {name}": TypeAdapter(kind).json_schema() for name, kind in TYPES.items()}


def _zod(schema: dict[str, Any]) -> dict[str, Any]:
    return {"$schema": DRAFT, **schema}


def _object(properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> dict[str, Any]:
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False, **more}


TEXT, NUMBER, INT = {"type": "string"}, {"type": "number"}, {"type": "integer"}
SAFE = {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991}
EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
UUID = r"^([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[1-8][0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12})$"
_FORMATTED = {
    "email": ("email", EMAIL), "uuid": ("uuid", UUID), "url": ("uri", None), "cuid": ("cuid", "^[cC][^\\s-]{8,}$"),
    "cuid2": ("cuid2", "^[0-9a-z]+$"), "nanoid": ("nanoid", "^[a-zA-Z0-9_-]{21}$"),
    "ulid": ("ulid", "^[0-9A-HJKMNP-TV-Za-hjkmnp-tv-z]{26}$"), "xid": ("xid", "^[0-9a-vA-V]{20}$"),
    "ksuid": ("ksuid", "^[A-Za-z0-9]{27}$"), "e164": ("e164", "^\\+[1-9]\\d{6,14}$"), "jwt": ("jwt", None),
    "emoji": ("emoji", "^(\\p{Extended_Pictographic}|\\p{Emoji_Component})+$"),
    "cidr": ("cidrv4", r"^((25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9][0-9]|[0-9])\.){3}[0-9]+\/([0-9]|[1-2][0-9]|3[0-2])$"),
    "base64": ("base64", "^$|^(?:[0-9a-zA-Z+/]{4})*(?:(?:[0-9a-zA-Z+/]{2}==)|(?:[0-9a-zA-Z+/]{3}=))?$"),
    "base64url": ("base64url", "^[A-Za-z0-9_-]*$"), "hostname": ("hostname", None),
    "lowercase": ("lowercase", "^[^A-Z]*$"), "guid": ("uuid", "^([0-9a-fA-F]{8}-([0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12})$"),
    "duration": ("duration", r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+S)?)?)$"),
    "date": ("date", r"^\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])$"),
    "time": ("time", r"^(?:[01]\d|2[0-3]):[0-5]\d(?::[0-5]\d(?:\.\d+)?)?$"),
    "datetime": ("date-time", r"^\d{4}-\d{2}-\d{2}T(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d+)?(?:Z)$"),
}  # fmt: skip
ZOD: dict[str, Any] = {
    **{
        name: {"type": "string", "format": form, **({"pattern": pattern} if pattern else {})}
        for name, (form, pattern) in _FORMATTED.items()
    },
    "int": SAFE,
    "positive": {"type": "number", "exclusiveMinimum": 0},
    "multiple": {"type": "number", "multipleOf": 5},
    "never": _object({"a": TEXT, "b": {"not": {}}}, ["a"]),
    "any": {},
    "null": {"type": "null"},
    "nullable": {"anyOf": [TEXT, {"type": "null"}]},
    "optional": _object({"a": TEXT, "b": NUMBER}, ["a"]),
    "default": _object({"a": {"default": "x", **TEXT}}),
    "describe": _object({"a": {"description": "A.", **TEXT}}, title="T", description="An object."),
    "loose": {"type": "object", "properties": {"a": TEXT}, "required": ["a"], "additionalProperties": {}},
    "catchall": {"type": "object", "properties": {"a": TEXT}, "required": ["a"], "additionalProperties": NUMBER},
    "record": {"type": "object", "propertyNames": TEXT, "additionalProperties": NUMBER},
    "record of an enum": {"type": "object", "propertyNames": {"type": "string", "enum": ["a", "b"]},
                          "additionalProperties": NUMBER, "required": ["a", "b"]},
    "partial record": {"type": "object", "propertyNames": {"type": "string", "enum": ["a", "b"]},
                       "additionalProperties": NUMBER},
    "record of lengths": {"type": "object", "propertyNames": {"type": "string", "minLength": 2, "maxLength": 3},
                          "additionalProperties": {"type": "boolean"}},
    "record of emails": {"type": "object", "propertyNames": {"type": "string", "format": "email", "pattern": EMAIL},
                         "additionalProperties": NUMBER},
    "tuple": {"type": "array", "prefixItems": [TEXT, NUMBER]},
    "tuple with rest": {"type": "array", "prefixItems": [TEXT], "items": NUMBER},
    "literal": {"type": "string", "const": "a"},
    "literals": {"type": "string", "enum": ["a", "b"]},
    "mixed literals": {"enum": ["a", 1, None]},
    "template": {"type": "string", "pattern": "^\\d+px$"},
    "min and max": {"type": "string", "minLength": 2, "maxLength": 4},
    "array": {"minItems": 1, "maxItems": 2, "type": "array", "items": {"type": "boolean"}},
    "discriminated": {"oneOf": [_object({"t": {"type": "string", "const": "a"}, "x": NUMBER}),
                                _object({"t": {"type": "string", "const": "b"}, "y": TEXT})]},
    "union": {"anyOf": [TEXT, NUMBER]},
    "xor": {"oneOf": [TEXT, {"type": "string", "maxLength": 3}]},
    "xor of types": {"oneOf": [TEXT, NUMBER]},
    "xor of strict objects": {"oneOf": [_object({"a": TEXT}), _object({"b": TEXT})]},
    "intersection": {"allOf": [{"type": "object", "properties": {"a": TEXT}, "required": ["a"]},
                               {"type": "object", "properties": {"b": NUMBER}, "required": ["b"]}]},
    "recursive": _object({"name": TEXT, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}),
    "reused": {"$defs": {"p": _object({"x": INT})},
               **_object({"a": {"$ref": "#/$defs/p"}, "b": {"$ref": "#/$defs/p"}})},
    "file": {"type": "string", "format": "binary", "contentEncoding": "binary", "minLength": 1},
    "read only": {"type": "array", "items": TEXT, "readOnly": True},
    "password rules": {"type": "string", "minLength": 8, "pattern": r"^(?=.*[A-Z])(?=.*\d).+$"},
    "regex with a flag": {"type": "string", "pattern": r"\bword\b"},
    "back reference": {"type": "string", "pattern": r"^(['\"]).*\1$"},
    "int64": {"type": "integer", "format": "int64"},
    "id and meta": {"id": "User", "title": "User", "examples": [{"a": "x"}], **_object({"a": TEXT})},
}  # fmt: skip
_HOUSE = {"kind": {"enum": ["house", "flat"]}, "floor": INT, "garden": {"type": "boolean"}}
OTHERS: dict[str, Any] = {
    "openai math": _object({"steps": {"type": "array", "items": _object({"explanation": TEXT, "output": TEXT})},
                            "final_answer": TEXT}),
    "openai ui": {**_object({"type": {"type": "string", "enum": ["div", "form"]}, "label": TEXT,
                             "children": {"type": "array", "items": {"$ref": "#"}}})},
    "openai list": {"$defs": {"node": _object({"value": NUMBER, "next": {"anyOf": [{"$ref": "#/$defs/node"},
                    {"type": "null"}]}})}, **_object({"first": {"$ref": "#/$defs/node"}})},
    "openai nullable": _object({"unit": {"type": ["string", "null"], "enum": ["F", "C", None]}, "a": TEXT}),
    "openai tool": _object({"location": {**TEXT, "description": "City."}, "days": {"type": "integer", "minimum": 1}}),
    "openapi dates": _object({"on": {"type": "string", "format": "date", "example": "2020-01-01"},
                              "n": {"type": "integer", "format": "int32"}, "p": {**TEXT, "format": "password"}}),
    "openapi nullable": {"type": "object", "properties": {"a": {"type": "string", "nullable": True}}},
    "openapi discriminator": {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "discriminator":
                              {"propertyName": "t"}, "$defs": {"a": _object({"t": {"const": "a"}}),
                                                               "b": _object({"t": {"const": "b"}})}},
    "not a type": {"not": {"type": ["string", "object", "array", "null"]}},
    "not a value": {"type": "string", "enum": ["a", "b", "c"], "not": {"enum": ["b"]}},
    "not required": {"type": "object", "properties": {"a": INT, "b": INT}, "not": {"required": ["a", "b"]},
                     "additionalProperties": False},
    "not a pattern": {"type": "string", "not": {"pattern": "^x"}},
    "not either": {"not": {"anyOf": [{"type": "number"}, {"type": ["string", "array", "object"]}]}},
    "if": {"type": "object", "properties": _HOUSE, "required": ["kind"], "additionalProperties": False,
           "if": {"properties": {"kind": {"const": "flat"}}}, "then": {"required": ["floor"]},
           "else": {"required": ["garden"]}},
    "if absent": {"type": "object", "properties": _HOUSE, "additionalProperties": False,
                  "if": {"properties": {"kind": {"const": "flat"}}, "required": ["kind"]},
                  "then": {"required": ["floor"]}},
    "ifs": {"type": "object", "properties": _HOUSE, "required": ["kind"], "additionalProperties": False, "allOf": [
        {"if": {"properties": {"kind": {"const": "flat"}}}, "then": {"required": ["floor"]}},
        {"if": {"properties": {"kind": {"const": "house"}}}, "then": {"required": ["garden"]}}]},
    "if of numbers": {"type": "integer", "if": {"minimum": 5}, "then": {"multipleOf": 5}},
    "dependent": {"type": "object", "properties": {"card": INT, "address": TEXT}, "additionalProperties": False,
                  "dependentRequired": {"card": ["address"]}},
    "dependent of a required one": {"type": "object", "properties": {"a": INT, "b": INT}, "required": ["a"],
                                    "additionalProperties": False, "dependentRequired": {"a": ["b"]}},
    "dependent schemas": {"type": "object", "properties": {"a": INT, "b": INT}, "additionalProperties": False,
                          "dependentSchemas": {"a": {"properties": {"b": {"minimum": 5}}, "required": ["b"]}}},
    "draft-07 dependencies": {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object",
                              "properties": {"a": INT, "b": INT}, "additionalProperties": False,
                              "dependencies": {"a": ["b"]}},
    "draft-07 tuple": {"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "items": [INT, TEXT],
                       "additionalItems": False},
    "contains": {"type": "array", "items": INT, "contains": {"const": 7}},
    "contains any": {"type": "array", "items": INT, "contains": {}, "maxItems": 3},
    "contains not": {"type": "array", "items": INT, "contains": {"const": 7}, "minContains": 0},
    "unique": {"type": "array", "items": TEXT, "uniqueItems": True},
    "unique one": {"type": "array", "items": TEXT, "uniqueItems": True, "maxItems": 1},
    "unique few": {"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True, "minItems": 2},
    "unevaluated": {"type": "object", "properties": {"a": INT}, "unevaluatedProperties": False},
    "unevaluated after a reference": {"$defs": {"base": {"type": "object", "properties": {"a": INT},
                                      "required": ["a"]}}, "type": "object", "allOf": [{"$ref": "#/$defs/base"}],
                                      "properties": {"b": TEXT},
                                      "required": ["b"], "unevaluatedProperties": False},
    "unevaluated alternatives": {"type": "object", "anyOf": [{"properties": {"a": INT}}, {"properties": {"b": INT}}],
                                 "unevaluatedProperties": False},
    "unevaluated items": {"type": "array", "prefixItems": [INT, INT], "unevaluatedItems": False},
    "at least one": {"type": "object", "properties": {"a": INT, "b": INT}, "additionalProperties": False,
                     "minProperties": 1},
    "at most one": {"type": "object", "properties": {"a": INT, "b": INT}, "additionalProperties": False,
                    "maxProperties": 1},
    "pattern properties": {"type": "object", "patternProperties": {"^x-": INT}, "additionalProperties": False},
    "look-ahead in a name": {"type": "object", "patternProperties": {"^(?!x)": INT}, "additionalProperties": False},
    "dynamic": {"$dynamicAnchor": "node", "type": "object", "properties": {"n": {"$dynamicRef": "#node"}},
                "additionalProperties": False},
    "a dialect of one's own": {"$schema": "https://example.com/dialect", "type": "boolean"},
}  # fmt: skip

ALL: dict[str, Any] = {
    **of_pydantic(),
    **{f"zod {name}": _zod(schema) for name, schema in ZOD.items()},
    **OTHERS,
}
