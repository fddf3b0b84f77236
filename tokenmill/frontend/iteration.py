"""Rows that come and go: read from any number of items, run within a window, handed out as they finish.

Owns how far reading may be ahead of what was handed out, and the order of the results. What an item may be is
the matter of `items.py`; who waits for results, and how, of `run` here and of `iterator.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

from tokenmill.config import EngineConfig
from tokenmill.errors import EngineClosed, EngineDead, InvalidArgument, RowError, WrongState
from tokenmill.frontend.calls import Call, Mailbox, Wake
from tokenmill.frontend.client import Client
from tokenmill.frontend.failures import failed_result, row_error
from tokenmill.frontend.inputs import Job
from tokenmill.frontend.items import ItemReader
from tokenmill.frontend.outputs import make_shown
from tokenmill.frontend.turns import Turns
from tokenmill.frozen import lightly_frozen
from tokenmill.garbage import uncollected
from tokenmill.messages import EngineFacts
from tokenmill.sampling_params import check_whole, show

Order = Literal["completion", "input"]

# The default window: several times what runs at once, so that prompts with the same beginning meet in the
# queue, and no fewer rows than the queue puts in order at a time; no more than costs little memory.
_WINDOW_FACTOR = 4
_SMALLEST_WINDOW = 1024
_LARGEST_WINDOW = 16_384
MAX_WINDOW = 2**20
# How long the first rows may take to come where they begin together.
_LONGEST_FILLING_SECONDS = 0.5
# Rows whose results are made together: their texts in one go, and no longer than a turn takes.
_RESULTS_AT_ONCE = 16


@lightly_frozen()
class Entry:
    """One row, read: its requests, or why it has none."""

    index: int  # position in the input, from 0
    job: Job | None  # its requests, one for each sample; None if reading failed
    error: RowError | None  # why it cannot run
    request_id: str = ""  # of a row that cannot run, as its caller wrote it

    def only(self, samples: Sequence[int]) -> Entry:
        """The same row with some of its samples, by their places among all; at least one."""
        if self.job is None:
            return self
        requests = [self.job.requests[sample] for sample in samples]
        # Log-probabilities of the prompt are computed with the first of the samples, for all of them.
        requests[0] = dataclasses.replace(requests[0], logprobs=self.job.requests[0].logprobs)
        job = dataclasses.replace(self.job, requests=tuple(requests), single=len(requests) == 1)
        return dataclasses.replace(self, job=job)


Finished = tuple[Entry, list[dict[str, Any]]]


class RowRunner:
    """Reads rows and runs them, with one engine. May be used from any thread, by several at once."""

    def __init__(self, config: EngineConfig, client: Client, reader: ItemReader, *, owner: object) -> None:
        """`owner` stays alive as long as the runner and what it runs."""
        self._config = config
        self._client = client
        self._reader = reader
        self._owner = owner

    @property
    def facts(self) -> EngineFacts:
        """What the core found out at start."""
        return self._client.facts

    @property
    def tensor_update(self) -> str:
        """A word that only the weights of this moment have, once tensors replaced some; "" if none did."""
        return self._client.tensor_update

    def turns(self) -> Turns:
        """For work on rows while others run: with whom it takes turns."""
        return Turns(self._client.core_need)

    def device_seconds(self) -> dict[str, float] | None:
        """How long the device was `busy`, and `idle` although requests were there; None if none can tell."""
        try:
            seconds: dict[str, float] | None = self._client.call_core("device_seconds")
        except (EngineClosed, EngineDead):
            return None
        return seconds

    @property
    def window(self) -> int:
        """Rows that are read and not yet handed out at most, where nobody says: 4 times what runs at once.

        At least 1024 and at most 16,384, but no more than may run and wait with `max_queued_requests`.
        """
        running, queued = self._client.facts.max_running_requests, self._config.max_queued_requests
        wanted = min(max(_WINDOW_FACTOR * running, _SMALLEST_WINDOW), _LARGEST_WINDOW)
        return wanted if queued is None else min(wanted, running + queued)

    def read(
        self,
        items: Sequence[Any],
        *,
        first_index: int = 0,
        sampling_params: Any = None,
        options: Mapping[str, Any] | None = None,
    ) -> list[Entry]:
        """The rows of some items, in their order; texts are tokenized in one call.

        An item is a text, a list of token ids, or a dict with one of `prompt`, `input_ids` and `messages` and
        what else `generate` or `chat` take: `sampling_params`, `rid`, options by their names. It goes before
        `sampling_params` and `options`, which hold for all, name by name. An item's own fault is its entry's
        `error`; raises `InvalidArgument` for faults of what holds for all.
        """
        with uncollected():
            read = self._reader.read(
                items, sampling_params=sampling_params, options=options, turns=self.turns()
            )
        return [
            Entry(first_index + place, None, each, _rid(items[place]))
            if isinstance(each, dict)
            else Entry(first_index + place, each, None)
            for place, each in enumerate(read)
        ]

    def run(
        self,
        entries: Iterable[Sequence[Entry]],
        *,
        order: Order = "completion",
        window: int | None = None,
        fills_up_first: bool = False,
    ) -> Iterator[list[Finished]]:
        """Run rows and give each with its results, one for each sample, as they finish or in input order.

        Rows that are ready at the same time come together, up to 16 of them. At most `window` rows (default:
        `self.window`) are read and not yet handed out: the next sequence is pulled from `entries` when the
        longest so far would fit. With `fills_up_first` nothing runs until as many rows are there as run at
        once, or half a second has gone. Every result has the key `error`; a failed row ends no other. An
        exception of `entries` is raised after the results of what came before it. Closing the iterator, or
        letting go of it, cancels what has not finished. Raises `EngineDead`, `EngineClosed`, and `WrongState`
        while memory is released.
        """
        flow = self.open_flow(order=order, window=window)
        return flow.run(iter(entries), most=_RESULTS_AT_ONCE, fills_up_first=fills_up_first)

    def open_flow(self, *, order: Any, window: Any) -> Flow:
        """An empty flow of rows. Raises `InvalidArgument`."""
        if order not in get_args(Order):
            raise InvalidArgument(f"order must be 'completion' or 'input', got {show(order)}")
        size = self.window if window is None else check_whole("window", window, minimum=1, maximum=MAX_WINDOW)
        return Flow(
            self._client,
            keeps_order=order == "input",
            window=size,
            has_text=not self._config.skip_tokenizer_init,
            owner=self._owner,
        )


def _rid(item: Any) -> str:
    """What the caller of a row that cannot run has called it."""
    try:
        rid = item.get("rid") if isinstance(item, Mapping) else None
    except Exception:  # an item may be anything at all
        return ""
    return rid if isinstance(rid, str) else ""


class Slot:
    """A row between its reading and its being handed out."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.results: list[dict[str, Any]] | None = None


Prepared = tuple[Slot, Call | dict[str, Any]]  # a row, and its call, or its result if it cannot run


class Flow:
    """The rows of one iteration: running, finished, and ready to be handed out.

    One thread or task uses it. It never waits: whoever does is told when to look again.
    """

    def __init__(
        self,
        client: Client,
        *,
        keeps_order: bool,
        window: int,
        has_text: bool,
        owner: object,
    ) -> None:
        self.window = window
        self.num_held = 0  # rows that were added and not handed out
        self._client = client
        self._keeps_order = keeps_order
        self.chunk = 0  # rows that come at a time at most; it grows where more come
        self._has_text = has_text
        self._owner = owner
        self._closed = False
        self._mail = Mailbox()
        self._turns = Turns(client.core_need)
        self._running: dict[Call, Slot] = {}
        self._finished: deque[tuple[Call, Slot]] = deque()  # whose results are not made yet
        self._slots: deque[Slot] = deque()  # in the order in which they are handed out

    @property
    def is_closed(self) -> bool:
        """Whether nobody waits for rows any more."""
        return self._closed

    @property
    def has_room(self) -> bool:
        """Whether another sequence of rows should be added."""
        return not self.num_held or self.num_held + self.chunk <= self.window

    @property
    def has_ready(self) -> bool:
        """Whether `pop` has something to do."""
        return bool(self._finished) or self._is_head_ready

    def run(
        self, entries: Iterator[Sequence[Entry]], *, most: int = 1, fills_up_first: bool = False
    ) -> Iterator[list[Finished]]:
        """Hand rows out as they get ready, up to `most` together, and add more whenever there is room.

        Waits while none is ready.
        """
        woken = threading.Event()
        failure: Exception | None = None
        is_open = True
        rest = 0.0  # no reading until then while results are ready: a slow source must not hold them up
        with contextlib.closing(self):
            if fills_up_first:
                is_open, failure = self._add_first(entries)
            while not self._closed and (is_open or self.num_held):
                began = time.perf_counter()
                if is_open and self.has_room and (began >= rest or not self.has_ready):
                    try:
                        is_open = self._add_next(entries)
                    except Exception as error:  # of the source; what came before it goes first
                        is_open, failure = False, error
                    rest = 2 * time.perf_counter() - began
                if finished := self.pop(most):
                    yield finished
                elif self.num_held and not self.take(woken.set) and not (is_open and self.has_room):
                    woken.wait()
                    woken.clear()
        if failure is not None:
            raise failure

    def _add_first(self, entries: Iterator[Sequence[Entry]]) -> tuple[bool, Exception | None]:
        """Start the first rows together, as many as run at once; whether there may be more.

        Rows that begin one after the other end so, too, and steps in which others take their places are slow.
        """
        due = time.perf_counter() + _LONGEST_FILLING_SECONDS
        most = min(self.window, self._client.facts.max_running_requests)
        prepared: list[Prepared] = []
        some: list[Prepared] | None = []
        failure: Exception | None = None
        while len(prepared) + self.chunk <= most and time.perf_counter() < due:
            try:
                some = self._pull(entries)
            except Exception as error:  # of the source; what came before it goes first
                some, failure = None, error
            if not some:  # the end, or nothing more before some of these have finished
                break
            prepared += some
        self.start(prepared)
        return some is not None, failure

    def _add_next(self, entries: Iterator[Sequence[Entry]]) -> bool:
        """Start the next rows; False if there are no more."""
        some = self._pull(entries)
        if some is not None:
            self.start(some)
        return some is not None

    def _pull(self, entries: Iterator[Sequence[Entry]]) -> list[Prepared] | None:
        """The next rows, ready to be started; None if there are no more."""
        some = next(entries, None)
        if some is None:
            return None
        self.chunk = max(self.chunk, len(some))
        return self.prepare(some)

    def prepare(self, entries: Sequence[Entry]) -> list[Prepared]:
        """Rows that are ready to be started; may run in any thread."""
        turns = Turns(self._client.core_need)
        prepared = []
        with uncollected():
            for entry in entries:
                prepared.append((Slot(entry), self._call(entry)))
                turns.give_way()
        return prepared

    def start(self, prepared: Sequence[Prepared]) -> None:
        """Start rows. Raises `EngineDead`, `EngineClosed`, or `WrongState`, and then has none of them."""
        if self._closed:
            return
        calls = {call: slot for slot, call in prepared if isinstance(call, Call)}
        if calls:
            self._submit(calls)
        self.num_held += len(prepared)
        if self._keeps_order:
            self._slots.extend(slot for slot, _ in prepared)
        for slot, call in prepared:
            if not isinstance(call, Call):
                self._finish(slot, [call])

    def _submit(self, calls: Mapping[Call, Slot]) -> None:
        self._running |= calls  # first of all, so that `close` cancels what is started
        try:
            self._client.submit_all([*calls])
        except BaseException:
            self._running = {call: slot for call, slot in self._running.items() if call not in calls}
            self._client.drop(*calls)
            raise
        if self._closed:  # by another thread, which may have cancelled them before they were there
            self._client.drop(*calls)

    def _call(self, entry: Entry) -> Call | dict[str, Any]:
        """The call of a row, or the result of one that cannot run."""
        error = entry.error
        if entry.job is not None:
            try:
                return self._client.prepare_row(entry.job, self._mail)
            except Exception as fault:  # what a row brings along may be anything; it fails alone
                error = row_error(fault)
        assert error is not None
        return failed_result(
            error,
            request_id=entry.request_id,
            has_text=self._has_text,
            weight_version=self._client.weight_version,
        )

    def take(self, wake: Wake) -> bool:
        """Take in what arrived. If nothing did: False, and `wake` is called once when something does.

        Raises `EngineDead`, `EngineClosed`, and `WrongState` where more rows were to be started.
        """
        arrived = self._mail.take(wake)
        for call, items in arrived:
            self._client.take_in(call, items)
            if call.shown:
                make_shown(call.shown, call.shape, self._turns)
            if not call.num_unfinished and (slot := self._running.pop(call, None)) is not None:
                self._finished.append((call, slot))
            self._turns.give_way()
        try:
            self._client.let_in()  # after the mailbox knows whom to wake when there is room
        except (EngineDead, EngineClosed, WrongState):
            if not self.has_ready:  # what has finished goes first
                raise
        return bool(arrived)

    def pop(self, most: int) -> list[Finished]:
        """The next rows to be handed out, with their results; none if the first of them is not there yet."""
        while self._finished and not self._is_head_ready:
            self._make_results()
        popped: list[Finished] = []
        slots = self._slots
        while slots and len(popped) < most and (results := slots[0].results) is not None:
            popped.append((slots.popleft().entry, results))
        self.num_held -= len(popped)
        return popped

    @property
    def _is_head_ready(self) -> bool:
        slots = self._slots
        return bool(slots) and slots[0].results is not None

    def _make_results(self) -> None:
        finished = self._finished
        some = [finished.popleft() for _ in range(min(_RESULTS_AT_ONCE, len(finished)))]
        made = self._client.results([call for call, _ in some])
        for (_, slot), results in zip(some, made, strict=True):
            self._finish(slot, list(results))
        self._turns.give_way()

    def _finish(self, slot: Slot, results: list[dict[str, Any]]) -> None:
        slot.results = results
        if not self._keeps_order:
            self._slots.append(slot)

    def close(self) -> None:
        """Cancel what runs, and forget the rest; who waits sees the end. Idempotent."""
        self._closed = True
        self._mail.close()
        running, self._running = self._running, {}
        # New ones, for another thread may be at the old ones; not by the name of their class, which is gone
        # when Python ends and this is called last of all.
        self._finished, self._slots = type(self._finished)(), type(self._slots)()
        self.num_held = 0
        if running:
            self._client.let_go(*running)
