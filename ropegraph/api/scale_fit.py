"""Which scale do numbers carry? Estimates from tensors, with the error that they may have.

A *rounding* of a type is half its eps, the largest relative error of one rounding to nearest:
2^-8 in bf16, 2^-11 in fp16, 2^-24 in fp32, 2^-53 in fp64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import exp, isfinite, sqrt

import torch
from torch import Tensor

# A right scale is off by the one rounding that an engine gives it; what counts as wrong begins at
# four. The limit lies between, nearer to the right, whose own noise is known.
LIMIT = 2.25
# Up to this tolerance four roundings stand out by more than five standard errors.
SHARP = 2.6
SYSTEMATIC = 1.0
SIGMAS = 6.0
# Errors of exp and log, of the sum and of the logits, in roundings of the type that computes.
ARITHMETIC = 0.6
STEPS, SMALL_STEP, MOST = 60, 1e-4, 100.0
NOISE = 4.0


def rounding(dtype: torch.dtype) -> float:
    """The largest relative error of one rounding to ``dtype``."""
    return torch.finfo(dtype).eps / 2


def errors_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What rounding to ``dtype`` may have changed of each element of x, given in fp64."""
    return x.abs().clamp_min(torch.finfo(dtype).smallest_normal) * rounding(dtype)


@dataclass(frozen=True)
class Fit:
    """A scale as found in numbers, relative to the one they should carry.

    ratio: found / expected.  sigma: the standard error of ratio.  left_over: the root mean square
    of what no ratio explains; of norms nor rounding, and relative to them.
    """

    ratio: float
    sigma: float
    left_over: float

    def tolerance(self, unit: float) -> float:
        """How far ratio may be from 1, if one rounding is ``unit``."""
        return max(LIMIT * unit, SYSTEMATIC * unit + SIGMAS * self.sigma)

    def is_sharp(self, unit: float) -> bool:
        """True if numbers that are four roundings off would show."""
        return self.tolerance(unit) <= SHARP * unit


def fit_norms(got: Tensor, exact: Tensor, dtype: torch.dtype, compute: torch.dtype) -> Fit | None:
    """The ratio of the norms of two tensors in fp64; None if nothing in them is finite but zero.

    dtype: what ``got`` was rounded to, once.  compute: the type it was computed in.
    """
    use = got.isfinite() & exact.isfinite()
    x, y = got[use], exact[use]
    size = float(y.square().sum())
    if not size > 0.0:
        return None
    product = float((x * y).sum())
    ratio = sqrt(float(x.square().sum()) / size) * (-1.0 if product < 0 else 1.0)
    error = errors_of(y, dtype) + 4 * rounding(compute) * sqrt(size / y.numel())
    sigma = float((y * error).square().sum().sqrt()) / size / sqrt(3)
    left_over = float((x - product / size * y).square().sum()) - float(error.square().sum())
    return Fit(ratio, sigma, sqrt(max(0.0, left_over) / size))


# The log-sum-exp of rows whose q.k are multiplied by a factor, a tensor that broadcasts to them.
Rows = Callable[[Tensor], Tensor]


def fit_product(
    rows: Rows, stats: Tensor, q: Tensor, k: Tensor, dtypes: tuple[torch.dtype, torch.dtype]
) -> Fit | None:
    """The factor on q.k that best explains ``stats``, by Gauss and Newton in its logarithm.

    q, k: leaves in fp64 that ``rows`` reads.  dtypes: of q and k, and of stats.
    Returns None where no row depends on the factor.
    """
    unit = rounding(dtypes[1])
    log_ratio = 0.0
    found = _linear(rows, stats, log_ratio, unit)
    for _ in range(STEPS):
        # What the square of a step this small would change is below its own error. And what
        # explains noise by noise would lead far away.
        if found is None or abs(found.step) < SMALL_STEP or found.is_noise:
            break
        log_ratio += max(-1.0, min(1.0, found.step))
        found = _linear(rows, stats, log_ratio, unit)
    if found is None:
        return None
    sigma = sqrt(found.variance + found.from_rounding(q, k, dtypes[0]))
    step = max(-MOST, min(MOST, log_ratio + found.step))
    return Fit(exp(step), sigma, found.left_over)


@dataclass(frozen=True)
class _Linear:
    """Least squares of stats - rows on their slopes.

    combined: the sum of weights * rows.  scatter: of what is left over, in variances of the noise.
    """

    step: float
    scatter: float
    variance: float
    left_over: float
    combined: Tensor

    @property
    def is_noise(self) -> bool:
        """True if arithmetic alone explains what is off, the step included."""
        return self.scatter < NOISE and abs(self.step) <= SIGMAS * sqrt(self.variance)

    def from_rounding(self, q: Tensor, k: Tensor, dtype: torch.dtype) -> float:
        """The variance of the step if stats belong to q and k as they were before rounding."""
        grads = torch.autograd.grad(self.combined, (q, k), materialize_grads=True)
        parts = (
            float((g * errors_of(x.detach(), dtype)).square().sum())
            for g, x in zip(grads, (q, k), strict=True)
        )
        return sum(parts) / 3


def _linear(rows: Rows, stats: Tensor, log_ratio: float, unit: float) -> _Linear | None:
    factor = torch.full_like(stats, exp(log_ratio), requires_grad=True)
    found = rows(factor)
    use = found.isfinite() & stats.isfinite()
    chosen = found[use]
    if not chosen.numel():
        return None
    (slope,) = torch.autograd.grad(chosen.sum(), factor, retain_graph=True)
    slope = slope[use] * exp(log_ratio)
    noise = ARITHMETIC * unit * (1.0 + chosen.detach().abs() + slope.abs())
    weight = noise.square().reciprocal()
    total = float((weight * slope.square()).sum())
    if not (total > 0.0 and isfinite(total)):
        return None
    off = stats[use] - chosen.detach()
    step = float((weight * slope * off).sum()) / total
    rest = (off - step * slope).square()
    # Where rows scatter more than arithmetic does, so does the step.
    scatter = float((weight * rest).sum()) / max(1, chosen.numel() - 1)
    combined = ((weight * slope / total) * chosen).sum()
    return _Linear(step, scatter, max(1.0, scatter) / total, sqrt(float(rest.mean())), combined)
