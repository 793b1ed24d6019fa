"""What runs a case: here the host, in tests/gpu a GPU, of the same name."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.kernels import host
from tests.kernels.cases import Case


@pytest.fixture
def run(tmp_path: Path) -> Callable[[Sequence[Case]], None]:
    """Runs cases in place, their flags included."""

    def on_host(cases: Sequence[Case]) -> None:
        host.run(cases, tmp_path)

    return on_host
