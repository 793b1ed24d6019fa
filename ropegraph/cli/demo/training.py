"""Train the decoder with one attention or another, and compare the runs step by step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ropegraph.cli.demo.model import Attention, Shape, seeded_decoder
from ropegraph.cli.demo.screen import Progress
from ropegraph.cli.demo.text import Corpus, batches


@dataclass(frozen=True)
class Recipe:
    """How to train; two runs of one recipe differ in nothing but their attention.

    AdamW divides by the size of a gradient plus eps. With the usual eps of 1e-8 rounding errors of
    tiny gradients would be blown up to whole steps; with 1e-4 they stay rounding errors, and
    two right runs stay together.
    """

    steps: int = 200
    batch: int = 8
    learning_rate: float = 1e-3
    eps: float = 1e-4
    weight_seed: int = 1
    batch_seed: int = 2


@dataclass(frozen=True)
class Run:
    """The loss of every step, before its update, and every parameter's gradient of step 1."""

    losses: tuple[float, ...]
    gradients: Mapping[str, Tensor]


def train(
    corpus: Corpus,
    shape: Shape,
    attention: Attention,
    recipe: Recipe,
    label: str,
    seconds_at_most: float = float("inf"),
) -> Run:
    """Train a decoder from the recipe's seeds, in f32; stop early when the time is up."""
    model = seeded_decoder(shape, attention, recipe.weight_seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), eps=recipe.eps
    )
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    pairs = batches(corpus, recipe.batch, shape.length, recipe.steps, recipe.batch_seed)
    with Progress(label, recipe.steps) as progress:
        for step, (tokens, targets) in enumerate(pairs, start=1):
            logits = cast(Tensor, model(tokens))
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            if step == 1:
                gradients = {
                    name: parameter.grad.clone()
                    for name, parameter in model.named_parameters()
                    if parameter.grad is not None
                }
            optimizer.step()
            losses.append(loss.item())
            progress.advance(f"loss {losses[-1]:.4f}")
            if progress.seconds > seconds_at_most:
                break
        progress.close(f"{len(losses)} steps, loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    return Run(tuple(losses), gradients)


def loss_gap(run: Run, other: Run) -> float:
    """The largest difference of two losses over the steps that both have taken."""
    pairs = zip(run.losses, other.losses, strict=False)
    return max_or_nan([abs(a - b) for a, b in pairs])


def gradient_gap(run: Run, other: Run) -> float:
    """The largest relative difference, in the 2-norm, over all parameters' gradients of step 1."""
    if run.gradients.keys() != other.gradients.keys():
        return float("nan")
    gaps = [
        _norm(run.gradients[name] - right) / _norm(right) for name, right in other.gradients.items()
    ]
    return max_or_nan(gaps)


def _norm(x: Tensor) -> float:
    return float(x.double().square().sum().sqrt())


def max_or_nan(values: list[float]) -> float:
    """The largest value; NaN if any value is NaN, or if there is none."""
    if not values or any(value != value for value in values):
        return float("nan")
    return max(values)
