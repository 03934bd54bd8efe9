"""How busy a pipeline is: stages, windows, latency, replicas, and one or two windows in flight.

    python -m benchmarks.pipeline_efficiency.windows [--quick] [--json FILE] [--picture FILE]

The table of `noloco_node.planning.windows`, which `noloco-node check` predicts with, and beside it what production
nodes did in virtual time where that takes seconds (`benchmarks.pipeline_efficiency.production_utilisation`), with one
window in flight and with two; a single stage waits for nobody and has one. Latency is the time of one message in
forward passes of a stage; a call takes one message down and one back. Replicas are four of equal speed, five, which no
window here is a multiple of, and four with speeds 1:1:2:4, of which the forecast knows nothing: it plans equal
machines. Efficiency is work done over what all devices of a stage could do.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from benchmarks.pipeline_efficiency.production_utilisation import PipelineShape, Trial, measure, spread_speeds
from noloco_node.planning.windows import seconds_each
from noloco_node.run.config import PipelineConfig

T = TypeVar("T")

REPLICAS = {"4 equal": (1.0,) * 4, "5 equal": (1.0,) * 5, "1:1:2:4": (1.0, 1.0, 2.0, 4.0)}
LATENCIES = (0.0, 1.0, 3.0)
STAGES, WINDOWS = (1, 2, 4, 8, 16), (4, 8, 16, 32, 64)
MEASURED = ((1, 4), (2, 4), (2, 16), (4, 4), (4, 16), (8, 16))
"""Stages and windows that production nodes run with, too."""
TRIAL = Trial(warm_up=128, microbatches=96)
"""Deep pipelines with unequal replicas take eight windows and more to settle: they begin faster than they go on."""
DEEP = 8
"""From so many stages on production nodes run at one latency only."""
PROGRESS_EVERY_S = 5.0


class Case(NamedTuple):
    """One cell."""

    replicas: str
    stages: int
    window: int
    latency: float
    windows_in_flight: int

    @property
    def shape(self) -> PipelineShape:
        """The pipeline itself."""
        return PipelineShape(
            passes=spread_speeds((1.0,) * self.stages, REPLICAS[self.replicas]),
            window=self.window,
            latency=self.latency,
            windows_in_flight=self.windows_in_flight,
        )

    def forecast(self) -> float:
        """Return the efficiency that is predicted, of equal replicas."""
        pipeline = PipelineConfig(
            stages=self.stages,
            replicas=len(REPLICAS[self.replicas]),
            microbatches_per_step=self.window,
            windows_in_flight=1 if self.windows_in_flight == 1 else 2,
        )
        pace = 3.0
        return pace / seconds_each(pipeline, pace, pace * self.stages + 2 * (self.stages - 1) * self.latency)


Cells = dict[Case, float]


def counted(what: str, items: Sequence[T]) -> Iterator[T]:
    """Yield the items, and every few seconds say on the standard error how far it is and how long it will take."""
    begun_s = said_s = time.perf_counter()
    for number, item in enumerate(items):
        now_s = time.perf_counter()
        if number and now_s - said_s >= PROGRESS_EVERY_S:
            said_s, each_s = now_s, (now_s - begun_s) / number
            left_s = each_s * (len(items) - number)
            print(f"{what}: {number} of {len(items)}, {each_s:.2f} s each, {left_s:.0f} s left", file=sys.stderr)
        yield item


def forecasts(stages: Iterable[int], windows: Iterable[int]) -> Cells:
    """Predict every cell."""
    cases = [Case(*case) for case in itertools.product(REPLICAS, stages, windows, LATENCIES, (1, 2))]
    return {case: case.forecast() for case in cases}


def measurements(where: Iterable[tuple[int, int]]) -> Cells:
    """Run production nodes in some of the cells."""
    cases = [
        Case(replicas, stages, window, latency, windows_in_flight)
        for (stages, window), replicas, latency, windows_in_flight in itertools.product(
            where, REPLICAS, LATENCIES, (1, 2)
        )
        if (stages < DEEP or latency == 1.0) and windows_in_flight <= stages
    ]
    cases.sort(key=lambda case: -case.stages * case.window)
    return {case: measure(case.shape, TRIAL).efficiency for case in counted("production", cases)}


def table(replicas: str, predicted: Cells, measured: Cells) -> list[str]:
    """Return one Markdown table: per cent with one window in flight and with two, production beside it."""
    head = [f"{name} {latency:g}" for latency in LATENCIES for name in ("one,", "two,")]
    lines = [f"| stages | window | {' | '.join(head)} |", "|" + "---|" * (2 + len(head))]
    rows = sorted({(case.stages, case.window) for case in predicted})
    for stages, window in rows:
        cells = []
        for latency, windows_in_flight in itertools.product(LATENCIES, (1, 2)):
            case = Case(replicas, stages, window, latency, windows_in_flight)
            text = f"{100 * predicted[case]:.0f}"
            cells.append(f"{text} ({100 * measured[case]:.0f})" if case in measured else text)
        lines.append(f"| {stages} | {window} | {' | '.join(cells)} |")
    return lines


def agreement(predicted: Cells, measured: Cells, windows_in_flight: int) -> str:
    """Say how far the forecast is from production, with so many windows in flight."""
    errors = {
        case: predicted[case] / measured[case] - 1.0 for case in measured if case.windows_in_flight == windows_in_flight
    }
    sizes = sorted(map(abs, errors.values()))
    worst = max(errors, key=lambda case: abs(errors[case]))
    word = "one window" if windows_in_flight == 1 else "two windows"
    return (
        f"{len(errors)} cells with production nodes and {word} in flight: "
        f"the forecast is off by {statistics.median(sizes):.1%} in the median, "
        f"by at most {sizes[int(0.9 * (len(sizes) - 1))]:.1%} in nine of ten, and by {errors[worst]:+.1%} at worst "
        f"({worst.replicas}, {worst.stages} stages, window {worst.window}, latency {worst.latency:g})"
    )


def picture(predicted: Cells, measured: Cells) -> bytes:
    """Draw efficiency over the window at a latency of one forward pass, a panel for each kind of replicas."""
    from matplotlib.axes import Axes
    from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter, StrMethodFormatter

    from noloco_node.charts import COLOURS, INK, QUIET, dress, new_figure, png

    windows = sorted({case.window for case in predicted})
    depths = sorted({case.stages for case in predicted} - {1})

    def draw(panel: Axes, replicas: str) -> None:
        for colour, stages in zip(COLOURS, depths, strict=False):
            for windows_in_flight, style in ((1, "-"), (2, (0, (1.5, 1.5)))):
                heights = [predicted[Case(replicas, stages, window, 1.0, windows_in_flight)] for window in windows]
                panel.plot(windows, heights, linestyle=style, color=colour, linewidth=1.8 if style == "-" else 1.3)
                dots = [
                    (window, measured[case])
                    for window in windows
                    if (case := Case(replicas, stages, window, 1.0, windows_in_flight)) in measured
                ]
                if dots:
                    face, edge = (colour, "white") if windows_in_flight == 1 else ("white", colour)
                    x, y = zip(*dots, strict=True)
                    panel.plot(x, y, "o", color=face, markersize=6, markeredgecolor=edge)
            first = predicted[Case(replicas, stages, windows[0], 1.0, 1)]
            panel.text(windows[0] * 0.93, first, f"{stages}", color=colour, ha="right", va="center", fontsize=10)
        panel.set_title(f"replicas: {replicas}", fontsize=11, color=INK, loc="left")
        panel.set_xscale("log", base=2)
        panel.set_xlim(windows[0] * 0.7, windows[-1] * 1.05)
        panel.xaxis.set_major_locator(FixedLocator(windows))
        panel.xaxis.set_minor_locator(NullLocator())
        panel.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        panel.yaxis.set_major_formatter(PercentFormatter(1.0))
        panel.set_ylim(0, 1.03)
        dress(panel)
        panel.set_xlabel("window: microbatches of an inner step", color=INK, fontsize=9)

    figure = new_figure(11, 4.6)
    panels = figure.subplots(1, len(REPLICAS), sharey=True)
    figure.subplots_adjust(left=0.065, right=0.985, top=0.76, bottom=0.12, wspace=0.08)
    figure.text(
        0.065,
        0.94,
        "Deep pipelines need windows that their replicas can share evenly",
        fontsize=13,
        fontweight="bold",
        color=INK,
    )
    figure.text(
        0.065,
        0.875,
        "share of its time for which a stage works, by number of stages (at the left of each "
        "line); a message takes as long as a forward pass\nlines: forecast, one window in flight; dotted: two; "
        "dots: production nodes in virtual time, filled with one window, hollow with two",
        fontsize=9,
        color=QUIET,
        va="center",
    )
    for panel, replicas in zip(panels, REPLICAS, strict=True):
        draw(panel, replicas)
    return png(figure)


def main() -> None:
    """Predict, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few stages and windows, and rougher")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    begun_s = time.perf_counter()
    stages, windows = ((1, 2, 4), (4, 16)) if arguments.quick else (STAGES, WINDOWS)
    predicted = forecasts(stages, windows)
    measured = measurements([cut for cut in MEASURED if cut[0] in stages and (not arguments.quick or cut[1] == 4)])
    for replicas in REPLICAS:
        print(f"\nReplicas: {replicas}. Per cent; one or two windows in flight, latency; in brackets production.\n")
        print("\n".join(table(replicas, predicted, measured)))
    print(f"\n{agreement(predicted, measured, 1)}.\n{agreement(predicted, measured, 2)}.")
    print(f"{time.perf_counter() - begun_s:.0f} s in all")
    if arguments.json:
        rows = [{**case._asdict(), "forecast": predicted[case], "production": measured.get(case)} for case in predicted]
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    if arguments.picture:
        arguments.picture.parent.mkdir(parents=True, exist_ok=True)
        arguments.picture.write_bytes(picture(predicted, measured))


if __name__ == "__main__":
    main()
