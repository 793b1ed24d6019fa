"""verify(): right graphs pass, a wrong launch is named, a NaN is told where it arises."""

from typing import Any

import pytest
import torch

import ropegraph as rg
from ropegraph.engines.torch_executor.rotator import Rotator
from tests.api.graphs import attention, buffers

SETTINGS = [{"fold": "q", "fold_log2": True}, {"fold": "off"}, {"fold": "symmetric"}]


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_right_graph(settings: dict[str, Any]):
    g = attention(settings=settings)
    found = g.verify(buffers(g))
    assert found.is_ok
    assert found.first_bad is None
    assert [c.node for c in found.checks] == ["rope_q+rope_k", "rope_q+rope_k", "attn", "attn"]
    assert all(0 < c.rms_ulp < 8 for c in found.checks)
    assert all(c.max_ulp >= c.rms_ulp for c in found.checks)
    assert "rope_q+rope_k: q_rot" in str(found)


def test_it_writes_what_execute_writes():
    g = attention()
    pack, other = buffers(g), buffers(g)
    g.verify(pack)
    attention().execute(other)
    assert torch.equal(pack["o"], other["o"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_dtype(dtype: torch.dtype):
    g = rg.pygraph(io_data_type=dtype)
    q, k, v = (g.tensor([1, 2, 5, 8], name=n) for n in "qkv")
    f = g.tensor([5, 1, 1, 8], data_type=torch.float32, name="f")
    o, _ = g.sdpa(g.rope(q, f), g.rope(k, f), v, 0.3)
    o.set_output(True).set_name("o")
    torch.manual_seed(0)
    pack = {n: torch.randn(1, 2, 5, 8).to(dtype) for n in "qkvo"}
    found = g.verify(pack | {"f": torch.randn(5, 1, 1, 8)})
    assert found.is_ok
    assert all(c.rms_ulp < 4 for c in found.checks)


def test_a_wrong_launch_is_the_first_bad_one(monkeypatch: pytest.MonkeyPatch):
    g = attention()
    right = Rotator.__call__

    def wrong(self: Rotator, x: Any, out: Any, tables: Any) -> None:
        right(self, x, out, tables)
        out.mul_(1.0001)

    monkeypatch.setattr(Rotator, "__call__", wrong)
    found = g.verify(buffers(g))
    assert not found.is_ok
    assert found.first_bad is not None
    assert found.first_bad.node == "rope_q+rope_k"
    # The attention did right by the inputs it had.
    assert all(c.is_ok for c in found.checks if c.node == "attn")
    assert "WRONG" in str(found)


def test_where_a_nan_arises(monkeypatch: pytest.MonkeyPatch):
    g = attention()
    right = Rotator.__call__

    def wrong(self: Rotator, x: Any, out: Any, tables: Any) -> None:
        right(self, x, out, tables)
        out[..., 0, 0] = torch.nan

    monkeypatch.setattr(Rotator, "__call__", wrong)
    found = g.verify(buffers(g))
    assert found.first_bad is not None
    assert (found.first_bad.node, found.first_bad.nonfinite > 0) == ("rope_q+rope_k", True)
    assert str(found).startswith("WRONG: ")


def test_a_nan_of_the_caller_is_nobodys_fault():
    g = attention()
    pack = buffers(g)
    pack["v"][0, 0, 0, 0] = torch.nan
    found = g.verify(pack)
    assert found
    assert found.verdict.startswith("right: no output is more than 32 ulp (rms) off; NaN or Inf")
    assert "comes in by 'v'" in found.verdict


def test_bad_buffers_are_refused_as_by_execute():
    g = attention()
    pack = buffers(g)
    pack.pop("v")
    with pytest.raises(rg.GraphError, match="no buffer is bound to 'v'"):
        g.verify(pack)
    with pytest.raises(rg.GraphError, match="verify: variant_pack is int"):
        g.verify(5)
    with pytest.raises(rg.GraphError, match="'q_rot' is virtual"):
        g.verify(buffers(g) | {"q_rot": torch.zeros(2, 6, 5, 8)})
