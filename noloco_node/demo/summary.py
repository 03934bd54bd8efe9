"""The summary of a demo, from the histories of its peers and the scores of its model; without files or clock.

`lines` is for a person, the struct itself is `summary.json`. `Outage` says when the demo kills one peer without warning
and starts it again, so that one sees what the others do meanwhile.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

import msgspec

from noloco_node.charts import SAME
from noloco_node.observe.peer_history import PeerHistory
from noloco_node.units import format_bytes

KILLED_AT = 0.3
"""The peer is killed at this share of the run: after the speed has settled, and early enough for its return."""
AWAY_S = 5.0  # from its end to its new start; it then loads its libraries and copies the weights


class ModelScores(msgspec.Struct, frozen=True, kw_only=True):
    """Losses of the trained model in mean nats a token, all on the same held-out text.

    `replicas`: loss of the merged model with one replica in its stage's place. `unigram`: entropy of the tokens' own
    distribution.
    """

    merged: float
    replicas: dict[str, float]
    unigram: float
    tokens: int
    prompt: str
    sample: str

    @property
    def single(self) -> float:
        return fmean(self.replicas.values())


class OutageSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The effect of an outage. `progress`: share of the run at the kill. `away_s`: until its next inner step; None if
    the peer took none before the run was over.

    `from_tokens`, `to_tokens`: what the swarm had trained on at the kill, and at the return. Speeds are in tokens/s of
    the whole swarm.
    """

    peer: str
    progress: float
    away_s: float | None
    from_tokens: int
    to_tokens: int
    tokens_per_s_before: float
    tokens_per_s_away: float | None
    tokens_per_s_after: float | None


@dataclass(slots=True)
class Outage:
    """The outage of the peer of this name. Times are unix seconds, tokens those of the whole swarm by then."""

    peer: str
    progress: float = 0.0
    killed_at: float | None = None
    killed_tokens: int = 0
    restarted: bool = False
    back_at: float | None = None
    back_tokens: int = 0

    def due(self, progress: float, histories: Sequence[PeerHistory], now: float) -> Literal["kill", "restart"] | None:
        """Return what to do now, and remember when; `progress`: of the run, 0 to 1."""
        history = next(each for each in histories if each.name == self.peer)
        tokens = trained(histories)
        if self.killed_at is None:
            if not KILLED_AT <= progress < 1.0 or not history.underway or history.finished is not None:
                return None
            self.progress, self.killed_at, self.killed_tokens = progress, now, tokens
            return "kill"
        if not self.restarted:
            self.restarted = now - self.killed_at >= AWAY_S
            return "restart" if self.restarted else None
        if self.back_at is None and history.underway and history.gone is None:
            self.back_at, self.back_tokens = now, tokens
        return None

    def summary(self, histories: Sequence[PeerHistory]) -> OutageSummary | None:
        """Return its effect; None if no peer was killed."""
        began = min((each.began_at for each in histories if each.began_at is not None), default=None)
        if self.killed_at is None or began is None:
            return None
        ended, tokens = max(each.ended_at for each in histories), trained(histories)
        away_until, away_tokens = (ended, tokens) if self.back_at is None else (self.back_at, self.back_tokens)
        return OutageSummary(
            peer=self.peer,
            progress=self.progress,
            away_s=None if self.back_at is None else self.back_at - self.killed_at,
            from_tokens=self.killed_tokens,
            to_tokens=away_tokens,
            tokens_per_s_before=_rate(self.killed_tokens, self.killed_at - began) or 0.0,
            tokens_per_s_away=_rate(away_tokens - self.killed_tokens, away_until - self.killed_at),
            tokens_per_s_after=_rate(tokens - away_tokens, ended - away_until),
        )


def trained(histories: Sequence[PeerHistory]) -> int:
    """Return the tokens that the swarm has trained on, counted where they were drawn (stage 0)."""
    return sum(history.drawn_tokens for history in histories)


def _rate(tokens: int, seconds: float) -> float | None:
    return tokens / seconds if seconds > 0.0 else None


class PeerSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One peer, from its history. `gap_first`, `gap_last`: after its first and last round with a partner.

    `drawn_tokens`: those of `tokens` that it trained on at stage 0. `busy`: share of the time between its first and
    last inner step for which its device had a core; None if the journal does not tell. `slowdown`: how many times
    slower it acted.
    """

    name: str
    stage: int
    steps: int
    tokens: int
    drawn_tokens: int
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
    """A whole swarm. `parameters`: of the model. `seconds`: from the first inner step of a source to the last one."""

    peers: tuple[PeerSummary, ...]
    parameters: int
    tokens: int
    seconds: float
    tokens_per_s: float
    hops: tuple[HopShare, ...]
    bytes: dict[str, ByteTotals]
    outage: OutageSummary | None = None


def summarise(histories: Sequence[PeerHistory], outage: OutageSummary | None = None) -> Summary:
    sources = [history for history in histories if history.stage == 0]
    began = min((history.began_at for history in sources if history.began_at is not None), default=0.0)
    seconds = max((history.ended_at for history in sources if history.began_at is not None), default=0.0) - began
    tokens = trained(histories)
    parameters = {history.stage: history.parameters for history in histories if history.parameters}
    return Summary(
        peers=tuple(msgspec.convert(history, PeerSummary, from_attributes=True) for history in histories),
        parameters=sum(parameters.values()),
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
    return fmean(shares) if shares else None


def _hops(histories: Sequence[PeerHistory]) -> tuple[HopShare, ...]:
    names = {history.peer: history.name for history in histories}
    found = []
    for history in histories:
        receivers = [other for other in histories if other.stage == history.stage + 1 and other.peer is not None]
        hops = history.former_hops + Counter(history.hops)
        peers = list(dict.fromkeys([*(other.peer or "" for other in receivers), *hops]))
        found += [
            HopShare(
                sender=history.name,
                receiver=names.get(peer, peer[-8:]),
                microbatches=hops[peer],
                share=hops[peer] / max(1, hops.total()),
                even=1 / max(1, len(receivers)),
            )
            for peer in peers
        ]
    return tuple(found)


def _bytes(histories: Sequence[PeerHistory]) -> dict[str, ByteTotals]:
    ledgers = [history.ledger for history in histories]
    purposes = sorted({purpose for ledger in ledgers for purpose in (*ledger.sent, *ledger.received)})
    return {
        purpose: ByteTotals(
            sent=sum(ledger.sent[purpose] for ledger in ledgers),
            received=sum(ledger.received[purpose] for ledger in ledgers),
        )
        for purpose in purposes
    }


def lines(summary: Summary, scores: ModelScores | None) -> list[str]:
    """Return the summary as plain text; without scores only what the journals tell."""
    text = [] if scores is None else _score_lines(summary, scores)
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


def _score_lines(summary: Summary, scores: ModelScores) -> list[str]:
    low, high = min(scores.replicas.values()), max(scores.replicas.values())
    rows = [
        ("merged model", scores.merged, f"{scores.merged / scores.unigram:.2f} of the byte unigram entropy"),
        (
            "single replicas",
            scores.single,
            f"each in its stage's place: mean of {len(scores.replicas)}, {low:.3f} to {high:.3f}",
        ),
        ("byte unigrams", scores.unigram, "entropy: what counting bytes alone could reach"),
    ]
    return [
        f"Validation on {scores.tokens:,} held-out tokens, {summary.parameters:,} parameters",
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
    """Return a line for each stage with each peer's share of its work."""
    drawn = {peer.name: peer.drawn_tokens for peer in summary.peers if peer.stage == 0}
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
