"""Every family and setting against transformers: logits, and 64 greedy tokens however the prompt is fed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

Save = Callable[..., tuple[Path, Any]]
Open = Callable[..., Any]

ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-all": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 0.4,
        "truncate": False,
    },
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "longrope": {
        "factor": 2.0,
        "original_max_position_embeddings": 128,
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [1.0 + 0.7 * i for i in range(8)],
    },
    "proportional": {"partial_rotary_factor": 0.5},
}


def rope(name: str, theta: float = 5000.0) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": name, "rope_theta": theta} | ROPES[name]}


SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama one key head": ("llama", {"num_key_value_heads": 1}),
    "llama all key heads": ("llama", {"num_key_value_heads": 4}),
    "llama wide heads": ("llama", {"head_dim": 32}),
    "llama narrow heads": ("llama", {"head_dim": 8, "num_key_value_heads": 4}),
    "llama one layer": ("llama", {"num_hidden_layers": 1}),
    "llama epsilon": ("llama", {"rms_norm_eps": 0.1}),
    "llama theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 123.0}}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 odd ratio": ("qwen2", {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 8}),
    "qwen2 windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen2 unused window": ("qwen2", {"use_sliding_window": False, "sliding_window": 7}),
    "qwen2 layer types": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3 tied": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3 biases": ("qwen3", {"head_dim": 16, "attention_bias": True}),
    "qwen3 windows": (
        "qwen3",
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0},
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral window": ("mistral", {"sliding_window": 6}),
    "mistral window of one": ("mistral", {"sliding_window": 1}),
    "mistral wide heads": ("mistral", {"sliding_window": None, "head_dim": 32}),
}
SETTINGS |= {
    f"{family} {name}": (family, rope(name) | ({"head_dim": 16} if family == "qwen3" else {}))
    for family in ("llama", "qwen2", "qwen3", "mistral")
    for name in ROPES
}


@pytest.fixture(params=SETTINGS, ids=lambda name: name.replace(" ", "-"))
def checkpoint(request: pytest.FixtureRequest, save_checkpoint: Save) -> tuple[Path, Any]:
    family, settings = SETTINGS[request.param]
    return save_checkpoint(family, **settings)


def random_prompt(length: int, *, seed: int = 0) -> list[int]:
    return torch.randint(3, 128, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def reference_logits(model: Any, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([prompt])).logits[0]
    return logits.float()


def reference_greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens of transformers with its own cache."""
    from transformers import DynamicCache

    tokens: list[int] = []
    kept, feed = DynamicCache(config=model.config), prompt
    with torch.inference_mode():
        while len(tokens) < count:
            # By its place: the name of this argument differs among releases of transformers.
            logits = model(torch.tensor([feed]), None, None, kept, use_cache=True).logits
            feed = [int(logits[0, -1].argmax())]
            tokens += feed
    return tokens


def from_pretrained(folder: Path, **arguments: Any) -> Any:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, **arguments)
    return model.eval()


def relative_difference(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return float((ours - reference).abs().max() / reference.abs().max())


def test_logits_agree_in_float32(checkpoint: tuple[Path, Any], open_engine: Open) -> None:
    """For a prompt fed whole, and in pieces: chunks with a past, and single tokens."""
    folder, model = checkpoint
    prompt = random_prompt(80)
    expected = reference_logits(model, prompt)
    engine = open_engine(folder, num_rows=2)
    whole, first = engine.step([prompt, prompt[:1]])
    assert relative_difference(whole, expected) <= 1e-4
    pieces = [prompt[1:40], prompt[40:41], prompt[41:79], prompt[79:]]
    rest = [engine.step([[3], piece])[1] for piece in pieces]
    assert relative_difference(torch.cat([first, *rest]), expected) <= 1e-4


GREEDY = [
    "llama",
    "llama biases",
    "qwen2 tied",
    "qwen2 windows",
    "qwen3",
    "qwen3 windows",
    "mistral window",
    "llama llama3",
    "qwen2 yarn",
    "mistral dynamic",
    "qwen3 longrope",
]


@pytest.mark.parametrize("name", GREEDY, ids=lambda name: name.replace(" ", "-"))
def test_greedy_tokens_are_the_same(name: str, save_checkpoint: Save, open_engine: Open) -> None:
    """Alone and in a batch, whole and in chunks."""
    family, settings = SETTINGS[name]
    folder, model = save_checkpoint(family, **settings)
    prompts = [random_prompt(length, seed=length) for length in (13, 40)]
    expected = [reference_greedy(model, prompt, 64) for prompt in prompts]
    assert len({tuple(tokens) for tokens in expected}) == 2
    assert [open_engine(folder).greedy([prompt], 64)[0] for prompt in prompts] == expected
    # Equal lengths, because the small engine's rows march together.
    twins = [prompts[1], prompts[1][::-1]]
    expected = [expected[1], reference_greedy(model, twins[1], 64)]
    assert open_engine(folder, num_rows=2).greedy(twins, 64) == expected
    assert open_engine(folder, num_rows=2).greedy(twins, 64, chunk=9) == expected


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_rehearsal_is_the_last_layer_alone(family: str, save_checkpoint: Save, open_engine: Open) -> None:
    """As if the others were not there, on their output: the embedding."""
    folder, reference = save_checkpoint(family)
    prompt = [5, 9, 17, 2, 30]
    (rehearsed,) = open_engine(folder).step([prompt], is_rehearsal=True)
    reference.model.layers = reference.model.layers[-1:]
    reference.config.num_hidden_layers = 1
    with torch.no_grad():
        expected = reference(torch.tensor([prompt]), use_cache=False).logits[0]
    torch.testing.assert_close(rehearsed, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_scalings_by_length_agree_beyond_the_original_context(
    name: str, save_checkpoint: Save, open_engine: Open
) -> None:
    """Fed one by one, tokens past the original context are rotated as in transformers."""
    settings = rope(name) | {"max_position_embeddings": 64 if name == "dynamic" else 128}
    if name == "longrope":
        settings["rope_parameters"]["original_max_position_embeddings"] = 32
    folder, model = save_checkpoint("llama", **settings)
    prompt = random_prompt(24)
    assert open_engine(folder).greedy([prompt], 72)[0] == reference_greedy(model, prompt, 72)


@pytest.mark.parametrize("name", ["llama biases", "qwen2 tied", "qwen3", "mistral window", "llama yarn"])
def test_bfloat16_is_as_close_as_that_of_transformers(
    name: str, save_checkpoint: Save, open_engine: Open
) -> None:
    family, settings = SETTINGS[name]
    folder, model = save_checkpoint(family, dtype="bfloat16", **settings)
    prompts = [random_prompt(60, seed=seed) for seed in range(8)]
    exact = torch.cat([reference_logits(model, prompt) for prompt in prompts])
    engine = open_engine(folder, num_rows=len(prompts), dtype="bfloat16")
    our_error = (torch.cat(engine.step(prompts)).float() - exact).norm()
    model = from_pretrained(folder, dtype=torch.bfloat16)
    their_error = (torch.cat([reference_logits(model, prompt) for prompt in prompts]) - exact).norm()
    assert their_error > 0
    assert our_error <= 1.5 * their_error


def test_a_bfloat16_checkpoint_runs_in_float32(save_checkpoint: Save, open_engine: Open) -> None:
    folder, model = save_checkpoint("llama", dtype="bfloat16")
    (ours,) = open_engine(folder, dtype="float32").step([random_prompt(30)])
    assert ours.dtype == torch.float32
    assert relative_difference(ours, reference_logits(model, random_prompt(30))) <= 1e-4


def test_overrides_change_the_model_as_in_transformers(save_checkpoint: Save, open_engine: Open) -> None:
    folder, _ = save_checkpoint("qwen2", num_hidden_layers=3)
    model = from_pretrained(folder, num_hidden_layers=2)
    prompt = random_prompt(20)
    (ours,) = open_engine(folder, overrides={"num_hidden_layers": 2}).step([prompt])
    assert relative_difference(ours, reference_logits(model, prompt)) <= 1e-4


@pytest.mark.parametrize("old", [True, False])
def test_old_and_new_spellings_of_rope_settings(old: bool, save_checkpoint: Save, open_engine: Open) -> None:
    """An override wins over the file, whichever spelling either uses."""
    import json

    folder, model = save_checkpoint("llama", **rope("linear", theta=777.0))
    prompt = random_prompt(40)
    expected = reference_logits(model, prompt)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    path.write_text(
        json.dumps(config | {"rope_theta": 777.0, "rope_scaling": {"type": "linear", "factor": 3.0}})
    )
    assert relative_difference(open_engine(folder).step([prompt])[0], expected) <= 1e-4
    path.write_text(json.dumps(config | {"rope_parameters": {"rope_type": "default", "rope_theta": 9.0}}))
    overrides: dict[str, Any] = {"rope_parameters": rope("linear", theta=777.0)["rope_parameters"]}
    if old:
        overrides = {"rope_theta": 777.0, "rope_scaling": {"type": "linear", "factor": 3.0}}
    ours = open_engine(folder, overrides=overrides).step([prompt])[0]
    assert relative_difference(ours, expected) <= 1e-4
