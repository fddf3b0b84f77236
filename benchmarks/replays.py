"""How long the device takes for a captured graph."""

from __future__ import annotations

import statistics
from typing import Any

import torch


def median_milliseconds(graph: Any, repeats: int) -> float:
    """Of so many replays, after one that is not counted."""
    graph.replay()
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)
