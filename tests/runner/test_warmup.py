"""The scout runs every kind of step without weights, and a step is made as large as memory allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenmill.attention.base import StepLayout
from tokenmill.config import EngineConfig
from tokenmill.errors import InvalidArgument
from tokenmill.kernels.compilers import Compilers
from tokenmill.kernels.launching import given_processors
from tokenmill.models import read_spec
from tokenmill.runner.executor import Executor
from tokenmill.runner.hardware import Placement

pytestmark = [
    pytest.mark.cpu,
    # Triton's interpreter turns arrays of one element into numbers, which NumPy is about to forbid.
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]
warmup = pytest.importorskip(
    "tokenmill.runner.warmup", reason="Triton is not installed (extra 'interpreter')"
)

GB = 10**9


def placement(*, max_step_tokens: int = 512, max_running_requests: int = 8) -> Placement:
    return Placement(
        device=torch.device("cpu"),
        device_name="",
        dtype=torch.float32,
        attention_backend="triton",
        max_running_requests=max_running_requests,
        max_step_tokens=max_step_tokens,
        steps_in_flight=1,
        cuda_graphs=False,
        deterministic=False,
    )


def scout(
    folder: Path, *, context_length: int, compilers: Compilers | None = None, **placed: int
) -> warmup.Scout:
    config = EngineConfig(model_path=str(folder))
    spec = read_spec(folder, context_length=context_length)
    return warmup.Scout(
        spec, config=config, placement=placement(**placed), compilers=compilers or Compilers()
    )


@pytest.mark.parametrize("context_length", [1, 17, 256])
def test_a_scout_runs_every_kind_of_step(
    make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, context_length: int
) -> None:
    steps: list[tuple[int, list[int], list[int]]] = []

    def forward(
        self: Executor,
        token_ids_T: torch.Tensor,
        layout: StepLayout,
        *,
        needed_N: torch.Tensor | None = None,
        is_rehearsal: bool = False,
    ) -> torch.Tensor:
        assert not is_rehearsal
        assert 0 <= int(token_ids_T.min()) <= int(token_ids_T.max()) < 300
        steps.append((layout.num_decodes, list(layout.host_query_lengths), list(layout.host_lengths)))
        return torch.zeros(len(token_ids_T if needed_N is None else needed_N), 64)

    monkeypatch.setattr(Executor, "forward", forward)
    with torch.inference_mode():
        scout(make_model(), context_length=context_length).compile().wait()
    # Graphs of prompts have room for so many tokens of however many rows.
    room = {counts[0] for num_decodes, counts, lengths in steps if lengths == [4 * counts[0] - 1]}
    assert room == {64, 128, 192, 256}
    planned = [lengths for _, counts, lengths in steps if lengths != [4 * counts[0] - 1]]
    assert all(max(lengths) <= -(-context_length // 16) * 16 for lengths in planned)
    decodes = {len(counts) for num_decodes, counts, _ in steps if num_decodes == len(counts)}
    # Prompts of up to 256 tokens are graphs, too, however few rows may run.
    assert decodes == {1, 2, 4, 8, 16, 32, 64, 128, 192, 256}
    mixed = [counts for num_decodes, counts, _ in steps if 0 < num_decodes < len(counts)]
    assert mixed
    longest = {max(counts) for num_decodes, counts, _ in steps if not num_decodes}
    assert {min(count, context_length) for count in (2, 64, 512)} <= longest


class Remembering(Compilers):
    """Remembers the facts that it was asked for, and then has all of their kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def has_all(self, facts: str) -> bool:
        self.asked.append(facts)
        return facts in self.asked[:-1]


def test_a_scout_looks_for_nothing_that_an_earlier_start_left(
    make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []

    def forward(self: Executor, token_ids_T: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        steps.append(len(token_ids_T))
        return torch.zeros(len(token_ids_T), 64)

    monkeypatch.setattr(Executor, "forward", forward)
    folder, compilers = make_model(), Remembering()
    counts = []
    with torch.inference_mode():
        # Twice the same start, then one whose rows have more pages, and one with fewer rows.
        for facts in ({"context_length": 64}, {"context_length": 64}, {"context_length": 128}):
            scout(folder, compilers=compilers, **facts).compile().wait()
            counts.append(len(steps))
        scout(folder, compilers=compilers, context_length=64, max_running_requests=4).compile().wait()
    assert counts[0] == counts[1] < counts[2] < len(steps)


def test_only_the_first_scout_of_a_process_has_its_kernels_remembered(
    make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others lack those that the first one has loaded."""
    noted: list[str | None] = []

    class Noted(warmup.ParallelCompilation):
        def __init__(self, *arguments: Any, facts: str | None, **more: Any) -> None:
            super().__init__(*arguments, facts=facts, **more)
            noted.append(facts)

    monkeypatch.setattr(warmup, "ParallelCompilation", Noted)
    monkeypatch.setattr(warmup.Scout, "_is_first", True)
    with torch.inference_mode():
        for _ in range(2):
            scout(make_model(), context_length=64)
    assert [each is None for each in noted] == [False, True]


def test_kernels_are_not_compiled_for_a_scout_that_failed(
    make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(self: warmup.Scout) -> None:
        raise MemoryError

    monkeypatch.setattr(warmup.Scout, "_find", find)
    with torch.inference_mode():
        failing = scout(make_model(), context_length=64)
        with pytest.raises(MemoryError):
            failing.compile()
    assert failing._compilation._is_done


def test_a_scout_finds_the_steps_of_fewer_processors(
    make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside prompts; tiles depend on the number of rows, in this measure."""
    steps: list[tuple[int, int]] = []

    def forward(self: Executor, token_ids_T: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        steps.append((given_processors(), len(token_ids_T)))
        return torch.zeros(len(token_ids_T), 64)

    monkeypatch.setattr(Executor, "forward", forward)
    with torch.inference_mode():
        found = scout(make_model(), context_length=256, max_running_requests=300).find_beside(64)
    assert {processors for processors, _ in steps} == {64}
    assert {rows for _, rows in steps} == {16, 32, 64, 128, 192, 256, 300}
    assert given_processors() == 0
    found.cancel()


@pytest.mark.parametrize(
    ("placed", "together"),
    [
        ({"max_running_requests": 8, "max_step_tokens": 8192}, {8, 64}),
        ({"max_running_requests": 100, "max_step_tokens": 8192}, {64, 100, 256}),
        ({"max_running_requests": 800, "max_step_tokens": 8192}, {64, 256, 512, 800, 1024}),
        ({"max_running_requests": 2048, "max_step_tokens": 8192}, {64, 256, 512, 1024}),
        ({"max_running_requests": 800, "max_step_tokens": 512}, set()),
    ],
)
def test_a_scout_runs_steps_of_many_prompts(
    make_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    placed: dict[str, int],
    together: set[int],
) -> None:
    """Rooms of graphs, and with four heads a row where 2,048 and 4,096 of them have kernels of their own."""
    prompts: set[int] = set()

    def forward(
        self: Executor, token_ids_T: torch.Tensor, layout: StepLayout, *, needed_N: Any = None, **_: Any
    ) -> torch.Tensor:
        if layout.num_decodes == 0 and len(token_ids_T) >= 2048:
            prompts.add(len(layout.host_query_lengths))
        return torch.zeros(len(token_ids_T if needed_N is None else needed_N), 64)

    monkeypatch.setattr(Executor, "forward", forward)
    with torch.inference_mode():
        scout(make_model(), context_length=64, **placed).compile().wait()
    assert prompts == together


def test_a_scout_runs_the_kernels(
    make_model: Callable[..., Path], triton_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warmup, "_TILED", ())  # more rows of the same kernels take the interpreter a minute
    with torch.inference_mode():
        scout(make_model("qwen3"), context_length=2).compile().wait()


class FakeScout:
    """A step takes so many bytes for each of its tokens, if there are that many."""

    def __init__(self, bytes_per_token: int, free: int) -> None:
        self.bytes_per_token = bytes_per_token
        self.free = free
        self.tried: list[int] = []

    def measure(self, max_step_tokens: int) -> int:
        self.tried.append(max_step_tokens)
        if max_step_tokens * self.bytes_per_token > self.free:
            raise torch.OutOfMemoryError("no")
        return max_step_tokens * self.bytes_per_token


def fit(monkeypatch: pytest.MonkeyPatch, fake: FakeScout) -> tuple[Placement, int]:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (fake.free, 100 * GB))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    start = placement(max_step_tokens=8192, max_running_requests=1000)
    found: tuple[Placement, int] = warmup.fit_step(fake, start)
    return found


@pytest.mark.parametrize(
    ("free", "tried"),
    [(40 * GB, [8192]), (20 * GB, [8192, 4096]), (3 * GB, [8192, 4096, 2048, 1024, 1000])],
)
def test_a_step_is_as_large_as_leaves_room_for_pages(
    monkeypatch: pytest.MonkeyPatch, free: int, tried: Sequence[int]
) -> None:
    fake = FakeScout(10**6, free)
    found, step_bytes = fit(monkeypatch, fake)
    assert fake.tried == tried
    assert found.max_step_tokens == tried[-1]
    assert step_bytes == tried[-1] * 10**6


def test_a_device_without_room_for_a_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgument, match=r"a step of 1000 tokens does not fit into the 0\.50 GB"):
        fit(monkeypatch, FakeScout(10**6, GB // 2))
