"""profile() and verify() on a GPU: times by events, buffers as they were, scales as folded."""

import pytest
import torch

from tests.gpu.test_graph import Pair, inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_every_launch_of_both_graphs() -> None:
    pair = Pair(inputs())
    pair.step()
    before = {name: x.clone() for name, x in pair.pack.items()}
    for graph, pack in ((pair.forward, pair.pack), (pair.backward, pair.back)):
        found = graph.profile(pack, seconds=0.01)
        assert [row.name for row in found.rows] == [step.name for step in graph.plan.steps]
        assert all(row.device_seconds > 0 and row.host_seconds > 0 for row in found.rows)
        assert torch.cuda.get_device_name() in str(found)
    for name, x in before.items():
        assert torch.equal(x, pair.pack[name])


def test_both_graphs_are_right() -> None:
    pair = Pair(inputs())
    pair.step()
    assert pair.forward.verify(pair.pack), pair.forward.verify(pair.pack)
    found = pair.backward.verify(pair.back)
    assert not found.wrong_scales
    assert found, found
