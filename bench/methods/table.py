"""From records of runs to the rows of the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.methods.ledger import Record
from bench.methods.modelled import RATES_BPS, Clock, codec_of_means
from bench.methods.rows import ROWS
from bench.methods.shapes import Interval


def make_rows(
    records: Sequence[Record],
    references: Sequence[Record],
    *,
    clock: Clock,
    walls: Sequence[Record] = (),
) -> list[dict[str, Any]]:
    """Return one row per method, codec and number of members, over the seeds that were run.

    Args:
        records: runs in memory.
        references: comparisons of rows with their references.
        clock: the wall times of rows that were not measured.
        walls: runs in the network lab, by the hub (`python -m bench.methods.lab`).
    """
    by: dict[tuple[str, int], list[Record]] = {}
    for record in records:
        by.setdefault((record["row"], record["members"]), []).append(record)
    order = {row.name: index for index, row in enumerate(ROWS)}
    compared = {record["row"]: _reference(record) for record in references}
    measured = {(w["row"], w["members"], w["link"]): w["wall_s"] for w in walls}
    return [
        _row(name, members, runs, clock, compared.get(name), measured)
        for (name, members), runs in sorted(
            by.items(), key=lambda item: (item[0][1], order.get(item[0][0], len(order)))
        )
    ]


def _row(
    name: str,
    members: int,
    runs: Sequence[Record],
    clock: Clock,
    reference: Mapping[str, Any] | None,
    measured: Mapping[tuple[str, int, str], float],
) -> dict[str, Any]:
    first, loss = runs[0], Interval.of([run["loss"] for run in runs]).plain()
    tokens, steps = first["tokens_per_node"], first["steps"]
    overlap, codec = next(
        (
            (row.overlap_steps, codec_of_means(row.preset, first["codec"]))
            for row in ROWS
            if row.name == name
        ),
        (0, ""),
    )
    return {
        "row": name,
        "strategy": first["strategy"],
        "codec": first["codec"],
        "members": members,
        "loss": round(loss["mean"], 4),
        "loss_interval": [loss["low"], loss["high"]],
        "accuracy": _accuracy(runs),
        "seeds": loss["seeds"],
        "bytes_per_node_per_token": _mean(runs, "sent_bytes") / tokens,
        "received_per_node_per_token": _mean(runs, "received_bytes") / tokens,
        "peak_bytes": max(run["peak_bytes"] for run in runs),
        "rounds": first["rounds"],
        "identical": all(run["identical"] for run in runs),
        "wall_s": {
            label: measured.get((name, members, label))
            or round(
                clock.wall_s(
                    first["exchanges"], steps=steps, rate_bps=rate, overlap=overlap, codec=codec
                ),
                1,
            )
            for label, rate in RATES_BPS.items()
        },
        "wall_measured": [label for label in RATES_BPS if (name, members, label) in measured],
        "reference": reference,
    }


def _mean(runs: Sequence[Record], name: str) -> float:
    return sum(float(run[name]) for run in runs) / len(runs)


def _accuracy(runs: Sequence[Record]) -> float | None:
    """Return the mean accuracy of classifiers; None for others, and in records without it."""
    if any(run.get("accuracy") is None for run in runs):
        return None
    return round(_mean(runs, "accuracy"), 4)


def _reference(record: Record) -> dict[str, Any]:
    names = ("against", "compared_steps", "first_deviation", "deviation", "measure")
    return {name: record[name] for name in names if name in record}


def printed(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the columns that people see; accuracies where there is one."""
    classified = any(row["accuracy"] is not None for row in rows)
    return [
        {
            "row": row["row"],
            "members": row["members"],
            "loss": row["loss"],
            "interval": _interval(row["loss_interval"]),
            **({"accuracy": row["accuracy"]} if classified else {}),
            "bytes/token": round(row["bytes_per_node_per_token"], 3),
            "peak": row["peak_bytes"],
            **{label: wall(row, label) for label in RATES_BPS},
            "reference": _deviation(row["reference"]),
        }
        for row in rows
    ]


def wall(row: Mapping[str, Any], label: str) -> str:
    """Return the seconds of a row on a line; `~`: by the model."""
    about = "" if label in row["wall_measured"] else "~"
    return f"{about}{row['wall_s'][label]:.0f} s"


def _interval(bounds: Sequence[float | None]) -> str:
    low, high = bounds
    return "one seed" if low is None or high is None else f"{low:.3f} to {high:.3f}"


def _deviation(reference: Mapping[str, Any] | None) -> str:
    """Return how far a run was from its reference: after the first round, and at most."""
    if reference is None or reference.get("deviation") is None:
        return "-"
    most = f"{reference['deviation']:.0e}"
    return f"{reference['first_deviation']:.0e}, {most}" if "first_deviation" in reference else most
