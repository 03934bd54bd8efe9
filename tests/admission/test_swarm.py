"""A swarm of production nodes in a run with an owner, in virtual time: it goes on without who is shut out."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from admission_keys import NOW_S, OWNER, admitted, key, public
from continued_runs import ADAPTER, Continued
from memory_swarms import Peer, asked_to_leave, recipe, until

from gossip.interface import OuterStepTaken
from noloco_node.admission import ticket_service
from noloco_node.admission.admission_state import AdmissionState
from noloco_node.admission.ticket import (
    MEMBER,
    InviteCredential,
    encode,
    encode_list,
    grant,
    key_of,
    peer_of,
    signed_list,
)
from noloco_node.admission.ticket_service import TicketService, TicketSigner
from noloco_node.errors import Exit, user_error_of
from noloco_node.journal import events
from noloco_node.sim.network.sim_network import SimNetwork
from noloco_node.swarm import access, invite
from noloco_node.swarm.access import RunAccess
from noloco_node.swarm.run_distribution import SCHEMA, TOPIC

OWNED: dict[str, Any] = {
    "replicas": 2,
    "steps": 400,
    "extra": f'[admission]\nowner = "{OWNER.hex()}"\nrule = "listed"\n',
}
REFRESHES_S = 2.0
"""Ten of the nodes' own."""


class AdmittedHub:
    """Networks of members of a run."""

    def __init__(self, run: str) -> None:
        self.run, self.hub, self.states = run, SimNetwork(), dict[str, AdmissionState]()

    def network(self, peer: str) -> Any:
        state = self.states[peer] = AdmissionState(self.run, lambda: NOW_S)
        state.pin(OWNER, "listed")
        ticket = encode((grant(key(0), self.run, MEMBER, NOW_S + 10**6, key_of(peer) or b""),))
        return admitted(self.hub.network(peer), state, ticket)


def partners(peer: Peer) -> list[str]:
    return [event.partner for event in peer.of(OuterStepTaken) if event.partner is not None]


@pytest.mark.parametrize("stages", [2, 1], ids=["pipeline", "one stage of adapters"])
async def test_a_swarm_of_members_trains_and_goes_on_without_who_is_shut_out(tmp_path: Path, stages: int) -> None:
    names, stage = [peer_of(public(number + 1)) for number in range(4)], stages - 1
    if stages == 1:
        made = Continued(tmp_path, adapter=ADAPTER, stages=1, **OWNED)
        hub = made.hub = AdmittedHub(made.recipe.digest)
        peers = [made.peer(name, 0, made.whole(), job_s=0.5) for name in names]
    else:
        what = recipe(**OWNED)
        hub = AdmittedHub(what.digest)
        peers = [Peer(cast(Any, hub), what, name, number // 2, job_s=0.5) for number, name in enumerate(names)]
    victim, others = peers[3], peers[:3]
    await until(lambda: all(partners(peer) for peer in peers))
    begun_s = asyncio.get_running_loop().time()
    raw = encode_list(signed_list(key(0), hub.run, 1, {public(4): NOW_S + 10**6}))
    assert hub.states[peers[0].name].take_revocations(raw)
    await asyncio.wait([victim.task])
    assert asyncio.get_running_loop().time() - begun_s < REFRESHES_S
    trouble = user_error_of(victim.task.exception())
    assert trouble.code is Exit.NOT_ADMITTED
    await asyncio.sleep(REFRESHES_S)
    assert all(state.revocations is not None for state in hub.states.values())
    await until(
        lambda: all(each.peer != victim.name for each in others[0].node.roster.stage(stage)), 60.0 - REFRESHES_S
    )
    before = {peer.name: len(peer.of(events.InnerStep)) for peer in others}
    met = len(partners(peers[0]))
    await until(lambda: all(len(peer.of(events.InnerStep)) > before[peer.name] for peer in others))
    await until(lambda: len(partners(peers[0])) > met + 2)
    assert victim.name not in partners(peers[0])[met:]
    await asked_to_leave(*others)


class Renewed:
    """A run with an owner whose clock goes, and a bootstrap peer that gives tickets by its rule."""

    def __init__(self, rule: str) -> None:
        text = f'[admission]\nowner = "{OWNER.hex()}"\nrule = "{rule}"\n'
        self.hub, self.rule, self.recipe = SimNetwork(), rule, recipe(replicas=2, steps=4000, extra=text)
        self.run, self.door, self.named = self.recipe.digest, peer_of(public(9)), dict[bytes, int]()

    def now_s(self) -> float:
        return NOW_S + asyncio.get_running_loop().time()

    async def open(self) -> None:
        """Begin the bootstrap peer."""
        state, signer = AdmissionState(self.run, self.now_s), TicketSigner(key(0))
        state.pin(OWNER, self.rule)
        bare = self.hub.network(self.door)
        whole = admitted(bare, state, signer.ticket(self.run, self.door, MEMBER, NOW_S + 10**7))
        named = None if self.rule == "open" else lambda key: self.named.get(key, 0)
        service = TicketService(state, signer.ticket, self.now_s, named)
        await whole.serve(TOPIC, SCHEMA, self.recipe.serve)
        await bare.serve(ticket_service.TOPIC, ticket_service.SCHEMA, service.answer)

    async def join(self, number: int, until: int) -> Peer:
        """Begin a node with a ticket of the owner's that is good until then."""
        link = grant(key(0), self.run, MEMBER, until, public(number))
        place = f"/ip4/192.0.2.1/tcp/4001/p2p/{self.door}"
        parsed = invite.parse(invite.format(self.run, [place], InviteCredential((link,))))
        way = RunAccess(parsed, MEMBER, None, self.now_s)
        network = await way.enter(self.hub.network(peer_of(public(number))))
        way.pin(self.recipe.run)
        hub: Any = SimpleNamespace(network=lambda _: network)
        peer = Peer(hub, self.recipe, peer_of(public(number)), number % 2, job_s=1.5)
        said = peer.__dict__.setdefault("renewals", [])
        peer.__dict__["renewing"] = asyncio.create_task(way.renew(said.append))
        return peer


@pytest.mark.parametrize("rule", ["open", "listed"])
async def test_a_node_whose_ticket_expires_goes_on_with_another_and_one_without_is_out(
    monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    """`patient` trains on after its first ticket; `late` has the same, and the owner does not prolong it.

    In an open run whoever asks gets another, so nobody is late there.
    """

    async def here(_: object, *__: str) -> int:
        return 0

    monkeypatch.setattr(access.asyncio, "to_thread", here)
    monkeypatch.setattr(ticket_service, "is_work", lambda *_: True)

    swarm, expires_s = Renewed(rule), 90
    await swarm.open()
    others = [await swarm.join(number, NOW_S + 10**6) for number in (2, 3)]
    patient = await swarm.join(4, NOW_S + expires_s)
    late = None if rule == "open" else await swarm.join(5, NOW_S + expires_s)
    everybody = [*others, patient, *([] if late is None else [late])]
    await until(lambda: all(len(peer.of(events.InnerStep)) > 5 for peer in everybody))
    swarm.named[public(4)] = NOW_S + 10**6
    if late is not None:
        await asyncio.wait([late.task])
        assert expires_s <= asyncio.get_running_loop().time() < expires_s + 60.0
        trouble = user_error_of(late.task.exception())
        assert trouble.code is Exit.NOT_ADMITTED
        assert "expired" in trouble.why
        assert sum("nobody gives us another" in line for line in late.__dict__["renewals"]) > 0
        late.__dict__["renewing"].cancel()
    await asyncio.sleep(max(0.0, expires_s + 40.0 - asyncio.get_running_loop().time()))
    assert [record.peer for record in others[0].node.roster.stages[1]] == [others[1].name]
    before = len(patient.of(events.InnerStep))
    await until(lambda: len(patient.of(events.InnerStep)) > before + 5)
    assert sum("new ticket" in line for line in patient.__dict__["renewals"]) == 1
    patient.__dict__["renewing"].cancel()
    await asked_to_leave(*others, patient)
