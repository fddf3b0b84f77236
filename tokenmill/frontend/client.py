"""The frontend's end of the wire: sends requests to the core and hands what comes back to whoever waits.

Owns which request is in flight and for which call. Blocking calls, streams and their async forms take from
the same call object; they differ only in how they sleep.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from tokenmill.config import EngineConfig
from tokenmill.errors import EngineClosed, EngineDead, WrongState, engine_dead
from tokenmill.frontend.calls import Arrived, Call, Mailbox, Wake, deliver, fail_rows
from tokenmill.frontend.event_loops import Threads
from tokenmill.frontend.failures import INTERRUPTED, Faults, failure, interrupted, raise_if_failed, taken_ids
from tokenmill.frontend.interrupts import Interrupts
from tokenmill.frontend.lobby import Lobby
from tokenmill.frontend.observers import Observers
from tokenmill.frontend.outputs import (
    Arrival,
    ResultList,
    Row,
    Shape,
    chunk_of,
    make_shown,
    result_of,
    results_of,
)
from tokenmill.frontend.progress import Advance, Report, open_progress
from tokenmill.frontend.request_ids import is_made_of
from tokenmill.frontend.streams import AsyncResultStream, LoopWake, ResultStream
from tokenmill.frontend.turns import Turns
from tokenmill.garbage import collect_if_due, uncollected
from tokenmill.messages import Core, EngineFacts, Need, Output, Request
from tokenmill.metrics import Metrics
from tokenmill.signals import HeldSignals

if TYPE_CHECKING:
    from tokenmill.frontend.detokenizer import TextStream
    from tokenmill.frontend.inputs import Job
    from tokenmill.frontend.tokenizer import Tokenizer

# How long a call that was interrupted waits for the tokens of what it ends: a step or two.
_GIVE_UP_SECONDS = 5.0
# A signal that another thread received does not wake the main one, which handles it when it looks.
_LOOK_SECONDS = 0.2
# So many are made before the core's thread may have a turn.
_RESULTS_AT_ONCE = 16


class Client:
    """The only owner of requests in flight. Every method may be called from any thread."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | None) -> None:
        """Start the core; returns when the model is loaded."""
        # Imported here so that importing the frontend stays light.
        from tokenmill.core.launch import start_core

        self._config = config
        self._tokenizer = tokenizer
        # Reentrant: the garbage collector may close a stream while this thread holds the lock.
        self._lock = threading.RLock()
        # The core knows requests by names of ours, never used twice: a cancelled request may still
        # answer when the user has already given its id to the next one.
        self._names = map(str, itertools.count())
        self._flying: dict[str, tuple[Call, Row]] = {}
        self._flying_ids: set[str] = set()
        self._dead: BaseException | None = None
        self._closed = False
        self._released: set[str] = set()
        self._lobby = Lobby(config.max_queued_requests)
        self.weight_version = config.weight_version
        self.tensor_update = ""  # another word after each update of weights that no file holds
        self.metrics = Metrics(str(config.served_model_name)) if config.enable_metrics else None
        self.threads = Threads()  # for calls that only their task waits for
        self.observers = Observers.of(config, tokenizer, self.metrics)
        self._core: Core = start_core(config, deliver=self._deliver, died=self._died)

    @property
    def facts(self) -> EngineFacts:
        """What the core found out at start."""
        return self._core.facts

    def core_need(self) -> Need:
        """How much the core's thread needs the interpreter."""
        return self._core.need

    # ── running calls ─────────────────────────────────────────────────────────────────────────

    @uncollected()
    def prepare(self, job: Job, *, stream: bool) -> Call:
        """The call for a job; nothing runs yet. Raises `InvalidArgument` for what cannot reach the core."""
        return self._prepared(job, stream=stream, mail=None)

    def prepare_row(self, job: Job, mail: Mailbox) -> Call:
        """As `prepare`, for one of many rows that are waited for together; what comes back goes to `mail`."""
        return self._prepared(job, stream=False, mail=mail)

    def _prepared(self, job: Job, *, stream: bool, mail: Mailbox | None) -> Call:
        faults = Faults(returned=job.returns_errors, found=job.errors)
        if self._config.core_process:
            self._check_crossing(job.requests, faults)
        texts = self._open_texts(job.requests, faults, stream=stream)
        shape = Shape(
            single=job.single,
            has_text=self._tokenizer is not None,
            cumulative=self._config.cumulative_stream,
            weight_version=self.weight_version,
            has_timings=self._config.enable_metrics,
            token_text=None if self._tokenizer is None else self._tokenizer.token_text,
            hidden_states_format=job.hidden_states_format,
            has_errors=job.returns_errors,
        )
        rows = [
            Row(request, name=next(self._names), index=index, text=texts[index])
            for index, request in enumerate(job.requests)
        ]
        call = Call(
            rows,
            [row.to_core() for row in rows],
            shape=shape,
            streams=stream,
            session=job.session,
            returns_errors=job.returns_errors,
            raises_in_stream=job.raises_in_stream,
            mail=mail,
        )
        call.refuse(faults.found)
        return call

    def run(self, call: Call) -> dict[str, Any] | ResultList:
        """Run a call and wait for its results. Raises as `submit` and `advance` do."""
        woken: queue.SimpleQueue[None] = queue.SimpleQueue()  # which a signal's handler may put into
        try:
            with Interrupts(partial(woken.put, None)) as interrupts:
                self.submit(call)
                self._wait(call, woken, interrupts)
                if interrupts.happened:
                    self._give_up(call, woken)
                results = self._results(call)
        except BaseException:
            self.drop(call)
            raise
        if interrupts.happened:
            results = interrupted(call.rows, results, returned=call.shape.has_errors)
        return results[0] if call.shape.single else results

    def _wait(self, call: Call, woken: queue.SimpleQueue[None], interrupts: Interrupts) -> None:
        turns = Turns(self.core_need)
        with self._progress(call) as report, uncollected():
            while call.num_unfinished and not interrupts.happened:
                collect_if_due()
                if advanced := self.advance(call, partial(woken.put, None), turns):
                    report(advanced)
                    self._make_shown(call)
                    self._make_results(call, turns)
                else:
                    _sleep(woken, _LOOK_SECONDS)

    def _make_shown(self, call: Call) -> None:
        make_shown(call.shown, call.shape, Turns(self.core_need))

    def _make_results(self, call: Call, turns: Turns | None = None) -> None:
        """Make the results of rows that finished: while others run, the last one need not wait for it."""
        rows, call.finished = call.finished, []
        for start in range(0, len(rows), _RESULTS_AT_ONCE):
            some = rows[start : start + _RESULTS_AT_ONCE]
            for row, text in zip(some, self._texts(some), strict=True):
                call.results[row.index] = result_of(row, text, call.shape)
            if turns is not None:
                turns.give_way()

    def _give_up(self, call: Call, woken: queue.SimpleQueue[None]) -> None:
        """End what has not finished, and wait a moment for the tokens that it came to."""
        call.returns_errors = True
        self._core_cancel([row.name for row in call.rows if row.finish is None])
        due = time.perf_counter() + _GIVE_UP_SECONDS
        while call.num_unfinished and (left := due - time.perf_counter()) > 0:
            if not self.advance(call, partial(woken.put, None)):
                _sleep(woken, left)
        if call.num_unfinished:
            self.let_go(call)
            call.put([failure(row, INTERRUPTED) for row in call.rows if row.finish is None])
            self.advance(call, partial(woken.put, None))
        self._make_shown(call)

    async def run_async(self, call: Call) -> dict[str, Any] | ResultList:
        """As `run`; only the calling task waits."""
        try:
            self.submit(call)
            with self._progress(call) as report:
                while call.num_unfinished:
                    wake = LoopWake()
                    if advanced := self.advance(call, wake):
                        report(advanced)
                        if call.shown:
                            await self.threads.run(self._make_shown, call)
                    else:
                        await wake.sleep()
            if call.shape.single:
                return self._results(call)[0]
            return await self.threads.run(self._results, call)
        except BaseException:
            self.drop(call)
            raise

    def stream(self, call: Call, *, owner: object) -> ResultStream:
        """Start a call and give its chunks; `owner` stays alive as long as the stream."""
        self.submit(call)
        return ResultStream(self, call, owner)

    def stream_async(self, call: Call, *, owner: object) -> AsyncResultStream:
        """As `stream`, for `async for`."""
        self.submit(call)
        return AsyncResultStream(self, call, owner)

    def advance(self, call: Call, wake: Wake, turns: Turns | None = None) -> list[Advance]:
        """Rows of the call that got further since last time, in the order in which they did.

        If none did: an empty list, and `wake` is called once when that has changed. With `turns` the core's
        thread is given way to between rows. Raises `EngineDead` or `EngineClosed` if the engine ended before
        the call.
        """
        advanced: list[Advance] = []
        while not advanced:
            if not (arrived := call.take(wake)):
                break
            advanced = self.take_in(call, arrived, turns)
        return advanced

    def take_in(self, call: Call, arrived: Arrived, turns: Turns | None = None) -> list[Advance]:
        """Rows of the call that got further by what arrived."""
        advanced: list[Advance] = []
        for row, arrival in arrived:
            if row.finish is None:  # else it is a token after a stop in the text
                advanced.append(self._advance_row(call, row, arrival))
                if turns is not None:
                    turns.give_way()
        return advanced

    def _advance_row(self, call: Call, row: Row, arrival: Arrival) -> Advance:
        piece = row.take(arrival)
        if row.shows_more and not call.streams:
            call.shown.append(row)
        if row.finish is not None:
            self.observers.finished(row)
            if call.raises_errors:
                raise_if_failed(row, row.finish)
            call.num_unfinished -= 1
            if call.streams:
                call.session.finish(row)
            else:
                call.finished.append(row)
            if arrival.output.finish is None:
                self._cancel([row.name])
        return Advance(
            row.finish is not None,
            len(piece.token_ids),
            chunk_of(row, piece, call.shape) if call.streams else {},
        )

    def _check_crossing(self, requests: Sequence[Request], faults: Faults) -> None:
        """Processors that cannot be sent to the core's process are faults of their rows."""
        name = "custom_logit_processor"
        if any(request.processor is not None for request in requests):
            crosses = cache(lambda processor: processor is None or processor.check_crosses(name))
            faults.each(name, requests, lambda _, request: crosses(request.processor), None)

    def _open_texts(
        self, requests: Sequence[Request], faults: Faults, *, stream: bool
    ) -> Sequence[TextStream | None]:
        """The growing texts of requests, where somebody looks at them on the way."""
        tokenizer = self._tokenizer
        if tokenizer is None or not (stream or any(each.params.stops_on_text for each in requests)):
            return [None] * len(requests)

        def opened(_: int, request: Request) -> TextStream | None:
            return tokenizer.open_text(request) if stream or request.params.stops_on_text else None

        return faults.each("stop_regex", requests, opened, None)

    def _results(self, call: Call) -> ResultList:
        # Only here: a call that raises has no results, and a session is to know of none.
        for row in call.rows:
            call.session.finish(row)
        with uncollected():
            self._make_results(call)
            return results_of(call.rows, [call.results[row.index] for row in call.rows])

    def results(self, calls: Sequence[Call]) -> list[ResultList]:
        """The results of each of some finished calls, as lists; their texts are made together."""
        with uncollected():
            texts = iter(self._texts([row for call in calls for row in call.rows]))
            return [
                results_of(call.rows, [result_of(row, next(texts), call.shape) for row in call.rows])
                for call in calls
            ]

    def _texts(self, rows: Sequence[Row]) -> list[str]:
        texts = [row.text for row in rows]
        plain = [place for place, row in enumerate(rows) if not row.has_text]
        if self._tokenizer is not None and plain:
            ended = [(rows[place].request, rows[place].ids_with_text) for place in plain]
            for place, text in zip(plain, self._tokenizer.texts(ended), strict=True):
                texts[place] = text
        return texts

    def _progress(self, call: Call) -> contextlib.AbstractContextManager[Report]:
        return open_progress(
            len(call.rows), wanted=False if call.shape.single else self._config.show_progress
        )

    # ── to the core ───────────────────────────────────────────────────────────────────────────

    def submit(self, call: Call) -> None:
        """Start a call. Raises `InvalidArgument` (id taken, session full), `EngineDead`, `EngineClosed`."""
        with self._lock:
            self._raise_if_ended()
            self._raise_if_released()
            self._register(call)
        if call.is_watched:
            self.observers.received(call.rows)
        try:
            # Outside the lock: a session's own lock is never waited for while this one is held.
            obsolete = call.session.start(call.running)
            self._send(call.requests)
        except BaseException:
            self.drop(call)
            raise
        self._core_cancel(obsolete)

    def submit_all(self, calls: Sequence[Call]) -> None:
        """Start calls that return errors, and belong to no session.

        What the core's queue has no room for waits for `let_in`; the mailbox's taker is woken when there may
        be some. Raises `EngineDead` and `EngineClosed`, and `WrongState` while memory is released.
        """
        with self._lock:
            self._raise_if_ended()
            self._raise_if_released()
            for call in calls:
                self._register(call)
            num_behind = len(self._flying) - self.facts.max_running_requests
            requests = self._lobby.admit(calls, num_behind=num_behind)
        self.observers.received(row for call in calls for row in call.rows)
        if requests:
            self._send(requests)

    def let_in(self) -> None:
        """Send what waits for room in the core's queue, of whatever call. Raises as `submit_all`."""
        if self._lobby:
            self.submit_all(())

    def _send(self, requests: Sequence[Request]) -> None:
        with HeldSignals():  # half a message would break a pipe to the core
            self._core.submit(requests)
            dropped = [each.id for each in requests if each.id not in self._flying]  # meanwhile
            self._core_cancel(dropped)

    def _register(self, call: Call) -> None:
        """With the lock held, note which rows are in flight; not those with ids that others have there."""
        if taken := [row for row in call.running if row.request.id in self._flying_ids]:
            call.refuse(taken_ids(taken, returned=call.returns_errors))
        for row in call.running:
            self._flying[row.name] = (call, row)
            self._flying_ids.add(row.request.id)
        call.start()

    def drop(self, *calls: Call) -> None:
        """Nobody waits for these calls any more: cancel what is left of them."""
        self.let_go(*calls)
        self.observers.tell()

    def let_go(self, *calls: Call) -> None:
        """As `drop`, for the garbage collector, which may run anywhere: who watches is told later."""
        for call in calls:
            call.session.drop()
        self._cancel([row.name for call in calls for row in call.rows])
        self.observers.given_up(row for call in calls for row in call.rows)

    def abort(self, request_id: str, *, every: bool) -> None:
        """End requests; their callers get what is there so far. Ids that are not in flight are ignored.

        Meant are `request_id` and the ids that were made of it: `job` ends `job_0` and `job-a`, not `jobs`,
        so that `row_1` leaves `row_10` alone. Or every request.
        """
        with self._lock:
            flying = [(name, row.request.id) for name, (_, row) in list(self._flying.items())]
        names = [name for name, other in flying if every or is_made_of(other, request_id)]
        self._deliver(self._lobby.aborted(names))
        self._core_cancel(names)

    def call_core(self, name: str, **arguments: Any) -> Any:
        """Ask the core between two steps; see `core/control.py` for the names."""
        self._raise_if_ended()
        return self._core.call(name, **arguments)

    def update_weights(self, name: str, *, version: str | None, tensor_update: str, **arguments: Any) -> Any:
        """As `call_core`; what comes back after a success is of the new version (None: it keeps its name)."""

        def note(answer: tuple[bool, str]) -> None:
            if answer[0]:
                self.tensor_update = tensor_update
                self.weight_version = self.weight_version if version is None else version

        return self.call_core(name, answered=note, **arguments)

    def release_memory(self, tags: Sequence[str]) -> None:
        """Give memory up; no request is taken until all of it is back. `WrongState` if some are in flight."""
        self.call_core("release_memory_occupation", tags=tags)
        self._released |= set(tags)

    def resume_memory(self, tags: Sequence[str]) -> None:
        """Take memory back."""
        self.call_core("resume_memory_occupation", tags=tags)
        self._released -= set(tags)

    def close(self) -> None:
        """End the core and free its memory; whoever still waits gets `EngineClosed`. Idempotent."""
        with self._lock:
            self._closed = True
            flying = self._forget_all()
        fail_rows(flying, lambda: EngineClosed("the engine was shut down before the request was finished"))
        self._core.close()
        self.threads.close()

    def _cancel(self, names: Sequence[str]) -> None:
        """Forget requests and let the core end them; what it still sends for them goes nowhere."""
        with self._lock:
            flying = [name for name in names if self._forget(name) is not None]
        self._core_cancel(flying)

    def _core_cancel(self, names: Sequence[str]) -> None:
        if names:
            with contextlib.suppress(EngineDead, EngineClosed):  # the requests have ended, too
                self._core.cancel(names)

    def _forget(self, name: str) -> tuple[Call, Row] | None:
        entry = self._flying.pop(name, None)
        self._lobby.leave(name)
        if entry is not None:
            self._flying_ids.discard(entry[1].request.id)
        return entry

    def _forget_all(self) -> list[tuple[Call, Row]]:
        flying = list(self._flying.values())
        self._flying.clear()
        self._flying_ids.clear()
        self._lobby.clear()
        return flying

    def _raise_if_ended(self) -> None:
        if self._closed:
            raise EngineClosed("the engine was shut down; make a new one")
        if self._dead is not None:
            raise engine_dead(self._dead)

    def _raise_if_released(self) -> None:
        if self._released:
            raise WrongState(
                f"the engine has released its memory ({', '.join(sorted(self._released))}); call "
                "resume_memory_occupation() before the next request"
            )

    # ── from the core's thread ────────────────────────────────────────────────────────────────

    def _deliver(self, outputs: Sequence[Output]) -> None:
        seconds = time.perf_counter()
        arrived: dict[Call, list[tuple[Row, Arrival]]] = {}
        with self._lock:
            for output in outputs:
                name = output.request_id
                if output.finish is not None and self._lobby.takes_back(output, self._flying.get(name)):
                    continue
                entry = self._flying.get(name) if output.finish is None else self._forget(name)
                if entry is not None:
                    call, row = entry
                    arrived.setdefault(call, []).append((row, Arrival(output, seconds, self.weight_version)))
        deliver(arrived)
        if self._lobby and any(output.finish is not None for output in outputs):
            self._lobby.tell()

    def _died(self, error: BaseException) -> None:
        with self._lock:
            self._dead = error
            flying = self._forget_all()
        fail_rows(flying, lambda: engine_dead(error))


def _sleep(woken: queue.SimpleQueue[None], seconds: float) -> None:
    """Until somebody puts something in, but no longer than that."""
    with contextlib.suppress(queue.Empty):
        woken.get(timeout=seconds)
