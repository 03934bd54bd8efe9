"""The headline's table: asynchronous gossip beside synchronous means, and between NoLoCo and data parallel training.

It is held against the best synchronous mean of those that were given all of its choices (`choices`), on three seeds at
least; where the record has none, that is what is said. Means with fewer choices stand in the table, with what they
lack. NoLoCo as published and data parallel training are the ends of a scale, not rivals.

Bytes include a last merge: the merged model of gossip is the mean of replicas that differ, and somebody has to be sent
their weights; a synchronous mean leaves nothing to merge.
"""

from __future__ import annotations

from collections.abc import Iterator

from research.laboratory.experiments.cell import Corpus, Result
from research.laboratory.experiments.choices import lacking
from research.laboratory.experiments.full_scale import HELD_OUT
from research.laboratory.experiments.recipes import RIVALS
from research.laboratory.output.table import (
    NO_WORSE,
    NOTHING,
    SEEDS,
    Table,
    apart,
    best_of,
    compared,
    gap,
    is_enough,
    judged,
    merged,
    merged_ratio,
    shown,
    time_to,
    worst_end,
)
from research.laboratory.running.results import Figure, Measured, bytes_with_merge, figure, perplexity, seconds_to

CONDITIONS = {
    "ours": "ours",
    "gossip_by_steps": "ours, means weighed by steps",
    "gossip_by_steps_fifth": "ours, means weighed by steps, rounds a fifth as often",
    "ours_beside": "ours, coding charged beside",
    "ours_none": "ours, equal machines",
    "gossip_by_steps_none": "ours, means weighed by steps, equal machines",
    "gossip_by_steps_none_equal_bytes": "ours, means weighed by steps, equal machines, as many bytes",
    "gossip_by_steps_as_long": "ours, means weighed by steps, as many seconds as the mean takes",
}
"""Rows that are asynchronous gossip, under this condition or that."""
BESIDE = (
    *("mean_equal_fifth", "mean_equal_none", "mean_equal_none_equal_bytes", "pairs_equal"),
    *("local_sgd_paced", "diloco_hb", "diloco", "local_sgd"),
)
"""Synchronous means that the table always shows, and pairs in step."""
EQUALS = (
    *("mean_equal", "diloco_equal", "pairs_equal", "mean_equal_fifth", "mean_equal_none"),
    "mean_equal_none_equal_bytes",
)
"""Those of them whose place on the scale is told."""
HEADLINES = {
    "library": ("Asynchronous gossip, on very unequal machines", ""),
    "torch": ("The same on a text on which nothing was chosen", HELD_OUT),
}
"""Titles of the tables, and what names of recipes on their text begin with."""


def headline(data: Measured, text: Corpus = "library") -> Table:
    """Asynchronous gossip beside synchronous means, and how much of NoLoCo's gap each closes, on a text."""
    title, on = HEADLINES[text]
    equals = [name for name in RIVALS if on + name in data.names and not lacking(data, on + name)]
    best = best_of(data, [on + name for name in equals if is_enough(data.figure(on + name, merged))])
    every = dict.fromkeys(("parallel", "noloco", *equals, *BESIDE, *CONDITIONS))
    names = {on + name: CONDITIONS.get(name, name) for name in every if on + name in data.names}
    level = worst_end(data, names)
    ends = (f"{on}parallel", f"{on}noloco")
    rows = [
        (
            f"{label} (best equal)" if name == best else label,
            NOTHING if label == "parallel" else ", ".join(lacking(data, name)) or "nothing",
            shown(data.figure(name, merged), 4, "diverged"),
            shown(data.figure(name, lambda result: perplexity(result.merged)), 3, "diverged"),
            shown(data.against(name, ends[0], gap)),
            shown(data.against(name, ends[0], merged_ratio)),
            shown(closed(data, name, ends), 2),
            shown(data.figure(name, lambda result: result.bytes_per_step / 1e3), 0),
            shown(data.figure(name, lambda result: bytes_with_merge(result) / 1e3), 0),
            shown(data.figure(name, lambda result: 100.0 * result.busy), 1),
            shown(data.figure(name, lambda result: 100.0 * result.fast_busy), 1),
            shown(data.figure(name, lambda result: seconds_to(result, level)), 0, "never"),
        )
        for name, label in names.items()
    ]
    header = (
        "method",
        "lacks, of what ours has",
        "loss, merged",
        "perplexity",
        "gap to data parallel",
        "perplexity over its",
        "share of NoLoCo's gap closed",
        "kB / replica step",
        "with a last merge",
        "busy %",
        "fastest busy %",
        time_to(level),
    )
    says = " ".join((*_devices(data, on), *_beside(data, on, best), *_pairs(data, on), *_on_the_scale(data, on)))
    return Table(title, says, header, tuple(rows), data.take_missing(), 2)


def held_out_headline(data: Measured) -> Table:
    """The headline of the text on which nothing was chosen."""
    return headline(data, "torch")


def closed(data: Measured, name: str, ends: tuple[str, str] = ("parallel", "noloco")) -> Figure | None:
    """Return the share of the gap between NoLoCo and data parallel that a recipe closes, over the seeds with a gap."""
    best, now = ({result.cell.seed: result.merged for result in data.results(end)} for end in ends)
    gaps = {seed: now[seed] - best[seed] for seed in best if seed in now and now[seed] > best[seed]}
    return figure(
        (now[seed] - result.merged) / gaps[seed] for result in data.results(name) if (seed := result.cell.seed) in gaps
    )


def _bytes_ratio(mine: Result, other: Result) -> float:
    return bytes_with_merge(mine) / bytes_with_merge(other)


def _devices(data: Measured, on: str) -> Iterator[str]:
    conditions = {"ours": "where coding is charged no time", "ours_beside": "where it is charged"}
    found = {
        words: data.figure(on + name, lambda result: 100.0 * result.busy)
        for name, words in conditions.items()
        if on + name in data.names
    }
    busy = [f"{value.text(1)} % {words}" for words, value in found.items() if is_enough(value)]
    if busy:
        yield f"Of the time, devices take inner steps for {', '.join(busy)}."


def _beside(data: Measured, on: str, best: str | None) -> Iterator[str]:
    """Yield how gossip does beside the best synchronous mean that had its choices, or that there is none."""
    for name in ("ours", "gossip_by_steps"):
        if data.figure(on + name, merged) is None:
            continue
        found = None if best is None else data.against(on + name, best, gap)
        sent = None if best is None else data.against(on + name, best, _bytes_ratio)
        if is_enough(found) and sent is not None:
            yield (
                f"At equal tokens the merged model of {CONDITIONS[name]} is {compared(found)} the best synchronous "
                f"mean with the same choices ({best}; {apart(found)}): 'no worse' {judged(found, *NO_WORSE)}. It sends "
                f"{sent.text(2)} times the bytes, a last merge included."
            )
        elif best is None and name == "ours":
            yield (
                "The record holds no synchronous mean that was given all of its choices, on "
                f"{SEEDS} seeds: whether gossip or a barrier makes the better model, for the same bytes or in the same "
                "time, does not follow from it."
            )


def _pairs(data: Measured, on: str) -> Iterator[str]:
    """Yield what weighing gives, and how gossip does beside the mean where all machines are equal."""
    pairs = (
        ("gossip_by_steps", "ours"),
        ("gossip_by_steps_fifth", "mean_equal_fifth"),
        ("gossip_by_steps_none", "ours_none"),
        ("ours_none", "mean_equal_none"),
        ("gossip_by_steps_none", "mean_equal_none"),
        ("gossip_by_steps_none_equal_bytes", "mean_equal_none_equal_bytes"),
        ("gossip_by_steps_as_long", "mean_equal"),
        ("gossip_by_steps_as_long", "pairs_equal"),
    )
    for mine, other in pairs:
        if on + mine not in data.names or on + other not in data.names:
            continue
        found = data.against(on + mine, on + other, gap)
        if is_enough(found):
            label = CONDITIONS.get(other, other)
            yield f"{CONDITIONS[mine]}: {compared(found)} {label} ({apart(found)})."


def _on_the_scale(data: Measured, on: str) -> Iterator[str]:
    rows = {name: CONDITIONS.get(name, name) for name in (*CONDITIONS, *EQUALS) if on + name in data.names}
    shares = {words: closed(data, on + name, (f"{on}parallel", f"{on}noloco")) for name, words in rows.items()}
    told = [f"{words}: {share.text(2)}" for words, share in shares.items() if is_enough(share)]
    if told:
        less = ", ".join(lacking(data, f"{on}noloco"))
        yield (
            "On a scale from NoLoCo as published (0) to data parallel training (1), which is no comparison of methods"
            f"{f' since NoLoCo lacks {less}' if less else ''}: {'; '.join(told)}."
        )
    behind = {words: data.against(on + name, f"{on}parallel", gap) for name, words in rows.items()}
    far = [f"{words}: {apart(found)}" for words, found in behind.items() if is_enough(found)]
    if far:
        yield f"Against data parallel training, {'; '.join(far)}."
