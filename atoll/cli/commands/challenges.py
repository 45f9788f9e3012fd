"""`atoll challenges`: rounds of members that others computed again, with the results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Mapping

SHOWN = 20
FIGURES = ("along", "alike", "rating")
"""What is shown of a member's contributions; see `MemberRecord`."""


def challenges(
    job: Annotated[str, typer.Argument(help='A job with trust = "audit".')],
    all_: Annotated[bool, typer.Option("--all", help="Show all that the hub has kept.")] = False,
    hub: Annotated[str, typer.Option(help="Ticket or URL of the hub (default: the last).")] = "",
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Show which members' rounds others computed again, and which members have strikes."""
    import json

    from atoll.cli import hub_access
    from atoll.cli.jobs.names import job_named
    from atoll.cli.views import screen

    with hub_access.find(hub).client() as client:
        found = client.verification(job_named(client, job))
    if json_:
        typer.echo(json.dumps(found, indent=1))
    else:
        lines = challenge_lines(found, limit=0 if all_ else SHOWN)
        screen.output().print("\n".join(lines), soft_wrap=True, markup=False)


def challenge_lines(found: Mapping[str, Any], *, limit: int = 0) -> list[str]:
    """Return the members with their strikes, then challenges, newest first; `limit` 0: all."""
    lines = []
    for name, one in found["members"].items():
        strikes = one.get("strikes", [])
        state = "trusted" if one.get("checked") else "not checked"
        state = "evicted" if one.get("evicted") else "watched" if strikes else state
        lines.append(
            f"{name}  {state}  {one.get('checked', 0)} of {one.get('rounds', 0)} rounds checked,"
            f" {one.get('passed', 0)} passed, {len(strikes)} strikes"
            + (
                f", accused others falsely: {one['accused_falsely']}"
                if one.get("accused_falsely")
                else ""
            )
            + "".join(f", {name} {one[name]:.2f}" for name in FIGURES if name in one)
        )
        lines += [f"    {why}" for why in strikes]
    lines += [
        f"round {one['round']}  {one['member']}  waits for {one['stage']}"
        + (f", checker {one['checker']}" if one["checker"] else "")
        for one in found["open"]
    ]
    settled = found["settled"]
    for one in settled[:limit] if limit else settled:
        by = ", ".join(f"{k} {one[k]}" for k in ("checker", "judge") if one.get(k))
        reason = f": {one['reason']}" if one.get("reason") else ""
        if "own" in one or "held_out" in one:
            own, held_out = (100 * one.get(name, 0.0) for name in ("own", "held_out"))
            reason += f": gained {own:.1f} % on its own data, {held_out:.1f} % on held-out data"
        lines.append(
            f"round {one['round']}  {one['member']}  {one['result']} ({one['why']}"
            + (f"; {by}" if by else "")
            + f"){reason}"
        )
    if limit and len(settled) > limit:
        lines.append(f"{len(settled) - limit} older ones: --all")
    return lines or ["no member has been checked yet"]
