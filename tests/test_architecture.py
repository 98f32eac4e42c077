"""The architecture of the package: which way imports point, what is pure, and how long things may be."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "safelaunch"

LAYERS = {
    "values": (
        "findings catalogue options hostnames redaction plan deepspeed_cli arguments helptext settings slurm "
        "hostfile filters selection env_file environment located ds_config ds_rules timeouts explain schemas"
    ),
    "transport": "transport",
    "facts": "facts",
    "checks": "checks",
    "state": "job hang verdicts stacks diagnose",
    "validation": "here nodes script static",
    "effects": "probing preflight launch supervise",
    "records": "runs output documents own_argv",
    "run": "console running cleaning commands",
    "version": "__init__",
    "entry": "cli __main__",
}
"""Each module or subpackage stands in one layer."""
MAY_IMPORT = {
    "values": "values",
    "transport": "transport",
    "facts": "transport",
    "checks": "values facts transport",
    "state": "values",
    "validation": "values",
    "effects": "values transport facts checks state",
    "records": "values version",
    "version": "",
    "run": "values transport checks state validation effects records",
    "entry": "values state version run records",
}
"""What a layer may import at run time, beside itself."""
PURE = {"values", "facts", "checks", "state"}
EFFECTS = {
    "asyncio",
    "concurrent",
    "multiprocessing",
    "selectors",
    "socket",
    "subprocess",
    "threading",
    "time",
}
"""Modules of the standard library that a pure layer has no use for: it is given times and texts."""
FUNCTION_LINES, MODULE_LINES, REMOTE_LINES = 60, 500, 600
"""DESIGN section 10."""
NODE_PYTHON = (3, 8)


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__") or "__init__"


def layer_of(name: str) -> str:
    top = name.partition(".")[0]
    return next((layer for layer, names in LAYERS.items() if top in names.split()), f"no layer has {top}")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def is_for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def run_time_nodes(node: ast.AST):
    """Yield all nodes but those below `if TYPE_CHECKING:`; its `else` counts."""
    yield node
    children = node.orelse if is_for_types_only(node) else ast.iter_child_nodes(node)
    for child in children:
        yield from run_time_nodes(child)


def imports(path: Path) -> set[str]:
    """Return the full names of what a module imports at run time, inside functions too."""
    found = set()
    for node in run_time_nodes(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # `from package import module` names a module, `from module import value` does not.
            for alias in node.names:
                if alias.name == "__version__":
                    found.add("safelaunch.__init__")
                    continue
                inner = PACKAGE.parent.joinpath(*node.module.split("."), alias.name)
                is_module = inner.is_dir() or inner.with_suffix(".py").is_file()
                found.add(f"{node.module}.{alias.name}" if is_module else node.module)
    return found


def ours(path: Path) -> set[str]:
    return {name.removeprefix("safelaunch.") for name in imports(path) if name.startswith("safelaunch.")}


PROGRAMS = [path for path in modules() if path.parent.name == "remote" and path.stem != "__init__"]
INSIDE = [path for path in modules() if path.parent.name != "remote" and name_of(path) != "__init__"]


@pytest.mark.parametrize("path", INSIDE, ids=name_of)
def test_imports_point_one_way(path):
    layer = layer_of(name_of(path))
    allowed = {layer, *MAY_IMPORT[layer].split()}

    # `schemas`, `explain` and `remote` hold data files: programs for nodes are read, never imported.
    assert {name: layer_of(name) for name in ours(path) if layer_of(name) not in allowed} == {}


def test_no_circle_of_imports():
    TopologicalSorter({name_of(path): ours(path) - {name_of(path)} for path in INSIDE}).prepare()


@pytest.mark.parametrize("path", [p for p in INSIDE if layer_of(name_of(p)) in PURE], ids=name_of)
def test_pure_modules_touch_nothing(path):
    assert {name.split(".")[0] for name in imports(path)} & EFFECTS == set()
    calls = [n.func for n in ast.walk(tree(path)) if isinstance(n, ast.Call)]
    assert [call.id for call in calls if isinstance(call, ast.Name) and call.id in ("open", "print")] == []


@pytest.mark.parametrize("path", PROGRAMS, ids=name_of)
def test_programs_for_nodes_need_only_an_old_python(path):
    text = path.read_text(encoding="utf-8")

    ast.parse(text, feature_version=NODE_PYTHON)
    roots = {name.split(".")[0] for name in imports(path)}
    assert roots <= sys.stdlib_module_names
    assert "from __future__ import annotations" in text


def test_only_the_entry_ends_the_process_and_nobody_imports_what_is_launched():
    for path in INSIDE:
        calls = [ast.unparse(n.func) for n in ast.walk(tree(path)) if isinstance(n, ast.Call)]
        ends = {call for call in calls if call in ("sys.exit", "exit", "quit", "os._exit")}
        assert ends == set() or name_of(path) in ("cli", "__main__"), path
        assert {name.split(".")[0] for name in imports(path)} & {"torch", "deepspeed"} == set(), path


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_ceilings(path):
    limit = REMOTE_LINES if path in PROGRAMS else MODULE_LINES
    assert len(path.read_text(encoding="utf-8").splitlines()) <= limit
    functions = [n for n in ast.walk(tree(path)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = {function.name: function.end_lineno - function.lineno + 1 for function in functions}
    assert {name: length for name, length in lengths.items() if length > FUNCTION_LINES} == {}


def test_help_imports_nothing_heavy():
    heavy = [
        "paramiko",
        "fabric",
        "rich",
        "structlog",
        "ClusterShell",
        "hjson",
        "psutil",
        "deepspeed",
        "torch",
    ]
    program = (
        "import sys\n"
        "from safelaunch import cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        f"print(*sorted(set(sys.modules) & set({heavy!r})), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )

    assert done.stderr.strip() == ""
    assert "--hostfile" in done.stdout
