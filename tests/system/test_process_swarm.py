"""Whole swarms of real processes with real libp2p daemons on this machine, and what happens to them.

Two swarms live here. One trains to its end although its bootstrap peer is killed. The other never ends; each test takes
one of its replicas, does to it what the world does, and checks that the others go on. A lone bootstrap peer serves the
tests in which nobody else is to be found.
"""

import json
import math
import re
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from checkpoints import LLAMA, write_model
from command_line import printed
from process_swarm import LOCAL, SLOW, host, is_finished, join, look, peer, run_file, steps
from processes import Command, Commands

from gossip.interface import OuterStepTaken
from noloco_node.errors import Exit
from noloco_node.journal.events import Finished, Hops, InnerStep, Lost, Started, Traffic
from noloco_node.libp2p.settings import TimeoutSettings
from noloco_node.swarm import invite as invites

pytestmark = [pytest.mark.network, pytest.mark.shared]

NOBODY = "12D3KooWALMXjWCsCWroGW8A7t1aSjkS2AUzg1EYu8M4CtecrnPu"


def hops(command: Command) -> dict[str, int]:
    totals = command.events(Hops)
    return totals[-1].counts if totals else {}


def complains(command: Command, code: Exit, *words: str) -> None:
    """Check that a command ends with `code` and one message of three parts, said after anything else it says."""
    assert command.wait() == code, command.complaint
    spoken = re.fullmatch(
        r"(?:\d\d:\d\d:\d\d  [^\n]+\n)*noloco-node: [^\n]+\n  why: [^\n]+\n(?: {7}[^\n]+\n)*  try: [^\n]+\n",
        command.complaint,
    )
    assert spoken, command.complaint
    for word in words:
        assert word in command.complaint
    assert command.left_behind() == []


class Crowd:
    """A swarm without end, of which a test may lose any replica that `spare` gives."""

    def __init__(self, commands: Commands) -> None:
        self.commands = commands
        self.run = run_file(commands.directory)
        self.bootstrap, self.invite = host(commands, self.run)
        self.sources = [self.newcomer(0) for _ in range(2)]
        self.keeper, *self.spares = [self.newcomer(1) for _ in range(4)]
        self.disturbed: list[Command] = []
        self.all_train()

    def newcomer(self, stage: int) -> Command:
        return join(self.commands, self.invite, stage, *SLOW)

    @property
    def sound(self) -> list[Command]:
        return [*self.sources, self.keeper, *self.spares]

    def all_train(self) -> None:
        """Wait until everybody takes part, and every source has heard from every replica of the next stage."""

        def reached() -> bool:
            last = [replica for replica in self.sound if replica not in self.sources]
            heard = all(steps(replica) and replica.events(Started) for replica in self.sound)
            return heard and all(hops(source).get(peer(replica)) for source in self.sources for replica in last)

        self.commands.until(reached, "all train together", alive=self.sound)

    def spare(self) -> Command:
        """Return a replica of the last stage, to be disturbed; the others are sound without it."""
        if not self.spares:
            self.spares.append(self.newcomer(1))
            self.all_train()
        victim = self.spares.pop()
        self.disturbed.append(victim)
        return victim

    def goes_on(self) -> None:
        before = {replica: steps(replica) for replica in self.sound}
        self.commands.until(
            lambda: all(steps(replica) >= before[replica] + 5 for replica in self.sound),
            "the others go on",
            alive=self.sound,
        )

    def losses(self, replica: Command, since: float = 0.0) -> list[Lost]:
        return [event for event in replica.events(Lost) if event.at >= since]


class Lone(NamedTuple):
    commands: Commands
    bootstrap: Command
    invite: str


@pytest.fixture(scope="module")
def crowd() -> Iterator[Crowd]:
    with Commands() as commands:
        crowd = Crowd(commands)
        yield crowd
        # The sources first: their microbatches need somebody to come back from.
        all_leave(crowd.sources)
        all_leave([crowd.keeper, *crowd.spares, crowd.bootstrap])
        assert commands.running() == []


@pytest.fixture(scope="module")
def lone() -> Iterator[Lone]:
    with Commands() as commands:
        lone = Lone(commands, *host(commands, run_file(commands.directory)))
        yield lone
        all_leave([lone.bootstrap])
        assert commands.running() == []


@pytest.fixture
def commands() -> Iterator[Commands]:
    with Commands() as commands:
        yield commands
        assert commands.running() == []


def all_leave(commands: list[Command]) -> None:
    for command in commands:
        command.interrupt()
    for command in commands:
        assert command.wait() == Exit.OK, command.complaint
        gone(command)


# One run from its first step to its checkpoint.


def test_a_run_outlives_its_bootstrap_peer_and_ends_in_a_checkpoint(commands: Commands) -> None:
    run = run_file(commands.directory, steps=60)
    bootstrap, invite = host(commands, run)
    slow = ("--slowdown", "5")  # or the run might end before its bootstrap peer is killed
    sources = [join(commands, invite, 0, *slow) for _ in range(2)]
    commands.until(lambda: all(source.events(Started) for source in sources), "both sources are there", alive=sources)
    # Nothing could happen without the next stage; so neither source has used up the run before the other came.
    replicas = [*sources, *(join(commands, invite, 1, *slow) for _ in range(2))]
    commands.until(lambda: all(map(steps, replicas)), "all four train", alive=replicas)
    seen = look(commands, invite)
    check_status(seen, replicas)
    kept = bootstrap.home / "invite"
    commands.until(lambda: "," in kept.read_text(), "the bootstrap peer keeps addresses of others", alive=[bootstrap])
    bootstrap.process.kill()

    commands.until(lambda: all(map(is_finished, replicas)), "all four finish", alive=replicas)
    for replica in replicas:
        check_journal(replica, replicas)
    later = look(commands, seen["invite"])
    assert later["progress"] == 1.0
    assert [record["state"] for stage in later["stages"] for record in stage] == ["finished"] * 4

    out = commands.directory / "model"
    export = commands.start("export", seen["invite"], "--out", str(out))
    assert export.wait() == Exit.OK, export.complaint
    check_checkpoint(out)
    check_bootstrap_peer_comes_back(commands, bootstrap.home, run)
    all_leave(replicas)
    numbers = json.loads(printed("evaluate", out, "--batches", "2", "--json"))
    assert 0.0 < numbers["loss"] < math.log(384)


def check_bootstrap_peer_comes_back(commands: Commands, home: Path, run: Path) -> None:
    back = commands.start("bootstrap", "--run", str(run), "--listen", "/ip4/127.0.0.1/tcp/0", "--home", str(home))
    invite = commands.until(lambda: back.output.strip(), "a bootstrap peer prints its invite", alive=[back])
    commands.until(
        lambda: "replicas by stage: 0: 2, 1: 2" in back.complaint, "it finds the finished peers", alive=[back]
    )
    assert [len(stage) for stage in look(commands, invite)["stages"]] == [2, 2]
    back.interrupt()
    assert back.wait() == Exit.OK, back.complaint


def check_status(seen: dict[str, Any], replicas: list[Command]) -> None:
    records = [record for stage in seen["stages"] for record in stage]
    assert sorted(record["peer"] for record in records) == sorted(map(peer, replicas))
    assert [len(stage) for stage in seen["stages"]] == [2, 2]
    assert 0.0 <= seen["progress"] < 1.0
    assert seen["sources_finished"] == 0
    for record in records:
        assert record["state"] == "training"
        assert 0 <= record["inner_steps"] <= 500
        assert 0 <= record["round"] <= 50
        assert 0.0 <= record["progress"] < 1.0
        assert 0.0 <= record["tokens_per_s"] < 1e6
        assert 0.0 <= record["device_s"] < 60.0
        assert record["loss"] is None or 0.0 < record["loss"] < 10.0
        assert all(address.endswith(f"/p2p/{record['peer']}") for address in record["addresses"])
    # With the addresses of the four beside its own, the invite outlives the bootstrap peer.
    assert len(invites.parse(seen["invite"]).addresses) == 5


def check_journal(replica: Command, replicas: list[Command]) -> None:
    (finished,) = replica.events(Finished)
    assert finished.why == "the run is over"
    # So short a run ends before everybody has heard how far it is: rosters are read every second.
    assert 0.0 < finished.progress <= 1.0
    stage = {peer(other) for other in replicas if other.events(Started)[0].stage == replica.events(Started)[0].stage}
    met = [event for event in replica.events(OuterStepTaken) if event.partner is not None]
    assert {event.partner for event in met} == stage - {peer(replica)}
    assert all(event.bytes_sent > 0 and event.bytes_received > 0 for event in met)
    losses = [event.loss for event in replica.events(InnerStep) if event.loss is not None]
    assert losses[-1] < losses[0]
    traffic = replica.events(Traffic)[-1]
    assert traffic.sent["microbatch"] > 0
    assert traffic.received["gossip"] > 0
    if replica.events(Started)[0].stage == 0:
        last = {peer(other) for other in replicas} - stage
        assert hops(replica).keys() == last
        assert min(hops(replica).values()) > 0


def check_checkpoint(directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True)
    logits = model(torch.arange(8).view(1, 8)).logits
    assert logits.shape == (1, 8, 384)
    assert logits.isfinite().all()


def test_a_run_goes_on_from_a_checkpoint_that_one_machine_has(commands: Commands) -> None:
    """`init --from`, and one flag for whoever has the files: nodes without them begin with its weights, and train."""
    checkpoint, run = commands.directory / "checkpoint", commands.directory / "continued.toml"
    write_model(checkpoint)
    printed("init", run, "--from", checkpoint)
    assert str(commands.directory) not in run.read_text()
    wrong = commands.directory / "wrong"
    write_model(wrong, sizes={**LLAMA, "intermediate_size": 40})
    refused = commands.start("bootstrap", "--run", str(run), "--listen", LOCAL, "--weights", str(wrong), home=True)
    complains(refused, Exit.CONFIG, "are not those that the run starts from", "another file than the run file")
    bootstrap, invite = host(commands, run)
    missing = "until a peer gives --weights DIR"
    commands.until(lambda: missing in bootstrap.complaint, "what is missing is said", alive=[bootstrap])
    first = join(commands, invite, 1)
    commands.until(
        lambda: "waiting for the tokenizer of the run" in first.complaint, "a node waits", alive=[bootstrap, first]
    )
    owner = commands.start(
        *("join", invite, "--stage", "0", "--listen", LOCAL, "--refresh", "1", "--threads", "1"),
        *("--weights", str(checkpoint), "--data", "stdlib"),
        home=True,
    )
    commands.until(lambda: steps(owner) > 2 and steps(first) > 2, "both train", alive=[bootstrap, first, owner])
    for node in (first, owner):
        assert "begins with the weights of the checkpoint" in node.complaint
    assert list(first.home.glob("runs/*/weights/*.safetensors"))
    assert not list(owner.home.glob("runs/*/weights"))
    for command in (owner, first, bootstrap):
        command.interrupt()
        assert command.wait() == Exit.OK, command.complaint


# Leaving in a hurry, or before there was anything to leave.


def test_a_second_signal_ends_a_node_at_once(lone: Lone) -> None:
    node = join(lone.commands, lone.invite, 0)
    lone.commands.until(lambda: "training stage 0" in node.complaint, "it trains", alive=[node])
    # Both signals are there when it wakes up: it cannot have left in between.
    for number in (signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGCONT):
        node.process.send_signal(number)
    gone(node)
    assert node.exit_code == Exit.INTERRUPTED, node.complaint
    assert node.events(Finished) == []


def loads_torch(node: Command) -> bool:
    return "libtorch" in Path(f"/proc/{node.process.pid}/maps").read_text()


MOMENTS: dict[str, Callable[[Command], Any]] = {
    "libraries": loads_torch,
    "daemon": Command.daemons,
    "network": lambda node: "we are" in node.complaint,
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_an_interrupt_while_a_node_starts_leaves_nothing(lone: Lone, moment: str) -> None:
    commands = lone.commands
    node = join(commands, lone.invite, 0, forked=moment != "libraries")
    commands.until(lambda: MOMENTS[moment](node), moment, alive=[node])
    node.interrupt()
    gone(node)


def test_an_interrupt_while_a_bootstrap_peer_starts_leaves_nothing(commands: Commands) -> None:
    run = run_file(commands.directory)
    bootstrap = commands.start("bootstrap", "--run", str(run), "--listen", LOCAL, home=True)
    commands.until(bootstrap.daemons, "its daemon", alive=[bootstrap])
    bootstrap.interrupt()
    gone(bootstrap)


def gone(command: Command) -> None:
    assert command.wait() in (Exit.OK, Exit.INTERRUPTED), command.complaint
    assert "Traceback" not in command.complaint
    assert command.left_behind() == []
    assert not command.daemons()
    kept = {"lock", "identity.key", "journal.jsonl", "evals.jsonl", "run.toml", "invite", "runs"}
    assert {path.name for path in command.home.glob("*")} <= kept


# What is wrong, why, and what to try.


def test_what_is_wrong_is_said_once_and_with_its_exit_code(lone: Lone) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))  # and does not listen: nobody else can take the port meanwhile
        closed = f"/ip4/127.0.0.1/tcp/{listener.getsockname()[1]}/p2p/{NOBODY}"
        status = lone.commands.start("status", invites.format(invites.parse(lone.invite).digest, [closed]))
        node = lone.commands.start("join", lone.invite, "--listen", LOCAL, "--stage", "9", home=True)
        complains(status, Exit.UNREACHABLE, closed, "refused")
        complains(node, Exit.USAGE, "stage 9", "0 to 1")
    assert lone.bootstrap.exit_code is None


# A swarm that loses this and that: the last tests, because it keeps the machine busy.


def test_a_killed_replica_stops_nobody_and_its_microbatches_go_elsewhere(crowd: Crowd) -> None:
    victim = crowd.spare()
    name = peer(victim)
    victim.process.kill()
    assert victim.wait() == -signal.SIGKILL
    crowd.commands.until(lambda: not victim.daemons(), "its daemon ends as well")
    crowd.commands.until(
        lambda: all(any(loss.peer == name for loss in crowd.losses(source)) for source in crowd.sources),
        "its callers notice",
        alive=crowd.sound,
    )
    lost_at = {source: crowd.losses(source)[-1].at for source in crowd.sources}
    others = {peer(replica) for replica in crowd.sound if replica not in crowd.sources}

    def since(source: Command) -> list[dict[str, int]]:
        return [totals.counts for totals in source.events(Hops) if totals.at > lost_at[source]]

    def elsewhere() -> bool:
        return all(len(since(s)) > 1 and all(since(s)[-1][r] > since(s)[0][r] for r in others) for s in crowd.sources)

    crowd.commands.until(elsewhere, "its microbatches reach the others", alive=crowd.sound)
    assert all(since(source)[-1][name] == since(source)[0][name] for source in crowd.sources)
    crowd.goes_on()


def test_a_silent_replica_is_suspected_alone_and_for_its_silence(crowd: Crowd) -> None:
    victim = crowd.spare()
    name, (daemon,) = peer(victim), victim.daemons()
    # Callers try a peer that an earlier test killed now and then, until its record has expired.
    dead = {loss.peer for replica in crowd.sound for loss in crowd.losses(replica)}
    known = max(event.at for replica in crowd.sound for event in replica.events(InnerStep))
    victim.process.send_signal(signal.SIGSTOP)
    daemon.suspend()
    try:
        crowd.commands.until(
            lambda: all(any(loss.peer == name for loss in crowd.losses(s, known)) for s in crowd.sources),
            "it is missed",
            alive=crowd.sound,
        )
        first = [next(loss for loss in crowd.losses(source, known) if loss.peer == name) for source in crowd.sources]
        assert all(loss.what == "microbatch" for loss in first), first
        # How long is borne with follows from how evenly its beats came, within bounds.
        silences = TimeoutSettings().silences()
        for loss in first:
            borne = re.search(r"was silent for ([\d.]+) s", loss.why)
            assert borne is not None, loss
            assert silences.least_s <= float(borne[1]) <= silences.most_s
        crowd.goes_on()
        losses = [loss for replica in crowd.sound for loss in crowd.losses(replica, known)]
        assert {loss.peer for loss in losses} - dead == {name}, losses
        told = len(victim.events(Traffic))
    finally:
        daemon.resume()
        victim.process.send_signal(signal.SIGCONT)
    crowd.commands.until(lambda: len(victim.events(Traffic)) > told + 1, "it wakes up", alive=[victim, *crowd.sound])
    crowd.goes_on()
    victim.interrupt()
    assert victim.wait() == Exit.OK, victim.complaint


def test_a_node_whose_own_daemon_dies_starts_another_trains_on_and_leaves_politely(crowd: Crowd) -> None:
    victim = crowd.spare()
    name, (daemon,), taken = peer(victim), victim.daemons(), steps(victim)
    daemon.kill()
    crowd.commands.until(lambda: "back in the swarm" in victim.complaint, "its daemon is back", alive=[victim])
    crowd.commands.until(lambda: steps(victim) > taken + 5, "it trains on", alive=[victim, *crowd.sound])
    taken = steps(victim)
    victim.process.send_signal(signal.SIGTERM)  # as Docker and systemd ask
    assert victim.wait() == Exit.OK, victim.complaint
    gone(victim)
    (finished,) = victim.events(Finished)
    assert finished.why == "asked to leave"
    assert finished.step >= taken
    # One a round, the last few kept, and the last of all on leaving.
    saved = max(path.name for path in victim.home.glob("runs/*/checkpoint/*"))
    assert saved.endswith(f"-{finished.step:010d}.safetensors")
    listed = [record["peer"] for stage in look(crowd.commands, crowd.invite)["stages"] for record in stage]
    assert name not in listed
    assert peer(crowd.keeper) in listed
    crowd.goes_on()


def test_a_new_bootstrap_peer_takes_the_place_of_a_dead_one(crowd: Crowd) -> None:
    """A new bootstrap peer finds the swarm by the home of any node, and leads the others back."""
    gone = crowd.invite
    crowd.bootstrap.process.kill()
    crowd.bootstrap.wait()
    home = crowd.sound[0].home
    crowd.commands.until(lambda: (home / "invite").exists(), "a node keeps an invite", alive=crowd.sound)
    seen = look(crowd.commands, str(home))
    assert peer(crowd.sound[0]) in {record["peer"] for stage in seen["stages"] for record in stage}
    crowd.bootstrap, crowd.invite = host(crowd.commands, crowd.run, "--invite", str(home))
    assert invites.parse(crowd.invite).addresses != invites.parse(gone).addresses
    newcomer = crowd.newcomer(1)
    crowd.spares.append(newcomer)
    crowd.all_train()
    assert "copying stage 1" in newcomer.complaint
    assert peer(newcomer) in {record["peer"] for record in look(crowd.commands, crowd.invite)["stages"][1]}
    crowd.goes_on()
