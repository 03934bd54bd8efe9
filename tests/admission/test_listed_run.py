"""A listed run of real processes: who is named trains, who is not is told so, and who is revoked is out."""

import re
import time
from pathlib import Path

import pytest
from process_swarm import LOCAL, SLOW, host, run_file
from processes import Command, Commands

from noloco_node.admission.owner_files import make_key, public_half, save_key
from noloco_node.admission.ticket import peer_of_file
from noloco_node.cli.members import MemberAction, MemberOptions, administer
from noloco_node.errors import Exit
from noloco_node.libp2p.settings import ensure_identity
from noloco_node.storage.home import HomePaths

pytestmark = pytest.mark.network

OUT_S = 60.0


def listed(directory: Path) -> Path:
    """Write a run file, and its owner's key beside it."""
    run = run_file(directory)
    key = make_key(run)
    run.write_text(f'{run.read_text()}[admission]\nowner = "{public_half(key)}"\nrule = "listed"\n')
    save_key(run, key)
    return run


def join(commands: Commands, invite: str, home: Path, stage: int = 0) -> Command:
    options = ("--stage", str(stage), "--listen", LOCAL, "--refresh", "1", "--threads", "1", "--home", str(home), *SLOW)
    return commands.start("join", invite, *options)


def refused(command: Command, code: Exit, words: str) -> str:
    """Wait until a join ends with a code and one message; return the peer id that it said first."""
    assert command.wait() == code, command.complaint
    (what,) = re.findall(r"^noloco-node: .*$", command.complaint, re.MULTILINE)
    assert words in command.complaint[command.complaint.index(what) :], command.complaint
    found = re.search(r"we are (12D3\w+)", command.complaint)
    assert found is not None, command.complaint
    return found[1]


def named(home: Path) -> str:
    """Make the identity of a home before any node has run there; return its peer id."""
    home.mkdir(mode=0o700)
    ensure_identity(HomePaths(home).identity)
    peer = peer_of_file(HomePaths(home).identity)
    assert peer is not None
    return peer


def trains(home: Path) -> bool:
    journal = home / "journal.jsonl"
    return journal.exists() and '"inner_step"' in journal.read_text()


def test_named_peers_train_others_are_refused_and_a_revoked_one_is_out_within_a_minute() -> None:
    with Commands() as commands:
        run, homes = listed(commands.directory), [commands.directory / f"of-{stage}" for stage in range(2)]
        bootstrap, door = host(commands, run)
        peers = [refused(join(commands, door, homes[0]), Exit.NOT_ADMITTED, "no ticket"), named(homes[1])]
        invites = [administer(MemberAction.INVITE, MemberOptions(who=peer, run=run, invite=door)) for peer in peers]
        nodes = [
            join(commands, invite, home, stage) for stage, (invite, home) in enumerate(zip(invites, homes, strict=True))
        ]
        commands.until(lambda: all(map(trains, homes)), "both train", alive=[bootstrap, *nodes])

        administer(MemberAction.REVOKE, MemberOptions(who=peers[1], run=run))
        begun_s = time.monotonic()
        refused(nodes[1], Exit.NOT_ADMITTED, "the owner of the run has shut you out")
        assert time.monotonic() - begun_s < OUT_S
