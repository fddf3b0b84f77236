"""The result of a step, sorted out: who was shown what, whose tokens count, who failed, who must begin anew.

Changes no books; what follows from it for rows, pages and queue is the scheduler's matter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tokenmill.core.logprob_ledger import LogprobLedger
from tokenmill.core.plan import Flight
from tokenmill.core.request import RequestState, note_first_tokens
from tokenmill.messages import Failure, Finish, StepResult


@dataclass(frozen=True, slots=True)
class Drawn:
    """The tokens of a step, and the requests whose prompt ended in it without a draw."""

    states: list[RequestState]
    tokens: list[int]
    prompts_only: list[RequestState]


def drawn(flight: Flight, result: StepResult, ledger: LogprobLedger) -> Drawn:
    """What a step drew, without postponed rows; its log-probabilities go into the ledger."""
    if result.postponed:
        flight, result = _without_postponed(flight, result)
    if result.logprobs is not None:
        ledger.add(flight.states, result.logprobs)
    note_first_tokens(flight.starting)
    tokens = result.token_ids[flight.samples].tolist()
    return Drawn(flight.states, tokens, flight.prompts_only)


def show_prompts(flight: Flight, result: StepResult) -> None:
    """Hand requests the log-probabilities of their prompts."""
    for row, position, logprobs in result.prompt_logprobs:
        if (extras := flight.state(row).extras) is not None:
            extras.show_prompt_logprobs(position, logprobs)


def show_hidden_states(flight: Flight, result: StepResult) -> None:
    """Hand requests their hidden states, of the prompt and of draws."""
    for row, position, hidden in result.hidden_states:
        if (extras := flight.state(row).extras) is not None:
            extras.show_hidden_states(position, hidden)


def failed(failure: Failure) -> Finish:
    """The end of a request whose row failed."""
    return Finish(
        "abort",
        message=failure.message,
        status_code=failure.status_code,
        error_type=failure.error_type,
    )


def _without_postponed(flight: Flight, result: StepResult) -> tuple[Flight, StepResult]:
    """As if the postponed rows had not been there; for what counts draw by draw."""
    gone = {id(flight.state(row)) for row in result.postponed}
    rows = np.flatnonzero(flight.samples)
    kept = np.flatnonzero(~np.isin(rows, result.postponed))
    samples = np.zeros_like(flight.samples)
    samples[rows[kept]] = True

    def staying(states: list[RequestState]) -> list[RequestState]:
        return [state for state in states if id(state) not in gone]

    flight = replace(
        flight,
        samples=samples,
        states=staying(flight.states),
        starting=staying(flight.starting),
        prompts_only=staying(flight.prompts_only),
    )
    logprobs = None if result.logprobs is None else result.logprobs.at(kept)
    return flight, replace(result, logprobs=logprobs)
