"""Rows of iterations in front of a full queue, where they wait instead of being turned away.

Owns how many of them the core gets, and in which order the others follow. Who sends them is the client's
matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from tokenmill.frontend.calls import Call, Mailbox
from tokenmill.frontend.outputs import Row
from tokenmill.messages import CANCELLED, Finish, Output, Request


class Lobby:
    """Requests of all iterations that the core has no room for yet. Used with the client's lock held."""

    def __init__(self, max_queued: int | None) -> None:
        """`max_queued`: requests that may wait in the core's queue; None: any number."""
        self._max_queued = max_queued
        self._waiting: dict[str, Request] = {}  # by their names, first come, first served
        self._takers: set[Mailbox] = set()  # of those, and maybe of some that wait no more

    def __len__(self) -> int:
        return len(self._waiting)

    def admit(self, calls: Sequence[Call], *, num_behind: int) -> list[Request]:
        """What the core has room for, of what waits and then of these calls; the rest waits.

        `num_behind` requests are in flight, with the core or here, beyond what runs at once.
        """
        if self._max_queued is None:
            return [request for call in calls for request in call.requests]
        for call in calls:
            for request in call.requests:
                self.add(call, request)
        room = self._max_queued - (num_behind - len(self._waiting))
        admitted = [self._waiting.pop(name) for name in [*islice(self._waiting, max(0, room))]]
        if not self._waiting:
            self._takers.clear()
        return admitted

    def add(self, call: Call, request: Request) -> None:
        """Let a request wait behind the others."""
        self._waiting[request.id] = request
        self._takers.add(call.mail)

    def takes_back(self, output: Output, flying: tuple[Call, Row] | None) -> bool:
        """Whether this is the end of a request that is to wait again: others took the room before it."""
        if output.finish is None or output.finish.error_type != "queue_full" or flying is None:
            return False
        call, row = flying
        if call.has_own_mail or output.times is None:  # without times it has told of tokens before
            return False
        self.add(call, row.to_core())
        return True

    def aborted(self, names: Sequence[str]) -> list[Output]:
        """The ends of those of these requests that are here, which the core knows nothing of."""
        finish = Finish("abort", message=CANCELLED)
        return [Output(name, (), finish, 0, 0) for name in names if name in self._waiting]

    def leave(self, name: str) -> None:
        """Nobody waits for this request any more, if it is here."""
        self._waiting.pop(name, None)

    def clear(self) -> None:
        """Let nobody wait any more."""
        self._waiting.clear()
        self._takers.clear()

    def tell(self) -> None:
        """There may be room: let those look who take results of what waits here. Needs no lock."""
        for mail in list(self._takers):
            mail.nudge()
