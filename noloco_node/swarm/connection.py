"""How a command reaches a swarm: the network of one run, opened for as long as the command needs it.

A node whose hours have come again also knows whom it met before. It goes in by the invite as long as anybody of the
invite opens; where nobody does, it knocks at those others as well before it calls the swarm unreachable.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from noloco_node.admission.owner_files import key_file, load_key
from noloco_node.admission.ticket import Right
from noloco_node.errors import Exit, UserError
from noloco_node.libp2p.addresses import KnownPeers
from noloco_node.libp2p.network import Libp2pNetwork
from noloco_node.libp2p.settings import NetworkSettings
from noloco_node.network.interface import HookedNetwork, PeerNetwork
from noloco_node.network.timeouts import DialTimeouts
from noloco_node.run.runfile import read_run_text
from noloco_node.swarm import invite as invites
from noloco_node.swarm.access import RunAccess
from noloco_node.swarm.membership import Membership
from noloco_node.swarm.run_distribution import RunFileText, fetch
from noloco_node.tasks import background
from noloco_node.terminal import say


@asynccontextmanager
async def connected(settings: NetworkSettings, met: KnownPeers | None = None) -> AsyncIterator[Libp2pNetwork]:
    """Open the network, and end the body with `UserError` should our libp2p daemon die again and again.

    `met`: whom earlier networks of this peer met; whom this one meets is added.
    """
    async with _entered(settings, met) as network, asyncio.TaskGroup() as group:
        watch = group.create_task(network.wait_daemon(), name="daemon watch")
        try:
            yield network
        finally:
            watch.cancel()


@asynccontextmanager
async def _entered(settings: NetworkSettings, met: KnownPeers | None) -> AsyncIterator[Libp2pNetwork]:
    """Open the network by the bootstrap peers; if nobody opens, by those or anybody that we met."""
    async with AsyncExitStack() as stack:
        try:
            network = await stack.enter_async_context(Libp2pNetwork.open(settings, say, met))
        except UserError as trouble:
            wider = settings if met is None else with_bootstrap_addresses(settings, met.doors())
            if trouble.code is not Exit.UNREACHABLE or wider == settings:
                raise
            network = await stack.enter_async_context(Libp2pNetwork.open(wider, say, met))
            say("no bootstrap peer opened; back by way of peers that we met before")
        yield network


def with_bootstrap_addresses(settings: NetworkSettings, doors: tuple[str, ...]) -> NetworkSettings:
    """Return settings with further peers to join by, each address once."""
    return msgspec.structs.replace(settings, bootstrap=tuple(dict.fromkeys((*settings.bootstrap, *doors))))


class Visitor(msgspec.Struct, frozen=True):
    """Whoever looks at a swarm without joining it.

    `allowed`: the directories of this machine that the run file may name. `home`: of the identity whose ticket is shown
    where the run lists its peers. `run`: the run file beside which the key of its owner may lie, who may always look.
    """

    allowed: tuple[str, ...] = ()
    home: Path | None = None
    run: Path | None = None

    def owner_key(self, digest: str) -> Ed25519PrivateKey | None:
        """Return the key of the owner of the run with this digest, if it lies here."""
        if self.run is None or not (self.run.is_file() and key_file(self.run).is_file()):
            return None
        ours = RunFileText(read_run_text(self.run), str(self.run)).digest == digest
        return load_key(self.run) if ours else None


@asynccontextmanager
async def visited(invite: str, visitor: Visitor) -> AsyncIterator[tuple[PeerNetwork, RunFileText, Membership]]:
    """Visit the swarm of an invite without joining it: a passing identity, no listening, one look at the roster.

    A peer that does not take calls holds the visitor up no longer than a node (`noloco_node.network.timeouts`).
    """
    parsed = invites.parse(invite)
    access = RunAccess(
        parsed, Right.LOOK, visitor.home, owner=await asyncio.to_thread(visitor.owner_key, parsed.digest)
    )
    settings = NetworkSettings(
        run=parsed.digest,
        listen=("/ip4/127.0.0.1/tcp/0",),
        bootstrap=tuple(map(str, parsed.addresses)),
        accepts=access.accepts,
    )
    async with connected(settings) as whole:
        network = HookedNetwork(await access.enter(whole), DialTimeouts())
        recipe = await fetch(network, parsed.peers, parsed.digest, visitor.allowed)
        access.pin(recipe.run)
        membership = Membership(network, parsed.digest, recipe.run.pipeline.stages)
        await membership.peek()
        async with background(access.renew(say)):
            yield network, recipe, membership
