"""`atoll join`: run this machine as a node of a hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

_POLICY = "Limits on the use of this machine (also in node.toml)"


def join(
    ticket: Annotated[
        str,
        typer.Argument(
            help="Ticket from `atoll up` or `atoll hub`; without it, a hub on this network and "
            "its pairing code."
        ),
    ] = "",
    code: Annotated[
        str, typer.Option(help="Pairing code that `atoll up` shows (also: ATOLL_CODE).")
    ] = "",
    hub: Annotated[
        str, typer.Option(help="With a code: HOST or HOST:PORT of a hub that is not found.")
    ] = "",
    slots: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Maximum number of concurrent workers; default: one per accelerator, else 1.",
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="Name of this machine (default: its own).")] = "",
    home: Annotated[
        Path | None, typer.Option(help="Folder of this node (default: Atoll's own).")
    ] = None,
    preempt_file: Annotated[
        Path | None,
        typer.Option(help="Return work and accept none while this file exists."),
    ] = None,
    preempt_url: Annotated[
        str,
        typer.Option(help="The same while this URL answers 200 (a cloud's spot notice)."),
    ] = "",
    via_proxy: Annotated[
        str,
        typer.Option(
            help="Proxy to the hub, e.g. http://USER:PASSWORD@HOST:PORT, socks5://...; or direct."
        ),
    ] = "",
    policy: Annotated[
        Path | None, typer.Option(help="The owner's policy (default: node.toml in the home).")
    ] = None,
    cores: Annotated[
        float | None, typer.Option(help="Maximum number of cores.", rich_help_panel=_POLICY)
    ] = None,
    memory_gb: Annotated[
        float | None, typer.Option(help="Maximum memory in GB.", rich_help_panel=_POLICY)
    ] = None,
    disk_gb: Annotated[
        float | None, typer.Option(help="Maximum disk space in GB.", rich_help_panel=_POLICY)
    ] = None,
    upload_mbps: Annotated[
        float | None, typer.Option(help="Maximum upload rate in Mbit/s.", rich_help_panel=_POLICY)
    ] = None,
    download_mbps: Annotated[
        float | None, typer.Option(help="Maximum download rate in Mbit/s.", rich_help_panel=_POLICY)
    ] = None,
    nice: Annotated[
        int | None, typer.Option(help="Niceness of work, 0 to 19.", rich_help_panel=_POLICY)
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="Device of jobs: auto, cpu (keeps the accelerator for you), or e.g. cuda:1.",
            rich_help_panel=_POLICY,
        ),
    ] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(
            help="Kind of job it runs (repeatable): trainer, script, command, container, signed.",
            rich_help_panel=_POLICY,
        ),
    ] = None,
    sandbox: Annotated[
        str | None,
        typer.Option(
            help="on: jobs see the system, Python and their own folder only; default off.",
            rich_help_panel=_POLICY,
        ),
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(
            help="What jobs in the sandbox reach: hub (default), or open.", rich_help_panel=_POLICY
        ),
    ] = None,
    readable: Annotated[
        list[str] | None,
        typer.Option(help="Folder that jobs in the sandbox may read.", rich_help_panel=_POLICY),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(help="Label that jobs can require (repeatable).", rich_help_panel=_POLICY),
    ] = None,
    mount: Annotated[
        list[str] | None,
        typer.Option(help="Folder that containers may mount.", rich_help_panel=_POLICY),
    ] = None,
    trusted_key: Annotated[
        list[str] | None,
        typer.Option(help="Images signed with this key may run.", rich_help_panel=_POLICY),
    ] = None,
    quiet_hours: Annotated[
        list[str] | None,
        typer.Option(
            help='Hours without work, e.g. "22:00-07:00" or "mon-fri 09:00-17:00".',
            rich_help_panel=_POLICY,
        ),
    ] = None,
    pause_on_battery: Annotated[
        bool | None,
        typer.Option(
            "--pause-on-battery/--work-on-battery",
            help="No work on battery.",
            rich_help_panel=_POLICY,
        ),
    ] = None,
    battery_percent: Annotated[
        float | None,
        typer.Option(
            help="With --pause-on-battery: only at or below this charge.", rich_help_panel=_POLICY
        ),
    ] = None,
    pause_on_metered: Annotated[
        bool | None,
        typer.Option(
            "--pause-on-metered/--work-on-metered",
            help="No work on a network paid by volume.",
            rich_help_panel=_POLICY,
        ),
    ] = None,
    pause_when_active: Annotated[
        float | None,
        typer.Option(
            metavar="MINUTES",
            help="No work until the machine has been idle for so long.",
            rich_help_panel=_POLICY,
        ),
    ] = None,
) -> None:
    """Join a hub and serve it in the foreground until Ctrl+C.

    SIGTERM and a preemption notice let workers finish or abandon their round within 5 seconds.
    """
    from atoll import config
    from atoll.cli.choose_hub import Wanted, choose_hub
    from atoll.cli.jobs.precheck import check_can_train
    from atoll.cli.ticket_argument import read_ticket
    from atoll.cli.views import screen
    from atoll.cli.views.node_line import NodeLine
    from atoll.net.proxies import check_proxy
    from atoll.node.agent.options import NodeOptions
    from atoll.node.agent.serve import run_node
    from atoll.node.availability.preemption import PreemptionNotices, check_url

    console = screen.output()
    check_can_train()
    folder, proxy = (home or config.home()).resolve(), check_proxy(via_proxy)
    place = read_ticket(ticket)
    if place is None:
        wanted = Wanted(
            home=folder,
            code=code or config.take_code(),
            address=hub,
            proxy=proxy,
        )
        place = choose_hub(console, wanted)
    chosen: dict[str, Any] = {
        "cores": cores,
        "memory_gb": memory_gb,
        "disk_gb": disk_gb,
        "upload_mbps": upload_mbps,
        "download_mbps": download_mbps,
        "nice": nice,
        "device": device,
        "kinds": kind,
        "sandbox": sandbox,
        "network": network,
        "readable": readable,
        "labels": label,
        "mounts": mount,
        "trusted_keys": trusted_key,
        "quiet_hours": quiet_hours,
        "pause_on_battery": pause_on_battery,
        "battery_percent": battery_percent,
        "pause_on_metered": pause_on_metered,
        "pause_when_active": pause_when_active,
    }
    options = NodeOptions(
        ticket=place,
        home=folder,
        name=name,
        slots=slots or 0,
        notices=PreemptionNotices(preempt_file, check_url(preempt_url)),
        policy=policy,
        policy_options={key: value for key, value in chosen.items() if value not in (None, [])},
        proxy=proxy,
    )
    line = NodeLine(console, hub=place.url, policy=options.policy_file().read())

    with line:
        run_node(options, on_ready=lambda me: line.ready(me.node), on_status=line.show)
    console.print("left the hub; no process is running")
