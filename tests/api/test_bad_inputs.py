"""Graphs that cannot be right: refused by node, argument, value, and what would work."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import ropegraph
from ropegraph import GraphError, UnsupportedError, diagonal_alignment
from ropegraph.engines import manifest
from tests.api.graphs import F16, F32, new, run

ENGINES = ", ".join(manifest.ENGINES)

Q, K, V = (2, 6, 5, 8), (2, 2, 7, 8), (2, 3, 7, 4)
INT32 = torch.int32


class Draft:
    """A graph in which every tensor that a bad call might want is made on demand."""

    def __init__(self, **settings: Any) -> None:
        self.g = new(**settings)

    def t(self, name: str, *dim: int, **rest: Any) -> Any:
        return self.g.tensor(dim, name=name, **rest)

    def rope(self, dim: tuple[int, ...] = Q, table: tuple[int, ...] | None = None, **options: Any):
        given = options.get("rope_dim")
        width = given if isinstance(given, int) and given > 0 else dim[-1]
        table = (dim[2], 1, 1, width) if table is None else table
        freqs = options.pop("freqs", None) or self.t("f", *table, data_type=F32)
        x = self.t("x", *dim)
        return self.g.rope(x, freqs, name="turn", **options).set_output(True)

    def sdpa(self, q: Any = Q, k: Any = K, v: Any = V, **options: Any) -> Any:
        q, k, v = (
            self.t(n, *d) if isinstance(d, tuple) else d
            for n, d in zip("qkv", (q, k, v), strict=True)
        )
        return self.g.sdpa(q, k, v, name="attn", **options)[0].set_output(True)

    def backward(self, q: Any = Q, k: Any = K, v: Any = V, **options: Any) -> Any:
        b, h, s, _ = q
        dims = {"q": q, "k": k, "v": v, "o": (b, h, s, v[3]), "dO": (b, h, s, v[3])}
        dims |= {"stats": (b, h, s, 1)} | options.pop("dims", {})
        given = {n: self.t(n, *d) for n, d in dims.items()}
        return self.g.sdpa_backward(**given, name="attn_b", **options)[0].set_output(True)

    def lengths(self, *dim: int, dtype: Any = INT32) -> Any:
        return self.t("len", *(dim or (2, 1, 1, 1)), data_type=dtype)


Make = Callable[[Draft], object]
ROPE: dict[str, tuple[Make, str]] = {
    # C10
    "odd width": (lambda d: d.rope((1, 1, 3, 33)), "rope_dim=33 of the 33 channels ... odd"),
    "odd rope_dim": (lambda d: d.rope(rope_dim=5), "rope_dim=5 of the 8 channels of input is odd"),
    "wider than the head": (
        lambda d: d.rope((1, 1, 3, 4), rope_dim=6),
        "rope_dim=6 is more than the 4 channels of input [1, 1, 3, 4] ... even one up to 4",
    ),
    "wider than an odd head": (lambda d: d.rope((1, 1, 3, 5), rope_dim=6), "even one up to 4"),
    "table of the head": (
        lambda d: d.rope(rope_dim=4, table=(5, 1, 1, 8)),
        "freqs [5, 1, 1, 8] is 8 wide, but rope_dim=4 of 8 channels ... a table 4 wide",
    ),
    "rope_dim forgotten": (
        lambda d: d.rope(table=(5, 1, 1, 6)),
        "is 6 wide, but rope_dim=8 of 8 channels ... use a table 8 wide or rope_dim=6",
    ),
    "half width not said": (lambda d: d.rope(table=(5, 1, 1, 4)), "4 wide ... half_width=True"),
    "half width said twice": (lambda d: d.rope(half_width=True), "8 wide ... half_width=False"),
    "table too short": (lambda d: d.rope(table=(4, 1, 1, 8)), "has 4 rows for 5 positions"),
    "table per head": (lambda d: d.rope(table=(5, 1, 6, 8)), "is not a table of angles"),
    "table of another batch": (lambda d: d.rope(table=(5, 3, 1, 8)), "[s, 2, 1, 8]"),
    "negative rope_dim": (lambda d: d.rope(rope_dim=-2), "rope_dim=-2; use 0 or more"),
    "fractional rope_dim": (lambda d: d.rope(rope_dim=4.0, table=(5, 1, 1, 4)), "rope_dim=4.0"),
    "rope_dim of a tensor": (
        lambda d: d.rope(rope_dim=torch.tensor(4), table=(5, 1, 1, 4)),
        "rope_dim=tensor(4) is not a host integer",
    ),
    "segment leaves the head": (
        lambda d: d.rope(rope_dim=4, rope_offset=5),
        "rope_offset=5 with rope_dim=4 leaves the 8 channels of input; use 0 to 4",
    ),
    "negative offset": (lambda d: d.rope(rope_dim=4, rope_offset=-1), "rope_offset=-1; use 0 or"),
    "rank 3": (
        lambda d: d.rope((6, 5, 8), table=(5, 1, 1, 8)),
        "input [6, 5, 8] has 3 dims; use [b, h, s, d]",
    ),
    "no angles": (
        lambda d: d.g.rope(d.t("x", *Q), name="turn"),
        "no angles; give exactly one of freqs= ... cos= and sin= ... cos_sin= ... or inv_freq=",
    ),
    "two sources": (
        lambda d: d.rope(inv_freq=d.t("inv", 4)),
        "angles are given twice, as freqs and as inv_freq; give exactly one source",
    ),
    "two tables": (lambda d: d.rope(cos=d.t("c", 4), sin=d.t("s", 4)), "freqs and as cos and sin"),
    # C08
    "layout not said": (lambda d: d.rope(interleaved=True), "interleaved needs table_layout="),
    "layout not said for the output": (
        lambda d: d.rope(interleaved_output=True),
        "interleaved needs table_layout= ... 'pairs' for columns t0 t0 t1 t1",
    ),
    "unknown layout": (
        lambda d: d.rope(table_layout="halves"),
        "table_layout='halves'; use one of 'first_half', 'pairs', 'full'",
    ),
    "layout of half a table": (
        lambda d: d.rope(half_width=True, table=(5, 1, 1, 4), table_layout="pairs"),
        "table_layout='pairs' speaks of a full-width table, but half_width=True",
    ),
    "flag": (lambda d: d.rope(interleaved=1), "interleaved=1; use True or False"),
    "inverse of a word": (lambda d: d.rope(inverse="yes"), "inverse='yes'; use True or False"),
    "scale of a word": (lambda d: d.rope(output_scale="2"), "output_scale='2' is not a number"),
    "scale of a flag": (lambda d: d.rope(output_scale=True), "output_scale=True is not a number"),
    "scale of a tensor": (
        lambda d: d.rope(output_scale=torch.tensor(2.0)),
        "output_scale is a tensor; it is fixed at build, so give a host number",
    ),
    "scale of an array": (lambda d: d.rope(output_scale=np.ones(3)), "output_scale is a tensor"),
    "scale of a graph tensor": (
        lambda d: d.rope(output_scale=d.t("a", 1, 1, 1, 1)),
        "output_scale is a tensor; it is fixed at build",
    ),
    "infinite scale": (
        lambda d: d.rope(output_scale=float("inf")),
        "output_scale=inf is not finit",
    ),
    "NaN factor": (lambda d: d.rope(attention_factor=float("nan")), "attention_factor=nan is not"),
    "no scale": (lambda d: d.rope(output_scale=None), "output_scale=None is not a number"),
    "compute in integers": (
        lambda d: d.rope(compute_data_type=INT32),
        "compute_data_type=data_type.INT32; use data_type.HALF",
    ),
    "unknown keyword": (
        lambda d: d.rope(theta=1e4),
        "theta=10000.0 is no argument here",
    ),
    "freqs of a list": (lambda d: d.rope(freqs=[[0.0]]), "freqs=[[0.0]] is not a tensor"),
    "input of a number": (lambda d: d.g.rope(5, name="turn"), "turn"),
    "backward": (
        lambda d: d.g.rope_backward(d.t("dy", *Q), d.t("f", 5, 1, 1, 4), name="turn"),
        "rope_backward 'turn': freqs [5, 1, 1, 4] is 4 wide",
    ),
}

ALIGN = diagonal_alignment.BOTTOM_RIGHT
SDPA: dict[str, tuple[Make, str]] = {
    "widths of q and k": (lambda d: d.sdpa(k=(2, 2, 7, 6)), "k [2, 2, 7, 6] has d_qk=6 but q"),
    "heads": (
        lambda d: d.sdpa((1, 3, 5, 8), (1, 2, 7, 8), (1, 1, 7, 4)),
        "h_q=3 is not a multiple",
    ),
    "heads of v": (lambda d: d.sdpa(v=(2, 4, 7, 4)), "is not a multiple of the 4 heads of v"),
    "batches": (lambda d: d.sdpa(v=(1, 3, 7, 4)), "the batch sizes of q"),
    "lengths of k and v": (
        lambda d: d.sdpa(v=(2, 3, 6, 4)),
        "k [2, 2, 7, 8] has s_kv=7 keys but v",
    ),
    "rank": (lambda d: d.sdpa(q=(6, 5, 8)), "q [6, 5, 8] has 3 dims"),
    "k of a list": (lambda d: d.sdpa(k=[1]), "k=[1] is not a tensor of this graph"),
    "k of none": (lambda d: d.sdpa(k=None), "k=None is not a tensor"),
    "a tensor of another graph": (
        lambda d: d.sdpa(k=Draft().t("k", *K)),
        "k: tensor 'k' belongs to another graph",
    ),
    # C42
    "alignment without a band": (
        lambda d: d.sdpa(diagonal_alignment=ALIGN),
        "diagonal_alignment=BOTTOM_RIGHT has no effect without a band; add",
    ),
    "top-left and bottom-right": (
        lambda d: d.sdpa(use_causal_mask=True, use_causal_mask_bottom_right=True),
        "use_causal_mask and use_causal_mask_bottom_right are both True",
    ),
    "causal and bottom-right": (
        lambda d: d.sdpa(use_causal_mask=True, diagonal_alignment=ALIGN),
        "use_causal_mask is top-left, but diagonal_alignment is BOTTOM_RIGHT",
    ),
    "causal with a right bound": (
        lambda d: d.sdpa(use_causal_mask=True, diagonal_band_right_bound=2),
        "a causal mask is diagonal_band_right_bound=0, but 2 is given",
    ),
    "unknown alignment": (
        lambda d: d.sdpa(diagonal_alignment="CENTRE", use_causal_mask=True),
        "diagonal_alignment='CENTRE'; use one of 'TOP_LEFT', 'BOTTOM_RIGHT'",
    ),
    "two names of the left bound": (
        lambda d: d.sdpa(sliding_window_length=3, diagonal_band_left_bound=3),
        "are two names of one bound; use the second",
    ),
    # C45
    "left bound 0": (
        lambda d: d.sdpa(diagonal_band_left_bound=0),
        "diagonal_band_left_bound=0; use 1 or more",
    ),
    "window 0": (lambda d: d.sdpa(sliding_window_length=0), "sliding_window_length=0; use 1 or"),
    "negative right bound": (
        lambda d: d.sdpa(diagonal_band_right_bound=-1),
        "diagonal_band_right_bound=-1; use 0 or more",
    ),
    "fractional bound": (lambda d: d.sdpa(diagonal_band_left_bound=2.5), "left_bound=2.5 is not"),
    "bias of the wrong shape": (
        lambda d: d.sdpa(bias=d.t("bias", 2, 6, 7, 5)),
        "bias [2, 6, 7, 5] does not broadcast to the logits [2, 6, 5, 7]",
    ),
    "padding with one length": (
        lambda d: d.sdpa(use_padding_mask=True, seq_len_q=d.lengths()),
        "use_padding_mask=True needs seq_len_kv as well",
    ),
    "padding with the other length": (
        lambda d: d.sdpa(use_padding_mask=True, seq_len_kv=d.lengths()),
        "use_padding_mask=True needs seq_len_q as well",
    ),
    "padding without lengths": (lambda d: d.sdpa(use_padding_mask=True), "needs seq_len_q as well"),
    "lengths without padding": (
        lambda d: d.sdpa(seq_len_kv=d.lengths()),
        "seq_len_kv has no effect; add use_padding_mask=True",
    ),
    "lengths of another batch": (
        lambda d: d.sdpa(use_padding_mask=True, seq_len_q=d.lengths(3), seq_len_kv=d.lengths(2)),
        "seq_len_q is [3, 1, 1, 1]; use [2, 1, 1, 1]",
    ),
    "ragged without padding": (
        lambda d: d.sdpa(d.t("q", *Q, ragged_offset=d.t("at", 3, 1, 1, 1, data_type=INT32))),
        "q is ragged, which needs use_padding_mask=True with seq_len_q and seq_len_kv",
    ),
    "dropout 1": (lambda d: d.sdpa(dropout=(1.0, 1, 0)), "dropout probability=1.0; use 0 or more"),
    "negative dropout": (lambda d: d.sdpa(dropout=(-0.1, 1, 0)), "dropout probability=-0.1"),
    "dropout of a mask": (
        lambda d: d.sdpa(dropout=(d.t("mask", 2, 6, 5, 7), d.t("scale", 1, 1, 1, 1))),
        "dropout is given as (mask, scale), which is not supported; use (probability, seed,",
    ),
    "dropout of a number": (lambda d: d.sdpa(dropout=0.5), "dropout=0.5; use (probability, seed,"),
    "dropout without offset": (
        lambda d: d.sdpa(dropout=(0.5, 1)),
        "use (probability, seed, offset)",
    ),
    "negative seed": (lambda d: d.sdpa(dropout=(0.5, -1, 0)), "dropout seed=-1; use 0 or more"),
    "fractional offset": (lambda d: d.sdpa(dropout=(0.5, 1, 0.5)), "dropout offset=0.5 is not"),
    "two seeds": (
        lambda d: d.sdpa(dropout=(0.5, d.t("seed", 2, 1, 1, 1, data_type=INT32), 0)),
        "seed [2, 1, 1, 1] must hold one number",
    ),
    "scale of a word": (lambda d: d.sdpa(attn_scale="0.5"), "attn_scale='0.5' is not a number"),
    "scale of a flag": (lambda d: d.sdpa(attn_scale=True), "attn_scale=True is not a number"),
    "more than float": (lambda d: d.sdpa(attn_scale=10**400), "attn_scale=1000000"),
    "more than int64": (
        lambda d: d.sdpa(dropout=(0.5, 2**63, 0)),
        "dropout seed=9223372036854775808; use less than 2**63",
    ),
    "infinite scale": (lambda d: d.sdpa(attn_scale=float("-inf")), "attn_scale=-inf is not finite"),
    "NaN scale": (lambda d: d.sdpa(attn_scale=float("nan")), "attn_scale=nan is not finite"),
    "scale of two numbers": (
        lambda d: d.sdpa(attn_scale=torch.ones(2)),
        "attn_scale [2, 1, 1, 1] must hold one number",
    ),
    "sink of another shape": (
        lambda d: d.sdpa(sink_token=d.t("sink", 1, 2, 1, 1)),
        "sink_token is [1, 2, 1, 1]; use [1, 6, 1, 1]",
    ),
    "page table alone": (
        lambda d: d.sdpa(paged_attention_k_table=d.t("kt", 2, 1, 2, 1, data_type=INT32)),
        "paged_attention_k_table is given alone; k and v are paged together",
    ),
    "length of pages alone": (
        lambda d: d.sdpa(paged_attention_max_seq_len_kv=8),
        "paged_attention_max_seq_len_kv=8 needs paged_attention_k_table",
    ),
    "pages without a length": (
        lambda d: d.sdpa(
            paged_attention_k_table=d.t("kt", 2, 1, 2, 1, data_type=INT32),
            paged_attention_v_table=d.t("vt", 2, 1, 2, 1, data_type=INT32),
        ),
        "paged_attention_k_table needs paged_attention_max_seq_len_kv",
    ),
    "too few pages": (
        lambda d: d.sdpa(
            paged_attention_k_table=d.t("kt", 2, 1, 2, 1, data_type=INT32),
            paged_attention_v_table=d.t("vt", 2, 1, 2, 1, data_type=INT32),
            paged_attention_max_seq_len_kv=15,
        ),
        "paged_attention_max_seq_len_kv=15 is more than the 2 pages of 7 tokens",
    ),
    "both names of inference": (
        lambda d: d.sdpa(generate_stats=True, is_inference=False),
        "generate_stats=True and is_inference=False are two names of one choice; give one",
    ),
    "inference of a number": (
        lambda d: d.sdpa(is_inference=0),
        "is_inference=0; use True or False",
    ),
    "softcap and score_mod": (
        lambda d: d.sdpa(softcap=30.0, score_mod=lambda g, s: s),
        "give score_mod or softcap=30.0, not both",
    ),
    "softcap 0": (lambda d: d.sdpa(softcap=0.0), "softcap=0.0; use a positive number"),
    "negative softcap": (lambda d: d.sdpa(softcap=-1), "softcap=-1.0; use a positive number"),
    "score_mod of a number": (lambda d: d.sdpa(score_mod=5), "score_mod=5 is no function of"),
    "totals without ragged": (
        lambda d: d.sdpa(max_total_seq_len_q=10),
        "max_total_seq_len_q=10 needs ragged q, k and v",
    ),
    "base 2 of a number": (
        lambda d: d.sdpa(softmax_input_is_log2=1),
        "softmax_input_is_log2=1; use True or False",
    ),
    "compute in bits": (
        lambda d: d.sdpa(compute_data_type=torch.bool),
        "compute_data_type=data_ty",
    ),
    "dBias without bias": (
        lambda d: d.backward(dBias=d.t("db", 2, 6, 5, 7)),
        "dBias is asked for without bias",
    ),
    "dSink without sink": (
        lambda d: d.backward(dSink_token=d.t("ds", 1, 6, 1, 1)),
        "dSink_token is asked for without sink_token",
    ),
    "dBias of another shape": (
        lambda d: d.backward(bias=d.t("bias", 1, 6, 5, 7), dBias=d.t("db", 2, 6, 5, 7)),
        "dBias is [2, 6, 5, 7]; use [1, 6, 5, 7]",
    ),
    "bprop alone": (
        lambda d: d.backward(score_mod_bprop=lambda g, *s: s),
        "score_mod_bprop without score_mod; give both",
    ),
    "o of another shape": (
        lambda d: d.backward(dims={"o": (2, 6, 5, 8)}),
        "o is [2, 6, 5, 8]; use [2, 6, 5, 4]",
    ),
    "stats of rank 3": (
        lambda d: d.backward(dims={"stats": (2, 6, 5)}),
        "stats is [2, 6, 5]; use [2, 6, 5, 1]",
    ),
    "deterministic of a number": (
        lambda d: d.backward(use_deterministic_algorithm=1),
        "use_deterministic_algorithm=1; use True or False",
    ),
    "pages in the backward": (
        lambda d: d.backward(paged_attention_max_seq_len_kv=7),
        "paged_attention_max_seq_len_kv=7 is no argument here",
    ),
}


def ragged(d: Draft, dim: tuple[int, ...], *offsets: int, dtype: Any = INT32) -> Any:
    return d.t("r", *dim, ragged_offset=d.t("at", *offsets, data_type=dtype))


# Found when the whole graph is known.
BUILD: dict[str, tuple[Make, str]] = {
    "boolean bias": (
        lambda d: d.sdpa(bias=d.t("bias", 2, 6, 5, 7, data_type=torch.bool)),
        "sdpa 'attn': bias is boolean; use fp16, bf16, fp32, fp64",
    ),
    "fractional lengths": (
        lambda d: d.sdpa(
            use_padding_mask=True, seq_len_q=d.lengths(dtype=F32), seq_len_kv=d.lengths()
        ),
        "sdpa 'attn': seq_len_q is fp32; use int32, int64",
    ),
    "k of another type": (
        lambda d: d.sdpa(k=d.t("k", *K, data_type=F16)),
        "sdpa 'attn': k is fp16 but q is fp32; both must have one data type",
    ),
    "integers": (
        lambda d: d.g.scale(d.t("x", *Q, data_type=INT32), 2.0, name="s").set_output(True),
        "scale 's': input is int32; use fp16, bf16, fp32, fp64",
    ),
    "fp8": (
        lambda d: d.g.scale(
            d.t("x", *Q, data_type=ropegraph.data_type.FP8_E4M3), 2.0, name="s"
        ).set_output(True),
        "scale 's': input is fp8_e4m3; use fp16",
    ),
    "an output of integers": (
        lambda d: d.sdpa().set_data_type(INT32),
        "sdpa 'attn': O 'attn::O' is data_type.INT32; an output must be a floating type",
    ),
    "16-bit angles": (
        lambda d: d.rope(freqs=d.t("f", 5, 1, 1, 8, data_type=F16)),
        "rope 'turn': freqs is fp16; use fp32, fp64",
    ),
    "offsets of another batch": (
        lambda d: d.g.scale(ragged(d, Q, 2, 1, 1, 1), 2.0).set_output(True),
        "tensor 'r': ragged_offset 'at' is [2, 1, 1, 1]; use [3, 1, 1, 1]",
    ),
    "fractional offsets": (
        lambda d: d.g.scale(ragged(d, Q, 3, 1, 1, 1, dtype=F32), 2.0).set_output(True),
        "ragged_offset 'at' is data_type.FLOAT; use int32 or int64",
    ),
    "a ragged input and a dense output": (
        lambda d: (
            d.g.scale(ragged(d, Q, 3, 1, 1, 1), 2.0, name="s")
            .set_ragged_offset(None)
            .set_output(True)
        ),
        "scale 's': output 's::OUT_0' has not the ragged_offset (and multiplier) of input 'r'",
    ),
    "a dense input and a ragged output": (
        lambda d: d.rope().set_ragged_offset(d.t("at", 3, 1, 1, 1, data_type=INT32)),
        "rope 'turn': output 'turn::OUT_0' has not the ragged_offset ... both must be ragged by",
    ),
    "an output ragged otherwise": (
        lambda d: (
            d.g.scale(ragged(d, Q, 3, 1, 1, 1), 2.0, name="s")
            .set_ragged_offset_multiplier(2)
            .set_output(True)
        ),
        "scale 's': output 's::OUT_0' has not the ragged_offset",
    ),
    "a ragged table": (
        lambda d: d.rope(
            freqs=d.t("f", 5, 1, 1, 8, ragged_offset=d.t("at", 6, 1, 1, 1, data_type=INT32))
        ),
        "rope 'turn': freqs 'f' has a ragged_offset; only q, k, v",
    ),
    "ragged of rank 2": (
        lambda d: d.g.scale(ragged(d, (2, 6), 3, 1, 1, 1), 2.0).set_output(True),
        "tensor 'r': a ragged tensor is [b, h, s, d], not [2, 6]",
    ),
    "a scale beyond fp32": (
        lambda d: d.sdpa(attn_scale=1e39),
        "sdpa 'attn': attn_scale=1e+39 is infinite in fp32; use less than 3.40282e+38",
    ),
    "a rotation beyond fp32": (
        lambda d: d.rope(output_scale=-1e300),
        "rope 'turn': output_scale=-1e+300 is infinite in fp32 ... or fp64 data",
    ),
    "a factor beyond fp32": (
        lambda d: d.rope(attention_factor=1e300),
        "rope 'turn': attention_factor=1e+300 is infinite in fp32",
    ),
    "a product beyond fp32": (
        lambda d: d.g.scale(d.t("x", *Q), 1e300, name="s").set_output(True),
        "scale 's': scale=1e+300 is infinite in fp32",
    ),
    "no output": (
        lambda d: d.sdpa().set_output(False),
        "graph 'graph' has no output, so nothing would run; call set_output(True)",
    ),
    "nothing": (lambda d: d.t("x", *Q), "graph 'graph' has no operation"),
}


@pytest.mark.parametrize("step", ["validate", "build", "serialize", "execute"])
@pytest.mark.parametrize(("make", "text"), BUILD.values(), ids=BUILD)
def test_a_graph_that_cannot_be_right_is_not_built(make: Make, text: str, step: str):
    d = Draft()
    make(d)
    with pytest.raises(GraphError) as caught:
        getattr(d.g, step)(*([{}] if step == "execute" else []))
    for part in text.split(" ... "):
        assert part in str(caught.value)


def test_no_type_at_all():
    g = ropegraph.pygraph()
    g.scale(g.tensor(Q, name="x"), 2.0, name="s").set_output(True)
    with pytest.raises(GraphError, match="scale 's': input 'x' has no data type; give it data_typ"):
        g.build()
    g.find_tensor("x").set_data_type(F32)
    assert len(g.plan.steps) == 1, "what was wrong may be mended"


def refused(make: Make, text: str, draft: Any = None) -> str:
    draft = draft or Draft()
    with pytest.raises(GraphError) as caught:
        make(draft)
    message = str(caught.value)
    for part in text.split(" ... "):
        assert part in message
    assert draft.g.recorder.nodes == [], "the graph is as it was"
    assert not [t for t in draft.g.tensors if t.spec.producer]
    return message


@pytest.mark.parametrize(("make", "text"), ROPE.values(), ids=ROPE)
def test_a_bad_rotation_is_refused(make: Make, text: str):
    message = refused(make, text)
    assert message.startswith(("rope 'turn': ", "rope_backward 'turn': "))


@pytest.mark.parametrize(("make", "text"), SDPA.values(), ids=SDPA)
def test_a_bad_attention_is_refused(make: Make, text: str):
    message = refused(make, text)
    assert message.startswith(("sdpa 'attn': ", "sdpa_backward 'attn_b': ", "tensor 'r': "))


def test_an_unnamed_node_is_named_in_messages():
    d = Draft()
    d.g.rope(d.t("x", *Q), d.t("f", 5, 1, 1, 8))
    with pytest.raises(GraphError, match=r"^rope 'rope\.1': output_scale='x'"):
        d.g.rope(d.t("x", *Q), d.t("f", 5, 1, 1, 8), output_scale="x")
    with pytest.raises(GraphError, match=r"^sdpa 'sdpa\.0': attn_scale='x'"):
        d.g.sdpa(d.t("q", *Q), d.t("k", *K), d.t("v", *V), attn_scale="x")
    with pytest.raises(GraphError, match=r"^scale 'scale\.0': scale='x'"):
        d.g.scale(d.t("q", *Q), "x")
    with pytest.raises(GraphError, match=r"^sdpa 'sdpa\.0': k \[2, 2, 7, 6\]"):
        d.g.sdpa(d.t("q", *Q), d.t("k", 2, 2, 7, 6), d.t("v", *V))


# Settings of the graph

SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "fold": ({"fold": "k"}, "fold='k'; use one of 'auto', 'off', 'q', 'symmetric'"),
    "no fold": ({"fold": None}, "fold=None; use one of"),
    "fold of a flag": ({"fold": True}, "fold=True; use one of"),
    "log2 of a number": ({"fold_log2": 1}, "fold_log2=1; use True or False"),
    "log2 of nothing": (
        {"fold": "off", "fold_log2": True},
        "fold_log2=True needs a rotation that may carry 1/ln 2, but fold='off'; use fold='q'",
    ),
    "contract": ({"fold_contract": {}}, "fold_contract={}; use forward.fold_contract"),
    "io": ({"io_data_type": "quad"}, "io_data_type='quad' is not a data type; use a torch dtype"),
    "complex": (
        {"io_data_type": torch.complex64},
        "io_data_type=torch.complex64 is not a data typ",
    ),
    "compute": ({"compute_data_type": INT32}, "compute_data_type=data_type.INT32; use data_type."),
    "intermediate": (
        {"intermediate_data_type": torch.bool},
        "intermediate_data_type=data_type.BOO",
    ),
    "handle": ({"handle": 5}, "handle=5; use what create_handle() returns"),
    "engine": ({"engines": ("cudnn",)}, f"engines: 'cudnn' is no engine; use {ENGINES}"),
    "one engine": ({"engines": "cudnn"}, "engines: 'cudnn' is no engine"),
    "no engines": ({"engines": ()}, f"engines=() allows nothing; use some of {ENGINES}"),
    "engines of a number": ({"engines": 5}, f"engines=5; use names out of {ENGINES}"),
    "unknown keyword": ({"colour": "red"}, "colour='red' is no argument here"),
}


@pytest.mark.parametrize(("settings", "text"), SETTINGS.values(), ids=SETTINGS)
def test_a_bad_setting_is_refused(settings: dict[str, Any], text: str):
    with pytest.raises(GraphError) as caught:
        ropegraph.pygraph("mine", **settings)
    assert text in str(caught.value)


@pytest.mark.parametrize("handle", [ropegraph.create_handle(), None], ids=["a handle", "none"])
def test_a_good_handle(handle: Any):
    d = Draft(handle=handle)
    d.sdpa(attn_scale=0.5)
    assert set(run(d.g)) == {"attn::O"}


def test_a_scale_that_fp64_holds():
    d = Draft(io_data_type=torch.float64)
    d.sdpa(attn_scale=1e39)
    d.g.build()
    assert d.g.plan.graph.node("attn").attrs.attn_scale == 1e39


# Served here, refused elsewhere (C45)


@pytest.mark.parametrize(
    "make",
    [
        lambda d: d.rope((1, 1, 3, 6)),
        lambda d: d.rope((1, 1, 3, 10), rope_dim=10),
        lambda d: d.sdpa((1, 2, 3, 6), (1, 2, 3, 6), (1, 2, 3, 6)),
        lambda d: d.sdpa((1, 2, 3, 192), (1, 2, 3, 192), (1, 2, 3, 160)),
        lambda d: d.sdpa(use_causal_mask_bottom_right=True, bias=d.t("bias", 1, 1, 5, 7)),
        lambda d: d.sdpa((1, 2, 9, 8), (1, 2, 3, 8), (1, 2, 3, 8),
                         use_causal_mask_bottom_right=True),
        lambda d: d.sdpa((1, 2, 1, 8), (1, 2, 3, 8), (1, 2, 3, 8),
                         sink_token=d.t("sink", 1, 2, 1, 1)),
        lambda d: d.sdpa(use_alibi_mask=True),
    ],
)  # fmt: skip
def test_what_a_gpu_library_refuses_runs_here(make: Make):
    d = Draft()
    make(d)
    assert len(run(d.g)) == 1


def test_why_an_engine_would_not():
    d = Draft(engines="reference")
    d.sdpa()
    assert d.g.why_not("reference") == {}
    assert d.g.why_not("torch") == {}
    assert issubclass(ropegraph.cudnnGraphNotSupportedError, UnsupportedError)
    with pytest.raises(GraphError, match=f"'cudnn' is no engine; use {ENGINES}"):
        d.g.why_not("cudnn")
