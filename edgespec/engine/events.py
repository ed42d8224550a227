"""The request to an engine and the events of its answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from edgespec.autopilot.acceptance_record import AcceptanceRecord
from edgespec.core.metrics import Metrics
from edgespec.core.protocols import FinishReason, PrefillProgress, Step
from edgespec.core.sampling import SamplingParams
from edgespec.engine.repetition import RepetitionDetection
from edgespec.engine.structure import Structure
from edgespec.text.chat_template import Message
from edgespec.text.stream import Piece


@dataclass(frozen=True, slots=True)
class AnswerStart:
    """The beginning of an answer that was cut. An answer without `text` was cut in its reasoning."""

    text: str
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt as token ids, which are read as they stand."""

    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Gap:
    """Text with a gap that the model fills, by the markers of its vocabulary."""

    before: str
    after: str


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """An answer may be drafted from the memory of earlier texts, and is kept in it.

    namespace  whose texts: "" is the user's own; nothing of one namespace serves another
    source     what the text belongs to, such as a conversation, so that it can be forgotten with it
    """

    namespace: str = ""
    source: str | None = None


Prompt = str | tuple[Message, ...] | TokenPrompt | Gap


@dataclass(frozen=True, slots=True)
class Request:
    """What to generate. `prompt` is text to continue as it stands, token ids, a gap, or the messages of a chat.

    start         the answer so far: the model goes on with it, and the events have only what follows. Not with a
                  structure
    max_tokens    None: to the end of the context; 0: the prompt is read into the cache, and nothing is generated
    seed          None: a fresh one, reported in Finished
    variables     JSON values that the chat template may read, such as `tools`
    structure     the grammar of the answer; reasoning before it is free
    opening       if it is given, `structure` is that of each part of the answer which follows this text; the text
                  around those parts is free
    visible       control tokens, by their spelling, that count as text, such as those around tool calls; if markers of
                  reasoning are among them, reasoning is not split off
    top_logprobs  alternatives of each token to report as Scored; None: no scores
    scores_prompt whether PromptScores come first, with as many alternatives
    reports_steps whether Steps are among the events
    max_reasoning tokens of reasoning after which it is ended; None: no limit. For the messages of a chat, where the
                  reasoning is free
    memory        None: nothing of the memory is read, and the text is not kept
    repetition    what ends an answer that repeats itself; None: nothing
    owner         whose text it is: PrefixLoss compares it with no text of others
    """

    prompt: Prompt
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict, hash=False)
    structure: Structure | None = None
    opening: str | None = None
    visible: tuple[str, ...] = ()
    top_logprobs: int | None = None
    start: AnswerStart | None = None
    scores_prompt: bool = False
    reports_steps: bool = True
    max_reasoning: int | None = None
    memory: MemoryUse | None = None
    repetition: RepetitionDetection | None = None
    owner: str = ""


@dataclass(frozen=True, slots=True)
class PrefixLoss:
    """Why tokens of a prompt were read again although an earlier text had them.

    tokens  how many
    cause   'changed': the text differs from the earlier one at token `at`, in `where`, of which `text` quotes a part;
            'evicted': the cache of that text was given to another; 'busy': it is another conversation's, and cannot be
            copied; 'rollback': it cannot go back to the end of the common text, but to token `at`
    """

    tokens: int
    cause: Literal["changed", "evicted", "busy", "rollback"]
    at: int
    where: str = ""
    text: str = ""

    @property
    def reason(self) -> str:
        """One sentence without any text of the prompt."""
        read = f"{self.tokens:,} tokens of the prompt were read again"
        match self.cause:
            case "changed":
                return f"{read}: the text has changed at token {self.at:,}, in {self.where}."
            case "evicted":
                return f"{read}: another text has taken the cache; a server keeps those of --parallel texts."
            case "busy":
                return f"{read}: they are in the cache of another conversation, from which they cannot be copied."
        return f"{read}: the cache of this model can only go back to certain places, here to token {self.at:,}."

    def __str__(self) -> str:
        return f"{self.reason} {self.text}." if self.text else self.reason


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event. `tokens` are the emitted ids, with the end-of-generation token; `stop` is the stop string that
    ended the text; `records` has the acceptance of each drafter that the autopilot asks, over all answers; `warnings`
    are sentences about what of the structure was not enforced; `loss` says why a part of the prompt was read again.
    """

    reason: FinishReason
    tokens: tuple[int, ...]
    seed: int
    metrics: Metrics
    stop: str | None = None
    records: Mapping[str, AcceptanceRecord] = field(default_factory=dict, hash=False)
    warnings: tuple[str, ...] = ()
    loss: PrefixLoss | None = None


class SlotState(NamedTuple):
    """A slot of an engine: its number, the tokens that its cache holds, those of its last prompt, whether it `is_busy`,
    and why a part of that prompt was read again.
    """

    number: int
    tokens: int
    prompt: int
    is_busy: bool
    loss: PrefixLoss | None


@dataclass(frozen=True, slots=True)
class Notice:
    """One sentence for the user, such as a warning that the draft model is almost never right."""

    text: str


@dataclass(frozen=True, slots=True)
class Scored:
    """How probable a token is to the model itself, before sampling settings: its bytes, the natural logarithm of its
    probability, and the same of the most probable ones there.
    """

    text: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...]


@dataclass(frozen=True, slots=True)
class PromptScores:
    """How probable the tokens of the prompt are to the model.

    first   the token that nothing comes before; None if it is a control token that the text did not spell
    tokens  the others
    """

    first: bytes | None
    tokens: tuple[Scored, ...]


Event = PrefillProgress | Step | Scored | PromptScores | Piece | Notice | Finished
