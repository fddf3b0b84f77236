"""Starts the core in a thread or in a process of its own: the same loop behind the same door."""

from __future__ import annotations

import atexit
import logging
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from tokenmill import runner
from tokenmill.config import EngineConfig
from tokenmill.core.forks import OwnCore
from tokenmill.core.loop import Call, Cancel, Close, Inbox, Submit, build_loop
from tokenmill.core.restart import LastingCore
from tokenmill.core.watchdog import Pulse, Watchdog
from tokenmill.errors import EngineClosed, EngineDead, WrongState, engine_dead
from tokenmill.grammar.backends import check_backend
from tokenmill.messages import AnswerSink, Core, DeathSink, EngineFacts, Need, Request, Runner, Sink

_log = logging.getLogger("tokenmill")
_SECONDS_TO_COME_BACK = 5.0  # for a step that takes too long, when Python ends


def start_core(config: EngineConfig, *, deliver: Sink, died: DeathSink) -> Core:
    """Load the model and start the loop; returns when requests can be submitted.

    `deliver` gets the Outputs of a step, `died` the error that ended the loop, each from a core thread.
    Raises `InvalidArgument` for a grammar backend that is not there, before any loading.
    """
    check_backend(config)
    if config.core_process:
        return OwnCore(LastingCore(config, deliver=deliver, died=died))
    return OwnCore(CoreThread(partial(runner.start, config), config, deliver=deliver, died=died))


class CoreThread:
    """The core in a daemon thread. Every method may be called from any thread."""

    def __init__(
        self, open_mill: Callable[[], Runner], config: EngineConfig, *, deliver: Sink, died: DeathSink
    ) -> None:
        """Open the mill in the new thread, and wait until it is there; raises what that raises.

        torch keeps a pool of workers for each thread that ever computed. With all work in one thread there
        is one pool, no larger than the machine; with two, their workers would go to sleep between kernels.
        """
        self._died = died
        self._inbox: Inbox = Inbox()
        self._state = threading.Condition()
        self._ended: BaseException | None = None  # why no more messages are taken
        self._calls: set[Future[Any]] = set()
        self._has_stalled = False
        self._pulse = Pulse()
        self._feeds_device = False
        self._left = threading.Event()  # the thread has ended, or it stalled and nobody waits for it
        started: Future[EngineFacts] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(open_mill, config, deliver, started), name="tokenmill-core", daemon=True
        )
        self._thread.start()
        try:
            self.facts: EngineFacts = started.result()
        except BaseException:  # also Ctrl-C: then the thread ends as soon as it has loaded
            self._inbox.put(Close())
            raise

    @property
    def need(self) -> Need:
        """See `Core`. On a CPU a step computes inside of its launch, and no device waits."""
        pulse = self._pulse
        if pulse.is_resting:
            return "none"
        return "now" if self._feeds_device and not pulse.awaits_step else "soon"

    def submit(self, requests: Sequence[Request]) -> None:
        """Hand over validated requests; raises `EngineDead` or `EngineClosed` once the loop has ended."""
        self._raise_if_inside()
        if not self._feeds_device:
            runner.release_workers()  # those of the caller, who will wait
        self._put(Submit(requests))

    def cancel(self, request_ids: Sequence[str]) -> None:
        """Abort requests; their last Output says so. Unknown and finished ids are ignored."""
        self._put(Cancel(request_ids))

    def call(self, name: str, *, answered: AnswerSink | None = None, **arguments: Any) -> Any:
        """Ask the core between two steps and wait for the answer; its errors are raised here."""
        self._raise_if_inside()
        answer: Future[Any] = Future()

        def reply(value: Any, error: Exception | None) -> None:
            self._calls.discard(answer)
            if error is not None:
                answer.set_exception(error)
                return
            if answered is not None:
                answered(value)
            answer.set_result(value)

        with self._state:
            self._raise_if_ended()
            self._calls.add(answer)
            self._inbox.put(Call(name, arguments, reply))
        return answer.result()

    def close(self) -> None:
        """Abort what is left, end the thread, free the device memory. Idempotent."""
        with self._state:
            if self._ended is None:
                self._ended = EngineClosed("the engine was shut down")
                self._inbox.put(Close())
        if threading.current_thread() is not self._thread:
            self._left.wait()
            if not self._has_stalled:
                self._thread.join()

    def _put(self, message: Submit | Cancel) -> None:
        with self._state:
            self._raise_if_ended()
            self._inbox.put(message)

    def _raise_if_inside(self) -> None:
        """What runs inside a step would wait for that step to end."""
        if threading.current_thread() is self._thread:
            raise WrongState("the engine was called from inside a step, by a logit processor of its own")

    def _raise_if_ended(self) -> None:
        if isinstance(self._ended, EngineClosed):
            raise EngineClosed("the engine was shut down; make a new one")
        if self._ended is not None:
            raise engine_dead(self._ended)

    def _run(
        self,
        open_mill: Callable[[], Runner],
        config: EngineConfig,
        deliver: Sink,
        started: Future[EngineFacts],
    ) -> None:
        mill: Runner | None = None
        try:
            mill = open_mill()
            self._feeds_device = mill.facts.device != "cpu"
            rest = None if self._feeds_device else runner.release_workers
            loop = build_loop(mill, config, inbox=self._inbox, deliver=deliver, rest=rest)
            self._pulse = loop.pulse
        except BaseException as error:
            if mill is not None:
                _close(mill)
            _let_go(error)
            self._left.set()
            started.set_exception(error)
            return
        started.set_result(mill.facts)
        watchdog = Watchdog(loop, config.watchdog_timeout, stalled=self._give_up)
        try:
            loop.run()
        except BaseException as error:
            self._end(error)
        finally:
            watchdog.close()
            self._fail_calls()
            _close(mill)
            self._left.set()

    def _end(self, error: BaseException) -> None:
        with self._state:
            if self._has_stalled:  # and everybody has heard of it
                return
            self._ended = error
        self._died(error)

    def _give_up(self, error: EngineDead) -> None:
        """The loop hangs: tell everybody. Should it come back, it ends and frees its memory."""
        _log.error("%s", error)
        self._end(error)
        with self._state:
            self._has_stalled = True
            self._inbox.put(Close())
        # Where Python ends first, a thread that then comes out of torch would take the process down.
        atexit.register(self._thread.join, _SECONDS_TO_COME_BACK)
        self._fail_calls()
        self._left.set()

    def _fail_calls(self) -> None:
        with self._state:
            error = self._ended
            calls, self._calls = self._calls, set()
        for answer in calls:
            answer.set_exception(
                EngineClosed("the engine was shut down before it answered")
                if isinstance(error, EngineClosed)
                else EngineDead(f"the engine ended before it answered: {error!r}")
            )


def _close(mill: Runner) -> None:
    """Somebody waits for the thread to go on, and may be told of another error: this one is only logged."""
    try:
        mill.close()
    except BaseException:
        _log.exception("what the engine had loaded could not be freed")


def _let_go(error: BaseException) -> None:
    """Nothing that a failed start had loaded stays on the device for as long as somebody has its error."""
    cause: BaseException | None = error
    seen: set[int] = set()
    while cause is not None and id(cause) not in seen:  # an error may be its own cause
        seen.add(id(cause))
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__
