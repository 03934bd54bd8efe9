"""Peers of a real swarm are killed all the time, come back by themselves, and the model is as good as without that.

    python -m benchmarks.robustness.chaos  # 3 stages x 3 replicas, ten minutes, twice
    python -m benchmarks.robustness.chaos --stages 2 --replicas 2 --minutes 1  # a short form
    python -m benchmarks.robustness.chaos --home DIR  # goes on where an earlier call was cut off

The same run twice, from the same file and for as many tokens: undisturbed, which takes about `--minutes` (a calibration
says how many inner steps those are), and with a random peer killed by SIGKILL every `--every` seconds, its libp2p
daemon with it, and started again `--back` seconds later with the home that it had. The clock of the kills starts when
all take part; they end when the run does. The bootstrap peer is left alone, and so is everything else.

Four claims, and exit code 1 where one fails: nobody ended but who was killed; everybody who was there at the end, the
returned included, took part to the end; no survivor waited longer than `STILL_S` for its next inner step, also where
none came; the merged model's loss on held-out text is at most `WORSE` times the undisturbed one's.

The directory keeps what was asked (`asked.json`; another trial is refused), what came of each half (`calm/case.json`,
`chaos/case.json`), `result.json` and `report.txt`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

import msgspec

from benchmarks.robustness.process_swarm import LOOK_S, READY_S, Peer, Shape, Swarm, options, run, say, write
from noloco_node.demo.child_processes import Children
from noloco_node.demo.swarm_processes import affordable_steps, calibrations, evaluation
from noloco_node.errors import Exit, UserError
from noloco_node.journal.events import Event, Finished, InnerStep, Started
from noloco_node.journal.reader import read
from noloco_node.run.presets import demo_run_text
from noloco_node.run.runfile import decode_run
from noloco_node.units import format_clock

WORSE = 1.05
STILL_S = 120.0
LATE_S = 180.0
"""How long the others may still finish after the first source has."""
SAY_EVERY_S = 15.0


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    """One strike: whom, seconds after all took part, and how many inner steps the victim had taken in that session."""

    peer: str
    at_s: float
    steps: int


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one run. Losses are nats a token; `longest_pause_s`: after an inner step, without another one."""

    steps: int
    seconds: float
    tokens: int
    kills: tuple[Kill, ...]
    sessions: int
    ended: tuple[str, ...]
    unfinished: tuple[str, ...]
    longest_pause_s: float
    merged: float
    single: float


class Rhythm(NamedTuple):
    """When peers are killed, and how long they stay away, in seconds."""

    every_s: float
    back_s: float


class Chaos:
    """Strikes in its rhythm, brings back, and notes both; `rhythm` None leaves everybody in peace."""

    def __init__(self, swarm: Swarm, rhythm: Rhythm | None, seed: int) -> None:
        self.kills: list[Kill] = []
        self.ended: list[str] = []
        self._swarm, self._rhythm, self._rng = swarm, rhythm, Random(f"{seed}|chaos")
        self._begun_s = time.monotonic()

    def look(self, going_on: bool) -> None:
        """Do what is due now; whom to strike is drawn from those whose process is there, `going_on` or not at all."""
        now_s = time.monotonic()
        for peer in self._swarm.peers:
            if peer.back_at is not None and now_s >= peer.back_at and not peer.runs:
                self._swarm.start(peer)
            elif peer.back_at is None and not peer.runs and peer.name not in self.ended:
                self.ended.append(peer.name)
        if self._rhythm is None or not going_on:
            return
        if now_s - self._begun_s >= (len(self.kills) + 1) * self._rhythm.every_s:
            there = [peer for peer in self._swarm.peers if peer.back_at is None and peer.runs]
            if not there:
                return
            victim = self._rng.choice(there)
            self.kills.append(Kill(peer=victim.name, at_s=now_s - self._begun_s, steps=victim.steps))
            self._swarm.strike(victim)
            victim.back_at = time.monotonic() + self._rhythm.back_s


async def run_case(home: Path, shape: Shape, steps: int, rhythm: Rhythm | None) -> Case:
    """Run a swarm from its start to the scores on its model."""
    text = demo_run_text(stages=shape.stages, replicas=shape.replicas, steps=steps, seed=shape.seed)
    async with Swarm(home, shape, text) as swarm:
        await swarm.until(lambda: all(peer.steps for peer in swarm.peers), "not all took part", READY_S)
        chaos, begun_s = Chaos(swarm, rhythm, shape.seed), time.monotonic()
        await _train(swarm, chaos)
        seconds, until_unix_s = time.monotonic() - begun_s, time.time()
        unfinished = tuple(peer.name for peer in swarm.peers if not peer.finished)
        say("evaluating")
        homes = [peer.home for peer in swarm.peers]
        scores = await evaluation(swarm.children, swarm.invite, homes, home / "model", home / "evaluation")
    histories = [peer.history for peer in swarm.peers]
    return Case(
        steps=steps,
        seconds=seconds,
        tokens=sum(history.tokens for history in histories if history.stage == 0),
        kills=tuple(chaos.kills),
        sessions=sum(len(peer.sessions) for peer in swarm.peers),
        ended=tuple(chaos.ended),
        unfinished=unfinished,
        longest_pause_s=max(_pause_s(peer, until_unix_s) for peer in swarm.peers),
        merged=scores.merged,
        single=scores.single,
    )


async def _train(swarm: Swarm, chaos: Chaos) -> None:
    """Watch and strike until everybody has finished, or only stragglers have not."""
    begun_s, said_s, over_s = time.monotonic(), 0.0, None
    while not all(peer.finished for peer in swarm.peers):
        swarm.take_news()
        now_s = time.monotonic()
        if over_s is None and any(peer.finished for peer in swarm.peers if peer.stage == 0):
            over_s = now_s
        chaos.look(going_on=over_s is None)
        if over_s is not None and now_s - over_s > LATE_S:
            return
        if now_s - said_s >= SAY_EVERY_S:
            said_s = now_s
            there = sum(peer.runs for peer in swarm.peers)
            done = max(peer.progress for peer in swarm.peers)
            say(f"{format_clock(now_s - begun_s)}: {done:.0%}, {there} there, {len(chaos.kills)} killed so far")
        if len(chaos.ended) == len(swarm.peers):
            raise swarm.peers[0].child.trouble("nobody is left")
        await asyncio.sleep(LOOK_S)


def longest_pause_s(events: Iterable[Event], cut_at: Sequence[float]) -> float:
    """Return the longest time after an inner step without another one, within one session of a peer.

    `events`: of its journal. `cut_at`: when its lives were cut off, or we looked away (unix seconds). A pause that
    never ended lasts until then, or until the peer says that it has finished. The first step of a session waits for its
    swarm, and counts as no pause.
    """
    longest_s, stepped_at = 0.0, None
    for event in events:
        match event:
            case Started():
                longest_s, stepped_at = max(longest_s, _cut_off_s(stepped_at, cut_at)), None
            case InnerStep():
                longest_s = longest_s if stepped_at is None else max(longest_s, event.seconds)
                stepped_at = event.at
            case Finished():
                longest_s = longest_s if stepped_at is None else max(longest_s, event.at - stepped_at)
                stepped_at = None
    return max(longest_s, _cut_off_s(stepped_at, cut_at))


def _cut_off_s(stepped_at: float | None, cut_at: Sequence[float]) -> float:
    """Return how long a session lasted after its last inner step."""
    if stepped_at is None:
        return 0.0
    return min((at - stepped_at for at in cut_at if at >= stepped_at), default=0.0)


def _pause_s(peer: Peer, until_unix_s: float) -> float:
    return longest_pause_s(read(peer.home / "journal.jsonl"), [*peer.struck_at, until_unix_s])


async def affordable(home: Path, shape: Shape, minutes: float) -> int:
    """Return how many inner steps of each source fit into the time, as this machine is now."""
    text = demo_run_text(stages=shape.stages, replicas=shape.replicas, steps=100, seed=shape.seed)
    path, children = write(home / "calibration.toml", text), Children()
    try:
        found = await calibrations(children, path, shape.stages * shape.replicas, home / "calibration")
    finally:
        await children.stop()
    return affordable_steps(60 * minutes, found, decode_run(text, str(path)))


def claims(calm: Case, chaos: Case) -> dict[str, bool]:
    """Return every claim and whether it holds."""
    return {
        "nobody ended but who was killed": not calm.ended and not chaos.ended,
        "everybody took part to the end": not calm.unfinished and not chaos.unfinished,
        f"no survivor waited longer than {STILL_S:.0f} s for a step": chaos.longest_pause_s <= STILL_S,
        f"the merged loss is at most {WORSE} times the undisturbed one": chaos.merged <= WORSE * calm.merged,
    }


def report(calm: Case, chaos: Case) -> list[str]:
    """Return the comparison as plain text."""
    rows = (
        ("seconds of training", f"{calm.seconds:.0f}", f"{chaos.seconds:.0f}"),
        ("tokens in inner steps", f"{calm.tokens:,}", f"{chaos.tokens:,}"),
        ("peers killed", f"{len(calm.kills)}", f"{len(chaos.kills)}"),
        ("processes started", f"{calm.sessions}", f"{chaos.sessions}"),
        ("longest pause, s", f"{calm.longest_pause_s:.1f}", f"{chaos.longest_pause_s:.1f}"),
        ("merged model, nats", f"{calm.merged:.4f}", f"{chaos.merged:.4f}"),
        ("single replicas, nats", f"{calm.single:.4f}", f"{chaos.single:.4f}"),
    )
    text = [f"{calm.steps} inner steps of each source", "", f"{'':<24}{'undisturbed':>14}{'chaos':>14}"]
    text += [f"{name:<24}{one:>14}{other:>14}" for name, one, other in rows]
    for what, names in (("ended by themselves", chaos.ended), ("not finished", chaos.unfinished)):
        text += [f"{what}: {', '.join(names)}"] if names else []
    return [*text, "", *(f"{'yes' if holds else 'NO':<4}{claim}" for claim, holds in claims(calm, chaos).items())]


async def main(asked: argparse.Namespace) -> int:
    """Run what has not been run yet; return the exit code."""
    shape = Shape(asked.stages, asked.replicas, asked.seed)
    home: Path = asked.home.absolute()
    _hold_to(home / "asked.json", asked)
    cases: dict[str, Case] = {}
    for name, rhythm in (("calm", None), ("chaos", Rhythm(asked.every, asked.back))):
        kept = home / name / "case.json"
        before = _case(kept)
        if before is not None:
            cases[name] = before
            say(f"{name}: done before")
            continue
        steps = asked.steps or (cases["calm"].steps if "calm" in cases else None)
        steps = steps or await affordable(home, shape, asked.minutes)
        say(f"{name}: {shape.stages} stages x {shape.replicas} replicas, {steps} inner steps of each source")
        directory = _fresh(home / name)
        cases[name] = await run_case(directory, shape, steps, rhythm)
        write(kept, msgspec.json.format(msgspec.json.encode(cases[name])).decode())
    calm, chaos = cases["calm"], cases["chaos"]
    text, held = report(calm, chaos), claims(calm, chaos)
    document = {"calm": calm, "chaos": chaos, "claims": held}
    write(home / "report.txt", "\n".join(text) + "\n")
    write(home / "result.json", msgspec.json.format(msgspec.json.encode(document)).decode() + "\n")
    print("\n".join(text))
    return 0 if all(held.values()) else 1


def _hold_to(path: Path, asked: argparse.Namespace) -> None:
    """Note what is asked of a directory; raise `UserError` where an earlier call asked for something else."""
    wanted = {name: value for name, value in sorted(vars(asked).items()) if name != "home"}
    if path.exists() and msgspec.json.decode(path.read_bytes()) != wanted:
        raise UserError(
            f"{path.parent} holds another trial.",
            why=f"{path} says with which options it was begun",
            hint="the same options, or another --home",
            code=Exit.USAGE,
        )
    write(path, msgspec.json.encode(wanted).decode())


def _case(path: Path) -> Case | None:
    return msgspec.json.decode(path.read_bytes(), type=Case) if path.exists() else None


def _fresh(directory: Path) -> Path:
    """Put what an earlier call left unfinished aside, and return the directory."""
    if directory.exists():
        number = next(n for n in range(1, 10_000) if not directory.with_name(f"{directory.name}-cut-{n}").exists())
        directory.rename(directory.with_name(f"{directory.name}-cut-{number}"))
    directory.mkdir(parents=True)
    return directory


def _asked() -> argparse.Namespace:
    parser = options(__doc__ or "", Shape(3, 3), "noloco-chaos")
    parser.add_argument("--minutes", type=float, default=10.0, help="of undisturbed training")
    parser.add_argument("--steps", type=int, help="inner steps of each source, instead of what fits into --minutes")
    parser.add_argument("--every", type=float, default=20.0, metavar="SECONDS", help="between two kills")
    parser.add_argument(
        "--back", type=float, default=10.0, metavar="SECONDS", help="until the killed are started again"
    )
    return parser.parse_args()


if __name__ == "__main__":
    asked = _asked()
    sys.exit(run(lambda: main(asked)))
