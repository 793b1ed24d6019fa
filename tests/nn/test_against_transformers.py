"""The layers of Hugging Face transformers with the same weights: results, gradients, decoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ropegraph.functional import rope
from ropegraph.nn import RotaryAngles, RotaryAttention
from tests.angles.hf import hf

B, S, E, H_Q, H_KV, D = 2, 21, 60, 6, 2, 8
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5e5},
    "yarn": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "llama3": {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
    },
}  # fmt: skip
FAMILIES = {"Llama": {}, "Qwen2": {"bias": True, "out_bias": False}, "Qwen3": {"qk_norm": True}}


def pair(family: str, rope: str) -> tuple[Any, nn.Module, nn.Module, RotaryAttention]:
    """(config, their attention, their angles, ours with their weights), in fp64."""
    module = hf(f"models.{family.lower()}.modeling_{family.lower()}")
    config = getattr(hf(f"models.{family.lower()}"), f"{family}Config")(
        hidden_size=E, num_attention_heads=H_Q, num_key_value_heads=H_KV, head_dim=D,
        num_hidden_layers=1, max_position_embeddings=64, rope_parameters=dict(ROPES[rope]),
        attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = getattr(module, f"{family}Attention")(config, layer_idx=0).double().eval()
    ours = RotaryAttention(
        E, H_Q, H_KV, angles=config, head_dim=D, norm_eps=config.rms_norm_eps,
        dtype=torch.float64, **FAMILIES[family],
    ).eval()  # fmt: skip
    for p in theirs.parameters():
        nn.init.normal_(p, std=0.3)
    given = theirs.state_dict()
    state = {name: x for name, x in given.items() if not name.startswith(("q_p", "k_p", "v_p"))}
    for kind in ("weight", "bias"):
        if f"q_proj.{kind}" in given:
            parts = [given[f"{x}_proj.{kind}"] for x in "qkv"]
            state[f"qkv_proj.{kind}"] = torch.cat(parts)
    ours.load_state_dict(state)
    return config, theirs, getattr(module, f"{family}RotaryEmbedding")(config), ours


def by_them(theirs: nn.Module, angles: nn.Module, x: Tensor) -> Tensor:
    position = torch.arange(S)[None]
    mask = torch.full((S, S), -torch.inf, dtype=x.dtype).triu(1)[None, None]
    cos, sin = angles(x, position)
    return theirs(x, position_embeddings=(cos, sin), attention_mask=mask)[0]


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_results_gradients_and_decoding(family: str, rope: str) -> None:
    _, theirs, angles, ours = pair(family, rope)
    x = torch.randn(B, S, E, dtype=torch.float64, requires_grad=True)
    want, got = by_them(theirs, angles, x), ours(x)
    # Their cosines, sines and softmax are f32.
    torch.testing.assert_close(got, want, rtol=1e-5, atol=5e-6)
    grads = [torch.autograd.grad(o.sin().sum(), x)[0] for o in (want, got)]
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=2e-4)
    cache = ours.new_cache(B, S)
    with torch.no_grad():
        rows = [ours(x[:, i:j], cache=cache) for i, j in ((0, 9), (9, 10), (10, S))]
    torch.testing.assert_close(torch.cat(rows, 1), want.detach(), rtol=1e-5, atol=5e-6)


def test_angles_have_the_bits_of_theirs() -> None:
    for name in ROPES:
        _, _, angles, ours = pair("Llama", name)
        assert torch.equal(ours.angles.inv_freq, angles.inv_freq)
        assert ours.angles.attention_factor == angles.attention_scaling


def test_a_part_of_each_head_as_gpt_neox_turns_it() -> None:
    """rotary_pct of its configuration says how wide, and the functions are told which channels."""
    module = hf("models.gpt_neox.modeling_gpt_neox")
    config = hf("models.gpt_neox").GPTNeoXConfig(
        hidden_size=H_Q * 2 * D, num_attention_heads=H_Q, rotary_pct=0.5
    )
    x = torch.randn(B, H_Q, S, 2 * D)
    cos, sin = module.GPTNeoXRotaryEmbedding(config)(x, torch.arange(S)[None])
    want, _ = module.apply_rotary_pos_emb(x, x, cos, sin)
    made = RotaryAngles(config)()
    assert (made["rope_dim"], made["rope_offset"]) == (D, 0)
    ids = torch.arange(S)[None]
    torch.testing.assert_close(rope(x, **made, position_ids=ids), want, atol=1e-5, rtol=1e-5)
    by_table = rope(x, cos=cos, sin=sin, rope_dim=D, rope_offset=0)
    torch.testing.assert_close(by_table, want, atol=1e-6, rtol=1e-6)
