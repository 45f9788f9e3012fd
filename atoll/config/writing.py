"""Writes a job as TOML with every default."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

from atoll.config.dipaco_tables import DiPaCoTable
from atoll.config.log_table import LogTable
from atoll.config.reading import OPEN_TABLES, parse_spec
from atoll.config.redaction import SECRET
from atoll.config.swarm_tables import SwarmTable
from atoll.config.tables import JobSpec
from atoll.config.tune_tables import TuneTable
from atoll.errors import ConfigError


def dump_spec(spec: JobSpec) -> str:
    """Return the job as TOML with every default; `parse_spec` reads it back."""
    lines: list[str] = []
    for field in dataclasses.fields(spec):
        table = getattr(spec, field.name)
        if field.name == "rl" and not spec.rl.active:
            continue
        if table in (SwarmTable(), DiPaCoTable(), TuneTable(), LogTable()):
            continue
        lines.append(f"[{field.name}]")
        for entry in dataclasses.fields(table):
            value = getattr(table, entry.name)
            if entry.name == "options" and field.name in OPEN_TABLES:
                lines += [f"{_key(key)} = {toml_value(item)}" for key, item in value.items()]
            else:
                lines.append(f"{entry.name} = {toml_value(value)}")
        lines.append("")
    return "\n".join(lines)


def dump_tables(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Return tables of a job file as TOML, and nothing else."""
    return "\n".join(
        "\n".join(
            [f"[{name}]", *(f"{_key(key)} = {toml_value(v)}" for key, v in table.items()), ""]
        )
        for name, table in tables.items()
    )


HIDDEN = "(hidden)"


def without_secrets(text: str, spec: JobSpec | None = None) -> str:
    """Return the text of a job file for readers who may not see its secrets.

    The values of `[launch] env` and of `[checkpoint] to_options` are hidden, names of secrets are
    not. Comments then go too, because they may repeat them. `spec` is what the text says, if it
    was parsed before.
    """
    try:
        spec = spec or parse_spec(text)
    except ConfigError:
        unsafe = "env" in text or "to_options" in text
        return f"# {HIDDEN}: this job file cannot be read\n" if unsafe else text
    if not spec.launch.env and not spec.checkpoint.to_options:
        return text
    launch = dataclasses.replace(spec.launch, env=_hidden(spec.launch.env))
    options = _hidden(spec.checkpoint.to_options)
    checkpoint = dataclasses.replace(spec.checkpoint, to_options=options)
    return dump_spec(dataclasses.replace(spec, launch=launch, checkpoint=checkpoint))


def _hidden(lines: list[str]) -> list[str]:
    """Return lines NAME=VALUE with their values hidden, but not those that name a secret."""
    parts = (line.partition("=") for line in lines)
    return [f"{name}={value if value.startswith(SECRET) else HIDDEN}" for name, _, value in parts]


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml_value(name)


def toml_value(value: Any) -> str:
    """Return a value as TOML; raises ConfigError for types that it does not have."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, str):
        # JSON escapes everything that TOML must not contain verbatim, except DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, Mapping):
        items = (f"{toml_value(str(key))} = {toml_value(v)}" for key, v in value.items())
        return "{" + ", ".join(items) + "}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return toml_value(
            {entry.name: getattr(value, entry.name) for entry in dataclasses.fields(value)}
        )
    raise ConfigError("this value cannot be written as TOML", given=repr(value))
