"""Shared fixtures: small random models of the true architectures, and what transformers says of them."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

# Small models gain nothing from a second thread, and on a busy machine two of them wait for each other.
# torch reads this when it is imported; child processes inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test never reaches for the network
if not torch.cuda.is_available():
    # Triton's interpreter runs the GPU kernels; it must be chosen before anything imports Triton.
    os.environ.setdefault("TRITON_INTERPRET", "1")

with contextlib.suppress(ModuleNotFoundError):  # tests on a GPU go without
    from hypothesis import HealthCheck, settings

    # A busy machine is no reason to fail.
    settings.register_profile("tokenmill", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("tokenmill")

_SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,  # far from zero, so that the best token leads clearly
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}


# Files that take longest come first, so that no processor is left alone with one of them at the end.
_LONGEST = (
    "test_kills",
    "test_seeds",
    "test_hostile_calls",
    "test_process",
    "test_readme",
    "test_leaks",
    "test_paths_agree",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the files; tests of a file stay as they are."""
    ranks = {name: rank for rank, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path.stem, len(ranks)))


@pytest.fixture(autouse=True)
def _fresh_log_level() -> None:
    """An engine sets the level of the logger that all engines share; no test inherits another's."""
    logging.getLogger("tokenmill").setLevel(logging.NOTSET)


@pytest.fixture(autouse=True, scope="session")
def _ctrl_c_works() -> None:
    """What a shell starts in the background ignores Ctrl-C, and so would the commands that tests start."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`make_model("llama", dtype="float32", **config)` gives a checkpoint folder with a byte tokenizer."""

    @cache
    def build(family: str, dtype: str, settings: tuple[tuple[str, Any], ...]) -> Path:
        from transformers import AutoConfig, AutoModelForCausalLM

        folder = tmp_path_factory.mktemp(family)
        config = AutoConfig.for_model(family, **(_SIZES | dict(settings)))
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        model.save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
        return folder

    def make(family: str = "llama", *, dtype: str = "float32", **settings: Any) -> Path:
        return build(family, dtype, tuple(sorted(settings.items())))

    return make


@pytest.fixture(scope="session")
def tiny_engine() -> Iterator[Any]:
    """An engine of the bundled model; tests of words leave it as they found it."""
    import tokenmill as sgl

    with sgl.Engine(model_path="tiny", random_seed=1) as engine:
        yield engine


def byte_tokenizer() -> Any:
    """Token i is byte i; 256 = <s>, 257 = </s>, 258 = <pad>. Adds nothing to a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # Byte-level BPE writes bytes as printable characters: printable ones as themselves, the rest from 256 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable}
    characters |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab={characters[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<pad>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


@pytest.fixture(scope="session")
def transformers_greedy() -> Callable[..., list[int]]:
    """`transformers_greedy(folder, prompt_ids, count)`: the next `count` tokens of one prompt, in float32."""

    @cache
    def load(folder: Path) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @cache
    def complete(folder: Path, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
        from transformers import DynamicCache

        model = load(folder)
        kept = DynamicCache(config=model.config)
        tokens: list[int] = []
        feed = list(prompt)
        with torch.inference_mode():
            while len(tokens) < count:
                # By its place: the name of this argument differs among releases of transformers.
                logits = model(torch.tensor([feed]), None, None, kept, use_cache=True).logits
                feed = [int(logits[0, -1].argmax())]
                tokens += feed
        return tuple(tokens)

    def greedy(folder: Path, prompt: Sequence[int], count: int) -> list[int]:
        return list(complete(folder, tuple(prompt), count))

    return greedy
