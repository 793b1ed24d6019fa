"""Captured launches with a capture that is none: which of them is launched for which buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ropegraph.execution import replay
from ropegraph.execution.replay import KEPT, Replays, Shortcuts
from ropegraph.execution.signature import Signature, addresses_of, forms_of


class Graph:
    """What stands for a captured graph: it knows the environment that it was made from."""

    def __init__(self, env: list[Any]) -> None:
        self.graphExec = env


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    state = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state[0])
    monkeypatch.setattr(replay, "current_stream", lambda index: 0)
    return state


class Recorded:
    """Replays whose launches are written down: ("direct" or "replay", environment)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple[str, Any]] = []
        self.replays = Replays(
            lambda env, stream: self.log.append(("direct", env)), torch.device("cpu"), 0, [1]
        )

        def capture(env: list[Any]) -> Graph:
            self.replays.launch = lambda made, stream: self.log.append(("replay", made))
            return Graph(env)

        monkeypatch.setattr(self.replays, "_capture", capture)
        self.shortcuts = Shortcuts()

    def execute(self, pack: dict[str, Tensor]) -> None:
        if self.shortcuts(pack):
            return
        bound = list(pack.values())
        self.replays(bound, Signature(addresses_of(bound), forms_of(bound)))
        self.shortcuts.add(pack, self.replays)


def pack(**more: Tensor) -> dict[str, Tensor]:
    return {"x": torch.randn(3), "y": torch.empty(3), **more}


def is_of(env: Any, given: dict[str, Tensor]) -> bool:
    return all(a is b for a, b in zip(env, given.values(), strict=True))


def test_after_a_capture_of_the_caller_the_right_buffers_are_launched(monkeypatch, capturing):
    made, a, b = Recorded(monkeypatch), pack(), pack()
    for given in (a, b, a, b):
        made.execute(given)
    capturing[0] = True
    made.execute(a)
    assert made.log[-1][0] == "direct"
    capturing[0] = False
    for given in (a, b, a):
        made.execute(given)
        assert made.log[-1][0] == "replay"
        assert is_of(made.log[-1][1], given)
        before = given["y"]._version
        assert made.shortcuts(given)
        assert given["y"]._version > before
        assert is_of(made.log[-1][1], given)


def test_packs_in_turn_each_take_their_shortcut(monkeypatch, capturing):
    made, packs = Recorded(monkeypatch), [pack() for _ in range(5)]
    for _ in range(2):
        for given in packs:
            made.execute(given)
    for given in packs * 2:
        assert made.shortcuts(given)
        assert is_of(made.log[-1][1], given)
    assert not made.shortcuts(pack())


def test_the_oldest_capture_is_forgotten(monkeypatch, capturing):
    made, packs = Recorded(monkeypatch), [pack() for _ in range(KEPT + 1)]
    for given in packs:
        for _ in range(3):
            made.execute(given)
    assert not made.shortcuts(packs[0])
    assert all(map(made.shortcuts, packs[1:]))
    made.execute(packs[0])
    assert made.log[-1][0] == "direct"


def test_the_same_places_in_another_form_are_another_set(monkeypatch, capturing):
    made, a = Recorded(monkeypatch), pack()
    for _ in range(3):
        made.execute(a)
    other = {**a, "x": a["x"].view(torch.int32)}
    assert not made.shortcuts(other)
    made.execute(other)
    assert made.log[-1][0] == "direct"
    assert is_of(made.log[-1][1], other)


@pytest.mark.parametrize("odd", [None, [1], {"x": 3}, {"x": torch.eye(2).to_sparse()}])
def test_what_is_no_pack_of_plain_tensors_takes_no_shortcut(monkeypatch, capturing, odd):
    made, a = Recorded(monkeypatch), pack()
    for _ in range(3):
        made.execute(a)
    assert not made.shortcuts(odd)


def test_packs_of_more_and_fewer_entries(monkeypatch, capturing):
    made, a = Recorded(monkeypatch), pack()
    longer = {**a, "ignored": torch.randn(2)}
    for given in (a, a, a, longer, longer, longer, a):
        made.execute(given)
        assert is_of(made.log[-1][1], given)


def test_an_entry_without_memory_gives_no_shortcut(monkeypatch, capturing):
    made, a = Recorded(monkeypatch), pack()
    made.execute(a)
    made.execute(a)
    odd = {**a, "ignored": torch.eye(2).to_sparse()}
    made.shortcuts.add(odd, made.replays)
    assert not made.shortcuts(odd)
