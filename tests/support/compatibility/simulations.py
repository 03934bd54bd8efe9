"""Short simulations, and the tables recorded of them.

The events and times of a simulation follow from its seed and from no weight, so they are the same on every machine: a
digest is recorded of events (`events.jsonl`) and report (`--json`), with numbers rounded to seven digits. Losses, gaps
and weights are float32 arithmetic, in which processors differ: figures of them are recorded and compared within a
tolerance. Words for people have a digest of their own. Neither the program's version nor real time counts.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import msgspec
import torch

from compatibility import product
from compatibility.recorded import DATA, mapped, sha256

SCENARIOS = {path.stem: path for path in sorted((DATA / "simulations").glob("*.toml"))}
TOLERANCES = {"real-model": 1e-2}
"""By simulation, where it is another one: the text is the standard library's, which differs a little between versions
of Python, and AdamW's first steps magnify it. Of weights trained on it nothing is recorded.
"""
BUDGETS = {
    "narrow-budgets": {
        "s0r1": product.Allowance(upload_bytes_per_s=400.0, monthly_cap_bytes=10**6),
        "s1r2": product.Allowance(upload_bytes_per_s=300.0, download_bytes_per_s=300.0),
    }
}
"""Of single peers, by simulation. A scenario cannot say it."""
SAVED_UP_BYTES = 64 * 1024
"""That a budget admits at once."""
LEFT_OUT = ("version", "real_s", "scenario")
ARITHMETIC = ("loss", "gap", "loss_first", "loss_last", "gap_first", "gap_last", "digest")
WORDS = ("why", "text", "waiting", "standstill")
DIGITS = 7


class Simulated(NamedTuple):
    """What came of a simulation: its events and report as they are written, a sum of each peer's weights, and the
    topics that were served and the keys of records that were published in it.
    """

    events: list[dict[str, Any]]
    report: dict[str, Any]
    weights: dict[str, list[float]]
    topics: set[str]
    keys: set[str]


class _Overheard(product.HookedNetwork):
    def __init__(self, network: Any, topics: set[str], keys: set[str]) -> None:
        super().__init__(network)
        self._topics, self._keys = topics, keys

    async def serve(self, topic: str, schema: Any, handler: Any) -> None:
        self._topics.add(topic)
        await super().serve(topic, schema, handler)

    async def publish(self, key: str, subkey: str, value: bytes, lifetime_s: float) -> bool:
        self._keys.add(key)
        return await super().publish(key, subkey, value, lifetime_s)


def simulated(name: str) -> Simulated:
    """Simulate a scenario as `noloco-node simulate SCENARIO --json --trace` does."""
    torch.set_num_threads(1)
    path = SCENARIOS[name]
    collectors: list[product.EventCollector] = []
    topics: set[str] = set()
    keys: set[str] = set()
    with TemporaryDirectory() as directory:
        events = Path(directory, "events.jsonl")
        with product.trace_file(events) as file:

            def watch(world: product.World) -> list[product.Watcher]:
                _surround(world, BUDGETS.get(name, {}), topics, keys)
                collectors.append(product.EventCollector(world))
                return [collectors[0], product.Trace(world, file)]

            def finish(world: product.World) -> tuple[product.Report, dict[str, list[float]]]:
                return product.make_report(world, collectors[0]), _weights(world)

            setting = product.complete(product.put_together(path, product.SimulationRequest()), path)
            report, weights = product.simulate(setting, watch, finish)
        lines = [json.loads(line) for line in events.read_bytes().splitlines()]
    return Simulated(lines, json.loads(msgspec.json.encode(report)), weights, topics, keys)


def _surround(world: product.World, budgets: dict[str, product.Allowance], topics: set[str], keys: set[str]) -> None:
    """Have every network that the world hands out be overheard, and some of them keep to a budget."""
    network = world.network.network
    spending: list[asyncio.Task[None]] = []

    def surrounded(peer: str, *access: Any) -> Any:
        around = _Overheard(network(peer, *access), topics, keys)
        if peer not in budgets:
            return around
        limits = product.LimitHook(budgets[peer])
        # Else all that a small swarm says would pass with what a budget admits at once.
        spending.extend(asyncio.create_task(valve.admit(SAVED_UP_BYTES)) for valve in (limits.up, limits.down))
        return product.HookedNetwork(around, limits)

    world.network.network = surrounded


def _weights(world: product.World) -> dict[str, list[float]]:
    """Return a sum over the slow weights, momentum and fast weights of each peer in which every place counts."""
    if world.setting.scenario.swarm.model != "quadratic":
        return {}
    found = {}
    for name, peer in sorted(world.peers.items()):
        if (
            not peer.sessions
            or peer.session.node is None
            or peer.session.node.replica is None
            or peer.session.stage is None
        ):
            continue
        state = peer.session.node.replica.rounds.state
        found[name] = [_sum(tensors) for tensors in (state.slow, state.momentum, peer.session.stage.weights())]
    return found


def _sum(tensors: tuple[torch.Tensor, ...]) -> float:
    flat = torch.cat([tensor.detach().double().flatten() for tensor in tensors]) if tensors else torch.zeros(0)
    return float((flat * (torch.arange(len(flat)) % 7 + 1)).sum())


def digested(found: Simulated) -> dict[str, Any]:
    plain = {"events": _plain(found.events), "report": _plain(found.report)}
    return {
        "events": sha256(json.dumps(plain["events"], sort_keys=True)),
        "report": sha256(json.dumps(plain["report"], sort_keys=True)),
        "words": sha256("\n".join([*_words(found.events), *_words(found.report)])),
        "counts": dict(sorted(Counter(event["event"] for event in found.events).items())),
        "figures": {
            "losses": _mean(event.get("loss") for event in found.events),
            "gaps": _mean(event.get("gap") for event in found.events),
            "loss_first": found.report["loss_first"],
            "loss_last": found.report["loss_last"],
            "gap_last": [stage["gap_last"] for stage in found.report["stages"]],
            "weights": {peer: list(map(_rounded, sums)) for peer, sums in found.weights.items()},
        },
    }


def _mean(values: Iterator[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return _rounded(fmean(known)) if known else None


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _plain(value: Any) -> Any:
    """Return a table without what differs between machines, and without words."""

    def chosen(value: Any) -> Any:
        if isinstance(value, dict):
            dropped = (*LEFT_OUT, *ARITHMETIC, *WORDS)
            return {key: chosen(each) for key, each in value.items() if key not in dropped}
        return list(map(chosen, value)) if isinstance(value, list) else value

    return mapped(chosen(value), _rounded)


def _words(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key in sorted(value):
            if key in WORDS and isinstance(value[key], str):
                yield f"{key}: {value[key]}"
            elif key not in LEFT_OUT:
                yield from _words(value[key])
    elif isinstance(value, list):
        for each in value:
            yield from _words(each)


def recorded_of(name: str) -> str:
    return f"simulations/{name}.json"


def left_whole(found: Simulated, directory: Path, name: str, write: Callable[[Any], bytes]) -> None:
    """Leave all that the digests see of a simulation in a directory, for a comparison line by line."""
    events = [{**event, **_plain(event)} for event in found.events]
    (directory / f"{name}.jsonl").write_text("".join(json.dumps(event, sort_keys=True) + "\n" for event in events))
    (directory / f"{name}.json").write_bytes(write({**found.report, **_plain(found.report)}))
