"""What MkDocs does beyond its configuration to make the documentation a site (`make docs`).

The navigation is that of docs/README.md. Links that leave docs/ lead to pages made of the files
that they name. Two references are generated: the command line from its help, the Python API from
docstrings.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from typer.main import get_command

import atoll
from atoll.cli.main import app
from atoll.methods.method import Method

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(r"(?<=\]\()([^)#\s]+)(#[^)\s]*)?(?=\))")
REFERENCE = {
    "Command line": "reference/command_line.md",
    "Python names": "reference/python_names.md",
}
"""Title of a generated page -> its address."""

LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".conf": "nginx", ".json": "json"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Build the navigation from the headings and tables of docs/README.md."""
    navigation: list[Any] = [{"Overview": "README.md"}, {"README": "files/README.md"}]
    for heading, text in sections((DOCS / "README.md").read_text(encoding="utf-8")):
        pages: list[Any] = [
            {title: page}
            for title, page in re.findall(r"^\| \[([^]]+)\]\(([^)#]+\.md)\)", text, re.M)
        ]
        if heading.startswith("Reference"):
            pages += [{title: page} for title, page in REFERENCE.items()]
        if heading.startswith("Develop"):
            pages.append({"Decisions": list(folder("decisions"))})
        navigation.append({heading.partition(":")[0]: pages})
        if heading.startswith("Reference"):
            navigation.append({"Methods": list(methods())})
    config.nav = navigation
    return config


def sections(text: str) -> Iterator[tuple[str, str]]:
    """Yield each second-level heading of a page with the text below it."""
    parts = re.split(r"^## (.+)$", text, flags=re.M)
    yield from zip(parts[1::2], parts[2::2], strict=True)


def folder(name: str) -> Iterator[str]:
    """Yield the addresses of the pages of a folder of docs/."""
    for path in sorted((DOCS / name).glob("*.md")):
        yield path.relative_to(DOCS).as_posix()


def methods() -> Iterator[Any]:
    """Yield the navigation of docs/methods, its index first."""
    yield "methods/README.md"
    for path in sorted((DOCS / "methods").iterdir()):
        if path.is_dir() and any(path.glob("*.md")):
            yield {path.name.replace("_", " ").capitalize(): list(folder(f"methods/{path.name}"))}


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the generated references, and a page for every file that a page links outside docs/."""
    texts = {
        REFERENCE["Command line"]: command_line(),
        REFERENCE["Python names"]: python_names(),
    }
    waiting = [path.relative_to(ROOT).as_posix() for path in DOCS.rglob("*.md")]
    seen = {"README.md"}
    waiting.append("README.md")
    while waiting:
        source = waiting.pop()
        for target in outside(source):
            if target not in seen:
                seen.add(target)
                waiting += [target] if target.endswith(".md") else []
    for name in sorted(seen):
        texts[page_of(name)] = page_text(name)
    for address, text in texts.items():
        files.append(File.generated(config, address, content=text))
    for picture in pictures(seen):
        files.append(File.generated(config, f"files/{picture}", abs_src_path=str(ROOT / picture)))
    return files


def outside(source: str) -> Iterator[str]:
    """Yield the files outside docs/ that a page of the repository links, as paths from its root."""
    text = (ROOT / source).read_text(encoding="utf-8")
    for match in LINK.finditer(text):
        target = normpath(str(PurePosixPath(source).parent / match[1]))
        if "://" not in match[1] and not target.startswith("docs/") and (ROOT / target).exists():
            yield target


def pictures(names: set[str]) -> set[str]:
    """Return the pictures outside docs/ that pages made of files show."""
    return {name for name in names if name.endswith((".svg", ".png"))}


def page_of(name: str) -> str:
    """Return the address of the page that is made of a file outside docs/."""
    return f"files/{name}" if name.endswith(".md") else f"files/{name.rstrip('/')}.md"


def page_text(name: str) -> str:
    """Return a file of the repository as a page; of a folder, the list of its files."""
    path = ROOT / name
    if path.is_dir():
        listed = "\n".join(f"- `{one.name}`" for one in sorted(path.iterdir()) if one.is_file())
        return f"# {name}\n\n{listed}\n"
    text = path.read_text(encoding="utf-8")
    if name.endswith(".md"):
        return text
    return f"# {name}\n\n~~~~{LANGUAGES.get(path.suffix, 'text')}\n{text}\n~~~~\n"


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let the links of a page lead to where the site has the files."""
    address = page.file.src_uri
    if address in REFERENCE.values():
        return markdown
    source = address.removeprefix("files/") if address.startswith("files/") else f"docs/{address}"

    def moved(match: re.Match[str]) -> str:
        if "://" in match[1] or match[1].startswith(("#", "mailto:")):
            return match[0]
        target = normpath(str(PurePosixPath(source).parent / match[1]))
        place = target.removeprefix("docs/") if target.startswith("docs/") else page_of(target)
        return relpath(place, PurePosixPath(address).parent.as_posix()) + (match[2] or "")

    if not source.endswith(".md"):
        return markdown
    return LINK.sub(moved, markdown)


def command_line() -> str:
    """Return every command with its help, arguments and options, as a page."""
    lines = ["# Command line", "", "What `atoll COMMAND --help` prints, of all commands.", ""]
    lines += described(get_command(app), "atoll")
    return "\n".join(lines)


def described(command: Any, name: str) -> Iterator[str]:
    """Yield the lines of one command, and of those below it."""
    context = typer.Context(command, info_name=name)
    if not getattr(command, "commands", None):
        yield f"## `{name}`"
        yield ""
        yield from plain(command.help).splitlines()
        yield ""
        yield f"    {' '.join([name, *command.collect_usage_pieces(context)])}"
        yield ""
        rows = [record for one in command.params if (record := row(one, context))]
        if rows:
            yield from ("| option | meaning |", "|---|---|", *rows, "")
    for child, one in sorted(getattr(command, "commands", {}).items()):
        if not one.hidden:
            yield from described(one, f"{name} {child}")


def row(parameter: Any, context: typer.Context) -> str:
    """Return a parameter as a row of a table, or nothing if it is hidden or `--help`."""
    record = parameter.get_help_record(context)
    if record is None or parameter.name == "help":
        return ""
    return f"| `{cell(record[0])}` | {cell(plain(record[1]))} |"


def cell(text: str) -> str:
    """Return a text in one line that does not end its cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def plain(text: str | None) -> str:
    """Return a help text without the marks of a terminal's styles, its `<` kept as text."""
    return re.sub(r"\[/?(bold|dim|red|green|yellow|cyan)\]", "", text or "").replace("<", "&lt;")


def python_names() -> str:
    """Return the page of all public names of `atoll`, which MkDocs fills from docstrings."""
    lines = ["# Python names", "", "By topic: [Python API](api.md).", ""]
    for name in sorted(atoll.__all__):
        value = getattr(atoll, name)
        if isinstance(value, type) and issubclass(value, Method):
            lines += method_page(name, value)
        elif hasattr(value, "__module__"):
            lines += [f"::: {value.__module__}.{value.__qualname__}", ""]
    return "\n".join(lines)


def method_page(name: str, method: type[Method]) -> Iterator[str]:
    """Yield the lines of a method: its docstring, and a table of its options."""
    yield from (f"## {name}", "", inspect.getdoc(method) or "", "")
    yield from ("| option | type | default | meaning |", "|---|---|---|---|")
    for one in method.options():
        kind = one.kind.replace("|", "\\|")
        yield f"| `{one.name}` | {kind} | `{one.default!r}` | {cell(one.line)} |"
    yield ""
