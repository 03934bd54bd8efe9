"""NoLoCo's outer rule in another project's simulator: gossipy, which studies gossip learning.

    pip install gossipy-dfl torchvision            # a simulator of gossip learning, by others, and what it asks for
    python examples/noloco_in_gossipy.py           # the rule of this project, beside gossipy's own mean

Sixteen nodes classify points of five clouds; each node sees a part of them. A node trains on its part, sends its model
to a random other node, and both merge: gossipy by a mean, NoLoCo by the rule with slow weights and momentum.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
from gossipy import set_seed
from gossipy.core import AntiEntropyProtocol, CreateModelMode, StaticP2PNetwork
from gossipy.data import DataDispatcher
from gossipy.data.handler import ClassificationDataHandler
from gossipy.model import TorchModel
from gossipy.model.handler import TorchModelHandler
from gossipy.node import GossipNode
from gossipy.simul import GossipSimulator, SimulationReport
from torch import Tensor, nn

from gossip.rule.outer_step import EVEN, Outer, OuterState, mean_into, move

NODES, CLOUDS, FEATURES = 16, 5, 20
PAPER = Outer(alpha=0.5, beta=0.7, gamma=0.7)
"""As NoLoCo has been published (arXiv 2506.10911)."""


class Classifier(TorchModel):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, CLOUDS))

    def init_weights(self) -> None:
        """Keep them: all nodes begin with the same ones."""

    def forward(self, points: Tensor) -> Tensor:
        scores: Tensor = self.layers(points)
        return scores


class NoLoCoHandler(TorchModelHandler):
    """Merges by the outer rule. Its slow weights begin as the run's first ones."""

    def __init__(self, net: TorchModel, *args: Any, outer: Outer = PAPER, **options: Any) -> None:
        super().__init__(net, *args, **options)
        self.outer = outer
        slow = self.fast_weights()
        self.state = OuterState(slow, tuple(torch.zeros_like(each) for each in slow) if outer.alpha else ())

    def fast_weights(self) -> tuple[Tensor, ...]:
        """Return a copy of the model's weights."""
        return tuple([each.detach().clone() for each in self.model.parameters()])

    @torch.no_grad()
    def _merge(self, other_model_handler: TorchModelHandler) -> None:
        sides = zip(self.fast_weights(), other_model_handler.model.parameters(), strict=True)
        mean = tuple([mean_into(own, own, theirs, EVEN) for own, theirs in sides])
        self.state = move(self.state, mean, None, self.outer)
        for own, slow in zip(self.model.parameters(), self.state.slow, strict=True):
            own.copy_(slow)
        self.n_updates = max(self.n_updates, other_model_handler.n_updates)


def simulate(handler: type[TorchModelHandler], rounds: int, seed: int = 0) -> list[float]:
    """Return the mean accuracy of all nodes on points that none has seen, after each round."""
    set_seed(seed)
    torch.manual_seed(seed)
    clouds = torch.randint(CLOUDS, (2000,))
    points = torch.randn(CLOUDS, FEATURES)[clouds] + 1.5 * torch.randn(2000, FEATURES)
    data = DataDispatcher(ClassificationDataHandler(points, clouds, test_size=0.2), n=NODES, eval_on_user=False)
    proto = handler(
        net=Classifier(),
        optimizer=torch.optim.SGD,
        optimizer_params={"lr": 0.1},
        criterion=nn.CrossEntropyLoss(),
        batch_size=16,
        create_model_mode=CreateModelMode.MERGE_UPDATE,
    )
    nodes = GossipNode.generate(data, StaticP2PNetwork(NODES), proto, round_len=10, sync=True)
    simulator, report = GossipSimulator(nodes, data, 10, AntiEntropyProtocol.PUSH), SimulationReport()
    simulator.add_receiver(report)
    simulator.init_nodes(seed)
    simulator.start(rounds)
    simulator.remove_receiver(report)
    return [float(found["accuracy"]) for _, found in report.get_evaluation()]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=20)
    options.add_argument("--seeds", type=int, default=5)
    given = options.parse_args()
    for handler in (TorchModelHandler, NoLoCoHandler):
        last = [simulate(handler, given.rounds, seed)[-1] for seed in range(given.seeds)]
        print(f"{handler.__name__}: accuracy {np.mean(last):.4f}, {min(last):.4f} to {max(last):.4f}")


if __name__ == "__main__":
    main()
