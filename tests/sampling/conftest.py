"""Columns for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from tokenmill.sampling import SamplingColumns

Numbers = float | Sequence[float] | torch.Tensor


@pytest.fixture(scope="session")
def make_columns() -> Callable[..., SamplingColumns]:
    """`make_columns(num_rows, temperature=…, top_k=…, …)`; a number stands for a whole column."""

    def column(numbers: Numbers, num_rows: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(numbers, dtype=dtype).expand(num_rows).clone()

    def make(
        num_rows: int,
        *,
        temperature: Numbers = 1.0,
        top_k: Numbers = -1,
        top_p: Numbers = 1.0,
        min_p: Numbers = 0.0,
        seed: Numbers = 0,
        position: Numbers = 0,
    ) -> SamplingColumns:
        return SamplingColumns(
            temperatures_R=column(temperature, num_rows, torch.float32),
            top_ks_R=column(top_k, num_rows, torch.int32),
            top_ps_R=column(top_p, num_rows, torch.float32),
            min_ps_R=column(min_p, num_rows, torch.float32),
            seeds_R=column(seed, num_rows, torch.int64),
            positions_R=column(position, num_rows, torch.int64),
        )

    return make
