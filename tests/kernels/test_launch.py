"""The launcher on a driver that records: addresses, streams, contexts, threads, errors."""

import random
import struct
import threading

import pytest
import torch
from torch import Tensor

from ropegraph.engines.cuda_rope.launch import RaggedLaunch
from ropegraph.engines.cuda_rope.params import job_word
from ropegraph.errors import GraphError, InternalError
from ropegraph.ir.ops import Rope, RopePair
from ropegraph.testing.inputs import normal
from tests.kernels import host
from tests.kernels.cases import Case, Ragged, case, like, offset_by

BF16 = torch.bfloat16


def plain(x: Tensor | None = None, y: Tensor | None = None, op: Rope | None = None) -> Case:
    x = normal((2, 4, 5, 128), BF16) if x is None else x
    y = like(x) if y is None else y
    return case(op or Rope(128, 0), input=x, freqs=torch.zeros(x.shape[2], 1, 1, 128), output=y)


def words(launch: host.Launch) -> tuple[int, ...]:
    return struct.unpack(f"{len(launch.params) // 8}Q", launch.params)


def test_addresses_are_patched_and_nothing_else() -> None:
    given, driver = plain(), host.Recorder()
    exe = host.launcher(given.step, driver)
    exe(given.env, 7)
    other = [normal((2, 4, 5, 128), BF16), given.env[1], like(given.env[2])]
    exe(other, 9)
    first, second = driver.launches
    assert (first.stream, second.stream) == (7, 9)
    assert first.function == second.function == host.VECTOR
    assert first.grid == second.grid
    for launch, env in ((first, given.env), (second, other)):
        for field, slot in (("x", 0), ("angles", 1), ("y", 2)):
            assert words(launch)[job_word(0, field)] == env[slot].data_ptr()
    changed = [
        i for i, (a, b) in enumerate(zip(words(first), words(second), strict=True)) if a != b
    ]
    assert changed == sorted((job_word(0, "x"), job_word(0, "y")))


@pytest.mark.parametrize("port", [0, 2])
def test_a_base_off_16_bytes_takes_the_other_kernel(port: int) -> None:
    given, driver = plain(), host.Recorder()
    exe = host.launcher(given.step, driver)
    env = list(given.env)
    env[port] = offset_by(env[port], 1)
    exe(env, 0)
    exe(given.env, 0)
    assert [launch.function for launch in driver.launches] == [host.SINGLE, host.VECTOR]


def test_two_rotations_take_one_launch() -> None:
    q, k = normal((2, 32, 5, 128), BF16), normal((2, 8, 5, 128), BF16)
    op = RopePair((Rope(128, 0, 0.5), Rope(128, 0)))
    freqs = torch.zeros(5, 1, 1, 128)
    given = case(
        op, input0=q, freqs0=freqs, input1=k, freqs1=freqs, output0=like(q), output1=like(k)
    )  # fmt: skip
    driver = host.Recorder()
    host.launcher(given.step, driver)(given.env, 3)
    (launch,) = driver.launches
    assert words(launch)[job_word(1, "y")] == given.at("output1").data_ptr()


def test_nothing_to_rotate_in_one_of_two() -> None:
    q, k = normal((2, 3, 5, 8), BF16), torch.empty(2, 0, 5, 8, dtype=BF16)
    freqs = torch.zeros(5, 1, 1, 8)
    given = case(
        RopePair((Rope(8, 0), Rope(8, 0))),
        input0=k, freqs0=freqs, input1=q, freqs1=freqs, output0=like(k), output1=like(q),
    )  # fmt: skip
    assert [job.x.slot for job in host.active_jobs(given.step)] == [given.step.slot("input1")]


def test_the_kernel_runs_in_its_own_context() -> None:
    """C33: whichever GPU is current in the calling thread, and it stays current."""
    given, driver = plain(), host.Recorder(context=99)
    host.launcher(given.step, driver)(given.env, 5)
    assert driver.contexts == [1, 99]
    assert driver.launches[0].stream == 5
    here = host.Recorder(context=1)
    host.launcher(given.step, here)(given.env, 5)
    assert here.contexts == []


class Failing(host.Recorder):
    def launchKernel(self, *given: int) -> None:  # type: ignore[override]
        raise RuntimeError("CUDA_ERROR_INVALID_VALUE: invalid argument")


def test_a_launch_error_raises_and_restores_the_context() -> None:
    given, driver = plain(), Failing(context=4)
    with pytest.raises(InternalError, match=r"'turn'.*CUDA_ERROR_INVALID_VALUE"):
        host.launcher(given.step, driver)(given.env, 0)
    assert driver.context == 4


def test_threads_do_not_share_parameters() -> None:
    """Each waits inside its launch until all have patched their addresses."""
    count = 4
    gate = threading.Barrier(count)

    class Waiting(host.Recorder):
        def launchKernel(self, *given: int) -> None:  # type: ignore[override]
            gate.wait(timeout=30)
            super().launchKernel(*given)

    driver = Waiting()
    cases = [plain() for _ in range(count)]
    exe = host.launcher(cases[0].step, driver)
    threads = [threading.Thread(target=exe, args=(c.env, i)) for i, c in enumerate(cases)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for launch in driver.launches:
        assert words(launch)[job_word(0, "x")] == cases[launch.stream].env[0].data_ptr()


def test_moving_pairs_in_place_needs_an_aligned_buffer() -> None:
    op = Rope(128, 0, interleaved=True, half_width=True)
    freqs = torch.zeros(5, 1, 1, 64)
    aligned, odd = normal((2, 4, 5, 128), BF16), offset_by(normal((2, 4, 5, 128), BF16), 1)
    for x, is_right in ((aligned, True), (odd, False)):
        given, driver = case(op, input=x, freqs=freqs, output=x), host.Recorder()
        exe = host.launcher(given.step, driver)
        if is_right:
            exe(given.env, 0)
            continue
        with pytest.raises(GraphError, match=r"'turn' changes the layout of pairs in place"):
            exe(given.env, 0)
        assert not driver.launches


def test_a_ragged_grid_covers_the_buffer_of_the_call() -> None:
    h, d = 3, 64
    offsets = torch.tensor([0, 2 * h * d, 5 * h * d], dtype=torch.int32)
    flag = torch.zeros(1, dtype=torch.int32)
    buffer = torch.zeros(7 * h * d, dtype=BF16)
    dim, stride = (2, h, 8, d), (8 * h * d, d, h * d, 1)
    x = Ragged(buffer, dim, stride, offsets)
    y = Ragged(like(buffer), dim, stride, offsets)
    given = case(Rope(64, 0), input=x, freqs=torch.zeros(8, 1, 1, 64), output=y)
    driver = host.Recorder()
    exe = host.launcher(given.step, driver, flag)
    assert isinstance(exe, RaggedLaunch)
    exe(given.env, 0)
    longer = list(given.env)
    for port in ("input", "output"):
        longer[given.step.slot(port)] = torch.zeros(700, h, d, dtype=BF16)
    exe(longer, 0)
    empty = list(given.env)
    for port in ("input", "output"):
        empty[given.step.slot(port)] = torch.zeros(0, dtype=BF16)
    exe(empty, 0)
    first, second = driver.launches
    assert words(first)[job_word(0, "flag")] == flag.data_ptr()
    assert words(first)[job_word(0, "x_room")] == 7 * h * d
    assert words(second)[job_word(0, "y_room")] == 700 * h * d
    assert first.grid[0] * 4 >= 7
    assert second.grid[0] * 4 >= 700
    flag.fill_(3)
    assert len(exe.faults()) == 2


def test_only_what_reads_integers_and_a_table_has_a_flag() -> None:
    x, freqs = normal((2, 4, 5, 128), BF16), torch.zeros(9, 1, 1, 128)
    starts = torch.zeros(2, dtype=torch.int32)
    made = {"inv_freq": torch.zeros(64), "start_positions": starts}
    of_inv_freq, of_cos_sin = Rope(128, 0, angles="inv_freq"), Rope(128, 0, angles="cos_sin")
    flag = torch.zeros(1, dtype=torch.int32)
    plans = [
        (case(of_inv_freq, input=x, **made, output=like(x)), False),
        (case(Rope(128, 0, cp_size=1), input=x, freqs=freqs, output=like(x)), False),
        (case(Rope(128, 0, cp_size=2), input=x[:, :, :4], freqs=freqs, output=x[:, :, :4]), False),
        (case(of_cos_sin, input=x, cos=freqs, sin=freqs, output=like(x)), False),
        (case(Rope(128, 0), input=x, freqs=freqs, start_positions=starts, output=like(x)), True),
        (case(of_inv_freq, input=x[:1], inv_freq=made["inv_freq"],
              cu_seqlens=torch.tensor([0, 5]), output=like(x[:1])), True),
    ]  # fmt: skip
    for given, has_flag in plans:
        driver = host.Recorder()
        exe = host.launcher(given.step, driver, flag)
        exe(given.env, 0)
        assert (exe.flag is not None) == has_flag
        (launch,) = driver.launches
        assert words(launch)[job_word(0, "flag")] == (flag.data_ptr() if has_flag else 0)
        for field, port in (
            ("sines", "sin"),
            ("ids", "start_positions"),
            ("offsets", "cu_seqlens"),
        ):
            if given.step.has(port):
                assert words(launch)[job_word(0, field)] == given.at(port).data_ptr()
            else:
                assert words(launch)[job_word(0, field)] == 0


def test_faults_say_what_is_wrong() -> None:
    given = case(
        Rope(8, 0), input=normal((1, 1, 5, 8), BF16), freqs=torch.zeros(5, 1, 1, 8),
        position_ids=torch.zeros(1, 5, dtype=torch.int64), output=normal((1, 1, 5, 8), BF16),
    )  # fmt: skip
    exe = host.launcher(given.step, host.Recorder(), torch.tensor([4 + 8], dtype=torch.int32))
    assert exe.faults() == (
        "a position lies outside of the table",
        "the length of a sequence is no multiple of 2 cp_size",
    )


def test_packing_is_the_same_for_any_seed() -> None:
    """Nothing of a call leaks into the block: two launchers of one step pack the same bytes."""
    random.seed(1)
    given = plain()
    driver = host.Recorder()
    for _ in range(2):
        host.launcher(given.step, driver)(given.env, 0)
    assert driver.launches[0].params == driver.launches[1].params
