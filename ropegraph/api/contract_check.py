"""Do bound q_rot, k_rot and stats carry the scales that the attention of this graph reckons with?

The log-sum-exp of rows made in fp64 from q_rot and k_rot, beside the bound stats, tells the product
of all scales. It cannot tell how the product is split between q and k: norms beside the raw q and k
do that, where these are bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import log, log10, sqrt
from typing import Any, cast

import torch
from torch import Tensor

from ropegraph.api.raw_rows import Raw
from ropegraph.api.scale_fit import ARITHMETIC, Fit, fit_norms, fit_product, rounding
from ropegraph.engines.reference.buffers import gather
from ropegraph.engines.reference.sdpa import attention, natural_scale, read_inputs
from ropegraph.ir.ops import Attention
from ropegraph.lowering.engine import Step

# Times the noise that roundings of q and k give a row: more, and no scale explains it.
MISFIT = 8.0
# Rows that are turned otherwise than they should be, or are other rows.
STRANGER = 0.1
# A scale that is told no better than this is not told.
VAGUE = 0.1


@dataclass(frozen=True)
class ScaleCheck:
    """A scale as expected by the graph and as found in the buffers.

    what: "product: q_rot, k_rot", what their q.k has still to be multiplied by to be a natural
    logit; or "split: q_rot", what the rows of q_rot carry.
    tolerance: how far their logarithms may be apart.  is_sharp: four roundings would show.
    unchecked: why it could not be told, else "".  fault: what is wrong besides the scale, else "".
    """

    node: str
    what: str
    expected: float = 0.0
    found: float = 0.0
    tolerance: float = 0.0
    is_sharp: bool = True
    unchecked: str = ""
    fault: str = ""

    @property
    def is_ok(self) -> bool:
        """True unless it was checked and found wrong."""
        if self.fault:
            return False
        return bool(self.unchecked) or self._is_near

    @property
    def _is_near(self) -> bool:
        if abs(self.found - self.expected) <= self.tolerance * abs(self.expected):
            return True
        # The tolerance is that of a logarithm, which shows where it is no small one.
        ratio = self.found / self.expected if self.expected else 0.0
        return ratio > 0.0 and abs(log(ratio)) <= self.tolerance

    def __str__(self) -> str:
        head = f"{self.node}: {self.what}"
        if self.fault:
            return f"{head}: WRONG {self.fault}"
        if self.unchecked:
            return f"{head} unchecked: {self.unchecked}"
        # Two digits more than the tolerance speaks of.
        digits = min(17, 2 + max(2, int(-log10(self.tolerance))))
        text = f"{head}: {self.expected:.{digits}g} expected, {self.found:.{digits}g} found"
        text += f", tolerance {self.tolerance:.2g}"
        text += "" if self.is_sharp else ", more than four roundings"
        return text if self.is_ok else f"{text}  WRONG FOLD"


def check_scales(step: Step, env: Sequence[Any], raw: Mapping[str, Raw]) -> list[ScaleCheck]:
    """What can be said of one attention, once it ran.  raw: value -> rows that it should be."""
    attrs = step.node.attrs
    port = "stats" if step.has("stats") else "Stats"
    if not isinstance(attrs, Attention):
        return []
    if step.has(port):
        with torch.inference_mode(mode=False), torch.enable_grad():
            product = _product(step, attrs, port, env)
    elif raw.keys() & {step.node.inputs["q"], step.node.inputs["k"]}:
        product = replace(_about(step), unchecked="no stats are computed here")
    else:
        return []
    return [product, *(_split(step, side, env, raw) for side in ("q", "k"))]


def _about(step: Step, expected: float = 0.0) -> ScaleCheck:
    what = f"product: {step.node.inputs['q']}, {step.node.inputs['k']}"
    return ScaleCheck(step.name, what, expected, expected)


def _product(step: Step, attrs: Attention, port: str, env: Sequence[Any]) -> ScaleCheck:
    given = read_inputs(step, replace(attrs, dropout_p=None), env)
    dtypes: list[torch.dtype] = [env[step.slot(side)].dtype for side in ("q", "k")]
    coarse, bound = max(dtypes, key=rounding), cast(Tensor, env[step.slot(port)])
    precise = bound.dtype
    stats = gather(step, port, env, given.len_q).double()
    expected = natural_scale(attrs, given)
    about = _about(step, expected)
    # The width of v is nothing to the log-sum-exp.
    tensors = {**given.tensors, "v": given.tensors["v"][..., :0]}
    q, k = (tensors[side].requires_grad_() for side in ("q", "k"))
    # An engine that computes in fp32 holds the factor in fp32.
    held = float(torch.tensor(expected, dtype=precise)) / expected if expected else 1.0

    def rows(factor: Tensor) -> Tensor:
        scale: Any = given.attn_scale * held * factor
        return attention(attrs, replace(given, tensors=tensors, attn_scale=scale))[1]

    with torch.no_grad():
        wanted = rows(torch.ones_like(stats))
    if bad := int((wanted.isfinite() & ~stats.isfinite()).sum()):
        return replace(about, fault=f"STATS: {bad} rows are NaN or Inf")
    fit = fit_product(rows, stats, q, k, (coarse, precise))
    if fit is None:
        return replace(about, unchecked="no row of the log-sum-exp depends on q.k")
    unit = rounding(coarse)
    long_q, long_k = (float(x.detach().square().sum(-1).nan_to_num().max()) for x in (q, k))
    noise = unit * abs(expected) * sqrt(long_q * long_k / q.shape[-1])
    noise += ARITHMETIC * rounding(precise) * (1 + float(wanted[wanted.isfinite()].abs().max()))
    if fit.left_over > MISFIT * noise:
        return replace(about, fault="STATS: no scale explains them")
    return _judge(about, fit, unit)


def _split(step: Step, side: str, env: Sequence[Any], raw: Mapping[str, Raw]) -> ScaleCheck:
    value = step.node.inputs[side]
    about, made = ScaleCheck(step.name, f"split: {value}"), raw.get(value)
    if made is None:
        return replace(about, unchecked="the raw rows that it is made from are not bound")
    if made.rows is None:
        return replace(about, unchecked=made.unchecked)
    about = replace(about, expected=made.scale, found=made.scale)
    own = list(env)
    own[step.slot(side)] = made.rows
    got, exact = (gather(step, side, x) for x in (env, own))
    compute = torch.float64 if got.dtype == torch.float64 else torch.float32
    fit = fit_norms(got.double(), exact, got.dtype, compute)
    if fit is None:
        return replace(about, unchecked="its rows are zero")
    if fit.left_over > STRANGER:
        return replace(about, fault="ROWS: they are no multiple of the raw rows, turned")
    return _judge(about, fit, rounding(got.dtype))


def _judge(about: ScaleCheck, fit: Fit, unit: float) -> ScaleCheck:
    tolerance = fit.tolerance(unit)
    about = replace(
        about,
        found=about.expected * fit.ratio,
        tolerance=tolerance,
        is_sharp=fit.is_sharp(unit),
    )
    if about.is_ok and tolerance > VAGUE:
        return replace(about, unchecked=f"the numbers tell the scale to {tolerance:.1g} only")
    return about
