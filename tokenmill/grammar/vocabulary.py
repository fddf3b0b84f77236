"""The model's tokenizer as grammar libraries need it. Nothing is loaded before somebody asks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenmill import hub
from tokenmill.config import EngineConfig
from tokenmill.grammar.base import BadGrammar
from tokenmill.imports import import_transformers


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The content of a tokenizer.json, and what is read of it."""

    document: dict[str, Any]  # without padding and truncation
    num_tokens: int  # ids below are tokens
    end_id: int  # a special token


def read_vocabulary(config: EngineConfig) -> Vocabulary:
    """From the model's tokenizer.json, or from what transformers makes of its other files.

    Raises `BadGrammar` if the model has no fast tokenizer.
    """
    path = _folder(config) / "tokenizer.json"
    if path.exists():
        text = path.read_text(encoding="utf-8")
    else:
        text = load_tokenizer(config).backend_tokenizer.to_str()
    document = {**json.loads(text), "padding": None, "truncation": None}
    known = document["model"]["vocab"]
    added = document.get("added_tokens") or []
    num_known = 1 + max(known.values(), default=-1) if isinstance(known, dict) else len(known)
    num_tokens = max([num_known, *(token["id"] + 1 for token in added)])
    special = [token["id"] for token in added if token.get("special")]
    return Vocabulary(document, num_tokens, special[0] if special else num_tokens - 1)


def load_tokenizer(config: EngineConfig) -> Any:
    """The fast tokenizer of transformers. Raises `BadGrammar` if the model has no such one."""
    folder = _folder(config)
    auto_tokenizer = import_transformers().AutoTokenizer
    tokenizer = auto_tokenizer.from_pretrained(str(folder), trust_remote_code=config.trust_remote_code)
    if not tokenizer.is_fast:
        raise BadGrammar(
            f"the tokenizer in {folder} ({type(tokenizer).__name__}) has no tokenizer.json, without which "
            "outputs cannot be constrained"
        )
    return tokenizer


def _folder(config: EngineConfig) -> Path:
    revision = None if config.tokenizer_path else config.revision
    path = config.tokenizer_path or config.model_path
    return Path(hub.resolve(path, revision=revision, download_dir=config.download_dir))
