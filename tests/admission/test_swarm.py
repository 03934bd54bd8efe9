"""A swarm of production nodes in a run with an owner, in virtual time: it goes on without who is shut out."""

from __future__ import annotations

import asyncio
from typing import Any

from admission_keys import NOW_S, OWNER, key, public
from memory_swarms import Peer, recipe, until

from noloco_node.admission.admission_state import AdmissionState
from noloco_node.admission.admitted_network import AdmittedNetwork
from noloco_node.admission.peer_keys import key_of, peer_of
from noloco_node.admission.revocation import encode_list, signed_list
from noloco_node.admission.ticket import MEMBER, encode, grant
from noloco_node.errors import Exit, user_error_of
from noloco_node.journal import events
from noloco_node.sim.clock import run
from noloco_node.sim.network.sim_network import SimNetwork

RECIPE = recipe(replicas=2, steps=400, extra=f'[admission]\nowner = "{OWNER.hex()}"\nrule = "listed"\n')
REFRESHES_S = 2.0
"""Ten of the nodes' own."""


class AdmittedHub:
    """Networks of members."""

    def __init__(self) -> None:
        self.hub, self.states = SimNetwork(), dict[str, AdmissionState]()

    def network(self, peer: str) -> Any:
        state = self.states[peer] = AdmissionState(RECIPE.digest, lambda: NOW_S)
        state.pin(OWNER, "listed")
        ticket = encode((grant(key(0), RECIPE.digest, MEMBER, NOW_S + 10**6, key_of(peer) or b""),))
        return AdmittedNetwork(self.hub.network(peer), state, ticket)


def test_a_swarm_of_members_trains_and_goes_on_without_who_is_shut_out() -> None:
    async def main() -> None:
        hub: Any = AdmittedHub()
        peers = [Peer(hub, RECIPE, peer_of(public(number + 1)), number // 2, job_s=0.5) for number in range(4)]
        victim, others = peers[3], peers[:3]
        await until(lambda: all(len(peer.of(events.InnerStep)) > 5 for peer in peers))
        begun_s = asyncio.get_running_loop().time()
        raw = encode_list(signed_list(key(0), RECIPE.digest, 1, {public(4): NOW_S + 10**6}))
        assert hub.states[peers[0].name].take_revocations(raw)
        await asyncio.wait([victim.task])
        assert asyncio.get_running_loop().time() - begun_s < REFRESHES_S
        trouble = user_error_of(victim.task.exception())
        assert trouble is not None
        assert trouble.code is Exit.NOT_ADMITTED
        await asyncio.sleep(REFRESHES_S)
        assert all(state.revocations is not None for state in hub.states.values())
        await until(lambda: len(others[0].node.roster.stages[1]) == 1, 60.0 - REFRESHES_S)
        before = {peer.name: len(peer.of(events.InnerStep)) for peer in others}
        await until(lambda: all(len(peer.of(events.InnerStep)) > before[peer.name] for peer in others))
        for peer in others:
            peer.leave.set()
        await asyncio.gather(*(peer.task for peer in others))

    run(main())
