"""The one loop: drain the inbox, schedule a step, launch it, take in the oldest result.

Runs the same in a thread or in a process (`launch.py`); only this thread touches scheduler and runner.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import queue
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tokenmill.config import MOST_STEPS_IN_FLIGHT, EngineConfig
from tokenmill.core.control import Control
from tokenmill.core.deadlines import Clock, Deadlines, timed_out
from tokenmill.core.device_watch import DeviceWatch, StepClock
from tokenmill.core.grammars import Grammars, Guide, build_grammars
from tokenmill.core.plan import SchedulerLimits
from tokenmill.core.policy import choose_policy, create_policy
from tokenmill.core.priority import Priorities
from tokenmill.core.request import RequestState
from tokenmill.core.scheduler import Scheduler
from tokenmill.core.watchdog import Pulse
from tokenmill.errors import InvalidArgument, told
from tokenmill.kvcache.cache import Cache
from tokenmill.messages import (
    CANCELLED,
    EngineFacts,
    Finish,
    Grammar,
    Lane,
    Output,
    Request,
    Runner,
    Sink,
    StepPlan,
)

# Nothing to do for so long is rest.
_SECONDS_AWAKE = 0.05
# Of what a preparation takes, the part that is rehearsed.
_REHEARSED_SHARE = 0.25
# Of a step with many prompts, the part in which later ones are prepared, if so many are going to decode.
_SHARE_OF_STEP, _FEWEST_STEPS = 0.5, 16
# Results to take in for each step, while more are in flight than usual: that takes less than a step.
_MOST_RESULTS = 3
# Steps with prompts in a lane of their own: when one ends, another is there.
_PROMPTS_IN_FLIGHT = 2
# What it takes to plan and launch one of them, until it is known, and at most: longer, it was captured.
_PLANNING_SECONDS, _MOST_PLANNING_SECONDS = 0.004, 0.02


@dataclass(frozen=True, slots=True)
class Submit:
    """Requests to complete."""

    requests: Sequence[Request]


@dataclass(frozen=True, slots=True)
class Cancel:
    """Requests to abort."""

    request_ids: Sequence[str]


@dataclass(frozen=True, slots=True)
class Call:
    """A question to the core; `reply` gets (value, None) or (None, error) on the loop's thread."""

    name: str
    arguments: dict[str, Any]
    reply: Callable[[Any, Exception | None], None]


@dataclass(frozen=True, slots=True)
class Close:
    """End the loop."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """The grammars of requests are there, or why there are none."""

    outcomes: Sequence[tuple[str, Guide | Finish]]  # each with the request's id


Message = Submit | Cancel | Call | Close | Compiled
Inbox = queue.SimpleQueue[Message]


class Loop:
    """Turns messages into steps and steps into Outputs until a `Close` comes or an error ends it."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        cache: Cache,
        *,
        grammars: Grammars,
        inbox: Inbox,
        deliver: Sink,
        rest: Callable[[], None] | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """`rest` is called when there has been nothing to do for a moment."""
        self._runner = runner
        self._rest = rest
        self._scheduler = scheduler
        self._grammars = grammars
        self._inbox = inbox
        self._deliver = deliver
        self._watch = DeviceWatch()
        self.pulse = Pulse()
        self._control = Control(
            runner,
            scheduler,
            cache,
            grammars,
            watch=self._watch,
            pulse=self.pulse,
            deliver=deliver,
            num_held=lambda: len(self._held_ids),
            abort_held=self._abort_held,
        )
        # Calls that wait until the requests before them are done, and all that came after the first of them.
        self._held: deque[Message] = deque()
        self._clock = clock
        self._deadlines = Deadlines(clock)
        self._step_clock = StepClock(clock)
        self._planning_seconds = _PLANNING_SECONDS  # of the last step with prompts in a lane of their own
        self._expected: list[Request] = []  # wait for grammars; the runner is to get ready for them
        self._closing = False

    @property
    def num_requests(self) -> int:
        """Requests that wait or run. May be asked by any thread."""
        return self._scheduler.num_waiting + self._scheduler.num_running

    @property
    def facts(self) -> EngineFacts:
        return self._runner.facts

    def run(self) -> None:
        """Returns after `Close`; requests that are still alive then are reported as aborted."""
        self.pulse.is_resting = False
        while not self._closing:
            self._drain()
            if self._deadlines:
                self._time_out(self._deadlines.pop_due())
            can_run = not (self._scheduler.is_asleep or self._control.stands_still)
            self._watch.note(has_steps=self._scheduler.awaits_steps, has_requests=can_run)
            if can_run:
                self._turn()
        self.pulse.is_resting = True
        self._send(self._scheduler.abort_all("the engine was shut down"))
        self._grammars.close()

    def _turn(self) -> None:
        """One step: launch one more if there is room for it, then take in the oldest if it must or can be."""
        scheduler, depth = self._scheduler, self._runner.facts.steps_in_flight
        if self._runner.facts.has_lanes:
            self._launch_prompts()
        if self._runner.preparation_seconds and not scheduler.num_prompts_in_flight:
            self._prepare()
        # What was launched ahead may be done by now, and the device idle until all of it is taken in.
        most = depth if scheduler.num_in_flight <= depth else MOST_STEPS_IN_FLIGHT
        plan = scheduler.plan_step() if scheduler.num_in_flight < most else None
        if plan is not None:
            self._runner.launch(plan)
            self._watch.note(has_steps=True, has_requests=True)
            if scheduler.num_in_flight >= min(depth, 2):  # the device has work meanwhile
                self._get_ready()
            if scheduler.waits_for_tokens:
                scheduler.settle()
                self._draw_late()
            else:
                self._runner.sample(None)
                scheduler.settle()
            self._prepare_beside(plan)
        if scheduler.num_in_flight >= depth or plan is None:
            assert scheduler.awaits_steps, "requests wait, yet nothing can be scheduled"
            if scheduler.num_in_flight:
                for _ in range(max(1, min(_MOST_RESULTS, scheduler.num_in_flight - depth + 1))):
                    self._collect()
            else:
                self._collect(Lane.PROMPTS)
        while scheduler.may_take_in_prompts and self._runner.has_prompts():
            self._collect(Lane.PROMPTS)
        self._control.stepped()

    def _prepare_beside(self, plan: StepPlan) -> None:
        """Where the step just launched computes many prompts, which takes the device longer than the host,
        and another one runs, let the runner prepare what the job is going to need, for a part of the time of
        such a step."""
        facts, scheduler = self._runner.facts, self._scheduler
        if 2 * len(plan.token_ids) < facts.max_step_tokens or not scheduler.may_decode(_FEWEST_STEPS):
            return
        if not scheduler.num_in_flight >= facts.steps_in_flight > 1:
            return
        began, most = self._clock(), _SHARE_OF_STEP * self._step_clock.seconds
        for count in itertools.count(1):
            if not self._runner.prepare_more(self.num_requests):
                return
            if (count + 1) / count * (self._clock() - began) > most:  # one more would take too long
                return

    def _launch_prompts(self) -> None:
        """Launch prompts beside the rows that decode, where that pays; these have steps to run meanwhile."""
        scheduler, runner = self._scheduler, self._runner
        while (
            scheduler.num_prompts_in_flight < _PROMPTS_IN_FLIGHT
            and scheduler.prompts_pay_apart
            and runner.part(self.num_requests)
        ):
            if scheduler.num_prompts_in_flight:  # else they would take the prompts with them
                self._launch_ahead(self._clock(), self._planning_seconds)
            began = self._clock()
            plan = scheduler.plan_prompts()
            if plan is None:
                return
            runner.launch(plan)
            runner.sample(None)
            self._planning_seconds = min(self._clock() - began, _MOST_PLANNING_SECONDS)
            self._watch.note(has_steps=True, has_requests=True)

    def _prepare(self) -> None:
        """Let the runner prepare what it wants to; the device has steps to run for as long as that takes.

        Rows that wait for their tokens forbid that, and the preparation has to wait for another moment. At
        the end of a job there are no such steps any more, and next to nothing to gain.
        """
        scheduler, runner = self._scheduler, self._runner
        if scheduler.has_late_rows:
            return
        if runner.facts.steps_in_flight > 1:
            began, seconds = self._clock(), runner.preparation_seconds
            if not scheduler.may_go_on(math.ceil(seconds / self._step_clock.seconds)):
                runner.put_off()
                return
            self._launch_ahead(began, _REHEARSED_SHARE * seconds)
            runner.rehearse()
            self._launch_ahead(began, seconds)
        self._watch.note(has_steps=scheduler.num_in_flight > 0, has_requests=True)
        runner.prepare()

    def _launch_ahead(self, began: float, seconds: float) -> None:
        """Launch steps until the device has to compute for so long yet, and the usual ones to spare. It has
        computed since it `began` with the first of them."""
        scheduler = self._scheduler
        while scheduler.num_in_flight < MOST_STEPS_IN_FLIGHT:
            num_ahead = scheduler.num_in_flight - self._runner.facts.steps_in_flight
            if num_ahead * self._step_clock.seconds >= self._clock() - began + seconds:
                return
            plan = scheduler.plan_step()
            if plan is None:
                return
            self._runner.launch(plan)
            self._runner.sample(None)
            scheduler.settle()

    def _draw_late(self) -> None:
        """Draw the newest step, whose rows need all tokens before. Ends requests that are left no token."""
        scheduler = self._scheduler
        while scheduler.num_in_flight > 1 and scheduler.waits_for_tokens:
            self._collect()  # the forward pass runs meanwhile
        guided = scheduler.guided() if scheduler.waits_for_tokens else []
        self._runner.sample(self._grammars.masks(guided) if guided else None)
        if any([guide.finish is not None for _, guide in guided]):
            self._send(scheduler.end_stuck())

    def _collect(self, lane: Lane = Lane.WHOLE) -> None:
        """Take in the oldest step of a lane."""
        self.pulse.awaits_step = True
        try:
            result = self._runner.collect(lane)
        finally:
            self.pulse.awaits_step = False
        self.pulse.num_steps += 1
        scheduler = self._scheduler
        if lane is Lane.WHOLE:
            is_steady = scheduler.num_in_flight == self._runner.facts.steps_in_flight
            self._step_clock.collected(is_steady=is_steady)
        num_in_flight = scheduler.num_in_flight + scheduler.num_prompts_in_flight
        self._watch.note(has_steps=num_in_flight > 1, has_requests=True)
        outputs = scheduler.take_in(result, lane)
        self._watch.note(has_steps=scheduler.awaits_steps, has_requests=not scheduler.is_asleep)
        self._send(outputs)

    def _drain(self) -> None:
        """Handle every waiting message; with nothing to do, sleep until one comes or a deadline is there."""
        self._let_go()
        if (self._scheduler.is_asleep or self._control.stands_still) and not self._closing:
            with contextlib.suppress(queue.Empty):
                self._receive(self._sleep())
        while not self._closing:
            try:
                message = self._inbox.get_nowait()
            except queue.Empty:
                return
            self._receive(message)

    def _sleep(self) -> Message:
        """The next message; raises `queue.Empty` when a deadline is there before it."""
        with self.pulse.resting():
            left = self._deadlines.seconds_left()
            if left is None or left > _SECONDS_AWAKE:
                with contextlib.suppress(queue.Empty):
                    return self._inbox.get(timeout=_SECONDS_AWAKE)
                self._get_ready()  # their grammars take long
                if self._rest is not None:
                    self._rest()
            return self._inbox.get(timeout=self._deadlines.seconds_left())

    def _receive(self, message: Message) -> None:
        """Handle a message that has just come."""
        if isinstance(message, Submit):
            self._deadlines.add(message.requests)  # time runs also for requests that are held back
        self._handle(message)

    def _handle(self, message: Message) -> None:
        match message:
            case Submit() | Call() if self._must_wait(message):
                self._held.append(message)
            case Submit(requests):
                self._send(self._scheduler.submit(requests))
                self._compile(requests)
            case Compiled(outcomes):
                for request_id, outcome in outcomes:
                    self._send(self._scheduler.compiled(request_id, outcome))
            case Cancel(request_ids):
                self._send(self._scheduler.cancel(request_ids))
                self._end_held(request_ids, lambda _: Finish("abort", message=CANCELLED))
            case Call():
                with self.pulse.resting():
                    self._answer(message)
            case Close():
                self._closing = True

    def _compile(self, requests: Sequence[Request]) -> None:
        """Have grammars compiled; the outcomes come as messages, one for those that share a grammar."""
        asked: dict[Grammar, list[Request]] = {}
        for request in requests:
            if request.grammar is not None:
                asked.setdefault(request.grammar, []).append(request)
        for grammar, sharing in asked.items():
            self._grammars.compile(grammar, sharing, self._report_compiled)
        if asked and self._scheduler.is_asleep:
            self._expected += [request for sharing in asked.values() for request in sharing]

    def _get_ready(self) -> None:
        """Let the runner prepare the steps of rows under grammars, once some are to be expected."""
        expected, self._expected = self._expected, []
        if expected and self._scheduler.has_late_rows:
            self._runner.call("expect_masks", requests=expected)

    def _report_compiled(self, outcomes: Sequence[tuple[str, Guide | Finish]]) -> None:
        self._inbox.put(Compiled(outcomes))

    def _must_wait(self, message: Message) -> bool:
        """Whether a message comes later: new requests stay behind a call that waits for the old ones."""
        if isinstance(message, Call):
            return self._control.must_wait(message.name)
        return bool(self._held)

    def _let_go(self) -> None:
        """Handle what was held back, once the call in front need not wait any longer."""
        if self._held and not self._must_wait(self._held[0]):
            held, self._held = self._held, deque()
            for message in held:
                self._handle(message)

    def _time_out(self, request_ids: Sequence[str]) -> None:
        self._send(self._scheduler.time_out(request_ids))
        self._end_held(request_ids, timed_out)

    def _end_held(self, request_ids: Sequence[str], finish: Callable[[Request], Finish]) -> None:
        """End requests that are held back; the call in front may wait for long yet."""
        if not (self._held and request_ids):
            return
        ids = frozenset(request_ids)
        held, self._held = self._held, deque()
        for message in held:
            if isinstance(message, Submit):
                ending = [request for request in message.requests if request.id in ids]
                self._send([RequestState(each).report(finish(each)) for each in ending])
                message = Submit([request for request in message.requests if request.id not in ids])
            self._held.append(message)

    @property
    def _held_ids(self) -> list[str]:
        return [request.id for held in self._held if isinstance(held, Submit) for request in held.requests]

    def _abort_held(self, message: str) -> None:
        self._end_held(self._held_ids, lambda _: Finish("abort", message=message))

    def _answer(self, call: Call) -> None:
        """Errors of a call go to the caller; the loop lives on."""
        try:
            value = self._control.answer(call.name, call.arguments)
        except Exception as error:
            call.reply(None, error)
        except BaseException as error:  # of an object that the caller gave
            call.reply(None, InvalidArgument(f"{call.name} failed: {told(error)}"))
        else:
            call.reply(value, None)

    def _send(self, outputs: Sequence[Output]) -> None:
        if outputs:
            self._deliver(outputs)


def build_loop(
    mill: Runner,
    config: EngineConfig,
    *,
    inbox: Inbox,
    deliver: Sink,
    rest: Callable[[], None] | None = None,
) -> Loop:
    """Books and scheduler for a runner, sized by its facts."""
    facts = mill.facts
    cache = Cache(
        num_pages=facts.max_total_num_tokens // facts.page_size,
        page_size=facts.page_size,
        prefix_caching=not config.disable_radix_cache,
    )
    limits = SchedulerLimits(
        max_rows=facts.max_running_requests,
        max_step_tokens=facts.max_step_tokens,
        max_sequence_tokens=facts.max_sequence_tokens,
        max_queued=config.max_queued_requests,
    )
    priorities, policy = Priorities.of(config), config.schedule_policy
    scheduler = Scheduler(
        limits,
        cache=cache,
        policy=create_policy(policy, cache)
        if policy
        else choose_policy(cache, max_rows=limits.max_rows, has_priorities=priorities.enabled),
        priorities=priorities,
    )
    grammars = build_grammars(config, facts)
    return Loop(mill, scheduler, cache, grammars=grammars, inbox=inbox, deliver=deliver, rest=rest)
