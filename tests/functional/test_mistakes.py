"""Natural mistakes: what the functions answer."""

from typing import Any

import pytest
import torch

import ropegraph as rg
from ropegraph import angles
from ropegraph.functional import attention, qkv_attention, rope

Q = torch.randn(2, 4, 6, 8)
FREQS = torch.randn(6, 4)
LENS = torch.tensor([3, 6], dtype=torch.int32)
TURNS: dict[str, Any] = {
    "start_positions": LENS, "position_ids": torch.zeros(1, 6, dtype=torch.int64), "rope_dim": 4,
    "rope_offset": 0, "interleaved": True, "interleaved_output": True, "attention_factor": 2.0,
    "inverse": True, "half_width": True, "table_layout": "full", "angle_precision": "exact",
    "numerics": "hf",
}  # fmt: skip


@pytest.mark.parametrize("name", TURNS)
def test_a_rotation_without_angles_is_no_rotation(name: str) -> None:
    with pytest.raises(rg.GraphError, match=f"attention: {name}= is given but no angles"):
        attention(Q, Q, Q, **{name: TURNS[name]})
    with pytest.raises(rg.GraphError, match=f"qkv_attention: {name}= is given but no angles"):
        qkv_attention(torch.randn(2, 6, 12, 8), split=(4, 4, 4), **{name: TURNS[name]})


def test_what_is_no_tensor() -> None:
    made = angles.default(rope_theta=1e4, head_dim=8)
    with pytest.raises(rg.GraphError, match=r"freqs is RopeAngles.*inv_freq=angles\.inv_freq"):
        rope(Q, made)
    with pytest.raises(rg.GraphError, match=r"inv_freq is RopeAngles"):
        rope(Q, inv_freq=made)
    with pytest.raises(rg.GraphError, match="start_positions of q is int, no tensor"):
        attention(Q, Q, Q, FREQS, half_width=True, start_positions=(4, None))
    with pytest.raises(rg.GraphError, match=r"freqs: positions=48 is no tensor"):
        angles.freqs(made, 48)


def test_lengths_of_one_side() -> None:
    with pytest.raises(rg.GraphError, match=r"seq_lens=\(None, \.\.\.\); give both"):
        attention(Q, Q, Q, seq_lens=(None, LENS))
    with pytest.raises(rg.GraphError, match=r"seq_lens=\(\.\.\., None\); give both"):
        attention(Q, Q, Q, seq_lens=(LENS, None))


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_a_whole_configuration_as_a_dictionary(key: str) -> None:
    whole = {"rope_theta": 5e5, key: {"rope_type": "linear", "factor": 2.0}, "head_dim": 128}
    for layer_type in (None, key):
        with pytest.raises(rg.GraphError, match=f"whole configuration, it has '{key}'"):
            angles.inv_freq(whole, head_dim=128, layer_type=layer_type)


def test_a_data_type_where_the_name_belongs() -> None:
    with pytest.raises(rg.GraphError, match=r"pygraph: name=torch\.float32 is no name"):
        rg.pygraph(torch.float32)
