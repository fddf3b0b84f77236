"""A core in a process that outlives its process: one that dies is replaced, and its requests are replayed.

Owns what a new process must be told to stand where the dead one stood. Which requests it gets, and when, is
`replay.py`'s matter.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tokenmill.config import EngineConfig
from tokenmill.core.control import WAITING_CALLS
from tokenmill.core.process import CoreLost, CoreProcess
from tokenmill.core.replay import Replay
from tokenmill.errors import EngineClosed, EngineDead, WrongState, engine_dead, told
from tokenmill.messages import AnswerSink, DeathSink, EngineFacts, Need, Output, Request, Sink

_log = logging.getLogger("tokenmill")

# Processes in a row that may end without a request to blame, and without having done anything, before the
# engine gives up: of those that say why, and of those that were killed. The latter may be bad luck, or a
# machine short of memory for a while, so that time must have passed, too.
_MOST_FAILED = 3
_MOST_KILLED = 10
_SECONDS_OF_KILLS = 600.0
# Processes that may die while they answer one call.
_MOST_CALLS = 3
# Longest that the end of the engine waits for somebody who writes to a process that does not read.
_SECONDS_FOR_WRITERS = 5.0


@dataclass
class _Standing:
    """What calls changed in the core, as far as a new one must be told."""

    is_paused: bool = False
    released: set[str] = field(default_factory=set)
    disk_update: dict[str, Any] | None = None  # arguments of the last update from disk
    has_foreign_tensors: bool = False  # weights that came from the caller's memory

    def note(self, name: str, arguments: dict[str, Any], answer: Any) -> None:
        """A call was answered."""
        match name:
            case "pause_generation" | "continue_generation":
                self.is_paused = name == "pause_generation"
            case "release_memory_occupation":
                self.released |= set(arguments["tags"])
            case "resume_memory_occupation":
                self.released -= set(arguments["tags"])
            case "update_weights_from_disk" if answer[0]:
                self.disk_update, self.has_foreign_tensors = arguments, False
            case "update_weights_from_tensor" if answer[0]:
                self.has_foreign_tensors = True

    def restore(self, core: CoreProcess) -> None:
        """Bring a new core there. Raises `EngineDead` if it cannot be brought there."""
        if self.disk_update is not None:
            success, message, _ = core.call("update_weights_from_disk", **self.disk_update)
            if not success:
                raise EngineDead(f"the weights cannot be loaded again: {message}")
        if self.is_paused:
            core.call("pause_generation", mode="in_place")
        if self.released:
            core.call("release_memory_occupation", tags=tuple(self.released))


class LastingCore:
    """The core behind a socket, through the deaths of its processes. For any thread."""

    def __init__(self, config: EngineConfig, *, deliver: Sink, died: DeathSink) -> None:
        """Load the model in a process; returns when requests can be submitted."""
        self._deliver_on = deliver
        self._died = died
        self._replay = Replay()
        self._standing = _Standing()
        # Reentrant: the garbage collector may cancel or close while this thread holds it.
        self._state = threading.Condition(threading.RLock())
        self._ended: BaseException | None = None  # why nothing is taken any more
        self._num_fruitless = 0  # deaths in a row without anything gained, and without a request to blame
        self._fruitless_since = 0.0  # when the first of them was
        self._restarter: threading.Thread | None = None
        self._core: CoreProcess | None = None  # the one that takes requests; None while it is replaced
        self.facts: EngineFacts = self._start_first(config)
        # What was measured stays: rows that were accepted must fit into the next one, too.
        self._config = replace(
            config,
            max_total_tokens=self.facts.max_total_num_tokens,
            max_running_requests=self.facts.max_running_requests,
        )
        if not self._install(self._newest):
            raise EngineDead("the core's process ended right after its start")

    # ── from the frontend ─────────────────────────────────────────────────────────────────────

    @property
    def need(self) -> Need:
        """See `Core`: it has an interpreter of its own."""
        return "none"

    def submit(self, requests: Sequence[Request]) -> None:
        """Hand over validated requests; while the process is replaced they wait.

        Raises `EngineDead` or `EngineClosed` once the engine has ended.
        """
        with self._state:
            self._raise_if_ended()
            self._replay.add(requests)
            self._send_next()

    def cancel(self, request_ids: Sequence[str]) -> None:
        """Abort requests; their last Output says so. Unknown and finished ids are ignored."""
        with self._state:
            self._raise_if_ended()
            ended = self._replay.cancel(request_ids)
            if self._core is not None:
                self._try(self._core.cancel, request_ids)
        if ended:
            self._deliver_on(ended)

    def call(self, name: str, *, answered: AnswerSink | None = None, **arguments: Any) -> Any:
        """Ask the core between two steps and wait for the answer; its errors are raised here.

        A call whose core dies is put to the next one; only `stop_profile` is a `WrongState` then, because
        the trace is gone.
        """
        with self._ordered(name):
            return self._call(name, answered, arguments)

    def _call(self, name: str, answered: AnswerSink | None, arguments: dict[str, Any]) -> Any:
        for _ in range(_MOST_CALLS):
            core = self._living_core()
            try:
                answer = core.call(name, answered=answered, **arguments)
            except CoreLost:
                self._wait_for_loss(core)
                if name == "stop_profile":
                    raise WrongState("the core's process died, and the profile is lost with it") from None
                continue
            with self._state:
                # Else the next core was started without what this call did.
                if self._core is core:
                    self._standing.note(name, arguments, answer)
                    self._num_fruitless = 0
                    return answer
        raise WrongState(f"the core's process died {_MOST_CALLS} times while it answered {name}")

    @contextlib.contextmanager
    def _ordered(self, name: str) -> Iterator[None]:
        """A call; requests that come after one that they wait for stay behind it, whoever answers it."""
        if name not in WAITING_CALLS:
            yield
            return
        with self._state:
            number = self._replay.begin_call()
        try:
            yield
        finally:
            with self._state:
                self._replay.end_call(number)
                self._send_next()

    def close(self) -> None:
        """Abort what is left and end the process. Idempotent."""
        if not self._state.acquire(timeout=_SECONDS_FOR_WRITERS):
            self._newest.kill()
            self._state.acquire()
        try:
            is_starting = self._core is None
            self._ended = self._ended or EngineClosed("the engine was shut down")
            self._state.notify_all()
        finally:
            self._state.release()
        if is_starting:
            self._newest.kill()
        self._newest.close()
        if self._restarter not in (None, threading.current_thread()):
            self._restarter.join()

    def _raise_if_ended(self) -> None:
        if isinstance(self._ended, EngineClosed):
            raise EngineClosed("the engine was shut down; make a new one")
        if self._ended is not None:
            raise engine_dead(self._ended)

    def _living_core(self) -> CoreProcess:
        with self._state:
            while self._core is None and self._ended is None:
                self._state.wait()
            self._raise_if_ended()
            assert self._core is not None
            return self._core

    def _wait_for_loss(self, core: CoreProcess) -> None:
        """Until the death of a core is known here, too."""
        with self._state:
            while self._core is core and self._ended is None:
                self._state.wait()

    def _send_next(self) -> None:
        if self._core is None:
            self._replay.hold()
        elif requests := self._replay.next():
            self._try(self._core.submit, requests)

    def _try(self, send: Callable[[Any], None], value: Any) -> None:
        """Send something to the core; whether it dies of it or before it, its death will be told."""
        with contextlib.suppress(CoreLost, EngineClosed):
            send(value)

    # ── from the processes ────────────────────────────────────────────────────────────────────

    def _start_first(self, config: EngineConfig) -> EngineFacts:
        """Start a process; one that is killed meanwhile is started again, but not for ever.

        Raises what the loading raises, and `CoreLost`.
        """
        for number in range(1, _MOST_FAILED + 1):
            self._newest = self._open_process()
            try:
                return self._newest.start(config)
            except CoreLost as error:
                if not self._newest.was_killed or number == _MOST_FAILED:
                    raise
                _log.warning("%s; another takes its place", error)
        raise AssertionError("the last one returns or raises")

    def _open_process(self) -> CoreProcess:
        process = CoreProcess(deliver=self._deliver, died=lambda error: self._lost(process, error))
        return process

    def _deliver(self, outputs: Sequence[Output]) -> None:
        with self._state:
            self._num_fruitless = 0
            heard = self._replay.take(outputs)
            if self._replay.num_waiting:
                self._send_next()
        self._deliver_on(heard)

    def _lost(self, process: CoreProcess, error: BaseException) -> None:
        """A process has ended; its thread, which calls this, sees to the next one."""
        with self._state:
            if self._ended is not None or self._core is not process:
                return  # shut down, or not in place yet: then who starts it sees it
            self._core = None
            stood_still = self._standing.is_paused or bool(self._standing.released)
            if stood_still or not self._replay.num_sent:
                self._note_fruitless()
            was_killed = isinstance(error, CoreLost) and process.was_killed
            ended = self._replay.died(blames=not stood_still, was_killed=was_killed)
            self._restarter = threading.current_thread()
            self._state.notify_all()
        _log.log(
            # A kill comes from outside; what the core says itself is a fault in it.
            logging.WARNING if isinstance(error, CoreLost) else logging.ERROR,
            "%s; another takes its place and replays %d requests, %d of them behind delivered tokens",
            _told_of_death(error),
            self._replay.num_waiting,
            self._replay.num_resumed,
        )
        if ended:
            self._deliver_on(ended)
        self._replace(error)

    def _replace(self, error: BaseException) -> None:
        """Start processes until one stands, or too many failed."""
        while not self._gives_up(error):
            with self._state:
                if self._ended is not None:
                    return
                process = self._newest = self._open_process()
            try:
                process.start(self._config)
                self._standing.restore(process)
                if self._install(process):
                    _log.warning("the core's new process works")
                    return
                error = CoreLost("the core's process ended right after its start")
            except Exception as failure:
                error = failure
            process.close()
            self._note_fruitless()
            if self._ended is None:
                _log.warning("the core's new process failed: %s", _told_of_death(error))

    def _install(self, process: CoreProcess) -> bool:
        """Let a process have the requests; False if it, or the engine, has ended."""
        with self._state:
            if self._ended is not None or process.has_ended:
                return False
            self._core = process
            self._state.notify_all()
            self._send_next()
            return True

    def _note_fruitless(self) -> None:
        if not self._num_fruitless:
            self._fruitless_since = time.monotonic()
        self._num_fruitless += 1

    def _is_hopeless(self, *, was_killed: bool) -> bool:
        if not was_killed:
            return self._num_fruitless >= _MOST_FAILED
        seconds = time.monotonic() - self._fruitless_since
        return self._num_fruitless >= _MOST_KILLED and seconds >= _SECONDS_OF_KILLS

    def _gives_up(self, error: BaseException) -> bool:
        """End the engine if there is no use in another process."""
        if self._standing.has_foreign_tensors:
            reason = (
                "the weights given to update_weights_from_tensor are lost with it, and no other process can "
                "get them again"
            )
        elif self._is_hopeless(was_killed=isinstance(error, CoreLost)):
            reason = f"{self._num_fruitless} processes in a row did nothing"
        else:
            return False
        dead = EngineDead(f"the core's process died ({_told_of_death(error)}), and {reason}")
        dead.__cause__ = error
        with self._state:
            if self._ended is not None:
                return True
            self._ended = dead
            self._state.notify_all()
        _log.error("%s", dead)
        self._died(dead)
        return True


def _told_of_death(error: BaseException) -> str:
    return str(error) if isinstance(error, EngineDead) else told(error)
