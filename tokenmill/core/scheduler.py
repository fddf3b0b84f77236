"""Who runs next: turns waiting requests and free pages into step plans, and results into outputs.

One rule: let `computed` catch up with `total`. Prompts, chunks, cached prefixes, decoding and resuming after
preemption are all that. The scheduler knows no device, no text, and no other thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from tokenmill.core.beside import PromptLane
from tokenmill.core.deadlines import timed_out
from tokenmill.core.grammars import Guide
from tokenmill.core.intake import drawn, failed, show_hidden_states, show_prompts
from tokenmill.core.logprob_ledger import LogprobLedger
from tokenmill.core.plan import Flight, PlanDraft, SchedulerLimits
from tokenmill.core.policy import Policy, PriorityQueue, WaitingQueue
from tokenmill.core.prefilling import Prefilling
from tokenmill.core.priority import Priorities, Room, choose_victims, queue_full
from tokenmill.core.request import NEVER_ADMITTED, NO_SLOT, Decoding, Phase, RequestState, Rows
from tokenmill.kvcache import Cache
from tokenmill.messages import CANCELLED, Finish, Lane, Output, Request, StepPlan, StepResult


class Scheduler:
    """Schedules all requests of one engine. Not thread-safe; raises only when its own books are wrong.

    Running requests are kept in order: first those that decode, the most urgent before the others and equals
    in the order of their first admission, then at most one whose prompt did not fit into the last step.
    Preemption takes the least urgent, of these the youngest. So among the most urgent the oldest always gets
    on and finishes, and only more urgent requests starve another. Without priorities all are equals.

    Steps may be planned before earlier results are taken in. The device runs steps in the order of their
    plans; therefore slots and pages that a plan uses may be given away in any later one.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        *,
        cache: Cache,
        policy: Policy,
        priorities: Priorities = Priorities(),  # noqa: B008 (frozen)
    ) -> None:
        assert limits.max_rows > 0
        assert limits.max_step_tokens > 0
        assert cache.columns(limits.max_sequence_tokens) <= cache.max_columns, "a full sequence needs all"
        self._limits = limits
        self._cache = cache
        self._priorities = priorities
        self._queue = PriorityQueue(policy) if priorities.enabled else WaitingQueue(policy)
        self._rows = Rows(limits.max_rows)
        self._states: dict[str, RequestState] = {}  # everything not finished
        self._num_compiling = 0
        self._num_late = 0  # requests that wait for their tokens; see `waits_for_tokens`
        self._decoding = Decoding()
        self._prefilling = Prefilling(self._queue, self._rows, cache)
        self._flights: deque[Flight] = deque()
        self._prompts = PromptLane(self._queue, self._prefilling, self._decoding, self._rows, limits)
        self._ending: list[RequestState] | None = None  # whose prompts end in the newest plan, until `settle`
        self._ledger = LogprobLedger()
        self.num_drawn = 0  # tokens taken in since the start

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, preempted ones included, and those whose grammar is being compiled."""
        return len(self._queue) + self._num_compiling

    @property
    def num_running(self) -> int:
        """Requests that are neither waiting nor finished."""
        return len(self._states) - self.num_waiting

    @property
    def num_in_flight(self) -> int:
        """Steps whose results were not taken in yet, but for those of `Lane.PROMPTS`."""
        return len(self._flights)

    @property
    def num_prompts_in_flight(self) -> int:
        """Steps of `Lane.PROMPTS` whose results were not taken in yet."""
        return len(self._prompts)

    @property
    def awaits_steps(self) -> bool:
        """Whether some step's result was not taken in yet."""
        return bool(self._flights or self._prompts)

    @property
    def waits_for_tokens(self) -> bool:
        """Whether some row of the newest step draws only when the host knows all tokens before it."""
        return self.has_late_rows and any(state.waits_for_tokens for state in self._flights[-1].states)

    @property
    def has_late_rows(self) -> bool:
        """Whether some request draws only when the host knows all tokens before it."""
        return self._num_late > 0

    @property
    def idle(self) -> bool:
        """Whether nothing waits, runs or is in flight."""
        return not (self._states or self.awaits_steps)

    @property
    def is_asleep(self) -> bool:
        """Whether nothing can be done until a message comes: no request, or none whose grammar is there."""
        return len(self._states) == self._num_compiling and not self.awaits_steps

    def may_go_on(self, num_steps: int) -> bool:
        """Whether so many more steps may come without any new request."""
        return bool(len(self._queue) or self._prefilling.states) or self.may_decode(num_steps)

    def may_decode(self, num_steps: int) -> bool:
        """Whether some row that decodes already may go on for so many steps."""
        self._decoding.refresh()
        return self._rows.most_left(self._decoding.slots) >= num_steps

    # ── requests in and out ───────────────────────────────────────────────────────────────────

    def submit(self, requests: Sequence[Request]) -> list[Output]:
        """Queue requests; ids must be unused and lengths within the limits.

        Returns the ends of those that are refused, and of those that made way in a full queue.
        """
        ended: list[Output] = []
        self._prompts.note_newcomers()
        for request in requests:
            assert request.id not in self._states, f"request id {request.id!r} is in use"
            state = RequestState(request, urgency=self._priorities.urgency(request))
            assert 0 < state.num_prompt <= state.limit
            # Nobody computes the last token of an output, so a prompt that takes all may draw one.
            assert max(state.num_prompt, state.limit - 1) <= self._limits.max_sequence_tokens
            if refusal := self._priorities.refusal(request):
                ended.append(state.report(refusal))
                continue
            if self._is_full:
                excess = self._least_urgent(state)
                ended.append(self._turn_away(excess))
                if excess is state:
                    continue
            self._num_late += state.waits_for_tokens
            self._states[request.id] = state
            self._num_compiling += state.phase is Phase.COMPILING
            if state.phase is Phase.WAITING:
                self._queue.add(state)
        return ended

    @property
    def _is_full(self) -> bool:
        """Whether the queue takes no more; who will find a free row does not count as waiting."""
        most = self._limits.max_queued
        return most is not None and self.num_waiting >= most + self._rows.num_free

    def _least_urgent(self, newcomer: RequestState) -> RequestState:
        """Whom a full queue turns away: the newcomer, unless somebody there is less urgent."""
        worst = self._queue.last if len(self._queue) else newcomer
        return worst if worst.urgency < newcomer.urgency else newcomer

    def _turn_away(self, state: RequestState) -> Output:
        has_waited, most = state.request.id in self._states, self._limits.max_queued
        finish = queue_full(most, by_urgency=self._priorities.enabled, has_waited=has_waited)
        return self._end(state, finish) if has_waited else state.report(finish)

    def cancel(self, request_ids: Sequence[str]) -> list[Output]:
        """End requests at once, with the tokens not reported yet. Unknown ids are ignored."""
        found = [self._states[id] for id in dict.fromkeys(request_ids) if id in self._states]
        return self._abort(found, CANCELLED)

    def time_out(self, request_ids: Sequence[str]) -> list[Output]:
        """End requests whose `timeout_seconds` are over. Unknown ids are ignored."""
        found = [self._states[id] for id in request_ids if id in self._states]
        return [self._end(state, timed_out(state.request)) for state in found]

    def abort_all(self, message: str) -> list[Output]:
        """End every request at once, saying why. Steps in flight stay in flight."""
        return self._abort(list(self._states.values()), message)

    def retract_all(self) -> None:
        """Preempt everything that runs; no step may be in flight. It is computed anew when it comes back."""
        assert not self.awaits_steps
        self._decoding.refresh()
        for state in [*self._prefilling.states, *reversed(self._decoding.states)]:
            self._retract(state)

    def _abort(self, states: Iterable[RequestState], message: str) -> list[Output]:
        return [self._end(state, Finish("abort", message=message)) for state in states]

    # ── plans out ─────────────────────────────────────────────────────────────────────────────

    def plan_step(self) -> StepPlan | None:
        """The next step, or None if nothing can run until a result or a request comes in.

        The books wait for `settle`, which is due before anything else happens here; the device can begin
        with the plan meanwhile.
        """
        assert self._ending is None, "settle() is due"
        if self._priorities.threshold is not None and len(self._queue):
            self._preempt(self._priorities.threshold)
        draft = PlanDraft()
        self._schedule_decodes(draft)
        # Never more than tokens of a step: each ended a prompt within one, or there are as few rows.
        decodes = self._decoding.next_states
        prefills: list[RequestState] = []
        if not self._prompts:
            prefills = self._prefilling.schedule(draft, self._limits.max_step_tokens - len(decodes))
        if draft.is_empty:
            return None
        lane = Lane.DECODES if self._prompts else Lane.WHOLE
        plan = draft.build(lane, awaits_prompts=self._prompts.was_left())
        self._flights.append(Flight.of(plan, decodes, draft.chunks, ending=prefills))
        self._ending = prefills
        return plan

    @property
    def prompts_pay_apart(self) -> bool:
        """Whether `plan_prompts` would be worth it; see `beside.py`."""
        self._decoding.refresh()
        if self._num_late or self._priorities.enabled:
            return False
        return self._prompts.pays()

    @property
    def may_take_in_prompts(self) -> bool:
        """Whether the result of the oldest step of `Lane.PROMPTS` is the next one of its requests."""
        return self._prompts.is_next(self._flights)

    def plan_prompts(self) -> StepPlan | None:
        """The next step of `Lane.PROMPTS`, beside those that decode; nothing is left to settle.

        Its rows decode once its result was taken in. A step must have as many tokens as there are rows.
        """
        assert self._ending is None, "settle() is due"
        draft = PlanDraft()
        ending = self._prefilling.schedule(draft, self._limits.max_step_tokens)
        if draft.is_empty:
            return None
        plan = draft.build(Lane.PROMPTS)
        flight = Flight.of(plan, [], draft.chunks, ending=ending)
        self._prompts.launched(flight, ending, behind=self._flights[-1] if self._flights else None)
        self._prompts.hold_back()
        self._queue.look_ahead()
        return plan

    def settle(self) -> None:
        """Note what the newest plan leads to, and put who waits into order before a plan needs it."""
        if self._ending is not None:
            self._move_on(self._flights[-1], self._ending)
            self._ending = None
        self._queue.look_ahead()

    def _preempt(self, threshold: int) -> None:
        """Push back rows for requests that are more urgent by more than `threshold`, if these then fit.

        Before anything of the step is planned, because a plan must not use a page twice.
        """
        self._decoding.refresh()
        if self._rows.num_used and self._queue.peek().urgency - threshold > self._last_row().urgency:
            room = Room(
                self._rows,
                self._cache,
                decoding=self._decoding.states,
                prefilling=self._prefilling.states,
                max_tokens=self._limits.max_step_tokens,
            )
            for state in choose_victims(self._queue, room, threshold=threshold):
                self._retract(state)

    def _schedule_decodes(self, draft: PlanDraft) -> None:
        """Add the rows that decode, in order."""
        self._reserve_for_decodes(draft)
        slots = self._decoding.next_slots
        starts = self._rows.computed[slots]
        self._rows.computed[slots] = starts + 1
        draft.set_decodes(slots, starts)

    def _reserve_for_decodes(self, draft: PlanDraft) -> None:
        """Give a page to each row that begins one, preempting the last rows when there is none: others may
        come to decode for them, then."""
        cache, room = self._cache, self._rows.room
        while True:
            self._decoding.refresh()
            slots, states = self._decoding.next_slots, self._decoding.next_states
            needy = np.flatnonzero(self._rows.computed[slots] >= room[slots])
            if not len(needy):
                return
            for state in [states[index] for index in needy.tolist()]:
                pages = state.pages
                if pages is None:  # preempted for a row before it just now
                    continue
                num_columns = len(pages.tables[0])
                num_tokens = num_columns * cache.page_size
                cache.commit(pages, state.tokens, num_tokens=min(num_tokens, len(state.tokens)))
                while not cache.reserve(pages, num_tokens + 1):
                    self._retract(self._last_row())
                    if state.pages is None:
                        break
                else:
                    room[state.slot] = num_tokens + cache.page_size
                    draft.add_page(state.slot, pages, column=num_columns)

    def _last_row(self) -> RequestState:
        """The least urgent running request, the youngest of them; there must be one."""
        last = self._decoding.last
        prefilling = self._prefilling.states
        if prefilling and (last is None or prefilling[-1].urgency <= last.urgency):
            return prefilling[-1]
        assert last is not None
        return last

    def _retract(self, state: RequestState) -> None:
        """Preempt: back to the queue without row and pages. Its full pages stay while nobody needs them."""
        state.total = int(self._rows.computed[state.slot]) + 1
        if state.phase is Phase.PREFILL:
            state.total = self._num_coming(state)
        self._vacate(state, Phase.WAITING)
        state.num_retractions += 1
        self._queue.add_retracted(state)

    def _move_on(self, flight: Flight, prefills: list[RequestState]) -> None:
        """Move on the rows of a complete plan: prefilled rows decode, rows with no draw left give way.

        This comes after planning, because a page given back earlier could be given away in the same plan.
        """
        for state in prefills:
            state.phase = Phase.DECODE
        if prefills:
            self._prefilling.refresh()
            self._decoding.add(prefills, by_urgency=self._priorities.enabled)
        rows, slots = self._rows, flight.slots[: flight.num_decodes]
        ended = np.flatnonzero(rows.computed[slots] >= rows.end[slots])
        for state in [flight.states[index] for index in ended.tolist()] + prefills:
            if rows.computed[state.slot] >= rows.end[state.slot]:
                self._vacate(state, Phase.DRAINING)

    def compiled(self, request_id: str, outcome: Guide | Finish) -> list[Output]:
        """Queue a request whose grammar is compiled, or end it. Ids that have ended are ignored."""
        if (state := self._states.get(request_id)) is None:
            return []
        if isinstance(outcome, Finish):
            return [self._end(state, outcome)]
        self._num_compiling -= 1
        state.guide, state.phase = outcome, Phase.WAITING
        self._queue.add(state)
        return []

    def guided(self) -> list[tuple[int, Guide]]:
        """The slots of the newest plan whose draw a grammar guides, and their guides."""
        return self._flights[-1].guided

    def end_stuck(self) -> list[Output]:
        """End the requests of the newest plan whose grammar left them no token to draw."""
        return [self._end(state, finish) for state, finish in self._flights[-1].stuck]

    # ── results in ────────────────────────────────────────────────────────────────────────────

    def take_in(self, result: StepResult, lane: Lane = Lane.WHOLE) -> list[Output]:
        """Take in the result of the oldest step of a lane; returns what is due to be reported.

        Rows whose prompt has ended in `Lane.PROMPTS` decode from now on.
        """
        assert self._ending is None, "settle() is due"
        if lane is Lane.PROMPTS:
            flight, ending = self._prompts.done()
            self._move_on(flight, ending)
            self._prompts.hold_back()
        else:
            flight = self._flights.popleft()
        show_prompts(flight, result)  # also of rows that fail now: samples share the first one's
        outputs = [
            self._end(state, failed(failure), remember=False)
            for row, failure in result.failures
            if (state := flight.state(row)).finish is None
        ]
        show_hidden_states(flight, result)
        step = drawn(flight, result, self._ledger)
        self.num_drawn += len(step.tokens)
        for state, token in zip(step.states, step.tokens, strict=True):
            if state.finish is not None:
                continue
            tokens = state.tokens
            tokens.append(token)
            if state.guide is not None:
                state.guide.note(token)
            if len(tokens) >= state.watched_from or token in state.stop_ids:
                if finish := state.finish_with(token):
                    outputs.append(self._end(state, finish))
                elif len(tokens) >= state.due_at:
                    outputs.append(state.report(None))
        for state in step.prompts_only:
            if state.finish is None:
                outputs.append(self._end(state, Finish("length", length=0)))
        if result.postponed or result.lost_pages:
            self._recover(flight, result)
        return outputs

    def _recover(self, flight: Flight, result: StepResult) -> None:
        """Forget pages that were never written, and have all that read them computed anew."""
        lost = frozenset(result.lost_pages)
        self._decoding.refresh()
        for state in [*self._decoding.states, *self._prefilling.states]:
            if state.pages is not None and self._cache.uses(state.pages, lost):
                self._vacate(state, Phase.WAITING)
                self._begin_anew(state)
        self._cache.forget(lost)
        for state in map(flight.state, result.postponed):
            if state.phase is Phase.DRAINING:
                state.phase = Phase.WAITING
                self._begin_anew(state)
            elif state.finish is None:  # its draw in this step does not come any more
                state.total = self._num_coming(state)

    def _begin_anew(self, state: RequestState) -> None:
        """Queue a request that has no row; the tokens that the host knows stay."""
        state.total = self._num_coming(state)
        state.age = NEVER_ADMITTED
        state.num_retractions += 1
        self._queue.add_again(state)

    def _num_coming(self, state: RequestState) -> int:
        """Tokens of a request when all draws in flight are taken in."""
        flights = [*self._flights, *self._prompts.flights]
        return len(state.tokens) + sum(flight.states.count(state) for flight in flights)

    def _end(self, state: RequestState, finish: Finish, *, remember: bool = True) -> Output:
        """Finish a request wherever it stands. Results of its steps in flight will be ignored."""
        if state.phase is Phase.COMPILING:
            self._num_compiling -= 1
        elif state.phase is Phase.WAITING:
            self._queue.remove(state)
        elif state.phase is not Phase.DRAINING:
            self._vacate(state, Phase.FINISHED, remember=remember)
        state.phase = Phase.FINISHED
        del self._states[state.request.id]
        self._num_late -= state.waits_for_tokens
        return state.report(finish)

    def _vacate(self, state: RequestState, phase: Phase, *, remember: bool = True) -> None:
        """Take row and pages from a request, remembering the prefix it computed as far as it is known."""
        assert state.pages is not None
        self._prompts.note_leaving(state)
        if remember:
            computed = int(self._rows.computed[state.slot])
            self._cache.commit(state.pages, state.tokens, num_tokens=min(computed, len(state.tokens)))
            self._cache.release(state.pages)
        else:
            self._cache.discard(state.pages)
        self._rows.leave(state.slot)
        if state.phase is Phase.PREFILL:
            self._prefilling.states.remove(state)
        else:
            self._decoding.note_end()
        state.pages = None
        state.slot = NO_SLOT
        state.phase = phase

    def check_invariants(self) -> None:
        """Assert that every request, slot and page is in one place only. For tests; slow."""
        decoding = [state for state in self._decoding.states if state.phase is Phase.DECODE]
        running = decoding + self._prefilling.states
        pages = [state.pages for state in running if state.pages is not None]
        assert len(pages) == len(running)
        self._cache.check_invariants(pages)
        self._rows.check_invariants([state.slot for state in running])
        self._prefilling.check_invariants(are_launched=bool(self._prompts))
        for line in (self._decoding.states, list(self._queue)):
            urgencies = [state.urgency for state in line]
            assert urgencies == sorted(urgencies, reverse=True), "a less urgent request goes first"
        admitted = [state for state in [*running, *self._queue] if state.age != NEVER_ADMITTED]
        for urgency in {state.urgency for state in admitted}:
            ages = [state.age for state in admitted if state.urgency == urgency]
            assert ages == sorted(ages), "a younger request goes before an older one"
        draining = [state for state in self._states.values() if state.phase is Phase.DRAINING]
        compiling = [state for state in self._states.values() if state.phase is Phase.COMPILING]
        assert len(compiling) == self._num_compiling
        everywhere = [*self._queue, *running, *draining, *compiling]
        assert sorted(map(id, everywhere)) == sorted(map(id, self._states.values()))
        for state in running:
            computed, total = int(self._rows.computed[state.slot]), self._num_coming(state)
            assert computed <= int(self._rows.room[state.slot])
            if state.phase is Phase.DECODE:
                assert total == computed + 1
            else:
                assert computed < total or not state.draws
        for state in [*self._queue, *draining]:
            assert state.pages is None
            assert state.slot == NO_SLOT
            assert len(state.tokens) <= state.limit
        if self._states and not self.awaits_steps:
            assert not draining
