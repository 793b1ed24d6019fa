"""What an unknown keyword was meant as: one of another library by its name here, or misspelt."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

_SCALE = ("scale", "attn_scale")
_CAUSAL = ("is_causal", "use_causal_mask")
_MASK = ("bias", *_CAUSAL)

# A keyword of torch, flash-attn, Hugging Face, xFormers or our other API -> those of both APIs.
_ELSEWHERE: dict[str, tuple[str, ...]] = {
    "attn_mask": _MASK, "attention_mask": (*_MASK, "seq_lens"), "mask": _MASK,
    "attn_bias": ("bias",),
    "scale": _SCALE, "attn_scale": _SCALE, "softmax_scale": _SCALE, "sm_scale": _SCALE,
    "scaling": _SCALE,
    "output_scale": ("q_output_scale", "k_output_scale"),
    "causal": _CAUSAL, "is_causal": _CAUSAL, "use_causal_mask": _CAUSAL,
    "window_size": ("window", "sliding_window_length"),
    "sliding_window": ("window", "sliding_window_length"),
    "eps": ("norm_eps", "epsilon"), "norm_eps": ("epsilon",),
    "dropout": ("dropout_p",), "dropout_p": ("dropout",),
    "alibi_slopes": ("alibi", "use_alibi_mask"),
    "logits_soft_cap": ("softcap",), "softcapping": ("softcap",),
    "s_aux": ("sink", "sink_token"), "sinks": ("sink", "sink_token"),
    "cu_seqlens_q": ("cu_seqlens",), "cu_seqlens_k": ("cu_seqlens",),
    "max_seqlen_q": ("max_seqlen",), "max_seqlen_k": ("max_seqlen",),
    "cache_seqlens": ("lengths",), "seqlen_offsets": ("start_positions",),
    "rotary_cos": ("cos",), "rotary_sin": ("sin",), "rotary_interleaved": ("interleaved",),
}  # fmt: skip


def meant_by(keyword: str, known: Iterable[str]) -> str:
    """The end of a message about ``keyword``; empty if nothing that is known comes near it."""
    names = tuple(known)
    found = [name for name in _ELSEWHERE.get(keyword, ()) if name in names]
    found = found or get_close_matches(keyword, names, n=1)
    return f"; did you mean {' or '.join(found)}?" if found else ""
