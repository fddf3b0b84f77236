"""The core in a process of its own: the same loop, its messages pickled over a socket pair.

The child is started from this module, never from the user's main script, so no `__main__` guard is needed.
It ends when the parent closes the socket, also when the parent dies.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tokenmill import runner
from tokenmill.config import EngineConfig
from tokenmill.core.loop import Call, Cancel, Close, Inbox, Submit, build_loop
from tokenmill.errors import EngineClosed, EngineDead, InvalidArgument, told
from tokenmill.messages import DeathSink, EngineFacts, Output, Request, Sink

_PACKAGE_PARENT = Path(__file__).resolve().parents[2]


# ── what crosses the socket ───────────────────────────────────────────────────────────────────


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


# ── the parent's side ─────────────────────────────────────────────────────────────────────────


class CoreProcess:
    """The core behind a socket. Every method may be called from any thread."""

    def __init__(self, config: EngineConfig, *, deliver: Sink, died: DeathSink) -> None:
        self._deliver = deliver
        self._died = died
        self._process, self._pipe = _spawn()
        # Reentrant: the garbage collector may cancel or close while this thread holds it.
        self._state = threading.RLock()
        self._ended: BaseException | None = None  # why no more messages are taken
        self._calls: dict[int, Future[Any]] = {}
        self._num_calls = 0
        self.facts: EngineFacts = self._start(config)
        self._reader = threading.Thread(target=self._read, name="tokenmill-core-reader", daemon=True)
        self._reader.start()

    def submit(self, requests: Sequence[Request]) -> None:
        """Hand over validated requests; raises `EngineDead` or `EngineClosed` once the loop has ended."""
        self._send(Submit(requests))

    def cancel(self, request_ids: Sequence[str]) -> None:
        """Abort requests; their last Output says so. Unknown and finished ids are ignored."""
        self._send(Cancel(request_ids))

    def call(self, name: str, **arguments: Any) -> Any:
        """Ask the core between two steps and wait for the answer; its errors are raised here."""
        answer: Future[Any] = Future()
        try:
            pickled = pickle.dumps(arguments)
        except Exception as error:
            raise InvalidArgument(f"an argument cannot cross to the core's process: {told(error)}") from error
        with self._state:
            self._raise_if_ended()
            self._num_calls += 1
            number = self._num_calls
            self._calls[number] = answer
            self._pipe.send(_Ask(number, name, pickled))
        return answer.result()

    def close(self) -> None:
        """Abort what is left and end the process. Idempotent."""
        with self._state:
            if self._ended is None:
                self._ended = EngineClosed("the engine was shut down")
                with contextlib.suppress(OSError):
                    self._pipe.send(Close())
        if threading.current_thread() is not self._reader:
            self._reader.join()
        self._process.wait()

    def _start(self, config: EngineConfig) -> EngineFacts:
        try:
            self._pipe.send(config)
            answer = self._pipe.recv()
        except (EOFError, OSError):
            answer = _Died(EngineDead(f"the core's process ended while it started: {self._exit_status()}"))
        except BaseException:  # Ctrl-C while the model loads
            self._process.kill()
            raise
        if isinstance(answer, _Died):
            self._process.wait()
            raise answer.error
        assert isinstance(answer, _Started)
        return answer.facts

    def _send(self, message: Submit | Cancel) -> None:
        with self._state:
            self._raise_if_ended()
            try:
                self._pipe.send(message)
            except OSError as error:  # it died a moment ago; the reader tells everybody else
                raise EngineDead("the core's process has ended") from error

    def _raise_if_ended(self) -> None:
        if isinstance(self._ended, EngineClosed):
            raise EngineClosed("the engine was shut down; make a new one")
        if self._ended is not None:
            raise EngineDead(
                f"the engine ended by an error: {self._ended!r}; make a new one"
            ) from self._ended

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
            waiting = self._calls.pop(answer.number)
        if answer.error is None:
            waiting.set_result(answer.value)
        else:
            waiting.set_exception(answer.error)

    def _end(self, death: BaseException | None) -> None:
        with self._state:
            closed = isinstance(self._ended, EngineClosed)
            if self._ended is None:
                self._ended = death or EngineDead(f"the core's process ended: {self._exit_status()}")
            calls, self._calls = self._calls, {}
        for waiting in calls.values():
            waiting.set_exception(EngineDead(f"the engine ended before it answered: {self._ended!r}"))
        self._pipe.close()
        if not closed:
            self._died(self._ended)

    def _exit_status(self) -> str:
        code = self._process.wait()
        return f"killed by signal {-code}" if code < 0 else f"exit status {code}"


def _spawn() -> tuple[subprocess.Popen[bytes], Connection]:
    ours, theirs = socket.socketpair()
    paths = [str(_PACKAGE_PARENT), *filter(None, [os.environ.get("PYTHONPATH")])]
    process = subprocess.Popen(
        [sys.executable, "-m", "tokenmill.core.process", str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        start_new_session=True,  # Ctrl-C is the parent's to handle
    )
    theirs.close()
    return process, Connection(ours.detach())


# ── the child's side ──────────────────────────────────────────────────────────────────────────


class _Child:
    """Serves one engine over the socket; `main` is the whole life of the process."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._write = threading.Lock()
        self._inbox: Inbox = Inbox()

    def main(self) -> None:
        """Load, tell the facts, run the loop until the parent closes or goes away."""
        try:
            config = self._pipe.recv()
            mill = runner.start(config)
            loop = build_loop(
                mill, config, inbox=self._inbox, deliver=lambda outputs: self._send(_Outputs(outputs))
            )
            self._send(_Started(mill.facts))
            threading.Thread(target=self._receive, daemon=True).start()
            loop.run()
            mill.close()
        except BaseException as error:
            self._send(_Died(_portable(error)))

    def _receive(self) -> None:
        while True:
            try:
                message = self._pipe.recv()
            except (EOFError, OSError):
                os._exit(0)  # the parent is gone: nobody waits for anything any more
            if not isinstance(message, _Ask):
                self._inbox.put(message)
            elif (call := self._call(message)) is not None:
                self._inbox.put(call)

    def _call(self, ask: _Ask) -> Call | None:
        """The call; None if its arguments cannot be read, which its caller is told."""

        def reply(value: Any, error: Exception | None) -> None:
            self._send(_Answer(ask.number, value, None if error is None else _portable(error)))

        try:
            return Call(ask.name, pickle.loads(ask.arguments), reply)
        except BaseException as error:  # an object may do anything while it is unpickled
            reply(None, InvalidArgument(f"an argument cannot cross to the core's process: {told(error)}"))
            return None

    def _send(self, message: _Started | _Outputs | _Answer | _Died) -> None:
        with self._write:
            self._pipe.send(message)


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

    Child(Connection(int(sys.argv[1]))).main()
