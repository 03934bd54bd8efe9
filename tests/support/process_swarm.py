"""A small swarm of real processes: its run file, its bootstrap peer, its nodes."""

import json
from pathlib import Path
from typing import Any

from processes import Command, Commands

from noloco_node.errors import Exit
from noloco_node.journal.events import InnerStep, Started, StateChanged
from noloco_node.run.peer_state import PeerState

LOCAL = "/ip4/127.0.0.1/tcp/0"
TINY_MODEL = """\
[model]
architecture = "llama"
[model.sizes]
vocab_size = 384
hidden_size = 32
intermediate_size = 48
num_hidden_layers = 2
num_attention_heads = 2
max_position_embeddings = 64"""
"""Costs next to nothing: part of a run file."""


SLOW = ("--slowdown", "10")
"""Options of a node that trains for as long as a test waits for others. At full speed it would keep a core busy."""


def run_file(
    directory: Path,
    *,
    steps: int = 1_000_000,
    replicas: int = 2,
    window: int = 2,
    inner: str = "warmup_steps = 5",
    outer: str = "alpha = 0.5\ngamma = 0.7\nbeta = 0.7\ninner_steps_per_round = 10",
) -> Path:
    """Write a run file of two stages that cost next to nothing. `inner`, `outer`: lines of these sections."""
    path = directory / "run.toml"
    path.write_text(f"""
name = "tiny"
seed = 3
{TINY_MODEL}
[pipeline]
stages = 2
replicas = {replicas}
sequence_length = 32
microbatch_size = 4
microbatches_per_step = {window}
[inner]
steps = {steps}
learning_rate = 0.003
{inner}
[outer]
overlap_steps = 4
{outer}
""")
    return path


def host(commands: Commands, run: Path, *more: str) -> tuple[Command, str]:
    command = commands.start("bootstrap", "--run", str(run), "--listen", LOCAL, *more, home=True)
    return command, commands.until(
        lambda: command.output.strip(), "a bootstrap peer prints its invite", alive=[command]
    )


def join(commands: Commands, invite: str, stage: int, *more: str, forked: bool = True) -> Command:
    """Start a replica that tells of itself every second."""
    options = ("--stage", str(stage), "--listen", LOCAL, "--refresh", "1", "--threads", "1", *more)
    return commands.start("join", invite, *options, home=True, forked=forked)


def look(commands: Commands, invite: str, network: str = "") -> dict[str, Any]:
    command = commands.start("status", invite, "--json", network=network)
    assert command.wait() == Exit.OK, command.complaint
    seen: dict[str, Any] = json.loads(command.output)
    return seen


def steps(command: Command) -> int:
    return len(command.events(InnerStep))


def peer(command: Command) -> str:
    return command.events(Started)[0].peer


def is_finished(replica: Command) -> bool:
    return any(change.state is PeerState.FINISHED for change in replica.events(StateChanged))
