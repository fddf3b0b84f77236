"""Sessions: the turns that conversations have had, as trees of token ids, and what a next turn continues.

Keys and values are nobody's business here: a turn runs with its whole context as prompt, and the core's
prefix cache finds what was computed before.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from tokenmill.errors import InvalidArgument, UnknownArgument, WrongType, did_you_mean, reading
from tokenmill.messages import IntArray
from tokenmill.sampling_params import brief, check_flag, check_real, check_text, check_whole, show

if TYPE_CHECKING:
    from tokenmill.frontend.outputs import Row

logger = logging.getLogger("tokenmill")

_KEYS = ("id", "session_id", "rid", "offset", "replace", "drop_previous_output")


class Tokenizer(Protocol):
    """What sessions need of a tokenizer."""

    bos_token_id: int | None

    def decode_batch(self, token_ids: Sequence[Sequence[int]], *, skip_special_tokens: bool) -> list[str]: ...


class Continuation:
    """What a call continues, and what becomes of its results; for a call without a session, nothing.

    The methods are called in the order in which they stand here; `drop` at any time, by any thread.
    """

    def place(self, place: str) -> str:
        """How messages name the whole prompt that is made of the tokenized one at `place`."""
        return place

    @property
    def has_context(self) -> bool:
        """Whether there are tokens before the prompt, which may then be empty."""
        return False

    def join(self, row: IntArray) -> IntArray:
        """The whole prompt."""
        return row

    def start(self, rows: Sequence[Row]) -> Sequence[str]:
        """Note that these requests run; gives the names of requests that are obsolete now."""
        return ()

    def finish(self, row: Row) -> None:
        """Take in what a request came to."""

    def drop(self) -> None:
        """Nobody waits for what has not finished."""


NO_SESSION = Continuation()


@dataclass(eq=False, slots=True)
class _Turn:
    """One request of a session: the first `num_inherited` tokens up to its parent, its prompt, its output."""

    parent: _Turn | None
    num_inherited: int
    prompt_ids: IntArray  # without what is inherited
    num_characters: int  # of its own prompt and output
    name: str  # under which the core knows it
    call: _SessionCall | None  # that waits for it; None: finished
    said: Callable[[], Sequence[int]]  # while it runs: the output that its caller was given so far
    output_ids: IntArray = field(default_factory=lambda: np.empty(0, np.int32))

    def prompt(self) -> IntArray:
        """All that it saw."""
        pieces: list[IntArray] = [self.prompt_ids]
        count, turn = self.num_inherited, self.parent
        while turn is not None and count:
            own = np.concatenate((turn.prompt_ids, turn.output_ids))
            pieces.append(own[: max(0, count - turn.num_inherited)])
            count = min(count, turn.num_inherited)
            turn = turn.parent
        return np.concatenate(pieces[::-1])

    def end(self, output_ids: IntArray, num_characters: int) -> None:
        """It said this, and is done."""
        self.call, self.said = None, tuple
        self.output_ids = output_ids
        self.num_characters += num_characters


@dataclass(frozen=True, slots=True)
class _Wish:
    """The keys of `session_params`, checked."""

    session_id: str
    rid: str | None
    offset: int
    replace: bool
    drop_previous_output: bool


class _Session:
    """The turns of one conversation, in the order in which they began; the lock of `Sessions` guards them."""

    def __init__(self, session_id: str, capacity: int, *, streaming: bool, timeout: float | None) -> None:
        self.id = session_id
        self.capacity = capacity
        self.streaming = streaming
        self.timeout = timeout
        self.used_seconds = 0.0  # when it was last used
        self.turns: dict[str, _Turn] = {}

    @property
    def latest(self) -> _Turn | None:
        """The finished turn that began last."""
        return next((turn for turn in reversed(self.turns.values()) if turn.call is None), None)

    @property
    def is_running(self) -> bool:
        return any(turn.call is not None for turn in self.turns.values())

    def forget_dropped(self) -> None:
        """Forget turns that nobody waits for any more."""
        self.turns = {
            rid: turn for rid, turn in self.turns.items() if turn.call is None or not turn.call.is_dropped
        }

    def without_children(self, parent: _Turn | None) -> dict[str, _Turn]:
        """The turns that do not descend from `parent`; of no parent, all do."""
        gone: set[_Turn | None] = {parent}
        kept = {}
        for rid, turn in self.turns.items():  # children stand behind their parents
            if parent is None or turn.parent in gone:
                gone.add(turn)
            else:
                kept[rid] = turn
        return kept

    def parent_for(self, wish: _Wish) -> _Turn | None:
        """The turn that is continued; None for a beginning."""
        if wish.rid is None:
            return None if wish.replace else self.latest
        turn = self.turns.get(wish.rid)
        if turn is None:
            raise InvalidArgument(
                f"session {self.id!r} has no turn {wish.rid!r}; pass the meta_info['id'] of a result of this "
                "session (turns that were aborted or replaced are forgotten), or leave rid out for the latest"
            )
        if turn.call is not None and not wish.replace:
            raise InvalidArgument(
                f"turn {wish.rid!r} of session {self.id!r} has not finished; wait for its result before "
                "you continue it, or end it with session_params['replace']"
            )
        return turn

    def check_streaming(self, wish: _Wish) -> None:
        """A streaming session is one line of turns; raise for what would branch it or cut it."""
        for key in ("replace", "offset", "drop_previous_output"):
            if getattr(wish, key):
                raise InvalidArgument(
                    f"session_params[{key!r}] is not possible in the streaming session {self.id!r}, which "
                    "only appends; leave it out, or open the session with streaming=False"
                )
        if self.is_running:
            raise self.busy()
        if wish.rid is not None and self.turns.get(wish.rid) not in (None, self.latest):
            raise InvalidArgument(
                f"turn {wish.rid!r} is not the latest of the streaming session {self.id!r}; leave rid out"
            )

    def busy(self) -> InvalidArgument:
        """The error for a second request of a streaming session."""
        return InvalidArgument(
            f"the streaming session {self.id!r} takes one request at a time; wait for the result of the "
            "last one, or open the session with streaming=False"
        )

    def check_room(self, kept: Mapping[str, _Turn], num_new: int) -> None:
        """Raise if so many characters do not fit beside the turns that are kept."""
        num_kept = sum(turn.num_characters for turn in kept.values())
        if num_kept + num_new > self.capacity:
            raise InvalidArgument(
                f"session {self.id!r} keeps at most {brief(self.capacity)} characters (capacity_of_str_len); "
                f"it has {num_kept}, and this call would add {num_new}; start over with "
                "session_params['replace'], or open a session with a larger capacity_of_str_len"
            )


class Sessions:
    """All sessions of an engine. Every method may be called from any thread."""

    def __init__(self, tokenizer: Tokenizer | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Without a tokenizer a token counts as one character; `clock` gives seconds."""
        self._tokenizer = tokenizer
        self._clock = clock
        self._lock = threading.Lock()
        self._open: dict[str, _Session] = {}
        # When to look whether a session is idle: (seconds, tie-breaker, session). One that was closed is
        # not kept until then.
        self._looks: list[tuple[float, int, weakref.ref[_Session]]] = []
        self._ties = itertools.count()

    def open(
        self, capacity_of_str_len: Any, session_id: Any = None, *, streaming: Any = False, timeout: Any = None
    ) -> str | None:
        """The id of a new session, or None if a session has this id; see `Engine.open_session`."""
        remedy = "; the most characters of text that the session may hold"
        capacity = check_whole("capacity_of_str_len", capacity_of_str_len, minimum=1, remedy=remedy)
        chosen = uuid.uuid4().hex if session_id is None else check_text("session_id", session_id)
        if not chosen:
            raise InvalidArgument("session_id is empty; leave it out for a random id")
        seconds = None
        if timeout is not None:
            seconds = check_real("timeout", timeout, minimum=0, above=True, remedy="; seconds, or None")
        session = _Session(chosen, capacity, streaming=check_flag("streaming", streaming), timeout=seconds)
        with self._lock:
            self._close_idle()
            is_new = self._open.setdefault(chosen, session) is session
            if is_new:
                self._touch(session)
            if is_new and seconds is not None:
                self._look_again(session, session.used_seconds + seconds)
        if not is_new:
            logger.warning("session %r is open already", chosen)
        return chosen if is_new else None

    def close(self, session_id: Any) -> None:
        """Forget a session; its requests go on and are not recorded. An unknown id is a warning."""
        chosen = check_text("session_id", session_id)
        with self._lock:
            self._close_idle()
            closed = self._open.pop(chosen, None)
        if closed is None:
            logger.warning("there is no session %r to close", chosen)

    def continuation(self, session_params: Any, session_id: Any = None) -> Continuation:
        """What a call with these arguments continues. Raises `InvalidArgument` if it cannot."""
        if session_params is None:
            return NO_SESSION
        if session_id is not None:
            raise InvalidArgument(
                "session_id and session_params are both given; session_params continues a session, and "
                "session_id is a hint: leave it out"
            )
        with reading("session_params"):
            wish = _read_wish(session_params)
        with self._lock:
            self._close_idle()
            session = self._find(wish.session_id)
            session.forget_dropped()
            if session.streaming:
                session.check_streaming(wish)
            parent = session.parent_for(wish)
        return _SessionCall(self, session, parent, wish)

    # ── for the calls ──

    def begin(self, call: _SessionCall, turns: Mapping[str, _Turn]) -> list[str]:
        """Add the turns of a call, all or none; gives the names of running ones that it replaces."""
        session, parent = call.session, call.parent
        runs = parent is not None and parent.call is not None
        num_said = self.count_characters(call.parent_output) if runs else 0
        with self._lock:
            if self._find(session.id) is not session:
                raise _unknown(session.id)
            session.forget_dropped()
            if session.streaming and (len(turns) > 1 or session.is_running or session.latest is not parent):
                raise session.busy()
            if parent is not None and parent not in session.turns.values():
                raise InvalidArgument(f"session {session.id!r} was changed meanwhile by another call; repeat")
            kept = session.without_children(parent) if call.replaces else session.turns
            num_new = sum(turn.num_characters for turn in turns.values())
            session.check_room(kept, num_new + num_said)
            for rid in turns:
                if rid in kept:
                    raise InvalidArgument(
                        f"rid {rid!r} is a turn of session {session.id!r} already; give every turn its own"
                    )
            replaced = [turn for rid, turn in session.turns.items() if rid not in kept]
            obsolete = [turn.name for turn in replaced if turn.call is not None]
            if parent is not None and parent.call is not None:
                obsolete.append(parent.name)
                parent.end(call.parent_output, num_said)
            session.turns = {**kept, **turns}
            self._touch(session)
        return obsolete

    def end(self, call: _SessionCall, row: Row, output_ids: IntArray | None) -> None:
        """A turn of a call has finished, or, without output, was aborted and is forgotten."""
        num_characters = 0 if output_ids is None else self.count_characters(output_ids)
        session = call.session
        with self._lock:
            turn = session.turns.get(row.request.id)
            if turn is None or turn.call is not call or turn.name != row.name:
                return  # replaced meanwhile, or a row that never ran
            if output_ids is None:
                del session.turns[row.request.id]
            else:
                turn.end(output_ids, num_characters)
            self._touch(session)

    def count_characters(self, token_ids: IntArray) -> int:
        """How much of a session's capacity these tokens take."""
        if self._tokenizer is None:
            return len(token_ids)
        [text] = self._tokenizer.decode_batch([token_ids.tolist()], skip_special_tokens=False)
        return len(text)

    def without_bos(self, token_ids: IntArray) -> IntArray:
        """Tokens that are to stand behind others: a token that begins a text is removed."""
        bos = None if self._tokenizer is None else self._tokenizer.bos_token_id
        return token_ids[1:] if bos is not None and token_ids[0] == bos else token_ids

    # ── with the lock held ──

    def _find(self, session_id: str) -> _Session:
        session = self._open.get(session_id)
        if session is None:
            raise _unknown(session_id)
        return session

    def _touch(self, session: _Session) -> None:
        session.used_seconds = self._clock()

    def _look_again(self, session: _Session, seconds: float) -> None:
        heapq.heappush(self._looks, (seconds, next(self._ties), weakref.ref(session)))

    def _close_idle(self) -> None:
        """Close the sessions that were idle for longer than their timeout."""
        now = self._clock()
        while self._looks and self._looks[0][0] <= now:
            session = heapq.heappop(self._looks)[2]()
            if session is None or session.timeout is None or self._open.get(session.id) is not session:
                continue  # closed
            session.forget_dropped()
            if session.is_running:
                self._touch(session)
            if session.used_seconds + session.timeout <= now:
                del self._open[session.id]
            else:
                self._look_again(session, session.used_seconds + session.timeout)


class _SessionCall(Continuation):
    """A call in a session: one or several turns that continue the same one."""

    def __init__(self, sessions: Sessions, session: _Session, parent: _Turn | None, wish: _Wish) -> None:
        self.session = session
        self.parent = parent
        self.replaces = wish.replace
        self.is_dropped = False
        self._sessions = sessions
        self.parent_output = _output_of(parent)
        self._inherited = _inherited(parent, self.parent_output, wish)

    def place(self, place: str) -> str:
        return f"{place} with its context in session {self.session.id!r}" if self.has_context else place

    @property
    def has_context(self) -> bool:
        return self._inherited.size > 0

    def join(self, row: IntArray) -> IntArray:
        if self.has_context and row.size:
            row = self._sessions.without_bos(row)
        return np.concatenate((self._inherited, row))

    def start(self, rows: Sequence[Row]) -> Sequence[str]:
        return self._sessions.begin(self, {row.request.id: turn for row, turn in self._turns(rows)})

    def _turns(self, rows: Sequence[Row]) -> Iterator[tuple[Row, _Turn]]:
        prompt_ids, own, num_characters = None, np.empty(0, np.int32), 0
        for row in rows:
            if row.request.prompt_ids is not prompt_ids:  # else it is another sample of the same prompt
                prompt_ids = row.request.prompt_ids
                own = prompt_ids[len(self._inherited) :].copy()
                num_characters = self._sessions.count_characters(own)
            said = partial(getattr, row, "token_ids")
            yield row, _Turn(self.parent, len(self._inherited), own, num_characters, row.name, self, said)

    def finish(self, row: Row) -> None:
        is_answer = row.finish is not None and row.finish.kind != "abort"
        output_ids = np.asarray(row.token_ids, dtype=np.int32) if is_answer else None
        self._sessions.end(self, row, output_ids)

    def drop(self) -> None:
        # No lock: the garbage collector may call this at any time, also while a thread holds the lock.
        self.is_dropped = True


def _output_of(turn: _Turn | None) -> IntArray:
    """What a turn has said, or, while it runs, what its caller was given of that."""
    if turn is None:
        return np.empty(0, np.int32)
    return turn.output_ids if turn.call is None else np.array(list(turn.said()), dtype=np.int32)


def _inherited(parent: _Turn | None, output_ids: IntArray, wish: _Wish) -> IntArray:
    """The tokens that stand before the new prompt."""
    if parent is None:
        return np.empty(0, np.int32)
    prompt = parent.prompt()
    context = prompt if wish.drop_previous_output else np.concatenate((prompt, output_ids))
    return context[: wish.offset or None]


def _read_wish(value: Any) -> _Wish:
    if not isinstance(value, Mapping):
        raise WrongType(f"session_params must be a dict for the whole call, got {show(value)}")
    for key in value:
        if key not in _KEYS:
            hint = did_you_mean(key, _KEYS) if isinstance(key, str) else ""
            raise UnknownArgument(f"session_params has no key {brief(key)}.{hint}")
    given = {key: item for key, item in value.items() if item is not None}
    if ("id" in given) == ("session_id" in given):
        has = "has both id and session_id" if "id" in given else "names no session"
        raise InvalidArgument(f"session_params {has}; give the id that open_session returned as 'id'")
    name = "id" if "id" in given else "session_id"
    rid = given.get("rid")
    return _Wish(
        check_text(f"session_params[{name!r}]", given[name]),
        None if rid is None else check_text("session_params['rid']", rid),
        check_whole("session_params['offset']", given.get("offset", 0), minimum=-(2**63)),
        check_flag("session_params['replace']", given.get("replace", False)),
        check_flag("session_params['drop_previous_output']", given.get("drop_previous_output", False)),
    )


def _unknown(session_id: str) -> InvalidArgument:
    return InvalidArgument(
        f"there is no session {session_id!r}: it was not opened, was closed, or was idle for longer than its "
        "timeout; use what open_session returned"
    )
