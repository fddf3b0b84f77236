"""On a GPU: nothing is left to compile after the start, and want of memory costs time but no tokens."""

from __future__ import annotations

import json
import logging
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tokenmill
from tokenmill.runner import graphs
from tokenmill.runner.hardware import wake

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# A step of 8,192 tokens takes a good gigabyte for the activations of its feed-forward layers.
WIDE = {"head_dim": 64, "intermediate_size": 16384, "max_position_embeddings": 8192}
ARGUMENTS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "float32",
    "max_total_tokens": 20000,
    "log_level": "warning",
}


def prompts(*lengths: int) -> list[list[int]]:
    rng = random.Random(21)
    return [[rng.randrange(256) for _ in range(length)] for length in lengths]


def greedy(count: int) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """Names of the kernels that were compiled, or read from the disk, since the last `clear`."""
    import triton

    names: list[str] = []

    def note(*, src: Any, **_: Any) -> None:
        names.append(src.name)

    triton.knobs.compilation.listener = note
    yield names
    triton.knobs.compilation.listener = None


# Shapes no other test of the process uses, so that each start begins with nothing compiled.
@pytest.mark.parametrize(
    ("family", "num_heads", "dtype"), [("llama", 12, "bfloat16"), ("qwen3", 10, "float16")]
)
def test_every_kernel_is_compiled_at_the_start(
    make_model: Callable[..., Path], compiled: list[str], family: str, num_heads: int, dtype: str
) -> None:
    folder = make_model(
        family,
        head_dim=64,
        hidden_size=64 * num_heads,
        num_attention_heads=num_heads,
        max_position_embeddings=2048,
    )
    with tokenmill.Engine(model_path=str(folder), device="cuda", dtype=dtype) as engine:
        # The first token needs the kernels of its step only, the second one waits for all.
        engine.generate(input_ids=[[1, 2, 3]], sampling_params=greedy(1))
        assert "_rotate_and_store_kernel" in compiled
        engine.generate(input_ids=[[1, 2, 3]], sampling_params=greedy(2))
        assert len(compiled) > 15  # those that depend on no shape may be there from tests before
        compiled.clear()
        batch = prompts(1, 5, 16, 17, 63, 64, 65, 300, 1100, *range(2, 40))
        for params in (greedy(40), {"temperature": 0.7, "top_p": 0.9, "max_new_tokens": 9}):
            for _ in range(2):  # the second time their prefixes are cached
                engine.generate(input_ids=batch, sampling_params=params)
                engine.generate(input_ids=batch[7], sampling_params=params)
        for length in (14, 60, 120, 180, 250):
            engine.generate(input_ids=prompts(length), sampling_params=greedy(1))
        # Long steps of many prompts, whose rows make 2,048 heads, then 4,096; with a common beginning,
        # so do the rows that decode, which have pieces to put together.
        for number, length in ((210, 11), (450, 6)):
            for beginning in ([], prompts(400)[0]):
                together = [beginning + own for own in prompts(*[length] * number)]
                engine.generate(input_ids=together, sampling_params=greedy(4))
        assert compiled == []


STARTS = """
import json, sys, tokenmill, triton
from tokenmill.runner import early

kernels, begun = [], []
start = early.start_compilers
early.start_compilers = lambda purpose: begun.append(start(purpose)) or begun[-1]
triton.knobs.compilation.listener = lambda *, src, cache_hit, **_: kernels.append((src.name, cache_hit))
arguments = json.loads(sys.argv[1])
with tokenmill.Engine(model_path="tiny", **arguments) as engine:
    params = {"temperature": 0, "max_new_tokens": 5, "ignore_eos": True}
    tokens = engine.generate(input_ids=[[1, 2, 3]], sampling_params=params)[0]["output_ids"]
    process = begun[0]._process
    while process and process.returncode is None:  # until all is compiled, which a step finds out
        engine.generate(input_ids=[[1, 2, 3]], sampling_params=params)
print(json.dumps([kernels, begun[0].num_processes, process and process.returncode, tokens]))
"""


@pytest.mark.parametrize("arguments", [{}, {"disable_cuda_graph": True}])
def test_processes_compile_for_a_first_start(tmp_path: Path, arguments: dict[str, Any]) -> None:
    """This one finds them on the disk, but for what a step compiles itself; the next start needs none."""
    starts = []
    for _ in range(2):
        given = ARGUMENTS | {"dtype": "bfloat16", "skip_tokenizer_init": True} | arguments
        command = [sys.executable, "-c", STARTS, json.dumps(given)]
        environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
        done = subprocess.run(command, check=True, timeout=200, env=environment, capture_output=True)
        starts.append(json.loads(done.stdout.splitlines()[-1]))
    (kernels, count, status, tokens), (next_kernels, next_count, next_status, next_tokens) = starts
    assert len(kernels) > 15
    assert sum(was_found for _, was_found in kernels) >= 0.75 * len(kernels), kernels
    assert (count > 1, status) == (True, 0)
    assert (next_count, next_status) == (0, None)
    assert tokens == next_tokens
    assert len(next_kernels) < len(kernels)
    assert all(was_found for _, was_found in next_kernels), next_kernels


def test_nothing_fails_while_a_gpu_wakes() -> None:
    """A start would not tell, for there it is no more than a beginning."""
    wake(torch.device("cuda", 0))


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_nothing_waits_for_the_compiler_of_torch(backend: str) -> None:
    """It takes some seconds to import."""
    given = ARGUMENTS | {"attention_backend": backend, "skip_tokenizer_init": True}
    code = (
        "import sys, tokenmill\n"
        f"arguments = {given}\n"
        "params = {'max_new_tokens': 20, 'top_p': 0.9, 'frequency_penalty': 0.1}\n"
        "with tokenmill.Engine(model_path='tiny', **arguments) as engine:\n"
        "    for prompts in ([[1, 2]], [[1, 2]] * 9, [[3] * 500]):\n"
        "        engine.generate(input_ids=prompts, sampling_params=params)\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)


def test_captures_need_no_run_before_them(
    make_model: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.DEBUG, logger="tokenmill"),
        tokenmill.Engine(
            model_path=str(make_model("llama", head_dim=64)), device="cuda", log_level="debug"
        ) as engine,
    ):
        for count in (1, 2, 4, 30, 100, 240):
            engine.generate(input_ids=prompts(*range(3, 3 + count)), sampling_params=greedy(4))
    captures = [record for record in caplog.records if record.msg.startswith("captured")]
    assert len(captures) >= 5
    assert "trying again" not in caplog.text
    assert max(record.args[-1] for record in captures[1:]) < 0.1  # type: ignore[index, operator]


@pytest.fixture
def only_so_much() -> Iterator[Callable[[int], None]]:
    """`only_so_much(bytes)` leaves this process that much memory beyond what it uses."""

    def limit(spare: int) -> None:
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + spare) / total)

    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("spare", [600 * 2**20, 150 * 2**20])
def test_steps_that_do_not_fit_run_in_parts(
    make_model: Callable[..., Path],
    only_so_much: Callable[[int], None],
    caplog: pytest.LogCaptureFixture,
    spare: int,
) -> None:
    batch = prompts(4000, 4000, 100, 1)
    folder = str(make_model("llama", **WIDE))
    with tokenmill.Engine(model_path=folder, **ARGUMENTS) as engine:
        expected = engine.generate(input_ids=batch, sampling_params=greedy(20))
    with tokenmill.Engine(model_path=folder, **ARGUMENTS) as engine:  # one without graphs that hold memory
        only_so_much(spare)
        results = engine.generate(input_ids=batch, sampling_params=greedy(20))
    assert "no memory for" in caplog.text
    assert "trying again" not in caplog.text
    assert [r["output_ids"] for r in results] == [r["output_ids"] for r in expected]


def test_steps_fit_the_memory_that_is_left(
    make_model: Callable[..., Path], only_so_much: Callable[[int], None]
) -> None:
    """An engine that starts with little memory plans smaller steps."""
    batch = prompts(4000, 100)
    folder = str(make_model("llama", **WIDE))
    with tokenmill.Engine(model_path=folder, **ARGUMENTS) as engine:
        expected = engine.generate(input_ids=batch, sampling_params=greedy(20))
        full = engine.get_server_info()["max_step_tokens"]
    only_so_much(1000 * 2**20)
    with tokenmill.Engine(model_path=folder, **ARGUMENTS) as engine:
        assert engine.get_server_info()["max_step_tokens"] < full
        results = engine.generate(input_ids=batch, sampling_params=greedy(20))
    assert [r["output_ids"] for r in results] == [r["output_ids"] for r in expected]


@pytest.mark.parametrize("failing", [1, 2, 3])
@pytest.mark.parametrize(
    ("errors", "message"),
    [
        ([torch.OutOfMemoryError], "no memory is left to capture"),
        ([RuntimeError], "trying again after a run"),
        ([RuntimeError, torch.OutOfMemoryError], "no memory is left to capture"),
        ([RuntimeError, None, torch.OutOfMemoryError], "no memory is left to capture"),
    ],
)
def test_a_capture_that_fails_is_no_reason_to_stop(
    make_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    errors: list[type[Exception] | None],
    message: str,
    failing: int,
) -> None:
    """A capture that fails half-way leaves stream and rows fit for use, the very first one, too; so do the
    run after it, and the second capture."""
    count = 0

    def fail_in_one(step: Callable[..., Any]) -> Callable[..., Any]:
        def half(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            made = step(*arguments, **options)
            count += 1
            error = errors[count - failing] if failing <= count < failing + len(errors) else None
            if error is not None:
                raise error("for the test")
            return made

        return half

    def run(engine: tokenmill.Engine) -> list[list[int]]:
        few = engine.generate(input_ids=prompts(1, 2), sampling_params=greedy(9))
        many = engine.generate(input_ids=prompts(*range(1, 12)), sampling_params=greedy(9))
        return [result["output_ids"] for result in few + many]

    folder = str(make_model("qwen3", head_dim=64))
    with tokenmill.Engine(model_path=folder, **ARGUMENTS, disable_cuda_graph=True) as engine:
        expected = run(engine)
    with tokenmill.Engine(model_path=folder, **ARGUMENTS) as engine:
        for half in ("decode_forward", "decode_draw"):  # a forward pass comes first, then its draw
            monkeypatch.setattr(graphs, half, fail_in_one(getattr(graphs, half)))
        assert run(engine) == expected
        assert run(engine) == expected
    assert caplog.text.count(message) == 1
    if errors == [
        torch.OutOfMemoryError
    ]:  # the memory that graphs share outlives one of which nothing is kept
        assert "trying again" not in caplog.text
