"""The model's tokenizer as grammar libraries need it. Nothing is loaded before the first grammar comes."""

from __future__ import annotations

from typing import Any

from tokenmill import hub
from tokenmill.config import EngineConfig
from tokenmill.grammar.base import BadGrammar


def load_tokenizer(config: EngineConfig) -> Any:
    """The fast tokenizer of transformers. Raises `BadGrammar` if the model has no such one."""
    from transformers import AutoTokenizer

    revision = None if config.tokenizer_path else config.revision
    path = config.tokenizer_path or config.model_path
    folder = hub.resolve(path, revision=revision, download_dir=config.download_dir)
    tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=config.trust_remote_code)
    if not tokenizer.is_fast:
        raise BadGrammar(
            f"the tokenizer of {path!r} ({type(tokenizer).__name__}) has no tokenizer.json, without which "
            "outputs cannot be constrained"
        )
    return tokenizer
