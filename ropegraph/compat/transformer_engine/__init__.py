"""TransformerEngine 2.20's rotary embedding: its names, argument order and meaning.

    from transformer_engine.pytorch.attention.rope import ...  ->
    from ropegraph.compat.transformer_engine import ...
    tex.fused_rope_forward(...)                                ->
    transformer_engine.fused_rope_forward(...)

Every channel reads its own column of a table (``table_layout="full"``), as TransformerEngine does;
tables have no gradient. Beyond TransformerEngine: any device, fp64, int64 positions, the gradient
of packed QKV with start_positions, gradients of gradients, and rows behind the last sequence, which
TransformerEngine leaves unwritten, are 0.
"""

from ropegraph.compat.transformer_engine.embedding import RotaryPositionEmbedding
from ropegraph.compat.transformer_engine.formats import QKVFormat
from ropegraph.compat.transformer_engine.mla import MXFP8Tensor, fused_mla_kv_rope_mxfp8
from ropegraph.compat.transformer_engine.qkv import (
    apply_fused_qkv_rotary_pos_emb,
    fused_qkv_rope_backward,
    fused_qkv_rope_forward,
)
from ropegraph.compat.transformer_engine.rope import (
    apply_rotary_pos_emb,
    fused_rope_backward,
    fused_rope_forward,
)

__all__ = [
    "MXFP8Tensor",
    "QKVFormat",
    "RotaryPositionEmbedding",
    "apply_fused_qkv_rotary_pos_emb",
    "apply_rotary_pos_emb",
    "fused_mla_kv_rope_mxfp8",
    "fused_qkv_rope_backward",
    "fused_qkv_rope_forward",
    "fused_rope_backward",
    "fused_rope_forward",
]
