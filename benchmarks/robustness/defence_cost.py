"""What the defences cost a swarm in which nobody attacks: seconds of CPU and bytes, with them and without.

    python -m benchmarks.robustness.defence_cost                   # all on and all off, three times in turn
    python -m benchmarks.robustness.defence_cost --each            # also each one alone
    python -m benchmarks.robustness.defence_cost --width 256       # a model four times as wide
    python -m benchmarks.robustness.defence_cost --rows 16         # microbatches of four times as many tokens
    python -m benchmarks.robustness.defence_cost --parts           # seconds spent in each, of one run with all of them

Production nodes in virtual time train the small Llama of `training_attacks`, 2 stages x 4 replicas. The defences are
influence (a partner's weights, activations and gradients are measured before they count), receipts (samples are signed
for, and believed as far as they are signed), admission (tickets are shown, and stand before every record) and bans.
None of them can be switched off in the product: here their parts are replaced from outside. Spot checks are in both
runs: how many microbatches are computed twice is a setting, and `--parts` shows what their verdicts take. The
difference of two runs is one of two large numbers, which other programs shift; `--parts` adds up what the functions of
each defence take, and not what waits and wrappers around them do. Bytes are those of messages, and of records that are
published and read. Time is that to the same inner step, three quarters of the way: the runs end at different ones.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from statistics import median
from typing import Any, NamedTuple
from unittest import mock

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benchmarks.robustness.training_attacks import SMALL, Shape, prepared
from gossip.rounds.outer_optimiser import OuterOptimiser
from noloco_node.admission.admission_hook import AdmissionHook, _Answered
from noloco_node.admission.admission_state import AdmissionState
from noloco_node.admission.ticket import MEMBER
from noloco_node.admission.ticket_service import TicketSigner
from noloco_node.journal import events
from noloco_node.network.bans import BanHook, BanList
from noloco_node.network.calls import HookedNetwork
from noloco_node.network.interface import NetworkHook, PeerNetwork
from noloco_node.sim.network.sim_network import SimNetwork, SimPeerNetwork
from noloco_node.sim.peer import SimulatedPeer
from noloco_node.sim.world import Watcher, World, simulate
from noloco_node.swarm.receipts import IssuedReceipts, ReceiptLedger
from noloco_node.swarm.run_samples import RunSamples
from pipeline.activation_codec import SizeBound
from pipeline.spot_checks import SpotChecks, Verdicts

UNTIL = 2**33


class Cost(NamedTuple):
    """Of one run: seconds of this process's CPU, when its inner steps were taken, and bytes by what they are for."""

    cpu_s: float
    steps_s: list[float]
    sent: Counter[str]


class Steps(Watcher):
    """Notes the virtual seconds at which inner steps are taken."""

    def __init__(self, world: World) -> None:
        self._world, self.taken_s = world, list[float]()

    def hear(self, peer: SimulatedPeer, event: events.Event) -> None:
        if isinstance(event, events.InnerStep):
            self.taken_s.append(self._world.now_s)


@contextmanager
def without_influence() -> Iterator[None]:
    """Let all count that is heard, and measure none of it."""

    async def whole(_: object, partner: str, sides: Any, snapshot: object) -> Any:
        return sides

    with (
        mock.patch.multiple(OuterOptimiser, bound_fast=whole, bound_slow=whole),
        mock.patch.object(SizeBound, "bounded", lambda bound, peer, wire, *_: wire),
    ):
        yield


@contextmanager
def without_receipts() -> Iterator[None]:
    """Believe what sources claim; sign, publish and read nothing about it."""
    publish, read_all = SimPeerNetwork.publish, SimPeerNetwork.read_all

    async def published(network: SimPeerNetwork, key: str, subkey: str, value: bytes, lifetime_s: float) -> bool:
        return key.endswith("/receipts") or await publish(network, key, subkey, value, lifetime_s)

    async def read(network: SimPeerNetwork, keys: Sequence[str]) -> list[Any]:
        found = await read_all(network, [key for key in keys if not key.endswith("/receipts")])
        return [*found, *({} for key in keys if key.endswith("/receipts"))]

    with (
        mock.patch.multiple(SimPeerNetwork, publish=published, read_all=read),
        mock.patch.multiple(ReceiptLedger, take=lambda *_: None, prove=lambda *_: None),
        mock.patch.object(RunSamples, "_signed", return_value=float("inf")),
    ):
        yield


@contextmanager
def without_bans() -> Iterator[None]:
    """Forget violations."""
    with mock.patch.multiple(
        BanHook, calling=NetworkHook.calling, lost=NetworkHook.lost, answering=NetworkHook.answering
    ):
        yield


@cache
def _key(name: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(name.encode().ljust(32, b"."))


def _public(name: str) -> bytes:
    return _key(name).public_key().public_bytes_raw()


@contextmanager
def with_admission() -> Iterator[None]:
    """Give everybody a ticket of the owner; a simulation has none otherwise."""
    opened, owner = SimNetwork.network, TicketSigner(_key("owner"))

    def member(hub: SimNetwork, peer: str, access: Any = None) -> PeerNetwork:
        state = AdmissionState("run", time.time)
        state.pin(_public("owner"), "open")
        network = opened(hub, peer, access)
        return HookedNetwork(network, AdmissionHook(network, state, owner.ticket("run", peer, MEMBER, UNTIL)))

    with (
        mock.patch("noloco_node.admission.admission_state.key_of", _public),
        mock.patch("noloco_node.admission.ticket_service.key_of", _public),
        mock.patch.object(SimNetwork, "network", member),
    ):
        yield


PARTS: dict[str, tuple[tuple[type, str], ...]] = {
    "influence": ((OuterOptimiser, "_bounded"), (SizeBound, "bounded")),
    "receipts": (
        *((ReceiptLedger, name) for name in ("take", "prove", "signed", "verified", "believed_in_all")),
        *((IssuedReceipts, name) for name in ("add", "raw")),
        (RunSamples, "_signed"),
    ),
    "bans": ((BanHook, "_refuse_banned"), (BanList, "note")),
    "checks": (
        *((SpotChecks, name) for name in ("_mean", "_distance")),
        *((Verdicts, name) for name in ("agree", "judge", "watch")),
    ),
    "admission": (
        *(
            (AdmissionState, name)
            for name in ("show", "rights", "refusal", "accepts", "was_member", "take_revocations")
        ),
        (_Answered, "check"),
    ),
}


@contextmanager
def metered(spent: Counter[str]) -> Iterator[None]:
    """Add the CPU seconds in the functions of each defence to `spent`; one within another counts once."""
    inside: list[str] = []

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if inside:
                return function(*args, **options)
            inside.append(name)
            begun_s = time.process_time()
            try:
                return function(*args, **options)
            finally:
                spent[name] += time.process_time() - begun_s  # type: ignore[assignment]
                inside.clear()

        return call

    with ExitStack() as stack:
        for name, functions in PARTS.items():
            for owner, attribute in functions:
                stack.enter_context(mock.patch.object(owner, attribute, timed(name, getattr(owner, attribute))))
        yield


OFF: dict[str, Callable[[], Any]] = {
    "influence": without_influence,
    "receipts": without_receipts,
    "bans": without_bans,
}
ALL = (*OFF, "admission")


def cost(defences: Sequence[str], seed: int, shape: Shape = SMALL) -> Cost:
    """Train once with these defences."""
    setup, records, steps = prepared(seed, shape=shape), Counter[str](), list[Steps]()
    publish, read_all = SimPeerNetwork.publish, SimPeerNetwork.read_all

    async def published(network: SimPeerNetwork, key: str, subkey: str, value: bytes, lifetime_s: float) -> bool:
        records["published"] += len(value)
        return await publish(network, key, subkey, value, lifetime_s)

    async def read(network: SimPeerNetwork, keys: Sequence[str]) -> list[Any]:
        found = await read_all(network, keys)
        records["read"] += sum(len(value) for values in found for value in (values or {}).values())
        return found

    def ended(world: World) -> Cost:
        counts = world.network.statistics()
        sent = sum(int(count) for name, count in counts.items() if name.startswith("bytes."))
        return Cost(time.process_time() - begun_s, steps[0].taken_s, Counter(messages=sent) + records)

    def watch(world: World) -> Sequence[Watcher]:
        steps.append(Steps(world))
        return steps

    with ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(SimPeerNetwork, publish=published, read_all=read))
        for name, off in OFF.items():
            if name not in defences:
                stack.enter_context(off())
        if "admission" in defences:
            stack.enter_context(with_admission())
        begun_s = time.process_time()
        return simulate(setup, watch, ended)


def main() -> None:
    """Print a line for each choice of defences, beside none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", action="store_true", help="also each defence alone")
    parser.add_argument("--parts", action="store_true", help="what is spent in each defence, and nothing else")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--width", type=int, default=SMALL.width, help="channels of the model")
    parser.add_argument("--rows", type=int, default=SMALL.rows, help="sequences of a microbatch")
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    choices: list[tuple[str, ...]] = [(), ALL, *([(name,) for name in ALL] if wanted.each else [])]
    shape = Shape(width=wanted.width, rows=wanted.rows)
    cost((), 0)  # what is imported and compiled once
    if wanted.parts:
        _show_parts(shape, wanted.times)
        return
    found: dict[tuple[str, ...], list[Cost]] = {choice: [] for choice in choices}
    for seed in range(wanted.times):
        # In turn, so that what else the machine does falls on all of them, and each is first now and then.
        turn = seed % len(choices)
        for choice in (*choices[turn:], *choices[:turn]):
            found[choice].append(cost(choice, seed, shape))
            print(f"seed {seed}, {' '.join(choice) or 'none'}: {found[choice][-1].cpu_s:.2f} s of CPU", flush=True)
    for choice in choices:
        _show(choice, found[choice], found[()])


def _show_parts(shape: Shape, times: int) -> None:
    for seed in range(times):
        spent = Counter[str]()
        with metered(spent):
            all_s = cost(ALL, seed, shape).cpu_s
        shares = ", ".join(f"{name} {spent[name] / all_s:.2%}" for name in PARTS)
        print(f"seed {seed}: {all_s:.2f} s of CPU; {shares}; all {spent.total() / all_s:.2%}", flush=True)


def _show(choice: tuple[str, ...], costs: Sequence[Cost], bare: Sequence[Cost]) -> None:
    ratios = sorted(one.cpu_s / other.cpu_s - 1.0 for one, other in zip(costs, bare, strict=True))
    # Runs end at different steps: receipts say later that the budget is used up.
    until = [min(len(one.steps_s), len(other.steps_s)) * 3 // 4 for one, other in zip(costs, bare, strict=True)]
    times = sorted(
        one.steps_s[step] / other.steps_s[step] - 1.0 for one, other, step in zip(costs, bare, until, strict=True)
    )
    steps = sorted(len(one.steps_s) / len(other.steps_s) - 1.0 for one, other in zip(costs, bare, strict=True))
    total = sorted(_bytes_a_step(one) / _bytes_a_step(other) - 1.0 for one, other in zip(costs, bare, strict=True))
    kinds = ", ".join(f"{what} {median(one.sent[what] for one in costs) / 1e6:.2f} MB" for what in costs[0].sent)
    print(
        f"{' '.join(choice) or 'none':40}  CPU {_spread(ratios)}"
        f"  virtual time to the same step {_spread(times)}  steps in all {_spread(steps)}"
        f"  bytes a step {_spread(total)}: {kinds}"
    )


def _spread(ratios: Sequence[float]) -> str:
    return f"{median(ratios):+.1%} ({ratios[0]:+.1%} to {ratios[-1]:+.1%})"


def _bytes_a_step(run: Cost) -> float:
    return run.sent.total() / len(run.steps_s)


if __name__ == "__main__":
    main()
