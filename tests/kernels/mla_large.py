"""Large steps of mla_kv_rope on a GPU, which tune_mla times; the results are not checked here."""

from __future__ import annotations

import torch
from torch import Tensor

from ropegraph.ir.ops import MlaKvRope, MlaKvRopeBackward
from tests.kernels.cases import Case
from tests.kernels.mla_cases import case

BF16 = torch.bfloat16
BYTES = torch.uint8


def empty(b: int, h: int, s: int, d: int, layout: str, dtype: torch.dtype = BF16) -> Tensor:
    if layout == "bhsd":
        return torch.empty(b, h, s, d, device="cuda", dtype=dtype)
    if layout == "bshd":
        return torch.empty(b, s, h, d, device="cuda", dtype=dtype).transpose(1, 2)
    return torch.empty(s, b, h, d, device="cuda", dtype=dtype).permute(1, 2, 0, 3)


def tables(s: int) -> dict[str, Tensor]:
    angle = torch.randn(s, 1, 1, 64, device="cuda")
    return {"cos": angle.cos(), "sin": angle.sin()}


def inputs(b: int, h: int, s: int, layout: str) -> dict[str, Tensor]:
    kv, k_rope = empty(b, h, s, 256, layout), empty(b, 1, s, 64, layout)
    return {"kv": kv.normal_(), "k_rope": k_rope.normal_(), **tables(s)}


def forward(b: int, h: int, s: int, layout: str) -> Case:
    written = {"key": empty(b, h, s, 192, layout), "value": empty(b, h, s, 128, layout)}
    return case(MlaKvRope(128), inputs(b, h, s, layout), written)


def mxfp8(b: int, h: int, s: int, layout: str) -> Case:
    written: dict[str, Tensor] = {}
    for side, d in (("key", 192), ("value", 128)):
        written |= {
            f"{side}_row": empty(b, h, s, d, layout, BYTES),
            f"{side}_row_scale": empty(b, h, s, d // 32, layout, BYTES),
            f"{side}_column": empty(b, h, s, d, layout, BYTES),
            f"{side}_column_scale": empty(b, h, s // 32, d, layout, BYTES),
        }
    return case(MlaKvRope(128, "mxfp8"), inputs(b, h, s, layout), written)


def backward(b: int, h: int, s: int, layout: str) -> Case:
    given = {
        "dKey": empty(b, h, s, 192, layout).normal_(),
        "dValue": empty(b, h, s, 128, layout).normal_(),
        **tables(s),
    }
    written = {"dKV": empty(b, h, s, 256, layout), "dK_rope": empty(b, 1, s, 64, layout)}
    return case(MlaKvRopeBackward(128, 128), given, written)
