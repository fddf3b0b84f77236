"""Weights replaced, read, released and taken back, against an engine that was made with them."""

from __future__ import annotations

import functools
import gc
import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import FakeTensorMode

import tokenmill as sgl

pytestmark = pytest.mark.cpu

Make = Callable[..., Path]
PROMPTS = [list(range(3, 40)), list(range(60, 90)), [*range(3, 20), 7]]
GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
STACKED = "model.layers.1.self_attn.k_proj.weight"


def varied(folder: Path, target: Path, *, seed: int = 1, **edits: torch.Tensor | None) -> Path:
    """A copy of a checkpoint with other numbers in all tensors; `edits` sets some, or removes them (None)."""
    shutil.copytree(folder, target)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor | None] = {
        name: (tensor.float() + 0.2 * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    tensors |= edits
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, target / "model.safetensors", metadata={"format": "pt"})
    return target


def engine(folder: Path, **arguments: Any) -> sgl.Engine:
    return sgl.Engine(model_path=str(folder), device="cpu", max_total_tokens=1024, **arguments)


def tokens(llm: sgl.Engine) -> list[list[int]]:
    outputs: list[list[int]] = llm.generate(input_ids=PROMPTS, sampling_params=GREEDY)["output_ids"]
    return outputs


def fresh(folder: Path, **arguments: Any) -> list[list[int]]:
    with engine(folder, **arguments) as llm:
        return tokens(llm)


@pytest.fixture
def folders(make_model: Make, tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint, and another one of the same model."""
    old = make_model("llama", attention_bias=True)
    return old, varied(old, tmp_path / "new")


@pytest.fixture
def llm(folders: tuple[Path, Path]) -> Iterator[sgl.Engine]:
    with engine(folders[0]) as made:
        yield made


# ── from a folder ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("tied", [False, True])
def test_updated_engines_answer_like_fresh_ones(
    make_model: Make, tmp_path: Path, family: str, tied: bool
) -> None:
    old = make_model(family, tie_word_embeddings=tied)
    new = varied(old, tmp_path / "new")
    with engine(old) as llm:
        before = tokens(llm)
        assert llm.update_weights_from_disk(str(new)) == (True, "the weights were updated", 0)
        after = tokens(llm)
        assert llm.update_weights_from_disk(old)[0]  # a path is as good as a string
        assert tokens(llm) == before
    assert after == fresh(new)
    assert after != before


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_update_in_a_core_process(make_model: Make, tmp_path: Path, dtype: str) -> None:
    old = make_model("llama")
    new = varied(old, tmp_path / "new")
    with engine(old, core_process=True, dtype=dtype) as llm:
        assert llm.update_weights_from_disk(str(new))[0]
        assert tokens(llm) == fresh(new, dtype=dtype)
        pairs = [
            (name, tensor.to(torch.bfloat16)) for name, tensor in load_file(old / "model.safetensors").items()
        ]
        assert llm.update_weights_from_tensor(pairs) == (True, "the weights were updated")
        assert llm.get_weights_by_name("model.norm.weight", 2) == [1.0, 1.0]


def test_the_engine_says_what_it_serves_now(llm: sgl.Engine, folders: tuple[Path, Path]) -> None:
    assert llm.update_weights_from_disk(str(folders[1]), weight_version="v2")[0]
    output = llm.generate(input_ids=[1, 2], sampling_params=GREEDY)
    assert output["meta_info"]["weight_version"] == "v2"
    info = llm.get_model_info()
    assert (info["model_path"], info["weight_version"]) == (str(folders[1]), "v2")
    assert llm.server_args.model_path == str(folders[1])


def test_the_revision_of_the_old_weights_is_not_that_of_the_new(make_model: Make) -> None:
    with engine(make_model("llama"), revision="v1") as llm:
        assert not llm.update_weights_from_disk("nowhere/at/all")[0]
        assert llm.config.revision == "v1"
        assert llm.update_weights_from_disk(make_model("llama"))[0]
        assert llm.config.revision is None


def test_results_tell_the_version_of_the_weights_that_computed_them(
    llm: sgl.Engine, folders: tuple[Path, Path]
) -> None:
    """Also of a request that was submitted while the update still waited for another."""
    gate = threading.Event()

    def hold(logits: torch.Tensor, custom_param_list: list[dict[str, Any]]) -> torch.Tensor:
        assert gate.wait(10)
        return logits

    asked: dict[str, Any] = {"input_ids": [1, 2], "sampling_params": GREEDY, "stream": True}
    before = llm.generate(custom_logit_processor=hold, **asked)
    update = functools.partial(llm.update_weights_from_disk, str(folders[1]), weight_version="v2")
    updating = threading.Thread(target=update)
    updating.start()
    while not llm._client._core._core._calls:  # type: ignore[attr-defined]  # until the call is on its way
        time.sleep(0.001)
    after = llm.generate(**asked)
    gate.set()
    assert {chunk["meta_info"]["weight_version"] for chunk in before} == {"default"}
    assert {chunk["meta_info"]["weight_version"] for chunk in after} == {"v2"}
    updating.join()


def test_weights_without_a_configuration_are_enough(llm: sgl.Engine, folders: tuple[Path, Path]) -> None:
    expected = fresh(folders[1])
    (folders[1] / "config.json").unlink()
    assert llm.update_weights_from_disk(str(folders[1]))[0]
    assert tokens(llm) == expected


def edit_configuration(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize(
    ("edits", "changes", "expected"),
    [
        ({STACKED: None}, {}, r"lacks 1 tensor \(model\.layers\.1\.self_attn\.k_proj\.weight\)"),
        ({STACKED: torch.zeros(3, 64)}, {}, r"k_proj\.weight in the checkpoint .* has shape \[3, 64\]"),
        ({"extra.weight": torch.zeros(1)}, {}, r"has 1 tensor \(extra\.weight\)"),
        ({}, {"rms_norm_eps": 0.5}, r"another model: its norm_epsilon is 0\.5"),
        ({}, {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}, r"its architecture is"),
    ],
)
def test_what_does_not_fit_changes_nothing(
    make_model: Make,
    tmp_path: Path,
    edits: dict[str, torch.Tensor | None],
    changes: dict[str, Any],
    expected: str,
) -> None:
    old = make_model("llama")
    new = varied(old, tmp_path / "new", **edits)
    edit_configuration(new, **changes)
    with engine(old) as llm:
        before = tokens(llm)
        success, message, paused = llm.update_weights_from_disk(str(new))
        assert (success, paused) == (False, 0)
        assert re.search(expected, message), message
        llm.flush_cache()
        assert tokens(llm) == before
        assert llm.get_model_info()["model_path"] == str(old)


def test_a_folder_that_is_not_there(llm: sgl.Engine, tmp_path: Path) -> None:
    success, message, _ = llm.update_weights_from_disk(str(tmp_path / "nowhere"))
    assert not success
    assert "nowhere" in message


def test_a_head_of_its_own_does_not_fit_a_tied_model(make_model: Make, tmp_path: Path) -> None:
    old = make_model("qwen2", tie_word_embeddings=True)
    same = varied(old, tmp_path / "same")
    embedding = load_file(same / "model.safetensors")[EMBEDDING]
    twice = varied(old, tmp_path / "twice", **{HEAD: embedding.clone()})
    other = varied(old, tmp_path / "other", **{HEAD: embedding + 1})
    with engine(old) as llm:
        assert llm.update_weights_from_disk(str(twice))[0]
        assert tokens(llm) == fresh(same)
        success, message, _ = llm.update_weights_from_disk(str(other))
    assert not success
    assert "tied" in message


# ── from tensors ──────────────────────────────────────────────────────────────────────────────


def test_some_tensors_by_their_names_in_a_checkpoint(
    llm: sgl.Engine, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    new = load_file(folders[1] / "model.safetensors")
    names = [name for name in new if "layers.1" in name or name == HEAD]
    mixed = varied(folders[0], tmp_path / "mixed")
    kept = load_file(folders[0] / "model.safetensors")
    save_file(
        kept | {name: new[name] for name in names}, mixed / "model.safetensors", metadata={"format": "pt"}
    )
    assert llm.update_weights_from_tensor([(name, new[name]) for name in names])[0]
    assert tokens(llm) == fresh(mixed)
    assert llm.update_weights_from_tensor(new)[0]  # a state dict
    assert tokens(llm) == fresh(folders[1])


def test_tensors_by_the_names_of_stacked_parameters(llm: sgl.Engine, folders: tuple[Path, Path]) -> None:
    new = load_file(folders[1] / "model.safetensors")
    stacks = {
        "self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "mlp.gate_up_proj": ("gate_proj", "up_proj"),
    }
    for layer in range(3):
        for stack, parts in stacks.items():
            module, _, stacked = f"model.layers.{layer}.{stack}".rpartition(".")
            for kind in ("weight", "bias"):
                names = [f"{module}.{part}.{kind}" for part in parts]
                if names[0] in new:
                    new[f"{module}.{stacked}.{kind}"] = torch.cat([new.pop(name) for name in names])
    assert not [name for name in new if "q_proj" in name or "up_proj" in name.replace("gate_up_proj", "")]
    assert llm.update_weights_from_tensor(new, load_format="direct") == (True, "the weights were updated")
    assert tokens(llm) == fresh(folders[1])


def test_tensors_for_a_tied_model(make_model: Make, tmp_path: Path) -> None:
    old = make_model("qwen2", tie_word_embeddings=True)
    new = varied(old, tmp_path / "new")
    tensors = load_file(new / "model.safetensors")
    with engine(old) as llm:
        before = tokens(llm)
        success, message = llm.update_weights_from_tensor([(HEAD, tensors[EMBEDDING])])
        assert not success
        assert "tied" in message
        assert tokens(llm) == before
        assert llm.update_weights_from_tensor([(HEAD, tensors[EMBEDDING]), *tensors.items()])[0]
        assert tokens(llm) == fresh(new)


def freed() -> torch.Tensor:
    """What is left of a parameter whose numbers were given back, as by FSDP."""
    tensor = torch.zeros(64)
    tensor.untyped_storage().resize_(0)
    return tensor


def fake() -> torch.Tensor:
    """What torch computes shapes with."""
    with FakeTensorMode():
        return torch.zeros(64)


class Sharded:
    """As torch's DTensor, of which each process has a part."""

    shape = (64,)

    def full_tensor(self) -> torch.Tensor:
        raise AssertionError("nobody is to gather the parts")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([("model.norm.weight", torch.zeros(63))], r"has shape \[63\], but"),
        ([("model.norm.weight", torch.zeros(64)), ("no.such.weight", torch.zeros(1))], "no.such.weight"),
        (
            [("model.layers.0.self_attn.qkv_proj.weight", torch.zeros(127, 64))],
            r"has shape \[127, 64\], but needs 128 rows",
        ),
        (
            [(STACKED.replace("k_proj", "qkv_proj"), torch.zeros(128, 64)), (STACKED, torch.zeros(32, 64))],
            "and it again as a part of another tensor",
        ),
        ([("model.layers.1.mlp.qkv_proj.weight", torch.zeros(128, 64))], "mlp.qkv_proj"),
        ([("model.norm.weight", torch.zeros(64, dtype=torch.int8))], "int8"),
        ([("model.norm.weight", "zeros")], "not a tensor"),
        (
            [(EMBEDDING, torch.zeros(100, 64)), ("model.norm.weight", torch.zeros(64, device="meta"))],
            "no numbers",
        ),
        ([(EMBEDDING, torch.zeros(100, 64)), ("model.norm.weight", freed())], "no numbers"),
        (
            [(EMBEDDING, torch.zeros(100, 64)), ("model.norm.weight", fake())],
            "a FakeTensor, which holds no numbers",
        ),
        ([(EMBEDDING, torch.zeros(100, 64)), ("model.norm.weight", Sharded())], "give its full_tensor()"),
    ],
)
def test_tensors_that_do_not_fit_change_nothing(llm: sgl.Engine, given: Any, expected: str) -> None:
    before = llm.get_weights_by_name("model.norm.weight"), tokens(llm)
    success, message = llm.update_weights_from_tensor(given)
    assert not success
    assert expected.replace("\\", "") in message
    llm.flush_cache()
    assert (llm.get_weights_by_name("model.norm.weight"), tokens(llm)) == before


@pytest.mark.parametrize("value", [5, "name", [("only a name",)], [(3, torch.zeros(1))]])
def test_tensors_must_be_pairs(llm: sgl.Engine, value: Any) -> None:
    with pytest.raises(sgl.WrongType, match="list of pairs"):
        llm.update_weights_from_tensor(value)


def test_failures_can_be_raised(llm: sgl.Engine, tmp_path: Path) -> None:
    with pytest.raises(sgl.InvalidArgument, match="nowhere"):
        llm.update_weights_from_disk(str(tmp_path / "nowhere"), on_error="raise")
    with pytest.raises(sgl.InvalidArgument, match=r"no\.such"):
        llm.update_weights_from_tensor([("no.such", torch.zeros(1))], on_error="raise")
    assert llm.flush_cache(on_error="raise")
    stream = llm.generate(input_ids=[1], sampling_params=GREEDY | {"max_new_tokens": 200}, stream=True)
    llm.pause_generation("in_place")
    with pytest.raises(sgl.WrongState, match="1 requests are waiting or running"):
        llm.flush_cache(on_error="raise")
    stream.close()
    llm.continue_generation()
    with pytest.raises(sgl.InvalidArgument, match="'return', 'raise'"):
        llm.flush_cache(on_error="ignore")  # type: ignore[arg-type]


def test_unknown_load_formats(llm: sgl.Engine) -> None:
    with pytest.raises(sgl.InvalidArgument, match="load_format"):
        llm.update_weights_from_tensor([], load_format="flattened_bucket")
    with pytest.raises(sgl.InvalidArgument, match="load_format"):
        llm.update_weights_from_disk("tiny", load_format="dummy")
    assert llm.begin_weight_update()[0]
    for load_format in (None, "auto", "direct"):
        assert llm.update_weights_from_tensor([], load_format=load_format)[0]
    assert llm.end_weight_update()[0]


def test_the_cache_stays_if_the_caller_wants_it(llm: sgl.Engine) -> None:
    tokens(llm)
    cached = [output["meta_info"]["cached_tokens"] for output in llm.generate(input_ids=PROMPTS)]
    assert any(cached)
    assert llm.update_weights_from_tensor([], flush_cache=False)[0]
    assert [o["meta_info"]["cached_tokens"] for o in llm.generate(input_ids=PROMPTS)] == cached
    assert llm.update_weights_from_tensor([])[0]
    assert llm.generate(input_ids=PROMPTS[0])["meta_info"]["cached_tokens"] == 0


# ── reading ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_weight_is_left_of_what_was_replaced_or_read(folders: tuple[Path, Path], dtype: str) -> None:
    def num_parameters() -> int:
        gc.collect()
        return sum(type(thing) is torch.nn.Parameter for thing in gc.get_objects())

    with engine(folders[0], dtype=dtype) as llm:
        before = num_parameters()
        assert llm.get_weights_by_name(STACKED) is not None
        assert llm.update_weights_from_disk(str(folders[1]))[0]
        assert llm.update_weights_from_tensor([(STACKED, torch.zeros(32, 64))])[0]
        assert num_parameters() == before


@pytest.mark.parametrize("core_process", [False, True])
def test_weights_are_read_as_they_are_stored(folders: tuple[Path, Path], core_process: bool) -> None:
    stored = load_file(folders[0] / "model.safetensors")
    with engine(folders[0], core_process=core_process) as llm:
        for name, tensor in list(stored.items())[:: 5 if core_process else 1]:
            assert llm.get_weights_by_name(name, 7) == tensor[:7].tolist()
        assert len(llm.get_weights_by_name(EMBEDDING) or []) == 100
        assert llm.get_weights_by_name("model.layers.0.self_attn.qkv_proj.weight") is None
        assert llm.get_weights_by_name("nonsense") is None
        assert tokens(llm) == fresh(folders[0])


def test_a_tied_head_reads_as_the_embedding(make_model: Make) -> None:
    with engine(make_model("qwen2", tie_word_embeddings=True)) as llm:
        assert llm.get_weights_by_name(HEAD, 3) == llm.get_weights_by_name(EMBEDDING, 3)


# ── memory ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize("tags", [None, ["kv_cache"], ["weights"], ["cuda_graph", "kv_cache"]])
def test_released_memory_comes_back(folders: tuple[Path, Path], tags: list[str] | None, backend: str) -> None:
    with engine(folders[0], attention_backend=backend) as llm:
        before = tokens(llm)
        llm.release_memory_occupation(tags)
        state = llm.get_server_info()["internal_states"][0]
        assert state["released"] == sorted(tags or ["cuda_graph", "kv_cache", "weights"])
        keeps_cache = tags == ["weights"]
        assert bool(state["memory_usage"]["kvcache"]) == keeps_cache
        with pytest.raises(sgl.WrongState, match="resume_memory_occupation"):
            llm.generate("hello")
        llm.resume_memory_occupation(tags)
        outputs = llm.generate(input_ids=PROMPTS, sampling_params=GREEDY)
        assert outputs["output_ids"] == before
        assert bool(outputs[0]["meta_info"]["cached_tokens"]) == keeps_cache


def test_new_weights_come_in_while_the_cache_is_away(llm: sgl.Engine, folders: tuple[Path, Path]) -> None:
    llm.release_memory_occupation()
    llm.resume_memory_occupation(tags=["weights"])
    assert llm.update_weights_from_disk(str(folders[1]))[0]
    with pytest.raises(RuntimeError, match="cuda_graph, kv_cache"):
        llm.generate("hello")
    llm.resume_memory_occupation()
    assert tokens(llm) == fresh(folders[1])


def test_release_and_resume_may_be_repeated(llm: sgl.Engine) -> None:
    before = tokens(llm)
    llm.resume_memory_occupation()
    for _ in range(2):
        llm.release_memory_occupation(["kv_cache"])
        llm.release_memory_occupation(["kv_cache", "weights"])
    for _ in range(2):
        llm.resume_memory_occupation()
    assert tokens(llm) == before


def test_unknown_tags(llm: sgl.Engine) -> None:
    with pytest.raises(sgl.InvalidArgument, match=r"'gpu' .*known are 'weights', 'kv_cache', 'cuda_graph'"):
        llm.release_memory_occupation(["gpu"])


def test_memory_that_is_not_there_can_be_asked_for_again(
    llm: sgl.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tokens(llm)
    llm.release_memory_occupation()

    def fail(pool: object) -> None:
        raise torch.OutOfMemoryError("somebody else has it")

    with monkeypatch.context() as patch:
        patch.setattr("tokenmill.kvcache.pool.PagePool.allocate", fail)
        with pytest.raises(sgl.WrongState, match="no memory to take kv_cache back on cpu: somebody else"):
            llm.resume_memory_occupation()
    with pytest.raises(sgl.WrongState, match="kv_cache"):
        llm.generate("hello")
    llm.resume_memory_occupation()
    assert tokens(llm) == before
