"""The way of a step's results to the host, which nobody waits for until they are collected."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from tokenmill.messages import Failure, FloatArray, IntArray, Logprobs, LongArray, StepPlan, StepResult
from tokenmill.runner.drawing import Sampled
from tokenmill.runner.eager import DrawnPart
from tokenmill.runner.insight import Shown
from tokenmill.runner.quarantine import Losses
from tokenmill.sampling.columns import NOT_A_NUMBER
from tokenmill.sampling.logprobs import TokenLogprobs

Send = Callable[[torch.Tensor], torch.Tensor]

_NOT_A_NUMBER = Failure(
    "some logits are not numbers (NaN), so no token can be drawn: the model, or a custom_logit_processor, "
    "computed them so"
)
_NOTHING_ALLOWED = Failure(
    "every logit is -inf, so no token can be drawn: the model, a bias or a custom_logit_processor forbids "
    "all tokens that a grammar and min_new_tokens leave"
)


class Results:
    """Results of one step on their way."""

    def __init__(self, plan: StepPlan, parts: list[DrawnPart], losses: Losses, device: torch.device) -> None:
        """Queue the copies; the tensors of `parts` may be overwritten by later steps."""
        self.plan = plan
        self.losses = losses
        self._ready: torch.cuda.Event | None = None
        if device.type == "cpu":
            self._parts = parts
            return
        self._parts = [_sent(part, _to_pinned) for part in parts]
        self._ready = torch.cuda.Event()
        self._ready.record(torch.cuda.current_stream(device))

    @property
    def is_done(self) -> bool:
        """Whether the step is done, so that nobody has to wait for it."""
        return self._ready is None or self._ready.query()

    def wait(self) -> float:
        """Return when the step is done; how many seconds this call has waited for that."""
        began = time.perf_counter()
        if self._ready is not None:
            self._ready.synchronize()
        return time.perf_counter() - began

    def result(self) -> StepResult:
        """What the step made, once it is done."""
        plan = self.plan
        drawn = [part for part in self._parts if part.sampled is not None]
        tokens = np.concatenate([_tokens(part) for part in drawn]) if drawn else np.zeros(0, np.int32)
        token_ids = np.full(len(plan.samples), -1, dtype=np.int32)
        if self.losses or any(part.has_extras for part in self._parts) or (tokens < 0).any():
            return self._uncommon_result(token_ids, tokens, drawn)
        token_ids[plan.samples] = tokens
        return StepResult(token_ids, logprobs=_logprobs(drawn))

    def _uncommon_result(
        self, token_ids: IntArray, tokens: IntArray | LongArray, drawn: list[DrawnPart]
    ) -> StepResult:
        """With what rows are shown, and with rows that failed or are missing."""
        plan, parts, losses = self.plan, self._parts, self.losses
        row_of_slot = {slot: row for row, slot in enumerate(plan.slots.tolist())}
        slots = [slot for part in drawn for slot in part.plan.slots[part.plan.samples].tolist()]
        rows = [row_of_slot[slot] for slot in slots]
        token_ids[rows] = tokens
        failures = {
            slots[index]: _NOT_A_NUMBER if tokens[index] == NOT_A_NUMBER else _NOTHING_ALLOWED
            for index in np.flatnonzero(tokens < 0).tolist()
        }
        for part in parts:
            failures |= part.failures
        failures |= losses.failures
        logprobs = _logprobs(drawn)
        if logprobs is not None and len(rows) < plan.samples.sum():
            places = np.zeros(len(plan.samples), dtype=np.int64)  # rows that are missing repeat some other
            places[rows] = np.arange(len(rows))
            logprobs = logprobs.at(places[plan.samples])
        return StepResult(
            token_ids,
            logprobs=logprobs,
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
            failures=tuple((row_of_slot[slot], failure) for slot, failure in failures.items()),
            postponed=tuple(sorted(row_of_slot[slot] for slot in losses.postponed)),
            lost_pages=tuple(sorted(losses.pages)),
        )


def _to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:  # the device writes it there by itself
        return tensor
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


def _columns(logprobs: TokenLogprobs, places: LongArray | slice | None = None) -> Logprobs:
    if places is not None:
        logprobs = TokenLogprobs(torch.from_numpy(logprobs.packed_RC.numpy()[places]), logprobs.num_top)
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
