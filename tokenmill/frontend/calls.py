"""One call of the engine on its way: its rows, and what has arrived for them and was not taken yet."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenmill.errors import RowError, TokenmillError, check_process
from tokenmill.frontend.failures import failure, row_error
from tokenmill.frontend.outputs import Arrival, Row, Shape
from tokenmill.frontend.sessions import NO_SESSION, Continuation
from tokenmill.messages import Request

Wake = Callable[[], None]
Arrived = list[tuple[Row, Arrival]]


class Mailbox:
    """What arrived for one call or for many, and was not taken yet.

    The core's thread puts, one waiting thread or task takes.
    """

    def __init__(self) -> None:
        self._process_id = os.getpid()
        self._lock = threading.Lock()
        self._arrived: list[tuple[Call, Arrived]] = []
        self._failure: TokenmillError | None = None
        self._wake: Wake | None = None
        self._closed = False

    def put(self, arrived: Sequence[tuple[Call, Arrived]]) -> None:
        """Add what the core sent for some calls, and wake the taker."""
        with self._lock:
            self._arrived += arrived
            wake, self._wake = self._wake, None
        if wake is not None:
            wake()

    def fail(self, failure: TokenmillError) -> None:
        """Let the taker raise `failure` once it has taken what arrived."""
        with self._lock:
            self._failure = failure
            wake, self._wake = self._wake, None
        if wake is not None:
            wake()

    def take(self, wake: Wake) -> list[tuple[Call, Arrived]]:
        """What arrived; if nothing did, an empty list, and `wake` is called once when something does.

        Raises what ended the call, and `WrongState` in a forked process, where nothing arrives.
        """
        check_process(self._process_id)
        with self._lock:
            arrived, self._arrived = self._arrived, []
            if not arrived:
                if self._failure is not None:
                    raise self._failure
                self._wake = wake
        if self._closed and not arrived:
            wake()
        return arrived

    def nudge(self) -> None:
        """Let the taker look again, although nothing arrived. Takes no lock of the mailbox."""
        wake = self._wake  # which the core's thread may take away at any moment
        if wake is not None:
            wake()

    def close(self) -> None:
        """Let nobody wait any more. Takes no lock, because the garbage collector may call it anywhere."""
        self._closed = True
        self.nudge()


class Call:
    """One generate(), or one row of an iteration: its rows, and where it is told what came of them."""

    def __init__(
        self,
        rows: Sequence[Row],
        requests: Sequence[Request],
        *,
        shape: Shape,
        streams: bool,
        session: Continuation = NO_SESSION,
        returns_errors: bool = False,
        raises_in_stream: bool = False,
        mail: Mailbox | None = None,
    ) -> None:
        """`mail` is shared with other calls, whose taker takes for this one, too; None: its own."""
        self.rows = rows
        # Those that run: all but the refused ones; and their requests as the core gets them.
        self.running = rows
        self.requests = requests
        self.refused: dict[int, RowError] = {}  # why, by their indexes
        self.shape = shape
        self.streams = streams
        self.session = session
        self.returns_errors = returns_errors  # in results
        self._raises_in_stream = raises_in_stream
        self.num_unfinished = len(rows)
        self.is_watched = True  # whether figures and the log of requests tell of its rows
        self.shown: list[Row] = []  # that got further, and whose results tell more than tokens
        self.finished: list[Row] = []  # whose results are still to be made, unless the call streams
        self.results: dict[int, dict[str, Any]] = {}  # that were made, by the rows' indexes
        self.has_own_mail = mail is None
        self.mail = Mailbox() if mail is None else mail

    @property
    def raises_errors(self) -> bool:
        """Whether the first row that fails is raised. In a stream its last chunk tells, if nobody asked."""
        return not self.returns_errors and (self._raises_in_stream or not self.streams)

    def refuse(self, errors: Mapping[int, RowError]) -> None:
        """Leave out the rows with these indexes; they end as soon as the others start."""
        if errors:
            self.refused |= errors
            left = [at for at, row in enumerate(self.running) if row.index not in errors]
            self.running = [self.running[at] for at in left]
            self.requests = [self.requests[at] for at in left]

    def start(self) -> None:
        """The running rows are in flight now: tell how the refused ones ended."""
        if self.refused:
            self.put([failure(self.rows[index], error) for index, error in self.refused.items()])

    def put(self, arrived: Arrived) -> None:
        """Add what the core sent, and wake the taker."""
        self.mail.put([(self, arrived)])

    def fail(self, failure: TokenmillError) -> None:
        """Let the taker raise `failure` once it has taken what arrived."""
        self.mail.fail(failure)

    def take(self, wake: Wake) -> Arrived:
        """What arrived for a call with a mailbox of its own; see `Mailbox.take`."""
        return [item for _, arrived in self.mail.take(wake) for item in arrived]


def deliver(arrived: Mapping[Call, Arrived]) -> None:
    """Give calls what the core sent for them, those that share a mailbox together."""
    letters: dict[Mailbox, list[tuple[Call, Arrived]]] = {}
    for letter in arrived.items():
        letters.setdefault(letter[0].mail, []).append(letter)
    for mail, some in letters.items():
        mail.put(some)


def fail_rows(flying: Sequence[tuple[Call, Row]], error: Callable[[], TokenmillError]) -> None:
    """Tell calls that these rows of theirs will not finish; `error` makes one for each."""
    calls: dict[Call, list[Row]] = {}
    for call, row in flying:
        calls.setdefault(call, []).append(row)
    for call, rows in calls.items():
        if call.returns_errors and call.has_own_mail:
            call.put([failure(row, row_error(error())) for row in rows])
        else:
            call.fail(error())
