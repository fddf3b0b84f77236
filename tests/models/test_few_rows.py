"""Steps of a few rows, as a GPU computes them: the fused kernels of a layer against plain operations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.cpu

PROMPTS = [[1, 5, 9, 2, 7], [3, 8], [11, 4, 6]]


@pytest.fixture
def streamed_on_cpu(triton_device: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Calling it lets products choose on a CPU, in the interpreter, what they choose on a GPU."""
    if triton_device != "cpu":
        pytest.skip("the GPU tests compare whole engines")
    monkeypatch.setattr("tokenmill.models.loader.can_pack", lambda dtype, device: False)

    def stream() -> None:
        monkeypatch.setattr("tokenmill.kernels.linear._is_streamed", lambda x, weight: len(x) <= 2)

    return stream


@pytest.mark.parametrize(("family", "num_rows"), [("llama", 2), ("qwen2", 1), ("qwen2", 3), ("qwen3", 1)])
def test_fused_layers_give_the_logits_of_plain_ones(
    save_checkpoint: Callable[..., tuple[Path, Any]],
    open_engine: Callable[..., Any],
    streamed_on_cpu: Callable[[], None],
    family: str,
    num_rows: int,
) -> None:
    folder, _ = save_checkpoint(family, num_hidden_layers=2)
    plain, fused = open_engine(folder, num_rows=num_rows), open_engine(folder, num_rows=num_rows)
    for engine in (plain, fused):
        engine.step(PROMPTS[:num_rows])
    expected = plain.step([[5]] * num_rows)
    streamed_on_cpu()
    for ours, theirs in zip(fused.step([[5]] * num_rows), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
