"""The shape of the program: what may import what, and how long a thing may be."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

_ROOT = Path(__file__).parent.parent

# The table of the architecture: each line may import only lines above it; a package is one line.
_LINES = (
    (0, "errors"),
    (0, "config"),
    (0, "protocol"),
    (0, "gguf"),
    (0, "nvidia"),
    (0, "cache_folder"),
    (0, "hardware"),
    (0, "histogram"),
    (0, "exposition"),
    (0, "footprint"),
    (0, "metrics"),
    (0, "logs"),
    (0, "events"),
    (0, "service"),
    (0, "trace_context"),
    (0, "request_record"),
    (0, "backlog"),
    (1, "slowdown"),
    (1, "request_log"),
    (1, "captures"),
    (1, "telemetry"),
    (1, "observers"),
    (1, "memory"),
    (1, "quota"),
    (1, "credential"),
    (1, "auth"),
    (1, "tokens"),
    (1, "images"),
    (2, "offload"),
    (2, "eviction"),
    (3, "engine"),
    (4, "backends"),
    (4, "instance"),
    (5, "supervisor"),
    (6, "scheduler"),
    (6, "sampler"),
    (7, "proxy"),
    (8, "api"),
    (8, "views"),
    (9, "http_server"),
    (9, "reloading"),
    (9, "main"),
    (9, "cli"),
    (9, "__main__"),
)
_RANK = {name: rank for rank, (_, name) in enumerate(_LINES)}
# Lower layers stay usable without the configuration and the numbers that the gateway exports.
_KNOWS_NEITHER = frozenset({"protocol", "gguf", "hardware", "memory", "offload", "eviction", "engine"})
_DATA_PATH = ("proxy", "backends")
_MAX_FILE_LINES = 400
_MAX_FUNCTION_LINES = 50
# A command with many options is one long function by nature.
_LONG_FUNCTIONS_ALLOWED = frozenset({"app.cli.commands.plan"})
_IMPORTS_BY_NAME = frozenset({"__import__", "import_module", "resolve_name"})
# The command line imports the one command that was called, and a plan only its own parts of that: it takes a fifth of
# the time that a web server's libraries take to import, and people wait for it. NVML's binding is of use only where
# there is NVIDIA's driver, psutil where the kernel's files do not tell.
_IMPORT_BY_NAME_ALLOWED = frozenset({"app.cli.program", "app.cli.plan", "app.hardware", "app.nvidia"}) | {
    # A gateway keeps in memory what it serves with: schemas, pictures, the status page, an estimate for a server that
    # cannot count, telemetry and Redis are over 10 MB together, and many gateways meet none of them.
    "app.protocol.expectation",
    "app.images.look",
    "app.views.page",
    "app.tokens.estimate",
    "app.observers",
    "app.quota.store",
}

Sources = Mapping[str, str]
Function = ast.FunctionDef | ast.AsyncFunctionDef


def _sources() -> dict[str, str]:
    """Module name → source of every file of the program; a package has the name of its folder."""
    sources = {}
    for path in sorted((_ROOT / "app").rglob("*.py")):
        parts = path.relative_to(_ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        sources[name] = path.read_text(encoding="utf-8")
    return sources


SOURCES = _sources()


def _is_package(module: str, sources: Sources) -> bool:
    return any(name.startswith(module + ".") for name in sources)


def _imported(module: str, sources: Sources) -> Iterator[str]:
    """Full names of what a module imports; of our own the module that is meant, not the name in it."""
    for node in ast.walk(ast.parse(sources[module])):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _base(node, module, sources)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield inner if inner in sources else base


def _base(node: ast.ImportFrom, module: str, sources: Sources) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    above = node.level - 1 if _is_package(module, sources) else node.level
    return ".".join([*parts[: len(parts) - above], *([node.module] if node.module else [])])


def _line_of(module: str) -> str:
    """The line of the table that a module belongs to; empty for the package itself."""
    return module.removeprefix("app").strip(".").partition(".")[0]


def upward_imports(sources: Sources) -> list[str]:
    found = []
    for module in sources:
        own = _line_of(module)
        for target in _imported(module, sources):
            other = _line_of(target)
            if not target.startswith("app.") or not own or other == own or not other:
                continue
            if _RANK[other] > _RANK[own]:
                found.append(f"{module} imports {target}")
    return found


def cycles(sources: Sources) -> list[str]:
    """Modules that reach themselves, packages looked into."""
    graph = {module: {name for name in _imported(module, sources) if name in sources} for module in sources}
    return [module for module in graph if module in _reachable(module, graph)]


def _reachable(start: str, graph: Mapping[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    ahead = set(graph[start])
    while ahead:
        module = ahead.pop()
        seen.add(module)
        ahead |= graph[module] - seen
    return seen


def _functions(source: str) -> Iterator[Function]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def imports_in_functions(sources: Sources) -> list[str]:
    return [
        f"{module}:{getattr(inner, 'lineno', 0)}"
        for module, source in sources.items()
        for function in _functions(source)
        for inner in ast.walk(function)
        if isinstance(inner, ast.Import | ast.ImportFrom)
        or (_imports_by_call(inner) and module not in _IMPORT_BY_NAME_ALLOWED)
    ]


def _imports_by_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in _IMPORTS_BY_NAME


def importers(target: str, sources: Sources, *, within: tuple[str, ...] | None = None) -> list[str]:
    """Modules that import ``target`` or something in it, of the named lines only."""
    return [
        module
        for module in sources
        if (within is None or _line_of(module) in within)
        and any(name == target or name.startswith(target + ".") for name in _imported(module, sources))
    ]


def mentions(identifier: str, sources: Sources) -> list[str]:
    """Modules whose code, not their prose, uses a name."""
    found = []
    for module, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            names = {getattr(node, "id", None), getattr(node, "attr", None)}
            if isinstance(node, ast.ImportFrom | ast.Import):
                names |= {part for alias in node.names for part in alias.name.split(".")}
            if identifier in names:
                found.append(module)
                break
    return found


def long_files(sources: Sources) -> list[str]:
    return [module for module, source in sources.items() if len(source.splitlines()) > _MAX_FILE_LINES]


def long_functions(sources: Sources) -> list[str]:
    return [
        f"{module}.{function.name} has {_length(function)} lines"
        for module, source in sources.items()
        if module not in _LONG_FUNCTIONS_ALLOWED
        for function in _functions(source)
        if _length(function) > _MAX_FUNCTION_LINES
    ]


def _length(function: Function) -> int:
    """Lines from ``def`` to the end, its docstring left out."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    if ast.get_docstring(function) is not None:
        docstring = function.body[0]
        lines -= (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1
    return lines


def drawers(paths: list[Path]) -> list[Path]:
    return [path for path in paths if path.name in ("utils.py", "helpers.py", "common.py", "misc.py")]


def test_every_module_has_its_line_in_the_table() -> None:
    assert {_line_of(module) for module in SOURCES} - {""} <= _RANK.keys()


def test_layers_only_grow_downwards_the_table() -> None:
    layers = [layer for layer, _ in _LINES]
    assert layers == sorted(layers)
    assert len(_RANK) == len(_LINES)


def test_no_upward_import() -> None:
    assert upward_imports(SOURCES) == []


def test_no_cycle() -> None:
    assert cycles(SOURCES) == []


def test_no_import_inside_a_function() -> None:
    assert imports_in_functions(SOURCES) == []


def test_lower_layers_know_neither_settings_nor_metrics() -> None:
    lower = tuple(_KNOWS_NEITHER)
    assert importers("app.config", SOURCES, within=lower) == []
    assert importers("app.metrics", SOURCES, within=lower) == []


def test_only_the_command_line_imports_the_composition_root() -> None:
    outside = [module for module in importers("app.main", SOURCES) if _line_of(module) not in ("cli", "__main__")]
    assert outside == []


def test_no_base_http_middleware() -> None:
    assert mentions("BaseHTTPMiddleware", SOURCES) == []


def test_the_data_path_does_not_use_httpx() -> None:
    assert importers("httpx", SOURCES, within=_DATA_PATH) == []


def test_no_file_is_too_long() -> None:
    assert long_files(SOURCES) == []


def test_no_function_is_too_long() -> None:
    assert long_functions(SOURCES) == []


def test_there_is_no_drawer() -> None:
    assert drawers([*(_ROOT / "app").rglob("*.py"), *(_ROOT / "tests").rglob("*.py")]) == []


# Each check is shown a program that breaks its rule, and one that looks similar and does not.

_BAD_LAYERS = {
    "absolute": {"app.gguf": "from app.offload import plan_offload", "app.offload": ""},
    "plain": {"app.gguf": "import app.offload", "app.offload": ""},
    "relative": {"app.gguf": "from . import offload", "app.offload": "", "app": ""},
    "from within a package": {"app.gguf": "", "app.gguf.shards": "from ..memory import estimate", "app.memory": ""},
    "same layer, next line": {"app.errors": "from app.config import Settings", "app.config": ""},
}


@pytest.mark.parametrize("sources", _BAD_LAYERS.values(), ids=_BAD_LAYERS)
def test_an_upward_import_is_seen(sources: Sources) -> None:
    assert len(upward_imports(sources)) == 1


def test_a_downward_import_is_fine() -> None:
    sources = {"app.errors": "", "app.proxy": "import app.errors\nfrom app import __version__", "app": ""}
    assert upward_imports(sources) == []


def test_a_cycle_is_seen_inside_a_package_and_through_its_front() -> None:
    inside = {"app.gguf": "", "app.gguf.a": "from app.gguf.b import B", "app.gguf.b": "from app.gguf import a"}
    assert cycles(inside) == ["app.gguf.a", "app.gguf.b"]
    through_front = {"app.gguf": "from app.gguf.a import A", "app.gguf.a": "from app.gguf import A"}
    assert cycles(through_front) == ["app.gguf", "app.gguf.a"]
    assert cycles({"app.gguf": "from app.gguf.a import A", "app.gguf.a": ""}) == []


@pytest.mark.parametrize(
    "statement", ["import os", "from os import path", "importlib.import_module('os')", "resolve_name('os:path')"]
)
def test_an_import_inside_a_function_is_seen(statement: str) -> None:
    nested = f"class A:\n    async def f(self):\n        if True:\n            {statement}\n"
    assert imports_in_functions({"app.x": nested}) == ["app.x:4"]
    assert imports_in_functions({"app.x": f"import importlib\n{statement}\n"}) == []
    assert len(imports_in_functions({"app.cli.program": nested})) == (0 if "(" in statement else 1)


def test_importers_are_seen() -> None:
    sources = {
        "app.proxy": "from httpx import AsyncClient",
        "app.backends.local": "import httpx._client",
        "app.engine.health": "import httpx",
        "app.backends.base": "import httpx_extra",
    }
    assert importers("httpx", sources, within=_DATA_PATH) == ["app.proxy", "app.backends.local"]
    assert importers("app.main", {"app.api": "from app import main", "app.main": "", "app": ""}) == ["app.api"]


def test_a_forbidden_name_is_seen_in_code_and_not_in_prose() -> None:
    code = {
        "app.a": "from starlette.middleware.base import BaseHTTPMiddleware as M",
        "app.b": "import starlette.middleware.base as base\nclass A(base.BaseHTTPMiddleware): pass",
        "app.c": '"""Not BaseHTTPMiddleware."""',
    }
    assert mentions("BaseHTTPMiddleware", code) == ["app.a", "app.b"]


def test_length_is_seen() -> None:
    body = "    x = 1\n" * _MAX_FUNCTION_LINES
    assert long_functions({"app.x": f"def f():\n{body}"}) == ["app.x.f has 51 lines"]
    documented = '    """One.\n\n    Two.\n    """\n' + "    x = 1\n" * (_MAX_FUNCTION_LINES - 1)
    assert long_functions({"app.x": f"@decorator\ndef f():\n{documented}"}) == []
    assert long_files({"app.x": "x = 1\n" * (_MAX_FILE_LINES + 1), "app.y": "x = 1\n" * _MAX_FILE_LINES}) == ["app.x"]


def test_a_drawer_is_seen() -> None:
    assert drawers([Path("app/utils.py"), Path("app/errors.py")]) == [Path("app/utils.py")]
