"""transformers, imported late: the tests beside it need it, the others do not."""

import importlib
import importlib.util
import random
import sys
from typing import Any

import pytest
import torch

from tests.missing import missing


def hf(module: str) -> Any:
    """A module of transformers; ends the test where there is none."""
    if importlib.util.find_spec("transformers") is None:
        if sys.version_info < (3, 11):
            pytest.skip("transformers 5 needs Python 3.11")
        missing("transformers")
    return importlib.import_module(f"transformers.{module}")


def llama_config(parameters: dict[str, Any], head_dim: int, longest: int) -> Any:
    """A config that validates nothing but rope_parameters, copied, for transformers adds keys."""
    return hf("models.llama").LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=longest,
        rope_parameters=dict(parameters),
    )


def theirs(config: Any, seq_len: Any = None, **keywords: Any) -> tuple[torch.Tensor, float]:
    """(inv_freq, attention_factor) as transformers makes them."""
    rope_type = config.rope_parameters["rope_type"]
    if rope_type == "default":
        # Phi's reads partial_rotary_factor; Llama's has no use for it.
        model = hf("models.phi.modeling_phi").PhiRotaryEmbedding
        return model.compute_default_rope_parameters(config)
    make = hf("modeling_rope_utils").ROPE_INIT_FUNCTIONS[rope_type]
    return make(config, seq_len=seq_len, **keywords)


def random_parameters(rope_type: str, seed: int) -> tuple[dict[str, Any], int, int]:
    """(rope_parameters, head_dim, max_position_embeddings) that transformers takes."""
    r = random.Random(f"{rope_type}{seed}")
    head_dim = r.choice([8, 24, 64, 96, 128, 256])
    original = r.choice([1000, 4096, 8192])
    factor = r.choice([1.0, r.uniform(1.0, 3.0), 8.0, r.uniform(3.0, 64.0)])
    part = r.choice([None, 1.0, 0.5])
    p: dict[str, Any] = {"rope_type": rope_type, "rope_theta": r.choice([1e4, 5e5, 12345.678])}
    if part is not None:
        p["partial_rotary_factor"] = part
    pairs = int(head_dim * (part or 1.0)) // 2
    if rope_type in ("linear", "dynamic", "yarn", "llama3"):
        p["factor"] = factor
    if rope_type in ("yarn", "longrope", "llama3"):
        p["original_max_position_embeddings"] = original
    if rope_type == "llama3":
        p["low_freq_factor"] = r.uniform(0.5, 2.0)
        p["high_freq_factor"] = p["low_freq_factor"] + r.uniform(0.5, 6.0)
    if rope_type == "longrope":
        p["short_factor"] = [r.uniform(1.0, 2.0) for _ in range(pairs)]
        p["long_factor"] = [r.uniform(1.0, 64.0) for _ in range(pairs)]
        p |= r.choice([{}, {"factor": factor}, {"attention_factor": 1.19}])
    if rope_type == "yarn":
        p |= r.choice([{}, {"beta_fast": 24.5, "beta_slow": 1.5}, {"beta_fast": 48}])
        p |= r.choice([{}, {"truncate": False}, {"truncate": True}])
        p |= r.choice([{}, {"mscale": 0.707, "mscale_all_dim": 1.0}, {"mscale": 0.5}])
        p |= r.choice([{}, {}, {"attention_factor": 0.9}])
    if rope_type == "proportional":
        p |= r.choice([{}, {"factor": factor}])
        p["partial_rotary_factor"] = r.choice([0.25, 0.3, 0.75, 1.0])
    return p, head_dim, int(original * factor)
