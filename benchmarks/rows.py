"""What cuBLAS takes for the products of a model's layer, by the number of rows, in microseconds.

    python benchmarks/rows.py --models Llama-3.1-8B Qwen3-14B --rows 416 448 480 512

"!" marks numbers with which it takes over 5 % longer than with more rows. Calls of several weights in turn,
captured and replayed.
"""

from __future__ import annotations

import more_models
import torch
import torch.nn.functional as F
from linear import captured, milliseconds

DEVICE = torch.device("cuda")
ROWS = (256, 288, 320, 352, 384, 416, 448, 480, 512, 576, 640, 704, 768, 832, 896, 960, 1024)
WEIGHT_BYTES = 250_000_000  # of all copies of a weight: more than the caches hold
MARKED = 1.05


def weights_of(name: str) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of each product."""
    config = more_models.CONFIGS[name]
    hidden, inner, heads = (
        config[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    head_dim = config.get("head_dim") or hidden // heads
    return {
        "gate and up": (2 * inner, hidden),
        "down": (hidden, inner),
        "output": (hidden, heads * head_dim),
        "queries, keys, values": ((heads + 2 * config["num_key_value_heads"]) * head_dim, hidden),
    }


def microseconds(rows: int, weights: list[torch.Tensor]) -> float:
    """Of one product."""
    x_NI = torch.randn(rows, weights[0].shape[1], dtype=torch.bfloat16, device=DEVICE)
    graph, _ = captured(lambda: [F.linear(x_NI, weight) for weight in weights][-1], {})
    return milliseconds(graph) * 1e3 / len(weights)


def main() -> None:
    options = more_models.parser_of_rows(__doc__, ROWS).parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; microseconds, bfloat16")
    for name in options.models:
        for title, shape in weights_of(name).items():
            copies = max(2, WEIGHT_BYTES // (2 * shape[0] * shape[1]))
            weights = [torch.randn(shape, dtype=torch.bfloat16, device=DEVICE) for _ in range(copies)]
            times = {rows: microseconds(rows, weights) for rows in sorted(options.rows)}
            cells = [
                f"{rows}: {time:.1f}"
                + ("!" if time > MARKED * min(times[more] for more in times if more >= rows) else "")
                for rows, time in times.items()
            ]
            print(f"{name:<22} {title:<22}", "  ".join(cells), flush=True)


if __name__ == "__main__":
    main()
