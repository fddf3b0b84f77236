"""The same model and the same requests through tokenmill and through `transformers.generate`, in one run.

    python benchmarks/cpu_versus_transformers.py [--models tiny qwen] [--dtype bfloat16] [--layers 6]

Three loads: a batch with uniform lengths, a batch with long-tailed lengths, and one request alone.
transformers pads a batch and goes on until its longest row is done; tokens past the end that a row asked for
are not counted. Both are greedy and ignore end-of-text tokens. Each side has a process of its own, as its
users would: torch keeps a pool of workers for each thread that computes, and two pools disturb each other.
The sides take turns.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, Qwen2Config

import tokenmill
from tokenmill.hub import resolve

# The public shape of Qwen2.5-0.5B; weights are random, and `--layers` makes it shorter.
QWEN = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}


@dataclass(frozen=True)
class Job:
    """Token ids in, and how many tokens each row wants out."""

    name: str
    prompts: list[list[int]]
    num_new: list[int]


@dataclass(frozen=True)
class Measured:
    """Tokens per second of both, and how many rows came out identical."""

    job: Job
    ours: float
    theirs: float
    same_rows: int


def uniform_batch(num_requests: int, vocab_size: int) -> Job:
    """W1 of `workloads.py` at an eighth of its lengths, for two cores: 12 to 128 tokens in and out."""
    draw = random.Random(0)
    prompts = [
        [draw.randrange(10, vocab_size) for _ in range(draw.randint(12, 128))] for _ in range(num_requests)
    ]
    return Job(f"{num_requests} uniform", prompts, [draw.randint(12, 128) for _ in prompts])


def tailed_batch(num_requests: int, vocab_size: int) -> Job:
    """As people's jobs are: many short requests, few long ones; 8 to 256 tokens in and out, log-uniform."""
    draw = random.Random(0)

    def length() -> int:
        return round(math.exp(draw.uniform(math.log(8), math.log(256))))

    prompts = [[draw.randrange(10, vocab_size) for _ in range(length())] for _ in range(num_requests)]
    return Job(f"{num_requests} tailed", prompts, [length() for _ in prompts])


def single(vocab_size: int) -> Job:
    """One prompt of 64 tokens, an output of 128."""
    draw = random.Random(1)
    return Job("1 alone", [[draw.randrange(10, vocab_size) for _ in range(64)]], [128])


Runner = Callable[[Job], list[list[int]]]
Side = Callable[[Path, str], Runner]  # of a checkpoint folder, in a dtype
Ask = Callable[[Job], tuple[float, list[list[int]]]]  # seconds and tokens


def tokenmill_side(folder: Path, dtype: str) -> Runner:
    import tokenmill

    engine = tokenmill.Engine(model_path=str(folder), skip_tokenizer_init=True, device="cpu", dtype=dtype)

    def run(job: Job) -> list[list[int]]:
        engine.flush_cache()
        params = [{"temperature": 0, "ignore_eos": True, "max_new_tokens": n} for n in job.num_new]
        return [r["output_ids"] for r in engine.generate(input_ids=job.prompts, sampling_params=params)]

    return run


def transformers_side(folder: Path, dtype: str) -> Runner:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    model.generation_config.eos_token_id = None

    def run(job: Job) -> list[list[int]]:
        width = max(len(prompt) for prompt in job.prompts)
        ids = torch.tensor([[0] * (width - len(p)) + p for p in job.prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in job.prompts])
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=mask, do_sample=False, max_new_tokens=max(job.num_new), pad_token_id=0
            )
        return [row[width : width + n].tolist() for row, n in zip(out, job.num_new, strict=True)]

    return run


def serve(side: Side, folder: Path, dtype: str, pipe: Connection) -> None:
    """A process of one side: answers each job with seconds and tokens until the pipe closes."""
    run = side(folder, dtype)
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        start = time.perf_counter()
        tokens = run(job)
        pipe.send((time.perf_counter() - start, tokens))


@contextmanager
def process(side: Side, folder: Path, dtype: str) -> Iterator[Ask]:
    """`ask(job)` gives seconds and tokens, measured in a process of its own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=serve, args=(side, folder, dtype, theirs), daemon=True)
    child.start()
    theirs.close()

    def ask(job: Job) -> tuple[float, list[list[int]]]:
        ours.send(job)
        seconds, tokens = ours.recv()
        return seconds, tokens

    yield ask
    ours.close()
    child.join()


def measure(ours: Ask, theirs: Ask, job: Job, *, repeats: int) -> Measured:
    """Medians of alternating runs, after one run of each that is not counted."""
    tokens = [ask(job)[1] for ask in (ours, theirs)]
    for rows in tokens:
        assert [len(row) for row in rows] == job.num_new
    times = [(ours(job)[0], theirs(job)[0]) for _ in range(repeats)]
    medians = [statistics.median(seconds) for seconds in zip(*times, strict=True)]
    total = sum(job.num_new)
    return Measured(
        job,
        ours=total / medians[0],
        theirs=total / medians[1],
        same_rows=sum(a == b for a, b in zip(*tokens, strict=True)),
    )


@contextmanager
def checkpoint(name: str, *, layers: int) -> Iterator[Path]:
    """A folder with the model: the bundled one, or random weights in the shape of Qwen2.5-0.5B."""
    if name == "tiny":
        yield resolve("tiny")
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        config = Qwen2Config(**QWEN, num_hidden_layers=layers, dtype=torch.bfloat16)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
        yield Path(folder)


def compare(name: str, options: argparse.Namespace) -> list[Measured]:
    """Both loads on one model."""
    with (
        checkpoint(name, layers=options.layers) as folder,
        process(tokenmill_side, folder, options.dtype) as ours,
        process(transformers_side, folder, options.dtype) as theirs,
    ):
        vocab_size = Qwen2Config.from_pretrained(folder).vocab_size
        batches = [make(options.requests, vocab_size) for make in (uniform_batch, tailed_batch)]
        jobs = [*batches, single(vocab_size)]
        return [measure(ours, theirs, job, repeats=options.repeats) for job in jobs]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=["tiny", "qwen"], default=["tiny", "qwen"])
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--layers", type=int, default=6, help="layers of the random model (default: 6)")
    parser.add_argument("--requests", type=int, default=32, help="requests of the batch (default: 32)")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each (default: 3)")
    options = parser.parse_args()
    print(f"device: {cpu_name()}, {os.cpu_count()} cores, {torch.get_num_threads()} torch threads")
    print(
        f"tokenmill {tokenmill.__version__}, transformers {transformers.__version__}, "
        f"torch {torch.__version__}, Python {platform.python_version()}"
    )
    print(f"{options.dtype}, greedy, output tokens per second, median of {options.repeats}\n")
    print(f"{'model':<16} {'load':<11} {'tokenmill':>10} {'transformers':>13} {'ratio':>6} {'same rows':>10}")
    for name in options.models:
        title = name if name == "tiny" else f"{name}, {options.layers} layers"
        for row in compare(name, options):
            print(
                f"{title:<16} {row.job.name:<11} {row.ours:>10.1f} {row.theirs:>13.1f} "
                f"{row.ours / row.theirs:>6.2f} {row.same_rows:>7}/{len(row.job.prompts)}",
                flush=True,
            )


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    main()
