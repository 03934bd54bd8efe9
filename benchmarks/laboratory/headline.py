"""The headline's table: asynchronous gossip beside what it wants to beat.

It is held against three: the best synchronous DiLoCo, whatever its momentum and its rounds; the best synchronous mean
of any kind, plain averaging included; and the best of those that send no more than it does. The first is what the
papers compare with, the second says how good the model is, the third what it is for its bytes. Which is the best is
asked over the seeds that all of them have, and the difference is taken over the seeds that both have.

Bytes include a last merge: the merged model of gossip is the mean of replicas that differ, and somebody has to be sent
their weights; a synchronous mean leaves nothing to merge.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from laboratory.cell import Result
from laboratory.measured import Figure, Measured, bytes_with_merge, figure, seconds_to
from laboratory.recipes import RIVALS
from laboratory.tabulating import (
    NO_WORSE,
    Table,
    best_of,
    compared,
    gap,
    judged,
    merged,
    shown,
    signed,
    time_to,
    verdict,
    worst_end,
)

OTHERWISE = {"ours_beside": "ours, coding charged beside", "ours_none": "ours, equal machines"}
"""Rows that are asynchronous gossip under another condition."""


class Best(NamedTuple):
    """The best rival of each kind, None where no run of it is there."""

    diloco: str | None
    mean: str | None
    lean: str | None

    def mark(self, name: str) -> str:
        """Return a recipe's name, and of what it is the best."""
        kinds = {"best DiLoCo": self.diloco, "best in step": self.mean, "best of no more bytes": self.lean}
        marks = ", ".join(kind for kind, best in kinds.items() if best == name)
        return f"{name} ({marks})" if marks else name


def headline(data: Measured) -> Table:
    """Asynchronous gossip beside what it wants to beat, and how much of NoLoCo's gap each closes."""
    rivals = [name for name in RIVALS if name in data.names]
    best = Best(
        diloco=best_of(data, [name for name in rivals if name.startswith("diloco")]),
        mean=best_of(data, rivals),
        lean=best_of(data, [name for name in rivals if _sends_no_more(data, name)]),
    )
    chosen = [name for name in best if name is not None]
    names = dict.fromkeys(("parallel", "noloco", *chosen, "diloco", "diloco_hb", "local_sgd", "ours"))
    names |= dict.fromkeys(name for name in OTHERWISE if name in data.names)
    level = worst_end(data, names)
    rows = [
        (
            OTHERWISE.get(name) or best.mark(name),
            shown(data.figure(name, merged), 4, "diverged"),
            shown(data.against(name, "parallel", gap)),
            shown(closed(data, name), 2),
            shown(data.figure(name, lambda result: result.bytes_per_step / 1e3), 0),
            shown(data.figure(name, lambda result: bytes_with_merge(result) / 1e3), 0),
            shown(data.figure(name, lambda result: 100.0 * result.busy), 1),
            shown(data.figure(name, lambda result: 100.0 * result.fast_busy), 1),
            shown(data.figure(name, lambda result: seconds_to(result, level)), 0, "never"),
        )
        for name in names
    ]
    header = (
        "method",
        "loss, merged",
        "gap to data parallel",
        "share of NoLoCo's gap closed",
        "kB / replica step",
        "with a last merge",
        "busy %",
        "fastest busy %",
        time_to(level),
    )
    says = " ".join((*_devices(data), *_rivals(data, best), *_distances(data)))
    return Table("Asynchronous gossip, on very unequal machines", says, header, tuple(rows), data.take_missing())


def closed(data: Measured, name: str) -> Figure | None:
    """Return the share of the gap between NoLoCo and data parallel that a recipe closes, over the seeds with a gap."""
    best = {result.cell.seed: result.merged for result in data.results("parallel")}
    now = {result.cell.seed: result.merged for result in data.results("noloco")}
    gaps = {seed: now[seed] - best[seed] for seed in best if seed in now and now[seed] > best[seed]}
    return figure(
        (now[seed] - result.merged) / gaps[seed] for result in data.results(name) if (seed := result.cell.seed) in gaps
    )


def _bytes_ratio(mine: Result, other: Result) -> float:
    return bytes_with_merge(mine) / bytes_with_merge(other)


def _sends_no_more(data: Measured, rival: str) -> bool:
    sent = data.against(rival, "ours", _bytes_ratio)
    return sent is not None and sent.mean <= 1.0


def _devices(data: Measured) -> Iterator[str]:
    busy = data.figure("ours", lambda result: result.busy)
    if busy is not None:
        yield f"Devices are busy {busy.mean:.1%} of the time: the goal of 95 % {verdict(busy.mean >= 0.95)}."


def _rivals(data: Measured, best: Best) -> Iterator[str]:
    """Yield how it does beside each of the three; of two that are the same rival only the first is told."""
    if best.diloco is not None and data.against("ours", best.diloco, gap) is not None:
        yield _beside(data, best.diloco, "At equal tokens the merged model is {} the best synchronous DiLoCo")
    if best.mean is None or data.against("ours", best.mean, gap) is None:
        return
    if best.mean == best.diloco:
        yield "That one is the best synchronous mean of any kind, too."
    else:
        yield _beside(data, best.mean, "It is {} the best synchronous mean of any kind")
    if best.lean is None:
        yield "None of them sends as little."
    elif best.lean in (best.mean, best.diloco):
        yield f"Of those that send no more than it {best.lean} is the best."
    else:
        yield _beside(data, best.lean, "It is {} the best of those that send no more than it")


def _beside(data: Measured, rival: str, text: str) -> str:
    found, sent = data.against("ours", rival, gap), data.against("ours", rival, _bytes_ratio)
    assert found is not None  # whoever asks knows that they have a seed in common
    assert sent is not None
    seeds = f"{found.seeds} seed{'s' if found.seeds > 1 else ''}"
    said = text.format(compared(found))
    return (
        f"{said} ({rival}), by {signed(found)} nats ({seeds}): 'no worse' {judged(found, *NO_WORSE)}; it sends "
        f"{sent.mean:.2f} times the bytes, a last merge included: 'no more' {verdict(sent.mean <= 1.0)}."
    )


def _distances(data: Measured) -> Iterator[str]:
    share = closed(data, "ours")
    if share is not None:
        half = verdict(share.mean >= 0.5)
        yield f"It closes {share.mean:.0%} of NoLoCo's gap to data parallel: 'at least half' {half}."
    far = data.against("ours", "parallel", lambda mine, other: mine.merged / other.merged - 1.0)
    if far is not None:
        yield f"Its loss is {far.mean:+.1%} from data parallel's; within 1 % {verdict(far.mean <= 0.01)}."
