"""The training run: `python -m tools.tiny.train --recipe tiny --out FOLDER`.

Owns the loop and its log; the world is made by worker processes while the network learns. The clock decides
when to stop, so the result is finished whatever the device.
"""

from __future__ import annotations

import argparse
import dataclasses
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from tools.tiny import export
from tools.tiny.network import Network, document_mask
from tools.tiny.optimizer import Optimizer, learning_factor
from tools.tiny.packing import Rows, batches
from tools.tiny.recipe import RECIPES, Recipe

_UNJUDGED = -100
_SECONDS_BETWEEN_LOGS = 5.0


def tensors(packed: Rows, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Input ids, targets and document numbers, each [rows, context]; only what is learnt is a target."""
    planes = torch.from_numpy(packed)
    if device.type == "cuda":
        planes = planes.pin_memory().to(device, non_blocking=True)
    ids, documents, learnt = planes[0].long(), planes[1].int(), planes[2].bool()
    judged = (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] > 0) & learnt[:, 1:]
    targets = torch.where(judged, ids[:, 1:], _UNJUDGED)
    return ids[:, :-1].contiguous(), targets.contiguous(), documents[:, :-1].contiguous()


def _ahead(recipe: Recipe, device: torch.device) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Batches on the device, a few made ready by a thread while a step runs."""
    ready: queue.Queue[tuple[Tensor, Tensor, Tensor]] = queue.Queue(maxsize=4)

    def fill() -> None:
        for packed in batches(recipe):
            ready.put(tensors(packed, device))

    threading.Thread(target=fill, daemon=True).start()
    while True:
        yield ready.get()


class Log:
    """Prints loss, speed and waiting time now and then."""

    def __init__(self, tokens_per_step: int) -> None:
        self._tokens_per_step = tokens_per_step
        self._printed = time.monotonic()
        self._steps = 0
        self.waited = 0.0

    def step(self, number: int, elapsed: float, loss: Tensor) -> None:
        """Count a step; every few seconds read the loss, which waits for the device, and print."""
        self._steps += 1
        passed = time.monotonic() - self._printed
        if passed < _SECONDS_BETWEEN_LOGS:
            return
        value = loss.item()
        passed = time.monotonic() - self._printed
        speed = self._steps * self._tokens_per_step / passed
        print(
            f"{elapsed:6.0f} s  step {number:5d}  loss {value:.4f}  {speed:12,.0f} tokens/s  "
            f"waited {self.waited:.1f} s",
            flush=True,
        )
        self._printed, self._steps, self.waited = time.monotonic(), 0, 0.0


def train(recipe: Recipe, folder: Path) -> Network:
    """Train by the recipe and save into the folder: twice on the way, and at the end."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    source = _ahead(recipe, device)
    torch.manual_seed(recipe.seed)
    torch.set_float32_matmul_precision("high")
    network = Network(recipe.shape).to(device)
    optimizer = Optimizer(network, recipe)
    loss_of = torch.compile(network.loss) if device.type == "cuda" else network.loss
    print(
        f"{sum(parameter.numel() for parameter in network.parameters()):,} parameters on {device}", flush=True
    )

    def step(factor: float) -> Tensor:
        ids, targets, documents = batch
        with torch.autocast(device.type, torch.bfloat16):
            loss: Tensor = loss_of(ids, targets, document_mask(documents))
        loss.backward()
        optimizer.step(factor)
        return loss.detach()

    batch = next(source)
    step(0.0).item()  # compiles everything and changes no weight, so that the clock measures training alone
    log = Log(recipe.rows_per_step * recipe.shape.context_length)
    start = time.monotonic()
    saves = [0.5, 0.8]
    number = 0
    while (progress := (time.monotonic() - start) / recipe.seconds) < 1:
        before = time.monotonic()
        batch = next(source)
        log.waited += time.monotonic() - before
        loss = step(learning_factor(progress, recipe))
        number += 1
        log.step(number, time.monotonic() - start, loss)
        if saves and progress > saves[0]:
            saves.pop(0)
            export.save(network, recipe.shape, folder)
    export.save(network, recipe.shape, folder)
    tokens = number * recipe.rows_per_step * recipe.shape.context_length
    print(
        f"done: {number} steps, {tokens:,} tokens, {time.monotonic() - start:.0f} s, loss {loss.item():.4f}",
        flush=True,
    )
    return network


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", choices=sorted(RECIPES), default="tiny")
    parser.add_argument("--out", type=Path, required=True, help="folder for config and weights")
    parser.add_argument("--seconds", type=float, help="training time in seconds (default: the recipe's)")
    arguments = parser.parse_args()
    recipe = RECIPES[arguments.recipe]
    if arguments.seconds is not None:
        recipe = dataclasses.replace(recipe, seconds=arguments.seconds)
    train(recipe, arguments.out)


if __name__ == "__main__":
    main()
