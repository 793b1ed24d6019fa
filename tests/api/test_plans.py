"""Plans kept for callers that record on the fly: what the key holds, how many, and threads."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from ropegraph.api import plans
from ropegraph.api.plans import Form, Gradient, Plan, Recording, form_of, plan
from ropegraph.errors import GraphError

F32 = torch.float32


def turn(graph: Any, tensors: dict[str, Any], **attributes: Any) -> dict[str, Any]:
    x = tensors.pop("x")
    return {"y": graph.rope(x, **tensors, **attributes)}


def other_turn(graph: Any, tensors: dict[str, Any], **attributes: Any) -> dict[str, Any]:
    return turn(graph, tensors, **attributes)


X, FREQS = torch.randn(2, 3, 5, 8), torch.randn(5, 1, 1, 8)
STARTS = torch.zeros(2, dtype=torch.int32)


def recording(
    x: torch.Tensor = X,
    freqs: torch.Tensor = FREQS,
    stride: tuple[int, ...] = (120, 40, 8, 1),
    recipe: Any = turn,
    starts: torch.Tensor | None = None,
    **attributes: Any,
) -> Recording:
    given = {"x": x, "freqs": freqs} | ({} if starts is None else {"start_positions": starts})
    forms = tuple((name, form_of(t)) for name, t in given.items())
    return Recording(recipe, forms, (("y", stride),), tuple(attributes.items()))


LONG = torch.randn(9, 1, 1, 8)
DIFFERENT = {
    "nothing": recording(),
    "shape": recording(X[:1], stride=(120, 40, 8, 1)),
    "stride": recording(X.transpose(1, 2).contiguous().transpose(1, 2)),
    "type": recording(X.bfloat16()),
    "rows of the table": recording(freqs=LONG),
    "strides of the table": recording(freqs=torch.randn(5, 1, 1, 16)[..., ::2]),
    "strides of the result": recording(stride=(120, 8, 24, 1)),
    "an attribute": recording(output_scale=0.5),
    "its value": recording(output_scale=0.25),
    "an optional tensor": recording(freqs=LONG, starts=STARTS),
    "its type": recording(freqs=LONG, starts=STARTS.long()),
    "the recipe": recording(recipe=other_turn),
}


def test_every_part_of_a_key_counts() -> None:
    made = {name: plan(key) for name, key in DIFFERENT.items()}
    assert len({id(p) for p in made.values()}) == len(DIFFERENT)
    assert all(plan(key) is made[name] for name, key in DIFFERENT.items())
    elsewhere = Form((2, 3, 5, 8), X.stride(), F32, torch.device("meta"))
    assert Recording(turn, (("x", elsewhere),), ()) != Recording(turn, (("x", form_of(X)),), ())


def test_values_and_addresses_do_not_count() -> None:
    assert plan(recording(X.clone(), FREQS + 1)) is plan(recording())


def test_a_gradient_takes_the_strides_that_come() -> None:
    forward = recording()
    for grad in (X, X.transpose(1, 2).contiguous().transpose(1, 2), X[:, :1].expand(X.shape)):
        made = plan(Gradient(forward, ("x",), (("y", form_of(grad)),)))
        assert made.saved == ("freqs",)
        got = made({"dy": grad, "freqs": FREQS})["dx"]
        want = plan(Gradient(forward, ("x",), (("y", form_of(X)),)))
        assert torch.equal(got, want({"dy": grad.contiguous(), "freqs": FREQS})["dx"])
        assert got.stride() == X.stride()


def test_outputs_are_new_or_those_that_are_given() -> None:
    made = plan(recording())
    one, two = (made({"x": X, "freqs": FREQS})["y"] for _ in range(2))
    assert one.data_ptr() != two.data_ptr()
    own = torch.empty_like(X)
    assert made({"x": X, "freqs": FREQS}, {"y": own})["y"] is own
    assert torch.equal(own, one)


def test_what_cannot_be_recorded_is_not_kept() -> None:
    for _ in range(2):
        with pytest.raises(GraphError, match="rope_dim=5"):
            plan(recording(rope_dim=5))


def test_the_number_of_plans_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(plans, "_recorded", lambda key: made.append(key) or Graphless())
    monkeypatch.setattr(plans, "Plan", lambda graph: graph)
    keys = [recording(output_scale=2.0 + i) for i in range(plans.LIMIT + 1)]
    for key in keys:
        plan(key)
    plan(keys[-1])
    assert len(made) == len(keys)
    plan(keys[0])
    assert made[-1] is keys[0]


class Graphless:
    def build(self) -> None: ...


def test_threads_get_one_plan() -> None:
    key, found = recording(output_scale=0.125), list[Plan]()
    barrier = threading.Barrier(8)

    def run() -> None:
        barrier.wait()
        made = plan(key)
        for _ in range(20):
            y = made({"x": X, "freqs": FREQS})["y"]
            assert torch.equal(y, made({"x": X, "freqs": FREQS})["y"])
        found.append(made)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(map(id, found))) == 1
