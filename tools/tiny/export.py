"""Writes a trained network as a folder that transformers loads: config, generation config, safetensors."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tools.tiny.network import Network
from tools.tiny.recipe import Shape
from tools.tiny.tokenizer import PAD, SPECIAL_TOKENS
from tools.tiny.world import END_OF_TEXT, END_OF_TURN

SHARD_BYTES = 15 * 1024 * 1024
"""Upper limit of one weight file, small enough for every tool that copies it."""


def config(shape: Shape) -> dict[str, object]:
    """The config.json of a Qwen2ForCausalLM of this shape."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.mlp_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "max_position_embeddings": shape.context_length,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.norm_epsilon,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": SPECIAL_TOKENS.index(END_OF_TEXT),
        "pad_token_id": SPECIAL_TOKENS.index(PAD),
        "torch_dtype": "bfloat16",
    }


def _shards(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if filled + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.nbytes
    return shards


def save(network: Network, shape: Shape, folder: Path) -> None:
    """Write the folder, weights in bfloat16. The tokenizer files are not touched."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"model.{name}": tensor.to("cpu", torch.bfloat16).contiguous()
        for name, tensor in network.state_dict().items()
    }
    shards = _shards(tensors)
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / name, metadata={"format": "pt"})
        (folder / name).chmod(0o644)  # save_file lets only the owner read
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": {key: name for name, shard in zip(names, shards, strict=True) for key in shard},
    }
    ends = [SPECIAL_TOKENS.index(END_OF_TEXT), SPECIAL_TOKENS.index(END_OF_TURN)]
    generation = {"eos_token_id": ends, "pad_token_id": SPECIAL_TOKENS.index(PAD), "do_sample": False}
    for name, content in (
        ("model.safetensors.index.json", index),
        ("config.json", config(shape)),
        ("generation_config.json", generation),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
