"""Modules of torch: rotary angles, attention with its projections, a cache for decoding.

They call ropegraph.functional: see docs/nn.md.
"""

from ropegraph.nn.kv_cache import KVCache
from ropegraph.nn.rotary_angles import RotaryAngles
from ropegraph.nn.rotary_attention import RotaryAttention

__all__ = ["KVCache", "RotaryAngles", "RotaryAttention"]
