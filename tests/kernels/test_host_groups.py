"""Heads in two levels, as TransformerEngine packs them, on the CPU under sanitizers."""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ropegraph.engines.cuda_rope.engine import CudaRope
from ropegraph.engines.cuda_rope.job import jobs_of
from ropegraph.ir.ops import Rope, RopeBackward, RopePair
from ropegraph.lowering.engine import Device
from ropegraph.testing.inputs import normal
from tests.kernels import host
from tests.kernels.cases import Case, Run, bits, case, check, expected, like, offset_by
from tests.kernels.test_host import adjoint, table

BF16 = torch.bfloat16
B, S = 2, 5


def packed(groups: int, n: int, d: int, shift: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """[b, s, groups, (n + 2) d], its Q [b, groups, n, s, d] and its K [b, groups, s, d]."""
    whole = offset_by(normal((B, S, groups, (n + 2) * d), BF16), shift)
    heads = whole.unflatten(3, (n + 2, d))
    return whole, heads[:, :, :, :n].permute(0, 2, 3, 1, 4), heads[:, :, :, n].transpose(1, 2)


def both(op: Rope | RopeBackward, groups: int, shift: int = 0, *, is_in_place: bool) -> Case:
    """Q and K of a packed tensor in one launch, to or from tensors of one level, or in place."""
    n, d = 3, 40
    whole, q, k = packed(groups, n, d, shift)
    op = replace(op, head_groups=0 if is_in_place else groups)
    one = replace(op, head_groups=0, output_scale=1.0)
    flat = [normal((B, S, h, d), BF16).transpose(1, 2) for h in (groups * n, groups)]
    ends = ((q, q), (k, k)) if is_in_place else ((q, like(flat[0])), (k, like(flat[1])))
    read, written = "input", "output"
    if isinstance(op, RopeBackward):
        read, written = "dY", "dX"
        if not is_in_place:
            whole.fill_(torch.nan)
            ends = (flat[0], q), (flat[1], k)
    starts = torch.tensor([2, 0], dtype=torch.int32)
    tensors: dict[str, Tensor] = {}
    for i, (x, y) in enumerate(ends):
        tensors |= {f"{read}{i}": x, f"freqs{i}": table(random.Random(i), S + 2, op.rope_dim)}
        tensors |= {f"start_positions{i}": starts, f"{written}{i}": y}
    return case(RopePair((op, one)), **tensors)  # type: ignore[arg-type]


def plans() -> Iterator[tuple[str, Case, int]]:
    """Whole and partial rotations, vectors and single channels."""
    whole, part = Rope(40, 0, 0.5), Rope(16, 8, -1.5)
    yield "forward", both(whole, 3, is_in_place=False), host.VECTOR
    yield "partial", both(part, 3, is_in_place=False), host.VECTOR
    yield "adjoint", both(adjoint(whole), 3, is_in_place=False), host.VECTOR
    yield "adjoint, partial, in place", both(adjoint(part), 3, is_in_place=True), host.VECTOR
    yield "in place", both(whole, 2, is_in_place=True), host.VECTOR
    yield "misaligned, in place", both(part, 3, shift=1, is_in_place=True), host.SINGLE
    yield "misaligned", both(adjoint(part), 3, shift=1, is_in_place=False), host.SINGLE


def test_forward_adjoint_and_in_place(run: Run) -> None:
    given = list(plans())
    wants = [expected(one) for _, one, _ in given]
    untouched = [_v_of(one) for _, one, _ in given]
    before = [bits(v).clone() for v in untouched]
    run([one for _, one, _ in given])
    for (what, one, kernel), want, v, old in zip(given, wants, untouched, before, strict=True):
        check(one, want, what)
        assert host.kernel_of(one) == kernel, what
        assert torch.equal(bits(v), old), what


def _v_of(given: Case) -> Tensor:
    """V of the packed tensor, which no launch may touch."""
    q = next(given.at(p) for p in ("input0", "output0", "dY0", "dX0")
             if p in given.step.slots and given.at(p).dim() == 5)  # fmt: skip
    b, groups, n, s, d = q.shape
    store = torch.tensor([], dtype=BF16).set_(q.untyped_storage())
    return store[q.storage_offset() :].view(b, s, groups, n + 2, d)[:, :, :, -1]


def test_two_levels_that_strides_merge_take_the_plain_kernel() -> None:
    x = normal((B, 2, 3, S, 8), BF16)
    one_head = packed(3, 1, 8)[1]
    for data in (x, one_head):
        y = like(data.flatten(1, 2))
        op = Rope(8, 0, head_groups=data.shape[1])
        given = case(op, input=data, freqs=torch.zeros(S, 1, 1, 8), output=y)
        (job,) = jobs_of(given.step)
        assert job.dim == (B, data.shape[1] * data.shape[2], S, 8)
        assert host.variant_for(given.step).groups == (job.x.group != 0)
    assert not host.variant_for(case(Rope(8, 0), input=x, freqs=torch.zeros(S, 1, 1, 8),
                                     output=like(x)).step).groups  # fmt: skip


@pytest.mark.parametrize("groups", [1, 3])
def test_every_stride_of_a_group_allows_vectors_or_none_does(groups: int) -> None:
    """(n + 2) d decides too: a group that starts off 16 bytes would be read there."""
    wide = torch.zeros(B, S, groups, 5 * 8 + 1, dtype=BF16)[..., : 3 * 8].unflatten(3, (3, 8))
    q = wide.permute(0, 2, 3, 1, 4)
    given = case(
        Rope(8, 0, head_groups=groups), input=q, freqs=torch.zeros(S, 1, 1, 8),
        output=torch.zeros(B, 3 * groups, S, 8, dtype=BF16),
    )  # fmt: skip
    assert CudaRope().why_not(given.step, Device("cuda", 0, 90)) == ()
    assert host.kernel_of(given) == host.SINGLE
