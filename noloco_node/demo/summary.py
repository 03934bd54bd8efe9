"""What a swarm has done, in numbers: from the histories of its peers, and from the scores on its model.

Pure: no file, no clock. `lines` is what a person reads, and the struct itself is `summary.json`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from noloco_node.charts import SAME
from noloco_node.demo.outage import OutageSummary, trained
from noloco_node.observe.peer_history import PeerHistory
from noloco_node.units import format_bytes


class ModelScores(msgspec.Struct, frozen=True, kw_only=True):
    """What the trained model is worth; losses in mean nats a token on one and the same validation text.

    `routes`: loss of each route through single replicas, peer by peer with slashes between (`0a/1b`).
    `unigram`: entropy of the tokens' own distribution.
    """

    merged: float
    routes: dict[str, float]
    untrained: float
    unigram: float
    tokens: int
    parameters: int
    prompt: str
    sample: str

    @property
    def single(self) -> float:
        """Mean loss over the routes through single replicas."""
        return sum(self.routes.values()) / len(self.routes)

    def named(self, names: Mapping[str, str]) -> ModelScores:
        """Return the same scores with peers called by their names instead of their ids."""
        routes = {
            "/".join(names.get(peer, peer) for peer in route.split("/")): loss for route, loss in self.routes.items()
        }
        return msgspec.structs.replace(self, routes=routes)


class PeerSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One peer, as its history has it. `gap_first` and `gap_last`: after its first and last round with a partner.

    `busy`: share of its wall time at work, from the end of its first inner step to that of the last, for which its
    device worked (had a core); None where the journal does not tell. `slowdown`: how many times slower it acted.
    """

    name: str
    stage: int
    steps: int
    tokens: int
    loss: float | None
    met: int
    skipped: int
    solo: int
    mean_staleness: float
    gap_first: float | None
    gap_last: float | None
    refused: dict[str, int]
    lost: dict[str, int]
    violations: int
    finished: str | None
    busy: float | None = None
    slowdown: float = 1.0


class HopShare(msgspec.Struct, frozen=True, kw_only=True):
    """Microbatches from one peer to one of the next stage. `share`: of the sender's; `even`: one over the replicas."""

    sender: str
    receiver: str
    microbatches: int
    share: float
    even: float


class ByteTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one purpose, summed over the peers."""

    sent: int
    received: int


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """A whole swarm. `seconds`: from the beginning of the first inner step of a source to the end of the last."""

    peers: tuple[PeerSummary, ...]
    tokens: int
    seconds: float
    tokens_per_s: float
    hops: tuple[HopShare, ...]
    bytes: dict[str, ByteTotals]
    outage: OutageSummary | None = None


def summarise(histories: Sequence[PeerHistory], outage: OutageSummary | None = None) -> Summary:
    """Sum up a swarm; tokens count once, where they were drawn (stage 0)."""
    sources = [history for history in histories if history.stage == 0 and history.began_at is not None]
    starts = [history.began_at for history in sources if history.began_at is not None]
    seconds = max((history.ended_at for history in sources), default=0.0) - min(starts, default=0.0)
    tokens = trained(histories)
    return Summary(
        peers=tuple(msgspec.convert(history, PeerSummary, from_attributes=True) for history in histories),
        tokens=tokens,
        seconds=seconds,
        tokens_per_s=tokens / seconds if seconds > 0 else 0.0,
        hops=_hops(histories),
        bytes=_bytes(histories),
        outage=outage,
    )


def busy(summary: Summary, *, slowed: bool) -> float | None:
    """Return the mean share of device time busy of the replicas slowed down, or of all others; None without any."""
    shares = [peer.busy for peer in summary.peers if peer.busy is not None and (peer.slowdown > 1) is slowed]
    return sum(shares) / len(shares) if shares else None


def _hops(histories: Sequence[PeerHistory]) -> tuple[HopShare, ...]:
    names = {history.peer: history.name for history in histories}
    found = []
    for history in histories:
        receivers = [other for other in histories if other.stage == history.stage + 1 and other.peer is not None]
        total = sum(history.hops.values())
        peers = list(dict.fromkeys([*(other.peer or "" for other in receivers), *history.hops]))
        found += [
            HopShare(
                sender=history.name,
                receiver=names.get(peer, peer[-8:]),
                microbatches=history.hops.get(peer, 0),
                share=history.hops.get(peer, 0) / max(1, total),
                even=1 / max(1, len(receivers)),
            )
            for peer in peers
        ]
    return tuple(found)


def _bytes(histories: Sequence[PeerHistory]) -> dict[str, ByteTotals]:
    purposes = sorted({purpose for history in histories for purpose in (*history.sent, *history.received)})
    return {
        purpose: ByteTotals(
            sent=sum(history.sent.get(purpose, 0) for history in histories),
            received=sum(history.received.get(purpose, 0) for history in histories),
        )
        for purpose in purposes
    }


def lines(summary: Summary, scores: ModelScores | None) -> list[str]:
    """Return the summary as plain text; without scores only what the journals tell."""
    text = [] if scores is None else _score_lines(scores)
    text += [
        "",
        f"Training: {summary.tokens:,} tokens in {summary.seconds:.0f} s, {summary.tokens_per_s:,.0f} tokens/s",
        *_outage_lines(summary.outage),
        "",
        "Share of its stage's microbatches that came back, by peer",
        *_share_lines(summary),
        "",
        "Rounds          met    skipped   solo   staleness   gap first -> last",
        *(_round_line(peer) for peer in summary.peers),
    ]
    gaps = [peer.gap_last for peer in summary.peers if peer.gap_last is not None]
    if gaps and max(gaps) < SAME and not any(peer.solo or peer.skipped for peer in summary.peers):
        text += ["  (no gap: two replicas that miss no round hold the same slow weights, and the merged model is both)"]
    else:
        text += ["  (gap: from a replica's slow weights to the pair's mean, over their norm)"]
    text += _busy_lines(summary)
    if summary.bytes:
        text += ["", "Bytes sent by all peers (microbatch: activations and their gradients)"]
        text += [f"  {purpose:<16} {format_bytes(both.sent):>12}" for purpose, both in summary.bytes.items()]
    trouble = [line for peer in summary.peers if (line := _trouble_line(peer))]
    if any(peer.lost for peer in summary.peers):
        trouble += ["  (lost: under way when a peer went; sent again along another route)"]
    return [*text, "", "Refused and lost", *(trouble or ["  nothing"])]


def _score_lines(scores: ModelScores) -> list[str]:
    low, high = min(scores.routes.values()), max(scores.routes.values())
    rows = [
        ("merged model", scores.merged, f"{scores.merged / scores.unigram:.2f} of the byte unigram entropy"),
        ("single replicas", scores.single, f"mean of {len(scores.routes)} routes, {low:.3f} to {high:.3f}"),
        ("untrained model", scores.untrained, ""),
        ("byte unigrams", scores.unigram, "entropy: what counting bytes alone could reach"),
    ]
    return [
        f"Validation on {scores.tokens:,} held-out tokens, {scores.parameters:,} parameters",
        "                    nats/token   perplexity",
        *(f"  {name:<16} {loss:>12.4f} {_perplexity(loss):>12}   {remark}".rstrip() for name, loss, remark in rows),
    ]


def _perplexity(loss: float) -> str:
    return f"{math.exp(loss):.2f}" if loss < 50 else "huge"


def _outage_lines(outage: OutageSummary | None) -> list[str]:
    if outage is None:
        return []
    back = "was not back before the end" if outage.away_s is None else f"at work again {outage.away_s:.0f} s later"
    speeds = (
        ("before", outage.tokens_per_s_before),
        ("without it", outage.tokens_per_s_away),
        ("after", outage.tokens_per_s_after),
    )
    said = ", ".join(f"{speed:,.0f} {when}" for when, speed in speeds if speed is not None)
    return ["", f"{outage.peer} was killed after {outage.progress:.0%} of the run, and {back}", f"  tokens/s: {said}"]


def _share_lines(summary: Summary) -> list[str]:
    """Return a line for each stage: what share of its work each peer did."""
    drawn = {peer.name: peer.tokens for peer in summary.peers if peer.stage == 0}
    received = Counter[str]()
    for hop in summary.hops:
        received[hop.receiver] += hop.microbatches
    text = []
    for stage in sorted({peer.stage for peer in summary.peers}):
        names = [peer.name for peer in summary.peers if peer.stage == stage]
        work = {name: received[name] if stage else drawn[name] for name in names}
        total = max(1, sum(work.values()))
        shares = ", ".join(f"{name} {count / total:.1%}" for name, count in work.items())
        text.append(f"  stage {stage}: {shares} (even: {1 / len(names):.1%})")
    return text or ["  nobody came"]


def _busy_lines(summary: Summary) -> list[str]:
    fast, slow = busy(summary, slowed=False), busy(summary, slowed=True)
    if fast is None:
        return []
    shares = [f"  {p.name:<10}{p.busy:>7.1%} {p.steps:>8,}{_speed(p)}" for p in summary.peers if p.busy is not None]
    apart = f"  fast replicas {fast:.1%}, slow ones {slow:.1%}" if slow is not None else f"  mean {fast:.1%}"
    cores = "  (busy: share of its time at work for which a peer had a core of this machine)"
    return ["", "Device          busy    steps", *shares, apart, cores]


def _speed(peer: PeerSummary) -> str:
    return f"   at 1/{peer.slowdown:g} of its speed" if peer.slowdown > 1 else ""


def _round_line(peer: PeerSummary) -> str:
    gaps = "-" if peer.gap_last is None else f"{peer.gap_first:.4f} -> {peer.gap_last:.4f}"
    counts = f"{peer.met:>7} {peer.skipped:>10} {peer.solo:>6} {peer.mean_staleness:>11.1f}"
    return f"  {peer.name:<10}{counts}   {gaps}"


def _trouble_line(peer: PeerSummary) -> str:
    parts = [f"{count} refused ({reason})" for reason, count in sorted(peer.refused.items())]
    parts += [f"{count} {what} lost" for what, count in sorted(peer.lost.items())]
    parts += [f"{peer.violations} violations"] if peer.violations else []
    return f"  {peer.name:<6} {', '.join(parts)}" if parts else ""
