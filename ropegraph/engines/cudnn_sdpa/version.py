"""Which cuDNN there is, asked without importing it."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch

from ropegraph.engines.cudnn_sdpa.frontend import OLDEST, numbers_of


@cache
def installed() -> int:
    """cuDNN's version as 91900, 0 if it or a recent nvidia-cudnn-frontend is missing.

    torch and cuDNN Frontend load one libcudnn between them, so torch's answer is right for both.
    """
    try:
        frontend = version("nvidia-cudnn-frontend")
    except PackageNotFoundError:
        return 0
    if numbers_of(frontend) < OLDEST:
        return 0
    return torch.backends.cudnn.version() or 0
