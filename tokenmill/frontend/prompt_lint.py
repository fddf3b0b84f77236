"""Looks at prompts for two common slips that make answers worse without any error, and tells them once.

A prompt is never changed: what the user wrote is what the model gets.
"""

from __future__ import annotations

import logging
import warnings
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenmill.frontend.tokenizer import Tokenizer

logger = logging.getLogger("tokenmill")


class PromptLint:
    """Watches the prompts of one engine; says each thing once. May be used from any thread."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._told_bos = self._told_template = tokenizer is None

    def look(self, prompt: Any) -> None:
        """Look at a valid `prompt` argument of `generate`; of a batch, at the first text."""
        texts = [prompt] if isinstance(prompt, str) else prompt
        if not isinstance(texts, list | tuple) or not texts:
            return
        text = texts[0]
        if not self._told_bos and self._has_two_bos(text):
            self._told_bos = True
            warnings.warn(
                "a prompt begins with the token that starts a text, and the tokenizer adds another; leave it "
                "out of the prompt, or use chat() or input_ids",
                stacklevel=2,
            )
        if not self._told_template:
            self._told_template = True
            if self._template_tokens and not any(token in text for token in self._template_tokens):
                logger.info(
                    "the model has a chat template, and the prompt has nothing of it: generate() completes "
                    "text as it is, chat() applies the template"
                )

    def _has_two_bos(self, text: str) -> bool:
        """Whether the text begins with the token that the tokenizer puts before every prompt."""
        assert self._tokenizer is not None
        bos = self._tokenizer.get().bos_token
        if not bos or not text.startswith(bos):
            return False
        [ids] = self._tokenizer.encode_batch([text])
        return ids[:2] == [self._tokenizer.bos_token_id] * 2

    @cached_property
    def _template_tokens(self) -> list[str]:
        """The special tokens that the tokenizer's chat template writes."""
        assert self._tokenizer is not None
        tokenizer = self._tokenizer.get()
        template = str(tokenizer.chat_template or "")
        return [token for token in tokenizer.all_special_tokens if token in template]
