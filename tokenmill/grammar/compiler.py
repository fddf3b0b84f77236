"""Compiles grammars in threads of its own, each grammar once: owns the cache and the time limit.

A library cannot be interrupted. A compilation that runs out of time is given up; its thread ends when the
library comes back, or with the process. So that few hold up many, short texts go first, and a thread that
takes long over one is replaced: it does no other.
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
from tokenmill.grammar.stacks import deep_stacks
from tokenmill.grammar.time_limits import TimeLimits
from tokenmill.messages import Grammar

logger = logging.getLogger("tokenmill")

SECONDS = 10.0
_NUM_THREADS = 2
# A thread is replaced after so long, while no more than so many others are, all of them busy.
_LONG_SECONDS = 1.0
_MOST_REPLACED = 6
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
        self._limits = TimeLimits[_Job]((_LONG_SECONDS, self._replace), (seconds, self._give_up))
        self._capacity = capacity
        self._cache: OrderedDict[Grammar, Future[Template]] = OrderedDict()
        self._jobs: queue.PriorityQueue[_Job] = queue.PriorityQueue()
        self._num_threads = 0  # that will do another job
        self._num_jobs = 0
        self._num_replaced = 0  # threads that are still busy
        self._replacing = threading.Lock()
        self._opening = threading.Lock()
        self._backend: Backend | None = None

    def compile(self, grammar: Grammar) -> Future[Template]:
        """The template, at once if the grammar is known; the future may hold a `BadGrammar`.

        Called from one thread only.
        """
        known = self._cache.get(grammar)
        if known is not None and not _is_used_up(known):
            self._cache.move_to_end(grammar)
            return known
        job = _Job(grammar, self._num_jobs)
        self._num_jobs += 1
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

    def forget_failures(self) -> None:
        """Compile anew, when they come again, the grammars that could not be compiled: others may have had
        the machine's time. What was compiled depends on its text alone, and stays while it is of use."""
        for grammar, future in list(self._cache.items()):
            if future.done() and (future.exception() is not None or _is_used_up(future)):
                del self._cache[grammar]

    def close(self) -> None:
        """End the threads that are idle; the others when they are done."""
        self._limits.close()
        for _ in range(self._num_threads):
            self._jobs.put(_Job(None, -1))

    def _start_thread(self) -> None:
        with deep_stacks():
            threading.Thread(target=self._work, name="tokenmill-grammar", daemon=True).start()

    def _work(self) -> None:
        while (grammar := (job := self._jobs.get()).grammar) is not None:
            self._do(job, grammar)
            with self._replacing:
                job.is_over = True
                if job.is_replaced:
                    self._num_replaced -= not job.is_given_up
                    return  # another thread works in this one's place

    def _do(self, job: _Job, grammar: Grammar) -> None:
        try:
            backend = self.backend()
        except Exception as error:
            job.end(error if isinstance(error, BadGrammar) else BadGrammar(f"no backend: {error}"))
            return
        with self._limits.watch(job):
            outcome = _compiled(backend, grammar)
        job.end(outcome)

    def _replace(self, job: _Job) -> None:
        """Another thread for what waits behind a job that takes long."""
        with self._replacing:
            if job.is_over or job.is_replaced or self._num_replaced >= _MOST_REPLACED:
                return
            job.is_replaced = True
            self._num_replaced += 1
        self._start_thread()

    def _give_up(self, job: _Job) -> None:
        """Its thread does not count any more, whenever it ends."""
        job.end(BadGrammar(f"compiling it took longer than {self._seconds:g} seconds; make it simpler"))
        with self._replacing:
            if job.is_over or job.is_given_up:
                return
            job.is_given_up = True
            was_replaced, job.is_replaced = job.is_replaced, True
            self._num_replaced -= was_replaced
        if not was_replaced:
            self._start_thread()


def _compiled(backend: Backend, grammar: Grammar) -> Template | BadGrammar:
    """The outcome; no error of a library is anything else."""
    try:
        return backend.compile(grammar)
    except BadGrammar as error:
        return error
    except Exception as error:
        logger.debug("a grammar library failed", exc_info=True)
        return BadGrammar(str(error).strip()[:500] or repr(error))


def _is_used_up(future: Future[Template]) -> bool:
    return future.done() and future.exception() is None and future.result().is_used_up


class _Job:
    """A grammar to be compiled, and its one outcome; without a grammar, the end of a thread."""

    def __init__(self, grammar: Grammar | None, number: int) -> None:
        self.grammar = grammar
        self.future: Future[Template] = Future()
        self.is_over = self.is_replaced = self.is_given_up = False
        self._place = -1 if grammar is None else len(grammar.text), number

    def __lt__(self, other: _Job) -> bool:
        return self._place < other._place

    def end(self, outcome: Template | BadGrammar) -> None:
        """Set the outcome, if there is none yet."""
        with contextlib.suppress(InvalidStateError):
            if isinstance(outcome, BadGrammar):
                self.future.set_exception(outcome)
            else:
                self.future.set_result(outcome)
