"""How many tokens of prompts a step computes beside rows that decode."""

from __future__ import annotations

import itertools

from tokenmill.core.plan import SchedulerLimits
from tokenmill.core.policy import PriorityQueue, WaitingQueue
from tokenmill.core.request import RequestState, Rows
from tokenmill.messages import IntArray

_LOOKED_AT = 1024  # requests of the queue, at most


def prompt_budget(
    limits: SchedulerLimits,
    rows: Rows,
    decode_slots: IntArray,
    prefilling: list[RequestState],
    queue: WaitingQueue | PriorityQueue,
) -> int:
    """Tokens of prompts for the next step, beside the rows in these slots, as many as there is room for.

    While some of them may run for longer than any request whose prompt is to come, prompts need not hurry:
    in small portions they share more steps with rows that decode, and a weight that is read serves both.
    """
    num_decodes, paced = len(decode_slots), limits.paced_tokens
    budget = max(0, limits.max_step_tokens - num_decodes)
    if paced is None or budget <= paced or not num_decodes:
        return budget
    prompts = itertools.chain(prefilling, itertools.islice(queue, _LOOKED_AT))
    to_come = max((state.limit - state.total for state in prompts), default=0)
    draws_left = int((rows.end[decode_slots] - rows.computed[decode_slots]).max())
    return paced if draws_left > to_come else budget
