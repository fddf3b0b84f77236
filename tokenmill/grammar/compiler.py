"""Compiles grammars in threads of its own, each grammar once: owns the cache and the time limit.

A library cannot be interrupted. A thread whose compilation runs out of time is given up and replaced; it ends
by itself when the library comes back, or with the process.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError

from tokenmill.grammar.base import Backend, BadGrammar, Template
from tokenmill.messages import Grammar

logger = logging.getLogger("tokenmill")

SECONDS = 10.0
_NUM_THREADS = 2
_CAPACITY = 1024
# A library sets much up when it meets its first schema.
_SMALL = Grammar("json_schema", "{}")


class Compiler:
    """Grammar -> template. Threads start with the first grammar, and so does the backend."""

    def __init__(
        self, open_backend: Callable[[], Backend], *, seconds: float = SECONDS, capacity: int = _CAPACITY
    ) -> None:
        """`seconds` is the time limit of one grammar; the `capacity` grammars used last are kept."""
        self._open_backend = open_backend
        self._seconds = seconds
        self._capacity = capacity
        self._cache: OrderedDict[Grammar, Future[Template]] = OrderedDict()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._num_threads = 0
        self._opening = threading.Lock()
        self._backend: Backend | None = None

    def compile(self, grammar: Grammar) -> Future[Template]:
        """The template, at once if the grammar is known; the future may hold a `BadGrammar`.

        Called from one thread only.
        """
        known = self._cache.get(grammar)
        if known is not None:
            self._cache.move_to_end(grammar)
            return known
        job = _Job(grammar)
        self._cache[grammar] = job.future
        if len(self._cache) > self._capacity:
            self._cache.popitem(last=False)
        if self._num_threads < _NUM_THREADS:
            self._num_threads += 1
            self._start_thread()
        self._jobs.put(job)
        return job.future

    def backend(self) -> Backend:
        """The library, opened by the first who asks. Raises what the opening raises, every time."""
        with self._opening:
            if self._backend is None:
                self._backend = self._open_backend()
            return self._backend

    def prepare(self) -> None:
        """Open and use the backend in a thread, so that the first grammar need not wait for either."""
        threading.Thread(target=self._prepare, name="tokenmill-grammar", daemon=True).start()

    def _prepare(self) -> None:
        with contextlib.suppress(Exception):  # the first grammar meets it again, and has somebody to tell
            self.backend().compile(_SMALL)

    def clear(self) -> None:
        """Forget every grammar; templates in use stay valid."""
        self._cache.clear()

    def close(self) -> None:
        """End the threads that are idle; the others when they are done."""
        for _ in range(self._num_threads):
            self._jobs.put(None)

    def _start_thread(self) -> None:
        threading.Thread(target=self._work, name="tokenmill-grammar", daemon=True).start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if not self._do(job):
                return  # given up: another thread works in this one's place

    def _do(self, job: _Job) -> bool:
        """Whether the job was done in time."""
        try:
            backend = self.backend()
        except Exception as error:
            return job.end(error if isinstance(error, BadGrammar) else BadGrammar(f"no backend: {error}"))
        timer = threading.Timer(self._seconds, self._give_up, [job])
        timer.daemon = True
        timer.start()
        try:
            outcome: Template | BadGrammar = backend.compile(job.grammar)
        except BadGrammar as error:
            outcome = error
        except Exception as error:
            logger.debug("a grammar library failed", exc_info=True)
            outcome = BadGrammar(str(error).strip()[:500] or repr(error))
        timer.cancel()
        return job.end(outcome)

    def _give_up(self, job: _Job) -> None:
        if job.end(BadGrammar(f"compiling it took longer than {self._seconds:g} seconds; make it simpler")):
            self._start_thread()


class _Job:
    """A grammar to be compiled, and its one outcome."""

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self.future: Future[Template] = Future()

    def end(self, outcome: Template | BadGrammar) -> bool:
        """Set the outcome; False if there is one already."""
        try:
            if isinstance(outcome, BadGrammar):
                self.future.set_exception(outcome)
            else:
                self.future.set_result(outcome)
        except InvalidStateError:
            return False
        return True
