"""Gossip and its rivals on an equal footing, a table a text: losses, the share of NoLoCo's gap, bytes.

And what the rivals of others chose from, on the one text and seed that decide choices.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from gossip.exchange.swap import PROBE
from research.laboratory.experiments.cell import Corpus, Result
from research.laboratory.experiments.hardware_model import PARAMETERS
from research.laboratory.experiments.rivals import CHOSEN, CROWDED, MORE, SIZE, heads, trials
from research.laboratory.output.headline import closed
from research.laboratory.output.table import (
    NOTHING,
    Table,
    apart,
    compared,
    gap,
    is_enough,
    judged,
    merged,
    merged_ratio,
    shown,
)
from research.laboratory.running.results import Measured, perplexity

HEADER = (
    "method",
    "what it is",
    "seed 0, merged",
    "loss, merged",
    "perplexity",
    "gap to data parallel",
    "perplexity over its",
    "share of NoLoCo's gap closed",
    "kB / step",
    "of them probes",
    "bits a weight and step",
    "rounds",
    "virtual s",
)
AGAINST = (
    ("gossip_weighed", "gossip", "no worse"),
    ("gossip", "mean", "no worse"),
    ("gossip_weighed", "mean", "no worse"),
    ("fours_exact", "mean", "no worse"),
    ("pairs_exact", "mean", "no worse"),
    ("pairs_late", "pairs_exact", "no worse"),
    ("gossip_fast_lines", "pairs_exact", "no worse"),
    ("gossip_weighed", "gossip_fast_lines", "no worse"),
    ("pairs_coded", "pairs_exact", "no worse"),
    ("shards", "pairs_coded", "no worse"),
    ("gossip_weighed", "pairs_coded", "no worse"),
    *(("gossip_weighed", name, "no worse") for name in CHOSEN),
    *((name, "mean", "no worse") for name in CHOSEN),
)
"""Pairs of methods about which something is said once three seeds are there."""


def rival_tables(data: Measured) -> list[Table]:
    """Return a table of each text, one of more replicas, and one of what was chosen from."""
    return [*(_table(data, text) for text in get_args(Corpus)), _crowds(data), _choices(data)]


def _table(data: Measured, text: Corpus) -> Table:
    suffix = "" if text == get_args(Corpus)[0] else f"_{text}"
    ends = (f"parallel{suffix}", f"noloco{suffix}")
    names = {family: f"{family}{suffix}" for family in heads()}
    rows = [
        (
            family,
            data.about(family),
            NOTHING if suffix else _chosen(data, family),
            shown(data.figure(name, merged), 4, "diverged"),
            shown(data.figure(name, lambda result: perplexity(result.merged)), 3, "diverged"),
            shown(data.against(name, ends[0], gap)),
            shown(data.against(name, ends[0], merged_ratio)),
            shown(closed(data, name, ends), 2),
            shown(data.figure(name, lambda result: result.bytes_per_step / 1e3), 1),
            shown(data.figure(name, lambda result: _probes(result) / 1e3), 1),
            shown(data.figure(name, _bits), 2),
            shown(data.figure(name, lambda result: result.rounds), 0),
            shown(data.figure(name, lambda result: result.virtual_s), 0),
        )
        for family, name in names.items()
    ]
    what = {"library": "the standard library's text", "torch": "a text on which nothing was chosen"}[text]
    says = " ".join(_said(data, suffix, ends))
    return Table(f"Rivals on an equal footing: {what}", says, HEADER, tuple(rows), data.take_missing(), 2)


def _crowds(data: Measured) -> Table:
    of = {name: [name, *(f"{name}_of_{count}" for count in MORE)] for name in CROWDED}
    rows = []
    for name, mine in of.items():
        rows.append((name, "nats", *(shown(data.figure(each, merged), 4, "diverged") for each in mine)))
        for other in CROWDED[:2]:
            if other != name:
                ratios = (shown(data.against(*pair, merged_ratio)) for pair in zip(mine, of[other], strict=True))
                rows.append((name, f"perplexity over {other}'s", *ratios))
    header = ("method", "", *(f"{count} replicas" for count in (SIZE.replicas, *MORE)))
    title = "More replicas: the standard library's text, as many steps of each"
    says = "Each keeps the learning rate and the rounds that it has with eight replicas."
    return Table(title, says, header, tuple(rows), data.take_missing(), 2)


def _choices(data: Measured) -> Table:
    rows = []
    for name, (cell, about) in trials().items():
        is_chosen = cell == heads()[name.rpartition("_")[0]][0]
        rows.append(
            (
                name,
                about,
                "yes" if is_chosen else "",
                shown(data.figure(name, merged), 4, "diverged"),
                shown(data.figure(name, lambda result: result.bytes_per_step / 1e3), 1),
                shown(data.figure(name, lambda result: result.rounds), 0),
                shown(data.figure(name, lambda result: result.virtual_s), 0),
            )
        )
    says = (
        "The best of each is chosen, but for shards, which stay at the four bits of gossip. One seed, which is none of "
        "those that are reported: nothing else follows."
    )
    header = ("setting", "what it is", "chosen", "loss, merged", "kB / step", "rounds", "virtual s")
    title = "What the rivals of others chose from: seed 0, the standard library's text"
    return Table(title, says, header, tuple(rows), data.take_missing(), 3)


def _said(data: Measured, suffix: str, ends: tuple[str, str]) -> Iterator[str]:
    for mine, other, claim in AGAINST:
        found = data.against(f"{mine}{suffix}", f"{other}{suffix}", gap)
        if is_enough(found):
            verdict = judged(found, "better than", "level with")
            yield f"{mine} is {compared(found)} {other} ({apart(found)}): '{claim}' {verdict}."
    for family in heads():
        share = closed(data, f"{family}{suffix}", ends)
        if is_enough(share) and family not in ("parallel", "noloco"):
            yield f"Of NoLoCo's gap {family} closes {share.text(2)}."


def _chosen(data: Measured, family: str) -> str:
    """Return the loss on seed 0 at the rate that it chose."""
    found = [result for result in data.tuned(family).values() if result is not None]
    return f"{min(result.merged for result in found):.4f}" if found else NOTHING


def _probes(result: Result) -> float:
    """Return the bytes of probes for each inner step: two for each meeting with a modular code."""
    if result.cell.method != "gossip":
        return 0.0
    sent = 2 * 4 * min(PROBE, PARAMETERS[result.cell.scale])
    return sent * result.rounds * result.cell.replicas / sum(result.steps_taken)


def _bits(result: Result) -> float:
    return 8.0 * (result.bytes_per_step - _probes(result)) / PARAMETERS[result.cell.scale]
