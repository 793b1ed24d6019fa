"""How far from the fp64 oracle a result may be.

    budget = 2 * (the error torch itself makes in that dtype + one rounding of the result)

The error of torch is that of the same formula, run by plain torch in the dtype under test on the
same inputs. A scale wrong by 1 % shows in fp32 and fp16 and hides in bf16, which is why a rewrite
is checked in fp64 as well.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rounding(want: Tensor, dtype: torch.dtype) -> Tensor:
    """Half a unit in the last place of each element of ``want`` in ``dtype``, at least."""
    info = torch.finfo(dtype)
    size = torch.where(torch.isfinite(want), want.detach().double().abs(), 0.0)
    return size * (info.eps / 2) + info.smallest_normal * info.eps / 2


def budget(want: Tensor, peer: Tensor, dtype: torch.dtype) -> Tensor:
    """The allowed error of each element.

    want: the oracle in fp64.  peer: the result of plain torch in ``dtype``. Its largest error
    counts for every element, for which of them is unlucky differs from one order to another.
    """
    error = (peer.double() - want.double()).abs()
    worst = torch.where(torch.isfinite(error), error, 0.0).max() if error.numel() else 0.0
    return 2 * (worst + rounding(want, dtype))


def assert_within(got: Tensor, want: Tensor, allowed: Tensor | float, what: str = "") -> None:
    """Raise AssertionError, naming the worst element, if |got - want| exceeds ``allowed``.

    Infinities must be equal, and a NaN is only right where ``want`` has one.
    """
    assert got.shape == want.shape, f"{what}: shape {list(got.shape)} instead of {list(want.shape)}"
    if not got.numel():
        return
    a, b = got.detach().double(), want.detach().double()
    is_same = (a == b) | (a.isnan() & b.isnan())
    limit = torch.as_tensor(allowed, dtype=torch.float64).expand(a.shape)
    excess = torch.where(is_same, 0.0, (a - b).abs() / limit)
    excess = torch.where(excess.isnan(), torch.inf, excess)
    if float(excess.max()) <= 1.0:
        return
    place = tuple(int(x) for x in torch.unravel_index(excess.argmax(), a.shape))
    raise AssertionError(
        f"{what}: {int((excess > 1).sum())} of {a.numel()} elements are off; the worst, at "
        f"{list(place)}, is {float(a[place])!r} instead of {float(b[place])!r}, "
        f"{float(excess.max()):.3g} times the allowed {float(limit[place]):.3g}"
    )


def relative(want: Tensor, tolerance: float) -> float:
    """An allowed error for a whole tensor: ``tolerance`` times its largest finite element."""
    size = torch.where(torch.isfinite(want), want.detach().double().abs(), 0.0)
    return tolerance * max(float(size.max()) if size.numel() else 0.0, 1e-300)
