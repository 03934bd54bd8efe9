"""Optimisers in this process as members of a run, over real daemons: how they train, and what they refuse."""

import copy
import io
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from process_swarm import LOCAL, host
from processes import Commands
from torch import Tensor, nn
from user_errors import user_error

import noloco_node
from noloco_node.errors import Exit, UserError
from noloco_node.export.sources import model_in
from noloco_node.journal.events import Event, Finished, InnerStep
from noloco_node.journal.reader import read

pytestmark = [pytest.mark.network, pytest.mark.shared]

STEPS = 12


class Run(NamedTuple):
    directory: Path
    invite: str


def module() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """A bootstrap peer of a run that two replicas would end after `STEPS` steps of each."""
    with Commands() as commands:
        path = noloco_node.init(commands.directory / "run.toml", module(), steps=STEPS, batch=2, every=3)
        _, invite = host(commands, path, "--weights", str(commands.directory))
        yield Run(commands.directory, invite)


def joined(run: Run, name: str, net: nn.Module) -> noloco_node.GossipOptimizer:
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    return noloco_node.GossipOptimizer(inner, net, run.invite, home=run.directory / name, listen=[LOCAL], refresh=0.5)


def loss_of(net: nn.Module) -> Tensor:
    inputs = torch.linspace(-1.0, 1.0, 8).view(2, 4)
    loss: Tensor = (net(inputs) - 1.0).square().mean()
    return loss


def events(run: Run, name: str, kind: type[Event]) -> list[Event]:
    return [event for event in read(run.directory / name / "journal.jsonl") if isinstance(event, kind)]


def failing() -> float:
    raise FloatingPointError("mine")


def test_a_member_begins_with_the_runs_weights_and_trains_as_its_optimiser_does(run: Run) -> None:
    with user_error(Exit.CONFIG) as refused:
        joined(run, "other", nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))
    assert "2.weight is [2, 8], and the run's is [1, 8]" in refused.value.why
    net, alone = module(), module()
    with joined(run, "one", net) as optimizer:  # the refused one is no first one
        alone.load_state_dict(net.state_dict())
        plain = torch.optim.SGD(alone.parameters(), lr=0.1)
        schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in (optimizer, plain)]
        for _ in range(3):
            for each, its in ((net, optimizer), (alone, plain)):
                its.zero_grad()
                loss = loss_of(each)
                loss.backward()
                _ = optimizer.step(loss=loss) if its is optimizer else plain.step()
            for none in ("low", torch.ones(2)):
                with user_error(Exit.USAGE, "The loss is no number"):
                    optimizer.step(loss=none)
            for schedule in schedules:
                schedule.step()
        assert all(torch.equal(a, b) for a, b in zip(net.parameters(), alone.parameters(), strict=True))
        assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
        assert optimizer.state_dict()["param_groups"] == plain.state_dict()["param_groups"]
        with pytest.raises(UserError, match="has a GossipOptimizer already"):
            joined(run, "two", module())
        status = next(iter(noloco_node.Swarm(run.invite, home=run.directory / "look").watch()))
        assert [each.state for each in status.peers] == ["training"]
        optimizer.catch_up()
        with pytest.raises(FloatingPointError, match="mine"):
            optimizer.step(failing)
        with pytest.raises(UserError, match="Another thread is in a call"), ThreadPoolExecutor(1) as other:
            optimizer.step(lambda: other.submit(optimizer.step).result())
        assert optimizer.step() is None
        child = os.fork()
        if child == 0:
            try:
                optimizer.step()
            except UserError as error:
                os._exit(0 if "forked" in error.what else 2)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for call in (optimizer.step, optimizer.catch_up):
        with pytest.raises(UserError, match="has left its run"):
            call()
    optimizer.leave()
    steps = events(run, "one", InnerStep)
    assert [step.loss is not None for step in steps] == [True] * 6  # the last ones: the loss that was said last
    assert events(run, "one", Finished)


def test_another_thread_may_leave_and_the_one_that_trains_is_told(run: Run) -> None:
    optimizer = joined(run, "threads", module())

    def train() -> None:
        while True:
            optimizer.catch_up()

    with ThreadPoolExecutor(1) as other:
        left = other.submit(optimizer.leave)
        with pytest.raises(UserError, match="has left its run"):
            train()
        left.result(60.0)


def test_a_loop_that_fails_leaves_politely_and_goes_on_from_what_was_saved(run: Run) -> None:
    net, again = module(), module()

    def train() -> None:
        with joined(run, "failed", net) as optimizer:
            loss_of(net).backward()
            optimizer.step()
            _ = 1 // 0

    with pytest.raises(ZeroDivisionError):
        train()
    assert [event.why for event in events(run, "failed", Finished)] == ["asked to leave"]
    with joined(run, "failed", again):
        assert all(torch.equal(a, b) for a, b in zip(net.parameters(), again.parameters(), strict=True))


def test_a_member_that_comes_back_brings_its_moments_as_a_torch_program_does(run: Run) -> None:
    def step(net: nn.Module, its: torch.optim.Optimizer) -> None:
        its.zero_grad()
        loss_of(net).backward()
        its.step()

    def begun(net: nn.Module) -> torch.optim.AdamW:
        return torch.optim.AdamW(net.parameters(), lr=0.1)

    def member(net: nn.Module) -> noloco_node.GossipOptimizer:
        return noloco_node.GossipOptimizer(begun(net), net, run.invite, home=run.directory / "back", listen=[LOCAL])

    net, again, alone = module(), module(), module()
    kept = io.BytesIO()
    with member(net) as optimizer:
        assert not optimizer.state_dict()["state"], "what a newcomer copies has no moments"
        alone.load_state_dict(net.state_dict())
        step(net, optimizer)
        torch.save(optimizer.state_dict(), kept)
    with member(again) as optimizer:
        assert not optimizer.state_dict()["state"], "its home has no moments"
        optimizer.load_state_dict(torch.load(io.BytesIO(kept.getvalue())))
        step(again, optimizer)
    plain = begun(alone)
    step(alone, plain)
    step(alone, plain)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), alone.parameters(), strict=True))


def test_a_loop_that_diverges_is_ended_and_its_home_keeps_the_weights_of_before(run: Run) -> None:
    net, again = module(), module()
    first: list[Tensor] = []
    with user_error(Exit.CONFIG, "no finite number"), joined(run, "diverging", net) as optimizer:
        first += [each.detach().clone() for each in net.parameters()]
        for _ in range(STEPS):
            optimizer.zero_grad()
            (loss_of(net) * torch.nan).backward()
            optimizer.step()
    with joined(run, "diverging", again):
        assert all(torch.equal(own, kept) for own, kept in zip(again.parameters(), first, strict=True))


def test_an_optimiser_of_a_run_is_not_copied() -> None:
    with pytest.raises(UserError, match="cannot be copied"):
        copy.deepcopy(object.__new__(noloco_node.GossipOptimizer))


def test_a_run_ends_with_its_budget(run: Run) -> None:
    net, count = module(), 0
    with joined(run, "last", net) as optimizer:
        while not optimizer.finished:
            optimizer.zero_grad()
            loss_of(net).backward()
            optimizer.step()
            count += 1
            assert count < 10 * STEPS
        with pytest.raises(UserError, match="The run is over"):
            optimizer.step()
    assert optimizer.finished, "also after it has left"
    assert count > STEPS
    out = run.directory / "model"
    noloco_node.export(None, out, homes=run.directory / "last")
    assert (out / "model.safetensors").is_file()
    with pytest.raises(UserError, match="a program's own module"):  # evaluate and generate cannot build it
        model_in(out)
