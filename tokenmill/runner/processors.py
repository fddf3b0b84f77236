"""What only the host can do to logits between the forward pass and the draw: masks and custom processors.

Rows that share a processor share its call. Where a call fails, its rows are tried one by one, so that only
those fail whose own call does.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from typing import Any

import numpy as np
import torch

from tokenmill.errors import InvalidArgument, told
from tokenmill.messages import Failure, IntArray, TokenMasks
from tokenmill.runner.batch import Rows
from tokenmill.runner.drawing import Changes
from tokenmill.sampling import mask_stops
from tokenmill.sampling.masks import apply_masks

_log = logging.getLogger("tokenmill")


class HostChanges(Changes):
    """The changes of one step's rows that draw, given by their slots.

    `failures` has an entry for each slot whose processor failed; what it draws is void.
    """

    def __init__(
        self,
        rows: Rows,
        slots: IntArray,
        *,
        masks: TokenMasks | None,
        masked_stop_ids_QK: torch.Tensor | None,
        failures: dict[int, Failure],
    ) -> None:
        self._rows = rows
        self._slots = slots
        self._masks = masks
        self._masked_stop_ids_QK = masked_stop_ids_QK
        self._failures = failures

    def mask(self, logits_QV: torch.Tensor) -> torch.Tensor:
        """Without stop tokens that are not allowed yet, and without what a grammar forbids."""
        if self._masked_stop_ids_QK is not None:
            every_row = torch.ones(len(logits_QV), dtype=torch.bool, device=logits_QV.device)
            logits_QV = mask_stops(logits_QV.float(), self._masked_stop_ids_QK, every_row)
        if self._masks is not None:
            row_of_slot = {slot: row for row, slot in enumerate(self._slots.tolist())}
            chosen = [index for index, slot in enumerate(self._masks.slots.tolist()) if slot in row_of_slot]
            if chosen:
                rows = np.array([row_of_slot[int(self._masks.slots[index])] for index in chosen])
                bits = self._masks.bits if len(chosen) == len(self._masks.slots) else self._masks.bits[chosen]
                apply_masks(logits_QV, self._rows.to_device(rows), self._rows.to_device(bits))
        return logits_QV

    def process(self, logits_QV: torch.Tensor) -> torch.Tensor:
        """As the rows' processors want them; each gets the logits of its rows as float32.

        What must not be drawn they cannot bring back.
        """
        groups: dict[int, list[int]] = defaultdict(list)
        processors: dict[int, Any] = {}
        for row, slot in enumerate(self._slots.tolist()):
            extras = self._rows.extras.get(slot)
            if extras is not None and extras.processor is not None:
                groups[id(extras.processor)].append(row)
                processors[id(extras.processor)] = extras.processor
        if not groups:
            return logits_QV
        logits_QV = logits_QV.float()
        for key, rows in groups.items():
            self._call(processors[key], logits_QV, rows)
        return self.mask(logits_QV)

    def _call(self, processor: Any, logits_QV: torch.Tensor, rows: list[int]) -> None:
        try:
            logits_QV[rows] = self._processed(processor, logits_QV, rows)
        except BaseException as error:  # sys.exit() in a processor is no reason to end the engine
            if len(rows) > 1:
                for row in rows:
                    self._call(processor, logits_QV, [row])
                return
            slot = int(self._slots[rows[0]])
            if isinstance(error, InvalidArgument):  # of the request's custom_params, say
                self._failures[slot] = Failure(str(error), error.error_type, error.status_code)
                return
            _log.warning("a logit processor failed", exc_info=True)
            self._failures[slot] = Failure(f"its logit processor failed: {told(error)}")

    def _processed(self, processor: Any, logits_QV: torch.Tensor, rows: list[int]) -> torch.Tensor:
        params = []
        for row in rows:
            extras = self._rows.extras.get(int(self._slots[row]))
            assert extras is not None
            params.append(extras.processor_params)
        given = logits_QV[rows]
        expected = given.shape  # what it is given it may also change in place
        made = processor(given, params)
        if not isinstance(made, torch.Tensor) or made.shape != expected:
            shape = tuple(made.shape) if isinstance(made, torch.Tensor) else type(made).__name__
            raise TypeError(f"it must return logits of shape {tuple(expected)}, got {shape}")
        return made.to(logits_QV)
