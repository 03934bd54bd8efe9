"""The papers' tables, measured here, beside the papers' own numbers.

Models, text and batches differ, so ratios are compared: perplexity over that of data parallel training (NoLoCo), over
that of synchronous DiLoCo (Asynchronous Local-SGD).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

from research.laboratory.experiments.choices import said_of_unequal
from research.laboratory.experiments.published_numbers import BY_CROWD, BY_SPEEDS, PEARSON, TABLE_2
from research.laboratory.experiments.sizes import CROWDS, SPEEDS, Size
from research.laboratory.output.table import (
    NO_WORSE,
    NOTHING,
    Table,
    apart,
    compared,
    gap,
    is_enough,
    judged,
    merged,
    merged_ratio,
    ratio,
    shown,
    single_gap,
    spread,
    time_to,
    worst_end,
)
from research.laboratory.running.results import Measured, correlation, perplexity, seconds_to

HERE = (
    ("8 x 1, rounds as in the paper (100, 50)", "parallel", "diloco_hb_every_100", "noloco"),
    ("8 x 1, both every 25", "parallel", "diloco_hb_every_25", "noloco_every_25"),
    ("8 x 1, both every 50", "parallel", "diloco_hb", "noloco"),
    ("8 x 1, both every 100", "parallel", "diloco_hb_every_100", "noloco_every_100"),
    ("8 x 2, random routes, every 50", "parallel", "", "noloco_random_routes"),
    ("4 x 1, every 50, DiLoCo with Nesterov 0.9", "parallel_of_4", "diloco_of_4", "noloco_of_4"),
    ("8 x 1, every 50, DiLoCo with Nesterov 0.9", "parallel", "diloco", "noloco"),
    ("16 x 1, every 50, DiLoCo with Nesterov 0.9", "parallel_of_16", "diloco_of_16", "noloco_of_16"),
)
"""What is measured here: replicas x stages, and the recipes of data parallel training, DiLoCo and NoLoCo."""
EQUAL_ROUNDS = HERE[1:4]
SERVERS = ("fedbuff", "delayed_alone", "dynamic_alone")


def noloco_paper(data: Measured) -> Table:
    """NoLoCo's table 2: perplexity of single replicas, over data parallel training's."""
    rows: list[tuple[str, ...]] = [
        (
            f"paper, {row.text}, {row.model}, {row.replicas} x {row.stages}",
            f"{row.parallel:.1f}",
            f"{row.diloco:.1f}",
            f"{row.noloco:.1f}",
            f"{row.diloco / row.parallel:.3f}",
            f"{row.noloco / row.parallel:.3f}",
            NOTHING,
        )
        for row in TABLE_2
    ]
    for label, parallel, diloco, noloco in HERE:
        rows.append(
            (
                f"here, {label}",
                *(
                    shown(data.figure(name, lambda run: perplexity(run.single)), 3, "diverged") if name else NOTHING
                    for name in (parallel, diloco, noloco)
                ),
                *(shown(data.against(name, parallel, ratio)) if name else NOTHING for name in (diloco, noloco)),
                shown(data.against(noloco, parallel, merged_ratio)),
            )
        )
    header = (
        "replicas x stages",
        "data parallel",
        "DiLoCo",
        "NoLoCo",
        "DiLoCo / parallel",
        "NoLoCo / parallel",
        "NoLoCo merged / parallel",
    )
    says = " ".join(_said_of_noloco(data))
    return Table("NoLoCo: perplexity, in the form of its table 2", says, header, tuple(rows), data.take_missing())


def _said_of_noloco(data: Measured) -> Iterator[str]:
    lower = sum(row.noloco < row.diloco for row in TABLE_2)
    ratios = [row.noloco / row.parallel for row in TABLE_2]
    yield (
        f"Of single replicas, as in the paper; there NoLoCo is below DiLoCo in {lower} of {len(TABLE_2)} rows, at "
        f"{min(ratios):.2f} to {max(ratios):.2f} of data parallel's perplexity."
    )
    _, parallel, diloco, noloco = HERE[0]
    beside, over = data.against(noloco, diloco, single_gap), data.against(noloco, parallel, ratio)
    if is_enough(beside) and over is not None:
        yield (
            f"Here, with the paper's rounds, it is at {over.text(2)} and {compared(beside)} DiLoCo ({apart(beside)}): "
            f"'NoLoCo lower' {judged(beside, 'better than')}."
        )
    found = {label: data.against(noloco, diloco, single_gap) for label, _, diloco, noloco in EQUAL_ROUNDS}
    equal = {label: value for label, value in found.items() if is_enough(value)}
    if equal:
        words = "; ".join(
            f"{label.partition('both ')[2]}: {apart(value)}, 'level' {judged(value, 'level with')}"
            for label, value in equal.items()
        )
        yield f"At equal rounds NoLoCo against DiLoCo is, {words}."


def by_speeds(data: Measured) -> Table:
    """Asynchronous Local-SGD's table of unequal speeds: perplexity of the merged model over synchronous DiLoCo's."""
    rows: list[tuple[str, ...]] = []
    labels = {
        "parallel": "data parallel",
        "diloco": "synchronous DiLoCo",
        "async_naive": "asynchronous, naive",
        "async_delayed": "delayed Nesterov + dynamic steps",
    }
    for name, label in labels.items():
        printed = (f"{value / base:.3f}" for value, base in zip(BY_SPEEDS[name], BY_SPEEDS["diloco"], strict=True))
        rows.append((label, "paper", *printed))
        if name in ("parallel", "diloco"):
            # In step, so the losses are the same at any speeds.
            here = shown(data.against(f"{name}_of_4", "diloco_of_4", merged_ratio))
            rows.append((label, "here", here, *(["same"] * (len(SPEEDS) - 1))))
            continue
        names = (name if speeds == "very" else f"{name}_{speeds}" for speeds in SPEEDS)
        rows.append((label, "here", *(shown(data.against(one, "diloco_of_4", merged_ratio)) for one in names)))
    for name in SERVERS:
        here = shown(data.against(name, "diloco_of_4", merged_ratio))
        rows.append((data.about(name), "here", *([NOTHING] * (len(SPEEDS) - 1)), here))
    header = ("4 replicas, a round every 50", "", *SPEEDS)
    title = "Asynchronous Local-SGD: perplexity over synchronous DiLoCo's, by inequality of speeds"
    return Table(title, " ".join(_said_of_speeds(data)), header, tuple(rows), data.take_missing(), 2)


def _said_of_speeds(data: Measured) -> Iterator[str]:
    naive, delayed = (data.against(name, "diloco_of_4", gap) for name in ("async_naive", "async_delayed"))
    if is_enough(naive):
        yield (
            f"On very unequal machines naive asynchronous is {compared(naive)} synchronous DiLoCo ({apart(naive)}): "
            f"'worse' {judged(naive, 'worse than')}."
        )
    if is_enough(delayed):
        yield (
            f"Delayed Nesterov with dynamic steps is {compared(delayed)} it ({apart(delayed)}): 'level or better' "
            f"{judged(delayed, *NO_WORSE)}."
        )
    ends = {name: data.figure(name, merged) for name in ("async_naive", *SERVERS, "async_delayed")}
    known = {name: value.mean for name, value in ends.items() if is_enough(value) and math.isfinite(value.mean)}
    steps = (
        f"{after} is {compared(found)} {before} ({apart(found)})"
        for before, after in pairwise(sorted(known, key=lambda name: known[name]))
        if (found := data.against(after, before, gap)) is not None
    )
    if words := "; ".join(steps):
        yield f"On them, by their means, each beside the one before it: {words}."
    yield from _said_of_rates(data, "diloco_of_4", "parallel_of_4")


def _said_of_rates(data: Measured, *names: str) -> Iterator[str]:
    rates = {name: data.rate(name) for name in names}
    if NOTHING not in rates.values():
        words = ", ".join(f"{name} {rate}" for name, rate in rates.items())
        yield f"Not tuned for 4 replicas, but at the rates that were best of {Size().replicas}: {words}."


def by_crowd(data: Measured) -> Table:
    """Both papers' methods and ours, by the number of replicas."""
    rows: list[tuple[str, ...]] = []
    tuned_at = {"async_delayed": 4}
    names = ("parallel", "diloco", "noloco", "async_delayed", "ours")
    of = {
        name: [name if crowd == tuned_at.get(name, 8) else f"{name}_of_{crowd}" for crowd in CROWDS] for name in names
    }
    for name in names:
        if name in BY_CROWD:
            printed = (f"{value / base:.3f}" for value, base in zip(BY_CROWD[name], BY_CROWD["diloco"], strict=True))
            rows.append((name, "paper", *printed))
        pairs = list(zip(of[name], of["diloco"], strict=True))
        rows.append((name, "here", *(shown(data.against(mine, base, merged_ratio)) for mine, base in pairs)))
        rows.append((name, "here, nats", *(shown(data.figure(mine, merged), 4, "diverged") for mine in of[name])))
    says = [said_of_unequal(data, names[1:])]
    rest = NOTHING not in (data.rate(of[name][number]) for name in names for number in range(len(CROWDS)))
    if rest:
        words = ", ".join(f"{name} at {count}" for name, count in tuned_at.items())
        says.append(f"Each is tuned once, at {Size().replicas} replicas ({words}), and keeps its rate at the others.")
    title = "Perplexity of the merged model over synchronous DiLoCo's, by number of replicas"
    return Table(title, " ".join(says).strip(), ("method", "", *map(str, CROWDS)), tuple(rows), data.take_missing(), 2)


def async_time(data: Measured) -> Table:
    """The same methods in virtual time, on the most unequal machines: the paper shows curves only."""
    names = ("diloco_of_4", "parallel_of_4", "async_naive", *SERVERS, "async_delayed", "ours_of_4")
    level = worst_end(data, names)
    rows = [
        (
            name,
            shown(data.figure(name, merged), 4, "diverged"),
            shown(data.figure(name, lambda run: run.virtual_s), 0),
            shown(data.figure(name, lambda run: seconds_to(run, level)), 0, "never"),
            shown(data.figure(name, lambda run: 100.0 * run.busy), 0),
            shown(data.figure(name, lambda run: run.bytes_per_step / 1e3), 0),
        )
        for name in names
    ]
    says = ""
    taken = data.against("async_delayed", "diloco_of_4", lambda run, other: run.virtual_s / other.virtual_s)
    if is_enough(taken):
        says = (
            f"For the same tokens delayed Nesterov with dynamic steps takes {taken.text(2)} of synchronous DiLoCo's "
            "time. DiLoCo has no dynamic steps here: the slowest machine takes as many as the fastest."
        )
    words = (says, said_of_unequal(data, names), *_said_of_rates(data, "diloco_of_4", "parallel_of_4", "ours_of_4"))
    says = " ".join(part for part in words if part)
    header = (
        "4 replicas, very unequal",
        "loss, merged",
        "virtual s in all",
        time_to(level),
        "busy %",
        "kB / replica step",
    )
    title = "Asynchronous Local-SGD in virtual time"
    return Table(title, says, header, tuple(rows), data.take_missing())


def correlations(data: Measured) -> Table:
    """How the spread among replicas follows the learning rate."""
    rows: list[tuple[str, ...]] = []
    inside: list[str] = []
    every: list[float] = []
    for name in data.families():
        if name == "parallel":
            continue
        found = data.figure(name, correlation)
        if is_enough(found) and math.isfinite(found.mean):
            every.append(found.mean)
            if found.mean >= PEARSON[0]:
                inside.append(name)
        rows.append((name, data.about(name), data.rate(name), shown(found, 2), shown(data.figure(name, spread), 2)))
    says = ""
    if every:
        says = (
            f"From {min(every):.2f} to {max(every):.2f} (the paper, for NoLoCo: {PEARSON[0]} to {PEARSON[1]}); as high "
            f"as in the paper for {', '.join(inside) or 'none'}."
        )
    header = ("family", "what it is", "rate", "Pearson", "spread x 1000 at the end")
    title = "Spread among replicas against the learning rate, after the warm-up"
    return Table(title, says, header, tuple(rows), data.take_missing(), 3)
