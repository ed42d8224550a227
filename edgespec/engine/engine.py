"""Composition root: models, drafter, verifier and controller into a stream of events. The loop is core/loop.py."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from time import perf_counter
from typing import Any

from edgespec.backends import Model
from edgespec.backends.attached_draft import SelfDraftModel
from edgespec.controller.batch_cost import MarginalCost
from edgespec.controller.cost_model import Profile
from edgespec.controller.fixed import Switchable
from edgespec.controller.profiler import measure
from edgespec.controller.stats import DraftStats
from edgespec.core.batching import YIELD, Yield
from edgespec.core.logprobs import Scoring, TokenScore
from edgespec.core.loop import speculate
from edgespec.core.metrics import Meter
from edgespec.core.protocols import CheckCancelled, Controller, FinishReason, PrefillProgress, Session, Step
from edgespec.core.sampling import Sampler
from edgespec.core.verify import TargetDistribution
from edgespec.engine.drafting import Rule, Speculation, autopilot_for, fixed_for, verifier_for
from edgespec.engine.events import Event, Finished, Notice, Request, Scored, TokenScores
from edgespec.engine.session_pool import Slot, SlotPool
from edgespec.engine.structured_output import GrammarCompiler, GrammarMask, JumpForward
from edgespec.errors import BackendError, Cancelled, ContextOverflow, DraftRefused, InvalidRequest
from edgespec.registry.tokenizer_compat import tokenizer_mismatch
from edgespec.text.chat_template import SHORTEN, ChatTemplate, Message, encode_prompt, require_short
from edgespec.text.reasoning import Channel, detect_format
from edgespec.text.stream import Piece, TextStream

_MEASURED_S = 0.5


class Engine:
    """A target, perhaps a draft model, and their sessions, which live from request to request and reuse their caches.

    Everything here happens on the thread that called the constructor. Raises DraftRefused when the draft model's
    vocabulary is not the target's.
    """

    def __init__(
        self, target: Model, draft: Model | SelfDraftModel | None, speculation: Speculation, caches: int = 1
    ) -> None:
        """`draft` may be made of the target itself; `caches`: how many texts are kept read."""
        if (
            draft is not None
            and not isinstance(draft, SelfDraftModel)
            and (reason := tokenizer_mismatch(target.tokenizer, draft.tokenizer))
        ):
            raise DraftRefused(
                f"this draft cannot serve this target: {reason}.", hint="Use --draft ngram, or another draft."
            )
        self.target = target
        self.draft = draft
        self.speculation = speculation
        self.is_paused = False  # decode plainly for now; may be changed by any thread, while generating too
        tokenizer = target.tokenizer
        bos, eos = ("" if t is None else tokenizer.special_text(t) for t in (tokenizer.bos, tokenizer.eos))
        source = target.chat_template
        self._template = ChatTemplate(source, bos, eos) if source else None
        self._reasoning = detect_format(source) if source else None
        self._structures = GrammarCompiler(tokenizer)
        # A draft model of a fixed length reads all of what another cache hands over.
        adopts = target.no_batching_reason is None and not (draft and speculation.gamma)
        self._slots = SlotPool(self._open_slot, caches, adopts=adopts)
        self._draft_stats: DraftStats | None = None
        self._has_warned = False
        self._closed = False

    @property
    def max_concurrency(self) -> int:
        """How many `generate` may be under way at a time."""
        return self._slots.max_slots if self.target.no_batching_reason is None else 1

    def stream(self, request: Request, check: CheckCancelled = lambda: None) -> Iterator[Event]:
        """`generate` alone, without its Pauses."""
        return (event for event in self.generate(request, check) if not isinstance(event, Yield))

    def generate(
        self, request: Request, check: CheckCancelled = lambda: None, speculation: Speculation | None = None
    ) -> Iterator[Event | Yield]:
        """PrefillProgress, then Steps each followed by the Pieces of text it completes, then Finished, perhaps a Notice
        before it. Whoever runs several of them lets each go on to its next Yield in turn.

        `speculation` is another way to draft, for this one alone. `check` is polled throughout; when it raises
        Cancelled the stream ends with Finished("cancelled") and the engine stays usable. Raises InvalidRequest,
        ContextOverflow, TemplateError, BackendError.
        """
        started_s = perf_counter()
        spec = speculation or self.speculation
        prompt, tail = self._encode(request.prompt, request.variables)
        if request.max_tokens is not None and request.max_tokens < 1:
            raise InvalidRequest(f"max-tokens must be at least 1, not {request.max_tokens}.", hint="Give a larger one.")
        seed = secrets.randbits(32) if request.seed is None else request.seed
        tokenizer = self.target.tokenizer
        is_raw = isinstance(request.prompt, str)
        text = TextStream(tokenizer, request.stop, self._reasoning, tail, request.visible, is_raw=is_raw)
        meter = Meter(len(prompt), started_s)
        emitted: list[int] = []
        reason: FinishReason = "length"
        controller: Controller | None = None
        slot: Slot | None = None
        try:
            sampler = Sampler(request.sampling, tokenizer.vocab_size)
            within: GrammarMask | None = None
            if request.structure is not None:
                within = self._structures.constrain(request.structure, sampler, len(prompt), self._ending(tail))
            if spec.gamma is None and not spec.is_plain:
                self._known(check)
            while (slot := self._slots.acquire(prompt, check)) is None:  # there was no memory for one more
                check()
                yield YIELD
            rule = spec.rule_for(request.sampling.temperature, seeded=request.seed is not None)
            way = f"{rule} at {request.sampling.temperature:.1f}{', structured' if request.structure else ''}"
            decides = self._controller(spec, slot, sampler, rule, seed, way)
            distribution: TargetDistribution = within or sampler
            if within is not None:
                decides = JumpForward(decides, within.forced, self._seconds(slot.target))
            verifier = verifier_for(rule, distribution, seed)
            scoring = Scoring(verifier, request.top_logprobs) if request.top_logprobs is not None else None
            controller = Switchable(decides, lambda: speculation is None and self.is_paused)
            phase: Channel = "answer"
            for event in speculate(
                slot.target,
                controller,
                scoring or verifier,
                prompt,
                max_tokens=request.max_tokens or self.target.context_size,
                stop=tokenizer.end_of_generation,
                check=check,
            ):
                if isinstance(event, PrefillProgress):
                    meter.cached_tokens = event.reused
                if not isinstance(event, Step):
                    yield event
                    continue
                event = replace(event, plain_s=self._plain_s(event, slot.target))
                pieces: list[Piece] = []
                reasoning = 0
                source = event.decision.source if event.decision else ""
                for i, token in enumerate(event.tokens):
                    pieces += text.push(token, source if i < event.n_accepted else "")
                    reasoning += text.channel == "reasoning"
                    if text.stopped:  # what the burst holds beyond the stop string was never asked for
                        kept = i + 1
                        event = replace(
                            event,
                            tokens=event.tokens[:kept],
                            n_accepted=min(event.n_accepted, kept),
                            n_tested=min(event.n_tested, kept),
                        )
                        break
                meter.add(event, reasoning)
                emitted += event.tokens
                yield event
                if scoring is not None:
                    yield TokenScores(tuple(self._told(score) for score in scoring.take(len(event.tokens))))
                yield from pieces
                if text.channel != phase:
                    phase = text.channel
                    controller.set_phase(phase)
                if text.stopped or emitted[-1] in tokenizer.end_of_generation:
                    reason = "stop"
                    break
        except Cancelled:
            reason = "cancelled"
            if slot is not None:  # of an abandoned forward nothing is kept
                slot.target.rewind(slot.target.position)
        except Exception as error:
            if slot is not None:  # between forward and commit it is in no defined state
                self._slots.drop(slot)
                if isinstance(error, BackendError):  # which may have spoilt what they share
                    self._slots.drop_free()
            raise
        finally:
            if controller is not None:
                controller.end()
            if slot is not None:
                self._slots.release(slot, [*prompt, *emitted])
        yield from text.finish()
        if controller is not None and not self._has_warned and (warning := controller.warning()):
            self._has_warned = True
            yield Notice(warning)
        yield Finished(reason, tuple(emitted), seed, meter.metrics(), text.stop)

    def encode(self, prompt: str | tuple[Message, ...], variables: Mapping[str, Any] | None = None) -> list[int]:
        """The tokens that `prompt` takes in the context, template included."""
        return self._encode(prompt, variables or {})[0]

    @property
    def has_draft_stats(self) -> bool:
        return self._draft_stats is not None

    @property
    def draft_stats(self) -> DraftStats:
        """What the autopilot knows of these models; a short measurement, where nobody has said."""
        return self._known(lambda: None)

    @draft_stats.setter
    def draft_stats(self, known: DraftStats) -> None:
        self._draft_stats = known

    def measure(self, seconds: float, check: CheckCancelled = lambda: None) -> Profile:
        """What forwards and drafted tokens cost. Raises Cancelled, BackendError."""
        slot = self._slots.acquire((), check)
        if slot is None:
            raise BackendError("all caches are in use.", hint="Try again.")
        try:
            return measure(slot.target, slot.draft, seconds, check)
        finally:
            self._slots.release(slot, [])

    def close(self) -> None:
        """Free everything; requests are refused from now on."""
        self.release_draft()
        self.target.close()
        self._closed = True

    def release_draft(self) -> None:
        """Free the sessions and the draft model, so that another engine can take the target over."""
        self._slots.close()
        if self.draft is not None:
            self.draft.close()
            self.draft = None

    def _known(self, check: CheckCancelled) -> DraftStats:
        if self._draft_stats is None:
            self._draft_stats = DraftStats(self.measure(_MEASURED_S, check))
        return self._draft_stats

    def _encode(self, prompt: str | tuple[Message, ...], variables: Mapping[str, Any]) -> tuple[list[int], str]:
        """Token ids, and the end of the text they came from, by which reasoning is recognised."""
        if self._closed:
            raise BackendError("the model has been closed.", hint="Open it again.")
        if isinstance(prompt, str):
            text = prompt
        elif self._template is not None:
            text = self._template.render(prompt, variables=variables)
        else:
            text = "".join(message.content for message in prompt)
        size = self.target.context_size
        require_short(text, size)
        tokens = encode_prompt(self.target.tokenizer, text, parse_special=True) if text else []
        if not tokens:
            raise InvalidRequest("the prompt is empty.", hint="Write something to continue or answer.")
        if len(tokens) > size:
            raise ContextOverflow(f"the prompt has {len(tokens):,} tokens, the context holds {size:,}.", hint=SHORTEN)
        return tokens, text[-256:]

    def _told(self, score: TokenScore) -> Scored:
        def spelled(token: int) -> bytes:
            tokenizer = self.target.tokenizer
            return tokenizer.piece(token) or tokenizer.special_text(token).encode()

        return Scored(spelled(score.token), score.logprob, tuple((spelled(t), logprob) for t, logprob in score.top))

    def _ending(self, tail: str) -> bytes:
        """What ends the reasoning of a model that begins with it after `tail`; nothing for others."""
        form = self._reasoning
        if form is None or not form.starts_inside(tail):
            return b""
        closing = form.states["reasoning"].markers
        return next(marker for marker, state in closing.items() if state == "answer").encode()

    def _open_slot(self) -> Slot:
        def check() -> None:
            if slot is not None:
                slot.check()

        slot: Slot | None = None
        target = self.target.open_session(check, shared=True)
        with ExitStack() as undo:
            undo.callback(target.close)
            slot = Slot(target, self._open_draft(target, check))
            undo.pop_all()
        return slot

    def _open_draft(self, target: Session, check: CheckCancelled) -> Session | None:
        if isinstance(self.draft, SelfDraftModel):
            return self.draft.open_session(target, check)
        return self.draft.open_session(check) if self.draft is not None else None

    def _plain_s(self, step: Step, session: Session) -> float | None:
        """See Step."""
        if self._draft_stats is None:
            return None
        costs, max_concurrency = self._draft_stats.costs, session.peers.sessions + 1
        plain_s = costs.seconds(max_concurrency)
        if not step.index or step.n_peer_rows is None:
            return plain_s
        return plain_s * step.forward_s(max_concurrency) / costs.seconds(1 + step.n_drafted + step.n_peer_rows)

    def _seconds(self, session: Session) -> Callable[[int], float]:
        """What so many rows of `session` take; where that has not been measured, the same for any number."""
        if self._draft_stats is None:
            return lambda rows: 1.0
        share = MarginalCost(self._draft_stats.costs, lambda: session.peers)

        def seconds(rows: int) -> float:
            share.refresh()
            return share.seconds(rows)

        return seconds

    def _controller(
        self, spec: Speculation, slot: Slot, sampler: Sampler, rule: Rule, seed: int, way: str
    ) -> Controller:
        """`way` names how the text is sampled, by which acceptance is remembered."""
        session, draft_session = slot.target, slot.draft
        if spec.kind == "model" and not spec.is_plain and draft_session is None:
            raise DraftRefused("no draft model is loaded.", hint="Start with --draft REF, or use the n-gram draft.")
        if spec.is_plain or spec.gamma is not None:
            return fixed_for(spec, draft_session, sampler, rule, seed, trees=session.capabilities.tree)
        return autopilot_for(spec, self.draft_stats, draft_session, sampler, rule, seed, way, session)
