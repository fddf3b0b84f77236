"""Weights, memory and profiles on a GPU: graphs stay right, and memory really comes free."""

from __future__ import annotations

import gzip
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tokenmill as sgl

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
Make = Callable[..., Path]
Greedy = Callable[..., list[int]]
NUM_NEW = 24
PARAMS = {"temperature": 0, "max_new_tokens": NUM_NEW, "ignore_eos": True}


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(256) for _ in range(rng.randint(1, 60))] for _ in range(8)]


def engine(folder: Path, **arguments: Any) -> sgl.Engine:
    return sgl.Engine(
        model_path=str(folder), device="cuda", **{"dtype": "float32", "mem_fraction_static": 0.2} | arguments
    )


def tokens(llm: sgl.Engine) -> list[list[int]]:
    outputs: list[list[int]] = llm.generate(input_ids=prompts(), sampling_params=PARAMS)["output_ids"]
    return outputs


def state(llm: sgl.Engine) -> dict[str, Any]:
    found: dict[str, Any] = llm.get_server_info()["internal_states"][0]
    return found


@pytest.fixture
def folders(make_model: Make, tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint, and another one of the same model."""
    old, new = make_model("qwen3", head_dim=64), tmp_path / "new"
    shutil.copytree(old, new)
    generator = torch.Generator().manual_seed(1)
    tensors = load_file(old / "model.safetensors")
    other = {
        name: value + 0.2 * torch.randn(value.shape, generator=generator) for name, value in tensors.items()
    }
    save_file(other, new / "model.safetensors", metadata={"format": "pt"})
    return old, new


@pytest.mark.parametrize("core_process", [False, True])
def test_graphs_see_new_weights(
    folders: tuple[Path, Path], transformers_greedy: Greedy, core_process: bool
) -> None:
    expected = [[transformers_greedy(folder, prompt, NUM_NEW) for prompt in prompts()] for folder in folders]
    with engine(folders[0], core_process=core_process) as llm:
        assert tokens(llm) == expected[0]
        assert state(llm)["memory_usage"]["graph"] > 0
        assert llm.update_weights_from_disk(str(folders[1]))[0]
        assert tokens(llm) == expected[1]
        on_device = "cpu" if core_process else "cuda"
        old = load_file(folders[0] / "model.safetensors", device=on_device)
        assert llm.update_weights_from_tensor(list(old.items()))[0]
        assert tokens(llm) == expected[0]


def test_released_memory_serves_another_engine(
    folders: tuple[Path, Path], transformers_greedy: Greedy
) -> None:
    with engine(folders[0], max_total_tokens=200_000) as llm:
        before = tokens(llm)
        cache_bytes = state(llm)["memory_usage"]["kvcache"] * 2**30
        free, _ = torch.cuda.mem_get_info()
        llm.release_memory_occupation()
        now_free, _ = torch.cuda.mem_get_info()
        assert now_free - free > 0.9 * cache_bytes
        assert state(llm)["memory_usage"]["kvcache"] == 0
        with engine(folders[1], mem_fraction_static=None) as other:
            answers = tokens(other)
        assert answers == [transformers_greedy(folders[1], prompt, NUM_NEW) for prompt in prompts()]
        llm.resume_memory_occupation()
        assert tokens(llm) == before
        assert state(llm)["memory_usage"]["graph"] > 0  # captured again


def test_memory_that_others_took_is_waited_for(folders: tuple[Path, Path]) -> None:
    with engine(folders[0], max_total_tokens=5_000_000) as llm:  # more than is left of the device below
        before = tokens(llm)
        llm.release_memory_occupation()
        taken = torch.empty(int(torch.cuda.mem_get_info()[0] * 0.97), dtype=torch.uint8, device="cuda")
        with pytest.raises(sgl.WrongState, match="no memory to take kv_cache back"):
            llm.resume_memory_occupation(["kv_cache"])
        with pytest.raises(sgl.WrongState, match="released its memory"):
            llm.generate(input_ids=[1])
        del taken
        torch.cuda.empty_cache()
        llm.resume_memory_occupation()
        assert tokens(llm) == before


@pytest.mark.parametrize("tags", [["weights"], ["kv_cache"], ["cuda_graph"]])
def test_parts_of_the_memory(folders: tuple[Path, Path], tags: list[str]) -> None:
    with engine(folders[0]) as llm:
        before = tokens(llm)
        for _ in range(2):
            llm.release_memory_occupation(tags)
            llm.resume_memory_occupation(tags)
            assert tokens(llm) == before
        assert state(llm)["memory_usage"]["graph"] > 0


def test_a_profile_shows_kernels_and_memory(folders: tuple[Path, Path], tmp_path: Path) -> None:
    with engine(folders[0]) as llm:
        tokens(llm)
        llm.start_profile(
            output_dir=tmp_path / "traces", profile_id="x", activities=["CPU", "GPU", "MEM"], with_stack=False
        )
        tokens(llm)
        llm.stop_profile()
    with gzip.open(tmp_path / "traces" / "x-TP-0.trace.json.gz", "rt") as file:
        categories = {event.get("cat") for event in json.load(file)["traceEvents"]}
    assert "kernel" in categories
    assert (tmp_path / "traces" / "x-TP-0-memory.pickle").stat().st_size > 0
