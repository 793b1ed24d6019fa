"""One valid graph that holds every kind of node, attribute and declaration."""

from dataclasses import replace

from ropegraph.dtypes import DType
from ropegraph.ir.contract import FoldContract, FoldEntry, Turn
from ropegraph.ir.graph import Graph
from ropegraph.ir.ops import (
    CacheWrite,
    JoinQkv,
    Matmul,
    MlaKvRope,
    MlaKvRopeBackward,
    NormRope,
    NormRopeBackward,
    NormRopePair,
    RmsNorm,
    RmsNormBackward,
    Rope,
    RopeBackward,
    RopeFreqsGrad,
    RopePair,
    Sdpa,
    SplitQkv,
)
from ropegraph.ir.score_mod import Instruction, Port, Ref, ScoreProgram
from tests.ir.build import Build

PROGRAM = ScoreProgram(
    (
        Instruction("gen_index", (), axis=3),
        Instruction("mul", (Ref(-1), 1 / 3)),
        Instruction("add", (Ref(1), Port("score_mod.0"))),
        Instruction("binary_select", (Ref(2), -0.0, Ref(0))),
    ),
    Ref(3),
)


def contract() -> FoldContract:
    entry = FoldEntry(
        node="attn",
        attention=Sdpa(attn_scale=1 / 3, left_bound=4, score_mod=PROGRAM),
        fold="symmetric",
        log2=True,
        q_chain=(Turn(Rope(8, 0, output_scale=0.1), ("start_positions",)), 0.7),
        k_chain=(),
        ports=("bias", "score_mod.0"),
        engine="torch",
    )
    return FoldContract({"attn": entry}, "symmetric", fold_log2=True)


def zoo() -> Graph:
    b = Build(fold="symmetric", fold_log2=True, contract=contract(), imported=("stats", "o"))
    b.tensor("q", 2, 6, 5, 8, ragged_offset="starts", ragged_multiplier=8, uid=7)
    b.tensor("starts", 3, 1, 1, 1, dtype=DType.INT64)
    b.tensor("k", 2, 2, 7, 8, stride=(200, 100, 8, 1))
    b.tensor("v", 2, 3, 7, 4)
    b.tensor("bias", 1, 6, 5, 7)
    b.tensor("sink", 1, 6, 1, 1)
    b.tensor("scale", 1, 1, 1, 1, is_host=True)
    b.tensor("seed", 1, 1, 1, 1, dtype=DType.INT64, is_host=True, constant=1234)
    b.tensor("offset", 1, 1, 1, 1, dtype=DType.INT64, is_host=True, constant=0)
    b.tensor("mod", 2, 1, 1, 7)
    b.scale("half", "q", "q2", 0.1)
    b.tensor("freqs", 16, 1, 1, 8)
    pair = RopePair(
        (
            Rope(8, 0, output_scale=1 / 3, attention_factor=1.1, numerics="hf"),
            Rope(8, 0, interleaved=True, table_layout="pairs", inverse=True),
        ),
        ("rope_q", "rope_k"),
    )
    b.node(
        "rope_q+rope_k",
        pair,
        {"input0": "q2", "freqs0": "freqs", "input1": "k", "freqs1": "freqs"},
        {"output0": "q_rot", "output1": "k_rot"},
    )
    ports = {"bias": "bias", "sink_token": "sink", "attn_scale": "scale", "score_mod.0": "mod"}
    drawn = {"seed": "seed", "offset": "offset"}
    b.sdpa(
        "attn",
        "q_rot",
        "k_rot",
        "v",
        stats="stats",
        attn_scale=None,
        left_bound=4,
        right_bound=0,
        dropout_p=0.25,
        score_mod=PROGRAM,
        ports=ports | drawn,
    )
    b.tensor("do", 2, 6, 5, 4)
    grads = {"dQ": "dq_rot", "dK": "dk_rot", "dV": "dv"}
    b.sdpa_backward(
        "attn_backward", "q_rot", "k_rot", "v", grads, attn_scale=1 / 3, deterministic=True
    )
    b.sum("total", ["dq_rot", "dq_rot"], "dq_sum")
    b.rope_backward("rope_q_backward", "dq_sum", "dq", output_scale=-0.3)
    b.node(
        "freqs_grad",
        RopeFreqsGrad(8, 0, output_scale=2.5),
        {"input": "k", "dY": "dk_rot", "freqs": "freqs"},
        {"dfreqs": "dfreqs"},
    )
    b.tensor("left", 2, 5, 3), b.tensor("right", 1, 4, 3)
    b.node("product", Matmul(transpose_B=True), {"A": "left", "B": "right"}, {"C": "product"})
    b.tensor("qkv", 2, 5, 10, 4)
    b.node("split", SplitQkv((6, 2, 2)), {"qkv": "qkv"}, {"v": "v_part"})
    b.scale("use", "v_part", "v_twice", 2.0)
    b.node("join", JoinQkv((6, 2, 2), dim=(2, 5, 10, 4)), {"v": "v_twice"}, {"qkv": "dqkv"})
    b.tensor("kv", 2, 3, 32, 96), b.tensor("k_rope", 2, 1, 32, 32)
    b.tensor("cos", 40, 1, 1, 32), b.tensor("sin", 40, 1, 1, 32)
    tables = {"cos": "cos", "sin": "sin"}
    ports = {"kv": "kv", "k_rope": "k_rope", **tables}
    b.node("mla", MlaKvRope(32, "mxfp8"), ports, {"key_row": "mla_row", "value_row": "mla_value"})
    b.tensor("dkey", 2, 3, 32, 64)
    b.node("mla_b", MlaKvRopeBackward(32, 64), {"dKey": "dkey", **tables}, {"dKV": "dkv"})
    b.tensor("cache", 2, 3, 9, 4), b.tensor("rows", 2, dtype=DType.INT32)
    ports = {"input": "v", "cache": "cache", "cache_positions": "rows"}
    b.node("write", CacheWrite(), ports, {"output": "cached"})
    b.tensor("w", 1, 1, 1, 8, dtype=DType.FLOAT), b.tensor("w_all", 1, 2, 1, 8)
    b.node("norm", RmsNorm(epsilon=1e-5), {"input": "k", "scale": "w_all"}, {"Y": "k_norm"})
    ports = {"input": "k", "scale": "w", "freqs": "freqs"}
    first = NormRope(RmsNorm(True), Rope(8, 0, output_scale=0.7), True, ("norm_a", "rope_a"))
    second = NormRope(RmsNorm(), Rope(8, 0), True, ("norm_b", "rope_b"))
    b.node("fused", second, ports, {"output": "k_fused", "inv_variance": "k_inverse"})
    b.node(
        "two",
        NormRopePair((first, replace(second, norm_first=False)), ("a", "b")),
        {f"{port}{i}": v for port, v in ports.items() for i in (0, 1)},
        {"output0": "k_0", "output1": "k_1"},
    )
    ports = {"input": "k_norm", "scale": "w", "inv_variance": "k_inverse"}
    gradient = NormRopeBackward(RmsNormBackward(), RopeBackward(8, 0), False, ("n", "r"))
    b.node("fused_b", gradient, {"dY": "k_fused", **ports, "freqs": "freqs"}, {"dX": "dk_fused"})
    b.node("norm_b", RmsNormBackward(True), {"grad": "k_1", **ports}, {"Dscale": "dw"})
    outputs = ("k_0", "dk_fused", "dw", "o", "product", "dqkv", "dq", "dv", "dfreqs")
    outputs += ("cached", "mla_row", "mla_value", "dkv")
    g = b.graph(*outputs, saved=["q_rot", "stats"], name="zoo")
    values = {n: replace(v, dtype=DType.HALF) if n == "dv" else v for n, v in g.values.items()}
    part = replace(values["v_part"], stride=(200, 4, 40, 1), within="qkv", start=32)
    values["v_part"] = part
    values["cached"] = replace(values["cached"], within="cache")
    return replace(g, values=values)
