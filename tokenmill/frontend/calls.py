"""One call of the engine on its way: its rows, and what has arrived for them and was not taken yet."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from tokenmill.errors import RowError, TokenmillError
from tokenmill.frontend.failures import failure
from tokenmill.frontend.outputs import Arrival, Row, Shape
from tokenmill.frontend.sessions import NO_SESSION, Continuation
from tokenmill.messages import Request

Wake = Callable[[], None]


class Call:
    """One generate(): its rows, and what arrived for them and was not taken yet.

    The core's thread puts, one waiting thread or task takes.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        requests: Sequence[Request],
        *,
        shape: Shape,
        streams: bool,
        session: Continuation = NO_SESSION,
        returns_errors: bool = False,
    ) -> None:
        self.rows = rows
        # Those that run: all but the ones that failed before; and their requests as the core gets them.
        self.running = rows
        self.requests = requests
        self.shape = shape
        self.streams = streams
        self.session = session
        self.returns_errors = returns_errors  # in results; otherwise the first one is raised
        self.num_unfinished = len(rows)
        self.shown: list[Row] = []  # that got further, and whose results tell more than tokens
        self._lock = threading.Lock()
        self._arrived: list[tuple[Row, Arrival]] = []
        self._failure: TokenmillError | None = None
        self._wake: Wake | None = None

    def put(self, arrived: list[tuple[Row, Arrival]]) -> None:
        """Add what the core sent, and wake the taker."""
        with self._lock:
            self._arrived += arrived
            wake, self._wake = self._wake, None
        if wake is not None:
            wake()

    def refuse(self, errors: Mapping[int, RowError]) -> None:
        """End the rows with these indexes before they run."""
        if errors:
            left = [at for at, row in enumerate(self.running) if row.index not in errors]
            self.running = [self.running[at] for at in left]
            self.requests = [self.requests[at] for at in left]
            self.put([failure(self.rows[index], error) for index, error in errors.items()])

    def fail(self, failure: TokenmillError) -> None:
        """Let the taker raise `failure` once it has taken what arrived."""
        with self._lock:
            self._failure = failure
            wake, self._wake = self._wake, None
        if wake is not None:
            wake()

    def take(self, wake: Wake) -> list[tuple[Row, Arrival]]:
        """What arrived; if nothing did, an empty list, and `wake` is called once when something does."""
        with self._lock:
            arrived, self._arrived = self._arrived, []
            if not arrived:
                if self._failure is not None:
                    raise self._failure
                self._wake = wake
        return arrived
