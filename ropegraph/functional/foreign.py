"""Keywords that a function does not have: refused, with the name that was meant.

A function takes them as ``**foreign: NoReturn``: that costs a call nothing, and type checkers
refuse them as well. What help() and inspect show has no such parameter.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from ropegraph.api.meant import meant_by
from ropegraph.errors import GraphError

F = TypeVar("F", bound=Callable[..., Any])


def closed(function: F) -> F:
    """The function itself, ``**foreign`` left out of the signature that it shows."""
    whole = inspect.signature(function)
    shown = [p for p in whole.parameters.values() if p.kind is not p.VAR_KEYWORD]
    vars(function)["__signature__"] = whole.replace(parameters=shown)
    return function


def refuse(function: Callable[..., Any], foreign: Mapping[str, object]) -> NoReturn:
    """Raise GraphError for the first of them."""
    keyword = next(iter(foreign))
    hint = meant_by(keyword, inspect.signature(function).parameters)
    raise GraphError(f"{function.__name__}: {keyword}= is no argument here{hint}")
