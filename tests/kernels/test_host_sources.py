"""rope.cu run on the CPU under sanitizers: every source of angles and positions, against fp64."""

from pathlib import Path

import pytest

from tests.kernels import host
from tests.kernels.cases import Case, check
from tests.kernels.oracle import expected
from tests.kernels.sources import SOURCES, cases, plans


def run_and_check(given: list[tuple[str, Case]], where: Path) -> list[int]:
    wants = [expected(one) for _, one in given]
    taken = host.run([one for _, one in given], where)
    for (what, one), want in zip(given, wants, strict=True):
        check(one, want, what)
    return taken


@pytest.mark.parametrize("source", SOURCES)
def test_every_kind_of_positions(source: str, tmp_path: Path) -> None:
    given = [one for plan in plans() if plan.source == source for one in cases(plan)]
    taken = run_and_check(given, tmp_path)
    assert {host.VECTOR, host.SINGLE} == set(taken)
    for what, one in given:
        assert not one.flag.item(), what
