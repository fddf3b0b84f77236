"""The way of a step's results to the host, which nobody waits for until `result` is called."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from tokenmill.messages import FloatArray, IntArray, Logprobs, LongArray, StepPlan, StepResult
from tokenmill.runner.drawing import Sampled
from tokenmill.runner.eager import DrawnPart
from tokenmill.runner.insight import Shown
from tokenmill.sampling.logprobs import TokenLogprobs

Send = Callable[[torch.Tensor], torch.Tensor]


class Results:
    """Results of one step on their way."""

    def __init__(self, plan: StepPlan, parts: list[DrawnPart], device: torch.device) -> None:
        """Queue the copies; the tensors of `parts` may be overwritten by later steps."""
        self._plan = plan
        self._ready: torch.cuda.Event | None = None
        if device.type == "cpu":
            self._parts = parts
            return
        self._parts = [_sent(part, _to_pinned) for part in parts]
        self._ready = torch.cuda.Event()
        self._ready.record(torch.cuda.current_stream(device))

    def result(self) -> StepResult:
        """Wait for the step."""
        if self._ready is not None:
            self._ready.synchronize()
        plan, parts = self._plan, self._parts
        token_ids = np.full(len(plan.samples), -1, dtype=np.int32)
        drawn = [part for part in parts if part.sampled is not None]
        if drawn:
            token_ids[plan.samples] = np.concatenate([_tokens(part) for part in drawn])
        if not any(part.has_extras for part in parts):
            return StepResult(token_ids, logprobs=_logprobs(drawn))
        row_of_slot = {slot: row for row, slot in enumerate(plan.slots.tolist())}
        return StepResult(
            token_ids,
            logprobs=_logprobs(drawn),
            prompt_logprobs=tuple(
                (row_of_slot[slot], shown.wish.start + 1, _columns(shown.logprobs))
                for slot, shown in _shown(parts)
                if shown.logprobs is not None
            ),
            hidden_states=(
                *(
                    (row_of_slot[slot], shown.wish.start, _floats(shown.hidden_ND))
                    for slot, shown in _shown(parts)
                    if shown.hidden_ND is not None
                ),
                *(entry for part in drawn for entry in _drawing_hidden(part, row_of_slot)),
            ),
            failures=tuple(
                (row_of_slot[slot], message) for part in parts for slot, message in part.failures.items()
            ),
        )


def _to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _sent(part: DrawnPart, send: Send) -> DrawnPart:
    sampled = part.sampled
    if sampled is not None:
        sampled = _sent_sampled(sampled, send)
    return DrawnPart(
        part.plan,
        sampled,
        None if part.hidden_QD is None else send(part.hidden_QD),
        [
            Shown(
                shown.wish,
                _sent_logprobs(shown.logprobs, send),
                None if shown.hidden_ND is None else send(shown.hidden_ND),
            )
            for shown in part.shown
        ],
        part.failures,
        part.places,
    )


def _sent_sampled(sampled: Sampled, send: Send) -> Sampled:
    logprobs = _sent_logprobs(sampled.logprobs, send)
    # The tokens are among the columns of their log-probabilities.
    return Sampled(send(sampled.tokens_Q) if logprobs is None else logprobs.tokens_R, logprobs)


def _sent_logprobs(logprobs: TokenLogprobs | None, send: Send) -> TokenLogprobs | None:
    if logprobs is None:
        return None
    return TokenLogprobs(send(logprobs.packed_RC), logprobs.num_top)


# ── on the host ───────────────────────────────────────────────────────────────────────────────


def _tokens(part: DrawnPart) -> IntArray | LongArray:
    assert part.sampled is not None
    tokens: IntArray | LongArray = part.sampled.tokens_Q.numpy()
    return tokens if part.places is None else tokens[part.places]


def _logprobs(drawn: list[DrawnPart]) -> Logprobs | None:
    """Of all rows that draw; all parts are of the same widths."""
    found = [
        _columns(part.sampled.logprobs, part.places)
        for part in drawn
        if part.sampled is not None and part.sampled.logprobs is not None
    ]
    return found[0] if len(found) == 1 else Logprobs.joined(found) if found else None


def _columns(logprobs: TokenLogprobs, places: LongArray | None = None) -> Logprobs:
    if places is not None:
        logprobs = TokenLogprobs(logprobs.packed_RC[torch.from_numpy(places)], logprobs.num_top)
    return Logprobs(
        token_N=logprobs.token_R.numpy(),
        top_NK=logprobs.top_RK.numpy(),
        top_ids_NK=logprobs.top_ids_RK.numpy(),
        given_NI=logprobs.given_RI.numpy(),
    )


def _shown(parts: list[DrawnPart]) -> list[tuple[int, Shown]]:
    """(slot, what is shown of its prompt)"""
    return [(int(part.plan.slots[shown.wish.row]), shown) for part in parts for shown in part.shown]


def _drawing_hidden(part: DrawnPart, row_of_slot: dict[int, int]) -> list[tuple[int, int, FloatArray]]:
    """(row of the plan, position, hidden state [1, hidden]) of all rows that draw"""
    if part.hidden_QD is None:
        return []
    drawing = np.flatnonzero(part.plan.samples)
    last_positions = (part.plan.starts + part.plan.counts)[drawing] - 1
    hidden = _floats(part.hidden_QD)
    return [
        (row_of_slot[slot], position, hidden[index : index + 1])
        for index, (slot, position) in enumerate(
            zip(part.plan.slots[drawing].tolist(), last_positions.tolist(), strict=True)
        )
    ]


def _floats(hidden_ND: torch.Tensor | None) -> FloatArray:
    assert hidden_ND is not None
    return hidden_ND.to(torch.float32).numpy()
