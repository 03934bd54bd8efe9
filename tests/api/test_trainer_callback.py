"""A Trainer of transformers is a member of a run to its end. It asks for accelerate, which the extra `test` has."""

from __future__ import annotations

from pathlib import Path

import pytest
from process_swarm import host, is_finished
from processes import Commands

from noloco_node.errors import Exit
from noloco_node.journal.events import InnerStep

pytest.importorskip("accelerate")
pytestmark = pytest.mark.network

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_with_trainer.py"


def test_a_trainer_trains_until_the_run_is_over() -> None:
    with Commands() as commands:
        run = commands.directory / "run.toml"
        written = commands.start("--init", str(run), "--steps", "60", name="init", program=EXAMPLE)
        assert written.wait() == Exit.OK, written.complaint
        bootstrap, invite = host(commands, run, "--weights", str(commands.directory))
        trainer = commands.start("--swarm", invite, name="trainer", home=True, program=EXAMPLE)
        assert trainer.wait() == Exit.OK, trainer.complaint
        steps = trainer.events(InnerStep)
        assert len(steps) == 60
        losses = [step.loss for step in steps if step.loss is not None]
        assert losses[-1] < losses[0]
        assert is_finished(trainer)
        bootstrap.interrupt()
        assert bootstrap.wait() == Exit.OK
