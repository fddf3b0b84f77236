"""How many tokens of prompts a step computes beside rows that decode."""

from __future__ import annotations

from tokenmill.core.plan import SchedulerLimits
from tokenmill.core.policy import PriorityQueue, WaitingQueue
from tokenmill.core.request import RequestState, Rows
from tokenmill.messages import IntArray


def prompt_budget(
    limits: SchedulerLimits,
    rows: Rows,
    decode_slots: IntArray,
    prefilling: list[RequestState],
    queue: WaitingQueue | PriorityQueue,
) -> int:
    """Tokens of prompts for the next step, beside the rows in these slots, as many as there is room for.

    While some of them may run for longer than the request whose prompt is next, that prompt need not hurry:
    in small portions prompts share more steps with rows that decode, and a weight that is read serves both.
    """
    num_decodes, paced = len(decode_slots), limits.paced_tokens
    budget = max(0, limits.max_step_tokens - num_decodes)
    if paced is None or budget <= paced or not num_decodes:
        return budget
    if prefilling:
        prompt = prefilling[0]
    elif rows.num_free and len(queue):
        prompt = queue.peek()
    else:
        return budget
    draws_left = int((rows.end[decode_slots] - rows.computed[decode_slots]).max())
    return paced if draws_left > prompt.limit - prompt.total else budget
