"""Model families: the facts of a checkpoint, its weights, and the network that runs them."""

from tokenmill.models.loader import build_model, load_model
from tokenmill.models.model import Model
from tokenmill.models.spec import ModelSpec, read_spec

__all__ = ["Model", "ModelSpec", "build_model", "load_model", "read_spec"]
