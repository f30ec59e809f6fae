"""The import table of DESIGN, read off the source; and the half that decides, which must do without torch."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "narrows"

# A layer is the first entry whose modules (or packages) contain a module, hence parts of a package stand before it.
# core and errors may be imported by all, cache by those that keep something between runs.
KV_INTEGERS = ("kv.layout", "kv.blocks", "kv.allocator", "kv.prefix", "kv.table", "kv.cache")
DECIDING = ("core", *KV_INTEGERS, "sched", "transfer.plan", "metrics", "profile")
LAYERS: dict[str, tuple[str, ...]] = {
    "core": (),
    "errors": (),
    "cache": (),
    **dict.fromkeys(KV_INTEGERS, KV_INTEGERS),
    "kv": ("kv",),
    "sched": ("sched", *KV_INTEGERS),
    "transfer.plan": (*KV_INTEGERS,),
    "metrics": ("metrics", *KV_INTEGERS),
    "profile.measuring": ("profile", "kv", "runtime", "models", "attention", "select", "kernels"),
    "profile": ("profile", *KV_INTEGERS),
    "sim": ("sim", *DECIDING),
    "kernels": ("kernels", "cache"),
    "attention": ("attention", "select.base", "kv.layout", "kernels"),
    "select": ("select", "kv.layout", "kernels"),
    "parallel": ("parallel", "kernels"),
    "models": ("models", "attention", "select", "parallel", "kernels", "cache"),
    "transfer": ("transfer", "kv.layout", "kv.blocks"),
    "runtime.client": (),
    "runtime": (
        *("runtime", "kv", "sched", "transfer", "metrics", "profile", "kernels", "attention", "select", "parallel"),
        *("models", "config"),
    ),
    "server": ("server", "metrics", "runtime.client", "config"),
    "config": ("kv.layout", "sched.registry"),
}
# What starts, checks and shows the rest may import anything.
TOP = ("cli", "__main__", "launch", "llm", "profiles", "profile_commands", "bench", "testing", "demo", "")

WITHOUT_TORCH = (
    *(*DECIDING, "errors", "cache", "sim", "runtime.client", "runtime.stopping", "server", "config"),
    *("kernels.build", "models.catalog"),
)


def contains(layer: str, module: str) -> bool:
    return module == layer or module.startswith(layer + ".")


def layer_of(module: str) -> str:
    """The layer of a module, given without the leading `narrows.`."""
    if module in TOP or any(contains(top, module) for top in TOP if top):
        return ""
    # A package's own module (`kv/__init__.py`) is imported with each of its parts.
    found = [layer for layer in LAYERS if contains(layer, module)]
    assert found, f"narrows.{module} is in no row of DESIGN's import table"
    return found[0]


def modules() -> dict[str, Path]:
    """Every module of the package, without the leading `narrows.`."""
    named = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return named


MODULES = modules()


def imports(module: str, source: str, package: bool = False) -> Iterator[str]:
    """Modules of ours that a source imports, anywhere in it, without the leading `narrows.`.

    `from narrows.a import b` is an import of a.b where that is a module, else of a.
    """
    parts = ["narrows", *filter(None, module.split("."))]
    here = parts if package else parts[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            origin = ".".join([*base, *filter(None, [node.module])])
            names = [f"{origin}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] == "narrows" and name != "narrows.__version__":
                name = name.removeprefix("narrows").removeprefix(".")
                yield name if name in MODULES else name.rpartition(".")[0]


def forbidden(module: str, source: str, package: bool = False) -> list[str]:
    """Imports of a source that the table does not allow."""
    layer = layer_of(module)
    if not layer:
        return []
    allowed = ("core", "errors", *LAYERS[layer])
    return [name for name in imports(module, source, package) if not any(contains(to, name) for to in allowed)]


@pytest.mark.parametrize("module", MODULES)
def test_no_import_outside_the_table(module: str) -> None:
    path = MODULES[module]
    assert forbidden(module, path.read_text(encoding="utf-8"), path.name == "__init__.py") == []


@pytest.mark.parametrize(
    ("module", "source", "caught"),
    [
        ("core.ids", "from narrows.kv.layout import KVLayout", ["kv.layout"]),
        ("kv.allocator", "import narrows.kv.pool", ["kv.pool"]),
        ("kv.allocator", "from narrows.kv import pool", ["kv.pool"]),
        ("kv.allocator", "from . import pool, prefix", ["kv.pool"]),
        ("kv.allocator", "from ..runtime.sampler import sample", ["runtime.sampler"]),
        ("attention.merge", "from narrows.kv.allocator import PageAllocator", ["kv.allocator"]),
        ("models.llama", "def f():\n    from narrows.runtime.sampler import sample", ["runtime.sampler"]),
        ("server.app", "from narrows.runtime.sampler import sample", ["runtime.sampler"]),
        ("server.app", "from narrows.sched.view import ClusterView", ["sched.view"]),
        ("server.app", "from narrows.runtime.client import Client\nfrom narrows.errors import QueueFull", []),
        ("runtime.client", "from narrows.runtime.sampler import sample", ["runtime.sampler"]),
        ("transfer.plan", "from narrows.transfer.base import Copy", ["transfer.base"]),
        ("kernels.base", "from narrows.core.ids import PageId", []),
        ("kernels.base", "from narrows.models.fields import Fields", ["models.fields"]),
        ("kernels.build", "from narrows.cache import make_once", []),
        ("server.app", "from narrows.cache import make_once", ["cache"]),
        ("kv.pool", "from narrows.kv.layout import KVLayout\nimport torch", []),
        ("server.app", "from narrows import __version__", []),
        ("server.app", "from narrows import LLM", [""]),
        ("cli", "from narrows.sched.view import ClusterView", []),
    ],
)
def test_the_walk_itself(module: str, source: str, caught: list[str]) -> None:
    assert forbidden(module, source) == caught


def test_the_deciding_half_and_the_server_load_no_torch() -> None:
    """Imports one after another in one fresh process; the first that brings torch in is named."""
    names = [name for name in MODULES if name in WITHOUT_TORCH or layer_of(name) in WITHOUT_TORCH]
    assert {"core.request", "kv.allocator", "kv.cache", "metrics.export", "runtime.client"} <= set(names)
    program = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module("narrows." + name)
    assert "torch" not in sys.modules, "importing narrows." + name + " loads torch"
"""
    done = subprocess.run(
        [sys.executable, "-c", program, *names],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT.parent,
    )
    assert done.returncode == 0, done.stderr


def test_a_package_says_nothing_that_costs_an_import() -> None:
    """`import narrows` alone is quick: it is paid by every command and every process."""
    program = "import sys, narrows; print([n for n in ('torch', 'fastapi', 'transformers') if n in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True, cwd=ROOT.parent
    )
    assert done.stdout.strip() == "[]"
