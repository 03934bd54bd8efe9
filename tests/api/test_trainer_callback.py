"""Trainers of transformers train PEFT's adapters as members of a run. They ask for accelerate and peft."""

import json
import runpy
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from process_swarm import LOCAL, host, is_finished
from processes import MEMBER, Command, Commands
from safetensors.torch import load_file
from user_errors import user_error

import noloco_node
from gossip.interface import OuterStepTaken
from noloco_node.api.gossip_optimizer import GossipOptimizer
from noloco_node.errors import Exit
from noloco_node.journal.events import CatchUp, InnerStep
from noloco_node.journal.reader import read
from noloco_node.run.runfile import load_run

pytest.importorskip("accelerate")
pytest.importorskip("peft")
pytestmark = pytest.mark.network

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_with_trainer.py"
MODULES = ("transformers.trainer", "accelerate", "peft")
STEPS = 24


def written(commands: Commands, steps: int) -> tuple[Path, Command, str]:
    """Return the example's run file, its bootstrap peer and the invite."""
    path = commands.directory / "run.toml"
    done = commands.start("--init", str(path), "--steps", str(steps), name="init", program=EXAMPLE, modules=MODULES)
    assert done.wait() == Exit.OK, done.complaint
    return path, *host(commands, path, "--weights", str(commands.directory))


def trainer(commands: Commands, invite: str, name: str, *more: str) -> Command:
    return commands.start(str(EXAMPLE), "--swarm", invite, *more, name=name, home=True, program=MEMBER, modules=MODULES)


def test_two_trainers_train_adapters_and_end_with_the_run(tmp_path: Path) -> None:
    with Commands() as commands:
        path, bootstrap, invite = written(commands, STEPS)
        run = load_run(path)
        assert all(".lora_A." in name or ".lora_B." in name for name in run.model.foreign_parameters)
        (weights,) = run.model.weights
        assert weights.size_bytes < 100_000, "the adapters alone, of a model of 290 kB"
        names = [f"member{number}" for number in range(2)]
        members = [trainer(commands, invite, name, "--out", str(tmp_path / name)) for name in names]
        for each in members:
            assert each.wait() == Exit.OK, each.complaint
            assert is_finished(each)
            assert any(met.partner is not None for met in each.events(OuterStepTaken)), "replicas have met"
        assert sum(len(each.events(InnerStep)) for each in members) >= 3 * STEPS, (
            "also those of the third, who is not there"
        )
        most = max((each.events(InnerStep) for each in members), key=len)  # a late one has few
        losses = [step.loss for step in most if step.loss is not None]
        assert losses[-1] < losses[0] - 0.5
        noloco_node.export(None, tmp_path / "mean", homes=[each.home for each in members])
        bootstrap.interrupt()
        assert bootstrap.wait() == Exit.OK
    assert load_file(tmp_path / "mean" / "model.safetensors").keys() == run.model.foreign_parameters.keys()
    assert json.loads((tmp_path / "member0" / "adapter_config.json").read_text())["r"] == 8


def test_a_trainer_with_another_optimiser_than_the_runs_is_refused() -> None:
    with user_error(Exit.USAGE, "takes a GossipOptimizer"):
        noloco_node.GossipCallback(object())
    ours = GossipOptimizer.__new__(GossipOptimizer)
    event: tuple[Any, ...] = (None, None, None)
    wrapped: Any = SimpleNamespace(optimizer=SimpleNamespace(optimizer=ours))
    for given in (ours, wrapped):
        noloco_node.GossipCallback(ours).on_train_begin(*event, optimizer=given)
    for given in (None, SimpleNamespace(optimizer=object())):
        with user_error(Exit.USAGE, "another optimiser"):
            noloco_node.GossipCallback(ours).on_train_begin(*event, optimizer=given)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, which PEFT asks in an old way
def test_a_newcomer_copies_adapters_alone_and_its_moments_begin_empty() -> None:
    example = runpy.run_path(str(EXAMPLE))
    model: Any = example["with_adapters"](example["base"](None)[0])
    begun = {name: each.detach().clone() for name, each in model.named_parameters()}
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    with Commands() as commands:
        _, bootstrap, invite = written(commands, 100_000)
        donor = trainer(commands, invite, "donor")
        commands.until(lambda: donor.events(InnerStep), "it trains", alive=[bootstrap, donor])
        with closing(noloco_node.Swarm(invite, home=commands.directory / "look").watch()) as seen:
            # A newcomer copies once somebody has finished a round; before that it begins with the first weights.
            assert next(status for status in seen if any(peer.round for peer in status.peers))
        inner, home = torch.optim.AdamW(trained.values(), lr=1e-3), commands.directory / "late"
        with noloco_node.GossipOptimizer(inner, model, invite, home=home, listen=[LOCAL], refresh=0.5) as optimizer:
            moved = {name for name, each in model.named_parameters() if not torch.equal(each, begun[name])}
            assert moved == trained.keys(), "each adapter is the donor's, and no frozen weight has moved"
            assert not optimizer.state_dict()["state"]
            model(**{name: torch.tensor([[3, 4, 5]]) for name in ("input_ids", "labels")}).loss.backward()
            optimizer.step()
            assert len(optimizer.state_dict()["state"]) == len(trained)
        (copied,) = [
            event for event in read(home / "journal.jsonl") if isinstance(event, CatchUp) and event.what == "done"
        ]
        numbers = sum(each.numel() for each in trained.values())
        assert 4 * numbers <= copied.total_bytes < 16 * numbers, "of the whole model it would be ten times as much"
