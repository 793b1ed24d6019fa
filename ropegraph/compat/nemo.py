"""NeMo Automodel's fused rotary embedding of DeepSeek V4.1.

    from nemo_automodel.components.models.deepseek_v41.rope_triton import apply_rope_triton  ->
    from ropegraph.compat.nemo import apply_rope_triton

Needs neither Triton nor CUDA: the bits that NeMo's kernel has on CUDA are those of every device
here. Where NeMo's eager path is taken is said below.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ropegraph.api.checks import as_flag
from ropegraph.compat.checks import check_floating
from ropegraph.compat.linear import Linear, port
from ropegraph.compat.recipes import rope
from ropegraph.errors import GraphError

FUSED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def apply_rope_triton(values: Tensor, angles: Tensor, inverse: bool = False) -> Tensor:
    """Rotate the last 2 P channels of ``values`` as adjacent pairs by exp(i * angles).

    values: [b, s, c] or [b, s, h, c], any strides.  angles: fp32 [b, s, P].  inverse: conjugate.
    The other channels are copied bit for bit. With c, s of torch.polar a pair (x0, x1) becomes
    fma(x0, c, -(x1 s)), fma(x0, s, x1 c) in fp32, rounded once to the type of values; inverse and
    the gradient only negate s.
    Angles that require grad, angles that are not fp32, and values that are not bf16, fp16 or fp32
    take torch's complex product, as in NeMo: its gradient reaches angles, its bits are
    torch's, and fp64 stays fp64.
    Returns a new contiguous tensor, differentiable in ``values``.
    Raises GraphError, a ValueError as NeMo's, if angles do not fit values. There is no RuntimeError
    for want of Triton.
    """
    where = "apply_rope_triton"
    _check(where, values, angles)
    is_inverse = as_flag(inverse, f"{where}: inverse")
    if not _is_fused(values, angles):
        return _eager(values, angles, is_inverse)
    channels, pairs = values.shape[-1], angles.shape[-1]
    turned = torch.view_as_real(torch.polar(torch.ones_like(angles), angles))
    # [b, s, P, 2] is read as two tables [s, b, 1, P].
    cos, sin = (t.transpose(0, 1).unsqueeze(2) for t in turned.unbind(-1))
    form = _heads(torch.empty(values.shape, device="meta"))
    linear = Linear(
        rope,
        (port("x", form),),
        (port("y", form),),
        ("cos", "sin"),
        (
            ("rope_dim", 2 * pairs),
            ("rope_offset", channels - 2 * pairs),
            ("interleaved", True),
            ("half_width", True),
            ("inverse", is_inverse),
            ("numerics", "nemo"),
        ),
    )
    (out,) = linear([_heads(values)], {"cos": cos, "sin": sin})
    return out.squeeze(1) if values.dim() == 3 else out.transpose(1, 2)


def _check(where: str, values: Tensor, angles: Tensor) -> None:
    for name, t in (("values", values), ("angles", angles)):
        if not isinstance(t, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise GraphError(f"{where}: {name}={t!r:.60} is no torch tensor")
    check_floating(values, f"{where}: values")
    check_floating(angles, f"{where}: angles", bits=32)  # torch.polar has no narrower ones
    if values.dim() not in (3, 4):
        raise GraphError(
            f"{where}: values {list(values.shape)} has {values.dim()} dims; use [b, s, channels] "
            "or [b, s, heads, channels]"
        )
    b, s, channels = values.shape[0], values.shape[1], values.shape[-1]
    if tuple(angles.shape[:-1]) != (b, s) or not 0 < 2 * angles.shape[-1] <= channels:
        raise GraphError(
            f"{where}: angles {list(angles.shape)} do not fit values {list(values.shape)}; use "
            f"[{b}, {s}, pairs] with 0 < 2 * pairs <= {channels}"
        )


def _is_fused(values: Tensor, angles: Tensor) -> bool:
    return (
        not angles.requires_grad and angles.dtype == torch.float32 and values.dtype in FUSED_DTYPES
    )


def _heads(values: Tensor) -> Tensor:
    """The values as [b, h, s, c]: a view."""
    return values.unsqueeze(1) if values.dim() == 3 else values.transpose(1, 2)


def _eager(values: Tensor, angles: Tensor, is_inverse: bool) -> Tensor:
    """NeMo's own formula in torch: a complex product, then the channels joined."""
    half = angles.shape[-1]
    width = 2 * half
    before = values.shape[-1] - width
    kept, turned = values.narrow(-1, 0, before), values.narrow(-1, before, width)
    wide = torch.promote_types(values.dtype, torch.float32)
    pairs = torch.view_as_complex(turned.to(wide).reshape(*turned.shape[:-1], half, 2).contiguous())
    unit = torch.polar(torch.ones_like(angles), angles)
    unit = unit.unsqueeze(2) if values.dim() == 4 else unit
    rotated = torch.view_as_real(pairs * (unit.conj() if is_inverse else unit)).flatten(-2)
    return torch.cat((kept, rotated.to(values.dtype)), dim=-1)
