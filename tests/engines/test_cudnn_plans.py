"""Plans, handles and workspaces of the cuDNN engine, as far as they go without a GPU."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ropegraph.engines.cudnn_sdpa import frontend, handles, places, plans, version
from ropegraph.engines.cudnn_sdpa.engine import CudnnSdpa
from ropegraph.engines.cudnn_sdpa.places import places_of
from ropegraph.engines.cudnn_sdpa.recipe import Recipe, recipe_of
from ropegraph.engines.cudnn_sdpa.repair import repair_of
from ropegraph.errors import UnsupportedError
from ropegraph.ir.ops import Sdpa, SdpaBackward
from tests.engines.cudnn_steps import H200, lengths, packed, step
from tests.engines.cudnn_steps import frontend as installed_frontend


class FakeFrontend:
    """Counts handles and remembers their streams."""

    def __init__(self) -> None:
        self.made: list[SimpleNamespace] = []

    def create_handle(self) -> SimpleNamespace:
        self.made.append(SimpleNamespace(stream=0))
        return self.made[-1]

    def set_stream(self, handle: SimpleNamespace, stream: int) -> None:
        handle.stream = stream


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(handles, "_free", {})
    monkeypatch.setattr(handles, "_mine", handles._Mine())
    return FakeFrontend()


def test_a_thread_keeps_one_handle_a_device_and_the_stream_is_set_at_every_call(fake: Any) -> None:
    first = handles.handle_of(fake, 0, 7)
    assert first.stream == 7
    assert handles.handle_of(fake, 0, 9) is first
    assert first.stream == 9
    assert handles.handle_of(fake, 1, 9) is not first


def test_threads_do_not_share_a_handle_and_leave_theirs_when_they_end(fake: Any) -> None:
    mine = handles.handle_of(fake, 0, 0)
    found: list[Any] = []

    def work() -> None:
        found.append(handles.handle_of(fake, 0, 3))

    for _ in range(3):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert all(handle is not mine for handle in found)
    assert len(fake.made) == 2, "a thread that ended leaves its handle to the next"


def test_a_plan_is_built_once_and_the_oldest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Recipe] = []
    monkeypatch.setattr(plans, "MOST_PLANS", 2)
    monkeypatch.setattr(plans, "build", lambda recipe, name: built.append(recipe) or object())
    plans.forget_plans()
    a, b, c = (recipe_of(step(Sdpa(), s_q=n), H200) for n in (8, 16, 24))
    assert plans.plan_of(a, "x") is plans.plan_of(a, "y")
    plans.plan_of(b, "x")
    plans.plan_of(a, "x")  # b is now the one that was not used for longest
    plans.plan_of(c, "x")
    plans.plan_of(a, "x")
    assert built == [a, b, c]
    plans.plan_of(b, "x")
    assert built == [a, b, c, b]
    plans.forget_plans()


def test_without_a_backend_compile_says_why_in_the_words_of_the_backend() -> None:
    if torch.cuda.is_available():
        pytest.skip("this is about a machine without a GPU")
    installed_frontend()
    with pytest.raises(UnsupportedError, match="cuDNN has no plan") as caught:
        CudnnSdpa().compile(step(Sdpa()), H200)
    assert caught.value.__cause__ is not None
    assert str(caught.value.__cause__) in str(caught.value)
    assert list(caught.value.reasons) == ["cudnn.sdpa"]


def test_an_old_or_missing_frontend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        frontend, "import_module", lambda name: SimpleNamespace(__version__="1.18.0")
    )
    with pytest.raises(ImportError, match=r"1\.32 or newer, this is 1\.18\.0"):
        frontend.load()

    def missing(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'cudnn'")

    monkeypatch.setattr(frontend, "import_module", missing)
    with pytest.raises(ImportError, match=r"needs nvidia-cudnn-frontend 1\.32 or newer"):
        frontend.load()


def test_the_version_is_asked_without_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    for given, expected in (("1.32.0", 91900), ("1.31.2", 0), ("2.0", 91900)):
        monkeypatch.setattr(version, "version", lambda name, given=given: given)
        version.installed.cache_clear()
        assert version.installed() == expected
    version.installed.cache_clear()


def test_the_workspace_holds_cudnns_part_then_outputs_nobody_reads() -> None:
    made = step(SdpaBackward())
    recipe = recipe_of(replace(made, node=replace(made.node, outputs={"dQ": "dQ"})), H200)
    uids = [uid for uid, _, _ in recipe]
    placed = places_of(recipe, uids, cudnn_bytes=1000)
    starts = [start for _, start in placed.in_scratch]
    size = 2 * 2 * 264 * 64 * 2
    assert starts == [1024, 1024 + size]
    assert placed.workspace_bytes == 1024 + 2 * size
    assert {slot for _, slot in placed.buffers} == {
        made.slot(p) for p in ("q", "k", "v", "o", "dO", "stats", "dQ")
    }


def test_pointers_take_the_order_of_the_uids_and_skip_what_is_not_bound() -> None:
    made = step(Sdpa())
    recipe = recipe_of(made, H200)
    by_port = {operand.port: uid for uid, operand, _ in recipe}
    placed = places_of(recipe, [by_port["O"], by_port["k"], by_port["q"]], cudnn_bytes=0)
    assert sorted(placed.buffers) == [
        (0, made.slot("O")), (1, made.slot("k")), (2, made.slot("q"))
    ]  # fmt: skip
    assert placed.workspace_bytes == 256


def test_stats_of_minus_infinity_become_plus_infinity_in_a_copy() -> None:
    made = step(SdpaBackward(), extra={"bias": packed("bias", (1, 4, 200, 264))})
    recipe = recipe_of(made, H200)
    placed = places_of(recipe, [uid for uid, _, _ in recipe], cudnn_bytes=256)
    repair = repair_of(recipe, placed)
    assert repair is not None
    assert repair.fills == ()
    scratch = torch.zeros(placed.workspace_bytes, dtype=torch.uint8)
    stats = torch.randn(2, 4, 200, 1)
    stats[0, 1, 5], stats[1, 2, 7], stats[1, 0, 0] = -torch.inf, torch.nan, torch.inf
    env = [torch.empty(0)] * len(made.slots)
    env[made.slot("stats")] = before = stats.clone()
    repair(env, repair.rooms(scratch))
    start = placed.copies["stats"]
    copy = scratch[start:][: 4 * stats.numel()].view(torch.float32).view(stats.shape)
    expected = stats.masked_fill(stats == -torch.inf, torch.inf)
    torch.testing.assert_close(copy, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(before, stats, rtol=0, atol=0, equal_nan=True)


def test_lengths_reach_cudnn_cut_to_their_tensors_and_rows_of_no_sequence_are_filled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(places, "_offsets", lambda operand, index: torch.empty(0))
    made = step(Sdpa(padding=True), extra=lengths(2))
    recipe = recipe_of(made, H200)
    placed = places_of(recipe, [uid for uid, _, _ in recipe], cudnn_bytes=0)
    repair = repair_of(recipe, placed)
    assert repair is not None
    env = [torch.full((2, 3), torch.nan) for _ in made.slots]
    env[made.slot("seq_len_q")] = torch.tensor([201, 7], dtype=torch.int32).view(2, 1, 1, 1)
    env[made.slot("seq_len_kv")] = torch.tensor([-1, 10**9], dtype=torch.int32).view(2, 1, 1, 1)
    scratch = torch.zeros(placed.workspace_bytes, dtype=torch.uint8)
    repair(env, repair.rooms(scratch))
    for port, expected in (("seq_len_q", [200, 7]), ("seq_len_kv", [0, 264])):
        start = placed.copies[port]
        assert scratch[start : start + 8].view(torch.int32).tolist() == expected
    assert (env[made.slot("O")] == 0).all()
    assert env[made.slot("Stats")].isnan().all(), "a dense Stats is written whole by the kernel"
    assert env[made.slot("q")].isnan().all()


def test_nothing_is_repaired_where_no_row_can_be_hidden() -> None:
    for op in (Sdpa(right_bound=0), SdpaBackward(right_bound=0)):
        recipe = recipe_of(step(op), H200)
        placed = places_of(recipe, [uid for uid, _, _ in recipe], cudnn_bytes=0)
        assert repair_of(recipe, placed) is None
