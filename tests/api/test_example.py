"""The example's training loop as members of a swarm: real processes over real daemons."""

import signal
from pathlib import Path

import pytest
import torch
from process_swarm import host, peer
from processes import MEMBER, Command, Commands
from safetensors.torch import load_file

import noloco_node
from gossip.interface import OuterStepTaken
from noloco_node.errors import Exit
from noloco_node.journal.events import Finished, InnerStep, StateChanged
from noloco_node.run.peer_state import PeerState

pytestmark = pytest.mark.network

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_gpt.py"


def test_a_few_lines_make_a_loop_a_member() -> None:
    lines = EXAMPLE.read_text().splitlines()
    assert len(lines) < 200
    assert sum("# swarm" in line for line in lines) == 8, "as docs/python.md says"


def member(commands: Commands, invite: str, name: str) -> Command:
    return commands.start(str(EXAMPLE), "--swarm", invite, "--steps", "1000000", name=name, home=True, program=MEMBER)


def met(command: Command) -> list[OuterStepTaken]:
    return [event for event in command.events(OuterStepTaken) if event.partner is not None]


def test_three_loops_train_together_one_leaves_and_one_comes_late(tmp_path: Path) -> None:
    with Commands() as commands:
        run = commands.directory / "run.toml"
        written = commands.start("--init", str(run), "--steps", "100000", name="init", program=EXAMPLE)
        assert written.wait() == Exit.OK, written.complaint
        bootstrap, invite = host(commands, run, "--weights", str(commands.directory))
        first, second = member(commands, invite, "first"), member(commands, invite, "second")
        commands.until(lambda: met(first) and met(second), "both meet", alive=[bootstrap, first, second])
        commands.until(lambda: len(first.events(InnerStep)) > 60, "they learn", alive=[bootstrap, first, second])
        second.process.send_signal(signal.SIGINT)  # the others of its process group have no part in it
        assert second.wait() != Exit.OK
        assert "KeyboardInterrupt" in second.complaint
        assert second.events(Finished), "it has left politely"
        assert not second.daemons()
        late = member(commands, invite, "late")
        commands.until(lambda: met(late), "the late one meets", alive=[bootstrap, first, late])
        states = [change.state for change in late.events(StateChanged)]
        assert states == [PeerState.JOINING, PeerState.CATCHING_UP, PeerState.TRAINING]
        assert late.events(InnerStep)[0].step > 20, "it goes on from a copy"
        assert "step 0: loss 5." in first.output
        assert "step 0: loss 5." not in late.output
        status = noloco_node.Swarm(invite, home=tmp_path).status()
        assert {each.peer for each in status.peers} >= {peer(first), peer(late)}
        assert 0.0 < status.progress < 1.0
        out = tmp_path / "model"
        assert "the mean of the replicas" in noloco_node.export(invite, out, home=tmp_path)
        weights = load_file(out / "model.safetensors")
        assert torch.isfinite(weights["tokens.weight"]).all()
        for each in (first, late):
            each.process.send_signal(signal.SIGTERM)
        bootstrap.interrupt()
        assert bootstrap.wait() == Exit.OK
