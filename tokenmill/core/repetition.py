"""Notices that an output goes round in circles: its last tokens are one cycle, over and over.

Owned by the `RequestState` of a request that asked for it; sees each token once, in order.
"""

from __future__ import annotations

from tokenmill.messages import Finish

# Longest cycle, and fewest tokens that all of its repetitions have together: a ruled line is no runaway.
MAX_PERIOD = 128
MIN_TOKENS = 16


class RepetitionGuard:
    """Ends an output whose last tokens are a cycle of 1 to `MAX_PERIOD` tokens, `count` times in a row.

    All repetitions together have at least `MIN_TOKENS` tokens, and the output at least `min_new_tokens`.
    Where several cycles fit, the shortest counts. A token costs as much as it has equals among the last ones.
    """

    def __init__(self, count: int, *, min_new_tokens: int = 0) -> None:
        self._min_new_tokens = min_new_tokens
        # period -> how many last tokens must be equal to the token one period before them
        self._needed = [
            (max(count, -(-MIN_TOKENS // period)) - 1) * period for period in range(1, MAX_PERIOD + 1)
        ]
        self._runs: dict[int, int] = {}  # period -> how many are; 0 where none is named
        self._places: dict[int, list[int]] = {}  # token -> where it stood, the last times
        self._num_tokens = 0

    def push(self, token: int) -> Finish | None:
        """The next token of the output; the end of it, if it has repeated itself often enough."""
        place = self._num_tokens
        self._num_tokens += 1
        places = self._places.setdefault(token, [])
        runs: dict[int, int] = {}
        finish: Finish | None = None
        for earlier in reversed(places):
            period = place - earlier
            if period > MAX_PERIOD:
                break
            run = runs[period] = self._runs.get(period, 0) + 1
            if finish is None and run >= self._needed[period - 1]:
                finish = Finish("repetition", period=period, count=run // period + 1)
        self._runs = runs
        places.append(place)
        if len(places) > 2 * MAX_PERIOD:
            del places[:-MAX_PERIOD]
        return finish if self._num_tokens >= self._min_new_tokens else None
