"""How many pages the pool gets of what is free."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenmill.config import EngineConfig
from tokenmill.errors import InvalidArgument
from tokenmill.models import read_spec
from tokenmill.runner import memory
from tokenmill.runner.hardware import Placement

pytestmark = pytest.mark.cpu

MB = 10**6
TOTAL = 1000 * MB
PAGE_BYTES = 16 * 3 * 2 * 2 * 16 * 2  # tokens, layers, keys and values, heads, head size, bytes of bfloat16


def num_pages(
    make_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    *,
    free: int,
    step_bytes: int = 0,
    **arguments: Any,
) -> int:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, TOTAL))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    config = EngineConfig(model_path=str(make_model()), **arguments)
    placement = Placement(
        device=torch.device("cuda", 0),
        device_name="",
        dtype=torch.bfloat16,
        attention_backend="triton",
        max_running_requests=10**6,
        max_step_tokens=512,
        steps_in_flight=1,
        cuda_graphs=True,
        deterministic=False,
    )
    return memory._num_pages(
        read_spec(Path(config.model_path)), step_bytes, config=config, placement=placement
    )


@pytest.mark.parametrize("free", [900 * MB, 90 * MB, 9 * MB])
def test_the_pool_takes_what_is_free_less_a_guard(
    make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    """However little it is: a second engine on the device has only what the first one left."""
    taken = PAGE_BYTES * num_pages(make_model, monkeypatch, free=free, step_bytes=free // 10)
    assert 0.75 * free <= taken <= 0.9 * free


def test_a_share_of_the_device_counts_what_is_in_use(
    make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = PAGE_BYTES * num_pages(
        make_model, monkeypatch, free=700 * MB, step_bytes=50 * MB, mem_fraction_static=0.6
    )
    assert 0 <= (600 - 300 - 50) * MB - taken < PAGE_BYTES


def test_a_device_without_room_for_a_page_is_refused(
    make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidArgument, match="no memory is left for keys and values"):
        num_pages(make_model, monkeypatch, free=MB, step_bytes=2 * MB)


def test_a_number_of_tokens_is_taken_as_it_is(
    make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert num_pages(make_model, monkeypatch, free=0, max_total_tokens=100) == 7
