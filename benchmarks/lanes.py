"""Prompts beside rows that decode: what both take together, and one after the other.

    python benchmarks/lanes.py --models Qwen2.5-0.5B-Instruct --rows 16 64 128 256 --processors 48 64
    python benchmarks/lanes.py --models Llama-3.1-8B --tokens 4096

The device is parted as the engine does it (`tokenmill/runner/lanes.py`). Graphs of a step with prompts are
replayed on one part, and of a step of rows on the other, until some such steps with prompts are done. The
rows have 450 to 900 keys, the prompts some 560 tokens; weights are random, and all layers are there.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import more_models
import torch
from layers import DEVICE, KEYS, PAGE_SIZE, Layers

from tokenmill.attention import triton_backend
from tokenmill.attention.base import Step, StepLayout
from tokenmill.kernels.launching import on_processors, replayed
from tokenmill.messages import Lane
from tokenmill.runner.lanes import GreenContexts, Partition

ROWS = (16, 64, 128, 256)
PROMPT = 560
SECONDS = 0.06  # of prompts, alone
REPLAYS = 20


class WholeModel(Layers):
    """With its head, and steps of prompts."""

    def decode(self, rows: int) -> Callable[[], torch.Tensor]:
        """A step of rows that decode, to be captured."""
        draw = random.Random(0)
        hidden = self.step([draw.randint(*KEYS) for _ in range(rows)])

        def run() -> torch.Tensor:
            with replayed():
                return self._model.logits(hidden())

        return run

    def prompts(self, tokens: int) -> Callable[[], torch.Tensor]:
        """A step of prompts that have so many tokens together, to be captured."""
        count = max(1, tokens // PROMPT)
        lengths = [tokens // count] * (count - 1)
        lengths.append(tokens - sum(lengths))
        layout = self._prompt_layout(lengths)
        backend = triton_backend.TritonBackend(self._specs, self._pool.keys, self._pool.values, PAGE_SIZE)
        ids = torch.randint(0, 1000, (tokens,), device=DEVICE)
        last_N = layout.query_starts[1:].long() - 1

        def run() -> torch.Tensor:
            with replayed():
                backend.plan(layout)
                hidden_ND = self._model.forward(ids, Step(layout.positions_T, backend, last_N))
                return self._model.logits(hidden_ND)

        return run

    def _prompt_layout(self, lengths: list[int]) -> StepLayout:
        columns = -(-max(lengths) // PAGE_SIZE)
        pages = torch.randperm(len(self._pool.keys[0]), device=DEVICE)[: len(lengths) * columns]
        page_table_RP = pages.view(len(lengths), columns).to(torch.int32)
        lengths_R = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        row_T = torch.arange(len(lengths), device=DEVICE).repeat_interleave(lengths_R.long())
        ends_R = lengths_R.long().cumsum(0)
        positions_T = torch.arange(sum(lengths), device=DEVICE) - (ends_R - lengths_R)[row_T]
        pages_T = page_table_RP[row_T, positions_T // PAGE_SIZE].long()
        starts = torch.cat((ends_R.new_zeros(1), ends_R)).to(torch.int32)
        return StepLayout(
            positions_T=positions_T,
            slot_mapping_T=(pages_T * PAGE_SIZE + positions_T % PAGE_SIZE,),
            page_table_RP=(page_table_RP,),
            query_starts=starts,
            lengths_R=lengths_R,
            num_decodes=0,
            host_query_lengths=lengths,
            host_lengths=lengths,
        )


def capture(step: Callable[[], torch.Tensor], part: Partition) -> torch.cuda.CUDAGraph:
    """The step as a graph that runs on a part of the device."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(part.stream), on_processors(part.num_processors):
        step()
        torch.cuda.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        step()
        graph.capture_end()
    torch.cuda.synchronize()
    return graph


def milliseconds_alone(graph: torch.cuda.CUDAGraph, part: Partition) -> float:
    """Of one replay."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(part.stream):
        graph.replay()
        start.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / REPLAYS


def together(
    prompts: tuple[torch.cuda.CUDAGraph, Partition, int], rows: tuple[torch.cuda.CUDAGraph, Partition, int]
) -> tuple[float, float]:
    """Milliseconds of so many steps with prompts, and how many steps of rows were done in that time. Of
    these there must be more than enough."""
    (prompt_graph, prompt_part, num_prompts), (row_graph, row_part, num_rows) = prompts, rows
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(num_rows)]
    with torch.cuda.stream(row_part.stream):
        torch.cuda._sleep(4_000_000)  # cycles, until all is launched
        start.record()
    prompt_part.stream.wait_event(start)
    with torch.cuda.stream(prompt_part.stream):
        for _ in range(num_prompts):
            prompt_graph.replay()
        end.record()
    with torch.cuda.stream(row_part.stream):
        for mark in marks:
            row_graph.replay()
            mark.record()
    torch.cuda.synchronize()
    total, ends = start.elapsed_time(end), [start.elapsed_time(mark) for mark in marks]
    done = sum(each <= total for each in ends)
    before = ends[done - 1] if done else 0.0
    return total, done + (total - before) / (ends[done] - before)


def main() -> None:
    parser = more_models.parser_of_rows(__doc__, ROWS)
    parser.add_argument("--tokens", type=int, default=8192, help="of a step with prompts")
    parser.add_argument("--processors", nargs="+", type=int, default=[40, 64], help="for rows that decode")
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; milliseconds")
    print(
        "for each step with prompts: in turns on the whole device, and beside each other; the steps of rows"
    )
    print(f"{'model':<22} {'rows':>5} {'parts':>8} {'in turns':>9} {'beside':>8} {'steps':>6} {'saved':>7}")
    count = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    whole = Partition(torch.cuda.Stream(), count)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        for name in options.models:
            model = WholeModel(more_models.write(Path(folder), name), max(options.rows))
            prompts = model.prompts(options.tokens)
            prompt_ms = milliseconds_alone(capture(prompts, whole), whole)
            for wanted in options.processors:
                green = GreenContexts(torch.device("cuda", 0), wanted)
                row_part, prompt_part = green.partitions[Lane.DECODES], green.partitions[Lane.PROMPTS]
                prompt_graph = capture(prompts, prompt_part)
                num_prompts = max(2, round(1e3 * SECONDS / prompt_ms))
                for rows in options.rows:
                    step = model.decode(rows)
                    row_ms = milliseconds_alone(capture(step, whole), whole)
                    enough = int(4 * num_prompts * prompt_ms / row_ms) + 8
                    total, done = together(
                        (prompt_graph, prompt_part, num_prompts), (capture(step, row_part), row_part, enough)
                    )
                    in_turns = prompt_ms + done / num_prompts * row_ms
                    beside = total / num_prompts
                    parts = f"{row_part.num_processors}+{prompt_part.num_processors}"
                    print(
                        f"{name:<22} {rows:>5} {parts:>8} {in_turns:9.2f} {beside:8.2f} "
                        f"{done / num_prompts:6.1f} {1 - beside / in_turns:7.1%}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
