"""Checks of shapes that come before a graph is recorded, and serve fake tensors as well."""

from __future__ import annotations

from ropegraph.errors import GraphError
from ropegraph.functional.kind import Forms


def data(where: str, forms: Forms, *names: str) -> None:
    """Raise GraphError unless each of these is [b, h, s, d]."""
    for name in names:
        if len(forms[name].dim) != 4:
            raise GraphError(f"{where}: {name} is {list(forms[name].dim)}; use [b, h, s, d]")


def attention(where: str, forms: Forms) -> None:
    """Raise GraphError unless q, k and v fit each other."""
    data(where, forms, "q", "k", "v")
    q, k, v = (forms[name].dim for name in ("q", "k", "v"))
    for name, x in (("k", k), ("v", v)):
        if x[0] != q[0]:
            raise GraphError(f"{where}: {name} {list(x)} and q {list(q)} differ in batch")
        if (x[1] == 0 and q[1] != 0) or (x[1] != 0 and q[1] % x[1] != 0):
            raise GraphError(
                f"{where}: q {list(q)} has {q[1]} heads and {name} {list(x)} has {x[1]}; the first "
                "must be a multiple of the second"
            )
    if k[3] != q[3]:
        raise GraphError(f"{where}: q {list(q)} and k {list(k)} differ in width")
    if k[2] != v[2]:
        raise GraphError(f"{where}: k {list(k)} and v {list(v)} differ in length")
    for name in ("k", "v"):
        if forms[name].dtype is not forms["q"].dtype:
            raise GraphError(
                f"{where}: {name} is {forms[name].dtype} but q is {forms['q'].dtype}; use one type"
            )
