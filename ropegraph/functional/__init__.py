"""Rotary attention as functions of torch: autograd, torch.compile, autocast, CUDA graphs.

rope, attention, qkv_attention and cached_attention run the graphs that pygraph would record by
hand: see docs/functional.md.
"""

from ropegraph.functional.attention import attention
from ropegraph.functional.cached_attention import cached_attention
from ropegraph.functional.qkv_attention import qkv_attention
from ropegraph.functional.turn import rope

__all__ = ["attention", "cached_attention", "qkv_attention", "rope"]
