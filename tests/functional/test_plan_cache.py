"""Never a stale plan: whatever a graph is recorded from changes the plan that is found."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from ropegraph.functional import attention, building, dispatch, eager, qkv_attention, rope
from ropegraph.functional.arguments import angles
from ropegraph.functional.attend import ATTENTION
from ropegraph.functional.kept import Kept
from ropegraph.functional.kind import TABLES, Kind
from ropegraph.functional.norm_turn import NORM_ROPE
from ropegraph.functional.packed import QKV_ATTENTION
from ropegraph.functional.turn import ROPE
from tests.functional.cases import table

S, D = 8, 8
LONG = S + 4
IDS = torch.arange(3, S + 3)[None]
STARTS = torch.tensor([1, 3])
LENGTHS = torch.tensor([5, 8])


def data(h: int, seed: int = 0, s: int = S) -> Tensor:
    return torch.randn(2, h, s, D, generator=torch.Generator().manual_seed(seed))


def as_packed(x: Tensor) -> Tensor:
    """The same numbers as one of three tensors side by side."""
    room = torch.zeros(x.shape[0], x.shape[2], 3, x.shape[1], D)
    room[:, :, 1] = x.transpose(1, 2)
    return room[:, :, 1].transpose(1, 2)


ROTATION: dict[str, dict[str, Any]] = {
    "freqs": {"freqs": table(LONG, D) * 0.5},
    "cos": {"freqs": None, "cos": table(LONG, D).cos(), "sin": table(LONG, D).sin()},
    "sin": {"freqs": None, "cos": table(LONG, D), "sin": table(LONG, D)},
    "cos_sin": {"freqs": None, "cos_sin": torch.cat((table(LONG, D),) * 2, -1)},
    "inv_freq": {"freqs": None, "inv_freq": torch.rand(D // 2)},
    "position_ids": {"position_ids": IDS},
    "start_positions": {"start_positions": STARTS},
    "rope_dim": {"rope_dim": 4, "rope_offset": 4, "freqs": table(LONG, 4)},
    "rope_offset": {"rope_dim": 4, "rope_offset": 0, "freqs": table(LONG, 4)},
    "interleaved": {"interleaved": True, "table_layout": "first_half"},
    "interleaved_output": {"interleaved_output": True, "table_layout": "first_half"},
    "attention_factor": {"attention_factor": 1.5},
    "inverse": {"inverse": True},
    "half_width": {"half_width": True, "freqs": table(LONG, D)[:, : D // 2] * 0.5},
    "table_layout": {"table_layout": "full"},
    "angle_precision": {
        "freqs": None, "inv_freq": torch.rand(D // 2), "angle_precision": "exact",
        "position_ids": IDS * 100_003,
    },
    "numerics": {
        "freqs": None, "cos": table(LONG, D).cos(), "sin": table(LONG, D).sin(), "numerics": "hf",
    },
}  # fmt: skip
SDPA: dict[str, dict[str, Any]] = {
    "seq_len_q": {"seq_lens": (LENGTHS, torch.tensor([8, 8]))},
    "seq_len_kv": {"seq_lens": (torch.tensor([8, 8]), LENGTHS)},
    "bias": {"bias": torch.arange(8.0).expand(1, 1, 1, 8)},
    "sink": {"sink": torch.ones(4)},
    "seed": {"dropout_p": 0.25},
    "dropout_p": {"dropout_p": 0.5},
    "scale": {"scale": 0.25},
    "left": {"is_causal": True, "window": 2},
    "right": {"is_causal": True},
    "bottom_right": {"causal_bottom_right": True},
    "alibi": {"alibi": True},
    "softcap": {"softcap": 0.5},
    "fold": {"fold": "symmetric"},
    "fold_log2": {"fold": "q", "fold_log2": True},
    "recompute_rope": {"recompute_rope": True},
    "deterministic": {"deterministic": True},
}
WEIGHTS = torch.linspace(0.5, 1.5, D), torch.linspace(-1, 1, D)
NORMS: dict[str, dict[str, Any]] = {
    "q_norm": {"q_norm": WEIGHTS[0], "k_norm": torch.ones(D)},
    "k_norm": {"q_norm": torch.ones(D), "k_norm": WEIGHTS[1]},
    "norm_eps": {"q_norm": WEIGHTS[0], "k_norm": WEIGHTS[1], "norm_eps": 0.3},
}
CHANGES: dict[str, tuple[Kind, dict[str, dict[str, Any]]]] = {
    "rope": (
        ROPE,
        ROTATION
        | {
            "output_scale": {"output_scale": 0.5},
            "cu_seqlens": {"one": True, "cu_seqlens": torch.tensor([0, 3, 8])},
            "cp_size": {"cp_size": 2, "freqs": table(2 * LONG, D)},
            "cp_rank": {"cp_size": 2, "cp_rank": 1, "freqs": table(2 * LONG, D)},
            "x": {"packed": True},
        },
    ),
    "attention": (
        ATTENTION,
        ROTATION
        | SDPA
        | NORMS
        | {
            "k_position_ids": {"position_ids": (None, IDS)},
            "k_start_positions": {"start_positions": (None, STARTS)},
            "own_k_positions": {"position_ids": (IDS, None)},
            "cu_seqlens": {"one": True, "cu_seqlens": torch.tensor([0, 3, 8])},
            "max_seqlen": {"one": True, "cu_seqlens": torch.tensor([0, 3, 8]), "max_seqlen": 5},
            "q": {"packed": True},
            "k": {"keys": 6},
            "v": {"double": True},
        },
    ),
    "qkv_attention": (
        QKV_ATTENTION,
        ROTATION
        | SDPA
        | NORMS
        | {
            "split": {"split": (6, 1, 1)},
            "by_groups": {"by_groups": True, "freqs": table(LONG, 2)},
            "qkv": {"packed": True},
            "in_place": {"in_place": True},
        },
    ),
    "norm_rope": (
        NORM_ROPE,
        ROTATION
        | {
            "x": {"packed": True},
            "weight": {"weight": WEIGHTS[1]},
            "norm_eps": {"norm_eps": 0.3},
            "part": {"part": "k_norm"},
            "cu_seqlens": {"one": True, "cu_seqlens": torch.tensor([0, 3, 8])},
        },
    ),
}
FIELDS = [(name, field) for name, (_, fields) in CHANGES.items() for field in fields]


def call(name: str, changes: dict[str, Any]) -> list[Tensor]:
    """The result and all gradients of one call."""
    options = {"freqs": table(LONG, D), **changes}
    flags = {n: options.pop(n, None) for n in ("one", "packed", "double", "keys", "deterministic")}
    heads = {"attention": [4, 4, 4], "qkv_attention": [8]}.get(name, [4])
    xs = [data(h, i, flags["keys"] or S if i else S) for i, h in enumerate(heads)]
    xs = [x[:1] if flags["one"] else x for x in xs]
    xs[0] = as_packed(xs[0]) if flags["packed"] else xs[0]
    xs = [(x.double() if flags["double"] else x).requires_grad_() for x in xs]
    torch.use_deterministic_algorithms(bool(flags["deterministic"]))
    torch.manual_seed(0)
    try:
        if name == "rope":
            o = rope(xs[0], **options)
        elif name == "norm_rope":
            o = norm_rope(xs[0], **options)
        elif name == "attention":
            o = attention(*xs, **options)
        else:
            options = {"split": (4, 2, 2), "by_groups": False, **options}
            o = qkv_attention(xs[0].transpose(1, 2) * 1, **options)
        return [o, *torch.autograd.grad(o.square().sum(), xs)]
    finally:
        torch.use_deterministic_algorithms(False)


def norm_rope(
    x: Tensor,
    weight: Tensor = WEIGHTS[0],
    norm_eps: float = 1e-6,
    part: str = "q_norm",
    **options: Any,
) -> Tensor:
    """What attention over packed sequences does with Q and K."""
    given = {
        "rope_dim": 0, "interleaved": False, "attention_factor": 1.0, "inverse": False,
        "half_width": False, "angle_precision": "float32", "numerics": "fp32", **options,
    }  # fmt: skip
    tables = angles(*(given.get(name) for name in TABLES))
    positions = (given.get(name) for name in NORM_ROPE.optional[len(TABLES) :])
    turn = (given.get(name) for name, _ in NORM_ROPE.attributes[:-2])
    return dispatch.call(
        NORM_ROPE, (x, weight, *tables, *positions), (*turn, norm_eps, part)
    )  # fmt: skip


@contextmanager
def no_cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every plan is built anew."""
    with monkeypatch.context() as patch:
        patch.setattr(eager, "_calls", Kept[Any, Any](8))
        patch.setattr(building, "_built", getattr(building, "_build"))  # noqa: B009
        yield


@pytest.mark.parametrize("name", CHANGES)
def test_every_field_is_tried(name: str) -> None:
    kind, fields = CHANGES[name]
    assert set(fields) == {*kind.slots, *(attribute for attribute, _ in kind.attributes)}


@pytest.mark.parametrize(("name", "field"), FIELDS)
def test_a_changed_field_is_as_a_fresh_build(
    name: str, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = CHANGES[name][1][field]
    with no_cache(monkeypatch):
        want = call(name, changes)
        want_base = call(name, {})
    for order in ([{}, changes], [changes, {}]):
        monkeypatch.setattr(eager, "_calls", Kept[Any, Any](64))
        for given in order:
            got = call(name, given)
            for g, w in zip(got, want if given is changes else want_base, strict=True):
                assert g.dtype is w.dtype
                assert torch.equal(g, w)


def test_weights_of_norms_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what they are, not by what they hold; norm_eps by its value."""
    monkeypatch.setattr(eager, "_calls", Kept[Any, Any](64))
    x = data(4).bfloat16()
    room = torch.randn(D, 2)
    forms = (
        room[:, 0], room[:, 1].clone(), room[:, 1].bfloat16(), torch.nn.Parameter(room[:, 0]),
    )  # fmt: skip
    for w in (*forms, forms[1] * 2, forms[2] * 2):
        attention(x, x, x, table(LONG, D), q_norm=w, k_norm=forms[1])
    assert len(getattr(eager, "_calls")) == 4  # noqa: B009
    one = attention(x, x, x, table(LONG, D), q_norm=forms[1], k_norm=forms[1])
    two = attention(x, x, x, table(LONG, D), q_norm=forms[1], k_norm=forms[1], norm_eps=0.5)
    assert not torch.equal(one, two)


def test_forms_of_tensors_are_told_apart() -> None:
    x, freqs = data(4), table(LONG, D)
    keys: set[int] = set()
    for like in (x, as_packed(x), x.double(), x.bfloat16(), x[:1], x[:, :2], x[:, :, :5]):
        for requires_grad in (False, True):
            given = like.detach().requires_grad_(requires_grad)
            slots = (given, freqs[:, None, None], *(None,) * 7)
            attributes = (0, None, False, None, 1.0, False, False, None, "float32", "fp32", 1, 1, 0)
            found = eager.find(ROPE, slots, attributes)
            assert found is eager.find(ROPE, slots, attributes)
            keys.add(id(found))
    assert len(keys) == 14


def test_two_threads_and_two_shapes_in_turn() -> None:
    shapes = [data(4), data(4, 1, 5)]
    want = [_step(x) for x in shapes]
    wrong: list[int] = []

    def work(start: int) -> None:
        for i in range(30):
            one = (start + i) % 2
            if not all(map(torch.equal, _step(shapes[one]), want[one])):
                wrong.append(i)

    run_all([lambda: work(0), lambda: work(1)])
    assert not wrong


def _step(x: Tensor) -> list[Tensor]:
    leaf = x.detach().requires_grad_()
    o = attention(leaf, leaf, leaf, table(LONG, D), is_causal=True)
    return [o.detach(), *torch.autograd.grad(o.sum(), leaf)]


def test_threads_that_need_one_new_plan_build_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Any] = []
    make: Callable[[Any], Any] = getattr(building, "_build")  # noqa: B009

    def build(job: Any) -> Any:
        built.append(job)
        return make(job)

    monkeypatch.setattr(building, "_build", build)
    x, freqs = torch.randn(1, 3, 11, D), table(11, D)
    run_all([lambda: rope(x, freqs, output_scale=0.123)] * 4)
    assert len(built) == 1


def run_all(works: list[Callable[[], Any]]) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_what_is_kept_is_bounded_and_what_is_used_stays() -> None:
    kept = Kept[int, int](8)
    for i in range(100):
        kept.put(i, i)
        assert kept.get(0) == 0
        assert len(kept) <= 8
    assert kept.get(50) is None
    assert kept.get(99) == 99
