"""allocate: buffers as a graph declares them."""

from __future__ import annotations

import pytest
import torch

import ropegraph as rg
from tests.api.graphs import attention


def test_outputs_and_what_a_backward_wants_saved() -> None:
    g = attention(settings={"io_data_type": torch.bfloat16})
    back = g.backward_graph(["o"], ["q", "k", "v"])
    made = g.allocate()
    assert {"o", *back.saved} - {"q", "k", "v", "f"} <= made.keys()
    for name, buffer in made.items():
        tensor = g.find_tensor(name)
        assert list(buffer.shape) == tensor.get_dim()
        assert list(buffer.stride()) == tensor.get_stride()
    assert made["o"].dtype is torch.bfloat16
    assert made["stats"].dtype is torch.float32
    assert back.allocate().keys() == {"dq", "dk", "dv"}


def test_some_of_them_and_strides_of_ones_own() -> None:
    g = rg.pygraph(io_data_type=torch.float32)
    x, f = g.tensor([1, 2, 3, 4], name="x"), g.tensor([3, 1, 1, 4], name="f")
    g.rope(x, f).set_output(True).set_name("y").set_stride([24, 4, 8, 1])
    made = g.allocate("y", "x")
    assert list(made) == ["y", "x"]
    assert made["y"].stride() == (24, 4, 8, 1)
    made |= {"f": torch.zeros(3, 1, 1, 4)}
    made["x"].normal_()
    g.execute(made)
    torch.testing.assert_close(made["y"], made["x"], rtol=0, atol=0)


def test_names_that_have_no_buffer() -> None:
    g = attention()
    with pytest.raises(rg.GraphError, match=r"'O' names no tensor .*did you mean 'o'.*outputs are"):
        g.allocate("O")
    with pytest.raises(rg.GraphError, match="'q_rot' is virtual"):
        g.allocate("q_rot")
    ragged = rg.pygraph(io_data_type=torch.float32)
    bounds = ragged.tensor([3, 1, 1, 1], data_type=torch.int32, name="bounds")
    x = ragged.tensor([2, 2, 3, 4], name="x", ragged_offset=bounds)
    f = ragged.tensor([3, 1, 1, 4], name="f")
    ragged.rope(x, f).set_output(True).set_name("y")
    with pytest.raises(rg.GraphError, match="'y' is ragged; make a buffer with room"):
        ragged.allocate()
