"""Files into parameters: shards, ties, casts, and every way a checkpoint can fail to fit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tokenmill.errors import InvalidArgument, ModelNotFound
from tokenmill.kernels import narrow
from tokenmill.models import load_model, read_spec

Save = Callable[..., tuple[Path, Any]]
Open = Callable[..., Any]
CPU = torch.device("cpu")
PROMPT = list(range(3, 40))


def load(folder: Path, *, dtype: torch.dtype = torch.float32, load_format: str = "auto") -> Any:
    return load_model(folder, read_spec(folder), dtype=dtype, device=CPU, load_format=load_format)


def change(folder: Path, edits: dict[str, torch.Tensor | None]) -> None:
    """Set tensors of an unsharded checkpoint, or remove them (None)."""
    tensors = load_file(folder / "model.safetensors") | edits
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def stored(folder: Path, name: str) -> torch.Tensor:
    return load_file(folder / "model.safetensors")[name]


def logits_agree(engine: Any, model: Any) -> bool:
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0]
    (ours,) = engine.step([PROMPT])
    return bool((ours - expected).abs().max() <= 1e-4 * expected.abs().max())


def test_shards_with_an_index(save_checkpoint: Save, open_engine: Open) -> None:
    folder, model = save_checkpoint("llama", shard_size="60KB", attention_bias=True)
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert logits_agree(open_engine(folder), model)


def test_shards_without_an_index(save_checkpoint: Save, open_engine: Open) -> None:
    folder, model = save_checkpoint("llama", shard_size="60KB")
    (folder / "model.safetensors.index.json").unlink()
    save_file({"other.layout": torch.zeros(1)}, folder / "consolidated.safetensors")
    assert logits_agree(open_engine(folder), model)


def test_a_missing_shard_is_named(save_checkpoint: Save) -> None:
    folder, _ = save_checkpoint("llama", shard_size="60KB")
    lost = sorted(folder.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(ModelNotFound, match=lost.name):
        load(folder)


def test_no_weights_at_all(save_checkpoint: Save) -> None:
    folder, _ = save_checkpoint("llama")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match=r"no safetensors weights.*dummy"):
        load(folder)


def test_a_damaged_file(save_checkpoint: Save) -> None:
    folder, _ = save_checkpoint("llama")
    (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(InvalidArgument, match=r"model\.safetensors is not a readable safetensors file"):
        load(folder)


def test_weights_that_do_not_fit_are_refused_before_memory_is_taken(save_checkpoint: Save) -> None:
    folder, _ = save_checkpoint("llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 2**31 - 1}))  # 512 GiB
    with pytest.raises(InvalidArgument, match=r"embed_tokens\.weight.*\[128, 64\].*\[2147483647, 64\]"):
        load(folder)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight"])
def test_a_tied_head_that_cannot_be_compared(save_checkpoint: Save, name: str) -> None:
    folder, _ = save_checkpoint("llama", tie_word_embeddings=True)
    embedding = stored(folder, "model.embed_tokens.weight")
    change(folder, {"lm_head.weight": embedding.clone()} | {name: embedding.to(torch.float8_e4m3fn)})
    with pytest.raises(InvalidArgument, match=rf"{name}.*F8_E4M3.*quantized"):
        load(folder)


def test_a_missing_tensor_is_named(save_checkpoint: Save) -> None:
    folder, _ = save_checkpoint("llama")
    change(folder, {f"model.layers.1.self_attn.{part}_proj.weight": None for part in "kv"})
    with pytest.raises(InvalidArgument, match=r"lacks 2 tensors .*layers\.1\.self_attn\.k_proj\.weight"):
        load(folder)


def test_a_missing_head_suggests_tying(save_checkpoint: Save) -> None:
    folder, _ = save_checkpoint("llama")
    change(folder, {"lm_head.weight": None})
    with pytest.raises(InvalidArgument, match=r"lm_head\.weight.*tie_word_embeddings"):
        load(folder)


def test_unexpected_tensors_are_named(save_checkpoint: Save) -> None:
    folder, _ = save_checkpoint("qwen2")
    change(folder, {"model.layers.0.self_attn.o_proj.bias": torch.zeros(64)})
    with pytest.raises(InvalidArgument, match=r"has 1 tensor \(model\.layers\.0\.self_attn\.o_proj\.bias\)"):
        load(folder)


def test_layers_that_the_configuration_lacks_are_unexpected(save_checkpoint: Save) -> None:
    folder, _ = save_checkpoint("llama", num_hidden_layers=2)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    with pytest.raises(InvalidArgument, match=r"has 9 tensors \(model\.layers\.1\..*, \.\.\.\)"):
        load(folder)


def test_a_wrong_shape_is_named(save_checkpoint: Save) -> None:
    folder, _ = save_checkpoint("llama")
    change(folder, {"model.layers.0.mlp.up_proj.weight": torch.zeros(95, 64)})
    with pytest.raises(InvalidArgument, match=r"layers\.0\.mlp\.up_proj\.weight.*\[95, 64\].*\[96, 64\]"):
        load(folder)


def test_an_integer_weight_is_refused(save_checkpoint: Save) -> None:
    folder, _ = save_checkpoint("llama")
    change(folder, {"model.norm.weight": torch.ones(64, dtype=torch.int8)})
    with pytest.raises(InvalidArgument, match=r"model\.norm\.weight.*I8.*quantized"):
        load(folder)


def test_stored_frequencies_are_left_out(save_checkpoint: Save, open_engine: Open) -> None:
    folder, model = save_checkpoint("llama")
    change(folder, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
    assert logits_agree(open_engine(folder), model)


def test_a_tied_head_may_be_stored(save_checkpoint: Save, open_engine: Open) -> None:
    folder, model = save_checkpoint("llama", tie_word_embeddings=True)
    change(folder, {"lm_head.weight": stored(folder, "model.embed_tokens.weight").clone()})
    assert logits_agree(open_engine(folder), model)


def test_a_stored_head_that_differs_wins_over_the_tie(save_checkpoint: Save, open_engine: Open) -> None:
    """transformers decides so, too."""
    import transformers

    folder, _ = save_checkpoint("llama", tie_word_embeddings=True)
    change(folder, {"lm_head.weight": stored(folder, "model.embed_tokens.weight").flip(0).contiguous()})
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert logits_agree(open_engine(folder), model.eval())


@pytest.mark.parametrize("tied", [True, False])
def test_every_weight_is_counted_once(tied: bool, save_checkpoint: Save) -> None:
    folder, model = save_checkpoint("qwen3", tie_word_embeddings=tied, head_dim=16)
    expected = sum(parameter.numel() for parameter in model.parameters())
    parameters = list(load(folder).parameters())
    assert sum(parameter.numel() for parameter in parameters) == expected
    assert sum(parameter.numel() * parameter.element_size() for parameter in parameters) == 4 * expected


def test_weights_are_cast(save_checkpoint: Save) -> None:
    folder, model = save_checkpoint("llama")
    ours = load(folder, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.bfloat16}
    assert torch.equal(ours.embed_tokens.weight, model.model.embed_tokens.weight.to(torch.bfloat16))


@pytest.mark.skipif(not narrow.has_kernel(torch.float32), reason="weights of bfloat16 are not kept here")
def test_weights_that_stay_bfloat16_are_never_all_in_float32(save_checkpoint: Save) -> None:
    folder, _ = save_checkpoint("llama", hidden_size=768, intermediate_size=3072, num_hidden_layers=6)
    # Freed memory goes back to the system at once: how much of it an allocator keeps differs from run to run.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    output = subprocess.check_output([sys.executable, "-c", _LOADING, folder], env=environment)
    peak, num_numbers = map(int, output.split())
    assert peak < 2.5 * num_numbers


# Prints how much memory that no file backs a load takes at most, and how many weights it loads.
_LOADING = """
import sys
from pathlib import Path
import torch
from tokenmill.models import load_model, read_spec
from tokenmill.models.checkpoint import Checkpoint

def private_bytes():
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) * 1024

def read(self, name):
    taken.append(private_bytes())
    return plain(self, name).bfloat16().float()

taken, plain, Checkpoint.read = [], Checkpoint.read, read
folder = Path(sys.argv[1])
model = load_model(folder, read_spec(folder), dtype=torch.float32, device=torch.device("cpu"))
print(max(taken) - taken[0], sum(weight.numel() for weight in model.parameters()))
"""


def test_dummy_weights_are_the_same_every_time(save_checkpoint: Save) -> None:
    folder, _ = save_checkpoint("qwen2")
    (folder / "model.safetensors").unlink()
    first, second = load(folder, load_format="dummy"), load(folder, load_format="dummy")
    pairs = list(zip(first.parameters(), second.parameters(), strict=True))
    assert all(torch.equal(a.to_dense(), b.to_dense()) for a, b in pairs)
    embedding = first.embed_tokens.weight
    assert float(embedding.std()) == pytest.approx(0.02, rel=0.1)
    assert not torch.equal(embedding[0], embedding[1])
    assert torch.equal(first.norm.weight, torch.ones(64))


def test_nothing_is_printed_unless_asked_and_slow(
    save_checkpoint: Save, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, _ = save_checkpoint("llama")
    spec = read_spec(folder)
    capfd.readouterr()
    for progress in (False, True):
        load_model(folder, spec, dtype=torch.float32, device=CPU, load_format="auto", progress=progress)
    assert capfd.readouterr() == ("", "")
