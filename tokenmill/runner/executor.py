"""Model, page pool and attention as one thing: a forward pass over the tensors of a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tokenmill.attention import create_backend
from tokenmill.attention.base import AttentionSpec, Backend, Step, StepLayout
from tokenmill.kernels.launching import invariant, replayed
from tokenmill.kernels.sharing import SharingCosts
from tokenmill.kvcache.pool import LayerShape, PagePool
from tokenmill.models import Model
from tokenmill.runner.few_rows import FewRows


class Executor:
    """Runs the model. Owns the pool; knows neither requests nor rows."""

    def __init__(
        self,
        model: Model,
        specs: Sequence[AttentionSpec],
        *,
        backend: str,
        pool: PagePool,
        deterministic: bool = False,
    ) -> None:
        """If `deterministic`, a token gets the same bits whatever else is computed in its step."""
        self._model = model
        self._deterministic = deterministic
        self._pool = pool
        self._specs = specs
        self._backend = backend
        self._few_rows = FewRows(model)
        self._attention = self._open_attention()

    @property
    def pool(self) -> PagePool:
        return self._pool

    @property
    def sharing(self) -> SharingCosts | None:
        """See `attention.base.Backend`."""
        return self._attention.sharing

    def forward(
        self,
        token_ids_T: torch.Tensor,
        layout: StepLayout,
        *,
        needed_N: torch.Tensor | None = None,
        is_rehearsal: bool = False,
    ) -> torch.Tensor:
        """Hidden states [T, hidden] after the final norm, or [N, hidden] of the needed tokens (int64).

        The keys and values of all tokens are in the pool afterwards, unless it `is_rehearsal` (see `Step`).
        """
        with invariant(self._deterministic):
            hidden = self._few_rows.forward(token_ids_T, layout, self._attention, needed_N)
            if hidden is not None:
                return hidden
            self._attention.plan(layout)
            caches = list(zip(self._pool.keys, self._pool.values, strict=True))
            step = Step(layout.positions_T, self._attention, needed_N, caches, is_rehearsal)
            return self._model.forward(token_ids_T, step)

    def forward_for_graph(
        self,
        token_ids_T: torch.Tensor,
        layout: StepLayout,
        *,
        needed_N: torch.Tensor | None = None,
        is_rehearsal: bool = False,
    ) -> torch.Tensor:
        """As `forward`, of a step that is captured or compiled for it, by the kernels that are best there."""
        with replayed():
            return self.forward(token_ids_T, layout, needed_N=needed_N, is_rehearsal=is_rehearsal)

    def release_pool(self) -> None:
        """Free the keys and values; nothing can run until `restore_pool`."""
        self._few_rows.forget()
        del self._attention
        self._pool.release()

    def restore_pool(self) -> None:
        """Take memory for keys and values again, all zero, at other addresses."""
        self._pool.allocate()
        self._attention = self._open_attention()

    def weights_moved(self) -> None:
        """The model's weights may lie elsewhere now."""
        self._few_rows.forget()

    def _open_attention(self) -> Backend:
        pool = self._pool
        name = f"invariant {self._backend}" if self._deterministic else self._backend
        return create_backend(name, self._specs, pool.keys, pool.values, pool.page_size)

    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """Logits [N, vocabulary] in the model's dtype."""
        with invariant(self._deterministic):
            return self._model.logits(hidden_ND)

    def logits_for_graph(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """As `logits`, of a step that is captured or compiled for it."""
        with replayed():
            return self.logits(hidden_ND)


def layer_shapes(specs: Sequence[AttentionSpec]) -> list[LayerShape]:
    """What the pool stores for each attention layer."""
    return [LayerShape(spec.num_kv_heads, spec.head_dim, spec.group) for spec in specs]
