"""`noloco-node doctor`: what would keep this machine from joining."""

from __future__ import annotations

from typing import Annotated

import typer

from noloco_node.cli import options
from noloco_node.doctor.command import DoctorRequest, report
from noloco_node.machine.signals import run


def doctor(
    invite: Annotated[
        str | None,
        typer.Argument(
            metavar="[INVITE]",
            help="Of the swarm to join; without one only this machine.",
            callback=options.invite_text,
        ),
    ] = None,
    home: options.HomeOption = None,
    device: options.DeviceOption = "auto",
    listen: options.ListenOption = None,
    announce: options.AnnounceOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of lines.")] = False,
    local: options.LocalOption = None,
) -> None:
    """Say before joining what would be in the way, and what to do: clock, addresses, reach, line, memory, disk.

    Exit code 11 when something will prevent joining.
    """
    wish = DoctorRequest(
        home=home or options.default_home("node"),
        device=device,
        listen=tuple(listen or ()),
        announce=tuple(announce or ()),
        local=tuple(local or ()),
    )
    raise typer.Exit(run(report(invite, wish, typer.echo, as_json=as_json)))
