"""Small fp64 tensors by their numbers, and small runs of one engine by hand values."""

from math import nan

import torch
from torch import Tensor

from ropegraph.ir.ops import (
    Rope,
    Sdpa,
)
from tests.engines.steps import run

F64 = torch.float64


def row(*numbers: float, dtype: torch.dtype = F64) -> Tensor:
    """One head row [1, 1, 1, d]."""
    return torch.tensor(numbers, dtype=dtype).reshape(1, 1, 1, -1)


def column(*numbers: float) -> Tensor:
    """Keys or values one wide: [1, 1, s, 1]."""
    return torch.tensor(numbers, dtype=F64).reshape(1, 1, -1, 1)


def table(*angles: float) -> Tensor:
    """A table of one position: [1, 1, 1, width]."""
    return torch.tensor(angles, dtype=torch.float32).reshape(1, 1, 1, -1)


def rotated(attrs: Rope, x: Tensor, freqs: Tensor) -> list[float]:
    return run(attrs, {"input": x, "freqs": freqs}, ["output"])["output"].reshape(-1).tolist()


def check(got: Tensor | list[float], want: list[float], tolerance: float = 1e-12) -> None:
    got = torch.as_tensor(got, dtype=F64).reshape(-1)
    torch.testing.assert_close(
        got, torch.tensor(want, dtype=F64), rtol=tolerance, atol=tolerance, equal_nan=True
    )


def attend(attrs: Sdpa, q: Tensor, k: Tensor, v: Tensor, **others: Tensor) -> dict[str, Tensor]:
    return run(attrs, {"q": q, "k": k, "v": v, **others}, ["O", "Stats"])


def uniform(s_q: int, s_kv: int, attrs: Sdpa, b: int = 1, **others: Tensor) -> list[float]:
    """O for q = k = 0 and v = 1, 2, 3, ...: the mean of the keys that a query sees."""
    q, k = torch.zeros(b, 1, s_q, 2, dtype=F64), torch.zeros(b, 1, s_kv, 2, dtype=F64)
    v = column(*range(1, s_kv + 1)).expand(b, 1, s_kv, 1)
    return attend(attrs, q, k, v, **others)["O"].reshape(-1).tolist()


def forward_results(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
    """Something of the right shape for o and stats, which the reference does not read."""
    b, h, s, _ = q.shape
    return {"o": torch.full((b, h, s, v.shape[3]), nan), "stats": torch.full((b, h, s, 1), nan)}
