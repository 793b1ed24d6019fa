"""C35: the key changes with every field that lowering reads, and with nothing else."""

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch

import ropegraph
from ropegraph.dtypes import DType
from ropegraph.ir import serialize
from ropegraph.ir.graph import Graph as IrGraph
from ropegraph.ir.graph import Value
from ropegraph.ir.ops import Rope, RopeBackward, Sdpa, SdpaBackward
from ropegraph.testing.budget import assert_within
from ropegraph.testing.inputs import normal

HALF, BF16 = torch.float16, torch.bfloat16
B, H, S, D = 2, 4, 6, 8


class Recorded:
    """rope and sdpa (or their backward), where a test changes one argument."""

    def __init__(
        self,
        graph: dict[str, Any] | None = None,
        bias: dict[str, Any] | None = None,
        rope: dict[str, Any] | None = None,
        sdpa: dict[str, Any] | None = None,
        after: Callable[[Any], object] | None = None,
        is_ragged: bool = False,
    ) -> None:
        g = ropegraph.pygraph(**{"io_data_type": HALF, **(graph or {})})
        self.g, self.t = g, {}
        for name in "qkv":
            self.t[name] = g.tensor([B, H, S, D], name=name)
        self.t["freqs"] = g.tensor([S, 1, 1, D], name="freqs")
        for name in ("len_q", "len_kv"):
            self.t[name] = g.tensor([B, 1, 1, 1], name=name, data_type=torch.int32)
        about = {"dim": [1, H, S, S], "name": "bias", "data_type": torch.float32}
        self.t["bias"] = g.tensor(**{**about, **self._read(bias)})
        self.t["sink"] = g.tensor([1, H, 1, 1], name="sink")
        if is_ragged:
            offset = g.tensor([B + 1, 1, 1, 1], data_type=torch.int32)
            self.t["v"].set_ragged_offset(offset)
        rotation = {"freqs": self.t["freqs"], "name": "rope", **(rope or {})}
        self.rotated = g.rope(self.t["q"], **self._read(rotation))
        keywords = {"name": "attn", "generate_stats": True, **self._read(sdpa)}
        self.o, self.stats = g.sdpa(self.rotated, self.t["k"], self.t["v"], **keywords)
        self.o.set_output(True).set_name("o")
        if after is not None:
            after(self)

    def _read(self, given: dict[str, Any] | None) -> dict[str, Any]:
        """Names of tensors stand for the tensors; a callable makes its value in this graph."""
        return {n: x(self) if isinstance(x, Make) else x for n, x in (given or {}).items()}

    @property
    def key(self) -> str:
        return self.g.key


class Make:
    """A value that needs the graph it belongs to."""

    def __init__(self, make: Callable[[Recorded], Any]) -> None:
        self.make = make

    def __call__(self, recorded: Recorded) -> Any:
        return self.make(recorded)


def tensor(name: str) -> Make:
    return Make(lambda r: r.t[name])


def number(dtype: torch.dtype) -> Make:
    return Make(lambda r: r.g.tensor([1, 1, 1, 1], data_type=dtype, is_pass_by_value=True))


def table(dtype: torch.dtype = torch.float32, rows: int = S, width: int = D) -> Make:
    return Make(lambda r: r.g.tensor([rows, 1, 1, width], data_type=dtype))


def integers(*dim: int, dtype: torch.dtype = torch.int32) -> Make:
    return Make(lambda r: r.g.tensor(dim, data_type=dtype))


CACHE = Make(lambda r: r.g.tensor([B, H, S, D]))
INV_FREQ = Make(lambda r: r.g.tensor([D // 2], data_type=torch.float32))
TABLES = {"freqs": None, "cos": table(), "sin": table()}
PADDED = {"use_padding_mask": True, "seq_len_q": tensor("len_q"), "seq_len_kv": tensor("len_kv")}

# Argument -> what it is changed to, from the default; several together where one needs others.
PYGRAPH = {
    "io_data_type": {"io_data_type": torch.bfloat16},
    "compute_data_type": {"compute_data_type": torch.float64},
    "fold": {"fold": "q"},
    "fold_log2": {"fold_log2": True},
    "engines": {"engines": "reference"},
    "fold_contract": {"fold_contract": Recorded().g.fold_contract},
}
# Names that messages use, hints, and where results go: none of them changes what runs.
PYGRAPH_NOT = {
    "name", "intermediate_data_type", "handle", "sm_count", "sm_version", "device_property",
    "kernel_cache", "is_dynamic_shape_enabled", "is_override_shape_enabled",
    "cuda_graph_retention", "fe_arguments",
}  # fmt: skip
TENSOR = {
    "dim": {"dim": [1, 1, S, S]},
    "stride": {"stride": [H * S * S, S * S, 1, S]},
    "data_type": {"data_type": torch.bfloat16},
    "is_pass_by_value": {"is_pass_by_value": True},
    "uid": {"uid": 77},
    "name": {"name": "other"},
    "ragged_offset_multiplier": {"ragged_offset_multiplier": 2},
}
# "ragged_offset" is varied by is_ragged: only data may have one.
TENSOR_NOT = {"is_virtual", "ragged_offset", "reordering_type", "alignment_value", "fe_arguments"}
ROPE = {
    "freqs": {"freqs": Make(lambda r: r.g.tensor([S + 1, 1, 1, D]))},
    "output_scale": {"output_scale": 1.0000001},
    "rope_dim": {"rope_dim": 4, "freqs": Make(lambda r: r.g.tensor([S, 1, 1, 4]))},
    "rope_offset": {
        "rope_dim": 4,
        "rope_offset": 0,
        "freqs": Make(lambda r: r.g.tensor([S, 1, 1, 4])),
    },
    "interleaved": {"interleaved": True, "table_layout": "first_half"},
    "interleaved_output": {"interleaved_output": True, "table_layout": "first_half"},
    "attention_factor": {"attention_factor": 1.5},
    "inverse": {"inverse": True},
    "half_width": {"half_width": True, "freqs": Make(lambda r: r.g.tensor([S, 1, 1, D // 2]))},
    "table_layout": {"table_layout": "pairs"},
    "cos": {**TABLES, "inverse": True},
    "sin": TABLES,
    "sin, bf16": {"freqs": None, "cos": table(BF16), "sin": table(BF16)},
    "cos_sin": {"freqs": None, "cos_sin": table(width=2 * D)},
    "inv_freq": {"freqs": None, "inv_freq": INV_FREQ},
    "angle_precision": {"freqs": None, "inv_freq": INV_FREQ, "angle_precision": "exact"},
    "numerics": {**TABLES, "numerics": "hf"},
    "numerics, nemo": {**TABLES, "numerics": "nemo"},
    "position_ids": {"position_ids": integers(B, S)},
    "position_ids, shared": {"position_ids": integers(1, S)},
    "start_positions": {"start_positions": integers(B)},
    "start_positions, int64": {"start_positions": integers(B, dtype=torch.int64)},
    "cp_size": {"freqs": table(rows=2 * S), "cp_size": 2},
    "cp_rank": {"freqs": table(rows=2 * S), "cp_size": 2, "cp_rank": 1},
    "cache": {"cache": CACHE, "cache_positions": integers(B)},
    "cache_positions": {"cache": CACHE, "cache_positions": integers(B, dtype=torch.int64)},
}
# "cu_seqlens" needs a batch of 1.
ROPE_NOT = {"input", "name", "compute_data_type", "cu_seqlens", "head_groups", "fe_arguments"}
SDPA = {
    "q": {},
    "attn_scale": {"attn_scale": 0.25},
    "attn_scale tensor": {"attn_scale": number(torch.float32)},
    "is_inference": {"is_inference": True, "generate_stats": None},
    "generate_stats": {"generate_stats": False},
    "bias": {"bias": tensor("bias")},
    "use_alibi_mask": {"use_alibi_mask": True},
    "use_padding_mask": PADDED,
    "use_causal_mask": {"use_causal_mask": True},
    "use_causal_mask_bottom_right": {"use_causal_mask_bottom_right": True},
    "sliding_window_length": {"sliding_window_length": 3},
    "diagonal_band_left_bound": {"diagonal_band_left_bound": 4},
    "diagonal_band_right_bound": {"diagonal_band_right_bound": 2},
    "diagonal_alignment": {
        "diagonal_band_left_bound": 4,
        "diagonal_alignment": ropegraph.diagonal_alignment.BOTTOM_RIGHT,
    },
    "dropout": {"dropout": (0.5, 1, 2)},
    "dropout probability": {"dropout": (0.25, 1, 2)},
    "dropout seed": {"dropout": (0.5, 2, 2)},
    "dropout offset": {"dropout": (0.5, 1, 3)},
    "sink_token": {"sink_token": tensor("sink")},
    "score_mod": {"score_mod": lambda g, s: g.mul(s, 2.0)},
    "score_mod, another lambda": {"score_mod": lambda g, s: g.mul(s, 3.0)},
    "score_mod, other order": {"score_mod": lambda g, s: g.mul(2.0, s)},
    "softcap": {"softcap": 2.0},
    "softcap, another": {"softcap": 3.0},
    "softmax_input_is_log2": {"softmax_input_is_log2": True},
}
SDPA_NOT = {"k", "v", "name", "seq_len_q", "seq_len_kv", "fe_arguments"}
PAGED = {"paged_attention_k_table", "paged_attention_v_table", "paged_attention_max_seq_len_kv"}
# What a tensor written by a node may be given.
AFTER = {
    "set_output": lambda r: r.rotated.set_output(True),
    "set_saved": lambda r: r.rotated.set_saved(True),
    "set_uid": lambda r: r.o.set_uid(5),
    "set_stride": lambda r: r.o.set_stride([S * H * D, D, H * D, 1]),
    "set_data_type": lambda r: r.o.set_data_type(torch.float32),
    "stats": lambda r: r.stats.set_output(True),
}


def variants() -> dict[str, Recorded]:
    found = {"base": Recorded()}
    found |= {f"pygraph {n}": Recorded(graph=x) for n, x in PYGRAPH.items()}
    biased = {"bias": tensor("bias")}
    found |= {f"tensor {n}": Recorded(bias=x, sdpa=biased) for n, x in TENSOR.items()}
    found |= {f"rope {n}": Recorded(rope=x) for n, x in ROPE.items()}
    found |= {f"sdpa {n}": Recorded(sdpa=x) for n, x in SDPA.items() if x}
    found |= {f"after {n}": Recorded(after=x) for n, x in AFTER.items()}
    found["ragged"] = Recorded(sdpa=PADDED, is_ragged=True)
    return found


def arguments(method: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(method).parameters) - {"self"}


def test_the_lists_name_every_argument():
    assert arguments(ropegraph.pygraph.__init__) == set(PYGRAPH) | PYGRAPH_NOT
    assert arguments(ropegraph.pygraph.tensor) == set(TENSOR) | TENSOR_NOT
    assert arguments(ropegraph.pygraph.rope) == {n for n in ROPE if n.isidentifier()} | ROPE_NOT
    named = {name for name in SDPA if name.isidentifier()}
    assert arguments(ropegraph.pygraph.sdpa) == named | SDPA_NOT | PAGED


# Two spellings of one thing share a plan.
SAME = [{"sdpa is_inference", "sdpa generate_stats"}]


def test_every_argument_has_a_key_of_its_own():
    keys: dict[str, str] = {}
    for name, recorded in variants().items():
        twin = keys.setdefault(recorded.key, name)
        same = twin == name or any({twin, name} <= group for group in SAME)
        assert same, f"{name} has the key of {twin}"


def test_two_graphs_recorded_alike_have_one_key():
    for first, second in zip(variants().items(), variants().items(), strict=True):
        assert first[1].key == second[1].key, first[0]


def test_values_and_addresses_are_not_in_the_key():
    def key(seed: int) -> str:
        g = ropegraph.pygraph(io_data_type=HALF)
        x = [normal((B, H, S, D), HALF, seed=seed + i) for i in range(3)]
        o, _ = g.sdpa(*x, attn_scale=0.5)
        o.set_output(True)
        return g.key

    assert key(0) == key(10)


def test_strides_of_size_1_axes_are_not_in_the_key():
    def key(stride: list[int]) -> str:
        g = ropegraph.pygraph(io_data_type=HALF)
        q = g.tensor([1, H, 1, D], stride)
        o, _ = g.sdpa(q, g.tensor([1, H, S, D]), g.tensor([1, H, S, D]))
        o.set_output(True)
        return g.key

    assert key([H * D, D, D, 1]) == key([7, D, 99, 1])
    assert key([H * D, D, D, 1]) != key([H * D, 2 * D, D, 1])


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path to every field of a nested dataclass that holds no other dataclass."""
    if is_dataclass(value):
        names = [f.name for f in fields(value)]
        return [p for n in names for p in leaves(getattr(value, n), (*path, n))]
    if isinstance(value, dict):
        return [path, *(p for k, x in value.items() for p in leaves(x, (*path, k)))]
    if isinstance(value, tuple) and any(is_dataclass(x) for x in value):
        return [p for i, x in enumerate(value) for p in leaves(x, (*path, i))]
    return [path]


def changed(value: Any, path: tuple[Any, ...]) -> Any:
    """A copy of ``value`` whose field at ``path`` holds something else."""
    if not path:
        return other(value)
    step, rest = path[0], path[1:]
    if is_dataclass(value):
        return replace(value, **{step: changed(getattr(value, step), rest)})
    if isinstance(value, tuple):
        return (*value[:step], changed(value[step], rest), *value[step + 1 :])
    return {**value, step: changed(value[step], rest)}


def other(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case DType():
            return DType.DOUBLE if value is not DType.DOUBLE else DType.HALF
        case int() | float():
            return value + 1
        case str():
            return f"{value}_"
        case None:
            return 3
        case frozenset():
            return value | {"another"}
        case tuple():
            return (*value, 3)
        case dict():
            # The order of ports and values decides the order of slots.
            items = list(value.items())
            return dict([*items[1:], items[0]]) if len(items) > 1 else {"another": "q"}
        case _:
            raise AssertionError(f"no other value for {value!r}")


def rich_graphs() -> list[IrGraph]:
    """Every op, a contract, ragged and host values, a score program."""
    r = Recorded(
        sdpa={**PADDED, "attn_scale": 0.3, "dropout": (0.5, 1, 2), "softcap": 2.0},
        graph={"fold": "q"},
    )
    backward = r.g.backward_graph(["o"], ["q", "k", "v"])
    graphs = [r.g.lowered.recorded, backward.lowered.recorded, backward.plan.graph]
    kinds = {type(n.attrs) for g in graphs for n in g.nodes}
    assert kinds >= {Rope, Sdpa, RopeBackward, SdpaBackward}
    return graphs


@pytest.mark.parametrize("index", range(3))
def test_every_field_of_the_ir_is_in_the_key(index):
    graph = rich_graphs()[index]
    base = serialize.key(graph)
    paths = leaves(graph)
    assert len(paths) > 100
    for path in paths:
        assert serialize.key(changed(graph, path)) != base, path
    assert {f.name for f in fields(Value)} <= {name for path in paths for name in path}


def test_the_device_and_the_engines_are_in_the_key():
    graph = rich_graphs()[0]
    keys = {serialize.key(graph, context) for context in ((), ("cpu", "None"), ("sm_90", "None"))}
    assert len(keys) == 3


PAIRS = {
    "scale": ({"attn_scale": 0.5}, {"attn_scale": 0.25}),
    "mask": ({"use_causal_mask": True}, {"diagonal_band_left_bound": 2}),
    "callables": (
        {"score_mod": lambda g, s: g.mul(s, 0.5)},
        {"score_mod": lambda g, s: g.mul(s, 2.0)},
    ),
}


@pytest.mark.parametrize("name", [*PAIRS, "strides"])
@pytest.mark.parametrize("swapped", [False, True])
def test_a_cache_by_key_never_replays_another_graph(name, swapped):
    # A cache that holds A gives B what a fresh build gives, in both orders.
    cache: dict[str, ropegraph.pygraph] = {}
    q, k, v = (normal((1, 2, 3, 8), seed=i) for i in range(3))
    stacked = normal((1, 2, 3, 2, 8), seed=9)
    stacked[:, :, :, 0] = k
    calls = [(keywords, k) for keywords in PAIRS.get(name, ({}, {}))]
    if name == "strides":
        calls[1] = ({}, stacked[:, :, :, 0])
    for keywords, keys in reversed(calls) if swapped else calls:
        results = []
        for cached in (True, False):
            g = ropegraph.pygraph(io_data_type=torch.float32)
            t = [g.tensor_like(x, name=n) for n, x in (("q", q), ("k", keys), ("v", v))]
            o, _ = g.sdpa(*t, **keywords)
            o.set_output(True).set_name("o")
            g = cache.setdefault(g.key, g) if cached else g
            out = torch.full((1, 2, 3, 8), torch.nan)
            g.execute({"q": q, "k": keys, "v": v, "o": out})
            results.append(out)
        assert_within(results[0], results[1], 0.0, name)
    assert len(cache) == 2
