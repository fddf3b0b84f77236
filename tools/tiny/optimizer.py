"""The optimizer: Muon for the matrices of the layers, AdamW for everything else."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

from tools.tiny.recipe import Recipe

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalize(matrices: Tensor, *, steps: int = 5) -> Tensor:
    """Push the singular values of each matrix [count, rows, columns] towards one, in bfloat16.

    A quintic Newton-Schulz iteration; singular values end between about 0.7 and 1.2, which is close enough.
    """
    a, b, c = _NEWTON_SCHULZ
    work: Tensor = matrices.bfloat16()
    tall = work.shape[-2] > work.shape[-1]
    work = work.mT if tall else work
    work = work / (work.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = work @ work.mT
        work = a * work + (b * gram + c * gram @ gram) @ work
    flipped: Tensor = work.mT
    return flipped if tall else work


class Optimizer:
    """Both optimizers as one. Matrices of equal shape are updated together, in a few large products."""

    def __init__(self, network: nn.Module, recipe: Recipe) -> None:
        self._recipe = recipe
        self._momentum = 0.95
        self._groups: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        others = []
        for name, parameter in network.named_parameters():
            if parameter.dim() == 2 and "embed" not in name:
                self._groups[parameter.shape].append(parameter)
            else:
                others.append(parameter)
        self._buffers = {
            shape: torch.zeros_like(torch.stack(list(group))) for shape, group in self._groups.items()
        }
        fused = others[0].is_cuda
        self._adam = torch.optim.AdamW(
            others, lr=recipe.other_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=fused
        )
        self._orthogonalize = torch.compile(orthogonalize) if fused else orthogonalize

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """Apply the gradients at this factor of the full learning rates, then clear them."""
        for group in self._adam.param_groups:
            group["lr"] = self._recipe.other_rate * factor
        self._adam.step()
        self._adam.zero_grad()
        rate = self._recipe.matrix_rate * factor
        for shape, matrices in self._groups.items():
            gradients = torch.stack([matrix.grad for matrix in matrices if matrix.grad is not None])
            buffer = self._buffers[shape].lerp_(gradients, 1 - self._momentum)
            updates = self._orthogonalize(gradients.lerp(buffer, self._momentum))
            scale = max(1.0, shape[0] / shape[1]) ** 0.5
            torch._foreach_mul_(list(matrices), 1 - rate * self._recipe.weight_decay)
            torch._foreach_add_(list(matrices), list(updates.to(buffer.dtype).unbind()), alpha=-rate * scale)
            for matrix in matrices:
                matrix.grad = None


def learning_factor(progress: float, recipe: Recipe) -> float:
    """The share of the full learning rate at this share of the training time: up, flat, then down to zero."""
    rising = progress / recipe.warm_share
    falling = (1 - progress) / recipe.decay_share
    return max(0.0, min(1.0, rising, falling))
