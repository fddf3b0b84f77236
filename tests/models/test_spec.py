"""What is read from config.json and generation_config.json, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tokenmill.errors import InvalidArgument, ModelNotFound, UnknownArgument, UnsupportedModel
from tokenmill.models import ModelSpec, read_spec

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}

Read = Callable[..., ModelSpec]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """`read(config, overrides=..., context_length=...)` writes a config.json and reads it."""

    def read_(config: dict[str, Any], **arguments: Any) -> ModelSpec:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return read_spec(tmp_path, **arguments)

    return read_


def test_facts_and_defaults(read: Read) -> None:
    spec = read(LLAMA)
    assert (spec.architecture, spec.vocab_size, spec.hidden_size, spec.inner_size) == (
        "LlamaForCausalLM",
        128,
        64,
        96,
    )
    assert (spec.num_layers, spec.context_length, spec.dtype, spec.tied_embeddings) == (
        2,
        256,
        "bfloat16",
        False,
    )
    assert len(spec.attention) == 2
    layer = spec.attention[0]
    assert (layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.window) == (4, 2, 16, None)
    assert layer.scale == 0.25
    assert spec.norm_epsilon == 1e-6  # transformers' default: the file does not say
    assert spec.rope.parameters["rope_theta"] == 10000.0


def test_the_end_tokens_are_those_of_both_files(read: Read, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5, 2]}))
    assert read(LLAMA).eos_token_ids == (2, 5, 7)
    assert read(LLAMA | {"eos_token_id": [9]}).eos_token_ids == (2, 5, 7, 9)
    (tmp_path / "generation_config.json").unlink()
    assert read(LLAMA | {"eos_token_id": None}).eos_token_ids == ()
    assert read(LLAMA | {"eos_token_id": [-1, 2, 128]}).eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (MISTRAL | {"sliding_window": 32}, [32, 32]),
        (MISTRAL | {"sliding_window": None}, [None, None]),
        (MISTRAL | {"sliding_window": 256}, [None, None]),  # hides nothing of 256 tokens
        (QWEN2 | {"sliding_window": 32}, [None, None]),
        (QWEN2 | {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 1}, [None, 32]),
        (LLAMA | {"sliding_window": 32}, [None, None]),
    ],
)
def test_windows(read: Read, config: dict[str, Any], windows: list[int | None]) -> None:
    assert [layer.window for layer in read(config).attention] == windows


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        (None, 256),
        ({"rope_type": "linear", "factor": 4.0}, 1024),
        ({"rope_type": "dynamic", "factor": 2.5}, 640),
        ({"rope_type": "yarn", "factor": 4.0}, 1024),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            256,
        ),
    ],
)
def test_context_length_follows_the_scaling(read: Read, scaling: dict[str, Any] | None, length: int) -> None:
    assert read(LLAMA | {"rope_scaling": scaling}).context_length == length


def test_context_length_can_be_shortened_but_not_stretched(read: Read) -> None:
    assert read(LLAMA, context_length=100).context_length == 100
    with pytest.raises(InvalidArgument, match=r"context_length=257 .*256.*max_position_embeddings"):
        read(LLAMA, context_length=257)
    with pytest.raises(InvalidArgument, match="context_length=0"):
        read(LLAMA, context_length=0)
    spec = read(LLAMA, context_length=257, overrides={"max_position_embeddings": 512})
    assert spec.context_length == 257


def test_a_window_is_compared_with_the_shortened_context(read: Read) -> None:
    spec = read(MISTRAL | {"sliding_window": 100}, context_length=100)
    assert [layer.window for layer in spec.attention] == [None, None]


def test_dtype_comes_from_the_weights_where_the_configuration_is_silent(read: Read, tmp_path: Path) -> None:
    silent = {key: value for key, value in LLAMA.items() if key != "torch_dtype"}
    assert read(silent).dtype == "float32"  # no weights either
    save_file({"a": torch.zeros(2, dtype=torch.float16)}, tmp_path / "model.safetensors")
    assert read(silent).dtype == "float16"
    assert read(LLAMA).dtype == "bfloat16"
    assert read(LLAMA | {"dtype": "float32"}, overrides={"torch_dtype": "float16"}).dtype == "float16"


def test_overrides_win_in_every_spelling(read: Read) -> None:
    new = LLAMA | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5.0}}
    old = LLAMA | {"rope_theta": 5.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    for config in (old, new):

        def parameters(overrides: dict[str, Any], config: dict[str, Any] = config) -> Any:
            found = dict(read(config, overrides=overrides).rope.parameters)
            found.pop("type", None)
            return found

        kept = {"rope_type": "linear", "factor": 2.0}
        assert parameters({"rope_theta": 7.0}) == kept | {"rope_theta": 7.0}
        assert parameters({"rope_scaling": None}) == {"rope_type": "default", "rope_theta": 5.0}
        other = {"rope_type": "dynamic", "factor": 3.0}
        assert parameters({"rope_scaling": other}) == other | {"rope_theta": 5.0}
        assert parameters({"rope_parameters": other}) == other | {"rope_theta": 5.0}
        assert parameters({"rope_parameters": other | {"rope_theta": 8.0}}) == other | {"rope_theta": 8.0}
        assert parameters({"num_hidden_layers": 1}) == kept | {"rope_theta": 5.0}


def test_overrides_of_layers_and_windows_reach_a_stored_list(read: Read) -> None:
    stored = QWEN2 | {"sliding_window": 32, "layer_types": ["full_attention"] * 2}

    def windows(overrides: dict[str, Any]) -> list[int | None]:
        return [layer.window for layer in read(stored, overrides=overrides).attention]

    assert windows({"num_hidden_layers": 1}) == [None]
    assert windows({"num_hidden_layers": 3}) == [None, None, None]
    assert windows({"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 32}) == [32, 32]


def test_an_override_that_does_not_exist_is_an_error(read: Read) -> None:
    with pytest.raises(
        UnknownArgument, match=r"max_position_embedings.*Did you mean 'max_position_embeddings'"
    ):
        read(LLAMA, overrides={"max_position_embedings": 8})


def test_a_cut_model_knows_its_stored_layers(read: Read) -> None:
    spec = read(LLAMA, overrides={"num_hidden_layers": 1})
    assert (spec.num_layers, spec.num_stored_layers) == (1, 2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["LamaForCausalLM"]}, r"LamaForCausalLM.*Did you mean 'LlamaForCausalLM'"),
        ({"architectures": None}, "architectures"),
        ({"model_type": "strange"}, "strange"),
        ({"hidden_act": "gelu"}, r"hidden_act='gelu'.*silu"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized"),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, r"spiral.*yarn"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mrope_section": [1]}}, "mrope_section"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.0}}, "factor"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [1.0] * 8}},
            "rope parameters",
        ),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0\.5"),
        ({"hidden_size": 65}, "65"),
        ({"num_attention_heads": "four"}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, r"num_attention_heads=4.*num_key_value_heads=3"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"num_hidden_layers": 10**30}, r"num_hidden_layers=10+ must be from 1 to 10000"),
        ({"hidden_size": -4}, "hidden_size=-4 must be from 1"),
        ({"head_dim": 0}, "head_dim=0 must be from 1"),
        ({"vocab_size": None}, "vocab_size"),
        ({"max_position_embeddings": 2**31}, "max_position_embeddings=2147483648"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 1e30}}, r"2\.56e\+32 tokens"),
        ({"rope_scaling": {"rope_type": "linear", "factor": float("inf")}}, "inf tokens"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
        ({"rms_norm_eps": -1.0}, r"rms_norm_eps=-1\.0"),
        ({"architectures": 5}, "must be a list with one name, not 5"),
        ({"architectures": ["MistralForCausalLM"]}, r"does not go with model_type 'llama'.*'sliding_window'"),
        ({"model_type": ["llama"]}, r"model_type \['llama'\] is none"),
        (QWEN2 | {"head_dim": float("nan")}, "head_dim=nan must be a whole number"),
        (QWEN2 | {"num_hidden_layers": 2**40}, "num_hidden_layers=1099511627776"),
        (
            {"hidden_size": 128, "num_attention_heads": 128, "num_key_value_heads": 1, "head_dim": 8192},
            "let 1048576 numbers of queries share a key head; at most 65536 may",
        ),
        (
            QWEN2 | {"num_attention_heads": 2048, "num_key_value_heads": 2048},
            r"size of a head.*num_attention_heads=2048 makes it 0",
        ),
        ({"torch_dtype": "float64"}, r"float64.*bfloat16"),
        (
            {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 0},
            "sliding_window=0",
        ),
        (
            {
                "model_type": "qwen2",
                "architectures": ["Qwen2ForCausalLM"],
                "layer_types": ["sliding_attention", "full_attention"],
            },
            "sliding_window is null",
        ),
    ],
)
def test_what_we_do_not_run_is_refused_by_name(
    read: Read, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(UnsupportedModel, match=words) as caught:
        read(LLAMA | changes)
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: ")


def test_a_refused_override_is_called_so(read: Read) -> None:
    with pytest.raises(
        UnsupportedModel, match=r"config\.json with json_model_override_args: hidden_act='gelu'"
    ):
        read(LLAMA, overrides={"hidden_act": "gelu"})


def test_an_override_may_repair_what_is_stored(read: Read) -> None:
    spec = read(LLAMA | {"num_hidden_layers": "two"}, overrides={"num_hidden_layers": 2})
    assert (spec.num_layers, spec.num_stored_layers) == (2, 2)


@pytest.mark.parametrize("ids", ["x", {}, 1.5, True, [2, None], [[2]]])
def test_an_end_token_that_is_no_id(read: Read, tmp_path: Path, ids: Any) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(InvalidArgument, match=r"eos_token_id=.*/generation_config\.json must be a token id"):
        read(LLAMA)


def test_a_folder_without_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InvalidArgument, match="not valid JSON"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(InvalidArgument, match="JSON object"):
        read_spec(tmp_path)


def test_a_configuration_class_in_the_folder_needs_trust(
    read: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # transformers copies such code into its cache and puts that on the path.
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", sys.path[:])
    (tmp_path / "configuration_own.py").write_text(
        "from transformers import LlamaConfig\n\n\n"
        "class OwnConfig(LlamaConfig):\n"
        '    model_type = "own"\n\n'
        "    def __post_init__(self, **kwargs):\n"
        "        super().__post_init__(**kwargs)\n"
        "        self.rms_norm_eps = 0.25\n"
    )
    own = LLAMA | {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    with pytest.raises(UnsupportedModel, match="own"):
        read(own)
    assert read(own, trust_remote_code=True).norm_epsilon == 0.25


def test_reading_a_configuration_imports_no_modeling_code() -> None:
    """What a start waits for: some releases of transformers import everything to compose a docstring."""
    code = (
        "import sys\n"
        "from tokenmill.hub import resolve\n"
        "from tokenmill.models import read_spec\n"
        "read_spec(resolve('tiny'))\n"
        "heavy = {'transformers.modeling_utils', 'transformers.generation.utils', 'torch._dynamo'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "import transformers\n"
        "assert transformers.utils.auto_docstring.__name__ == 'auto_docstring'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
