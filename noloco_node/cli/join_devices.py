"""`noloco-node join --devices`: one node on each of several devices of this machine.

Each node is a process with a home of its own, the folder of its device below `--home`. What the owner allows of the
line, of main memory, of the disk and of the processor is divided by the number of nodes: a node does not know what the
others leave.
The nodes print to the same screen, each line with its device. A signal to this process goes to all nodes.
"""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path

from noloco_node.cli.options import INVITE_VARIABLE, JoinOptions, default_home
from noloco_node.demo.child_processes import Child, Children, tied_command
from noloco_node.demo.swarm_processes import cores
from noloco_node.errors import NEEDS_A_PERSON, Exit, UserError, usage_error
from noloco_node.machine.interface import check_device_name
from noloco_node.machine.signals import departure
from noloco_node.storage.home import typed
from noloco_node.swarm import invite as invites
from noloco_node.tasks import background
from noloco_node.terminal import DEVICE_VARIABLE, say, terminal_options

_PORT = re.compile(r"(?<=/tcp/)\d+|(?<=/udp/)\d+|^\d+$|(?<=:)\d+$")
"""Of an address to listen on, such as /ip4/0.0.0.0/tcp/4001, or of a place to serve at, such as 9464."""


def named_devices(options: JoinOptions) -> list[str]:
    """Return the devices that `--devices` names, [] without it; those of `all` are found with torch."""
    if options.devices is None:
        return []
    if options.device != "auto":
        raise _refusal("--device and --devices were both given", "one of them")
    if options.devices == "all":
        say("loading torch (a few seconds)")
        from noloco_node.machine.device import all_gpus

        return [str(gpu) for gpu in all_gpus()] or ["cpu"]
    names = [name.strip() for name in options.devices.split(",")]
    for name in names:
        check_device_name(name)
    if "auto" in names or len(set(names)) < len(names):
        raise _refusal("each device is to have one name, and auto is none", "--devices all, or cuda:0,cuda:1")
    return names


def _refusal(why: str, hint: str) -> UserError:
    return usage_error("The devices cannot be used.", why=why, hint=hint)


def divided(options: JoinOptions, names: list[str], free_ram: int) -> list[JoinOptions]:
    """Return the options of the node on each device.

    Ports count up from that of the first device. `free_ram`: bytes of main memory that are free. The nodes share them
    out where the owner names no bound: those that start together would each take all of it for free. Raises `UserError`
    where a share is too small.
    """
    number, limits = len(names), options.allowance
    home = options.home or default_home("node")
    upload, download, cap = limits.upload_bytes_per_s, limits.download_bytes_per_s, limits.monthly_cap_bytes
    shares = replace(
        options,
        devices=None,
        threads=options.threads or max(1, cores() // number),
        max_ram=f"{min(options.most_ram_bytes or free_ram, free_ram) // number}B",
        max_disk=None if options.most_disk_bytes is None else f"{options.most_disk_bytes // number}B",
        max_upload=None if upload is None else f"{upload / number:.0f}B/s",
        max_download=None if download is None else f"{download / number:.0f}B/s",
        monthly_cap=None if cap is None else f"{cap // number}B",
    )
    _ = shares.allowance, shares.most_ram_bytes, shares.most_disk_bytes
    return [
        replace(
            shares,
            device=name,
            home=typed(home).absolute() / name.replace(":", "-"),
            listen=_counted_up(options.listen, place),
            announce=_counted_up(options.announce, place),
            metrics=None if options.metrics is None else _with_port_up(options.metrics, place),
            web=None if options.web is None else _with_port_up(options.web, place),
        )
        for place, name in enumerate(names)
    ]


def _counted_up(addresses: list[str] | None, by: int) -> list[str] | None:
    return None if addresses is None else [_with_port_up(address, by) for address in addresses]


def _with_port_up(address: str, by: int) -> str:
    """Return an address with its port higher by so much; port 0, which is any, stays."""
    return _PORT.sub(lambda port: str(int(port[0]) + by if int(port[0]) else 0), address)


def words(options: JoinOptions) -> list[str]:
    """Return the options as a person would type them."""
    found: list[str] = []
    for field in fields(options):
        value, name = getattr(options, field.name), f"--{field.name.replace('_', '-')}"
        if value == field.default:
            continue
        if value is True:
            found.append(name)
        else:
            found += [word for each in (value if isinstance(value, list) else [value]) for word in (name, str(each))]
    return found


def worst(codes: Iterable[int]) -> int:
    """Return the exit code that stands for those of all nodes.

    A failure comes before an interrupt. Of failures, one comes first after which another start may help.
    """
    known = [code if code >= 0 else Exit.BUG for code in codes]
    return max(known, key=lambda code: (code != Exit.OK, code != Exit.INTERRUPTED, code not in NEEDS_A_PERSON))


async def join_each(invite: str | None, each: list[JoinOptions]) -> int:
    """Run a node with each of these options to its end; return the exit code that stands for all."""
    for options in each:
        invites.parse(invites.found(invite, _home(options)))
    children = Children()
    async with departure(say) as leaving:
        try:
            nodes = [_start(children, invite, options) for options in each]
            leaving.polite = True

            async def pass_on() -> None:
                await leaving.asked.wait()
                for node in nodes:
                    node.signal(signal.SIGINT)

            async with background(pass_on()):
                return worst(await asyncio.gather(*map(_ended, nodes)))
        finally:
            # Those that still run after a second signal, or that lose this process by an error, leave at once.
            await children.stop()


def _start(children: Children, invite: str | None, options: JoinOptions) -> Child:
    """Start the node of one device. The invite may be a secret, and the list of processes shows what is typed."""
    environment = {DEVICE_VARIABLE: options.device} | ({} if invite is None else {INVITE_VARIABLE: invite})
    command = tied_command("noloco_node", *terminal_options(), "join", *words(options))
    return children.start(options.device, command, _home(options), environment=environment, shown=True)


def _home(options: JoinOptions) -> Path:
    assert options.home is not None, "each node has one of its own"
    return options.home


async def _ended(node: Child) -> int:
    """Return the exit code of a node, and say how it ended."""
    code = await node.ended()
    say(f"the node on {node.name} was {node.end}" if code < 0 else f"the node on {node.name} {node.end}")
    return code
