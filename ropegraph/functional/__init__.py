"""Rotary attention as functions of torch: autograd, torch.compile, autocast, CUDA graphs.

rope, attention and qkv_attention run the graphs that pygraph would record by hand: see
docs/functional.md.
"""

from ropegraph.functional.attention import attention
from ropegraph.functional.qkv_attention import qkv_attention
from ropegraph.functional.turn import rope

__all__ = ["attention", "qkv_attention", "rope"]
