"""What one hostile replica does to a model that is really trained: its loss on held-out text, an attack a row.

    python -m benchmarks.robustness.training_attacks  # all rows, of one seed
    python -m benchmarks.robustness.training_attacks flipped-1 noise --seeds 0 1 2 --undefended

Production nodes in virtual time train a small Llama on the standard library's text: 2 stages x 4 replicas, 48 inner
steps a source. One replica is hostile, of four of its stage, or `--liars` of `--replicas`. The loss is that of the mean
of the honest replicas' slow weights, on text that nobody trains on. Beside it stand the meetings and microbatches that
honest peers clipped and refused, what spot checks found and of whom, and the calls that they took (each is half of a
microbatch's work here). `--undefended` also shows each row with the bounds out of reach, `--share 0` without spot
checks and offsets, `--slowness 1 1.3 2.6 5.9` on unequal machines, whose honest weights lie farther apart. The row
`absent` shows what it costs that the hostile replicas are not there.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.robustness.bounded_pushes import any_way, back, longer, one_way, pushes
from gossip.exchange.swap import InfluenceBound
from noloco_node.data.blocks import open_blocks
from noloco_node.journal import events
from noloco_node.machine.interface import StageModel
from noloco_node.sim.peer import SimulatedPeer
from noloco_node.sim.scenario.faults import Crash
from noloco_node.sim.scenario.scenario import DevicesConfig, NetworkConfig, Scenario, SwarmConfig
from noloco_node.sim.scenario.setup import SimSetup, build_setup
from noloco_node.sim.world import Watcher, World, simulate
from noloco_node.state_sync.replica_mean import mean_of
from pipeline.activation_codec import SizeBound
from pipeline.inner_step import StepReport
from pipeline.messages import Gradient
from pipeline.stage import Stage
from tests.explorer.attack_kinds import ScaledSteps, first_weights, gradients, like, weights
from tests.explorer.attacks import Attack, TamperedStage, boast

RUN = """
name = "attacked"
precision = "float32"
inner = {{ steps = {steps}, learning_rate = 5e-3, warmup_steps = 6, state = "{state}" }}
outer = {{ inner_steps_per_round = 4, overlap_steps = 2 }}
pipeline.stages = {stages}
pipeline.replicas = {replicas}
pipeline.sequence_length = 32
pipeline.microbatch_size = {rows}
pipeline.microbatches_per_step = 2
pipeline.check_share = {share}

[model]
architecture = "llama"

[model.sizes]
vocab_size = 384
hidden_size = {width}
intermediate_size = {inner_width}
num_hidden_layers = {stages}
num_attention_heads = 2
max_position_embeddings = 64
"""
HELD_OUT = 48
"""Batches of held-out text."""
COUNTED = (
    *("rounds.met", "rounds.clipped", "rounds.implausible", "rounds.solo", "downstream.gradients"),
    *("activations.scaled", "activations.refused", "gradients.scaled", "gradients.refused", "stage.skipped_steps"),
    *("checks.calls", "checks.agreed", "checks.struck", "checks.quarantined", "checks.doubted"),
)


class Outcome(NamedTuple):
    """The loss in nats a token, and what honest peers counted."""

    loss: float
    counts: Counter[str]
    violations: Counter[str]


class Row(NamedTuple):
    """An attack by one of the planned peers."""

    name: str
    peer: str
    attack: Callable[[], Attack]

    def attacks(self, liars: int) -> dict[str, Attack]:
        """Return who is hostile, and how: so many replicas from the named one on; nobody where no peer is named."""
        return {peer: self.attack() for peer in following(self.peer, liars)} if self.peer else {}


def following(peer: str, count: int) -> list[str]:
    """Return so many replicas of a stage, from this one on."""
    stage, _, first = peer.partition("r")
    return [f"{stage}r{int(first) + number}" for number in range(count)]


class Shape(NamedTuple):
    """How many stages, each of one layer so wide, and replicas of each. `rows`: sequences of a microbatch."""

    stages: int = 2
    replicas: int = 4
    width: int = 64
    rows: int = 4


SMALL, CLEAN = Shape(), NetworkConfig()


def prepared(
    seed: int,
    steps: int = 48,
    share: float = 0.02,
    slowness: Sequence[float] = (1.0,),
    shape: Shape = SMALL,
    network: NetworkConfig = CLEAN,
    state: str = "float32",
) -> SimSetup:
    """Return the swarm; `share` of its compute goes into spot checks. `slowness`: of each stage's replicas in turn.

    `network`: the lines. `state`: the form of the inner optimiser's moments.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.toml"
        told = {"steps": steps, "share": share, "state": state, "inner_width": 2 * shape.width}
        path.write_text(RUN.format(**told, **shape._asdict()))
        swarm = SwarmConfig(run=str(path), model="transformer", duration_s=36_000.0)
        devices = DevicesConfig(slowness=tuple(slowness))
        return build_setup(Scenario(seed=seed, swarm=swarm, devices=devices, network=network))


class Violations(Watcher):
    """What honest peers took for a violation or found by spot checks, and whose it was."""

    def __init__(self, hostile: Collection[str]) -> None:
        self._hostile = hostile
        self.counts: Counter[str] = Counter()

    def hear(self, peer: SimulatedPeer, event: events.Event) -> None:
        """Count a violation."""
        if peer.name in self._hostile:
            return
        whose = "hostile" if getattr(event, "peer", "") in self._hostile else "HONEST"
        if isinstance(event, events.PeerViolation):
            self.counts[f"{whose}: {re.sub(r'-?[0-9.]+(e[+-]?[0-9]+)?', 'N', event.why)}"] += 1
        elif isinstance(event, events.SpotCheck):
            self.counts[f"{whose}: {event.finding}"] += 1


def outcome(setup: SimSetup, attacks: Mapping[str, Attack] = MappingProxyType({})) -> Outcome:
    """Train, and evaluate what the honest have learned; `attacks`: by the planned peer that is hostile."""
    seen = Violations(attacks.keys())

    def watch(world: World) -> Sequence[Watcher]:
        for name, attack in attacks.items():
            world.peers[name].tampering = attack
        return [seen]

    return simulate(setup, watch, lambda world: _ended(world, attacks.keys(), seen.counts))


def _ended(world: World, hostile: Collection[str], violations: Counter[str]) -> Outcome:
    honest = [peer for name, peer in world.peers.items() if name not in hostile and peer.replica is not None]
    counts: Counter[str] = Counter()
    slow: dict[int, list[tuple[Tensor, ...]]] = {}
    for peer in honest:
        assert peer.replica is not None
        counts.update({name: int(count) for name, count in peer.replica.statistics().items()})
        slow.setdefault(peer.replica.stage, []).append(peer.replica.rounds.state.slow)
    stages = []
    for number in range(world.setting.run.pipeline.stages):
        stage = world.setting.build(number)
        assert isinstance(stage, Stage)
        stage.set_weights([mean_of(each) for each in zip(*slow[number], strict=True)])
        stages.append(stage)
    return Outcome(_loss(world.setting, stages), counts, violations)


def _loss(setup: SimSetup, stages: Sequence[Stage]) -> float:
    run = setup.run
    blocks = open_blocks(run.data, run.pipeline.sequence_length, run.seed, "", "validation")
    losses = []
    for batch in islice(blocks.batches(8), HELD_OUT):
        hidden = batch[:, :-1]
        for stage in stages:
            hidden = stage.infer(hidden)
        losses.append(float(functional.cross_entropy(hidden.flatten(0, 1), batch[:, 1:].flatten())))
    return sum(losses) / len(losses)


# The attacks.


class Ascending(TamperedStage):
    """Steps along its gradient."""

    def step(self, learning_rate: float, microbatches: float, /) -> StepReport:
        """Take a step with the gradient's sign changed."""
        assert isinstance(self._stage, Stage)
        for weight in self._stage._weights:
            if weight.grad is not None:
                weight.grad.neg_()
        return super().step(learning_rate, microbatches)


class Seldom(TamperedStage):
    """Knows the spot checks: returns the wrong gradient for every fifth microbatch, chosen by chance."""

    SHARE = 0.2

    def __init__(self, stage: StageModel) -> None:
        super().__init__(stage, gradient=torch.neg)
        self._chance = Random("seldom")

    def loss(self, hidden: Tensor, targets: Tensor, /) -> Gradient:
        """Lie now and then."""
        return (
            super().loss(hidden, targets) if self._chance.random() < self.SHARE else self._stage.loss(hidden, targets)
        )


def biased(tensor: Tensor, size: float = 0.3) -> Tensor:
    """Return a gradient with the same added to each value, so much of what is typical."""
    return (tensor.float() + size * tensor.float().square().mean().sqrt()).to(tensor.dtype)


def loud_tokens(tensor: Tensor, times: float = 20.0) -> Tensor:
    """Return a gradient of which an eighth of the tokens is so many times as large, with the other sign."""
    loud = tensor.clone()
    tokens = loud.view(-1, loud.shape[-1])
    tokens[: len(tokens) // 8] *= -times
    return loud


class AscendingSlowly(Ascending):
    """Knows that a direction shows only where the way is long."""

    def step(self, learning_rate: float, microbatches: float, /) -> StepReport:
        """Take a fifth of the step."""
        return super().step(0.2 * learning_rate, microbatches)


class AscendingLate(TamperedStage):
    """Knows that who has gone the others' way is believed: trains a quarter of its run, and ascends then."""

    HONEST = 12

    def __init__(self, stage: StageModel) -> None:
        super().__init__(stage)
        self._late, self._steps = Ascending(stage), 0

    def step(self, learning_rate: float, microbatches: float, /) -> StepReport:
        """Step up once it is late."""
        self._steps += 1
        return (self._late if self._steps > self.HONEST else self._stage).step(learning_rate, microbatches)


LAST, FIRST = "s1r0", "s0r0"
ROWS = (
    Row("flipped-1", LAST, partial(weights, torch.neg)),
    Row("flipped-0", FIRST, partial(weights, torch.neg)),
    Row("noise", LAST, partial(weights, like)),
    Row("longer", LAST, partial(weights, partial(torch.mul, other=1.5))),
    Row("shorter", LAST, partial(weights, partial(torch.mul, other=0.5))),
    Row("first-weights", LAST, first_weights),
    Row("free-rider", LAST, lambda: Attack(arithmetic=partial(ScaledSteps, factor=0.0))),
    Row("ascends", LAST, lambda: Attack(arithmetic=Ascending)),
    Row("ascends-slowly", LAST, lambda: Attack(arithmetic=AscendingSlowly)),
    Row("ascends-late", LAST, lambda: Attack(arithmetic=AscendingLate)),
    Row("drift", LAST, pushes(one_way)),
    Row("noise-in-bounds", LAST, pushes(any_way)),
    Row("longer-in-bounds", LAST, pushes(longer)),
    Row("back-in-bounds", LAST, pushes(back)),
    Row("gradient-flipped", LAST, partial(gradients, torch.neg)),
    Row("gradient-flipped-boast", LAST, partial(gradients, torch.neg, boasts=True)),
    Row("gradient-flipped-seldom", LAST, lambda: Attack(record=boast, arithmetic=Seldom)),
    Row("gradient-zero", LAST, partial(gradients, torch.zeros_like)),
    Row("gradient-noise", LAST, partial(gradients, like)),
    Row("gradient-x2.9", LAST, partial(gradients, partial(torch.mul, other=2.9))),
    Row("gradient-x100", LAST, partial(gradients, partial(torch.mul, other=100.0))),
    Row("gradient-1e30", LAST, partial(gradients, partial(torch.full_like, fill_value=1e30))),
    Row("gradient-loud-tokens", LAST, partial(gradients, loud_tokens)),
    Row("gradient-louder-tokens", LAST, partial(gradients, partial(loud_tokens, times=1000.0))),
    Row("gradient-bias", LAST, partial(gradients, biased)),
    Row("gradient-bias-small", LAST, partial(gradients, partial(biased, size=0.15))),
    Row("gradient-bias-large", LAST, partial(gradients, partial(biased, size=0.7))),
    Row("gradient-invented", LAST, partial(gradients, like, boasts=True)),
    Row(
        "activations-3e38",
        FIRST,
        lambda: Attack(arithmetic=lambda stage: TamperedStage(stage, output=partial(torch.full_like, fill_value=3e38))),
    ),
)


@contextmanager
def out_of_reach() -> Iterator[None]:
    """Let everything count that the codecs let through."""
    with (
        mock.patch.object(InfluenceBound, "share", return_value=1.0),
        mock.patch.object(SizeBound, "bounded", lambda bound, peer, wire, *_: wire),
    ):
        yield


def main() -> None:
    """Print the rows that were asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "rows", nargs="*", metavar="ROW", help=", ".join(("absent", "clean", *(row.name for row in ROWS)))
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=48, help="inner steps of each source")
    parser.add_argument("--share", type=float, default=0.02, help="of compute that goes into spot checks; 0: none")
    parser.add_argument("--slowness", nargs="+", type=float, default=[1.0], help="of each stage's replicas in turn")
    parser.add_argument("--replicas", type=int, default=SMALL.replicas, help="of each stage")
    parser.add_argument("--liars", type=int, default=1, help="replicas that attack alike")
    parser.add_argument("--undefended", action="store_true")
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    for seed in wanted.seeds:
        shape = SMALL._replace(replicas=wanted.replicas)
        setup = prepared(seed, wanted.steps, wanted.share, wanted.slowness, shape)
        if "absent" in wanted.rows or not wanted.rows:
            gone = tuple(Crash(at_s=0.0, peer=peer) for peer in following(LAST, wanted.liars))
            show("absent", seed, outcome(setup._replace(faults=gone)))
        for row in (Row("clean", "", Attack), *ROWS):
            if wanted.rows and row.name not in wanted.rows:
                continue
            show(row.name, seed, outcome(setup, row.attacks(wanted.liars)))
            if wanted.undefended:
                with out_of_reach():
                    show(f"{row.name}, undefended", seed, outcome(setup, row.attacks(wanted.liars)))


def show(name: str, seed: int, made: Outcome) -> None:
    """Print an outcome, and what honest peers took for violations."""
    counts = ", ".join(f"{key} {made.counts[key]}" for key in COUNTED if made.counts[key])
    print(f"{name:36} seed {seed}  {made.loss:.3f} nats  {counts}", flush=True)
    for why, count in made.violations.most_common():
        print(f"    {count} times {why}", flush=True)


if __name__ == "__main__":
    main()
