"""Calls that the core answers between two steps: cache, pauses, profiles, weights, memory, and questions.

Owns whether the engine stands still (paused, or without its memory) and which steps are traced. The loop asks
here; requests themselves are the scheduler's.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

from tokenmill.core.device_watch import DeviceWatch
from tokenmill.core.grammars import Grammars
from tokenmill.core.scheduler import Scheduler
from tokenmill.core.watchdog import Pulse
from tokenmill.errors import InvalidArgument, WrongState, told
from tokenmill.kvcache.cache import Cache
from tokenmill.messages import Lane, Output, Runner, Sink

_log = logging.getLogger("tokenmill")

PauseMode = Literal["abort", "retract", "in_place"]

# Calls that wait until every request before them has finished.
WAITING_CALLS = {"update_weights_from_disk", "update_weights_from_tensor"}
# Steps over which throughput is measured.
_STEPS_BETWEEN_LOOKS = 40
# Of the loop's work that a trace holds when nobody said how many steps. One second is half a million events:
# 0.2 GB of text, and 1 GB of memory to write it. Perfetto in a browser has some 2 GB of memory for a trace.
_MOST_TRACED_SECONDS = 3.0


class Control:
    """Answers calls for one loop, on its thread. No call may come while the loop is inside a step."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        cache: Cache,
        grammars: Grammars,
        *,
        watch: DeviceWatch,
        pulse: Pulse,
        deliver: Sink,
        num_held: Callable[[], int],
        abort_held: Callable[[str], None],
    ) -> None:
        """Of requests that wait behind a call the scheduler does not know: `num_held` tells how many they
        are, `abort_held` ends them with a message."""
        self._num_held = num_held
        self._abort_held = abort_held
        self._runner = runner
        self._scheduler = scheduler
        self._cache = cache
        self._grammars = grammars
        self._watch = watch
        self._deliver = deliver
        self._paused = False
        self._released: set[str] = set()
        self._steps = _StepWatch(scheduler)
        self._profile = _ProfileWindow(runner, pulse)
        self._calls: dict[str, Callable[..., Any]] = {
            "flush_cache": self._flush_cache,
            "load": self._load,
            "state": self._state,
            "process_id": os.getpid,
            "memory": lambda: runner.call("memory"),
            "check": scheduler.check_invariants,
            "device_seconds": self._device_seconds,
            "freeze_gc": _freeze_gc,
            "pause_generation": self._pause,
            "continue_generation": self._continue,
            "start_profile": self._start_profile,
            "stop_profile": self._profile.stop,
            "update_weights_from_disk": self._update_from_disk,
            "update_weights_from_tensor": self._update_from_tensor,
            "get_weights_by_name": self._get_weights,
            "release_memory_occupation": self._release,
            "resume_memory_occupation": self._resume,
        }

    @property
    def stands_still(self) -> bool:
        """Whether no step may run."""
        return self._paused or bool(self._released)

    def must_wait(self, name: str) -> bool:
        """Whether the call has to wait for requests to finish before it is answered."""
        return name in WAITING_CALLS and not (self._scheduler.idle or self.stands_still)

    def answer(self, name: str, arguments: dict[str, Any]) -> Any:
        """What the call returns; raises what it raises."""
        if name not in self._calls:
            raise InvalidArgument(f"the core has no call {name!r}")
        return self._calls[name](**arguments)

    def stepped(self) -> None:
        """The loop turned once."""
        self._steps.stepped()
        self._profile.advance(self._steps.count)

    # ── cache and questions ───────────────────────────────────────────────────────────────────

    def _flush_cache(self) -> tuple[bool, str]:
        self._end_idle_steps()
        if not self._scheduler.idle:
            busy = sum(self._load().values())
            return False, f"the cache cannot be flushed while {busy} requests are waiting or running"
        self._cache.flush()
        self._grammars.forget_failures()
        return True, "the prefix cache is empty"

    def _load(self) -> dict[str, int]:
        waiting = self._scheduler.num_waiting + self._num_held()
        return {"running": self._scheduler.num_running, "waiting": waiting}

    def _state(self) -> dict[str, Any]:
        """Numbers that change while the engine works."""
        return {
            **self._load(),
            **self._runner.call("memory"),
            "last_gen_throughput": self._steps.tokens_per_second,
            "device_seconds": self._device_seconds(),
            "used_tokens": self._cache.num_used_pages * self._cache.page_size,
            "cached_tokens": self._cache.num_cached_pages * self._cache.page_size,
            "paused": self._paused,
            "released": sorted(self._released),
        }

    def _device_seconds(self) -> dict[str, float] | None:
        """How long the device was busy, and idle; None where nobody can tell."""
        # Where steps run inside of `launch`, nobody is left to tell when there is none.
        return self._watch.seconds() if self._runner.facts.device != "cpu" else None

    # ── pauses ────────────────────────────────────────────────────────────────────────────────

    def _pause(self, *, mode: PauseMode) -> None:
        if mode == "abort":
            message = "generation was paused"
            self._send(self._scheduler.abort_all(message))
            self._abort_held(message)
        self._collect_all()
        if mode == "retract":
            self._scheduler.retract_all()
        self._paused = True

    def _continue(self) -> None:
        self._paused = False

    def _end_idle_steps(self) -> None:
        """Take in steps that were launched before it was known that no request needs them.

        Whoever has all answers calls the engine idle, and knows of no such steps.
        """
        if not (self._scheduler.num_running or self._scheduler.num_waiting):
            self._collect_all()

    def _collect_all(self) -> None:
        scheduler = self._scheduler
        while scheduler.awaits_steps:
            lane = Lane.WHOLE if scheduler.num_in_flight else Lane.PROMPTS
            self._send(scheduler.take_in(self._runner.collect(lane), lane))

    def _send(self, outputs: Sequence[Output]) -> None:
        if outputs:
            self._deliver(outputs)

    # ── profiles ──────────────────────────────────────────────────────────────────────────────

    def _start_profile(self, *, start_step: int | None, num_steps: int | None, **options: Any) -> None:
        self._profile.start(options, now=self._steps.count, start_step=start_step, num_steps=num_steps)

    # ── weights ───────────────────────────────────────────────────────────────────────────────

    def _update_from_disk(self, *, model_path: str) -> tuple[bool, str, int]:
        num_paused = self._scheduler.num_running + self._scheduler.num_waiting
        success, message = self._update(
            "update_weights_from_disk", {"model_path": model_path}, flush_cache=True
        )
        return success, message, num_paused if success else 0

    def _update_from_tensor(
        self, *, named_tensors: Sequence[tuple[str, Any]], flush_cache: bool
    ) -> tuple[bool, str]:
        arguments = {"named_tensors": named_tensors}
        return self._update("update_weights_from_tensor", arguments, flush_cache=flush_cache)

    def _update(self, name: str, arguments: dict[str, Any], *, flush_cache: bool) -> tuple[bool, str]:
        """Whether the weights were replaced, and what there is to say about it."""
        if "weights" in self._released:
            return False, "the weights are released; call resume_memory_occupation(tags=['weights']) first"
        if flush_cache and self._scheduler.num_running:
            return False, (
                f"{self._scheduler.num_running} requests are paused in place, with keys and values of the "
                "old weights; pause with mode='retract' to compute them anew, or use flush_cache=False"
            )
        try:
            self._runner.call(name, **arguments)
        except InvalidArgument as error:
            return False, str(error)
        if flush_cache:
            self._cache.flush()
        return True, "the weights were updated"

    def _get_weights(self, *, tensor_name: str, truncate_size: int) -> list[Any] | None:
        if "weights" in self._released:
            raise WrongState("the weights are released; call resume_memory_occupation() first")
        values: list[Any] | None = self._runner.call(
            "get_weights_by_name", tensor_name=tensor_name, truncate_size=truncate_size
        )
        return values

    # ── memory ────────────────────────────────────────────────────────────────────────────────

    def _release(self, *, tags: Collection[str]) -> None:
        self._end_idle_steps()
        scheduler = self._scheduler
        if scheduler.num_running or scheduler.awaits_steps or (scheduler.num_waiting and not self._paused):
            busy = scheduler.num_running + scheduler.num_waiting
            raise WrongState(
                f"release_memory_occupation() needs an idle engine, but {busy} requests are waiting or "
                "running; wait for them, or call abort(abort_all=True) or pause_generation('retract') first"
            )
        new = set(tags) - self._released
        if "kv_cache" in new:
            self._cache.flush()
        self._runner.call("release_memory", tags=new)
        self._released |= new

    def _resume(self, *, tags: Collection[str]) -> None:
        """Take back one thing after the other, and graphs with the last: they hold addresses of the rest."""
        resumed = [tag for tag in tags if tag in self._released]
        for tag in resumed:
            self._runner.call("resume_memory", tag=tag)
            self._released.discard(tag)
        if resumed and not self._released:
            self._runner.call("open_graphs")


class _StepWatch:
    """Counts turns of the loop, and the tokens drawn in them."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.count = 0
        self.tokens_per_second = 0.0
        self._since: tuple[float, int] | None = None  # when the last look was, and the tokens until then

    def stepped(self) -> None:
        """One more turn; a look at the clock every so often, and when the work ends."""
        self.count += 1
        if self._since is None or self.count % _STEPS_BETWEEN_LOOKS == 0 or self._scheduler.idle:
            self._look()

    def _look(self) -> None:
        now, drawn = time.perf_counter(), self._scheduler.num_drawn
        if self._since is not None:
            seconds, before = now - self._since[0], self._since[1]
            self.tokens_per_second = (drawn - before) / seconds if seconds > 0 else 0.0
        # Time without work is not counted.
        self._since = None if self._scheduler.idle else (now, drawn)


class _ProfileWindow:
    """From which turn of the loop to which one the runner traces."""

    def __init__(self, runner: Runner, pulse: Pulse) -> None:
        self._runner = runner
        self._pulse = pulse
        # "full": written because it grew too large, and `stop` is still to come
        self._phase: Literal["none", "waits", "runs", "full"] = "none"
        self._options: dict[str, Any] = {}
        self._first = 0
        self._end: int | None = None
        self._began = 0.0  # what the clock of this thread's work said then

    def start(
        self, options: dict[str, Any], *, now: int, start_step: int | None, num_steps: int | None
    ) -> None:
        """Trace from turn `start_step` (None: at once) on, for so many turns (None: until `stop`)."""
        if self._phase != "none":
            raise WrongState("a profile is running already; call stop_profile() first")
        self._options = options
        self._first = max(now, start_step or 0)
        self._end = None if num_steps is None else self._first + num_steps
        if start_step is None or start_step <= now:
            self._begin()
        else:
            self._phase = "waits"

    def stop(self) -> None:
        """End the trace and write it."""
        if self._phase == "none":
            raise WrongState("no profile is running; call start_profile() first")
        before, self._phase = self._phase, "none"
        if before == "runs":
            self._runner.call("stop_profile")

    def advance(self, now: int) -> None:
        """Begin and end as was asked for, or before a trace grows too large; one that fails harms nobody."""
        if self._phase == "waits" and now >= self._first:
            self._attempt(self._begin)
        if self._phase != "runs":
            return
        if self._end is not None and now >= self._end:
            self._attempt(self.stop)
        elif self._end is None and self._seconds_traced() > _MOST_TRACED_SECONDS:
            _log.error(  # which is seen by default: nobody asked for this
                "the profile ends here, after %d steps: writing a longer one takes gigabytes of memory, and "
                "few programs open it; give num_steps to start_profile() for as many steps as you want",
                now - self._first,
            )
            self._attempt(self._fill)

    def _begin(self) -> None:
        self._runner.call("start_profile", **self._options)
        self._phase = "runs"
        self._began = time.thread_time()

    def _fill(self) -> None:
        self.stop()
        self._phase = "full"

    def _seconds_traced(self) -> float:
        """Work of this thread in the trace; a record of memory alone keeps the newest, and never grows."""
        if self._options.get("activities") == ["MEM"]:
            return 0.0
        return time.thread_time() - self._began

    def _attempt(self, action: Callable[[], None]) -> None:
        """What may take long and may fail, between two steps."""
        try:
            with self._pulse.resting():
                action()
        except Exception as error:
            _log.error("the profile was given up: %s", told(error))
            self._phase = "none"


def _freeze_gc() -> None:
    """Keep the garbage collector from looking again at everything that is alive now."""
    gc.collect()
    gc.freeze()
