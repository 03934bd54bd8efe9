"""The laboratory's tables, from the record alone: each with a sentence that says what its numbers come to.

Sentences are computed, never written down beforehand, and nothing is said where a figure is missing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import mean

from research.laboratory.experiments.choices import is_other_method, lacking, said_of_unequal
from research.laboratory.output.ablation_tables import changes, ends
from research.laboratory.output.headline import headline, held_out_headline
from research.laboratory.output.paper_tables import async_time, by_crowd, by_speeds, correlations, noloco_paper
from research.laboratory.output.table import (
    NOTHING,
    SEEDS,
    Table,
    apart,
    at_rounds,
    compared,
    gap,
    is_enough,
    merged,
    ratio,
    seeds,
    shown,
    signed,
    single,
    spread,
)
from research.laboratory.running.results import Figure, Measured, figure


def overview(data: Measured) -> Table:
    """Every recipe of the grid on one line."""
    rows = []
    known: dict[str, Figure] = {}
    for name in data.names:
        losses = data.figure(name, merged)
        if is_enough(losses) and math.isfinite(losses.mean):
            known[name] = losses
        rows.append(
            (
                name,
                data.about(name),
                data.rate(name),
                shown(losses, 4, "diverged"),
                shown(data.figure(name, single), 4, "diverged"),
                shown(data.figure(name, spread), 2),
                shown(data.figure(name, lambda result: result.bytes_per_step / 1e3), 0),
                shown(data.figure(name, lambda result: 100.0 * result.busy), 0),
                shown(data.figure(name, lambda result: result.virtual_s), 0),
            )
        )
    header = (
        "recipe",
        "what it is",
        "rate",
        "loss, merged",
        "loss, single",
        "spread x 1000",
        "kB / step",
        "busy %",
        "virtual s",
    )
    says = ""
    if known:
        low, high = min(known, key=lambda name: known[name].mean), max(known, key=lambda name: known[name].mean)
        says = (
            f"Of those with {SEEDS} seeds, from {known[low].text(3)} nats a token ({low}) to {known[high].text(3)} "
            f"({high})."
        )
    return Table("Every recipe", says, header, tuple(rows), data.take_missing(), 3)


def by_tokens(data: Measured) -> Table:
    """Single replicas beside the merged model, along the run."""
    names = ("noloco", "ours")
    curves = {name: [result.curve for result in data.results(name)] for name in names}
    length = min((len(curve) for one in curves.values() for curve in one), default=0)
    rows = []
    for place in range(length):
        points = {name: [curve[place] for curve in curves[name]] for name in names}
        share = mean(point.share for every in points.values() for point in every)
        row = [f"{100.0 * share:.1f}"]
        for every in points.values():
            row.append(shown(figure(point.merged for point in every), 3, "diverged"))
            row.append(shown(figure(point.single for point in every), 3, "diverged"))
        rows.append(tuple(row))
    says = []
    for name in names:
        above = [
            figure(curve[place].single - curve[place].merged for curve in curves[name])
            for place in (length // 2 - 1, length - 1)
            if place >= 0
        ]
        if len(above) == 2 and is_enough(above[0]) and is_enough(above[1]):
            says.append(
                f"Of {name}, single replicas are {signed(above[0])} nats from the merged model at half of the tokens, "
                f"and {signed(above[1])} at the end, after a last round ({seeds(above[1])})."
            )
    header = ("tokens, % of the budget", *(f"{name}, {what}" for name in names for what in ("merged", "single")))
    title = "Single replicas beside the merged model, by tokens"
    return Table(title, " ".join(says), header, tuple(rows), data.take_missing(), 0)


def foot(data: Measured) -> str:
    """Return a warning where results of more than one state of the code stand side by side, else nothing."""
    codes = data.codes()
    if len(codes) < 2:
        return ""
    counted = ", ".join(f"{count} of {code}" for code, count in codes.most_common())
    return f"**Results of {len(codes)} states of the code stand side by side**: {counted}."


def variants(data: Measured) -> Table:
    """Asynchronous gossip with one thing changed."""
    changed = (
        name for name in data.names if name.startswith("ours_") and "_of_" not in name and name not in data.changes
    )
    names = ("ours", *changed, "noloco_paced", "diloco_paced", "diloco_hb_paced", "local_sgd_paced")
    table = family(data, "Asynchronous gossip with one thing changed, and others at its rounds", "ours", names)
    says = " ".join(part for part in (table.says, said_of_unequal(data, names)) if part)
    return table._replace(says=says)


def ablations(data: Measured) -> Table:
    """What NoLoCo's reviewers asked for."""
    names = (
        "noloco",
        "noloco_gamma_0",
        "noloco_groups_4",
        "noloco_groups_8",
        "noloco_every_25",
        "noloco_every_100",
        "diloco_hb_every_25",
        "diloco_hb",
        "diloco_hb_every_100",
        "noloco_random_routes",
        "noloco_fixed_routes",
        "independent_random_routes",
        "independent_fixed_routes",
        "independent",
        "local_sgd",
    )
    table = family(data, "NoLoCo: what its reviewers asked for", "noloco", names)
    says = " ".join((table.says, *_said_of_ablations(data)))
    return table._replace(says=says, missing=tuple(dict.fromkeys((*table.missing, *data.take_missing()))))


def _said_of_ablations(data: Measured) -> Iterator[str]:
    for every, other in (("noloco_every_25", "diloco_hb_every_25"), ("noloco", "diloco_hb"), ("noloco_every_100", "")):
        other = other or "diloco_hb_every_100"
        found = data.against(every, other, gap)
        if is_enough(found):
            yield f"{every} is {compared(found)} {other} ({apart(found)})."
    routed, straight = "independent_random_routes", "independent_fixed_routes"
    spreads = data.against(routed, straight, lambda mine, other: mine.spread / other.spread - 1.0)
    worth = data.against(routed, straight, lambda mine, other: ratio(mine, other) - 1.0)
    if is_enough(spreads) and is_enough(worth):
        yield (
            f"Without averaging, random routes change the spread by a share of {signed(spreads)} and the perplexity of "
            f"single replicas by {signed(worth)} ({seeds(worth)}; the paper: about -0.15 to -0.10, and up to +0.04)."
        )


def family(data: Measured, title: str, base: str, names: Sequence[str]) -> Table:
    """Return a table of recipes, each beside the one that is their base."""
    rows: list[tuple[str, ...]] = []
    beside: dict[str, Figure] = {}
    for name in names:
        found = data.against(name, base, gap)
        # What is the base itself under another name is not counted, nor who had fewer choices than gossip against it.
        is_unequal = base == "ours" and is_other_method(data, name) and lacking(data, name)
        if found is not None and math.isfinite(found.mean) and not data.is_same(name, base) and not is_unequal:
            beside[name] = found
        rows.append(
            (
                name,
                data.about(name),
                data.rate(name),
                shown(data.figure(name, merged), 4, "diverged"),
                NOTHING if name == base else "the same" if data.is_same(name, base) else shown(found),
                shown(data.figure(name, single), 4, "diverged"),
                shown(data.figure(name, spread), 2),
                shown(data.figure(name, lambda result: result.bytes_per_step / 1e3), 0),
                shown(data.figure(name, lambda result: result.rounds), 0),
            )
        )
    header = (
        "recipe",
        "what it is",
        "rate",
        "loss, merged",
        f"against {base}",
        "loss, single",
        "spread x 1000",
        "kB / step",
        "rounds",
    )
    told = [
        f"{name} is {compared(found)} {base} ({apart(found)}{at_rounds(data, name, base)})"
        for name, found in beside.items()
        if is_enough(found)
    ]
    says = f"{'; '.join(told)}." if told else ""
    if len(told) < len(beside):
        says += f" On fewer than {SEEDS} seeds, and so undecided: {len(beside) - len(told)} of {len(beside)}."
    return Table(title, says.strip(), header, tuple(rows), data.take_missing(), 3)


def tuning(data: Measured) -> Table:
    """The loss at each rate of every family: what each had of the same budget of tuning."""
    rates = sorted({rate for family in data.families() for rate in data.tuned(family)})
    rows, edges, complete = [], [], 0
    for family in data.families():
        found = data.tuned(family)
        losses = {rate: data.judged(family, result) for rate, result in found.items() if result is not None}
        finite = {rate: loss for rate, loss in losses.items() if math.isfinite(loss)}
        best = min(finite, key=lambda rate: finite[rate]) if finite and len(losses) == len(found) else None
        if len(losses) == len(found):
            complete += 1
            if best in (min(found), max(found)):
                edges.append(family)
        cells = (_at_rate(losses.get(rate), rate == best) for rate in rates)
        by = ", by single replicas" if data.is_tuned_by_single(family) else ""
        rows.append((family, data.about(family) + by, *cells))
    says = f"{complete} of {len(rows)} families are tuned; the best rate is bold."
    if complete:
        inside = f"lies inside the range for {complete - len(edges)} of them"
        says += f" It {inside}" + (f", and at its edge for {', '.join(edges)}." if edges else ".")
    header = ("family", "tuned as", *(f"{rate:g}" for rate in rates))
    missing = [family for family in data.families() if None in data.tuned(family).values()]
    title = "Tuning: loss of the merged model on seed 0, by learning rate"
    return Table(title, says, header, tuple(rows), missing, 2)


def _at_rate(loss: float | None, is_best: bool) -> str:
    if loss is None:
        return NOTHING
    text = f"{loss:.4f}" if math.isfinite(loss) else "diverged"
    return f"**{text}**" if is_best else text


def every_table(data: Measured) -> list[Table]:
    """Return the tables that the record of this grid can fill."""
    if "noloco_every_25" not in data.names:
        return [headline(data), by_tokens(data), overview(data)]
    makers: tuple[Callable[[Measured], Table], ...] = (
        headline,
        held_out_headline,
        variants,
        changes,
        ends,
        by_tokens,
        noloco_paper,
        ablations,
        by_speeds,
        by_crowd,
        async_time,
        correlations,
        tuning,
        overview,
    )
    return [make(data) for make in makers]
