"""Holds the direction of dependencies: which room may import which."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "atoll"

LEAVES = {"errors", "ids", "clock", "system", "units", "digest"}

MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "ids": {"errors"},
    "clock": set(),
    "units": set(),
    "digest": set(),
    "system": set(),
    "methods": {"errors"},
    "config": {"errors", "ids", "methods"},
    "devices": {"errors", "config"},
    "wire": {"errors", "digest"},
    "code": {"errors", "system"},
    "net": {*LEAVES, "config", "wire"},
    "rounds": {"errors", "ids", "wire"},
    "swarm": {"wire"},
    "paths": {"errors", "ids", "wire"},
    "verification": {"errors", "digest", "wire"},
    "hub": {*LEAVES, "config", "wire", "rounds", "swarm", "paths", "verification"},
    "state_lock": {"clock", "errors"},
    "task": {"digest", "state_lock"},
    "island": {*LEAVES, "config", "devices"},
    "model_hub": {"errors"},
    "models": {"errors", "model_hub"},
    "codec": {"errors", "digest", "methods"},
    "data": {"errors", "digest", "model_hub"},
    # Members and the reducer must do the very same sum, so group borrows its pure arithmetic.
    "group": {*LEAVES, "config", "wire", "rounds", "net", "codec", "reducer"},
    "reducer": {*LEAVES, "config", "wire", "net", "codec", "verification"},
    "strategies": {
        *LEAVES,
        "methods",
        "config",
        "wire",
        "task",
        "island",
        "models",
        "codec",
        "group",
        "devices",
    },
    "checkpoint": {*LEAVES, "wire", "net", "task", "devices"},
    "recovery": {*LEAVES, "wire", "net", "checkpoint"},
    "queues": {*LEAVES, "wire", "net"},
    # The summary and the hub's alarm compare the members' results by the same rule.
    "train": {
        *LEAVES,
        "config",
        "wire",
        "rounds",
        "swarm",
        "paths",
        "verification",
        "net",
        "queues",
        "task",
        "island",
        "models",
        "data",
        "codec",
        "group",
        "strategies",
        "checkpoint",
        "recovery",
        "devices",
    },
    "plan": {
        *LEAVES,
        "methods",
        "config",
        "task",
        "data",
        "codec",
        "group",
        "strategies",
        "train",
        "devices",
        "island",
    },
    "scaling": {"errors", "config", "strategies", "train"},
    "fleet": {"errors", "config"},
    # Rounds lend their rule of how many steps each member does.
    "forecast": {
        *LEAVES,
        "methods",
        "config",
        "wire",
        "fleet",
        "rounds",
        "task",
        "data",
        "codec",
        "group",
        "strategies",
        "train",
        "plan",
        "scaling",
        "devices",
    },
    "export": {"errors", "config", "models", "data", "checkpoint"},
    # The simulation runs the hub's own rounds and placement, with what a job's method sends.
    "simulate": {*LEAVES, "config", "wire", "rounds", "strategies", "fleet", "forecast", "hub"},
    "netlab": {"errors"},
    "routing": {*LEAVES, "paths", "models", "data", "checkpoint", "queues"},
    "run": {
        *LEAVES,
        "config",
        "wire",
        "task",
        "island",
        "codec",
        "group",
        "strategies",
        "checkpoint",
        "queues",
        "train",
    },
    "rl": {
        *LEAVES,
        "config",
        "models",
        "data",
        "codec",
        "strategies",
        "checkpoint",
        "queues",
        "train",
        "run",
        "devices",
    },
    "integrations": {"errors", "system", "run"},
    "node": {
        *LEAVES,
        "config",
        "wire",
        "code",
        "net",
        "devices",
        "island",
        "checkpoint",
        "train",
        "plan",
        "run",
        "rl",
    },
    "rehearse": {
        *LEAVES,
        "config",
        "fleet",
        "forecast",
        "simulate",
        "netlab",
        "net",
        "node",
    },
    "cli": {
        *LEAVES,
        "methods",
        "config",
        "wire",
        "code",
        "net",
        "swarm",
        "hub",
        "model_hub",
        "models",
        "data",
        "codec",
        "devices",
        "strategies",
        "checkpoint",
        "queues",
        "train",
        "plan",
        "scaling",
        "fleet",
        "forecast",
        "export",
        "simulate",
        "netlab",
        "routing",
        "rl",
        "node",
        "rehearse",
    },
    "client": {*LEAVES, "config", "net", "queues", "node"},
}
"""Room -> rooms it may import besides itself. `__init__` of atoll may name anything lazily.

`LEAVES` are allowed together; every other permission is used.
"""

SUB_ROOMS: dict[str, list[str]] = {
    "checkpoint": ["format", "stores", "background", "state"],
    "cli": ["views", "jobs", "access", "planning", "tuning", "trained", "nodes", "commands"],
    "data": ["tuning"],
    "codec": ["quantized", "wrappers", "sparse"],
    "group": ["collectives", "routes", "in_process", "peers"],
    "hub": [
        "db", "quotas", "observability", "security", "storage", "jobs", "rounds", "swarm", "paths",
        "verification", "sessions", "nodes", "queues", "planning", "scheduler", "http", "alarms",
        "dashboard",
    ],
    "models": ["partial"],
    "net": ["http"],
    "node": [
        "identity", "processes", "launchers", "availability", "machine", "packages", "agent",
        "islands",
    ],
    "reducer": ["rules"],
    "rl": ["environments", "channel", "nets", "algorithms", "critic", "actor", "text"],
    "strategies": ["vectors", "rounds", "outer", "moments", "inner", "parameter_server"],
    "train": ["shares", "optim", "results", "state", "island", "report", "swarm", "paths",
              "verification"],
}  # fmt: skip
"""Room -> its sub-rooms, lowest first: each may import those before it.

Files beside the sub-rooms (`hub/app.py`) put them together, and are free in what they import.
"""


@cache
def imported_names(path: Path, package: str) -> frozenset[str]:
    """Return the absolute name of every module that a file imports, nested imports included."""
    return frozenset(_imported_names(path, package))


def _imported_names(path: Path, package: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            base = ".".join(filter(None, [base, node.module]))
            yield from (f"{base}.{alias.name}" for alias in node.names)


def room_of(path: Path) -> str:
    """Return the room that a source file is in."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def sources() -> list[Path]:
    """Return every source file of the package except its own `__init__`."""
    files = sorted(PACKAGE.rglob("*.py"))
    return [
        path for path in files if path not in (PACKAGE / "__init__.py", PACKAGE / "__main__.py")
    ]


def test_every_room_imports_only_the_rooms_below_it() -> None:
    wrong = []
    for path in sources():
        room = room_of(path)
        package = ".".join(path.relative_to(ROOT).parent.parts)
        allowed = MAY_IMPORT[room] | {room, "__version__"}
        for name in imported_names(path, package):
            parts = name.split(".")
            if parts[0] == "atoll" and len(parts) > 1 and parts[1] not in allowed:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_every_permission_is_used() -> None:
    """Except of the leaves, which a room may have together."""
    used: dict[str, set[str]] = {room: set() for room in MAY_IMPORT}
    for path in sources():
        package = ".".join(path.relative_to(ROOT).parent.parts)
        names = [name.split(".") for name in imported_names(path, package)]
        used[room_of(path)] |= {name[1] for name in names if name[0] == "atoll" and name[1:]}
    idle = {
        room: sorted(allowed - used[room] - (LEAVES if allowed >= LEAVES else set()))
        for room, allowed in MAY_IMPORT.items()
    }
    assert {room: names for room, names in idle.items() if names} == {}


def test_the_table_of_rooms_has_no_cycle_and_no_stranger() -> None:
    order = list(graphlib.TopologicalSorter(MAY_IMPORT).static_order())
    assert set(order) == set(MAY_IMPORT)
    assert {room_of(path) for path in sources()} <= set(MAY_IMPORT)


def test_what_is_installed_uses_no_tool_of_development() -> None:
    tools = {"tests", "bench", "examples"}
    found = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources()
        for name in imported_names(path, ".".join(path.relative_to(ROOT).parent.parts))
        if name.split(".")[0] in tools
    ]
    assert not found


def module_of(path: Path) -> str:
    """Return the dotted name of a source file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports_at_run(path: Path) -> frozenset[str]:
    """Return the names that a file imports when loaded or in a function: none for types only."""
    return frozenset(_imports_at_run(path))


def _imports_at_run(path: Path) -> Iterator[str]:
    todo: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while todo:
        for node in ast.iter_child_nodes(todo.pop()):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                continue
            else:
                todo.append(node)


def loaded_module(name: str, modules: dict[str, Path]) -> str:
    """Return the module of ours that an imported name is in, or an empty string."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name


def test_sub_rooms_import_only_lower_ones() -> None:
    wrong = []
    for path in sources():
        *folders, _ = path.relative_to(PACKAGE).parts
        if len(folders) < 2:
            continue
        room, sub_room = folders[:2]
        order = SUB_ROOMS[room]
        allowed = set(order[: order.index(sub_room) + 1])
        for name in imports_at_run(path):
            parts = name.split(".")
            inside = parts[:2] == ["atoll", room] and len(parts) > 2 and parts[2] in order
            if inside and parts[2] not in allowed:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_every_sub_room_is_in_the_table() -> None:
    found = {
        room.name: {folder.name for folder in room.iterdir() if (folder / "__init__.py").exists()}
        for room in PACKAGE.iterdir()
        if room.is_dir()
    }
    for room, folders in found.items():
        assert folders == set(SUB_ROOMS.get(room, [])), room


def test_modules_import_each_other_in_no_circle() -> None:
    """Imports inside functions count, too: they only hide a circle."""
    modules = {module_of(path): path for path in sources()}
    graph = {
        module: {loaded_module(name, modules) for name in imports_at_run(path)} - {"", module}
        for module, path in modules.items()
    }
    list(graphlib.TopologicalSorter(graph).static_order())


def test_hub_and_node_share_only_wire_and_leaves() -> None:
    assert "hub" not in MAY_IMPORT["node"]
    assert MAY_IMPORT["hub"] <= {
        *LEAVES, "config", "wire", "rounds", "swarm", "paths", "verification",
    }  # fmt: skip
