"""What a test needs from the machine: CI must have it, a laptop may lack it and is told so."""

import os
from typing import NoReturn

import pytest


def missing(what: str) -> NoReturn:
    """End the test, or the module: a failure in CI, where a skip would pass for a check made."""
    if os.environ.get("CI"):
        pytest.fail(f"needs {what}")
    pytest.skip(f"needs {what}", allow_module_level=True)
