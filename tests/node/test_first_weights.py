"""A run that goes on from a checkpoint: its weights come from whoever has them, and newcomers wait where nobody has."""

from pathlib import Path
from typing import Any

import pytest
import torch
from admission_keys import NOW_S, OWNER, admitted, key, public
from continued_runs import ADAPTER, Continued
from memory_swarms import Peer, asked_to_leave, until
from toy_gossip import at_once

from noloco_node.admission.admission_state import AdmissionState
from noloco_node.admission.ticket import MEMBER, Right, encode, grant, key_of, peer_of
from noloco_node.journal import events
from noloco_node.network.interface import PeerNetwork
from noloco_node.run.config import AdmissionRule
from noloco_node.run.peer_state import Wait, WaitCause
from noloco_node.state_sync import weight_exchange
from noloco_node.state_sync.weight_exchange import WeightDownload, WeightServer
from noloco_node.storage.weight_store import WeightStore


@pytest.fixture(name="made", params=[False], ids=["bytes"])
def _made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Continued:
    begun = Peer._record

    def record(self: Peer, event: events.Event) -> None:
        if isinstance(event, events.StateChanged) and event.state == "training":
            self.begun_with = self.stages[-1].weights()
        begun(self, event)

    monkeypatch.setattr(Peer, "_record", record)
    return Continued(tmp_path, own_tokenizer=request.param)


BOTH = pytest.mark.parametrize("made", [False, True], ids=["bytes", "own tokenizer"], indirect=True)
OWN_TOKENIZER = pytest.mark.parametrize("made", [True], ids=["own tokenizer"], indirect=True)


def begins_with_the_checkpoint(made: Continued, peer: Peer, stage: int) -> bool:
    own, shapes = dict(made.model.named_parameters()), made.layout.shapes[stage]
    return all(torch.equal(own[name], each) for name, each in zip(shapes, peer.begun_with, strict=True))


async def leave(*peers: Peer) -> None:
    await asked_to_leave(*peers)


@BOTH
async def test_newcomers_fetch_their_part_from_the_bootstrap_peer(made: Continued) -> None:
    await made.bootstrap()
    peers = [made.peer(f"peer-{stage}", stage, bootstrap_peers=("bootstrap",)) for stage in (0, 1)]
    await until(lambda: all(peer.of(events.InnerStep) for peer in peers))
    assert all(begins_with_the_checkpoint(made, peer, stage) for stage, peer in enumerate(peers))
    here = [made.tokenizer(peer.name) for peer in peers]
    assert not any(each.missing(each.all_pieces()) for each in here)
    await leave(*peers)


@OWN_TOKENIZER
async def test_nobody_trains_before_the_tokenizer_is_here_and_nodes_hand_it_on(made: Continued) -> None:
    """The bootstrap peer that is asked has neither: who joins with the checkpoint gives both."""
    waiting = made.peer("waiting", 0)
    await until(lambda: any(each.waiting == (Wait(WaitCause.TOKENIZER),) for each in waiting.node.roster.stage(0)))
    assert any("nobody reached has it" in line for line in waiting.said)
    owner = made.peer("owner", 1, made.whole(), tokenizer=made.owners_tokenizer())
    await until(lambda: bool(waiting.of(events.InnerStep)))
    await leave(owner)
    # The owner is gone, and one who knows but the invite of a node has it from there.
    late = made.peer("late", 1, bootstrap_peers=("waiting",))
    await until(lambda: any("the tokenizer of the checkpoint" in line for line in late.said))
    await leave(waiting, late)


async def test_who_has_nobody_to_ask_waits_and_says_for_what(made: Continued) -> None:
    waiting = made.peer("waiting", 0)
    await until(lambda: any(record.waiting == (Wait(WaitCause.WEIGHTS),) for record in waiting.node.roster.stage(0)))
    (line,) = {line for line in waiting.said if line.startswith("waiting for the weights")}
    assert line == (
        "waiting for the weights that the run starts from: nobody reached has all of stage 0's; asking again in"
        " 10 s. A peer that has the checkpoint gives it to the others:"
        " noloco-node bootstrap, or join, with --weights DIR"
    )
    assert not waiting.of(events.InnerStep)
    owner = made.peer("owner", 1, made.whole())
    await until(lambda: bool(waiting.of(events.InnerStep) and owner.of(events.InnerStep)))
    assert begins_with_the_checkpoint(made, waiting, 0)
    assert begins_with_the_checkpoint(made, owner, 1)
    # Who comes later takes the state of those who trained, though it could have the checkpoint.
    await until(lambda: waiting.node.roster.stage(0)[0].round > 0)
    late = made.peer("late", 0, bootstrap_peers=("bootstrap",))
    await until(lambda: bool(late.of(events.InnerStep)))
    assert late.copied_stages == [0]
    assert not (made.directory / "late").exists()
    await leave(waiting, owner, late)


async def test_a_download_that_was_cut_is_resumed_from_another(made: Continued) -> None:
    files = made.recipe.run.model.weights
    half, whole = WeightStore.filling(made.directory / "half", files), made.whole()
    for number in range(len(files)):
        half.learn(number, whole.digests(number) or b"")
    only = whole.first_pieces()[0]
    half.write(only, whole.read(only) or b"")
    newcomer = made.peer("newcomer", 0)
    partial = made.peer("partial", 1, half)
    await until(lambda: any("waiting for the weights" in line for line in newcomer.said))
    mine = WeightStore.filling(made.directory / "newcomer", files)
    assert mine.missing(whole.first_pieces()) == whole.first_pieces()[1:], "what one had has come"
    await leave(newcomer, partial)
    await made.bootstrap()
    again = made.peer("newcomer again", 0, mine, bootstrap_peers=("bootstrap",))
    await until(lambda: any("begins with the weights" in line for line in again.said))
    await leave(again)


async def test_whoever_trains_adapters_needs_the_frozen_weights_and_copies_adapters_alone(tmp_path: Path) -> None:
    """A newcomer, and who comes back with a checkpoint of its own."""
    made = Continued(tmp_path, adapter=ADAPTER)

    def has_the_frozen_weights(peer: Peer, stage: int) -> bool:
        held, own = peer.stages[-1]._module.state_dict(), made.model.state_dict()
        return all(torch.equal(held[name], own[name]) for name in made.layout.checkpoint[stage])

    await made.bootstrap()
    options: dict[str, Any] = {"bootstrap_peers": ("bootstrap",)}
    peers = [made.peer(f"peer-{stage}", stage, **options) for stage in (0, 1)]
    await until(lambda: any(record.round > 0 for record in peers[0].node.roster.stage(0)))
    late = made.peer("late", 0, **options)
    await until(lambda: bool(late.of(events.InnerStep)))
    assert late.copied_stages == [0]
    assert has_the_frozen_weights(late, 0)
    trained = sum(weight.numel() for weight in late.stages[-1].weights())
    assert {each.total_bytes for each in late.of(events.CatchUp)} == {12 * trained}, "slow weights and two moments"
    await leave(late)
    assert late.saved is not None
    back = made.peer("back", 0, saved=late.saved, **options)
    await until(lambda: bool(back.of(events.InnerStep)))
    assert has_the_frozen_weights(back, 0)
    assert not back.copied_stages
    await leave(back, *peers)


async def test_members_alone_are_given_the_weights_of_a_run_with_an_owner(made: Continued) -> None:
    def network(number: int, rights: Right) -> PeerNetwork:
        state, peer = AdmissionState(made.recipe.digest, lambda: NOW_S), peer_of(public(number))
        state.pin(OWNER, AdmissionRule.OPEN)
        link = grant(key(0), made.recipe.digest, rights, NOW_S + 10**6, key_of(peer) or b"")
        return admitted(made.hub.network(peer), state, encode((link,)))

    owner, member, looker = network(1, MEMBER), network(2, MEMBER), network(3, Right.LOOK)
    await owner.serve(weight_exchange.TOPIC, weight_exchange.SCHEMA, WeightServer(made.whole(), at_once).serve)
    for name, line, given in (("member", member, True), ("looker", looker, False)):
        store = WeightStore.filling(made.directory / name, made.recipe.run.model.weights)
        assert await WeightDownload(line, store, at_once).digests([owner.peer_id]) is given
