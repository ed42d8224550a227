"""Models, slots, drafters, verifier and controller put together into a stream of events. The loop is core/loop.py."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from time import monotonic, perf_counter
from typing import Any

from edgespec.autopilot.cost_model import CostModel
from edgespec.autopilot.profile import DraftCost, Profile, find_paying_acceptance
from edgespec.autopilot.profiler import (
    LOAD_CONTEXTS,
    choose_contexts,
    measure_contexts,
    measure_drafters,
    measure_rows,
)
from edgespec.autopilot.speculation import MAX_DRAFT, Speculation
from edgespec.autopilot.stats import DraftStats
from edgespec.autopilot.steered import SteeredController
from edgespec.backends import Model
from edgespec.backends.attached_draft import AttachedDraft
from edgespec.cancel import check_cancelled
from edgespec.core.peers import YIELD, Yield
from edgespec.core.protocols import Controller, Movable, Verifier
from edgespec.core.sampling import Sampler
from edgespec.engine.constraints import compile_constraint, constrain, list_unenforced
from edgespec.engine.drafter_pool import DrafterPool
from edgespec.engine.drafting import (
    make_adaptive_controller,
    make_draw,
    make_fixed_controller,
    make_verifier,
    score_whole,
)
from edgespec.engine.events import AnswerStart, Event, Notice, PrefixLoss, Prompt, Request, SlotState
from edgespec.engine.generation import Generation, time_rows
from edgespec.engine.grammar_compiler import GrammarCompiler
from edgespec.engine.loaded_drafter import LoadedDrafter
from edgespec.engine.prompts import EncodedPrompt, PromptEncoder
from edgespec.engine.slots import Slot, SlotPool, open_space, restore_prefix, store_prefix, store_text
from edgespec.errors import BackendError, Cancelled, InvalidRequest
from edgespec.memory.memory import Memory
from edgespec.memory.prefix_files import PrefixFiles
from edgespec.models.draft_words import name_cures
from edgespec.models.short_names import shorten_names

_STORE_S = 5.0  # when slots are freed, no further cache is written to disk after this time
_PROFILE_S = 0.5  # seconds of the measurement that begins when costs are needed and not known


class Engine:
    """A target, its drafters, and slots of their sessions, which keep their KV caches between requests.

    The thread that called the constructor uses it, except for `is_paused`.
    """

    def __init__(
        self,
        target: Model,
        drafters: Sequence[LoadedDrafter],
        speculation: Speculation,
        slots: int = 1,
        memory: Memory | None = None,
        prefixes: PrefixFiles | None = None,
    ) -> None:
        """`slots` is how many texts keep a KV cache at most. `memory` has the earlier texts, and `prefixes` the caches
        of some, from before the model was opened.

        Raises DraftRefused if a draft's vocabulary is not the target's.
        """
        self.target = target
        self._drafters = DrafterPool(drafters, target)
        self.speculation = speculation
        self.memory = memory
        self._prefixes = prefixes
        self.is_paused = False  # no drafting for now; any thread may set it, during a generation too
        self.prompts = PromptEncoder(target)
        self._grammars = GrammarCompiler(target.tokenizer)
        # A draft model of a fixed length reads again whatever one slot adopts from another.
        reads = speculation.draft_max and any(each.source is not None for each in drafters)
        self._slots = SlotPool(self._open_slot, slots, adopts=target.no_batching_reason is None and not reads)
        self._draft_stats: DraftStats | None = None
        self._is_closed = False

    @property
    def max_concurrency(self) -> int:
        """Calls of `generate` that may run at the same time."""
        return self._slots.max_slots if self.target.no_batching_reason is None else 1

    @property
    def slots(self) -> Sequence[SlotState]:
        """What the slots hold. Any thread may ask."""
        return self._slots.describe()

    def change_speculation(self, argument: str) -> None:
        """Apply 'on', 'off', 'auto' or a number of draft tokens. 'on' and 'off' work at once, also during an answer;
        the others apply from the next answer. Raises InvalidRequest.
        """
        current = self.speculation
        is_number = argument.isdecimal() and argument.isascii() and len(argument) < 4 and int(argument) <= MAX_DRAFT
        if argument not in ("on", "off", "auto") and not is_number:
            message = f"/spec takes on, off, auto or a number from 0 to {MAX_DRAFT}, not '{argument}'."
            raise InvalidRequest(message, hint="For example: /spec 4")
        if argument != "off" and not current.drafters:
            raise InvalidRequest("there is nothing to draft with.", hint="Choose a drafter: /draft ngram, /draft auto.")
        if argument == "auto" or (argument == "on" and current.is_plain):
            self.speculation = replace(current, draft_max=None, draft_tree=None)
        elif argument not in ("on", "off"):
            self.speculation = replace(current, draft_max=int(argument), draft_tree=None)
        self.is_paused = argument == "off"

    def stream(self, request: Request) -> Iterator[Event]:
        """`generate` alone, without its Yields."""
        return (event for event in self.generate(request) if not isinstance(event, Yield))

    def generate(self, request: Request, speculation: Speculation | None = None) -> Generator[Event | Yield]:
        """PrefillProgress, then Steps, each followed by the Pieces of its text, perhaps a Notice, then Finished.

        To run several generations at the same time, advance each to its next Yield in turn. `speculation` replaces the
        engine's for this generation. If it is cancelled, the last event is Finished("cancelled"), and the engine
        stays usable. Raises InvalidRequest, ContextOverflow, TemplateError, BackendError.
        """
        started_s = perf_counter()
        encoded = self._encode(request.prompt, request.variables, request.start)
        prompt, tokenizer = encoded.tokens, self.target.tokenizer
        generation = Generation(request, encoded, self.prompts.reasoning, tokenizer, started_s)
        controller: Controller | None = None
        slot: Slot | None = None
        loss: PrefixLoss | None = None
        try:
            sampler = Sampler(request.sampling, tokenizer.vocab_size)
            generation.matcher = yield from compile_constraint(request, self._grammars)
            spec = speculation or self.speculation
            self._drafters.require(() if spec.is_plain else spec.drafters)
            if spec.is_adaptive:
                self._measure_once()
            slot = yield from self._take_slot(request, prompt)
            slot.memory.quotes = partial(self.prompts.quote, request.prompt)
            settle = self._settler(slot, wants_trees=not spec.is_plain)
            if self._slots.is_alone(
                slot
            ):  # else a part of the prompt is read first, which drops what it does not share
                settle()
            costs = self._draft_stats.costs if self._draft_stats else None
            controller, verifier = self._choose_controller(
                generation, spec, slot, sampler, costs, can_pause=speculation is None
            )
            yield from generation.run(slot.target, controller, verifier, costs, settle)
        except (Cancelled, GeneratorExit) as stop:
            if slot is not None:  # drop a forward that was not committed
                slot.target.rewind(slot.target.position)
            if isinstance(stop, GeneratorExit):
                raise
            generation.reason = "cancelled"
        except Exception as error:
            if slot is not None:
                self._slots.discard(slot, error)
            raise
        finally:
            if controller is not None:
                controller.end()
            if slot is not None:
                self._drafters.drop(slot, controller.failures if controller is not None else {})
                slot.loss = loss = generation.explain_loss(slot.earlier, self.target.context_size)
                self._slots.release(slot, store_text(slot, request.memory, prompt, generation.emitted))
        yield from generation.finish()
        yield from map(Notice, self._take_notices())
        yield replace(
            generation.finished(),
            records=dict(self._draft_stats.records) if self._draft_stats else {},
            warnings=list_unenforced(request, generation.matcher),
            loss=loss,
        )

    def encode(self, prompt: Prompt) -> list[int]:
        """The tokens of `prompt`, chat template included. Raises what `generate` raises."""
        return self._encode(prompt, {}).tokens

    @property
    def has_draft_stats(self) -> bool:
        return self._draft_stats is not None

    @property
    def draft_stats(self) -> DraftStats:
        """What the autopilot has learned of these models. Measures for half a second if nothing is known."""
        return self._measure_once()

    @draft_stats.setter
    def draft_stats(self, stats: DraftStats) -> None:
        self._draft_stats = stats

    @property
    def drafters(self) -> Mapping[str, LoadedDrafter]:
        return self._drafters.loaded

    def measure(self, seconds: float, contexts: Sequence[int] = LOAD_CONTEXTS) -> Profile:
        """Measure the cost of forwards and of the drafters, also after `contexts` tokens, see `measure_contexts`.

        Forwards run for `seconds`, drafters in addition. Raises Cancelled, BackendError.
        """
        shares = 1 + len(choose_contexts(contexts, self.target.context_size))
        with self._borrow_slot() as slot, ExitStack() as opened:
            rows = measure_rows(slot.target, seconds / shares)
            short = Profile(rows, self._measure_drafters(slot, slot.drafters))
            seconds *= 1 - 1 / shares
            sources = {name: self.drafters[name].source for name in short.drafts}
            attached = {name: each for name, each in sources.items() if isinstance(each, AttachedDraft)}
            session = slot.target
            if self.max_concurrency > 1:  # the caches of slots that share forwards may not be filled with copies
                try:
                    session = opened.enter_context(closing(self.target.open_session()))
                except BackendError:
                    return short
            return measure_contexts(session, short, contexts, seconds, attached)

    def measure_missing(self) -> None:
        """Measure the drafters whose cost is not known. Raises Cancelled, BackendError."""
        stats = self.draft_stats
        with self._borrow_slot() as slot:
            missing = [name for name in slot.drafters if not stats.costs.has_cost(name)]
            stats.costs.add_drafters(self._measure_drafters(slot, missing))

    def _measure_drafters(self, slot: Slot, names: Iterable[str]) -> dict[str, DraftCost]:
        """The costs of these drafters; those that fail are dropped, and the user is told."""
        costs, failures = measure_drafters([slot.drafters[name] for name in names], slot.target)
        self._drafters.drop(slot, failures)
        return costs

    @contextmanager
    def _borrow_slot(self) -> Iterator[Slot]:
        with self._slots.borrow() as slot:
            self._drafters.open_missing(slot)
            yield slot

    def close(self) -> None:
        """Free everything; later requests are refused."""
        self.release_draft()
        if self.memory is not None:
            self.memory.close()
        self.target.close()
        self._is_closed = True

    def release_draft(self) -> None:
        """Free the sessions and the drafts, so that another engine can take over the target and the memory."""
        self._grammars.close()
        self.release_slots()
        self._drafters.close()

    def release_slots(self) -> None:
        """Free the sessions, so that another engine can open some of the target; the next requests open new ones."""
        self._store_prefixes()
        self._slots.close()

    def _store_prefixes(self) -> None:
        """Keep the caches of the slots for another engine of this model, perhaps in another process."""
        if self.memory is None or self._prefixes is None:
            return
        end_s = monotonic() + _STORE_S
        for slot in reversed(self._slots.free):
            if monotonic() >= end_s:
                return
            with suppress(Exception):  # whatever it is, the model is closed
                store_prefix(slot, self.memory, self._prefixes)

    def _take_slot(self, request: Request, prompt: Sequence[int]) -> Generator[Yield, None, Slot]:
        """A slot for a request, with what the memory's files have of its prompt. Raises Cancelled, BackendError."""
        files, use = self._prefixes, request.memory
        saved = files.find(use.namespace, prompt) if files is not None and use is not None else None
        n_saved = saved.common if saved is not None else 0
        while (slot := self._slots.acquire(prompt, request.owner, n_saved)) is None:
            check_cancelled()  # there is no memory for one more
            yield YIELD
        try:
            open_space(slot, self.memory, use)
            restore_prefix(slot, saved, files)
        except Cancelled:
            self._slots.release(slot, list(slot.tokens))
            raise
        except Exception as error:
            self._slots.discard(slot, error)
            raise
        return slot

    def _settler(self, slot: Slot, *, wants_trees: bool) -> Callable[[], None]:
        """A function that tells the target's session between rounds whether it is alone."""
        target = slot.target
        if not isinstance(target, Movable):
            return lambda: None
        return lambda: target.settle(alone=wants_trees and self._slots.is_alone(slot))

    def _take_notices(self) -> Iterator[str]:
        """What the user has to know after an answer, in sentences."""
        yield from self._drafters.take_notices()
        while self.memory is not None and (notice := self.memory.take_notice()):
            yield notice
        yield from self._warn_low_acceptance()

    def _warn_low_acceptance(self) -> Iterator[str]:
        """A sentence for each drafter that its record shows to be right too seldom; it is told once."""
        records = self._draft_stats.records if self._draft_stats is not None else {}
        for name in tuple(records):  # other generations may add some meanwhile
            record = records[name]
            drafter = self._drafters.loaded.get(name)
            if drafter is None or drafter.source is None or record.is_told or not record.is_low(1.0):
                continue
            pays_from = find_paying_acceptance(self.draft_stats.costs.profile, name)
            if not record.is_low(1.0 if pays_from is None else pays_from):
                continue
            records[name] = replace(record, is_told=True)
            told = record.describe(shorten_names(drafter.label))
            limit = "do not pay" if pays_from is None else f"pay from {pays_from:.0%}"
            yield f"{told[:1].upper()}{told[1:]}, and {limit} on this machine: {name_cures(drafter.spec)}."

    def _measure_once(self) -> DraftStats:
        if self._draft_stats is None:
            self._draft_stats = DraftStats(self.measure(_PROFILE_S))
        return self._draft_stats

    def _encode(self, prompt: Prompt, variables: Mapping[str, Any], start: AnswerStart | None = None) -> EncodedPrompt:
        if self._is_closed:
            raise BackendError("the model has been closed.")
        return self.prompts.encode(prompt, variables, start)

    def _choose_controller(
        self,
        generation: Generation,
        spec: Speculation,
        slot: Slot,
        sampler: Sampler,
        costs: CostModel | None,
        *,
        can_pause: bool,
    ) -> tuple[Controller, Verifier]:
        request, seed = generation.request, generation.seed
        drafters = [] if spec.is_plain else self._drafters.select(slot, spec.drafters)
        temperature = request.sampling.temperature
        rule = spec.choose_rule(temperature, seeded=request.seed is not None)
        draw = make_draw(rule, sampler, seed, is_tree=spec.is_tree)
        controller: Controller
        if spec.is_adaptive:
            spec = score_whole(spec, slot.target, drafters, self.draft_stats.costs)
        if spec.is_adaptive:
            # Acceptance is learned apart for each way to sample.
            sampling = f"{rule} at {temperature:.1f}{', structured' if request.structure else ''}"
            controller = make_adaptive_controller(self.draft_stats, slot.target, drafters, draw, sampling)
        else:
            controller = make_fixed_controller(spec, slot.target, drafters, draw)
        verifier, forced = constrain(generation, partial(make_verifier, rule, seed=seed), sampler, self._grammars)
        if spec.draft_max == 0:
            forced = None
        return SteeredController(
            controller, lambda: can_pause and self.is_paused, forced, time_rows(costs, slot.target)
        ), verifier

    def _open_slot(self) -> Slot:
        slot = Slot()
        slot.target = self.target.open_session(shared=True)
        with ExitStack() as undo:
            undo.callback(slot.close)
            self._drafters.open_missing(slot, is_new=True)
            undo.pop_all()
        return slot
