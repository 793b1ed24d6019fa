"""The installed transformers, every rope type: the same bits, on random parameters."""

from typing import Any

import pytest
import torch

from ropegraph import angles
from tests.angles.hf import hf, llama_config, random_parameters, theirs

TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")


def draw(below: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(below))


def test_no_type_is_left_out() -> None:
    known = set(hf("modeling_rope_utils").ROPE_INIT_FUNCTIONS)
    assert known <= set(TYPES) <= set(angles.ROPE_TYPES)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("rope_type", TYPES)
def test_from_a_dictionary_and_from_a_config(rope_type: str, seed: int) -> None:
    parameters, head_dim, longest = random_parameters(rope_type, seed)
    config = llama_config(parameters, head_dim, longest)
    for seq_len in (None, 1, longest, longest + 1, 3 * longest + 7):
        want, factor = theirs(config, seq_len)
        for ours in (
            angles.inv_freq(
                parameters, head_dim=head_dim, max_position_embeddings=longest, seq_len=seq_len
            ),
            angles.inv_freq(config, seq_len=seq_len),
        ):
            assert ours.inv_freq.dtype is torch.float32
            assert torch.equal(ours.inv_freq, want)
            assert type(ours.attention_factor) is float
            assert ours.attention_factor == pytest.approx(factor, rel=1e-15)


def test_yarn_without_a_factor() -> None:
    parameters = {"rope_type": "yarn", "rope_theta": 1e4, "factor": None}
    parameters["original_max_position_embeddings"] = 4096
    config = llama_config(parameters | {"factor": 2.5}, 64, 4096 * 5)
    config.rope_parameters["factor"] = None
    want, factor = theirs(config)
    ours = angles.inv_freq(config)
    assert torch.equal(ours.inv_freq, want)
    assert ours.attention_factor == factor


def test_nested_by_layer_type() -> None:
    config = hf("models.gemma3").Gemma3TextConfig(
        head_dim=64,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )
    want, _ = hf("modeling_rope_utils").ROPE_INIT_FUNCTIONS["linear"](
        config, layer_type="full_attention"
    )
    assert torch.equal(angles.inv_freq(config, layer_type="full_attention").inv_freq, want)
    model = hf("models.gemma3.modeling_gemma3").Gemma3RotaryEmbedding(config)
    ours = angles.inv_freq(config, layer_type="sliding_attention")
    assert torch.equal(ours.inv_freq, model.sliding_attention_inv_freq)


def test_heads_that_differ_by_layer_type() -> None:
    config = hf("models.gemma4").Gemma4TextConfig()
    model = hf("models.gemma4.modeling_gemma4").Gemma4TextRotaryEmbedding(config)
    for layer_type in ("full_attention", "sliding_attention"):
        ours = angles.inv_freq(config, layer_type=layer_type)
        assert torch.equal(ours.inv_freq, getattr(model, f"{layer_type}_inv_freq"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rope_type", ["default", "yarn"])
def test_tables(rope_type: str, dtype: torch.dtype) -> None:
    parameters, head_dim, longest = random_parameters(rope_type, 1)
    parameters.pop("partial_rotary_factor", None)
    config = llama_config(parameters, head_dim, longest)
    model = hf("models.llama.modeling_llama").LlamaRotaryEmbedding(config)
    positions = draw(2**17, (2, 37))
    want = model(torch.empty(0, dtype=dtype), positions)
    ours = angles.inv_freq(config)
    table = angles.freqs(ours, positions)
    found = angles.cos_sin(table, dtype, attention_factor=ours.attention_factor)
    for x, y in zip(found, want, strict=True):
        assert x.dtype is dtype
        assert torch.equal(x[:, :, 0].transpose(0, 1), y)


@pytest.mark.parametrize(
    ("package", "config_name", "model_name", "section", "interleaved"),
    [
        ("qwen2_vl", "Qwen2VLTextConfig", "Qwen2VLRotaryEmbedding", [16, 24, 24], False),
        ("qwen2_vl", "Qwen2VLTextConfig", "Qwen2VLRotaryEmbedding", [8, 12, 11], False),
        ("qwen3_vl", "Qwen3VLTextConfig", "Qwen3VLTextRotaryEmbedding", [24, 20, 20], True),
        ("qwen3_vl", "Qwen3VLTextConfig", "Qwen3VLTextRotaryEmbedding", [11, 11, 10], True),
    ],
)
def test_mrope(
    package: str, config_name: str, model_name: str, section: list[int], interleaved: bool
) -> None:
    head_dim = 2 * sum(section)
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e6}
    parameters |= {"mrope_section": section, "mrope_interleaved": interleaved}
    config = getattr(hf(f"models.{package}.configuration_{package}"), config_name)(
        hidden_size=2 * head_dim, num_attention_heads=2, rope_parameters=dict(parameters)
    )
    config.head_dim = head_dim
    model = getattr(hf(f"models.{package}.modeling_{package}"), model_name)(config)
    positions = draw(5000, (3, 2, 29))
    want = model(torch.empty(0), positions)
    ours = angles.inv_freq(parameters, head_dim=head_dim)
    for x, y in zip(angles.cos_sin(angles.freqs(ours, positions)), want, strict=True):
        assert torch.equal(x[:, :, 0].transpose(0, 1), y)
    assert torch.equal(angles.inv_freq(config).axes, ours.axes)


@pytest.mark.parametrize("package", ["qwen2_vl", "qwen3_vl"])
def test_axial(package: str) -> None:
    name = {"qwen2_vl": "Qwen2VL", "qwen3_vl": "Qwen3VL"}[package]
    module = hf(f"models.{package}.modeling_{package}")
    config = getattr(hf(f"models.{package}.configuration_{package}"), f"{name}VisionConfig")()
    model = getattr(module, f"{name}VisionRotaryEmbedding")(config)
    positions = draw(60, (2, 50))
    want = model(torch.empty(0), positions.t())  # theirs takes (N, 2)
    ours = angles.inv_freq(config)
    for x, y in zip(angles.cos_sin(angles.freqs(ours, positions)), want, strict=True):
        assert torch.equal(x[:, 0, 0], y)
