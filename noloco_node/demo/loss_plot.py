"""loss.png: the loss of the swarm, and how far apart its replicas were.

The upper panel has the training loss of each source over the tokens of the whole run, and at the right the losses of
the merged model, of the single replicas, and of counting bytes alone. The lower panel has the gap of each peer after
each of its rounds. In a grey band a peer is away. Labels stand beside their curves.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter, StrMethodFormatter

from noloco_node.charts import COLOURS, INK, QUIET, SAME, Labelled, dress, new_figure, png, write_labels
from noloco_node.demo.summary import ModelScores, Summary
from noloco_node.observe.peer_history import Curve, PeerHistory, Point
from noloco_node.observe.screen import smoothed


def picture(heading: str, histories: Sequence[PeerHistory], summary: Summary, scores: ModelScores | None) -> bytes:
    figure, outage = new_figure(10, 6.4), summary.outage
    loss, gap = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.1))
    figure.subplots_adjust(left=0.075, right=0.80, top=0.86, bottom=0.09, hspace=0.12)
    figure.text(0.075, 0.945, heading, fontsize=14, fontweight="bold", color=INK)
    figure.text(0.075, 0.905, _subtitle(summary, scores), fontsize=10, color=QUIET)
    tokens = max(1, summary.tokens)
    _draw_losses(loss, histories, scores, tokens)
    _draw_gaps(gap, histories)
    for panel in (loss, gap):
        dress(panel)
        panel.set_xlim(0, tokens)
        panel.xaxis.set_major_formatter(EngFormatter(sep=""))
        if outage is not None:
            panel.axvspan(outage.from_tokens, outage.to_tokens, color=QUIET, alpha=0.12, linewidth=0, zorder=0)
    if outage is not None:
        words, place = f" {outage.peer} killed", loss.get_xaxis_transform()
        loss.text(outage.from_tokens, 0.03, words, transform=place, color=QUIET, fontsize=9)
    gap.set_xlabel("tokens trained by the whole swarm", color=INK)
    return png(figure)


def _subtitle(summary: Summary, scores: ModelScores | None) -> str:
    if scores is None:
        return "training loss, no evaluation"
    return (
        f"{summary.parameters:,} parameters; merged model {scores.merged:.3f} nats a token on held-out text, "
        f"{scores.merged / scores.unigram:.2f} of the byte unigram entropy"
    )


def over_tokens(curve: Curve, histories: Sequence[PeerHistory]) -> list[Point]:
    """Return the points with the tokens that all sources together had trained on at that time as x.

    This is exact and the same for all peers: the progress in a journal is only what its peer had heard of.
    """
    at, tokens = [point.x for point in curve.points], np.zeros(len(curve.points))
    for source in histories:
        if source.drawn_tokens and source.began_at is not None:
            ends, drawn = zip(Point(source.began_at, 0.0), *source.drawn.points, strict=True)
            tokens += np.interp(at, ends, drawn, right=source.drawn_tokens)
    return [Point(x, point.value) for x, point in zip(tokens.tolist(), curve.points, strict=True)]


def _draw_losses(panel: Axes, histories: Sequence[PeerHistory], scores: ModelScores | None, tokens: int) -> None:
    labels = []
    for number, history in enumerate(history for history in histories if history.stage == 0):
        points = over_tokens(history.losses, histories)
        if not points:
            continue
        colour = COLOURS[number % len(COLOURS)]
        panel.plot(*zip(*points, strict=True), color=colour, alpha=0.18, linewidth=0.8)
        smooth = smoothed(points)
        panel.plot(*zip(*smooth, strict=True), color=colour, linewidth=1.8, solid_capstyle="round")
        labels.append(Labelled(smooth[-1].value, f"training, {history.name}", colour))
    if scores is not None:
        panel.axhline(scores.unigram, color=QUIET, linewidth=1.0, linestyle=(0, (4, 3)), zorder=0)
        labels.append(Labelled(scores.unigram, f"byte unigrams {scores.unigram:.2f}", QUIET))
        panel.plot([tokens], [scores.single], "D", color=QUIET, markersize=6, clip_on=False, zorder=5)
        panel.plot([tokens], [scores.merged], "*", color=INK, markersize=13, clip_on=False, zorder=6)
        labels.append(Labelled(scores.single, f"◆ single replicas {scores.single:.3f}", QUIET))
        labels.append(Labelled(scores.merged, f"★ merged model {scores.merged:.3f}", INK))
    panel.set_yscale("log")
    panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0)))
    panel.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    panel.yaxis.set_minor_formatter(NullFormatter())
    panel.set_ylabel("loss, nats a token", color=INK)
    write_labels(panel, labels)


def _draw_gaps(panel: Axes, histories: Sequence[PeerHistory]) -> None:
    panel.set_ylabel("gap", color=INK)
    panel.set_title("how far apart two replicas are when they meet", loc="left", fontsize=9, color=QUIET, pad=3)
    met = [history for history in histories if history.gaps.points]
    if all(point.value < SAME for history in met for point in history.gaps.points):
        remark = "zero: after each round the replicas of a stage held the same slow weights" if met else "no round"
        panel.text(0.5, 0.5, remark, transform=panel.transAxes, ha="center", va="center", color=QUIET, fontsize=9)
        panel.set_yticks([])
        return
    labels = []
    for stage in sorted({history.stage for history in met}):
        colour = COLOURS[::-1][stage % len(COLOURS)]
        replicas = [history for history in met if history.stage == stage]
        for history in replicas:
            points = over_tokens(history.gaps, histories)
            panel.plot(*zip(*points, strict=True), "o", color=colour, markersize=4, alpha=0.75)
        last = sum(history.gaps.points[-1].value for history in replicas) / len(replicas)
        labels.append(Labelled(last, f"stage {stage}", colour))
    panel.set_ylim(bottom=0)
    write_labels(panel, labels)
