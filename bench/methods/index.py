"""The index of methods: `python -m bench.methods.index` makes its table in docs/methods/README.md.

Traffic is what the strategies themselves tell for 100 M parameters, 8 members and 1,000 steps.
"""

from __future__ import annotations

from pathlib import Path

from atoll.strategies.traffic_table import Row, Scale, rows

PAGE = Path(__file__).resolve().parents[2] / "docs" / "methods" / "README.md"
SCALE = Scale(parameters=100_000_000, peers=8, steps=1000)
BEGIN, END = "<!-- table: python -m bench.methods.index -->", "<!-- end of table -->"


def table() -> str:
    """Return the table of all methods in Markdown."""
    found = rows(SCALE)
    yardstick = next(row for row in found if row["name"] == "ddp")["per_step"]["relay_sent"]
    lines = [
        "| method | what it does | choose it for | sent per step | against `ddp` |",
        "|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *(_line(row, yardstick) for row in found)]) + "\n"


def _line(row: Row, yardstick: float) -> str:
    sent = row["per_step"]["relay_sent"]
    page = Path(row["page"]).relative_to("docs/methods").as_posix()
    paper = row["papers"][0] if row["papers"] else None
    year = f" ([{paper['year']}]({paper['url']}))" if paper else ""
    fewer = f"{yardstick / sent:,.0f} times fewer" if 0 < 2 * sent < yardstick else ""
    suits = f"{row['good_for']}; loss {row['loss']}" if row["loss"] else row["good_for"]
    return (
        f"| [`{row['name']}`]({page}){year} | {row['line']} | {suits} "
        f"| {_size(sent)} | {fewer if sent >= 1 else ''} |"
    )


def _size(nbytes: float) -> str:
    """Return bytes for people, powers of ten."""
    if nbytes < 1:
        return "-"
    for unit in ("B", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if nbytes >= 10 else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} GB"


def with_table(text: str) -> str:
    """Return a page with its table made anew."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}{END}{after}"


def main() -> None:
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
