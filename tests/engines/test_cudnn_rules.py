"""Why cuDNN cannot take a step: every rule by name, and all that are broken, not the first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from ropegraph.dtypes import DType
from ropegraph.engines import manifest
from ropegraph.engines.cudnn_sdpa.backward_rules import BACKWARD
from ropegraph.engines.cudnn_sdpa.engine import CudnnSdpa
from ropegraph.engines.cudnn_sdpa.facts import Facts, version_name
from ropegraph.engines.cudnn_sdpa.forward_rules import FORWARD
from ropegraph.engines.cudnn_sdpa.mask_rules import MASKS, PADDING_MEASURED
from ropegraph.engines.cudnn_sdpa.rules import TENSORS
from ropegraph.ir.ops import Sdpa, SdpaBackward
from ropegraph.ir.score_mod import softcap
from ropegraph.lowering.engine import Device, Step
from tests.engines.cudnn_steps import A100, B200, H200, lengths, on, packed, ragged, scalar, step

RULES = {f"{r.__module__.rsplit('.', 1)[1]}.{r.__name__}": r
         for r in (*TENSORS, *MASKS, *FORWARD, *BACKWARD)}  # fmt: skip
CAUSAL = {"attn_scale": 0.125, "right_bound": 0}
ENDING = {**CAUSAL, "bottom_right": True}
BIAS = {"bias": packed("bias", (1, 4, 200, 264))}
SINK = {"sink_token": packed("sink_token", (1, 4, 1, 1), DType.FLOAT)}
RANDOM = {"seed": scalar("seed", DType.INT64), "offset": scalar("offset", DType.INT64)}
TABLES = {
    f"paged_attention_{x}_table": packed("t" + x, (2, 1, 5, 1), DType.INT32) for x in ("k", "v")
}
OFFSETS = {"starts": packed("starts", (3, 1, 1, 1), DType.INT32)}


def fwd(attrs: dict[str, Any] | None = None, **more: Any) -> Step:
    return step(Sdpa(**(CAUSAL if attrs is None else attrs)), **more)


def bwd(attrs: dict[str, Any] | None = None, **more: Any) -> Step:
    return step(SdpaBackward(**(CAUSAL if attrs is None else attrs)), **more)


def padded(make: Callable[..., Step] = fwd, **more: Any) -> Step:
    extra = {**lengths(2), **more.pop("extra", {})}
    return make({**CAUSAL, "padding": True, **more.pop("attrs", {})}, extra=extra, **more)


def thd(make: Callable[..., Step] = fwd, ports: str = "q O", **more: Any) -> Step:
    values = {port: ragged(2, 4, 200, 64, port, "starts") for port in ports.split()}
    return padded(make, values={**values, **OFFSETS, **more.pop("values", {})}, **more)


def paged(s_q: int = 1, attrs: dict[str, Any] | None = None, **more: Any) -> Step:
    made = {"attn_scale": 0.125, "padding": True, "max_seq_len_kv": 320, **(attrs or {})}
    return fwd(made, s_q=s_q, s_kv=64, extra={**lengths(2), **TABLES}, **more)


@dataclass(frozen=True)
class Case:
    """A step that breaks one rule, where it runs, and what the rule says."""

    rule: str
    step: Step
    says: str
    device: Device = H200


CASES = (
    Case("rules.machine", fwd(), "needs a CUDA device, this is cpu", Device()),
    Case("rules.machine", fwd(), "needs sm_80 or newer, this is sm_75",
         Device("cuda", 0, 75, 92600)),
    Case("rules.machine", fwd(), "needs cuDNN and nvidia-cudnn-frontend 1.32 or newer",
         Device("cuda", 0, 90, 0)),
    Case("rules.machine", fwd(), "needs cuDNN 9.0 or newer, this is 0.89.7", on(H200, 8907)),
    Case("rules.machine", fwd(), "cuDNN 9.10.1 computes attention wrongly", on(H200, 91001)),
    Case("rules.data_types", fwd(dtype=DType.FLOAT), "q is fp32; cuDNN's attention reads"),
    Case("rules.data_types", fwd(values={"O": packed("O", (2, 4, 200, 64), DType.FLOAT)}),
         "O is fp32 but q is bf16"),
    Case("rules.data_types", bwd(values={"dK": packed("dK", (2, 2, 264, 64), DType.FLOAT)}),
         "dK is fp32 but q is bf16"),
    Case("rules.data_types", fwd(values={"Stats": packed("Stats", (2, 4, 200, 1), DType.DOUBLE)}),
         "Stats is fp64; cuDNN holds it in fp32"),
    Case("rules.data_types", fwd(extra={"sink_token": packed("s", (1, 4, 1, 1), DType.DOUBLE)}),
         "sink_token is fp64"),
    Case("rules.data_types", padded(extra=lengths(2, DType.INT64)), "seq_len_kv is int64"),
    Case("rules.data_types", fwd(extra={"bias": packed("bias", (1, 4, 200, 264), DType.HALF)}),
         "bias is fp16; cuDNN takes bf16 or fp32"),
    Case("rules.data_types", padded(values={"seq_len_q": packed(
        "seq_len_q", (2, 1, 1, 1), DType.INT32, is_host=True)}), "seq_len_q is passed by value"),
    Case("rules.data_types", fwd({**CAUSAL, "compute": DType.DOUBLE}), "computed in fp64"),
    Case("rules.sizes", fwd(b=0), "q [0, 4, 200, 64] is empty"),
    Case("rules.sizes", fwd(s_kv=0), "k [2, 2, 0, 64] is empty"),
    Case("rules.sizes", fwd(d_qk=84), "d_qk=84 is not a multiple of 8"),
    Case("rules.sizes", fwd(d_v=12), "d_v=12 is not a multiple of 8"),
    Case("rules.sizes", fwd(h_q=3), "h_q=3 is not a multiple of the 2 heads of k"),
    Case("rules.sizes", fwd(h_q=4, h_v=3), "h_q=4 is not a multiple of the 3 heads of v"),
    Case("rules.sizes", fwd(b=70000), "b=70000 is above 65535"),
    Case("rules.sizes", fwd(h_q=70000), "h_q=70000 is above 65535"),
    Case("rules.layout", fwd(values={"k": packed("k", (2, 2, 264, 64),
                                                 stride=(33792, 16896, 1, 264))}),
         "k has stride 264 along its last axis"),
    Case("rules.layout", fwd(values={"v": packed("v", (2, 2, 264, 64),
                                                 stride=(34848, 17424, 66, 1))}),
         "v has stride 66 along axis 2: 132 bytes, not a multiple of 16"),
    Case("rules.layout", fwd(values={
        "qkv": packed("qkv", (2, 264, 4, 64)),
        "k": packed("k", (2, 2, 264, 64), within="qkv", start=4)}),
         "k starts 8 bytes into 'qkv', not a multiple of 16"),
    Case("rules.layout", bwd(values={"dQ": packed("dQ", (2, 4, 200, 64),
                                                  stride=(51204, 12800, 64, 1))}),
         "dQ has stride 51204 along axis 0"),
    Case("rules.layout", padded(values={"seq_len_q": packed("seq_len_q", (2, 1, 1, 1), DType.INT32,
                                                            stride=(2, 1, 1, 1))}),
         "seq_len_q has stride 2"),
    Case("rules.layout", fwd(extra=SINK, values={"sink_token": packed(
        "sink_token", (1, 4, 1, 1), DType.FLOAT, stride=(8, 2, 1, 1))}), "sink_token has stride 2"),
    Case("mask_rules.scale", fwd({"attn_scale": 0.0}), "attn_scale=0.0 is outside"),
    Case("mask_rules.scale", fwd({"attn_scale": -0.5}), "attn_scale=-0.5 is outside"),
    Case("mask_rules.scale", bwd({"attn_scale": -0.5}), "attn_scale=-0.5 is outside"),
    Case("mask_rules.scale", fwd({"attn_scale": 1e-40}), "attn_scale=1e-40 is outside"),
    Case("mask_rules.scale", fwd({"attn_scale": None},
                                 extra={"attn_scale": scalar("attn_scale", DType.FLOAT)}),
         "attn_scale is a tensor on the device"),
    Case("mask_rules.score_mod", fwd({**CAUSAL, "score_mod": softcap(50.0)}),
         "score_mod is a traced program"),
    Case("mask_rules.band", fwd({"right_bound": -1}), "right_bound=-1 is negative"),
    Case("mask_rules.band", fwd(ENDING, s_q=300), "causal with s_q=300 above s_kv=264"),
    Case("mask_rules.band", fwd(ENDING, extra=BIAS), "bottom-right causal together with bias"),
    Case("mask_rules.band", fwd({**ENDING, "alibi": True}), "causal together with ALiBi"),
    Case("mask_rules.band", fwd({**ENDING, "dropout_p": 0.1}, extra=RANDOM),
         "bottom-right causal together with dropout"),
    Case("mask_rules.band", fwd(ENDING), "bottom-right causal before cuDNN 9.6", on(H200, 90501)),
    Case("mask_rules.band", fwd({**CAUSAL, "left_bound": 9}, s_q=300),
         "a left bound with s_q=300 above s_kv=264"),
    Case("mask_rules.band", bwd({**CAUSAL, "left_bound": 0}), "left_bound=0 must be positive"),
    Case("mask_rules.band", fwd({**CAUSAL, "left_bound": 0}),
         "left_bound=0 must be positive before cuDNN 9.10", on(H200, 90900)),
    Case("mask_rules.band", fwd({"left_bound": 9}), "before cuDNN 9.10.2 needs a right bound",
         on(H200, 90900)),
    Case("mask_rules.band", fwd({**CAUSAL, "left_bound": 9}, extra=BIAS),
         "before cuDNN 9.10.2 excludes dropout and bias", on(H200, 90900)),
    Case("mask_rules.band", fwd({**ENDING, "left_bound": 9}),
         "a bottom-right window before cuDNN 9.6", on(H200, 90501)),
    Case("mask_rules.band", fwd({**ENDING, "left_bound": 9}, s_q=256, s_kv=256),
         "a bottom-right window with s_q = s_kv on sm_90", on(H200, 90900)),
    Case("mask_rules.band", fwd({"left_bound": 9}, s_kv=2048),
         "cuDNN 9.14.0 computes a window over s_kv=2048", on(H200, 91400)),
    Case("mask_rules.alibi", fwd({"alibi": True}), "ALiBi needs right_bound=0, this is None"),
    Case("mask_rules.dropout", fwd({"dropout_p": 1.0}, extra=RANDOM), "dropout probability 1.0"),
    Case("mask_rules.sink", fwd(extra=SINK), "sink_token needs cuDNN 9.13", on(H200, 91200)),
    Case("mask_rules.padding", step(Sdpa(), values={"q": ragged(2, 4, 200, 64, "q", "starts"),
                                                    **OFFSETS}),
         "ragged tensors need padding with seq_len_q and seq_len_kv"),
    Case("mask_rules.padding", padded(), "padding on sm_100: it is not measured", B200),
    Case("mask_rules.padding", padded(),
         "padding needs cuDNN 9.19.0 or newer, this is cuDNN 9.18.1", on(H200, 91801)),
    Case("mask_rules.padding", thd(), "padding or ragged tensors on sm_80 need cuDNN 9.18.1",
         on(A100, 91800)),
    Case("mask_rules.padding", padded(values={
        "q": packed("q", (2, 4, 200, 64), ragged_offset="starts", ragged_multiplier=64),
        **OFFSETS}),
         "ragged offsets that count more than single elements"),
    Case("forward_rules.head_dims", fwd(d_qk=136), "d_qk=136 is above 128, the most for sm_80",
         on(A100, 90900)),
    Case("forward_rules.head_dims", fwd(d_v=264), "d_v=264 is above 256, the most for sm_90",
         on(H200, 90900)),
    Case("forward_rules.head_dims", fwd(d_v=136), "d_v=136 is above 128, the most for sm_100",
         on(B200, 90800)),
    Case("forward_rules.decode", fwd({"attn_scale": 1.0}, s_q=1, extra=SINK),
         "sink_token with s_q=1"),
    Case("forward_rules.decode", fwd(s_q=1), "s_q=1 with a right bound", on(H200, 90900)),
    Case("forward_rules.decode", fwd({"attn_scale": 1.0}, s_q=1, d_v=136),
         "s_q=1 with head dims above 128 on sm_100", on(B200, 90900)),
    Case("forward_rules.paging", paged(s_q=200), "paged k and v with s_q=200: past seq_len_kv"),
    Case("forward_rules.paging", paged(attrs={"padding": False}),
         "paged k and v need padding with seq_len_q and seq_len_kv"),
    Case("forward_rules.paging", paged(d_qk=136), "paged k and v with head dims above 128",
         on(H200, 90900)),
    Case("forward_rules.paging", paged(), "paged k and v beside padded or ragged q need cuDNN 9.7",
         on(H200, 90600)),
    Case("forward_rules.stats_layout", fwd(values={"Stats": packed(
        "Stats", (2, 4, 200, 1), DType.FLOAT, stride=(800, 1, 4, 1))}),
         "Stats must be packed [b, h, s, 1] before cuDNN 9.12", on(H200, 91100)),
    Case("backward_rules.sizes", bwd(s_q=1, s_kv=1), "s_q = s_kv = 1 has no backward"),
    Case("backward_rules.head_dims", bwd(d_qk=136), "d_qk=136 is above 128", A100),
    Case("backward_rules.head_dims", bwd(d_v=136), "d_v=136 is above 128",
         Device("cuda", 0, 120, 92600)),
    Case("backward_rules.head_dims", bwd(d_qk=264), "d_qk=264 is above 256"),
    Case("backward_rules.head_dims", bwd(d_qk=160, d_v=96), "of that kind it has 192 with 128",
         on(H200, 91200)),
    Case("backward_rules.head_dims", bwd(d_qk=192, d_v=64), "d_qk=192 needs d_v=128, this is 64",
         B200),
    Case("backward_rules.head_dims", bwd(d_qk=256, d_v=256), "takes up to 128, or 192 with 128",
         on(B200, 92200)),
    Case("backward_rules.head_dims", bwd(d_qk=136, d_v=128), "takes up to 128", B200),
    Case("backward_rules.deterministic", bwd({**CAUSAL, "deterministic": True}),
         "a deterministic backward on sm_100 needs cuDNN 9.18", on(B200, 91700)),
    Case("backward_rules.deterministic", bwd({**CAUSAL, "deterministic": True, "alibi": True}),
         "a deterministic backward on sm_100 together with ALiBi", B200),
    Case("backward_rules.deterministic", bwd({**CAUSAL, "deterministic": True}, extra=BIAS,
                                             outputs=("dBias",)),
         "a deterministic backward on sm_100 together with dBias", B200),
    Case("backward_rules.deterministic", bwd({**CAUSAL, "dropout_p": 0.1}, d_qk=256, d_v=256,
                                             extra=RANDOM),
         "a deterministic backward on sm_100 together with dropout", B200),
    Case("backward_rules.sequences", padded(bwd, attrs={"deterministic": True}),
         "a deterministic backward with padding on sm_80", A100),
    Case("backward_rules.sequences", thd(bwd, "q o dO dQ", values={
        "stats": ragged(2, 4, 200, 1, "stats", "starts", DType.FLOAT)}),
         "ragged stats on sm_80", A100),
    Case("backward_rules.sequences", padded(bwd), "padding with grouped heads needs cuDNN 9.6",
         on(H200, 90501)),
    Case("backward_rules.sequences", padded(bwd, extra=SINK),
         "padding with sink_token needs cuDNN 9.26", on(H200, 92500)),
    Case("backward_rules.sequences", padded(bwd, extra=BIAS, outputs=("dBias",)),
         "dBias with padding on sm_100", B200),
    Case("backward_rules.bias", bwd(extra={"bias": packed("bias", (1, 4, 1, 264))}),
         "bias [1, 4, 1, 264] repeats along rows or keys [200, 264]"),
    Case("backward_rules.bias", bwd(extra={"bias": packed("bias", (1, 4, 200, 264), DType.FLOAT)},
                                    outputs=("dBias",)),
         "bias is fp32; dBias needs the type of q"),
    Case("backward_rules.bias", bwd(extra=BIAS, outputs=("dBias",)),
         "dBias before cuDNN 9.5 needs s_q=200, s_kv=264", on(H200, 90400)),
    Case("backward_rules.stats_layout", bwd(values={"stats": packed(
        "stats", (2, 4, 200, 1), DType.FLOAT, stride=(800, 1, 4, 1))}),
         "stats must be packed [b, h, s, 1] before cuDNN 9.26", on(H200, 92500)),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[f"{c.rule}: {c.says[:40]}" for c in CASES])
def test_a_broken_rule_says_so(case: Case) -> None:
    found = list(RULES[case.rule](Facts(case.step, case.device)))
    assert any(case.says in sentence for sentence in found), found
    assert set(found) <= set(CudnnSdpa().why_not(case.step, case.device))


def test_every_rule_has_a_case() -> None:
    assert {case.rule for case in CASES} == set(RULES)


SERVED = {
    "causal": fwd(),
    "grouped, h_k != h_v": fwd(h_q=12, h_k=2, h_v=4),
    "bottom right": fwd(ENDING),
    "window": fwd({**ENDING, "left_bound": 33}),
    "window, left only": fwd({"attn_scale": 1.0, "left_bound": 33}),
    "bias by head": fwd(extra=BIAS),
    "bias by key": fwd(extra={"bias": packed("bias", (1, 1, 1, 264), DType.FLOAT)}),
    "ALiBi": fwd({**CAUSAL, "alibi": True}),
    "sink": fwd(extra=SINK),
    "dropout": fwd({**CAUSAL, "dropout_p": 0.1}, extra=RANDOM),
    "padding": padded(),
    "padding, s_q above s_kv": padded(attrs={"bottom_right": True}, s_q=300),
    "ragged": thd(),
    "paged decoding": paged(),
    "log2": fwd({**CAUSAL, "softmax_input_is_log2": True}),
    "host scale": fwd({"attn_scale": None},
                      extra={"attn_scale": scalar("attn_scale", DType.DOUBLE, is_host=True)}),
    "wide heads": fwd(d_qk=576, d_v=512),
    "odd lengths": fwd(s_q=1, s_kv=131),
    "strides of single axes": fwd(b=1, values={"q": packed("q", (1, 4, 200, 64),
                                                           stride=(3, 12800, 64, 1))}),
    "backward": bwd(),
    "backward, 256": bwd(d_qk=256, d_v=256),
    "backward, 192 and 128": bwd(d_qk=192, d_v=128),
    "backward, bias": bwd(extra=BIAS, outputs=("dBias",)),
    "backward, sink": bwd(extra=SINK, outputs=("dSink_token",)),
    "backward, padding": padded(bwd),
    "backward, ragged": thd(bwd, "q o dO dQ"),
    "backward, deterministic": bwd({**CAUSAL, "deterministic": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", SERVED)
def test_what_it_serves_has_no_reason_against_it(name: str) -> None:
    assert CudnnSdpa().why_not(SERVED[name], H200) == ()


def test_all_broken_rules_are_listed_once_each() -> None:
    broken = fwd(
        {"attn_scale": 0.0, "right_bound": 0, "bottom_right": True, "alibi": True},
        dtype=DType.FLOAT,
        d_qk=84,
        s_q=300,
        extra={**BIAS, **SINK},
    )
    found = CudnnSdpa().why_not(broken, Device("cuda", 0, 75, 91200))
    for part in (
        "needs sm_80",
        "q is fp32",
        "d_qk=84",
        "attn_scale=0.0",
        "bottom-right causal with s_q=300",
        "together with bias",
        "together with ALiBi",
        "sink_token needs cuDNN 9.13",
    ):
        assert sum(part in sentence for sentence in found) == 1, (part, found)
    assert len(found) == len(set(found))


def test_without_cudnn_the_versions_are_not_recited() -> None:
    found = CudnnSdpa().why_not(padded(bwd, extra=SINK), Device("cuda", 0, 90, 0))
    assert len(found) == 1
    assert found[0].startswith("needs cuDNN and nvidia-cudnn-frontend 1.32 or newer")


def test_padding_is_claimed_where_it_is_measured_and_nowhere_else() -> None:
    assert PADDING_MEASURED == {9: 91900}


def test_versions_read_as_cudnn_writes_them() -> None:
    assert [version_name(n) for n in (90000, 91002, 92600)] == ["9.0.0", "9.10.2", "9.26.0"]


def test_the_manifest_knows_both_engines_and_asks_neither_by_default() -> None:
    for name in ("cudnn.sdpa", "cudnn.rope_sdpa"):
        assert manifest.load(name).name == name
