from __future__ import annotations

import pytest

from atoll.config import dump_spec, parse_spec
from atoll.errors import ConfigError
from atoll.strategies.compatibility import check_job

JOB = """
[job]
nodes = {nodes}
{more}
[strategy]
{strategy}
[dipaco]
modules = {modules}
"""


def job(**changes: object) -> str:
    values = {"nodes": 3, "more": "", "strategy": 'preset = "dipaco"', "modules": "[2, 2]"}
    return JOB.format(**(values | changes))


def test_paths_are_read_and_written() -> None:
    spec = parse_spec(job())
    assert (spec.dipaco.modules, spec.dipaco.paths, spec.parts_saved) == ([2, 2], 4, 4)
    assert (spec.strategy.inner, spec.mesh.ranks) == ("paths", 1)
    assert spec.model.options["tie"] is False
    assert parse_spec(dump_spec(spec)) == spec


def test_a_job_without_paths_has_no_table_of_them() -> None:
    assert "[dipaco]" not in dump_spec(parse_spec("[job]\nnodes = 2\n"))


def test_the_preset_alone_has_a_member_for_each_of_four_paths() -> None:
    spec = parse_spec('[strategy]\npreset = "dipaco"\n')
    assert (spec.dipaco.modules, spec.job.nodes, spec.job.min_nodes) == ([2, 2], 4, 1)
    resolved = check_job(spec)
    assert (resolved.outer, resolved.inner) == ("diloco", "paths")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modules": "[2, 0]"}, r"a module or more.* modules = \[2, 1\]"),
        ({"nodes": 5}, "more members than paths.* nodes = 4"),
        ({"modules": "[]"}, r"set modules in \[dipaco\]"),
        ({"strategy": 'inner = "local"'}, "leave out modules"),
        ({"modules": "[2, 2]\nheld_out = 0.7"}, r"held_out in \[dipaco\] is out of range"),
        ({"modules": '[2]\nweights = "equal"'}, "weights"),
        ({"strategy": 'preset = "ddp"\ninner = "paths"'}, "combines the gradients of every step"),
        ({"strategy": 'preset = "dipaco"\ndrop = 0.1'}, "leave drop out"),
        ({"strategy": 'preset = "dipaco"\nweight = "equal"'}, r"set in \[dipaco\]"),
        ({"more": 'script = "train.py"'}, "only the built-in trainer .* runs a script"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_remedy(
    changes: dict[str, object], message: str
) -> None:
    text = job(**changes)
    if "modules" in changes and changes["modules"] == "[]":
        text = text.replace('preset = "dipaco"', 'preset = "diloco"\ninner = "paths"')
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        parse_spec(text)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('outer = "streaming"', "cannot work per module"),
        ('codec = "auto(1)"', "a member new to a module would need"),
    ],
)
def test_methods_that_cannot_work_per_module_are_refused(line: str, message: str) -> None:
    spec = parse_spec(job(strategy=f'inner = "paths"\n{line}'))
    with pytest.raises(ConfigError, match=message):
        check_job(spec)
