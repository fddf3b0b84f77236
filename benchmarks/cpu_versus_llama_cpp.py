"""The same weights and the same requests through tokenmill and through llama.cpp, on a CPU, in one run.

    pip install llama-cpp-python gguf
    python benchmarks/cpu_versus_llama_cpp.py [--layers 6]

Random weights in the shape of Qwen2.5-0.5B, bfloat16 in both; llama.cpp reads them from a GGUF file that is
written here, and decodes all rows of a batch in one call. Both are greedy and ignore end-of-text tokens. Each
side has a process of its own with all cores, and the sides take turns.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cpu_versus_transformers import (
    QWEN,
    Job,
    Runner,
    checkpoint,
    cpu_name,
    measure,
    process,
    single,
    tokenmill_side,
)
from safetensors.torch import load_file

import tokenmill

BATCH_TOKENS = 2048  # of one call

# Names of a layer's tensors in a checkpoint and in a GGUF file.
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """model.layers.3.mlp.up_proj.weight -> blk.3.ffn_up.weight"""
    outside = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in outside:
        return outside[name]
    _, _, layer, rest = name.split(".", 3)
    module, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{LAYER_NAMES[module]}.{kind}"


def write_gguf(folder: Path, target: Path) -> None:
    """The checkpoint of a folder as a GGUF file: matrices in bfloat16, vectors in float32, no vocabulary."""
    import gguf

    weights = load_file(folder / "model.safetensors")
    writer = gguf.GGUFWriter(target, "qwen2")
    writer.add_block_count(1 + max(int(name.split(".")[2]) for name in weights if "layers" in name))
    writer.add_context_length(int(QWEN["max_position_embeddings"]))
    writer.add_embedding_length(int(QWEN["hidden_size"]))
    writer.add_feed_forward_length(int(QWEN["intermediate_size"]))
    writer.add_head_count(int(QWEN["num_attention_heads"]))
    writer.add_head_count_kv(int(QWEN["num_key_value_heads"]))
    writer.add_layer_norm_rms_eps(float(QWEN["rms_norm_eps"]))
    writer.add_rope_freq_base(10000.0)  # what the configuration means when it says nothing
    writer.add_vocab_size(int(QWEN["vocab_size"]))
    writer.add_tokenizer_model("no_vocab")
    for name, weight in weights.items():
        numbers = weight.float().numpy()
        if weight.dim() == 1:
            writer.add_tensor(gguf_name(name), numbers)
        else:
            kind = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(numbers, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class LlamaCpp:
    """llama.cpp with several sequences in one context, through its C interface."""

    def __init__(self, path: Path, *, context: int, sequences: int) -> None:
        import llama_cpp

        self._c: Any = llama_cpp
        self._silent = self._c.llama_log_callback(lambda *_: None)  # must live as long as it may be called
        self._c.llama_log_set(self._silent, None)
        self._c.llama_backend_init()
        self._model = self._c.llama_model_load_from_file(
            str(path).encode(), self._c.llama_model_default_params()
        )
        assert self._model, "llama.cpp cannot load the file"
        params = self._c.llama_context_default_params()
        params.n_ctx, params.n_seq_max = context, sequences
        params.n_batch = BATCH_TOKENS
        params.n_threads = params.n_threads_batch = os.cpu_count() or 1
        params.kv_unified = True
        self._context = self._c.llama_init_from_model(self._model, params)
        assert self._context, "llama.cpp cannot make a context"
        self._batch = self._c.llama_batch_init(BATCH_TOKENS, 0, 1)

    def forget(self) -> None:
        """Drop all sequences."""
        self._c.llama_memory_clear(self._c.llama_get_memory(self._context), True)

    def step(self, tokens: list[tuple[int, int, int, bool]]) -> list[int]:
        """Compute (id, position, sequence, whether a token is drawn); the most likely next tokens."""
        batch = self._batch
        for index, (token, position, sequence, draws) in enumerate(tokens):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
            batch.logits[index] = draws
        batch.n_tokens = len(tokens)
        assert self._c.llama_decode(self._context, batch) == 0
        return [self._best(index) for index, (*_, draws) in enumerate(tokens) if draws]

    def _best(self, index: int) -> int:
        logits = self._c.llama_get_logits_ith(self._context, index)
        return int(np.ctypeslib.as_array(logits, (int(QWEN["vocab_size"]),)).argmax())


def llama_cpp_side(folder: Path, dtype: str) -> Runner:
    assert dtype == "bfloat16"
    path = folder / "model.gguf"
    write_gguf(folder, path)
    llama = LlamaCpp(path, context=8192, sequences=64)

    def run(job: Job) -> list[list[int]]:
        llama.forget()
        rows: list[list[int]] = [[] for _ in job.prompts]
        waiting = [
            [(token, place, row, place == len(prompt) - 1) for place, token in enumerate(prompt)]
            for row, prompt in enumerate(job.prompts)
        ]
        while waiting:  # as many whole prompts at once as a call takes
            step: list[tuple[int, int, int, bool]] = []
            while waiting and len(step) + len(waiting[0]) <= BATCH_TOKENS:
                step += waiting.pop(0)
            drawn = llama.step(step)
            for (_, _, row, _), token in zip((each for each in step if each[3]), drawn, strict=True):
                rows[row].append(token)
        while any(len(row) < wanted for row, wanted in zip(rows, job.num_new, strict=True)):
            active = [row for row, tokens in enumerate(rows) if len(tokens) < job.num_new[row]]
            step = [(rows[row][-1], len(job.prompts[row]) + len(rows[row]) - 1, row, True) for row in active]
            for row, token in zip(active, llama.step(step), strict=True):
                rows[row].append(token)
        return rows

    return run


def batch(num_requests: int) -> Job:
    """64 tokens in and out."""
    draw = random.Random(0)
    vocab_size = int(QWEN["vocab_size"])
    prompts = [[draw.randrange(10, vocab_size) for _ in range(64)] for _ in range(num_requests)]
    return Job(f"{num_requests} at once", prompts, [64] * num_requests)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=6, help="layers of the random model (default: 6)")
    parser.add_argument("--requests", type=int, nargs="+", default=[16], help="sizes of batches")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each (default: 3)")
    options = parser.parse_args()
    print(f"device: {cpu_name()}, {os.cpu_count()} cores")
    print(
        f"tokenmill {tokenmill.__version__}, llama-cpp-python {metadata.version('llama-cpp-python')}, "
        f"torch {torch.__version__}, Python {platform.python_version()}"
    )
    print(f"Qwen2.5-0.5B's shape, {options.layers} layers, bfloat16, greedy, output tokens per second\n")
    print(f"{'load':<12} {'tokenmill':>10} {'llama.cpp':>10} {'ratio':>6} {'same rows':>10}")
    with (
        checkpoint("qwen", layers=options.layers) as folder,
        process(tokenmill_side, folder, "bfloat16") as ours,
        process(llama_cpp_side, folder, "bfloat16") as theirs,
    ):
        for job in [single(int(QWEN["vocab_size"])), *map(batch, options.requests)]:
            row = measure(ours, theirs, job, repeats=options.repeats)
            print(
                f"{job.name:<12} {row.ours:>10.1f} {row.theirs:>10.1f} {row.ours / row.theirs:>6.2f} "
                f"{row.same_rows:>7}/{len(job.prompts)}",
                flush=True,
            )


if __name__ == "__main__":
    main()
