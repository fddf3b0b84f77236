"""What we read of a configuration ourselves is what transformers reads; what it refuses is left to it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.errors import UnsupportedModel
from tokenmill.layers.rotary import RopeSpec, inverse_frequencies
from tokenmill.models.configuration import _WITHOUT_EFFECT, read_configuration
from tokenmill.models.spec import _configuration

pytestmark = pytest.mark.cpu

_COMMON = {
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-06,
    "attention_dropout": 0.0,
    "use_cache": True,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "transformers_version": "4.51.0",
}
_LLAMA3 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
# As the files of public checkpoints say it.
FILES: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": _COMMON
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rope_scaling": _LLAMA3,
        "rope_theta": 500000.0,
        "vocab_size": 128256,
    },
    "Qwen2.5-0.5B": _COMMON
    | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "max_window_layers": 21,
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Qwen3-0.6B": _COMMON
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Mistral-7B": _COMMON
    | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "vocab_size": 32000,
    },
    "as transformers 5 writes it": _COMMON
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": True,
        "bos_token_id": 1,
        "dtype": "float32",
        "torch_dtype": None,
        "eos_token_id": None,
        "head_dim": 32,
        "hidden_size": 64,
        "intermediate_size": 96,
        "max_position_embeddings": 256,
        "mlp_bias": True,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "pad_token_id": None,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
        "vocab_size": 128,
    },
}


def differences(stored: dict[str, Any], ours: Any) -> dict[str, Any]:
    """Attributes that transformers reads differently."""
    theirs = _configuration(Path("."), stored, {}, trust_remote_code=False)
    found = {}
    for name, value in vars(ours).items():
        # Qwen2's has no head size of its own: it follows from the others.
        other = getattr(theirs, name, theirs.hidden_size // theirs.num_attention_heads)
        other = str(other).removeprefix("torch.") if name == "dtype" else other
        if (value, type(value)) != (other, type(other)):
            found[name] = (value, other)
    return found


@pytest.mark.parametrize("name", FILES)
def test_public_checkpoints_need_no_transformers(name: str) -> None:
    ours = read_configuration(FILES[name])
    assert ours is not None
    assert differences(FILES[name], ours) == {}


_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 200),
    st.floats(allow_nan=False, allow_infinity=False, width=32),
    st.sampled_from(["silu", "default", "bfloat16", "torch.float16", "full_attention", ""]),
    st.lists(st.sampled_from(["full_attention", "sliding_attention", 2, None]), max_size=3),
    st.fixed_dictionaries(
        {"rope_type": st.sampled_from(["default", "linear", "llama3", "yarn", 5])},
        optional={
            "factor": st.sampled_from([2, 4.0, "8", None]),
            "rope_theta": st.sampled_from([100, 1e4, None]),
            "type": st.just("linear"),
            "original_max_position_embeddings": st.just(64),
            "low_freq_factor": st.just(1.0),
            "high_freq_factor": st.just(4.0),
        },
    ),
)
# What has no effect may be of any type.
_NAMES = st.sampled_from(
    sorted({name for file in FILES.values() for name in file} - _WITHOUT_EFFECT | {"rope_scaling", "x"})
)


@settings(max_examples=600, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(list(FILES)),
    removed=st.sets(_NAMES, max_size=2),
    changed=st.dictionaries(_NAMES, _VALUES, max_size=2),
)
def test_what_transformers_reads_otherwise_is_left_to_it(
    name: str, removed: set[str], changed: dict[str, Any]
) -> None:
    stored = {key: value for key, value in FILES[name].items() if key not in removed} | changed
    ours = read_configuration(stored)
    if ours is None:
        return
    try:
        assert differences(stored, ours) == {}
    except UnsupportedModel as error:
        pytest.fail(f"transformers refuses {stored}: {error}")


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default", "rope_theta": 1000000},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3},
        {"rope_theta": 500000.0, **_LLAMA3},
        {"rope_theta": 10000.0, **_LLAMA3, "factor": 32, "original_max_position_embeddings": 100},
    ],
)
def test_frequencies_have_the_bits_of_transformers(parameters: dict[str, Any], head_dim: int) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        head_dim=head_dim, max_position_embeddings=4096, rope_parameters=dict(parameters), num_hidden_layers=1
    )
    ours, factor = inverse_frequencies(RopeSpec(parameters, head_dim, 4096), torch.arange(1))
    assert torch.equal(ours, LlamaRotaryEmbedding(config).inv_freq)
    assert factor == 1.0


def test_an_engine_without_a_tokenizer_starts_without_transformers() -> None:
    code = (
        "import sys, tokenmill\n"
        "with tokenmill.Engine(model_path='tiny', device='cpu', skip_tokenizer_init=True) as engine:\n"
        "    engine.generate(input_ids=[1, 2, 3], sampling_params={'max_new_tokens': 2})\n"
        "print([name for name in sys.modules if name.split('.')[0] == 'transformers'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
