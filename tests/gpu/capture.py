"""A step in a CUDA graph, the way any training or decoding loop captures one."""

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def captured(step: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """The graph of a step that ran before, and what it returned, which a replay writes anew."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step()
    return graph, made
