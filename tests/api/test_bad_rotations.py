"""Angles, positions and modes of a rotation that cannot be right: refused, and how."""

from typing import Any

import pytest

from ropegraph import GraphError
from tests.api.graphs import F16, F32, F64
from tests.api.test_bad_inputs import INT32, Draft, Make, Q, refused


class Turn(Draft):
    """A draft whose rotations may have other angles than freqs, and ragged data."""

    def tables(self, **options: Any) -> Any:
        x = options.pop("x", None) or self.t("x", *Q)
        return self.g.rope(x, name="turn", **options).set_output(True)

    def ragged(self, dim: tuple[int, ...] = Q, **options: Any) -> Any:
        x = self.t("x", *dim, ragged_offset=self.t("o", dim[0] + 1, 1, 1, 1, data_type=INT32))
        freqs = self.t("f", dim[2], 1, 1, dim[3], data_type=F32)
        return self.g.rope(x, freqs, name="turn", **options).set_output(True)


RECORDED: dict[str, tuple[Make, str]] = {
    "cosines alone": (
        lambda d: d.g.rope(d.t("x", *Q), cos=d.t("c", 5, 1, 1, 8), name="turn"),
        "cos= is given without sin=; a table needs both",
    ),
    "sines alone": (
        lambda d: d.g.rope(d.t("x", *Q), sin=d.t("c", 5, 1, 1, 8), name="turn"),
        "sin= is given without cos=; a table needs both",
    ),
    "three sources": (
        lambda d: d.rope(inv_freq=d.t("i", 4), cos_sin=d.t("c", 5, 1, 1, 16)),
        "as freqs and as cos_sin, as inv_freq; give exactly one source",
    ),
    "two unlike tables": (
        lambda d: d.tables(cos=d.t("c", 5, 1, 1, 8), sin=d.t("s", 6, 1, 1, 8)),
        "cos [5, 1, 1, 8] and sin [6, 1, 1, 8] differ; use two tables of one shape",
    ),
    "packed too narrow": (
        lambda d: d.tables(cos_sin=d.t("c", 5, 1, 1, 8)),
        "cos_sin [5, 1, 1, 8] is 8 wide ... half_width=False reads 16 columns",
    ),
    "tables too short": (
        lambda d: d.tables(cos_sin=d.t("c", 4, 1, 1, 16)),
        "cos_sin [4, 1, 1, 16] has 4 rows for 5 positions",
    ),
    "tables too short for all ranks": (
        lambda d: d.rope((2, 6, 4, 8), table=(8, 1, 1, 8), cp_size=4),
        "freqs [8, 1, 1, 8] has 8 rows for 16 positions",
    ),
    "inv_freq of the whole width": (
        lambda d: d.tables(inv_freq=d.t("i", 8)),
        "inv_freq is [8], but rope_dim=8 needs [4], one number of radians a position",
    ),
    "layout with inv_freq": (
        lambda d: d.tables(inv_freq=d.t("i", 4), table_layout="pairs"),
        "table_layout='pairs' speaks of a full-width table, but half_width=True",
    ),
    "positions of another length": (
        lambda d: d.rope(position_ids=d.t("p", 2, 4)),
        "position_ids is [2, 4]; use [2, 5] or [1, 5]",
    ),
    "starts of another batch": (
        lambda d: d.rope(start_positions=d.t("p", 3)),
        "start_positions is [3]; use [2], one for each sequence",
    ),
    "starts a sequence": (
        lambda d: d.rope((1, 6, 5, 8), cu_seqlens=d.t("c", 4), start_positions=d.t("p", 1)),
        "start_positions is [1]; use [3], one for each sequence",
    ),
    "packed batch": (
        lambda d: d.rope(cu_seqlens=d.t("c", 3)),
        "cu_seqlens packs sequences along s, so input [2, 6, 5, 8] must have a batch of 1",
    ),
    "empty cu_seqlens": (
        lambda d: d.rope((1, 6, 5, 8), cu_seqlens=d.t("c", 0)),
        "cu_seqlens is [0]; use [n + 1]",
    ),
    "positions twice": (
        lambda d: d.rope(position_ids=d.t("p", 2, 5), start_positions=d.t("s", 2)),
        "position_ids and start_positions both say which positions the rows have",
    ),
    "positions of packed sequences": (
        lambda d: d.rope((1, 6, 5, 8), position_ids=d.t("p", 1, 5), cu_seqlens=d.t("c", 2)),
        "position_ids and cu_seqlens both say",
    ),
    "positions of a rank": (
        lambda d: d.rope((2, 6, 4, 8), position_ids=d.t("p", 2, 4), cp_size=2),
        "position_ids and cp_size=2 both say which positions the rows have",
    ),
    # C20
    "an odd share": (
        lambda d: d.rope((2, 6, 7, 8), cp_size=2, table=(14, 1, 1, 8)),
        "with cp_size=2 a rank holds two chunks ... s=7; pad ... multiple of 2 cp_size = 4",
    ),
    "one row on two ranks": (
        lambda d: d.rope((2, 6, 1, 8), cp_size=2, table=(2, 1, 1, 8)),
        "has s=1; pad whole sequences to a multiple of 2 cp_size = 4",
    ),
    "rank past the last": (
        lambda d: d.rope(cp_size=2, cp_rank=2),
        "cp_rank=2 with cp_size=2; use 0 to 1",
    ),
    "ranks without number": (
        lambda d: d.rope(cp_size=2**30),
        "cp_size=1073741824; use less than 1073741824",
    ),
    "rank alone": (lambda d: d.rope(cp_rank=1), "cp_rank=1 with cp_size=1; use 0 to 0"),
    "negative rank": (lambda d: d.rope(cp_size=2, cp_rank=-1), "cp_rank=-1; use 0 or more"),
    "no rank": (lambda d: d.rope(cp_size=0), "cp_size=0; use 1 or more"),
    "precision of a table": (
        lambda d: d.rope(angle_precision="exact"),
        "angle_precision='exact' speaks of angles made from inv_freq, but they are given as freqs",
    ),
    "unknown precision": (
        lambda d: d.tables(inv_freq=d.t("i", 4), angle_precision="fp32"),
        "angle_precision='fp32'; use one of 'float32', 'exact'",
    ),
    "unknown numerics": (
        lambda d: d.rope(numerics="fast"),
        "numerics='fast'; use one of 'fp32', 'nemo', 'hf'",
    ),
    "bits of angles": (
        lambda d: d.rope(numerics="hf"),
        "numerics='hf' reads cosines and sines ... given as freqs; give cos= and sin=, or cos_sin=",
    ),
    "bits of inv_freq": (
        lambda d: d.tables(inv_freq=d.t("i", 4), numerics="nemo"),
        "numerics='nemo' reads cosines and sines as they are, but the angles are given as inv_freq",
    ),
    "bits of a scale": (
        lambda d: d.tables(cos_sin=d.t("c", 5, 1, 1, 16), numerics="hf", output_scale=0.5),
        "numerics='hf' is bit-exact, so output_scale=0.5 has no place in it; use 1.0",
    ),
    "bits of a factor": (
        lambda d: d.tables(cos_sin=d.t("c", 5, 1, 1, 16), numerics="nemo", attention_factor=1.5),
        "numerics='nemo' has no attention_factor, which is 1.5; use 1.0",
    ),
    "misspelt": (
        lambda d: d.rope(position_id=d.t("p", 2, 5)),
        "is no argument here; did you mean position_ids?",
    ),
}
# What depends on data types and on offsets, which may be declared after the rotation is recorded.
BUILT: dict[str, tuple[Make, str]] = {
    "two types of tables": (
        lambda d: d.tables(
            cos=d.t("c", 5, 1, 1, 8, data_type=F16), sin=d.t("s", 5, 1, 1, 8, data_type=F32)
        ),
        "cos is fp16 but sin is fp32; both must have one data type",
    ),
    "inv_freq of 16 bits": (
        lambda d: d.tables(inv_freq=d.t("i", 4, data_type=F16)),
        "inv_freq is fp16; use fp32, fp64",
    ),
    "a table of integers": (
        lambda d: d.tables(cos_sin=d.t("c", 5, 1, 1, 16, data_type=INT32)),
        "cos_sin is int32; use fp16, bf16, fp32, fp64",
    ),
    "positions that are not whole": (
        lambda d: d.rope(position_ids=d.t("p", 2, 5, data_type=F32)),
        "position_ids is fp32; use int32, int64",
    ),
    "positions of ragged data": (
        lambda d: d.ragged(position_ids=d.t("p", 2, 5)),
        "position_ids and the ragged_offset of input 'x' both say which positions the rows have",
    ),
    "cu_seqlens of ragged data": (
        lambda d: d.ragged((1, 6, 5, 8), cu_seqlens=d.t("c", 3)),
        "cu_seqlens and the ragged_offset of input 'x' both say",
    ),
    "ragged positions": (
        lambda d: d.rope(
            start_positions=d.t("p", 2, ragged_offset=d.t("o", 3, 1, 1, 1, data_type=INT32))
        ),
        "start_positions 'p' has a ragged_offset; only q, k",
    ),
    "an fma of fp64": (
        lambda d: d.tables(
            cos_sin=d.t("c", 5, 1, 1, 16), numerics="nemo", x=d.t("x", *Q, data_type=F64)
        ),
        "numerics='nemo' rounds an fma in fp32, but input is fp64; use fp16, bf16 or fp32",
    ),
}


@pytest.mark.parametrize(("make", "text"), RECORDED.values(), ids=RECORDED)
def test_refused_when_recorded(make: Make, text: str):
    assert refused(make, text, Turn()).startswith("rope 'turn': ")


@pytest.mark.parametrize(("make", "text"), BUILT.values(), ids=BUILT)
def test_refused_when_built(make: Make, text: str):
    draft = Turn()
    make(draft)
    with pytest.raises(GraphError) as caught:
        draft.g.validate()
    assert str(caught.value).startswith("rope 'turn': ")
    for part in text.split(" ... "):
        assert part in str(caught.value)
