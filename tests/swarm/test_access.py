"""Getting into a run by its invite, in memory: asked for, invited, named, or not at all."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
from admission_keys import NOW_S, OWNER, admitted, key, public

from noloco_node.admission import ticket_service
from noloco_node.admission.admission_state import AdmissionState
from noloco_node.admission.ticket import (
    KEY_HEADER,
    MEMBER,
    InviteCredential,
    Right,
    encode_list,
    grant,
    peer_of,
    signed_list,
)
from noloco_node.admission.ticket_service import TicketService, TicketSigner, is_work, work
from noloco_node.errors import Exit, UserError
from noloco_node.network.interface import PeerNetwork
from noloco_node.sim.clock import run
from noloco_node.sim.network.sim_network import SimNetwork
from noloco_node.swarm import access, invite
from noloco_node.swarm.access import RunAccess
from noloco_node.swarm.run_distribution import SCHEMA, TOPIC, RunFileText, fetch

BOOTSTRAP = peer_of(public(1))
PLACE = f"/ip4/192.0.2.1/tcp/4001/p2p/{BOOTSTRAP}"


class Hosted:
    """A bootstrap peer in memory."""

    def __init__(self, rule: str) -> None:
        self.hub = SimNetwork()
        self.recipe = RunFileText(
            '[model]\narchitecture = "llama"\nsizes = {hidden_size = 8, num_hidden_layers = 4}\n'
            f'[admission]\nowner = "{OWNER.hex()}"\nrule = "{rule}"\n',
            "the owner's",
        )
        self.digest = self.recipe.digest
        self.state = AdmissionState(self.digest, lambda: NOW_S)
        self.state.pin(OWNER, rule)

    async def open(self) -> None:
        signer = TicketSigner(key(0))
        ticket = signer.ticket(self.digest, BOOTSTRAP, MEMBER, NOW_S + 9999)
        bare = self.hub.network(BOOTSTRAP)
        network = admitted(bare, self.state, ticket)
        await network.serve(TOPIC, SCHEMA, self.recipe.serve)
        if self.recipe.run.admission.rule == "open":
            service = TicketService(self.state, signer, lambda: NOW_S)
            await bare.serve(ticket_service.TOPIC, ticket_service.SCHEMA, service.answer)

    async def enter(
        self, number: int, credential: InviteCredential | None, rights: Right, home: Path | None = None
    ) -> PeerNetwork:
        """Come by an invite, and fetch the run file."""
        parsed = invite.parse(invite.format(self.digest, [PLACE], credential))
        way = RunAccess(parsed, rights, home, lambda: NOW_S)
        network = await way.enter(self.hub.network(peer_of(public(number))))
        recipe = await fetch(network, parsed.peers, parsed.digest)
        way.pin(recipe.run)
        assert recipe.text == self.recipe.text
        assert (way.accepts is None) == (credential is None)
        return network


def played(rule: str, play: Callable[[Hosted], Awaitable[None]]) -> None:
    async def main() -> None:
        hosted = Hosted(rule)
        await hosted.open()
        await play(hosted)

    run(main())


@pytest.fixture(autouse=True)
def little_work(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Work that takes no thread, which virtual time would not wait for; returns for whom it was done."""
    done: list[str] = []

    async def here(_: object, run_id: str, peer: str) -> int:
        done.append(peer)
        return work(run_id, peer, bits=4)

    monkeypatch.setattr(access.asyncio, "to_thread", here)
    monkeypatch.setattr(ticket_service, "is_work", partial(is_work, bits=4))
    return done


def home_of(number: int, directory: Path) -> Path:
    """Return a home with the identity of a peer."""
    (directory / "identity.key").write_bytes(KEY_HEADER + number.to_bytes(32) + public(number))
    return directory


def test_an_open_run_gives_a_ticket_once_and_the_home_keeps_it(tmp_path: Path, little_work: list[str]) -> None:
    async def play(hosted: Hosted) -> None:
        home = home_of(2, tmp_path)
        await hosted.enter(2, InviteCredential(), MEMBER, home)
        hosted.hub.kill(peer_of(public(2)))
        await hosted.enter(2, InviteCredential(), MEMBER, home)
        assert little_work == [peer_of(public(2))]
        await hosted.enter(3, InviteCredential(), Right.LOOK)
        assert little_work == [peer_of(public(2))]
        # A home that was copied to another identity asks for its own.
        await hosted.enter(4, InviteCredential(), MEMBER, home)
        assert len(little_work) == 2

    played("open", play)


def test_an_invitation_and_a_name_need_nobody_to_ask(tmp_path: Path) -> None:
    async def play(hosted: Hosted) -> None:
        until = NOW_S + 999
        link = grant(key(0), hosted.digest, MEMBER | Right.ONCE, until, public(8))
        invitation = InviteCredential((link,), (8).to_bytes(32))
        await hosted.enter(2, invitation, MEMBER)
        await hosted.enter(3, invitation, Right.LOOK)
        with pytest.raises(UserError, match="does not let us in") as caught:
            await hosted.enter(4, invitation, MEMBER)
        assert caught.value.code is Exit.NOT_ADMITTED
        assert "used by somebody else" in caught.value.why
        named = InviteCredential((grant(key(0), hosted.digest, MEMBER, until, public(5)),))
        await hosted.enter(5, named, MEMBER)
        with pytest.raises(UserError, match="does not let us in"):
            await hosted.enter(6, named, MEMBER)
        # With the home of the named peer a passing identity may look, and no more.
        await hosted.enter(7, named, Right.LOOK, home_of(5, tmp_path))
        with pytest.raises(UserError, match="does not let us in"):
            await hosted.enter(9, named, MEMBER, home_of(5, tmp_path))

    played("invited", play)


def test_whoever_is_shut_out_is_told_so() -> None:
    async def play(hosted: Hosted) -> None:
        hosted.state.take_revocations(encode_list(signed_list(key(0), hosted.digest, 1, {public(2): NOW_S + 9})))
        with pytest.raises(UserError, match="does not let us in") as caught:
            await hosted.enter(2, InviteCredential(), MEMBER)
        assert "shut you out" in caught.value.why

    played("open", play)


def test_without_a_pass_a_run_with_an_owner_gives_nothing() -> None:
    async def play(hosted: Hosted) -> None:
        with pytest.raises(UserError, match="does not let us in") as caught:
            await hosted.enter(2, None, MEMBER)
        assert caught.value.code is Exit.NOT_ADMITTED
        assert "no ticket" in caught.value.why

    played("open", play)
