"""Random checkpoints of the true architectures with nothing left at zero, and a small engine to run them."""

from __future__ import annotations

import random
import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenmill.attention import create_backend
from tokenmill.attention.base import Step, StepLayout
from tokenmill.models import Model, ModelSpec, load_model, read_spec

_INTERPRETER = runpy.run_path(str(Path(__file__).parent.parent / "kernels" / "interpreter.py"))
_INTERPRETER["choose"]()

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(scope="session")
def triton_device() -> str:
    """Where Triton kernels run: "cuda", or "cpu" in the interpreter."""
    return str(_INTERPRETER["device"]())


@pytest.fixture
def save_checkpoint(tmp_path: Path) -> Callable[..., tuple[Path, Any]]:
    """`save_checkpoint("llama", shard_size="50KB", **config)` gives (folder, transformers' float32 model)."""

    def save(
        family: str, *, shard_size: str = "1GB", dtype: str = "float32", **settings: Any
    ) -> tuple[Path, Any]:
        import transformers

        folder = tmp_path / family
        auto: Any = transformers.AutoModelForCausalLM
        config = transformers.AutoConfig.for_model(family, **(SIZES | settings))
        torch.manual_seed(0)
        model = auto.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):  # transformers starts biases at zero and norms at one,
                    parameter.normal_(0.0, 0.3)  # where a forgotten one would not show
                elif "norm" in name:
                    parameter.normal_(1.0, 0.3)
        if dtype == "float32":
            model.save_pretrained(folder, max_shard_size=shard_size)
            return folder, model
        # Read back, because casting a model casts its rotary frequencies, too.
        model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=shard_size)
        return folder, auto.from_pretrained(folder, dtype=torch.float32).eval()

    return save


class TinyEngine:
    """Runs rows of tokens through a model with a paged cache whose unwritten slots are NaN."""

    def __init__(self, model: Model, spec: ModelSpec, num_rows: int, *, page_size: int = 4) -> None:
        self._model = model
        self._page_size = page_size
        columns = -(-spec.context_length // page_size)
        pages = list(range(num_rows * columns))
        random.Random(0).shuffle(pages)
        self._table_RP = torch.tensor(pages, dtype=torch.int32).view(num_rows, columns)
        dtype = next(iter(model.parameters())).dtype
        caches = [
            torch.full((2, len(pages), page_size, layer.num_kv_heads, layer.head_dim), torch.nan, dtype=dtype)
            for layer in spec.attention
        ]
        self._attention = create_backend(
            "torch", spec.attention, [c[0] for c in caches], [c[1] for c in caches], page_size
        )
        self._lengths = [0] * num_rows

    def step(self, tokens: Sequence[Sequence[int]], *, is_rehearsal: bool = False) -> list[torch.Tensor]:
        """Feed each row its next tokens; logits [tokens, V] of each. All rows decode if each has one token
        and a past."""
        starts = self._lengths
        counts = [len(row) for row in tokens]
        self._lengths = [start + count for start, count in zip(starts, counts, strict=True)]
        decode = all(count == 1 and start > 0 for count, start in zip(counts, starts, strict=True))
        rows = torch.repeat_interleave(torch.tensor(counts))
        positions = torch.cat([torch.arange(s, e) for s, e in zip(starts, self._lengths, strict=True)])
        pages = self._table_RP[rows, positions // self._page_size].long()
        self._attention.plan(
            StepLayout(
                positions_T=positions,
                slot_mapping_T=(pages * self._page_size + positions % self._page_size,),
                page_table_RP=(self._table_RP,),
                query_starts=torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32),
                lengths_R=torch.tensor(self._lengths, dtype=torch.int32),
                num_decodes=len(counts) if decode else 0,
                host_query_lengths=counts,
                host_lengths=self._lengths,
            )
        )
        with torch.inference_mode():
            flat = torch.tensor([token for row in tokens for token in row])
            step = Step(positions, self._attention, is_rehearsal=is_rehearsal)
            hidden_TD = self._model.forward(flat, step)
            return list(self._model.logits(hidden_TD).split(counts))

    def greedy(
        self, prompts: Sequence[Sequence[int]], count: int, *, chunk: int | None = None
    ) -> list[list[int]]:
        """`count` tokens after each prompt, the prompts fed in chunks (None: whole)."""
        size = chunk or max(len(prompt) for prompt in prompts)
        last: list[torch.Tensor] = [torch.empty(0)] * len(prompts)
        for start in range(0, max(len(prompt) for prompt in prompts), size):
            logits = self.step([prompt[start : start + size] for prompt in prompts])
            last = [new[-1] if len(new) else old for new, old in zip(logits, last, strict=True)]
        tokens = [[int(row.argmax())] for row in last]
        while len(tokens[0]) < count:
            for row, new in zip(tokens, self.step([row[-1:] for row in tokens]), strict=True):
                row.append(int(new[-1].argmax()))
        return tokens


@pytest.fixture
def open_engine() -> Callable[..., TinyEngine]:
    """`open_engine(folder, num_rows=1, dtype="float32", overrides={})` loads a checkpoint with our code."""

    def open_(
        folder: Path, *, num_rows: int = 1, dtype: str = "float32", overrides: dict[str, Any] | None = None
    ) -> TinyEngine:
        spec = read_spec(folder, overrides=overrides)
        model = load_model(folder, spec, dtype=getattr(torch, dtype), device=torch.device("cpu"))
        return TinyEngine(model, spec, num_rows)

    return open_
