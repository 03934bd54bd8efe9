"""The headline's table: asynchronous gossip beside what it wants to beat.

It is held against the best of all synchronous rounds of all with all, and against the best among those that send no
more than it does: the first says how good the model is, the second what it is for its bytes. Which is the best is asked
over the seeds that all of them have, and the difference is taken over the seeds that both have.
"""

from __future__ import annotations

from collections.abc import Iterator

from laboratory.cell import Result
from laboratory.measured import Figure, Measured, figure, seconds_to
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


def headline(data: Measured) -> Table:
    """Asynchronous gossip beside what it wants to beat, and how much of NoLoCo's gap each closes."""
    rivals = [name for name in RIVALS if name in data.names]
    lean = [name for name in rivals if _sends_no_more(data, name)]
    best, best_lean = best_of(data, rivals), best_of(data, lean)
    marks = {best_lean: "best of no more bytes", best: "best in step"}
    chosen = [name for name in (best, best_lean) if name is not None]
    labels = {name: name for name in ("parallel", "noloco", *chosen, "diloco", "diloco_hb", "local_sgd", "ours")}
    if "ours_none" in data.names:
        labels["ours_none"] = "ours, equal machines"
    level = worst_end(data, labels)
    rows = []
    for name, label in labels.items():
        rows.append(
            (
                f"{label} ({marks[name]})" if name in marks else label,
                shown(data.figure(name, merged), 4, "diverged"),
                shown(data.against(name, "parallel", gap)),
                shown(closed(data, name), 2),
                shown(data.figure(name, lambda result: result.bytes_per_step / 1e3), 0),
                shown(data.figure(name, lambda result: 100.0 * result.busy), 1),
                shown(data.figure(name, lambda result: 100.0 * result.fast_busy), 1),
                shown(data.figure(name, lambda result: seconds_to(result, level)), 0, "never"),
            )
        )
    header = (
        "method",
        "loss, merged",
        "gap to data parallel",
        "share of NoLoCo's gap closed",
        "kB / replica step",
        "busy %",
        "fastest busy %",
        time_to(level),
    )
    says = " ".join((*_devices(data), *_rivals(data, best, best_lean), *_distances(data)))
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
    return mine.bytes_per_step / other.bytes_per_step


def _sends_no_more(data: Measured, rival: str) -> bool:
    sent = data.against(rival, "ours", _bytes_ratio)
    return sent is not None and sent.mean <= 1.0


def _devices(data: Measured) -> Iterator[str]:
    busy = data.figure("ours", lambda result: result.busy)
    if busy is not None:
        yield f"Devices are busy {busy.mean:.1%} of the time: the goal of 95 % {verdict(busy.mean >= 0.95)}."


def _rivals(data: Measured, best: str | None, best_lean: str | None) -> Iterator[str]:
    if best is None or (sent := data.against("ours", best, _bytes_ratio)) is None:
        return
    yield _beside(data, best, "At equal tokens the merged model is {} the best of all synchronous rivals")
    yield f"It sends {sent.mean:.2f} times the bytes: 'no more' {verdict(sent.mean <= 1.0)}."
    if best_lean is None:
        yield "None of the synchronous rivals sends as little."
    elif best_lean == best:
        yield "That rival is the best of those that send no more than asynchronous gossip, too."
    else:
        yield _beside(data, best_lean, "It is {} the best of the rivals that send no more than it")


def _beside(data: Measured, rival: str, text: str) -> str:
    found = data.against("ours", rival, gap)
    assert found is not None  # whoever asks knows that they have a seed in common
    seeds = f"{found.seeds} seed{'s' if found.seeds > 1 else ''}"
    said = text.format(compared(found))
    return f"{said} ({rival}), by {signed(found)} nats ({seeds}): 'no worse' {judged(found, *NO_WORSE)}."


def _distances(data: Measured) -> Iterator[str]:
    share = closed(data, "ours")
    if share is not None:
        half = verdict(share.mean >= 0.5)
        yield f"It closes {share.mean:.0%} of NoLoCo's gap to data parallel: 'at least half' {half}."
    far = data.against("ours", "parallel", lambda mine, other: mine.merged / other.merged - 1.0)
    if far is not None:
        yield f"Its loss is {far.mean:+.1%} from data parallel's; within 1 % {verdict(far.mean <= 0.01)}."
