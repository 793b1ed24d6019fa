"""What cuda.rope declines, in all its reasons, without a GPU or CuPy."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from ropegraph.dtypes import DType
from ropegraph.engines import manifest
from ropegraph.engines.cuda_rope.engine import CudaRope
from ropegraph.ir.ops import Rope, RopeBackward, RopePair
from ropegraph.lowering.engine import Device
from ropegraph.testing.inputs import normal
from tests.kernels.cases import Case, Ragged, case, like

H200 = Device("cuda", 0, 90)
BF16 = torch.bfloat16


def dense(op: Rope | RopeBackward | None = None, dtype: torch.dtype = BF16) -> Case:
    x, freqs = normal((2, 3, 5, 8), dtype), torch.zeros(5, 1, 1, 8)
    if isinstance(op, RopeBackward):
        return case(op, dY=x, freqs=freqs, dX=like(x))
    return case(op or Rope(8, 0), input=x, freqs=freqs, output=like(x))


def pair(second: Rope, k: torch.dtype = BF16) -> Case:
    q, other = normal((2, 3, 5, 8), BF16), normal((2, 1, 5, 8), k)
    freqs = torch.zeros(5, 1, 1, 8)
    return case(
        RopePair((Rope(8, 0), second)),
        input0=q, freqs0=freqs, input1=other, freqs1=freqs, output0=like(q), output1=like(other),
    )  # fmt: skip


def why_not(given: Case, device: Device = H200) -> tuple[str, ...]:
    return CudaRope().why_not(given.step, device)


def test_it_is_known_by_name() -> None:
    assert isinstance(manifest.load("cuda.rope"), CudaRope)


@pytest.mark.parametrize("dtype", [torch.float16, BF16, torch.float32])
def test_takes_16_and_32_bit_types_from_sm_80_on(dtype: torch.dtype) -> None:
    for op in (Rope(8, 0), RopeBackward(4, 2, 0.5, interleaved=True, table_layout="full")):
        for sm in (80, 90, 100, 120):
            assert why_not(dense(op, dtype), Device("cuda", 0, sm)) == ()
    assert why_not(pair(Rope(8, 0, 0.3))) == ()


@pytest.mark.parametrize(
    ("given", "device", "reason"),
    [
        (dense(), Device(), "needs a CUDA device, this is cpu"),
        (dense(), Device("cuda", 0, 75), "needs sm_80 or newer, this is sm_75"),
        (dense(dtype=torch.float64), H200, "input is fp64, not fp16, bf16 or fp32"),
        (dense(Rope(8, 0, compute=DType.DOUBLE)), H200, "computes in fp32, fp64 is asked for"),
        (dense(Rope(8, 0, numerics="hf")), H200, "numerics='hf' reads tables of cos and sin"),
        (dense(Rope(8, 0, 0.5, numerics="nemo")), H200, "no room for a scale"),
        (pair(Rope(8, 0, interleaved_output=True)), H200, "two layouts"),
        (pair(Rope(8, 0), torch.float16), H200, "two data types: bf16, bf16; fp16, fp16"),
    ],
)
def test_a_reason_for_each_rule(given: Case, device: Device, reason: str) -> None:
    assert any(reason in text for text in why_not(given, device)), why_not(given, device)


def test_a_pair_is_of_one_kind() -> None:
    """What one launch cannot vary between its two rotations, each rule by name."""
    x, freqs = normal((1, 3, 5, 8), BF16), torch.zeros(5, 1, 1, 8)
    ids = torch.zeros(1, 5, dtype=torch.int32)
    op = Rope(8, 0)
    of_cos_sin = replace(op, angles="cos_sin")
    plain = {"freqs": freqs}
    cos_sin = {"cos": freqs, "sin": freqs}
    half = {"cos": freqs.half(), "sin": freqs.half()}
    plans: list[tuple[Rope, dict[str, torch.Tensor], Rope, dict[str, torch.Tensor], str]] = [
        (op, plain, replace(op, cp_size=1, output_scale=2.0), plain, ""),
        (op, plain, of_cos_sin, cos_sin, "two kinds of tables: freqs, fp32; tables, fp32"),
        (of_cos_sin, half, of_cos_sin, cos_sin, "two kinds of tables: tables, fp16; tables, fp32"),
        (
            of_cos_sin, cos_sin, replace(op, angles="packed"),
            {"cos_sin": torch.cat([freqs, freqs], -1)}, "",
        ),
        (op, plain, op, plain | {"position_ids": ids}, "positions from two kinds"),
        (
            op, plain | {"position_ids": ids}, op, plain | {"position_ids": ids.long()},
            "positions from two kinds of tensors: ids, int32; ids, int64",
        ),
        (op, plain, op, plain | {"cu_seqlens": ids[0]}, "bounded in two ways"),
        (of_cos_sin, cos_sin, replace(of_cos_sin, numerics="hf"), cos_sin, "rounds in two ways"),
    ]  # fmt: skip
    for first, of_first, second, of_second, reason in plans:
        tensors = {f"{p}0": t for p, t in of_first.items()}
        tensors |= {f"{p}1": t for p, t in of_second.items()}
        given = case(
            RopePair((first, second)), input0=x, input1=x, **tensors, output0=like(x),
            output1=like(x),
        )  # fmt: skip
        broken = why_not(given)
        assert len(broken) == bool(reason), broken
        assert all(reason in text for text in broken)


def test_tables_and_positions_of_other_types_are_named() -> None:
    x, wide = normal((1, 1, 5, 8), BF16), torch.zeros(5, 1, 1, 8, dtype=torch.float64)
    ids = torch.zeros(1, 5, dtype=torch.int16)
    given = case(
        Rope(8, 0, angles="cos_sin"), input=x, cos=wide, sin=wide,
        position_ids=ids.int(), output=like(x),
    )  # fmt: skip
    assert why_not(given) == tuple(
        f"{port} is fp64, not fp16, bf16 or fp32" for port in ("cos", "sin")
    )
    step = given.step
    host = {n: replace(v, is_host=n == "position_ids") for n, v in step.values.items()}
    broken = CudaRope().why_not(replace(step, values=host), H200)
    assert "position_ids is passed by value" in broken


def test_sequences_are_bounded_once() -> None:
    offsets = torch.zeros(2, dtype=torch.int32)
    x = Ragged(torch.zeros(48, dtype=BF16), (1, 1, 6, 8), (48, 8, 8, 1), offsets)
    freqs = torch.zeros(6, 1, 1, 8)
    given = case(Rope(8, 0), input=x, freqs=freqs, cu_seqlens=offsets.clone(), output=x)
    assert "both say where the sequences" in why_not(given)[0]


def test_every_broken_rule_is_named_not_the_first() -> None:
    op = Rope(8, 0, 0.5, numerics="nemo", compute=DType.DOUBLE)
    broken = why_not(dense(op, torch.float64), Device("cuda", 0, 70))
    assert len(broken) == 6
    assert sum("fp64, not" in text for text in broken) == 2


def test_another_port_or_a_wide_table_is_named() -> None:
    given = case(
        Rope(8, 0),
        input=normal((1, 1, 5, 8), BF16),
        freqs=torch.zeros(5, 1, 1, 8, dtype=torch.float64),
        scale=torch.zeros(1, 5, dtype=torch.int32),
        output=normal((1, 1, 5, 8), BF16),
    )
    assert why_not(given) == (
        "scale is not read by the kernel",
        "freqs is fp64, not fp32",
    )


def test_ragged_input_and_output_must_lie_alike() -> None:
    offsets = torch.zeros(3, dtype=torch.int32)
    x = Ragged(torch.zeros(96, dtype=BF16), (2, 1, 6, 8), (48, 8, 8, 1), offsets)
    freqs = torch.zeros(6, 1, 1, 8)

    def bound(y: Ragged | torch.Tensor) -> tuple[str, ...]:
        return why_not(case(Rope(8, 0), input=x, freqs=freqs, output=y))

    assert bound(replace(x, buffer=like(x.buffer))) == ()
    assert "different ragged offsets" in bound(torch.zeros(2, 1, 6, 8, dtype=BF16))[0]
    assert "different ragged offsets" in bound(replace(x, multiplier=8))[0]
    assert "from token to token" in bound(replace(x, stride=(96, 8, 16, 1)))[0]
    wrong = replace(x, offsets=torch.zeros(3, dtype=torch.int16))
    assert wrong.offsets.dtype is torch.int16


def test_it_imports_nothing_of_cuda() -> None:
    code = (
        "import sys; from ropegraph.engines import manifest; manifest.load('cuda.rope'); "
        "print([m for m in sys.modules if m.split('.')[0] in ('cupy', 'cuda', 'cudnn')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
