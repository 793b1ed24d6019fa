"""What is installed, and where: asked so that nothing missing or broken can stop the asking."""

from __future__ import annotations

import ctypes.util
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch

import ropegraph as rg

PACKAGES = (
    "numpy",
    "networkx",
    "nvidia-cudnn-frontend",
    "nvidia-cudnn-cu13",
    "nvidia-cudnn-cu12",
    "cupy-cuda13x",
    "cupy-cuda12x",
    "transformers",
    "triton",
)
# Import name -> what needs it.
MODULES = {"cudnn": "cudnn.sdpa", "cupy": "cuda.rope"}
IMPORT_SECONDS = 120
_IMPORT = """
import sys
try:
    import {name}
    print("\\n" + str(getattr({name}, "__version__", "unknown")))
except Exception as error:
    sys.exit("\\n" + type(error).__name__ + ": " + " ".join(str(error).split()))
"""


def asked(question: Callable[[], Any]) -> Any:
    """The answer, or what went wrong as text: of a broken machine that is what a report tells."""
    try:
        return question()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a broken package raises
        return f"failed: {type(error).__name__}: {' '.join(str(error).split())}"


def facts() -> dict[str, Any]:
    """Versions, devices, cuDNN and the packages that engines need, by section."""
    return {
        "versions": {
            "ropegraph": rg.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "platform": asked(platform.platform),
            **{name: found for name in PACKAGES if (found := asked(lambda: _version(name)))},  # noqa: B023
        },
        "device": asked(_device),
        "cudnn": asked(_cudnn),
        "modules": {name: asked(lambda: _module(name)) for name in MODULES},  # noqa: B023
        "environment": {
            name: os.environ[name]
            for name in ("CUDA_VISIBLE_DEVICES", "CUDA_HOME", "LD_LIBRARY_PATH", "OMP_NUM_THREADS")
            if name in os.environ
        },
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _device() -> dict[str, Any]:
    found: dict[str, Any] = {
        "cpu": asked(processor),
        "threads": torch.get_num_threads(),
        "torch built for CUDA": torch.version.cuda or "no",
        "CUDA devices": asked(torch.cuda.device_count),
    }
    if asked(torch.cuda.is_available) is True:
        for i in range(torch.cuda.device_count()):
            found[f"cuda:{i}"] = asked(lambda: _gpu(i))  # noqa: B023
    return found


def _gpu(index: int) -> str:
    about: Any = cast(Any, torch.cuda).get_device_properties(index)
    return f"{about.name}, sm_{about.major}{about.minor}, {about.total_memory / 2**30:.1f} GiB"


def processor() -> str:
    """The name of the CPU, as far as the machine tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _cudnn() -> dict[str, Any]:
    """cuDNN as torch loads it; cuDNN Frontend shares that library."""
    number = asked(torch.backends.cudnn.version)
    found: dict[str, Any] = {"version": "not found" if number is None else number}
    found["libraries"] = asked(_libraries) or "none found"
    return found


def _libraries() -> list[str]:
    """Files of libcudnn: those that are loaded, else those that lie where loaders look."""
    maps = Path("/proc/self/maps")
    if maps.exists():
        paths = (line.split()[-1] for line in maps.read_text().splitlines() if "libcudnn" in line)
        if loaded := sorted(set(paths)):
            return [path for path in loaded if "libcudnn.so" in path] or loaded
    folders = [Path(torch.__file__).parent / "lib"]
    spec = find_spec("nvidia.cudnn") if find_spec("nvidia") else None
    folders += [Path(p) / "lib" for p in (spec.submodule_search_locations or ())] if spec else []
    folders += [Path(p) for p in os.environ.get("LD_LIBRARY_PATH", "").split(":") if p]
    found = [str(file) for folder in folders for file in sorted(folder.glob("libcudnn.so*"))]
    system = ctypes.util.find_library("cudnn")
    return found + ([system] if system else [])


def _module(name: str) -> str:
    """The version of a module that imports, or why it does not. It is imported in another process.

    A broken one may end the process it is imported in.
    """
    if find_spec(name) is None:
        return f"not installed ({MODULES[name]} needs it)"
    run = subprocess.run(
        [sys.executable, "-c", _IMPORT.format(name=name)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        timeout=IMPORT_SECONDS,
    )
    # The last line is ours: a package may print what it likes when it is imported.
    said = (run.stderr if run.returncode else run.stdout).strip().splitlines()
    if run.returncode == 0 and said:
        return f"imports, version {said[-1]}"
    return f"broken: {said[-1] if said else f'exit status {run.returncode}'}"
