"""Bad parameters: the message names the parameter, what was given, and what would work."""

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ropegraph import GraphError, angles

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
LLAMA3 = {"rope_type": "llama3", "factor": 8, "rope_theta": 5e5, "low_freq_factor": 1}
LLAMA3 |= {"high_freq_factor": 4, "original_max_position_embeddings": 8192}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
LONG |= {"original_max_position_embeddings": 4096, "factor": 2.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "max_position_embeddings": 100}
PROPORTIONAL = {"rope_type": "proportional", "rope_theta": 1e4}

BAD_PARAMETERS: list[tuple[dict[str, Any], str]] = [
    ({"rope_type": "ntk"}, "rope_type='ntk' is not known; use one of default, linear, dynamic"),
    ({"rope_type": 3}, "rope_type=3; use a name"),
    ({"rope_type": "mrope"}, "rope_type='mrope' without mrope_section"),
    ({"rope_type": "linear"}, "factor missing; rope_type 'linear' needs head_dim, factor"),
    ({"factor": 2.0}, "factor=2.0 means nothing to rope_type 'default'; it reads mrope_interlea"),
    (YARN | {"beta_quick": 32}, "beta_quick=32 means nothing to rope_type 'yarn'; it reads"),
    (
        YARN | {"beta_fest": 32},
        "beta_fest=32 means nothing to rope_type 'yarn'; did you mean beta_",
    ),
    ({"head_dim": 64}, "head_dim=64 means nothing to rope_type 'default'"),
    ({"rope_theta": 0}, "default: rope_theta=0; use a number above 0"),
    ({"rope_theta": -1e4}, "default: rope_theta=-10000.0; use a number above 0"),
    ({"rope_theta": "1e4"}, "default: rope_theta='1e4'; use a number above 0"),
    ({"rope_theta": float("nan")}, "default: rope_theta=nan; use a number above 0"),
    ({"rope_theta": 10**400}, "default: rope_theta=1000"),
    ({"partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5; use one up to 1"),
    ({"partial_rotary_factor": 0}, "partial_rotary_factor=0; use a number above 0"),
    ({"partial_rotary_factor": 0.4}, "head_dim=8 with partial_rotary_factor=0.4 rotates 3 chann"),
    ({"rope_type": "linear", "factor": 0}, "linear: factor=0; use a number above 0"),
    ({"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings missing; rope_type 'dyna"),
    (DYNAMIC | {"max_position_embeddings": 0}, "max_position_embeddings=0; use an integer of 1"),
    (DYNAMIC | {"partial_rotary_factor": 0.25}, "head_dim=8 rotates 2 channels, and the exponent"),
    ({"rope_type": "yarn", "factor": 4.0}, "original_max_position_embeddings missing"),
    ({**YARN, "factor": None}, "yarn: neither factor nor max_position_embeddings is given"),
    (YARN | {"rope_theta": 1.0}, "yarn: rope_theta=1.0; use a number above 1"),
    (YARN | {"beta_fast": 0}, "yarn: beta_fast=0; use a number above 0"),
    (YARN | {"beta_fast": 1, "beta_slow": 32}, "beta_fast=1 is less than beta_slow=32; swap them"),
    (
        YARN | {"original_max_position_embeddings": 3, "rope_theta": 2.0},
        "embeddings=3 with rope_theta=2 puts the blend from pair 0 to -4 of 4; it must end",
    ),
    (YARN | {"truncate": "no"}, "yarn: truncate='no'; use True or False"),
    (YARN | {"attention_factor": -1.0}, "yarn: attention_factor=-1.0; use a number of 0 or more"),
    (YARN | {"mscale": "x"}, "yarn: mscale='x'; use a number of 0 or more"),
    (LONG | {"short_factor": [1.0] * 3}, "longrope: short_factor has 3 entries; use 4, one for"),
    (LONG | {"long_factor": [1.0] * 8}, "longrope: long_factor has 8 entries; use 4"),
    (LONG | {"long_factor": [1.0, 0.0, 1.0, 1.0]}, "longrope: long_factor[1]=0.0; use a number"),
    (LONG | {"long_factor": 2.0}, "longrope: long_factor=2.0; use a list of 4 numbers"),
    (LONG | {"long_factor": torch.ones(3)}, "long_factor is torch.float32 [3]; use torch.float32"),
    (LONG | {"long_factor": torch.ones(4).half()}, "long_factor is torch.float16 [4]; use torch."),
    (LONG | {"original_max_position_embeddings": 1}, "embeddings=1; use an integer of 2 or more"),
    (LLAMA3 | {"high_freq_factor": 1}, "high_freq_factor=1 is not above low_freq_factor=1"),
    (LLAMA3 | {"low_freq_factor": 0}, "llama3: low_freq_factor=0; use a number above 0"),
    (LLAMA3 | {"original_max_position_embeddings": 1.5}, "embeddings=1.5; use an integer of 1"),
    ({**LLAMA3, "rope_theta": None}, "rope_theta missing; rope_type 'llama3' needs head_dim"),
    (PROPORTIONAL | {"partial_rotary_factor": 2}, "partial_rotary_factor=2; use one up to 1"),
    ({"rope_type": "axial", "partial_rotary_factor": 0.25}, "axial: head_dim=8 rotates 2 channels"),
    ({"mrope_section": [1, 2]}, "mrope: mrope_section=[1, 2]; use three integers"),
    ({"mrope_section": [1, 1, 1]}, "mrope_section=[1, 1, 1] adds up to 3; use three numbers that"),
    ({"mrope_section": [2, 2, 0]}, "mrope: mrope_section=0; use an integer of 1 or more"),
    ({"mrope_section": [1, 2, 1], "mrope_interleaved": True}, "does not fit every third of 4"),
    ({"mrope_section": [2, 1, 1], "mrope_interleaved": 1}, "mrope_interleaved=1; use True or"),
    ({"mrope_interleaved": True}, "mrope_interleaved without mrope_section; give both"),
    ({"rope_type": "axial", "mrope_section": [2, 1, 1]}, "these angles have axes already"),
    (
        {"full": {"rope_theta": 1e4}},
        "layer_type=None; rope_parameters is nested: use one of 'full'",
    ),
]


@pytest.mark.parametrize(
    ("parameters", "message"), BAD_PARAMETERS, ids=[m for _, m in BAD_PARAMETERS]
)
def test_parameters(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphError, match=re.escape(message)):
        angles.inv_freq(parameters, head_dim=8)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"head_dim": None}, "rope_parameters does not tell head_dim; give head_dim=128"),
        ({"head_dim": 7}, "head_dim=7 with partial_rotary_factor=1 rotates 7 channels"),
        ({"head_dim": 0}, "head_dim=0; use an integer of 1 or more"),
        ({"head_dim": True}, "head_dim=True; use an integer of 1 or more"),
        ({"dtype": torch.bfloat16}, "dtype=torch.bfloat16; use torch.float32 or torch.float64"),
        ({"layer_type": "full"}, "layer_type='full', but rope_parameters is not nested"),
        ({"seq_len": 0}, "dynamic: seq_len=0; use an integer of 1 or more"),
        ({"seq_len": 2.5}, "dynamic: seq_len=2.5; use an integer of 1 or more"),
        ({"seq_len": torch.ones(2, dtype=torch.int32)}, "seq_len has shape [2]; one length serves"),
        ({"seq_len": torch.tensor(2.0)}, "seq_len is torch.float32; use an integer tensor"),
        ({"seq_len": torch.tensor(2), "device": "meta"}, "seq_len is on cpu, device='meta'"),
    ],
)
def test_keywords(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphError, match=re.escape(message)):
        angles.inv_freq(DYNAMIC, **({"head_dim": 8} | keywords))


def test_numbers_of_numpy() -> None:
    given = {"rope_type": "linear", "factor": np.float32(2.0), "rope_theta": np.int64(10_000)}
    got = angles.inv_freq(given, head_dim=np.int32(8))  # pyright: ignore[reportArgumentType]
    assert torch.equal(got.inv_freq, angles.linear(head_dim=8, factor=2.0).inv_freq)
    with pytest.raises(GraphError, match="linear: factor="):
        angles.inv_freq({"rope_type": "linear", "factor": np.bool_(True)}, head_dim=8)


def test_what_is_no_config() -> None:
    with pytest.raises(GraphError, match="SimpleNamespace has no rope_parameters"):
        angles.inv_freq(SimpleNamespace(text_config=None), head_dim=8)
    config = SimpleNamespace(rope_parameters={"rope_type": "default"})
    with pytest.raises(GraphError, match="does not tell head_dim"):
        angles.inv_freq(config)


def test_keys_of_the_models_own() -> None:
    own = {"llama_4_scaling_beta": 0.1, "rope_theta": 1e4}
    with pytest.raises(GraphError, match=r"llama_4_scaling_beta=0.1 means nothing"):
        angles.inv_freq(own, head_dim=8)
    assert angles.inv_freq(own, head_dim=8, ignore_keys=["llama_4_scaling_beta"])
    config = SimpleNamespace(rope_parameters=own, hidden_size=64, num_attention_heads=8)
    config.ignore_keys_at_rope_validation = {"llama_4_scaling_beta"}
    assert angles.inv_freq(config).inv_freq.shape == (4,)


def test_old_spellings_and_what_a_config_fills_in() -> None:
    short = SimpleNamespace(
        rope_scaling={"type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
        rope_theta=500.0,
        head_dim=16,
        partial_rotary_factor=0.5,
        original_max_position_embeddings=1000,
        max_position_embeddings=4000,
    )
    written = dict(short.rope_scaling)
    found = angles.inv_freq(short, seq_len=1001)
    want = angles.longrope(
        head_dim=8, **written_without_name(written), rope_theta=500.0, factor=4.0,
        original_max_position_embeddings=1000, seq_len=1001,
    )  # fmt: skip
    assert torch.equal(found.inv_freq, want.inv_freq)
    assert found.attention_factor == want.attention_factor
    assert short.rope_scaling == written
    plain = SimpleNamespace(rope_scaling=None, rope_theta=500.0, head_dim=8)
    same = angles.default(head_dim=8, rope_theta=500.0)
    assert torch.equal(angles.inv_freq(plain).inv_freq, same.inv_freq)
    mrope = angles.inv_freq({"type": "mrope", "mrope_section": [2, 1, 1]}, head_dim=8)
    assert mrope.axis_count == 3


def written_without_name(parameters: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in parameters.items() if key != "type"}


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (torch.arange(4).bfloat16(), "positions are torch.bfloat16; use int32 or int64"),
        (torch.ones(4, dtype=torch.bool), "positions are torch.bool; use int32 or int64"),
        (torch.arange(4).reshape(1, 1, 4), "positions [1, 1, 4]; use [s] or [b, s]"),
        (torch.tensor(4), "positions []; use [s] or [b, s]"),
        (torch.arange(4, device="meta"), "positions are on meta, inv_freq on cpu"),
    ],
)
def test_positions(positions: torch.Tensor, message: str) -> None:
    with pytest.raises(GraphError, match=re.escape(message)):
        angles.freqs(angles.default(head_dim=8), positions)


def test_positions_of_several_axes() -> None:
    axial = angles.axial(head_dim=8)
    for wrong in (torch.zeros(3, 5), torch.zeros(5), torch.zeros(3, 2, 5), torch.zeros(2, 1, 1, 5)):
        with pytest.raises(GraphError, match=re.escape("for 2 axes; use [2, s] or [2, b, s]")):
            angles.freqs(axial, wrong)


def test_tables() -> None:
    positions, table = torch.arange(4), torch.zeros(4, 1, 1, 8)
    with pytest.raises(GraphError, match=r"inv_freq is torch.bfloat16"):
        angles.freqs(torch.ones(4).bfloat16(), positions)
    with pytest.raises(GraphError, match=re.escape("inv_freq=[1.0] is no tensor")):
        angles.freqs([1.0], positions)  # pyright: ignore[reportArgumentType]
    with pytest.raises(GraphError, match="angles=None is no tensor"):
        angles.cos_sin(None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(GraphError, match=re.escape("inv_freq is torch.float32 [1, 4]")):
        angles.freqs(torch.ones(1, 4), positions)
    with pytest.raises(GraphError, match=r"dtype=torch.float16; use torch.float32 or"):
        angles.freqs(torch.ones(4), positions, dtype=torch.float16)
    with pytest.raises(GraphError, match="width='r'; use 'full' or 'half'"):
        angles.freqs(torch.ones(4), positions, width="r")  # pyright: ignore[reportArgumentType]
    with pytest.raises(GraphError, match=r"angles are torch.float16"):
        angles.cos_sin(table.half())
    with pytest.raises(GraphError, match=r"dtype=torch.int32; use a floating type"):
        angles.cos_sin(table, torch.int32)
    with pytest.raises(GraphError, match="cos_sin: attention_factor=nan"):
        angles.cos_sin(table, attention_factor=float("nan"))
