"""fused_mla_kv_rope_mxfp8 to the byte, against exact arithmetic that shares nothing with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ropegraph.compat.transformer_engine import MXFP8Tensor, fused_mla_kv_rope_mxfp8
from ropegraph.errors import GraphError
from tests.compat.te import BF16, F32, dirty_memory
from tests.engines import mxfp8_by_hand as by_hand
from tests.engines.mla_cases import edges, inputs


def native(given: dict[str, Tensor]) -> dict[str, Tensor]:
    """[b, h, s, d] and tables [s, 1, 1, d] as TransformerEngine has them."""
    return {
        "kv": given["kv"].permute(2, 0, 1, 3),
        "k_rope": given["k_rope"][:, 0].transpose(0, 1),
        "cos": given["cos"][:, 0, 0],
        "sin": given["sin"][:, 0, 0],
    }


def check(made: MXFP8Tensor, want: dict[str, Tensor], side: str) -> None:
    """want: [b, h, rows, columns] bytes."""
    forms = {
        "row": made.rowwise_data,
        "row_scale": made.rowwise_scale_inv,
        "column": made.columnwise_data,
        "column_scale": made.columnwise_scale_inv,
    }
    for form, got in forms.items():
        bytes_ = want[f"{side}_{form}"].permute(2, 0, 1, 3)  # [rows, b, h, columns]
        assert got.dtype is torch.uint8
        assert got.is_contiguous()
        assert torch.equal(got.reshape(bytes_.shape), bytes_), f"{side} {form}"


@pytest.mark.parametrize("table", [BF16, F32])
def test_bytes(table: torch.dtype) -> None:
    b, h, s = 1, 2, 32
    given = edges(inputs(b, h, s, 128, 128, 64, table=table), 128)
    before = {name: t.clone() for name, t in given.items()}
    with dirty_memory():
        key, value = fused_mla_kv_rope_mxfp8(**native(given), v_head_dim=128)
    want = by_hand.mla(**given, nope=128)
    check(key, want, "key")
    check(value, want, "value")
    assert [tuple(t.shape) for t in vars(key).values()] == [
        (s, b * h * 192), (s * b * h, 6), (s, b * h * 192), (1, b * h * 192),
    ]  # fmt: skip
    assert [tuple(t.shape) for t in vars(value).values()] == [
        (s, b * h * 128), (s * b * h, 4), (s, b * h * 128), (1, b * h * 128),
    ]  # fmt: skip
    for name, t in given.items():
        assert torch.equal(t.nan_to_num(), before[name].nan_to_num())


def same(one: MXFP8Tensor, two: MXFP8Tensor) -> bool:
    return all(
        torch.equal(a, b) for a, b in zip(vars(one).values(), vars(two).values(), strict=True)
    )


def test_layouts_of_the_inputs_change_nothing() -> None:
    plain = native(inputs(3, 2, 32, 128, 128, 64))
    want = fused_mla_kv_rope_mxfp8(**{k: t.contiguous() for k, t in plain.items()})
    wide = torch.zeros(32, 3, 576, dtype=BF16)
    wide[..., 512:] = plain["k_rope"]
    variants = {
        "kv": plain["kv"].transpose(0, 1).contiguous().transpose(0, 1),
        "k_rope": wide[..., 512:].unsqueeze(2),
        "cos": plain["cos"][:, None, None],
        "sin": plain["sin"].t().contiguous().t(),
    }
    for name, t in variants.items():
        got = fused_mla_kv_rope_mxfp8(**{**plain, name: t})
        assert same(got[0], want[0]), name
        assert same(got[1], want[1]), name


GIVEN = native(inputs(2, 2, 32, 128, 128, 64))
KV, K_ROPE, COS = GIVEN["kv"], GIVEN["k_rope"], GIVEN["cos"]
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "kv dims": ({"kv": KV[0]}, "has 3 dims; use [s, b, h, 256]"),
    "kv width": ({"kv": KV[..., :192]}, "a head is 128 channels of the key and 128"),
    "v_head_dim": ({"v_head_dim": 64}, "v_head_dim=64"),
    "no v_head_dim": ({"v_head_dim": COS}, "v_head_dim=tensor"),
    "odd heads": ({"kv": KV[:, :, :1]}, "has 1 heads and 32 tokens; use an even number"),
    "tokens": ({"kv": KV[:31], "k_rope": K_ROPE[:31]}, "a multiple of 32 tokens, such as 32"),
    "kv type": ({"kv": KV.float()}, "kv is torch.float32; use torch.bfloat16"),
    "k_rope type": ({"k_rope": K_ROPE.half()}, "k_rope is torch.float16; use torch.bfloat16"),
    "k_rope shape": ({"k_rope": K_ROPE[:, :1]}, "use [32, 2, 64] or [32, 2, 1, 64]"),
    "k_rope width": ({"k_rope": K_ROPE[..., :32]}, "k_rope is [32, 2, 32]"),
    "no k_rope": ({"k_rope": None}, "k_rope is None"),
    "rows": ({"cos": COS[:31]}, "cos is [31, 64]; use at least 32 rows"),
    "columns": ({"sin": COS[:, :32]}, "sin is [35, 32]"),
    "types of tables": ({"cos": COS.bfloat16()}, "cos is bf16 but sin is fp32"),
    "fp16 tables": ({"cos": COS.half(), "sin": COS.half()}, "use bf16 or fp32 for both"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case: str) -> None:
    changed, text = REFUSED[case]
    with pytest.raises(GraphError) as caught:
        fused_mla_kv_rope_mxfp8(**{**GIVEN, **changed})
    assert text in str(caught.value), caught.value


def test_it_has_no_gradient_and_says_so() -> None:
    kv = KV.clone().requires_grad_()
    with pytest.raises(GraphError, match=r"MXFP8 has no gradient; call it under torch\.no_grad"):
        fused_mla_kv_rope_mxfp8(**{**GIVEN, "kv": kv})
    with torch.no_grad():
        key, _ = fused_mla_kv_rope_mxfp8(**{**GIVEN, "kv": kv})
    assert not key.rowwise_data.requires_grad
