"""Rows whose prompts are computed: chunks of them, for the tokens that a step has left."""

from __future__ import annotations

import numpy as np

from tokenmill.core.plan import PlanDraft
from tokenmill.core.policy import PriorityQueue, WaitingQueue
from tokenmill.core.request import NEVER_ADMITTED, Phase, RequestState, Rows
from tokenmill.kvcache import Cache, RowPages


class Prefilling:
    """The requests in such rows, in order.

    Between steps there is at most one whose prompt is not complete; others have their last chunk in a step of
    `Lane.PROMPTS` that was not taken in yet.
    """

    def __init__(self, queue: WaitingQueue | PriorityQueue, rows: Rows, cache: Cache) -> None:
        self._queue = queue
        self._rows = rows
        self._cache = cache
        self._num_admitted = 0
        self.states: list[RequestState] = []

    def refresh(self) -> None:
        """Forget those whose prompt is complete."""
        self.states = [state for state in self.states if state.phase is Phase.PREFILL]

    def schedule(self, draft: PlanDraft, budget: int) -> list[RequestState]:
        """Spend the budget on the row left over from the last step, then on new rows.

        Returns the rows that have nothing left to prefill.
        """
        complete: list[RequestState] = []
        for state in self.states:
            budget -= self._prefill(draft, state, budget, complete)
        while budget > 0 and self._rows.num_free and len(self._queue):
            pages = self._try_pages(self._queue.peek())
            if pages is None:
                break
            state = self._queue.pop()
            self._enter(draft, state, pages)
            budget -= self._prefill(draft, state, budget, complete)
        return complete

    def _try_pages(self, state: RequestState) -> RowPages | None:
        """Pages for all known tokens of a waiting request; None if it has to wait.

        One page must be left for each running row, which would take them back at once. So a request that was
        preempted for another one in this step does not come back in it.
        """
        cache, headroom = self._cache, self._rows.num_used
        if not state.is_ready or cache.num_available_columns <= headroom:
            return None
        state.load_tokens()
        pages = cache.match(state.reusable_tokens.tobytes(), namespace=state.request.cache_namespace)
        missing = cache.columns(len(state.tokens)) - pages.num_columns
        if missing > cache.num_available_columns - headroom:
            cache.release(pages)
            return None
        if state.age == NEVER_ADMITTED:
            state.cached_tokens = pages.num_columns * cache.page_size
        cache.reserve(pages, len(state.tokens))
        return pages

    def _enter(self, draft: PlanDraft, state: RequestState, pages: RowPages) -> None:
        """Give a slot to a request that has pages."""
        if state.age == NEVER_ADMITTED:
            state.admit(age=self._num_admitted)
            self._num_admitted += 1
        state.pages = pages
        state.phase = Phase.PREFILL
        state.slot = self._rows.enter(
            computed=pages.num_shared * self._cache.page_size,
            room=pages.num_columns * self._cache.page_size,
            end=state.limit - 1,
        )
        self.states.append(state)
        draft.add_row(state, pages)

    def _prefill(
        self, draft: PlanDraft, state: RequestState, budget: int, complete: list[RequestState]
    ) -> int:
        """Compute the next chunk of a row; returns its length.

        The chunk's full pages are committed at once, so that rows admitted after it share them even in the
        same step: every layer stores the keys and values of all rows of a step before any row reads.
        """
        start = int(self._rows.computed[state.slot])
        if budget <= 0 or start == len(state.tokens):
            return 0
        end = min(start + budget, len(state.tokens))
        is_last = end == len(state.tokens)
        chunk = np.array(state.tokens[start:end], dtype=np.int32)
        draft.add_prefill(state, start, chunk, samples=is_last and state.draws)
        self._rows.computed[state.slot] = end
        assert state.pages is not None
        self._cache.commit(state.pages, state.tokens, num_tokens=end)
        if is_last:
            complete.append(state)
        return end - start

    def check_invariants(self, *, are_launched: bool) -> None:
        """Assert that at most one prompt is incomplete, and no other is here unless some `are_launched`."""
        begun = [state for state in self.states if self._rows.computed[state.slot] < len(state.tokens)]
        assert len(begun) <= 1
        assert are_launched or begun == self.states
