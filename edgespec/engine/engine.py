"""Models, slots, drafter, verifier and controller put together into a stream of events. The loop is core/loop.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from time import perf_counter
from typing import Any

from edgespec.backends import Model
from edgespec.backends.attached_draft import AttachedDraft
from edgespec.controller.cost_model import Profile
from edgespec.controller.profiler import measure
from edgespec.controller.stats import DraftStats
from edgespec.controller.wrappers import JumpForward, Switchable
from edgespec.core.batching import YIELD, Yield
from edgespec.core.protocols import CheckCancelled, Controller, Session, Verifier
from edgespec.core.sampling import Sampler
from edgespec.engine.drafting import Speculation, make_autopilot, make_fixed_controller, make_verifier
from edgespec.engine.events import Event, Notice, Request
from edgespec.engine.generation import ForwardCost, Generation
from edgespec.engine.session_pool import Slot, SlotPool
from edgespec.engine.structured_output import GrammarCompiler, GrammarMask
from edgespec.errors import BackendError, Cancelled, ContextOverflow, DraftRefused, InvalidRequest
from edgespec.registry.tokenizer_compat import find_tokenizer_mismatch
from edgespec.text.chat_template import SHORTEN, ChatTemplate, Message, check_length, encode_prompt
from edgespec.text.reasoning import detect_format
from edgespec.text.stream import TextStream

_PROFILE_S = 0.5  # of the implicit calibration
_PROMPT_TAIL = 256  # characters of the rendered prompt in which reasoning may begin


class Engine:
    """A target, perhaps a draft, and slots of their sessions, which keep their KV caches between requests.

    The thread that called the constructor uses it, except for `is_paused`.
    """

    def __init__(
        self, target: Model, draft: Model | AttachedDraft | None, speculation: Speculation, slots: int = 1
    ) -> None:
        """`draft` may be made of the target itself; `slots` is how many texts keep a KV cache at most.

        Raises DraftRefused where the draft's vocabulary is not the target's.
        """
        if (
            draft is not None
            and not isinstance(draft, AttachedDraft)
            and (reason := find_tokenizer_mismatch(target.tokenizer, draft.tokenizer))
        ):
            raise DraftRefused(f"this draft does not fit this target: {reason}.", hint="Use --draft ngram, or another.")
        self.target = target
        self.draft = draft
        self.speculation = speculation
        self.is_paused = False  # no drafting for now; any thread may set it, during a generation too
        tokenizer, source = target.tokenizer, target.chat_template
        bos, eos = ("" if t is None else tokenizer.special_text(t) for t in (tokenizer.bos, tokenizer.eos))
        self._template = ChatTemplate(source, bos, eos) if source else None
        self._reasoning = detect_format(source) if source else None
        self._grammars = GrammarCompiler(tokenizer)
        # A draft model of a fixed length reads again whatever one slot adopts from another.
        adopts = target.no_batching_reason is None and not (draft and speculation.draft_max)
        self._slots = SlotPool(self._open_slot, slots, adopts=adopts)
        self._draft_stats: DraftStats | None = None
        self._has_warned = False
        self._is_closed = False

    @property
    def max_concurrency(self) -> int:
        """Calls of `generate` that may run at the same time."""
        return self._slots.max_slots if self.target.no_batching_reason is None else 1

    def stream(self, request: Request, check: CheckCancelled = lambda: None) -> Iterator[Event]:
        """`generate` alone, without its Yields."""
        return (event for event in self.generate(request, check) if not isinstance(event, Yield))

    def generate(
        self, request: Request, check: CheckCancelled = lambda: None, speculation: Speculation | None = None
    ) -> Iterator[Event | Yield]:
        """PrefillProgress, then Steps, each followed by the Pieces of its text, perhaps a Notice, then Finished.

        To run several generations at the same time, advance each to its next Yield in turn. `speculation` replaces the
        engine's for this generation. `check` is polled; when it raises Cancelled the last event is
        Finished("cancelled"), and the engine stays usable. Raises InvalidRequest, ContextOverflow, TemplateError,
        BackendError.
        """
        started_s = perf_counter()
        prompt, tail = self._encode(request.prompt, request.variables)
        is_raw = isinstance(request.prompt, str)
        tokenizer = self.target.tokenizer
        text = TextStream(tokenizer, request.stop, self._reasoning, tail, request.visible, is_raw=is_raw)
        generation = Generation(request, prompt, text, tokenizer, started_s)
        controller: Controller | None = None
        slot: Slot | None = None
        try:
            sampler = Sampler(request.sampling, tokenizer.vocab_size)
            mask = self._compile_grammar(request, sampler, len(prompt), tail)
            spec = speculation or self.speculation
            if spec.is_adaptive:
                self._measure_once(check)
            while (slot := self._slots.acquire(prompt, check)) is None:  # there is no memory for one more
                check()
                yield YIELD
            costs = ForwardCost(self._draft_stats.costs if self._draft_stats else None, slot.target)
            chosen, verifier = self._choose_controller(generation, spec, slot, sampler, mask, costs)
            controller = Switchable(chosen, lambda: speculation is None and self.is_paused)
            yield from generation.run(slot.target, controller, verifier, costs, check)
        except Cancelled:
            generation.reason = "cancelled"
            if slot is not None:  # drop a forward that was not committed
                slot.target.rewind(slot.target.position)
        except Exception as error:
            if slot is not None:
                self._discard(slot, error)
            raise
        finally:
            if controller is not None:
                controller.end()
            if slot is not None:
                self._slots.release(slot, [*prompt, *generation.emitted])
        yield from generation.finish()
        if controller is not None and not self._has_warned and (warning := controller.warning()):
            self._has_warned = True
            yield Notice(warning)
        yield generation.finished()

    def encode(self, prompt: str | tuple[Message, ...], variables: Mapping[str, Any] | None = None) -> list[int]:
        """The tokens of `prompt`, chat template included. Raises what `generate` raises."""
        return self._encode(prompt, variables or {})[0]

    @property
    def has_draft_stats(self) -> bool:
        return self._draft_stats is not None

    @property
    def draft_stats(self) -> DraftStats:
        """What the autopilot has learned of these models. Measures for half a second where nothing is known."""
        return self._measure_once(lambda: None)

    @draft_stats.setter
    def draft_stats(self, stats: DraftStats) -> None:
        self._draft_stats = stats

    def measure(self, seconds: float, check: CheckCancelled = lambda: None) -> Profile:
        """Measure the cost of forwards and drafted tokens. Raises Cancelled, BackendError."""
        slot = self._slots.acquire((), check)
        if slot is None:
            raise BackendError("all slots are in use.", hint="Try again.")
        try:
            return measure(slot.target, slot.draft, seconds, check)
        finally:
            self._slots.release(slot, [])

    def close(self) -> None:
        """Free everything; later requests are refused."""
        self.release_draft()
        self.target.close()
        self._is_closed = True

    def release_draft(self) -> None:
        """Free the sessions and the draft, so that another engine can take the target over."""
        self._slots.close()
        if self.draft is not None:
            self.draft.close()
            self.draft = None

    def _measure_once(self, check: CheckCancelled) -> DraftStats:
        if self._draft_stats is None:
            self._draft_stats = DraftStats(self.measure(_PROFILE_S, check))
        return self._draft_stats

    def _encode(self, prompt: str | tuple[Message, ...], variables: Mapping[str, Any]) -> tuple[list[int], str]:
        """Token ids, and the end of the rendered text, which shows whether the model begins inside its reasoning."""
        if self._is_closed:
            raise BackendError("the model has been closed.", hint="Open it again.")
        if isinstance(prompt, str):
            text = prompt
        elif self._template is not None:
            text = self._template.render(prompt, variables=variables)
        else:
            text = "".join(message.content for message in prompt)
        size = self.target.context_size
        check_length(text, size)
        tokens = encode_prompt(self.target.tokenizer, text, parse_special=True) if text else []
        if not tokens:
            raise InvalidRequest("the prompt is empty.", hint="Write something to continue or answer.")
        if len(tokens) > size:
            raise ContextOverflow(f"the prompt has {len(tokens):,} tokens, the context holds {size:,}.", hint=SHORTEN)
        return tokens, text[-_PROMPT_TAIL:]

    def _compile_grammar(self, request: Request, sampler: Sampler, n_prompt: int, tail: str) -> GrammarMask | None:
        """The sampler within the request's structure, which begins after the reasoning; None without a structure."""
        if request.structure is None:
            return None
        form, end = self._reasoning, b""
        if form is not None and form.starts_inside(tail):
            markers = form.states["reasoning"].markers
            end = next(marker for marker, state in markers.items() if state == "answer").encode()
        return self._grammars.constrain(request.structure, sampler, n_prompt, end)

    def _choose_controller(
        self,
        generation: Generation,
        spec: Speculation,
        slot: Slot,
        sampler: Sampler,
        mask: GrammarMask | None,
        costs: ForwardCost,
    ) -> tuple[Controller, Verifier]:
        """Raises DraftRefused where `spec` needs a draft model and none is loaded."""
        request, seed = generation.request, generation.seed
        if spec.kind == "model" and not spec.is_plain and slot.draft is None:
            raise DraftRefused("no draft model is loaded.", hint="Start with --draft REF, or use the n-gram draft.")
        temperature = request.sampling.temperature
        rule = spec.choose_rule(temperature, seeded=request.seed is not None)
        controller: Controller
        if spec.is_adaptive:
            # Acceptance is learned apart for each way to sample.
            sampling = f"{rule} at {temperature:.1f}{', structured' if request.structure else ''}"
            controller = make_autopilot(spec, self.draft_stats, slot, sampler, rule, seed, sampling)
        else:
            controller = make_fixed_controller(spec, slot, sampler, rule, seed)
        if mask is not None:
            controller = JumpForward(controller, mask.forced, costs.seconds_by_rows())
        return controller, make_verifier(rule, mask or sampler, seed)

    def _discard(self, slot: Slot, error: Exception) -> None:
        """Close a slot that failed between forward and commit; a runtime's error may have damaged what slots share."""
        self._slots.drop(slot)
        if isinstance(error, BackendError):
            self._slots.drop_free()

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
        if isinstance(self.draft, AttachedDraft):
            return self.draft.open_session(target, check)
        return self.draft.open_session(check) if self.draft is not None else None
