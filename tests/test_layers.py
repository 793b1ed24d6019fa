"""The package's order: what may import what, read off the source; and what an import may load."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "ropegraph"

# In the order data flows: a layer imports errors, dtypes, itself, and the layers before it.
LAYERS = (
    ("ir",),
    ("passes",),
    ("lowering",),
    ("engines",),
    ("execution",),
    ("compile", "api"),
    ("functional", "nn"),
    ("compat", "integrations", "distributed"),
    ("cli", "__main__"),
)
FOUNDATION = {"errors", "dtypes"}
# Leaf helpers: these few things are all they import, whoever imports them.
LEAVES = {"testing": {"ir", "engines.reference"}, "angles": set[str]()}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def dotted(path: Path) -> str:
    """``ropegraph/ir/ops.py`` is ``ir.ops``; the package's own ``__init__`` is the empty name."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__")


def imports(path: Path) -> set[str]:
    """Every module that a file names in an import, wherever in it: types and late ones count."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            module = node.module or ""
            # `from ropegraph import ir` names the module ropegraph.ir
            whole = module == "ropegraph"
            found |= {f"{module}.{alias.name}" for alias in node.names} if whole else {module}
    return found


def own_imports(path: Path) -> set[str]:
    """The modules of this package among a file's imports, without the leading ``ropegraph.``."""
    return {name.removeprefix("ropegraph.") for name in imports(path) if is_own(name)}


def is_own(name: str) -> bool:
    return name == "ropegraph" or name.startswith("ropegraph.")


def rank(name: str) -> int | None:
    top = name.split(".")[0]
    return next((i for i, layer in enumerate(LAYERS) if top in layer), None)


def is_allowed(importer: str, imported: str) -> bool:
    if imported in FOUNDATION:
        return True
    top, target = importer.split(".")[0], imported.split(".")[0]
    if top == target:
        return True
    if top in LEAVES:
        return any(imported == x or imported.startswith(f"{x}.") for x in LEAVES[top])
    mine, theirs = rank(importer), rank(imported)
    if mine is None:
        return False
    if target in LEAVES:
        return mine > (rank("passes") or 0)
    if theirs is None:  # a name of the package itself, `from ropegraph import pygraph`
        return mine > (rank("api") or 0)
    return theirs <= mine


@pytest.mark.parametrize("path", modules(), ids=dotted)
def test_a_module_imports_only_what_lies_above_it(path: Path) -> None:
    importer = dotted(path).rstrip(".")
    if not importer:
        return  # ropegraph/__init__.py gathers the public names of every layer
    if importer in FOUNDATION:
        wrong = own_imports(path) - FOUNDATION
    else:
        wrong = {name for name in own_imports(path) if not is_allowed(importer, name)}
    assert not wrong, f"{importer} imports {sorted(wrong)}, which lie below it"


def test_every_package_has_its_place_in_the_order() -> None:
    known = {name for layer in LAYERS for name in layer} | FOUNDATION | set(LEAVES)
    found = {dotted(path).split(".")[0] for path in modules()} - {""}
    assert found <= known, f"without a place in LAYERS: {sorted(found - known)}"


@pytest.mark.parametrize(
    ("importer", "imported", "allowed"),
    [
        ("ir.graph", "errors", True),
        ("ir.graph", "passes.rewrite", False),
        ("passes.fold", "ir.graph", True),
        ("passes.fold", "lowering.plan", False),
        ("engines.torch_executor", "lowering.engine", True),
        ("engines.torch_executor", "api.pygraph", False),
        ("engines.torch_executor", "angles.default", True),
        ("api.pygraph", "compile", True),
        ("functional", "api.pygraph", True),
        ("functional", "compat.nemo", False),
        ("testing.oracle", "engines.reference", True),
        ("testing.oracle", "engines.cudnn_sdpa", False),
        ("angles.yarn", "ir.graph", False),
        ("angles.yarn", "angles.powers", True),
        ("angles.tables", "api.checks", False),
        ("functional", "angles.tables", True),
        ("cli.demo", "pygraph", True),
        ("ir.graph", "pygraph", False),
    ],
)
def test_the_rule_itself(importer: str, imported: str, allowed: bool) -> None:
    assert is_allowed(importer, imported) is allowed


@pytest.mark.parametrize("layer", ["ir", "passes"])
def test_graphs_are_rewritten_without_torch(layer: str) -> None:
    heavy = {"torch", "numpy", "cupy", "cudnn", "cuda", "triton"}
    for path in modules():
        if dotted(path).split(".")[0] == layer:
            used = {name.split(".")[0] for name in imports(path)} & heavy
            assert not used, f"{dotted(path)} imports {sorted(used)}"


def test_angles_need_torch_alone() -> None:
    allowed = {"torch", "ropegraph"} | set(sys.stdlib_module_names)
    for path in (PACKAGE / "angles").glob("*.py"):
        used = {name.split(".")[0] for name in imports(path)} - allowed
        assert not used, f"{dotted(path)} imports {sorted(used)}"


CUDA_FREE = """
import sys
import ropegraph
heavy = ("cupy", "cudnn", "cuda", "triton", "nvidia", "transformer_engine")
print(sorted(name for name in sys.modules if name.split(".")[0].startswith(heavy)))
import torch
print(torch.cuda.is_initialized())
"""


def test_import_loads_nothing_of_cuda() -> None:
    run = subprocess.run(
        [sys.executable, "-c", CUDA_FREE], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert run.stdout.split("\n")[:2] == ["[]", "False"], run.stdout
