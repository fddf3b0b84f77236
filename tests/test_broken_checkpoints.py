"""Checkpoints whose files are damaged: what is wrong with which file is told, by one of our errors."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tokenmill as sgl

pytestmark = pytest.mark.cpu

Make = Callable[..., Path]
Damage = Callable[[Path], None]
INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"


def holds(content: bytes | str) -> Damage:
    """The file holds this."""
    return lambda path: path.write_bytes(content.encode() if isinstance(content, str) else content) and None


def has(**fields: Any) -> Damage:
    """A JSON file has these fields, whatever it had before."""
    return lambda path: holds(json.dumps(json.loads(path.read_text()) | fields))(path)


def folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def dead_link(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("nowhere")


def half(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def header_of_garbage(path: Path) -> None:
    path.write_bytes(struct.pack("<Q", 100) + b"x" * 1000)


def header_too_long(path: Path) -> None:
    path.write_bytes(struct.pack("<Q", 2**62) + path.read_bytes()[8:])


def only_a_folder(path: Path) -> None:
    path.unlink()
    (path.parent / "a.safetensors").mkdir()


NO_JSON: list[tuple[Damage, str]] = [
    (holds(""), "is not valid JSON (it is empty)"),
    (holds("{"), "is not valid JSON"),
    (holds("version https://git-lfs.github.com/spec/v1"), "Git LFS pointer"),
    (holds("[]"), "must hold a JSON object, not list"),
    (holds("null"), "must hold a JSON object"),
    (holds(b"\xff\xfe{}"), "is not UTF-8"),
    (holds("[" * 100_000), "is not valid JSON"),
    (holds('{"a": ' + "1" * 5000 + "}"), "is not valid JSON"),
    (folder, "cannot be read"),
    (dead_link, "cannot be read"),
]
# What may be wrong with what a new engine and new weights read alike: file, damage, words of the message.
DAMAGES: list[tuple[str, Damage, str]] = [
    *((name, *rest) for name in ("config.json", "generation_config.json", INDEX) for rest in NO_JSON),
    ("config.json", half, "is not valid JSON"),
    ("config.json", holds("{}"), "model_type None"),
    ("config.json", has(hidden_size="x"), "hidden_size"),
    ("config.json", has(hidden_size=None), "hidden_size"),
    ("config.json", has(hidden_size=-1), "hidden"),
    ("config.json", has(hidden_size=0), "hidden_size"),
    ("config.json", has(num_hidden_layers=2**40), "num_hidden_layers"),
    ("config.json", has(rope_parameters="x"), "rope_parameters"),
    ("config.json", has(architectures=7), "architectures"),
    ("generation_config.json", has(eos_token_id="x"), "eos_token_id"),
    (INDEX, holds("{}"), "must have an object 'weight_map'"),
    (INDEX, holds('{"weight_map": {}}'), "must have an object 'weight_map'"),
    (INDEX, holds('{"weight_map": ["x"]}'), "must have an object 'weight_map'"),
    (INDEX, holds('{"weight_map": {"a": 5}}'), "must have an object 'weight_map'"),
    (INDEX, holds('{"weight_map": {"a": "b", "c": null}}'), "must have an object 'weight_map'"),
    (INDEX, holds('{"weight_map": {"a": "lost.safetensors"}}'), "lacks lost.safetensors"),
    (INDEX, holds(json.dumps({"weight_map": {"a": "n" * 5000}})), "lacks nnn"),
    (INDEX, holds(json.dumps({"weight_map": {str(n): f"{n}.st" for n in range(9)}})), "(9 in all)"),
    (WEIGHTS, holds(""), "is not a readable safetensors file"),
    (WEIGHTS, holds(bytes(1000)), "is not a readable safetensors file"),
    (WEIGHTS, half, "is not a readable safetensors file"),
    (WEIGHTS, header_of_garbage, "is not a readable safetensors file"),
    (WEIGHTS, header_too_long, "is not a readable safetensors file"),
    (WEIGHTS, folder, "is not a readable safetensors file (it is a folder)"),
    (WEIGHTS, dead_link, "is not a readable safetensors file"),
    (WEIGHTS, only_a_folder, "a.safetensors is not a readable safetensors file (it is a folder)"),
    (WEIGHTS, Path.unlink, "has no safetensors weights"),
]
TOKENIZER_DAMAGES: list[tuple[str, Damage, str]] = [
    *(("tokenizer.json", *rest) for rest in NO_JSON),
    # Without the others a tokenizer may do, so a name that leads nowhere is none.
    *(
        (name, *rest)
        for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
        for rest in NO_JSON[:-2]
    ),
    ("tokenizer.json", half, "is not valid JSON"),
    ("tokenizer.json", holds("{}"), "tokenizer_path"),
    ("tokenizer.json", has(model=5), "skip_tokenizer_init"),
    ("tokenizer.json", has(decoder="x"), "tokenizer_path"),
    ("tokenizer_config.json", has(eos_token=5), "eos_token"),
    ("tokenizer_config.json", has(model_max_length="x"), "tokenizer_path"),
    ("tokenizer_config.json", has(added_tokens_decoder=[]), "tokenizer_path"),
    ("chat_template.jinja", holds(b"\xff{{ messages }}"), "is not UTF-8"),
]


def open_engine(path: Path, **arguments: Any) -> sgl.Engine:
    return sgl.Engine(model_path=str(path), device="cpu", max_total_tokens=1024, **arguments)


@pytest.fixture
def copy(make_model: Make, tmp_path: Path) -> Path:
    return Path(shutil.copytree(make_model("llama"), tmp_path / "copy"))


@pytest.fixture(scope="module")
def llm(make_model: Make) -> Iterator[sgl.Engine]:
    with open_engine(make_model("llama")) as engine:
        yield engine


@pytest.mark.parametrize(("name", "damage", "words"), [*DAMAGES, *TOKENIZER_DAMAGES])
def test_an_engine_tells_which_file_is_broken(copy: Path, name: str, damage: Damage, words: str) -> None:
    damage(copy / name)
    with pytest.raises(sgl.InvalidArgument) as caught:
        open_engine(copy)
    message = str(caught.value)
    assert words in message
    assert str(copy) in message
    assert name in message or Path.unlink is damage or only_a_folder is damage


@pytest.mark.parametrize(("name", "damage", "words"), DAMAGES)
def test_broken_files_leave_the_weights_as_they_were(
    llm: sgl.Engine, copy: Path, name: str, damage: Damage, words: str
) -> None:
    before = llm.get_weights_by_name("model.norm.weight")
    damage(copy / name)
    success, message, num_paused = llm.update_weights_from_disk(copy)
    assert (success, num_paused) == (False, 0)
    assert words in message
    assert str(copy) in message
    with pytest.raises(sgl.InvalidArgument) as caught:
        llm.update_weights_from_disk(copy, on_error="raise")
    assert str(caught.value) == message
    assert llm.get_weights_by_name("model.norm.weight") == before


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_a_core_process_tells_it_too(copy: Path, name: str) -> None:
    (copy / name).write_text("{")
    with pytest.raises(sgl.InvalidArgument, match=f"{name} is not valid JSON"):
        open_engine(copy, core_process=True, skip_tokenizer_init=True)
