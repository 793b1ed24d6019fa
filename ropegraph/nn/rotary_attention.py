"""Attention with its projections: QKV, optional norms of Q and K, rotation, attention, output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ropegraph.api.checks import as_count, as_number
from ropegraph.errors import GraphError, PositionError
from ropegraph.functional import attention, cached_attention, qkv_attention
from ropegraph.functional.arguments import flags
from ropegraph.functional.norms import as_epsilon
from ropegraph.nn.kv_cache import KVCache
from ropegraph.nn.rotary_angles import RotaryAngles


class RotaryAttention(nn.Module):
    """Rotary attention as a layer, [b, s, embed_dim] to [b, s, embed_dim].

    num_kv_heads: fewer than num_heads for grouped queries.
    head_dim: None is embed_dim / num_heads.
    angles: a RotaryAngles, which layers may share, or what one is made from: rope parameters or a
    configuration; None is the default type.
    bias: of the projections.  out_bias: of the last one, where it differs.
    qk_norm: RMSNorm of every head of Q and K, with a weight [head_dim] each, before the rotation,
    as Qwen3 has it, and in the launch of the rotation.
    is_causal: each row sees itself and those before.  window: of those the last W.
    scale: None is 1 / sqrt(head_dim).  dropout: of the weights, in training.
    fold, recompute_rope: as for ``functional.attention``.

    One matrix product makes packed QKV, ``qkv_proj``, from which V is read where it lies, and whose
    gradient is written into one tensor; with cu_seqlens Q, K and V go separately.
    ``o_proj`` is the last one. Raises GraphError for sizes that do not fit.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        angles: object = None,
        bias: bool = False,
        out_bias: bool | None = None,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
        is_causal: bool = True,
        window: int | None = None,
        scale: float | None = None,
        dropout: float = 0.0,
        fold: str = "auto",
        recompute_rope: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        where = "RotaryAttention"
        self.embed_dim = as_count(embed_dim, f"{where}: embed_dim", 1)
        self.num_heads = as_count(num_heads, f"{where}: num_heads", 1)
        flags(
            where, bias=bias, out_bias=out_bias, qk_norm=qk_norm, is_causal=is_causal,
            recompute_rope=recompute_rope,
        )  # fmt: skip
        groups = num_heads if num_kv_heads is None else num_kv_heads
        self.num_kv_heads = as_count(groups, f"{where}: num_kv_heads", 1)
        if num_heads % groups:
            raise GraphError(
                f"{where}: num_heads={num_heads} is no multiple of num_kv_heads={groups}; each "
                "head of K and V serves as many of Q"
            )
        if head_dim is None and embed_dim % num_heads:
            raise GraphError(
                f"{where}: embed_dim={embed_dim} is no multiple of num_heads={num_heads}; give "
                "head_dim="
            )
        width = embed_dim // num_heads if head_dim is None else head_dim
        self.head_dim = as_count(width, f"{where}: head_dim", 1)
        self.dropout = as_number(dropout, f"{where}: dropout")
        if not 0.0 <= self.dropout < 1.0:
            raise GraphError(f"{where}: dropout={dropout}; use 0 or more, and less than 1")
        if window is not None:
            as_count(window, f"{where}: window", 1)
            if not is_causal:
                raise GraphError(
                    f"{where}: window={window} counts keys up to a row's own, which needs "
                    "is_causal=True"
                )
        self.is_causal, self.window = is_causal, window
        self.scale, self.fold, self.recompute_rope = scale, fold, recompute_rope
        self.angles = self._angles(angles, device)
        of_factory: dict[str, Any] = {"device": device, "dtype": dtype}
        heads = self.num_heads + 2 * self.num_kv_heads
        self.qkv_proj = nn.Linear(embed_dim, heads * self.head_dim, bias=bias, **of_factory)
        self.o_proj = nn.Linear(
            self.num_heads * self.head_dim, embed_dim, bias=bias if out_bias is None else out_bias,
            **of_factory,
        )  # fmt: skip
        self.norm_eps = as_epsilon(where, norm_eps)
        self.q_norm = self.k_norm = None
        if qk_norm:
            self.q_norm = nn.RMSNorm(self.head_dim, eps=self.norm_eps, **of_factory)
            self.k_norm = nn.RMSNorm(self.head_dim, eps=self.norm_eps, **of_factory)

    def forward(
        self,
        x: Tensor,
        *,
        cache: KVCache | None = None,
        rope: Mapping[str, Any] | None = None,
        position_ids: Tensor | None = None,
        seq_lens: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """Attend among the rows of x, or, with a cache, to the rows before them as well.

        x: [b, s, embed_dim].
        cache: the rows are appended to it, and it counts them; then nothing has a gradient. The
        rows' positions follow on those in the cache.
        rope: what ``angles(...)`` gave, made once for many layers, instead of position_ids; with
        dynamic and longrope angles it also fixes the length, which is s otherwise, and the
        max_length of a cache: its keys stay as they were rotated.
        position_ids: as for RotaryAngles.
        seq_lens: [b], real rows of each sequence; those behind them are o_proj's bias, or 0.
        cu_seqlens, max_seqlen: documents packed along s of [1, s, embed_dim].
        Returns [b, s, embed_dim].
        Raises GraphError for what does not fit; PositionError, on a CPU, where a cache is too
        short, before anything is written.
        """
        if not isinstance(x, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise GraphError(f"RotaryAttention: x is {type(x).__name__}; use a tensor")
        if cache is not None and not isinstance(cache, KVCache):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise GraphError(f"RotaryAttention: cache is {type(cache).__name__}; use a KVCache")
        if x.dim() != 3 or x.shape[2] != self.embed_dim:
            raise GraphError(f"RotaryAttention: x is {list(x.shape)}; use [b, s, {self.embed_dim}]")
        if rope is None:
            rope = self._rope(x, cache, position_ids, max_seqlen)
        elif position_ids is not None:
            raise GraphError("RotaryAttention: rope and position_ids both say positions; give one")
        elif not isinstance(rope, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise GraphError(
                f"RotaryAttention: rope is {type(rope).__name__}; use what angles() gave"
            )
        qkv = self.qkv_proj(x)
        if cache is not None:
            if cu_seqlens is not None:
                raise GraphError(
                    "RotaryAttention: cu_seqlens packs documents, a cache has a row of its batch "
                    "for each; give one"
                )
            o = self._append(qkv, cache, rope, seq_lens)
        elif cu_seqlens is None and max_seqlen is None:
            o = qkv_attention(
                qkv, split=self.split, by_groups=False, seq_lens=seq_lens, **self._options(),
                **self._norms(), **rope,
            )  # fmt: skip
        else:
            o = attention(
                *self._heads(qkv), enable_gqa=True, seq_lens=seq_lens, cu_seqlens=cu_seqlens,
                max_seqlen=max_seqlen, **self._options(), **self._norms(), **rope,
            )  # fmt: skip
        return self.o_proj(o.transpose(1, 2).flatten(2))

    @property
    def split(self) -> tuple[int, int, int]:
        """Heads of Q, of K and of V in the packed projection."""
        return self.num_heads, self.num_kv_heads, self.num_kv_heads

    def new_cache(
        self, batch: int, max_length: int, *, dtype: torch.dtype | None = None
    ) -> KVCache:
        """An empty cache for this layer, where its weights are, in their type or another."""
        weight = self.qkv_proj.weight
        return KVCache(
            batch, self.num_kv_heads, max_length, self.head_dim,
            dtype=weight.dtype if dtype is None else dtype, device=weight.device,
        )  # fmt: skip

    def extra_repr(self) -> str:
        given = f"heads={self.num_heads}, kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"
        return f"{given}, is_causal={self.is_causal}, window={self.window}"

    def _angles(self, given: object, device: torch.device | str | None) -> RotaryAngles:
        made = given
        if not isinstance(made, RotaryAngles):
            made = RotaryAngles(given, head_dim=self.head_dim, device=device)
        if made.rope_dim > self.head_dim:
            raise GraphError(
                f"RotaryAttention: angles of {made.rope_dim} channels for heads of "
                f"{self.head_dim}; make them with head_dim={self.head_dim}"
            )
        return made

    def _rope(
        self, x: Tensor, cache: KVCache | None, position_ids: Tensor | None, max_seqlen: int | None
    ) -> dict[str, Any]:
        if cache is not None:
            length = cache.max_length
        else:
            length = x.shape[1] if max_seqlen is None else max_seqlen
        seq_len = length if self.angles.reads_length else None
        return self.angles(position_ids, seq_len=seq_len, device=x.device)

    def _options(self) -> dict[str, Any]:
        return {
            "is_causal": self.is_causal, "window": self.window, "scale": self.scale,
            "dropout_p": self.dropout if self.training else 0.0, "fold": self.fold,
            "recompute_rope": self.recompute_rope,
        }  # fmt: skip

    def _norms(self) -> dict[str, Any]:
        if self.q_norm is None or self.k_norm is None:
            return {}
        weights = {"q_norm": self.q_norm.weight, "k_norm": self.k_norm.weight}
        return {**weights, "norm_eps": self.norm_eps}

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, [b, h, s, d] each: views."""
        b, s, _ = qkv.shape
        heads = qkv.view(b, s, sum(self.split), self.head_dim).transpose(1, 2)
        q, k, v = torch.split(heads, list(self.split), dim=1)
        return q, k, v

    def _append(
        self, qkv: Tensor, cache: KVCache, rope: Mapping[str, Any], seq_lens: Tensor | None
    ) -> Tensor:
        if not self.is_causal:
            raise GraphError(
                "RotaryAttention: a cache holds what came before, but is_causal=False sees what "
                "comes after as well; leave cache out"
            )
        if self.training and self.dropout:
            raise GraphError("RotaryAttention: dropout with a cache; call eval() first")
        if "freqs" in rope and "position_ids" not in rope:
            # Of several axes: row i of this table is that of row i, wherever in the cache it goes.
            rows = torch.arange(qkv.shape[1], device=qkv.device)[None]
            rope = {**rope, "position_ids": rows}
        new = qkv.shape[1] if seq_lens is None else seq_lens
        try:
            o = cached_attention(
                *self._heads(qkv), cache.k, cache.v, cache.lengths, new_lens=seq_lens,
                window=self.window, scale=self.scale, fold=self.fold, **self._norms(), **rope,
            )  # fmt: skip
        except PositionError as error:  # on a CPU, where nothing was written yet
            if bool((cache.lengths + new > cache.max_length).any()):
                raise PositionError(
                    f"RotaryAttention: the new rows do not fit behind the "
                    f"{cache.lengths.tolist()} of a cache with max_length={cache.max_length}; make "
                    "a longer one by new_cache(), or reset() this one"
                ) from error
            raise
        cache.advance(new)
        return o
