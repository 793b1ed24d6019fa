"""Sources of angles, positions and numerics on a GPU: the tests of tests/kernels, run there."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.gpu.test_cuda_rope import build, on_gpu, stream
from tests.kernels.cases import Case, Run
from tests.kernels.test_host_cache import (  # noqa: F401
    test_a_part_alone_and_a_pair,
    test_three_parts_in_one_launch,
    test_writes_alone_in_one_launch,
)
from tests.kernels.test_host_groups import test_forward_adjoint_and_in_place  # noqa: F401
from tests.kernels.test_host_numerics import (  # noqa: F401
    test_exact_angles_are_within_a_unit_of_fp32,
    test_hugging_face_bit_for_bit,
    test_nemo_bit_for_bit,
)
from tests.kernels.test_host_positions import (  # noqa: F401
    test_a_made_angle_takes_any_position,
    test_packed_sequences_equal_a_loop_over_them,
    test_positions_of_ranks,
    test_positions_outside_the_table_are_nan_and_flagged,
    test_ragged_lengths_that_cannot_be_cut,
    test_ranks_together_equal_one,
    test_rows_of_no_sequence_become_zero,
    test_two_rotations_with_positions_of_their_own,
    test_wrong_bounds_are_never_followed,
)
from tests.kernels.test_host_sources import test_every_kind_of_positions  # noqa: F401

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def storage(tensor: Tensor) -> Tensor:
    """All bytes that lie under a tensor."""
    empty = torch.tensor([], dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage())


@pytest.fixture
def run() -> Run:
    """Runs cases on the GPU; what it wrote goes back into their tensors."""
    pytest.importorskip("cupy")

    def on_device(cases: Sequence[Case]) -> None:
        for given in cases:
            exe, there = build(given), on_gpu(given)
            exe(there.env, stream())
            torch.cuda.synchronize()
            for mine, theirs in zip(given.env, there.env, strict=True):
                storage(mine).copy_(storage(theirs))
            flag = getattr(exe, "flag", None)
            if flag is not None:
                given.flag.copy_(flag)

    return on_device
