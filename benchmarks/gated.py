"""The gated product of feed-forward layers, by the number of rows: our tiles beside cuBLAS and an activation.

    python benchmarks/gated.py --models Llama-3.1-8B Qwen3-0.6B --rows 256 1024 8192

`cuBLAS` is the product alone, whose two halves are written, `and activation` with the kernel that reads them;
`tiles` are those of `kernels/hopper_gated.py`, the rate is of the faster ones, and "*" marks those that
`kernels/linear.py` chooses. Calls of several weights in turn, captured and replayed; the best of some runs.
"""

from __future__ import annotations

from collections.abc import Callable

import more_models
import torch
import torch.nn.functional as F
from linear import captured, milliseconds

from tokenmill.kernels import hopper_gated
from tokenmill.kernels.activation import gated_silu
from tokenmill.kernels.spare_rows import empty_rows
from tokenmill.kernels.triton_attention import num_processors

DEVICE = torch.device("cuda")
WEIGHTS = 4
ROWS = (256, 512, 768, 1024, 1536, 2048, 4096, 8192)
RUNS = 2

Call = Callable[[torch.Tensor], torch.Tensor]


def microseconds(calls: dict[str, Call], weights: list[torch.Tensor]) -> dict[str, float]:
    """Of one call each; they take turns, for a hot device is a slow one."""

    def step(call: Call) -> torch.Tensor:
        return [call(weight) for weight in weights][-1]

    graphs = {name: captured(step, {"call": call})[0] for name, call in calls.items()}
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(RUNS):
        for name, graph in graphs.items():
            best[name] = min(best[name], 1e3 * milliseconds(graph) / len(weights))
    return best


def measure(name: str, rows: int, weights: list[torch.Tensor]) -> None:
    """Print one line."""
    num_outputs, size = len(weights[0]) // 2, weights[0].shape[1]
    x_NI = empty_rows(rows, size, dtype=torch.bfloat16, device=DEVICE).normal_()
    calls: dict[str, Call] = {
        "cuBLAS": lambda weight: F.linear(x_NI, weight),
        "and activation": lambda weight: gated_silu(F.linear(x_NI, weight)),
    }
    chosen = hopper_gated.choose_tiling(rows, size, num_outputs, num_processors(DEVICE))
    for tiling in hopper_gated.TILINGS:
        mark = "*" if tiling == chosen else ""
        calls[f"tiles of {tiling.outputs}{mark}"] = lambda weight, tiling=tiling: hopper_gated.product(
            x_NI, weight, tiling
        )
    times = microseconds(calls, weights)
    cells = [f"{title} {time:.1f}" for title, time in times.items()]
    ours = min(time for title, time in times.items() if title.startswith("tiles"))
    rate = 4 * rows * size * num_outputs / ours / 1e6
    print(f"{name:<22} {rows:>5}  " + "   ".join(cells) + f"   ({rate:.0f} TFLOP/s)", flush=True)


def main() -> None:
    options = more_models.parser_of_rows(__doc__, ROWS).parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; microseconds, bfloat16")
    for name in options.models:
        config = more_models.CONFIGS[name]
        shape = (2 * config["intermediate_size"], config["hidden_size"])
        weights = [
            torch.randn(shape, dtype=torch.bfloat16, device=DEVICE) * shape[1] ** -0.5 for _ in range(WEIGHTS)
        ]
        for rows in options.rows:
            measure(name, rows, weights)


if __name__ == "__main__":
    main()
