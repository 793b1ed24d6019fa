"""A graph as JSON: what comes back is what went in, to the last bit, or a GraphError."""

import contextlib
import hashlib
import json
import math
import struct
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropegraph.dtypes import DType
from ropegraph.errors import GraphError
from ropegraph.ir import contract, graph, ops, score_mod
from ropegraph.ir.contract import INV_LN2
from ropegraph.ir.graph import Graph
from ropegraph.ir.ops import Scale
from ropegraph.ir.serialize import dumps, key, loads
from tests.ir.build import Build, forward
from tests.ir.zoo import zoo

FILE = dumps(zoo())


def test_every_field_comes_back():
    assert loads(FILE) == zoo()
    assert loads(FILE.decode()) == zoo()
    assert str(loads(FILE)) == str(zoo())
    assert key(loads(FILE)) == key(zoo())
    assert dumps(loads(FILE)) == FILE
    assert list(loads(FILE).values) == list(zoo().values), "the order of values is kept"


def test_what_comes_back_is_frozen_and_made_of_tuples():
    back = loads(FILE)
    assert isinstance(back.nodes, tuple)
    assert isinstance(back.values["q"].dim, tuple)
    assert isinstance(back.visible, frozenset)
    assert back.values["q"].dtype is DType.FLOAT


def bits(x: float) -> bytes:
    return struct.pack("<d", x)


@given(st.floats(allow_nan=False, allow_infinity=False))
@settings(max_examples=150, deadline=None)
def test_floats_keep_every_bit(number: float):
    b = Build()
    b.tensor("x", 1, 1, 2, 4)
    b.scale("s", "x", "y", number)
    (node,) = loads(dumps(b.graph("y"))).nodes
    assert isinstance(node.attrs, Scale)
    assert bits(node.attrs.factor) == bits(number)


@pytest.mark.parametrize("number", [-0.0, 5e-324, math.pi, INV_LN2, 1 / 3, 1e300, -math.inf])
def test_floats_that_text_might_lose(number: float):
    program = score_mod.ScoreProgram(
        (score_mod.Instruction("add", (score_mod.Ref(-1), number)),), score_mod.Ref(0)
    )
    b = forward()
    b.nodes[2] = b.nodes[2].with_attrs(score_mod=program)
    back = loads(dumps(b.graph("o"))).nodes[2].attrs.score_mod
    assert bits(back.instructions[0].args[1]) == bits(number)


@given(st.text(min_size=1, max_size=12), st.text(min_size=1, max_size=12))
@settings(max_examples=60, deadline=None)
def test_names_of_any_letters(graph_name: str, value_name: str):
    if value_name == "y":
        return
    b = Build()
    b.tensor(value_name, 1, 1, 2, 4)
    b.scale("$", value_name, "y", 2.0)
    g = b.graph("y", name=graph_name)
    assert loads(dumps(g)) == g


@pytest.mark.parametrize("name", ["$", "$set", "$map", "$dtype", "Graph", "\ud800"])
def test_names_that_look_like_the_format(name: str):
    b = Build()
    b.tensor(name, 1, 1, 2, 4)
    b.scale(name, name, "y", 2.0)
    assert loads(dumps(b.graph("y", name=name))) == b.graph("y", name=name)


def file(**changes: Any) -> str:
    return json.dumps({**json.loads(FILE), **changes})


def sealed(body: Any) -> str:
    """A file whose checksum is right, whatever is in it."""
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({"format": "ropegraph", "version": 1, "sha256": digest, "graph": body})


def body(**changes: Any) -> dict[str, Any]:
    return {**json.loads(FILE)["graph"], **changes}


BAD = {
    "empty": (b"", "not a serialized ropegraph graph"),
    "text": ("hello", "not a serialized ropegraph graph"),
    "other bytes": (b"\xff\xfe\x00", "not a serialized ropegraph graph"),
    "a number": ("5", "not a serialized ropegraph graph"),
    "a list": ("[1, 2]", "not a serialized ropegraph graph"),
    "no field": ("{}", "not a serialized ropegraph graph"),
    "none": (None, "not a serialized ropegraph graph"),
    "cut off": (FILE[: len(FILE) // 2], "not a serialized ropegraph graph"),
    "another format": (file(format="onnx"), "'onnx' version 1; use 'ropegraph' version 1"),
    "newer": (file(version=2), "'ropegraph' version 2; use 'ropegraph' version 1"),
    "older": (file(version=0), "version 0; use 'ropegraph' version 1"),
    "another checksum": (file(sha256="0" * 64), "the checksum does not match"),
    "no checksum": (file(sha256=None), "the checksum does not match"),
    "one letter": (FILE.replace(b"symmetric", b"symmetriC", 1), "the checksum does not match"),
    "one digit": (FILE.replace(b"0.25", b"0.26", 1), "the checksum does not match"),
    "no graph": (sealed(5), "a part that does not fit"),
    "a list of a graph": (sealed([body()]), "a part that does not fit"),
    "an empty graph": (sealed({}), "a part that does not fit"),
    "an unknown class": (sealed({"$": "Conv", "name": "x"}), "'Conv'"),
    "another class": (sealed({"$": "Ref", "index": 1}), "a part that does not fit"),
    "an unknown field": (sealed(body(colour="red")), "colour"),
    "a lost field": (sealed({k: v for k, v in body().items() if k != "nodes"}), "nodes"),
    "an unknown data type": (
        sealed(json.loads(json.dumps(body()).replace("FLOAT", "QUAD", 1))),
        "QUAD",
    ),
    "a node that is none": (sealed(body(nodes=[5])), "a part that does not fit"),
    "values that are none": (sealed(body(values=5)), "a part that does not fit"),
    "an output by nobody": (sealed(body(visible={"$set": ["z"]})), "'z' is written by no node"),
    "a cycle": (sealed(body(nodes=body()["nodes"][::-1])), "which no earlier node produces"),
}


@pytest.mark.parametrize(("data", "text"), BAD.values(), ids=BAD)
def test_anything_else_is_refused(data: Any, text: str):
    with pytest.raises(GraphError, match=r"^deserialize: ") as caught:
        loads(data)
    assert text in str(caught.value)


@given(st.integers(0, len(FILE) - 1), st.integers(0, 255))
@settings(max_examples=200, deadline=None)
def test_a_changed_byte_never_gives_another_graph(place: int, byte: int):
    damaged = FILE[:place] + bytes([byte]) + FILE[place + 1 :]
    try:
        assert loads(damaged) == zoo()
    except GraphError:
        return


# The key

KINDS = {
    cls
    for module in (contract, graph, ops, score_mod)
    for cls in vars(module).values()
    if isinstance(cls, type) and is_dataclass(cls) and cls.__module__ == module.__name__
} - {ops.Rotation, ops.Attention, ops.Norm, ops.Pair}  # bases, of which no node is made


def changes(thing: Any, path: str = "") -> list[tuple[str, Any]]:
    """The same thing with one detail changed, for every detail, with where it is."""
    if is_dataclass(thing):
        found = []
        for f in fields(thing):
            for where, new in changes(getattr(thing, f.name), f"{path}.{f.name}"):
                found.append((where, replace(thing, **{f.name: new})))
        return found
    if isinstance(thing, dict):
        items = list(thing.items())
        found = [(f"{path} one less", dict(items[:-1]))] if items else []
        if len(items) > 1:
            found.append((f"{path} in another order", dict(items[::-1])))
        for i, (k, v) in enumerate(items):
            found.append(
                (f"{path}[{k}] renamed", dict([*items[:i], (f"{k}_", v), *items[i + 1 :]]))
            )
            found += [(where, {**thing, k: new}) for where, new in changes(v, f"{path}[{k}]")]
        return found
    if isinstance(thing, tuple):
        found = [(f"{path} one more", (*thing, 1))]
        found += [(f"{path} one less", thing[:-1])] if thing else []
        for i, item in enumerate(thing):
            for where, new in changes(item, f"{path}[{i}]"):
                found.append((where, (*thing[:i], new, *thing[i + 1 :])))
        return found
    match thing:
        case frozenset():
            return [(f"{path} one more", thing | {"more"})]
        case bool():
            return [(path, not thing)]
        case DType():
            return [(path, DType.BFLOAT16)]
        case int():
            return [(path, thing + 1)]
        case float():
            return [(path, math.nextafter(thing, math.inf)), (f"{path} negative", -thing)]
        case str():
            return [(path, f"{thing}x")]
        case None:
            return [(path, 0), (f"{path} text", "x")]
    raise TypeError(f"{path}: {type(thing)}")


CHANGES = changes(zoo())


def places(part: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where in a file there is something."""
    items: list[Any] = []
    if isinstance(part, (dict, list)):
        items = list(part.items() if isinstance(part, dict) else enumerate(part))
    return [at] * bool(at) + [p for name, inner in items for p in places(inner, (*at, name))]


def replaced(place: tuple[Any, ...], junk: Any) -> str:
    """A file with something else in one place of its graph, and a checksum that is right."""
    part = whole = body()
    for name in place[:-1]:
        part = part[name]
    part[place[-1]] = junk
    return sealed(whole)


JUNK = (None, -1, 3.5, True, "x", [], {}, [[]], 10**25, {"$map": []}, {"$set": []})
JUNK += ({"$dtype": "FLOAT"}, {"$dtype": "F"}, {"$": "Scale", "factor": 1.0}, {"$": "None"})


@pytest.mark.parametrize("turn", range(len(JUNK)))
def test_a_signed_file_with_a_part_of_another_type_is_refused_or_whole(turn: int):
    """As another version, or another program, might write it. Places take turns."""
    for place in places(body())[turn :: len(JUNK)]:
        with contextlib.suppress(GraphError):
            found = loads(replaced(place, JUNK[turn]))
            assert str(found)
            assert loads(dumps(found)) == found


@pytest.mark.parametrize(
    ("place", "junk", "text"),
    [
        (("name",), 3, "name of Graph is 3"),
        (("fold",), "both", "fold of Graph is 'both'"),
        (("nodes",), [3], r"nodes of Graph is \(3,\)"),
        (("values", "$map", 0, 1, "stride"), [1], "dim .*, stride"),
        (("values", "$map", 0, 1, "dtype"), "float", "dtype of Value is 'float'"),
        (("values", "$map", 0, 0), "other", "is filed as 'other'"),
    ],
)
def test_the_part_that_does_not_fit_is_named(place: tuple[Any, ...], junk: Any, text: str):
    with pytest.raises(GraphError, match=f"does not fit: .*{text}"):
        loads(replaced(place, junk))


def test_the_key_changes_with_every_detail_of_the_graph():
    old, seen = key(zoo()), {}
    for path, changed in CHANGES:
        new = key(changed)
        assert new != old, f"{path} is not in the key"
        assert seen.setdefault(new, path) == path, f"{path} and {seen[new]} share a key"
    assert len(CHANGES) > 500


def classes_in(thing: Any) -> set[type]:
    if is_dataclass(thing):
        children = [getattr(thing, f.name) for f in fields(thing)]
        return {type(thing)}.union(*(classes_in(c) for c in children))
    if isinstance(thing, dict):
        return set().union(*(classes_in(v) for v in thing.values()))
    return set().union(*(classes_in(v) for v in thing)) if isinstance(thing, tuple) else set()


def test_nothing_of_the_graph_is_left_out_of_this_test():
    assert classes_in(zoo()) == KINDS


def test_the_key_repeats():
    assert key(zoo()) == key(zoo())
    assert len(key(zoo())) == 64


def test_what_else_decides_the_plan_is_in_the_key():
    g = forward().graph("o")
    keys = {key(g, context) for context in ((), ("cpu",), ("sm_90",), ("cpu", "torch"))}
    assert len(keys) == 4
    assert isinstance(g, Graph)
