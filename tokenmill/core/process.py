"""The core in a process of its own: the same loop, its messages pickled over a socket pair.

The child is started from this module, never from the user's main script, so no `__main__` guard is needed.
It ends when the parent closes the socket, also when the parent dies, whatever it does then. That another
takes a dead one's place is the matter of `restart.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import fcntl
import gc
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from tokenmill import logs, runner
from tokenmill.config import EngineConfig
from tokenmill.core.loop import Call, Cancel, Close, Inbox, Loop, Submit, build_loop
from tokenmill.core.watchdog import Watchdog
from tokenmill.errors import EngineClosed, EngineDead, InvalidArgument, told
from tokenmill.messages import AnswerSink, DeathSink, EngineFacts, Finish, Output, Request, Sink
from tokenmill.own_processes import start_module

# How long a process that was told to end may take to do so by itself.
_SECONDS_TO_END = 10.0
_SECONDS_BETWEEN_LOOKS = 1.0


class CoreLost(EngineDead):
    """The core's process is gone, or cannot go on, and did not answer."""


# ── what crosses the socket ───────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Requests:
    ids: Sequence[str]
    requests: bytes  # pickled, so that those that cannot be read fail alone


@dataclass(frozen=True, slots=True)
class _Ask:
    number: int
    name: str
    arguments: bytes  # pickled: a connection would send tensors as handles, for which there is no server


@dataclass(frozen=True, slots=True)
class _Started:
    facts: EngineFacts


@dataclass(frozen=True, slots=True)
class _Outputs:
    outputs: Sequence[Output]


@dataclass(frozen=True, slots=True)
class _Answer:
    number: int
    value: Any
    error: BaseException | None


@dataclass(frozen=True, slots=True)
class _Died:
    error: BaseException


def _pickled(value: object) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise _cannot_cross(error) from error


def _cannot_cross(error: BaseException) -> InvalidArgument:
    return InvalidArgument(f"an argument cannot cross to the core's process: {told(error)}")


# ── the parent's side ─────────────────────────────────────────────────────────────────────────


class CoreProcess:
    """One process with a core, behind a socket. Every method may be called from any thread."""

    def __init__(self, *, deliver: Sink, died: DeathSink) -> None:
        """Start the process; it does nothing until `start`. The sinks are called by a thread of its own."""
        self._deliver = deliver
        self._died = died
        self._process, self._pipe, self._lifeline = _spawn()
        # Reentrant: the garbage collector may cancel or close while this thread holds it.
        self._state = threading.RLock()
        self._ended: BaseException | None = None  # why no more messages are taken
        self._calls: dict[int, tuple[Future[Any], AnswerSink | None]] = {}
        self._num_calls = 0
        self._reader: threading.Thread | None = None

    @property
    def was_killed(self) -> bool:
        """Whether it has ended by a signal that comes from outside, whoever sent it."""
        return self._process.returncode in (-signal.SIGKILL, -signal.SIGTERM)

    @property
    def has_ended(self) -> bool:
        """Whether it takes no more messages."""
        return self._ended is not None

    def start(self, config: EngineConfig) -> EngineFacts:
        """Load the model; returns when requests can be submitted. Raises what the loading raises."""
        try:
            self._pipe.send(_import_paths())
            # What only the frontend needs, of whatever classes its caller has.
            self._pipe.send(dataclasses.replace(config, preferred_sampling_params=None))
            answer = self._pipe.recv()
        except (EOFError, OSError):
            answer = _Died(CoreLost(f"the core's process {self._exit_status()} while it started"))
        except BaseException:  # Ctrl-C while the model loads
            self.kill()
            raise
        if isinstance(answer, _Died):
            self._exit_status()
            self._let_go()
            raise answer.error
        assert isinstance(answer, _Started)
        self._reader = threading.Thread(target=self._read, name="tokenmill-core-reader", daemon=True)
        self._reader.start()
        return answer.facts

    def submit(self, requests: Sequence[Request]) -> None:
        """Hand over validated requests; raises `CoreLost` once the process has ended."""
        self._send(_Requests([each.id for each in requests], _pickled(requests)))

    def cancel(self, request_ids: Sequence[str]) -> None:
        """Abort requests; their last Output says so. Unknown and finished ids are ignored."""
        self._send(Cancel(request_ids))

    def call(self, name: str, *, answered: AnswerSink | None = None, **arguments: Any) -> Any:
        """Ask the core between two steps and wait for the answer; its errors are raised here.

        Raises `CoreLost` if the process ends before it answers.
        """
        answer: Future[Any] = Future()
        pickled = _pickled(arguments)
        with self._state:
            self._raise_if_ended()
            self._num_calls += 1
            number = self._num_calls
            self._calls[number] = answer, answered
            self._send(_Ask(number, name, pickled))
        return answer.result()

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Abort what is left and end the process. Idempotent."""
        if not self._state.acquire(
            timeout=_SECONDS_TO_END
        ):  # somebody writes to a process that does not read
            self.kill()
            self._state.acquire()
        try:
            if self._ended is None:
                self._ended = EngineClosed("the engine was shut down")
                with contextlib.suppress(OSError):
                    self._pipe.send(Close())
        finally:
            self._state.release()
        try:
            self._process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self.kill()
        if self._reader is not None and threading.current_thread() is not self._reader:
            self._reader.join()

    def _send(self, message: _Requests | Cancel | _Ask) -> None:
        with self._state:
            self._raise_if_ended()
            try:
                self._pipe.send(message)
            except OSError as error:  # it died a moment ago; the reader tells everybody else
                raise CoreLost("the core's process has ended") from error

    def _raise_if_ended(self) -> None:
        if isinstance(self._ended, EngineClosed):
            raise EngineClosed("the engine was shut down; make a new one")
        if self._ended is not None:
            raise CoreLost("the core's process has ended") from self._ended

    def _read(self) -> None:
        """Hand what the child sends to the sinks until the socket closes."""
        death: BaseException | None = None
        while True:
            try:
                message = self._pipe.recv()
            except (EOFError, OSError):
                break
            match message:
                case _Outputs(outputs):
                    self._deliver(outputs)
                case _Answer():
                    self._answer(message)
                case _Died(error):
                    death = error
        self._end(death)

    def _answer(self, answer: _Answer) -> None:
        with self._state:
            waiting, answered = self._calls.pop(answer.number)
        if answer.error is not None:
            waiting.set_exception(answer.error)
            return
        if answered is not None:
            answered(answer.value)
        waiting.set_result(answer.value)

    def _end(self, death: BaseException | None) -> None:
        status = self._exit_status()
        with self._state:
            closed = isinstance(self._ended, EngineClosed)
            if self._ended is None:
                self._ended = death or CoreLost(f"the core's process {status}")
            calls, self._calls = self._calls, {}
            self._let_go()
        for waiting, _ in calls.values():
            waiting.set_exception(CoreLost(f"the engine ended before it answered: {self._ended!r}"))
        if not closed:
            self._died(self._ended)

    def _let_go(self) -> None:
        self._pipe.close()
        self._lifeline.close()

    def _exit_status(self) -> str:
        """How the process ended; one that let go of its socket and lives on is killed."""
        try:
            code = self._process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self.kill()
            code = self._process.returncode
        return f"was killed by signal {-code}" if code < 0 else f"ended with exit status {code}"


def _spawn() -> tuple[subprocess.Popen[bytes], Connection, Connection]:
    """The process, our end of its socket, and our end of its lifeline."""
    ours, theirs = socket.socketpair()
    their_lifeline, our_lifeline = multiprocessing.Pipe(duplex=False)
    passed = [theirs.fileno(), their_lifeline.fileno()]
    process = start_module("tokenmill.core.process", *map(str, (*passed, os.getpid())), passed=passed)
    theirs.close()
    their_lifeline.close()
    return process, Connection(ours.detach()), our_lifeline


def _import_paths() -> list[str]:
    """What the child imports modules from: the same places; at last the current folder, where that counts."""
    paths = [path for path in sys.path if isinstance(path, str)]
    with contextlib.suppress(FileNotFoundError):
        return [*filter(None, paths), *([os.getcwd()] if "" in paths else [])]
    return [*filter(None, paths)]


# ── the child's side ──────────────────────────────────────────────────────────────────────────


class _Child:
    """Serves one engine over the socket; `main` is the whole life of the process."""

    def __init__(self, pipe: Connection, parent_id: int) -> None:
        self._pipe = pipe
        self._parent_id = parent_id
        self._write = threading.Lock()
        self._inbox: Inbox = Inbox()

    def main(self) -> None:
        """Load, tell the facts, run the loop until the parent closes or goes away."""
        try:
            sys.path[:] = self._pipe.recv()  # the configuration may hold objects of any module
            config = self._pipe.recv()
        except (EOFError, OSError):
            return
        for work in (self._receive, self._watch_parent):
            threading.Thread(target=work, daemon=True).start()
        try:
            self._serve(config)
        except BaseException as error:
            self._end(error)

    def _serve(self, config: EngineConfig) -> None:
        logs.set_level(config.log_level)
        mill = runner.start(config)
        loop = build_loop(mill, config, inbox=self._inbox, deliver=lambda outputs: self._tell(loop, outputs))
        gc.freeze()  # what is there stays; looking through it would hold up a step for a quarter of a second
        self._send(_Started(mill.facts))
        watchdog = Watchdog(loop, config.watchdog_timeout, stalled=self._end)
        loop.run()
        watchdog.close()
        mill.close()

    def _tell(self, loop: Loop, outputs: Sequence[Output]) -> None:
        """A parent that does not read, because it is stopped, is no stall of ours."""
        with loop.pulse.resting():
            self._send(_Outputs(outputs))

    def _receive(self) -> None:
        while True:
            try:
                message = self._pipe.recv()
            except (EOFError, OSError):
                os._exit(0)  # the parent is gone: nobody waits for anything any more
            match message:
                case _Requests():
                    message = self._requests(message)
                case _Ask():
                    message = self._call(message)
            if message is not None:
                self._inbox.put(message)

    def _watch_parent(self) -> None:
        """A second net: a process that was forked from the parent may keep the socket open."""
        while os.getppid() == self._parent_id:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        os._exit(0)

    def _requests(self, sent: _Requests) -> Submit | None:
        """The requests; None if they cannot be read, of which they end."""
        try:
            return Submit(pickle.loads(sent.requests))
        except BaseException as error:  # an object may do anything while it is unpickled
            end = Finish(
                "abort", message=str(_cannot_cross(error)), status_code=400, error_type="bad_parameters"
            )
            self._send_aside(_Outputs([Output(each, (), end, 0, 0) for each in sent.ids]))
            return None

    def _call(self, ask: _Ask) -> Call | None:
        """The call; None if its arguments cannot be read, which its caller is told."""

        def reply(value: Any, error: Exception | None) -> None:
            self._send(_Answer(ask.number, value, None if error is None else _portable(error)))

        try:
            return Call(ask.name, pickle.loads(ask.arguments), reply)
        except BaseException as error:  # an object may do anything while it is unpickled
            self._send_aside(_Answer(ask.number, None, _portable(_cannot_cross(error))))
            return None

    def _end(self, error: BaseException) -> NoReturn:
        """Tell what happened, and end at once, whatever else runs or hangs."""
        with contextlib.suppress(OSError):
            self._send(_Died(_portable(error)))
        os._exit(1)

    def _send_aside(self, message: _Outputs | _Answer) -> None:
        """As `_send`, for the thread that receives: it must never wait for the parent to read."""
        threading.Thread(target=self._send, args=(message,), daemon=True).start()

    def _send(self, message: _Started | _Outputs | _Answer | _Died) -> None:
        with self._write:
            self._pipe.send(message)


def _hold_on(lifeline: int) -> None:
    """Have the system end this process when the other end is closed, even if Python hangs in foreign code.

    The signal comes when there is something to read, and nothing is ever written.
    """
    os.set_inheritable(lifeline, False)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


def _portable(error: BaseException) -> BaseException:
    """The error itself where it can be pickled, else its text; the traceback rides along as a note."""
    text = "".join(traceback.format_exception(error))
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:
        copy = EngineDead(text)
    copy.add_note(f"In the core's process:\n{text}")
    return copy  # type: ignore[no-any-return]


if __name__ == "__main__":
    # Run as a module this file is `__main__`; the messages must carry the importable names.
    from tokenmill.core.process import _Child as Child

    faulthandler.enable()  # a crash shows where it happened
    main_pipe, lifeline, parent_id = map(int, sys.argv[1:])
    _hold_on(lifeline)
    os.set_inheritable(main_pipe, False)
    Child(Connection(main_pipe), parent_id).main()
