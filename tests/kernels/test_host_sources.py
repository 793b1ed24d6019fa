"""rope.cu run on the CPU under sanitizers: every source of angles and positions, against fp64."""

import pytest

from tests.kernels import host
from tests.kernels.cases import Run, check
from tests.kernels.oracle import expected
from tests.kernels.sources import SOURCES, cases, plans


@pytest.mark.parametrize("source", SOURCES)
def test_every_kind_of_positions(source: str, run: Run) -> None:
    given = [one for plan in plans() if plan.source == source for one in cases(plan)]
    assert {host.kernel_of(one) for _, one in given} == {host.VECTOR, host.SINGLE}
    wants = [expected(one) for _, one in given]
    run([one for _, one in given])
    for (what, one), want in zip(given, wants, strict=True):
        check(one, want, what)
        assert not one.flag.item(), what
