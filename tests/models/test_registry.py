"""The table of architectures holds what it promises."""

from __future__ import annotations

import pytest
import transformers

from tokenmill.errors import UnsupportedModel
from tokenmill.models.registry import MODELS, model_class


@pytest.mark.parametrize("architecture", MODELS)
def test_every_row_names_a_class_that_transformers_has_too(architecture: str) -> None:
    assert model_class(architecture).__name__ == architecture
    assert hasattr(transformers, architecture)


def test_an_unknown_architecture_lists_the_known_ones() -> None:
    with pytest.raises(UnsupportedModel) as caught:
        model_class("MixtralForCausalLM")
    for architecture in ("MixtralForCausalLM", *MODELS):
        assert architecture in str(caught.value)
