"""A run with an owner over real daemons: whoever only knows an address gets nothing, whoever is shut out is out."""

import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from admission_keys import admitted, key
from limits import PATIENT
from user_errors import user_error

from noloco_node.admission.admission_state import AdmissionState, HeldTicket
from noloco_node.admission.ticket import MEMBER, Right, encode, encode_list, grant, key_of, signed_list
from noloco_node.doctor import command
from noloco_node.errors import Exit, UserError
from noloco_node.libp2p import network as libp2p_network
from noloco_node.libp2p import reachability
from noloco_node.libp2p.addresses import parse_peer_address
from noloco_node.libp2p.hivemind_compat import load_hivemind
from noloco_node.libp2p.network import Libp2pNetwork
from noloco_node.libp2p.record_checks import place_of
from noloco_node.libp2p.settings import NetworkSettings, RunSecret
from noloco_node.network.interface import PeerNetwork
from noloco_node.run.peer_state import PeerState
from noloco_node.swarm import run_distribution, speed_test
from noloco_node.swarm.membership import Membership
from noloco_node.swarm.roster import PeerRecord
from noloco_node.swarm.run_distribution import SCHEMA, TOPIC, RunFileText, fetch

pytestmark = pytest.mark.network

LOCAL = "/ip4/127.0.0.1/tcp/0"
OWNER = key(0).public_key().public_bytes_raw()
RECIPE = RunFileText(
    f'[model]\narchitecture = "llama"\nsizes = {{hidden_size = 8, num_hidden_layers = 4}}\n'
    f'[admission]\nowner = "{OWNER.hex()}"\nrule = "invited"\n',
    "the owner's",
)


class Clock:
    """The time of day, which a test may put forward."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead_s


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    directory = tempfile.mkdtemp(prefix="noloco-admission-")
    monkeypatch.setattr(tempfile, "tempdir", directory)
    yield
    shutil.rmtree(directory)


@asynccontextmanager
async def opened(
    *doors: str, run: str = RECIPE.digest, admission: AdmissionState | None = None
) -> AsyncIterator[Libp2pNetwork]:
    settings = NetworkSettings(run=run, listen=(LOCAL,), bootstrap=doors, admission=admission, timeouts=PATIENT)
    async with Libp2pNetwork.open(settings, print) as network:
        yield network


def knowing(clock: Clock) -> AdmissionState:
    """Return what a peer knows that has the run file."""
    state = AdmissionState(RECIPE.digest, clock)
    state.pin(OWNER, RECIPE.run.admission.rule)
    return state


def ticket(network: PeerNetwork, rights: Right = MEMBER, until_s: float = 3600.0) -> bytes:
    subject = key_of(network.peer_id)
    assert subject is not None
    return encode((grant(key(0), RECIPE.digest, rights, int(time.time() + until_s), subject),))


def let_in(network: PeerNetwork, state: AdmissionState, until_s: float = 3600.0) -> PeerNetwork:
    """Return the network of a member."""
    return admitted(network, state, ticket(network, until_s=until_s))


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger cannot tell a peer that has just started from one that knows no such topic, and asks again."""
    monkeypatch.setattr(run_distribution, "ATTEMPT_EVERY_S", 0.0)


async def serve(network: PeerNetwork) -> Membership:
    """Answer as a node does, and be in the roster."""
    await network.serve(TOPIC, SCHEMA, RECIPE.serve)
    await network.serve(speed_test.TOPIC, speed_test.SCHEMA, speed_test.SpeedTestService().answer)
    membership = Membership(network, RECIPE.digest, RECIPE.run.pipeline.stages)
    await membership.claim(PeerRecord(peer=network.peer_id, stage=1, state=PeerState.TRAINING))
    return membership


async def gets_nothing(network: PeerNetwork, server: str) -> None:
    """Ask for everything that is there to be had."""
    with pytest.raises(UserError, match=r"does not let us in|No peer of the invite serves"):
        await fetch(network, [server], RECIPE.digest)
    with pytest.raises(ConnectionError):
        await command.clock_of(network, server)
    assert isinstance(await command.rates_with(network, server), str)


async def asked(caller: Libp2pNetwork, callee: str, key: str) -> Any:
    """Have a peer read from another one's node of the DHT, and store; return what it reads, None for no answer."""
    node, peer = caller._joined.records._joined(), load_hivemind().PeerID.from_base58(callee)
    node._node.blacklist.clear()
    found = await node.find(peer, place_of(key))
    assert await node.store(peer, place_of(key), caller.peer_id, b"", time.time() + 60.0) is None
    return found


async def sees_nothing(stranger: Libp2pNetwork, server: Libp2pNetwork, state: AdmissionState) -> None:
    """Call the node of the DHT beside `server`, with no ticket, with another peer's and with one to look."""
    key = f"{RECIPE.digest}/stage/1"
    assert stranger._joined is not None
    assert server._joined is not None
    assert stranger._joined.records.neighbours == 1, "a ping is answered"
    with pytest.raises(ConnectionResetError, match="no ticket yet"):
        await stranger.read(key)
    for shown, sees in ((ticket(server), False), (ticket(stranger, Right.LOOK), True)):
        state.own = HeldTicket.fixed(shown)
        found = await asked(stranger, server.peer_id, key)
        assert (server.peer_id in found) if sees else (found is None)
    assert server._joined.records.neighbours == 2, "only members are neighbours"
    state.own = None


async def test_whoever_only_knows_an_address_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    state = knowing(Clock())
    async with opened(admission=state) as whole:
        server = let_in(whole, state)
        await serve(server)
        (door,) = await whole.addresses()
        names = whole._context.secret.prefix + " ".join(whole._switchboard.topics)
        assert RECIPE.digest not in names
        assert RECIPE.run.name not in names.split("/")
        with user_error(Exit.OTHER_RUN, "takes part in this run"):
            async with opened(door, run="a guess"):
                pass

        # One that has seen the names, as libp2p shows them, and calls by them.
        class Imitation(RunSecret):
            def __init__(self, run: str) -> None:
                super().__init__(run)
                self.prefix = RunSecret(RECIPE.digest).prefix

        monkeypatch.setattr(libp2p_network, "RunSecret", Imitation)
        async with opened(run="a guess") as stranger:
            await stranger._joined.control.knock([parse_peer_address(door)], PATIENT.reach_s)
            await gets_nothing(stranger, whole.peer_id)
            verdict = await command.dialled_back(stranger, [whole.peer_id], (4001,))
            assert verdict == reachability.ReachVerdict(None, (), ())
            assert (await Membership(stranger, RECIPE.digest, 2).peek()).stages == ((), ())
        assert whole.statistics().get("conversations.answered", 0) == 0


async def test_a_stranger_that_is_connected_is_neither_greeted_nor_kept_to_return_by() -> None:
    """A peer that a node greets becomes its neighbour in the DHT, and is given records to keep."""
    known, foreign = knowing(Clock()), knowing(Clock())
    async with opened(admission=known) as first:
        await serve(let_in(first, known))
        (door,) = await first.addresses()
        async with opened(door, admission=foreign) as other:
            joined = first._joined
            assert joined is not None
            assert other._joined is not None
            assert await joined.neighbours() == []
            await gets_nothing(other, first.peer_id)
            assert first._context.known_peers.doors() == (), "though it has spoken to us"
            for rights, count in ((Right.LOOK, 0), (MEMBER, 1)):
                assert known.show(other.peer_id, ticket(other, rights)) == ""
                assert [each.peer for each in await joined.neighbours()] == [other.peer_id] * count
            assert (await fetch(other, [first.peer_id], RECIPE.digest)).text == RECIPE.text
            assert [each.endswith(other.peer_id) for each in first._context.known_peers.doors()] == [True]
            told = await other._joined.neighbours()
            assert [each.peer for each in told] == [first.peer_id], "the one that it joined by"


async def test_whoever_knows_the_run_and_has_no_ticket_or_no_longer_one_is_out() -> None:
    clock = Clock()
    known, others, state, foreign = (knowing(clock) for _ in range(4))
    async with opened(admission=known) as first:
        server = let_in(first, known)
        roster = await serve(server)
        (door,) = await first.addresses()
        async with (
            opened(door, admission=others) as second,
            opened(door, admission=state) as third,
            opened(door, admission=foreign) as stranger,
        ):
            await gets_nothing(stranger, first.peer_id)
            guest = Membership(stranger, RECIPE.digest, RECIPE.run.pipeline.stages)
            await guest.claim(PeerRecord(peer=stranger.peer_id, stage=0, state=PeerState.TRAINING))

            short, member = let_in(second, others, until_s=600.0), let_in(third, state)
            for network in (short, member):
                assert (await fetch(network, [first.peer_id], RECIPE.digest)).text == RECIPE.text
                await serve(network)
            there = {record.peer for record in (await roster.peek()).stages[1]}
            assert there == {first.peer_id, second.peer_id, third.peer_id}
            assert roster.roster.stages[0] == ()
            await sees_nothing(stranger, first, foreign)
            assert await asked(first, stranger.peer_id, "stage") is None, "a node without a ticket has not answered"
            foreign.own = HeldTicket.fixed(ticket(stranger, Right.LOOK))
            assert await asked(first, stranger.peer_id, "stage") is None, "nor has one that may only look"
            foreign.own = None

            # The owner's list, told to one of them, reaches the other with the roster.
            subject = key_of(third.peer_id) or b""
            raw = encode_list(signed_list(key(0), RECIPE.digest, 1, {subject: int(clock() + 9999)}))
            assert known.take_revocations(raw)
            await roster.peek()
            await gets_nothing(member, first.peer_id)
            assert await asked(third, first.peer_id, "stage") is None, "it is not answered"
            assert await asked(first, third.peer_id, "stage") is None, "it is not asked"
            with user_error(Exit.NOT_ADMITTED, "does not let us in"):
                await member.read_all(["anything"])
            assert state.raw_revocations == raw

            assert (await fetch(short, [first.peer_id], RECIPE.digest)).text == RECIPE.text
            clock.ahead_s = 601.0
            with pytest.raises(UserError, match="does not let us in"):
                await fetch(short, [first.peer_id], RECIPE.digest)
            with pytest.raises(UserError, match="does not let us in"):
                await short.read_all(["anything"])
