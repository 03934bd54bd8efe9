"""Real nodes train adapters over a checkpoint that one of them brings: rounds, a death, a newcomer, the way home."""

import json
import re
from pathlib import Path

import pytest
from checkpoints import write_model
from command_line import printed
from process_swarm import LOCAL, steps
from processes import Command, Commands

from gossip.interface import OuterStepTaken
from noloco_node.errors import Exit
from noloco_node.journal.events import Finished, Started

pytestmark = pytest.mark.network
SIZES = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
}
FIELDS = {
    "stages": "2",
    "replicas": "3",
    "microbatch_size": "4",
    "microbatches_per_step": "2",
    "sequence_length": "32",
    "steps": "40",
    "warmup_steps": "5",
    "learning_rate": "0.01",
    "inner_steps_per_round": "10",
    "late_inner_steps_per_round": "10",
    "overlap_steps": "4",
}


def write_run(directory: Path, checkpoint: Path) -> Path:
    run = directory / "run.toml"
    printed("init", "--from", checkpoint, "--lora", 4, "--base", "nf4", run)
    text = run.read_text()
    for name, value in FIELDS.items():
        text, found = re.subn(rf"(?m)^{name} = .*$", f"{name} = {value}", text, count=1)
        assert found, name
    run.write_text(text)
    return run


def write_text(directory: Path) -> Path:
    path = directory / "text.txt"
    path.write_text("".join(f"{number} is {'odd' if number % 2 else 'even'}.\n" for number in range(20_000)))
    return path


def join(commands: Commands, invite: str, stage: int, text: Path, *more: str) -> Command:
    options = ("--stage", str(stage), "--data", str(text), "--listen", LOCAL, "--refresh", "1", "--threads", "1")
    return commands.start("join", invite, *options, "--linger", "600", *more, home=not more)


def loss(directory: Path, text: Path) -> float:
    found = json.loads(printed("evaluate", directory, "--data", text, "--json", "--batches", 8))
    return float(found["loss"])


def test_real_nodes_train_adapters_and_take_them_home(tmp_path: Path) -> None:
    checkpoint, text = tmp_path / "checkpoint", write_text(tmp_path)
    write_model(checkpoint, sizes=SIZES)
    with Commands() as commands:
        run = write_run(commands.directory, checkpoint)
        frozen = run.with_name("run-frozen")
        started = ("bootstrap", "--run", str(run), "--listen", LOCAL, "--weights", str(frozen))
        bootstrap = commands.start(*started, home=True)
        invite = commands.until(lambda: bootstrap.output.strip(), "a bootstrap peer invites", alive=[bootstrap])
        nodes = [join(commands, invite, stage, text) for stage in (0, 1, 1)]
        commands.until(lambda: all(steps(node) > 15 for node in nodes), "all train", alive=nodes)
        victim = nodes[-1]
        victim.process.kill()
        victim.wait()
        alive = [*nodes[:-1], bootstrap, join(commands, invite, 1, text, "--home", str(victim.home))]
        commands.until(lambda: all(node.events(Finished) for node in nodes), "all finish", alive=alive)
        assert len(victim.events(Started)) == 2, "it came back"
        assert any(node.events(OuterStepTaken) for node in nodes), "replicas have met"
        adapter, merged = tmp_path / "adapter", tmp_path / "merged"
        for out, weights, more in ((adapter, checkpoint, ()), (merged, frozen, ("--merge",))):
            export = commands.start("export", invite, "--out", str(out), "--weights", str(weights), *more)
            assert export.wait() == Exit.OK, export.complaint
        for command in alive:
            command.interrupt()
        assert [command.wait() for command in alive] == [Exit.OK] * 4
    assert loss(merged, text) < 0.8 * loss(checkpoint, text)
    assert (adapter / "adapter_config.json").exists()
    assert sum(path.stat().st_size for path in adapter.glob("*.safetensors")) < 60_000, "the adapters alone"
