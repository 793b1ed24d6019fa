"""verify() where the terms of attention cancel: a right launch is right, a wrong one wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ropegraph as rg
from ropegraph.engines.torch_executor import sdpa_backward

B, H_Q, H_KV, S, D = 2, 4, 2, 24, 16
HEADS = {"q": H_Q, "k": H_KV, "v": H_KV}
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
Pack = dict[str, Tensor]


def _one_row(pack: Pack) -> None:
    pack["q"][:, :, 1:] = 0  # dK of what row 0 sees alone is 0


def _alike(pack: Pack) -> None:
    pack["k"].fill_(1)
    pack["freqs"].zero_()  # dQ is 0, and the logits of a row are one


def _saturated(pack: Pack) -> None:
    pack["q"].mul_(1000)


def _values(pack: Pack) -> None:
    _alike(pack)
    pack["v"][:, :, 1::2] = -pack["v"][:, :, ::2]  # every second row of O is 0


CANCEL: dict[str, Callable[[Pack], None]] = {
    "one row": _one_row, "alike": _alike, "saturated": _saturated, "values": _values,
}  # fmt: skip


def graphs(dtype: torch.dtype) -> tuple[rg.pygraph, rg.pygraph, Pack]:
    """A forward, its backward, and buffers of the forward."""
    g = rg.pygraph(io_data_type=dtype, fold="q")
    q, k, v = (g.tensor((B, h, S, D), name=n) for n, h in HEADS.items())
    freqs = g.tensor((S, 1, 1, D), data_type=torch.float32, name="freqs")
    turned = [g.rope(x, freqs).set_name(n) for x, n in ((q, "q_rot"), (k, "k_rot"))]
    o, stats = g.sdpa(*turned, v, attn_scale=D**-0.5, use_causal_mask=True, name="attn")
    o.set_output(True).set_name("o")
    stats.set_name("stats")
    backward = g.backward_graph(outputs=[o], inputs=[q, k, v])
    torch.manual_seed(1)
    pack = {n: torch.randn(B, h, S, D).to(dtype) for n, h in HEADS.items()}
    pack["freqs"] = torch.outer(torch.arange(float(S)), torch.rand(D // 2)).repeat(1, 2)
    pack["freqs"] = pack["freqs"][:, None, None]
    pack |= {"o": torch.empty_like(pack["q"]), "q_rot": torch.empty_like(pack["q"])}
    wide = torch.promote_types(dtype, torch.float32)
    pack |= {"k_rot": torch.empty_like(pack["k"]), "stats": torch.empty(B, H_Q, S, 1, dtype=wide)}
    return g, backward, pack


def gradients(backward: rg.pygraph, pack: Pack) -> Pack:
    given = {n: pack[n] for n in backward.saved} | {"do": torch.randn_like(pack["o"])}
    return given | {f"d{n}": torch.empty_like(pack[n]) for n in "qkv"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CANCEL)
def test_a_right_launch_is_right(name: str, dtype: torch.dtype) -> None:
    forward, backward, pack = graphs(dtype)
    CANCEL[name](pack)
    assert forward.verify(pack).is_ok
    assert backward.verify(gradients(backward, pack)).is_ok


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CANCEL)
def test_a_backward_with_the_result_of_another_forward_is_wrong(
    name: str, dtype: torch.dtype
) -> None:
    forward, backward, pack = graphs(dtype)
    CANCEL[name](pack)
    forward.execute(pack)
    pack["o"] += 4 * torch.randn_like(pack["o"])
    found = backward.verify(gradients(backward, pack)).first_bad
    assert found is not None
    assert found.node == "attn_backward"


@pytest.mark.parametrize("dtype", DTYPES)
def test_where_nothing_cancels_one_percent_is_wrong_in_all_but_the_16_bit_types(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, backward, pack = graphs(dtype)
    forward.execute(pack)
    right = sdpa_backward._Dense.__call__  # pyright: ignore[reportPrivateUsage]

    def wrong(self: Any, env: Any, stream: int) -> None:
        right(self, env, stream)
        for x in env:
            if isinstance(x, Tensor) and x.data_ptr() == given["dv"].data_ptr():
                x.mul_(1 + (0.01 if dtype in DTYPES[2:] else 0.5))

    given = gradients(backward, pack)
    assert backward.verify(given).is_ok
    monkeypatch.setattr(sdpa_backward._Dense, "__call__", wrong)  # pyright: ignore[reportPrivateUsage]
    found = backward.verify(given).first_bad
    assert found is not None
    assert found.output == "dv"
