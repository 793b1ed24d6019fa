"""The operations: what each computes, as frozen attributes. Tensors are edges, not attributes.

Everything here changes numbers. An engine's tuning knob never appears.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from ropegraph.dtypes import DType
from ropegraph.ir.score_mod import ScoreProgram

AngleSource = Literal["freqs", "cos_sin", "packed", "inv_freq"]
TableLayout = Literal["first_half", "pairs", "full"]
AnglePrecision = Literal["float32", "exact"]
Numerics = Literal["fp32", "nemo", "hf"]

# The input ports that carry the angles, and those that may carry positions.
ANGLE_PORTS: dict[AngleSource, tuple[str, ...]] = {
    "freqs": ("freqs",),
    "cos_sin": ("cos", "sin"),
    "packed": ("cos_sin",),
    "inv_freq": ("inv_freq",),
}
POSITION_PORTS = ("position_ids", "start_positions", "cu_seqlens")
# What is written into, and where: of Rope and CacheWrite.
CACHE_PORTS = ("cache", "cache_positions")


@dataclass(frozen=True)
class Rotation:
    """Rotate channels [rope_offset, rope_offset + rope_dim) of each row, then scale the row.

    A pair (x1, x2) with angle t becomes A (x1 cos t - x2 sin t), A (x2 cos t + x1 sin t), where
    A is attention_factor; every channel of the row is then multiplied by output_scale.

    rope_dim: r, even, already resolved (never 0).  rope_offset: first rotated channel.
    interleaved: pairs (2i, 2i+1) of the segment are read, else (i, i + r/2).
    interleaved_output: the same for the written pairs.
    angles: which input ports hold them, as ANGLE_PORTS says: ``freqs`` (radians), ``cos_sin``
    (ports cos and sin), ``packed`` (both on the last axis of port cos_sin) or ``inv_freq`` (radians
    a position, r/2 of them).
    half_width: the table has r/2 columns; otherwise r, read as table_layout says.
    angle_precision: with inv_freq, "float32" rounds position times inv_freq once to fp32; "exact"
    takes the sine and cosine of the unrounded product.
    head_groups: what Rope reads and RopeBackward writes is [b, head_groups, h / head_groups, s, d],
    heads in two levels, and becomes [b, h, s, d] or was that; 0 keeps dims as they are.
    numerics: how products round; "nemo" and "hf" read cos and sin, and their scales are 1.

    The position of row s of batch entry b is position_ids[b, s] where that port is there. Else it
    is start + c(s): start is start_positions[b], or 0; c(s) is s, or with cp_size C > 1 and L local
    rows, s + cp_rank L/2 in the first half, s + L C - (cp_rank + 2) L/2 in the second (context
    parallel: a rank holds chunks cp_rank and 2C - 1 - cp_rank of 2C). With port cu_seqlens (lengths
    of whole sequences, packed in a batch of 1; a rank holds 1/C of each) or ragged data, s and L
    count within the own sequence, start_positions has one number a sequence, and rows of no
    sequence become 0. Row ``position`` of a table is read.
    """

    rope_dim: int
    rope_offset: int
    output_scale: float = 1.0
    attention_factor: float = 1.0
    interleaved: bool = False
    interleaved_output: bool = False
    inverse: bool = False
    angles: AngleSource = "freqs"
    half_width: bool = False
    table_layout: TableLayout = "first_half"
    angle_precision: AnglePrecision = "float32"
    numerics: Numerics = "fp32"
    cp_size: int = 1
    cp_rank: int = 0
    head_groups: int = 0
    compute: DType = DType.FLOAT


@dataclass(frozen=True)
class Rope(Rotation):
    """output = output_scale * R x.  Ports: input, angles, positions -> output.

    With ports cache and cache_positions the output is the cache, written as CacheWrite does.
    """


@dataclass(frozen=True)
class RopeBackward(Rotation):
    """The exact adjoint of Rope with the same attributes.  Ports: dY, angles, positions -> dX."""


@dataclass(frozen=True)
class RopeFreqsGrad(Rotation):
    """The gradient of the angles of a Rope.  Ports: input, dY, freqs, positions -> dfreqs."""


@dataclass(frozen=True)
class CacheWrite:
    """Rows of the input, bit for bit, in a cache.  Ports: input, cache, cache_positions -> output.

    Row i of batch entry b becomes row cache_positions[b] + i of that entry of the cache
    [b, h, s_max, d]. The output is the cache, in the same memory; its other rows keep their bits.
    """


@dataclass(frozen=True)
class Pair:
    """Ops of one kind in one launch.  Ports: those of each part with 0, 1 or 2 appended.

    names: the nodes that the parts were, for reports.
    """

    parts: tuple[Any, ...]
    names: tuple[str, ...] = ("", "")


@dataclass(frozen=True)
class RopePair(Pair):
    """Two rotations in one launch, or up to three parts of which some write into caches."""

    parts: tuple[Rope | CacheWrite, ...] | tuple[RopeBackward, ...]


@dataclass(frozen=True)
class Norm:
    """What RmsNorm and RmsNormBackward share.

    With x a head row, or all head rows of a token where scale is [1, h, 1, d] with h > 1:

        inv_variance = 1 / sqrt(mean(x^2) + epsilon)      Y = x * inv_variance * w

    w is scale, or 1 + scale where zero_centered.
    """

    zero_centered: bool = False
    compute: DType = DType.FLOAT


@dataclass(frozen=True)
class RmsNorm(Norm):
    """Ports: input, scale -> Y, inv_variance."""

    epsilon: float = 1e-6


@dataclass(frozen=True)
class RmsNormBackward(Norm):
    """The gradients of RmsNorm.  Ports: grad, input, scale, inv_variance -> DX, Dscale.

    With g = grad * w and n = input * inv_variance: DX = inv_variance * (g - n * mean(g n)), and
    Dscale is the sum of grad * n over what scale is shared by, added up in the compute type.
    """


@dataclass(frozen=True)
class NormRope:
    """RmsNorm and Rope in one launch; the value between is not rounded.

    Ports: input, scale, those of the angles and positions -> output, inv_variance.
    norm_first: False where the rotation comes first.  names: the nodes that norm and rope were.
    """

    norm: RmsNorm
    rope: Rope
    norm_first: bool = True
    names: tuple[str, str] = ("", "")


@dataclass(frozen=True)
class NormRopeBackward:
    """The gradients of NormRope; where the rotation comes first, it is made again from input.

    Ports: dY, input, scale, inv_variance, those of the angles and positions -> dX, Dscale.
    """

    norm: RmsNormBackward
    rope: RopeBackward
    norm_first: bool = True
    names: tuple[str, str] = ("", "")


@dataclass(frozen=True)
class NormRopePair(Pair):
    """Two of NormRope, or of NormRopeBackward, in one launch."""

    parts: tuple[NormRope, NormRope] | tuple[NormRopeBackward, NormRopeBackward]


@dataclass(frozen=True)
class Attention:
    """What Sdpa and SdpaBackward share; both must carry the same values.

    The logits are, in this order: attn_scale * q.k (times ln 2 when softmax_input_is_log2),
    score_mod, + bias, + ALiBi, padding, diagonal band, sink, softmax, dropout.

    attn_scale: a host number; None when the port ``attn_scale`` carries it.
    left_bound: keep j > i' - left_bound.  right_bound: keep j <= i' + right_bound.  None: no bound.
    bottom_right: i' = i + s_kv - s_q (per sequence when lengths are given), else i' = i.
    alibi: add slope_h * (j - i).  padding: seq_len_q and seq_len_kv say what is real.
    dropout_p: probability of zeroing a weight; ports seed and offset.  None: no dropout.
    """

    attn_scale: float | None = 1.0
    left_bound: int | None = None
    right_bound: int | None = None
    bottom_right: bool = False
    alibi: bool = False
    padding: bool = False
    dropout_p: float | None = None
    score_mod: ScoreProgram | None = None
    softmax_input_is_log2: bool = False
    compute: DType = DType.FLOAT


# The keyword by which a caller sets a field of Attention, where the two differ.
KEYWORDS: dict[str, str] = {
    "left_bound": "diagonal_band_left_bound",
    "right_bound": "diagonal_band_right_bound",
    "bottom_right": "diagonal_alignment=BOTTOM_RIGHT",
    "alibi": "use_alibi_mask",
    "padding": "use_padding_mask",
    "dropout_p": "dropout probability",
    "compute": "compute_data_type",
}


@dataclass(frozen=True)
class Sdpa(Attention):
    """o = softmax(logits) v.

    Ports: q, k, v and optionally attn_scale, bias, seq_len_q, seq_len_kv, seed, offset, sink_token,
    paged_attention_k_table, paged_attention_v_table, those of score_mod -> O, Stats.
    max_seq_len_kv: the logical s_kv of paged k and v; None when they are not paged.
    """

    max_seq_len_kv: int | None = None


@dataclass(frozen=True)
class SdpaBackward(Attention):
    """Gradients of Sdpa from its output and natural log-sum-exp.

    Ports: q, k, v, o, dO, stats and Sdpa's optional ones -> dQ, dK, dV, dBias, dSink_token.
    With softmax_input_is_log2 the factor ln 2 is part of dQ and dK.
    deterministic: two runs give the same bits.
    """

    deterministic: bool = False


@dataclass(frozen=True)
class Scale:
    """output = factor * input, a host number.  Ports: input -> output."""

    factor: float


@dataclass(frozen=True)
class Sum:
    """Adds all inputs, where gradients of one tensor meet.  Ports: 0, 1, ... -> output."""


@dataclass(frozen=True)
class Matmul:
    """The products of matrices, [b, m, k] by [b, k, n].  Ports: A, B -> C, which is [b, m, n].

    One of A and B may have a batch of 1: it is used for all.
    transpose_A, transpose_B: A is [b, k, m], B is [b, n, k].  sum_batch: C is [1, m, n], summed.
    """

    transpose_A: bool = False  # noqa: N815 - after the port
    transpose_B: bool = False  # noqa: N815
    sum_batch: bool = False


@dataclass(frozen=True)
class SplitQkv:
    """Q, K and V of one packed tensor: views of it, or copies where the caller binds them.

    Ports: qkv -> q, k, v, which are [b, h, s, d].
    split: by heads, qkv is [b, s, h_q + h_k + h_v, d] and these are h_q, h_k, h_v. By groups, qkv
    is [b, s, groups, widths of q, k and v together], every group has one head of k and of v, and
    these are the widths (TransformerEngine's layout).
    """

    split: tuple[int, int, int]
    by_groups: bool = False


@dataclass(frozen=True)
class JoinQkv:
    """The adjoint of SplitQkv with the same attributes.  Ports: any of q, k, v -> qkv.

    What writes q, k and v writes into qkv; where a port is missing, qkv is zero.
    """

    split: tuple[int, int, int]
    by_groups: bool = False
    dim: tuple[int, ...] = ()


@dataclass(frozen=True)
class MlaKvRope:
    """Key and value of multi-latent attention: kv split, k_rope turned and given to every head.

    With n = nope_dim and r the width of k_rope, for head h of token t and i < r/2:

        key[h, t, :n] = kv[h, t, :n]        value[h, t] = kv[h, t, n:]
        key[h, t, n + i]       = x1 cos[t, i] - x2 sin[t, i]
        key[h, t, n + r/2 + i] = x2 cos[t, r/2 + i] + x1 sin[t, r/2 + i]
        x1, x2 = k_rope[t, 2i], k_rope[t, 2i + 1]

    The products with x2 are rounded, then added to those with x1 by a fused multiply-add, both in
    the wider of the types of k_rope and tables (bf16 with bf16: in bf16; fp16 with bf16: in fp32;
    fp64 without a fused operation), and the sum is rounded once to the output type.
    Ports: kv, k_rope, cos, sin -> key, value; with quantize="mxfp8" those of MXFP8_PORTS instead:
    E4M3 data and E8M0 scales of both, by blocks of 32 channels (row) and of 32 tokens (column).
    """

    nope_dim: int
    quantize: Literal["mxfp8"] | None = None


# What MlaKvRope writes with quantize="mxfp8".
MXFP8_FORMS = ("row", "row_scale", "column", "column_scale")
MXFP8_PORTS = tuple(f"{side}_{form}" for side in ("key", "value") for form in MXFP8_FORMS)


@dataclass(frozen=True)
class MlaKvRopeBackward:
    """The adjoint of an unquantized MlaKvRope; v_dim is the width of its value.

    The rotated channels of dKey are added up over the heads in fp32 (fp64 in fp64), turned back
    there and rounded once; the others are copied.
    Ports: dKey, dValue (one of them may be missing: it is 0), cos, sin -> dKV, dK_rope.
    """

    nope_dim: int
    v_dim: int


Op = (
    Rope | RopeBackward | RopeFreqsGrad | CacheWrite | RopePair | Sdpa | SdpaBackward | Scale | Sum
    | Matmul | SplitQkv | JoinQkv | MlaKvRope | MlaKvRopeBackward
    | RmsNorm | RmsNormBackward | NormRope | NormRopeBackward | NormRopePair
)  # fmt: skip

NAMES: dict[type[Op], str] = {
    Rope: "rope",
    RopeBackward: "rope_backward",
    RopeFreqsGrad: "rope_freqs_grad",
    CacheWrite: "cache_write",
    RopePair: "rope_pair",
    Sdpa: "sdpa",
    SdpaBackward: "sdpa_backward",
    Scale: "scale",
    Sum: "sum",
    Matmul: "matmul",
    SplitQkv: "split_qkv",
    JoinQkv: "join_qkv",
    MlaKvRope: "mla_kv_rope",
    MlaKvRopeBackward: "mla_kv_rope_backward",
    RmsNorm: "rmsnorm",
    RmsNormBackward: "rmsnorm_backward",
    NormRope: "norm_rope",
    NormRopeBackward: "norm_rope_backward",
    NormRopePair: "norm_rope_pair",
}


def shared(attrs: Rotation | Attention) -> dict[str, Any]:
    """The attributes, by name, that an op has in common with its backward."""
    base = Rotation if isinstance(attrs, Rotation) else Attention
    return {f.name: getattr(attrs, f.name) for f in fields(base)}


def data_ports(attrs: Op | Rotation) -> tuple[str, str]:
    """The ports of what a Rope, RopeBackward, Scale or CacheWrite reads and of what it writes."""
    return ("dY", "dX") if isinstance(attrs, RopeBackward) else ("input", "output")


def op_name(op: Op) -> str:
    """The word for an op in messages, printed graphs and serialized files."""
    return NAMES[type(op)]
