"""A run that goes on from a checkpoint: its weights come from whoever has them, and newcomers wait where nobody has."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from admission_keys import NOW_S, OWNER, admitted, key, public
from checkpoints import listed, weights_section, write_model
from memory_swarms import Peer, recipe, until
from toy_gossip import at_once

from noloco_node.admission.admission_state import AdmissionState
from noloco_node.admission.ticket import MEMBER, Right, encode, grant, key_of, peer_of
from noloco_node.journal import events
from noloco_node.network.interface import PeerNetwork
from noloco_node.planning.checkpoint_map import RunWeights
from noloco_node.planning.model_layout import model_layout
from noloco_node.run.config import AdmissionRule
from noloco_node.run.peer_state import Wait, WaitCause
from noloco_node.sim.network.sim_network import SimNetwork
from noloco_node.state_sync import weight_exchange
from noloco_node.state_sync.weight_exchange import WeightDownload, WeightServer
from noloco_node.storage.weight_store import WeightStore
from noloco_node.swarm.run_distribution import RunFileText

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}


class Continued:
    """A run that goes on from a checkpoint, and what nodes of it are given."""

    def __init__(self, directory: Path, *, own_tokenizer: bool = False, adapter: str = "") -> None:
        self.directory = directory
        self.model = write_model(directory / "checkpoint", sizes=SIZES, shard_size="3KB")
        plain = recipe(steps=40).text
        section = weights_section(directory / "checkpoint")
        words = [directory / "checkpoint" / name for name in ("config.json", "tokenizer_config.json")]
        tokenizer = f'[data]\ntokenizer = "files"\n{listed("data.tokenizer_files", words)}'
        text = plain.replace("[pipeline]", f"{section}{tokenizer if own_tokenizer else ''}{adapter}[pipeline]")
        self.recipe = RunFileText(text, "the test's run file")
        self.layout = model_layout(self.recipe.run)
        self.hub = SimNetwork()

    def whole(self) -> WeightStore:
        return WeightStore.whole(self.directory / "checkpoint", self.recipe.run.model.weights)

    def tokenizer(self, name: str) -> WeightStore:
        return WeightStore.filling(self.directory / f"{name}'s tokenizer", self.recipe.run.data.tokenizer_files)

    def owners_tokenizer(self) -> WeightStore:
        return WeightStore.whole(self.directory / "checkpoint", self.recipe.run.data.tokenizer_files)

    def peer(self, name: str, stage: int, store: WeightStore | None = None, **more: Any) -> Peer:
        store = store or WeightStore.filling(self.directory / name, self.recipe.run.model.weights)
        if self.recipe.run.data.tokenizer_files:
            more = {"tokenizer": self.tokenizer(name), **more}
        return Peer(
            self.hub,
            self.recipe,
            name,
            stage,
            first_weights=RunWeights(
                self.layout.prepared, self.layout.checkpoint, store, frozen=self.layout.adapter is not None
            ),
            **more,
        )

    async def bootstrap(self) -> None:
        network, schema = self.hub.network("bootstrap"), weight_exchange.SCHEMA
        await network.serve(weight_exchange.TOPIC, schema, WeightServer(self.whole(), at_once).serve)
        if self.recipe.run.data.tokenizer_files:
            server = WeightServer(self.owners_tokenizer(), at_once)
            await network.serve(weight_exchange.TOKENIZER_TOPIC, schema, server.serve)

    def begins_with_the_checkpoint(self, peer: Peer, stage: int) -> bool:
        own, shapes = dict(self.model.named_parameters()), self.layout.shapes[stage]
        return all(torch.equal(own[name], each) for name, each in zip(shapes, peer.begun_with, strict=True))


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


async def leave(*peers: Peer) -> None:
    for peer in peers:
        peer.leave.set()
    await asyncio.gather(*[peer.task for peer in peers])


@BOTH
async def test_newcomers_fetch_their_part_from_the_bootstrap_peer(made: Continued) -> None:
    await made.bootstrap()
    peers = [made.peer(f"peer-{stage}", stage, bootstrap_peers=("bootstrap",)) for stage in (0, 1)]
    await until(lambda: all(peer.of(events.InnerStep) for peer in peers))
    assert all(made.begins_with_the_checkpoint(peer, stage) for stage, peer in enumerate(peers))
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
        " 10 s. Whoever has the checkpoint gives --weights DIR to noloco-node bootstrap, or to join"
    )
    assert not waiting.of(events.InnerStep)
    owner = made.peer("owner", 1, made.whole())
    await until(lambda: bool(waiting.of(events.InnerStep) and owner.of(events.InnerStep)))
    assert made.begins_with_the_checkpoint(waiting, 0)
    assert made.begins_with_the_checkpoint(owner, 1)
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
    made = Continued(tmp_path, adapter='[adapter]\nrank = 2\nbase = "float32"\n')

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
