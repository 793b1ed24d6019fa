"""RotaryAngles: what it gives the functions, and what cannot spoil it."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import ropegraph as rg
from ropegraph import angles
from ropegraph.functional import attention, rope
from ropegraph.nn import RotaryAngles
from tests.ambient import default_dtype

D, S = 24, 10
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
DYNAMIC = {"rope_type": "dynamic", "factor": 3.0, "max_position_embeddings": 16}
LONGROPE = {
    "rope_type": "longrope", "original_max_position_embeddings": 16, "factor": 4.0,
    "short_factor": [1.0 + i / 10 for i in range(D // 2)],
    "long_factor": [2.0 + i for i in range(D // 2)],
}  # fmt: skip
MROPE = {"rope_type": "default", "mrope_section": [4, 4, 4]}
TYPES: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 1e5},
    "partial": {"rope_type": "default", "partial_rotary_factor": 0.5},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "yarn": YARN,
    "llama3": {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    },
    "dynamic": DYNAMIC,
    "longrope": LONGROPE,
    "proportional": {
        "rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.25,
    },
}  # fmt: skip


def x(seed: int = 0) -> Tensor:
    return torch.randn(2, 3, S, D, generator=torch.Generator().manual_seed(seed))


def length_for(module: RotaryAngles) -> dict[str, Any]:
    return {"seq_len": 40} if module.reads_length else {}


@pytest.mark.parametrize("name", TYPES)
def test_every_type_rotates_as_its_table(name: str) -> None:
    module = RotaryAngles(TYPES[name], head_dim=D)
    made = angles.inv_freq(TYPES[name], head_dim=D, **length_for(module))
    got = module(**length_for(module))
    assert torch.equal(got["inv_freq"], made.inv_freq)
    assert got["attention_factor"] == made.attention_factor == module.attention_factor
    table = angles.freqs(made, torch.arange(S))
    want = rope(
        x(), table, rope_dim=table.shape[-1], rope_offset=0, attention_factor=made.attention_factor
    )
    torch.testing.assert_close(rope(x(), **got), want, rtol=1e-6, atol=1e-6)
    assert module.rope_dim == table.shape[-1]
    assert name.replace("partial", "default") in repr(module)


def test_a_configuration_and_the_defaults() -> None:
    config = SimpleNamespace(
        rope_parameters=dict(YARN), hidden_size=4 * D, num_attention_heads=4,
        max_position_embeddings=512,
    )  # fmt: skip
    module = RotaryAngles(config)
    want = angles.inv_freq(config)
    config.rope_parameters["factor"] = 2.0  # read once
    assert torch.equal(module.to("meta").to("cpu").inv_freq, want.inv_freq)
    assert module.head_dim == D
    assert torch.equal(RotaryAngles(head_dim=D).inv_freq, angles.default(head_dim=D).inv_freq)


def test_pairs_and_positions() -> None:
    module = RotaryAngles(head_dim=D, interleaved=True, angle_precision="exact")
    ids = torch.tensor([[5, 3, 9, 100_000]])
    made = module(ids)
    want = rope(
        x()[:, :, :4], inv_freq=module.inv_freq, interleaved=True, angle_precision="exact",
        position_ids=ids,
    )  # fmt: skip
    assert torch.equal(rope(x()[:, :, :4], **made), want)


def test_several_axes() -> None:
    module = RotaryAngles(MROPE, head_dim=D)
    ids = torch.randint(50, (3, 2, S))
    table = angles.freqs(angles.inv_freq(MROPE, head_dim=D), ids)
    assert torch.equal(rope(x(), **module(ids)), rope(x(), table))
    text = torch.arange(S)[None].expand(3, S)
    torch.testing.assert_close(
        rope(x(), **module()), rope(x(), **module(text)), rtol=1e-6, atol=1e-6
    )
    paired = RotaryAngles(MROPE, head_dim=D, interleaved=True)
    want = rope(x(), table[..., : D // 2], half_width=True, interleaved=True)
    assert torch.equal(rope(x(), **paired(ids)), want)
    with pytest.raises(rg.GraphError, match=r"turns by several positions a token; give pos.*\[2"):
        RotaryAngles({"rope_type": "axial"}, head_dim=D)()


@pytest.mark.parametrize("parameters", [DYNAMIC, LONGROPE], ids=["dynamic", "longrope"])
def test_dynamic_forms_remember_nothing_and_read_nothing(parameters: dict[str, Any]) -> None:
    module = RotaryAngles(parameters, head_dim=D)
    for length in (8, 500, 16, 17, 8):
        want = angles.inv_freq(parameters, head_dim=D, seq_len=length).inv_freq
        for given in ({"seq_len": length}, {"seq_len": torch.tensor(length)}):
            assert torch.equal(module(**given)["inv_freq"], want)
        ids = torch.arange(length)[None]
        assert torch.equal(module(ids)["inv_freq"], want)
    with pytest.raises(rg.GraphError, match="depend on the length; give seq_len="):
        module()
    for wrong in (0, 2.5, torch.tensor(3.0), torch.ones(2, dtype=torch.int64)):
        with pytest.raises(rg.GraphError, match="RotaryAngles: seq_len"):
            module(seq_len=wrong)
    with FakeTensorMode():  # a fake tensor has no value that could be read
        fake = RotaryAngles(parameters, head_dim=D)
        assert fake(torch.empty(1, 5, dtype=torch.int64))["inv_freq"].shape == (D // 2,)


CASTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "bfloat16": lambda m: m.to(torch.bfloat16),
    "half": lambda m: m.half(),
    "double": lambda m: m.double(),
    "device and type": lambda m: m.to("cpu", torch.bfloat16),
    "to empty": lambda m: m.to_empty(device="cpu"),
    "meta and back": lambda m: m.to("meta").to_empty(device="cpu"),
    "shared": lambda m: m.share_memory(),
    "copy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
}


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("name", ["yarn", "longrope", "dynamic", "mrope"])
def test_nothing_changes_a_bit(name: str, cast: str) -> None:
    parameters = TYPES.get(name, MROPE)
    want = RotaryAngles(parameters, head_dim=D)
    model = nn.Sequential(RotaryAngles(parameters, head_dim=D), nn.Linear(2, 2))
    got = CASTS[cast](model)[0]
    assert got.inv_freq.dtype is torch.float32
    given = length_for(want)
    assert torch.equal(got(**given)["inv_freq"], want(**given)["inv_freq"])
    ids = torch.randint(9, (3, 2, S)) if name == "mrope" else torch.arange(S)[None]
    assert torch.equal(rope(x(), **got(ids)), rope(x(), **want(ids)))


def test_states_hold_nothing() -> None:
    module = RotaryAngles(YARN, head_dim=D)
    assert not module.state_dict()
    assert not list(module.parameters())
    module.load_state_dict({})
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert torch.equal(again.inv_freq, module.inv_freq)


def test_made_on_the_meta_device() -> None:
    want = RotaryAngles(YARN, head_dim=D).inv_freq
    with torch.device("meta"):
        module = RotaryAngles(YARN, head_dim=D)
    assert module.inv_freq.is_meta
    module.load_state_dict({}, assign=True)
    device = torch.device("cpu")
    assert torch.equal(module(device=device)["inv_freq"], want)  # what was never moved
    assert RotaryAngles(YARN, head_dim=D, device="meta").inv_freq.is_meta


def test_buffers_that_were_cast_by_name_are_mended() -> None:
    """As sharding wrappers do, which do not go through ``to``."""
    module = RotaryAngles(YARN, head_dim=D)
    want = module.inv_freq.clone()
    module.inv_freq = module.inv_freq.to(torch.bfloat16)
    assert torch.equal(module()["inv_freq"], want)


@pytest.mark.parametrize("name", TYPES)
def test_default_types_and_autocast_change_nothing(name: str) -> None:
    want = RotaryAngles(TYPES[name], head_dim=D)
    given = length_for(want)
    for dtype in (torch.float64, torch.bfloat16):
        with default_dtype(dtype):
            module = RotaryAngles(TYPES[name], head_dim=D)
            assert torch.equal(module(**given)["inv_freq"], want(**given)["inv_freq"])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = RotaryAngles(TYPES[name], head_dim=D)(**given)
        assert torch.equal(made["inv_freq"], want(**given)["inv_freq"])


def test_made_in_inference_mode_and_trained_with() -> None:
    with torch.inference_mode():
        module = RotaryAngles(YARN, head_dim=D)
        module.to("meta").to("cpu")
    q = x().requires_grad_()
    attention(q, q, q, **module()).sum().backward()
    assert q.grad is not None


def test_compiled() -> None:
    for parameters in (YARN, DYNAMIC, LONGROPE):
        module = RotaryAngles(parameters, head_dim=D)

        def step(q: Tensor, module: RotaryAngles = module) -> Tensor:
            return rope(q, **module(seq_len=q.shape[2]))

        compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
        for length in (5, 9, 30):
            q = torch.randn(1, 2, length, D)
            assert torch.equal(compiled(q), step(q)), parameters["rope_type"]


def test_bad_parameters() -> None:
    with pytest.raises(rg.GraphError, match="rope_type='yarm' is not known"):
        RotaryAngles({"rope_type": "yarm"}, head_dim=D)
    with pytest.raises(rg.GraphError, match="give head_dim=128, say"):
        RotaryAngles()
    with pytest.raises(rg.GraphError, match="factor missing"):
        RotaryAngles({"rope_type": "linear"}, head_dim=D)
    with pytest.raises(rg.GraphError, match="RotaryAngles: ignore_keys=3; use a list"):
        RotaryAngles(head_dim=D, ignore_keys=3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(rg.GraphError, match="RotaryAngles: position_ids is list; use a tensor"):
        RotaryAngles(head_dim=D)([0, 1])  # pyright: ignore[reportArgumentType]
