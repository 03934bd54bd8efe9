"""A newcomer copies the state of its stage from living replicas, and says how it gets on.

What is copied, and what becomes of it when a donor dies, is `gossip.transfer.download`'s. Here are the peers that are
asked, what their word is compared with, the lines that a person reads, and the journal.

A donor is compared with its stage before a byte of its weights is fetched: its round, its progress and its norm with
what up to `OUTLINES_ASKED` other replicas say (a small question: nothing is frozen for it). Records of the roster have
no voice: any number of names may stand there, and who answers has a state at least.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from gossip.exchange.messages import Manifest, Parts, ReplicaState, Section, StateRequest
from gossip.transfer import download
from gossip.transfer.assembly import ChunkArrived, ChunkStore, DonorLost, DonorSelected, News, StateAssembly
from gossip.transfer.chunks import cut
from gossip.transfer.download import OF_ANY_RUN, Converse, MomentBounds, NormVotes, StateWanted, manifest_of, objection
from noloco_node.journal import events
from noloco_node.machine.interface import Reporter, Runner, StageModel
from noloco_node.network.interface import PeerNetwork
from noloco_node.network.schema import Schema
from noloco_node.run.protocols import STATE, state_schema, topic
from noloco_node.state_sync.replica_mean import ReplicaSummary
from noloco_node.storage.checkpoint import Checkpoint
from noloco_node.units import format_bytes, format_duration, format_rate

COPY_AGAIN_S = 10.0
"""Before all donors are asked again, when none gave its state; half as long again each time."""
LONGEST_PAUSE_S = 120.0
SAY_EVERY_S = 5.0
OUTLINES_ASKED = 2
"""Other replicas that a donor is compared with."""
OUTLINE_S = 10.0
"""For another replica to say how far it is."""


class DownloadLink(NamedTuple):
    """How the weights come to us. `deadline_s`: for all that one donor gives."""

    network: PeerNetwork
    device: Runner
    deadline_s: float


def pause_s(attempts: int) -> float:
    """Return how long to wait before the donors are asked again, after so many attempts in vain."""
    return min(LONGEST_PAUSE_S, COPY_AGAIN_S * 1.5 ** min(attempts - 1, 20))


def own_sections(checkpoint: Checkpoint) -> dict[Section, tuple[Tensor, ...]]:
    """Return what of a checkpoint a copy may find equal pieces in."""
    tensors = checkpoint.tensors
    moments = tensors.get("optimiser", ())
    half = len(moments) // 2
    return {
        Section.SLOW: tensors["slow"],
        Section.MOMENTUM: tensors.get("momentum", ()),
        Section.GATHERED: tensors.get("gathered", ()),
        Section.FIRST: moments[:half],
        Section.SECOND: moments[half:],
    }


class StateDownload:
    """The copy of one stage's state, over as many attempts as it takes; what has come stays between them."""

    def __init__(
        self,
        number: int,
        stage: StageModel,
        line: DownloadLink,
        reporter: Reporter,
        keep: ChunkStore | None,
        own: Checkpoint | None = None,
        moments: MomentBounds = OF_ANY_RUN,
    ) -> None:
        """`moments`: how large the optimiser's tensors of this run can be."""
        self._moments = moments
        self._number, self._line, self._own, self._keep = number, line, own, keep
        self._schema = state_schema(stage.shapes)
        self._like = tuple(torch.empty(shape, device="meta") for shape in stage.shapes)
        self._account = DownloadAccount(number, reporter, asyncio.get_running_loop().time)
        self._assembly = StateAssembly(self._like, keep, self._account.note)

    async def attempt(self, donors: tuple[str, ...]) -> ReplicaState | str:
        """Return the state, or why no donor has completed it."""
        if self._own is not None:
            own, self._own = self._own, None
            await self._line.device.run(self._assembly.load)
            await self._line.device.run(self._assembly.seed, own_sections(own))

        async def refuse(donor: str, manifest: Manifest) -> str | None:
            # Anew each time: the donor before this one may have taken an hour.
            asked = [peer for peer in donors if peer != donor][:OUTLINES_ASKED]
            answers = await asyncio.gather(*[self._ask_outline(peer) for peer in asked])
            others = [answer for answer in answers if answer is not None]
            votes = NormVotes(
                rounds=[other.round for other in others],
                progress=[other.progress for other in others],
                norms=[other.norm for other in others],
            )
            return objection(manifest, votes)

        wanted = download.StateWanted(
            parts=Parts.ALL,
            like=self._like,
            deadline_s=self._line.deadline_s,
            objection=refuse,
            moments=self._moments,
        )
        try:
            state = await download.download_state(donors, self._converse, wanted, self._line.device.run, self._assembly)
        except ConnectionError as error:
            return str(error)
        finally:
            # Whoever is asked to leave in the middle never comes to `discard`.
            if self._keep is not None:
                self._keep.rest()
            self._account.close()
        self._account.done(self._assembly.mixed)
        return state

    def discard(self) -> None:
        """Remove what was kept on the disk, the state being where it belongs."""
        if self._keep is not None:
            self._keep.discard()

    async def _ask_outline(self, peer: str) -> Manifest | None:
        """Return the counters of a replica and the norm of its slow weights, if it says them in time."""
        try:
            async with asyncio.timeout(OUTLINE_S), self._converse(peer) as conversation:
                request = StateRequest(parts=Parts.OUTLINE)
                reply = await download.manifest_of(conversation, request, len(self._assembly.spans))
        except (ConnectionError, TimeoutError):
            return None
        return reply if isinstance(reply, Manifest) else None

    def _converse(self, peer: str) -> download.Talk:
        return self._line.network.talk(peer, topic(STATE, self._number), self._schema)


class DownloadAccount:
    """What a person reads of a copy, and its journal."""

    def __init__(self, stage: int, reporter: Reporter, now: Callable[[], float]) -> None:
        self._stage, self._reporter, self._now = stage, reporter, now
        self._begun_s: float | None = None
        self._donor: str | None = None
        self._round = self._total_bytes = self._held_bytes = self._fetched_bytes = 0
        self._since_s = self._said_s = 0.0
        self._since_bytes = 0

    def note(self, news: News) -> None:
        """Take note of what a copy says."""
        if self._begun_s is None:
            self._begun_s = self._now()
        match news:
            case DonorSelected():
                self._follow(news)
            case ChunkArrived():
                self._fetched_bytes += news.size_bytes
                self._held_bytes += news.size_bytes
                self._tell()
            case DonorLost():
                self._record("refused" if news.refused else "lost", news.donor, news.why)
                if news.refused:
                    self._reporter.say(f"refused the copy of {news.donor}: {news.why}")
                else:
                    self._reporter.say(f"lost {news.donor} while copying from it ({news.why}); what came is kept")

    def close(self) -> None:
        """Take the bar away."""
        if self._reporter.draw is not None:
            self._reporter.draw(1.0, "")

    def done(self, mixed: bool) -> None:
        """Say that all is here."""
        seconds = self._seconds()
        rate = f" at {format_rate(self._fetched_bytes / seconds)}" if seconds > 0 else ""
        of_two = "; its parameters are those of more than one replica" if mixed else ""
        self._reporter.say(
            f"copied stage {self._stage}: {format_bytes(self._fetched_bytes)} in {format_duration(seconds)}"
            f"{rate}{of_two}"
        )
        self._record("done", self._donor)

    def _follow(self, news: DonorSelected) -> None:
        self._donor, self._round = news.donor, news.round
        self._total_bytes, self._held_bytes = news.total_bytes, news.held_bytes
        self._since_s = self._said_s = self._now()
        self._since_bytes = self._fetched_bytes
        what = "mixed" if news.settled_bytes else "resumed" if news.held_bytes else "began"
        words = {
            "began": format_bytes(news.total_bytes),
            "resumed": f"{format_bytes(news.held_bytes)} of {format_bytes(news.total_bytes)} are here already",
            "mixed": f"{format_bytes(news.held_bytes)} of {format_bytes(news.total_bytes)} are here already,"
            f" {format_bytes(news.settled_bytes)} of them whole parameters of another replica, which stay",
        }
        self._reporter.say(f"copying stage {self._stage} from {news.donor} (round {news.round}): {words[what]}")
        self._record(what, news.donor)

    def _tell(self) -> None:
        seconds = self._now() - self._since_s
        rate = (self._fetched_bytes - self._since_bytes) / seconds if seconds > 0 else 0.0
        line = progress_line(self._stage, self._held_bytes, self._total_bytes, rate)
        share = self._held_bytes / self._total_bytes if self._total_bytes else 1.0
        drawn = self._reporter.draw is not None and self._reporter.draw(share, line)
        if not drawn and self._now() - self._said_s >= SAY_EVERY_S:
            self._said_s = self._now()
            self._reporter.say(line)

    def _seconds(self) -> float:
        return 0.0 if self._begun_s is None else self._now() - self._begun_s

    def _record(self, what: str, donor: str | None, why: str | None = None) -> None:
        self._reporter.record(
            events.CatchUp(
                what=what,
                stage=self._stage,
                donor=donor,
                round=self._round,
                total_bytes=self._total_bytes,
                held_bytes=self._held_bytes,
                fetched_bytes=self._fetched_bytes,
                seconds=self._seconds(),
                why=why,
            )
        )


def progress_line(stage: int, held_bytes: int, total_bytes: int, bytes_per_s: float) -> str:
    """Return how far a copy is, in words."""
    share = held_bytes / total_bytes if total_bytes else 1.0
    text = f"copying stage {stage}: {format_bytes(held_bytes)} of {format_bytes(total_bytes)} ({share:.0%})"
    if bytes_per_s <= 0.0:
        return text
    return f"{text}, {format_rate(bytes_per_s)}, {format_duration((total_bytes - held_bytes) / bytes_per_s)} left"


def waiting_line(stage: int, since_unix_s: float, now_unix_s: float, again_s: float) -> str:
    """Return for what a newcomer waits whom no donor serves, since when, and what to do."""
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(since_unix_s))
    return (
        f"waiting for a replica of stage {stage} that gives its state, since {since}"
        f" ({format_duration(now_unix_s - since_unix_s)}); asking again in {format_duration(again_s)}. If this lasts:"
        " can their addresses (noloco-node status) be reached from here? Or serve another stage with --stage, or Ctrl-C"
    )


SNAPSHOT = "snapshot"
"""The topic of those who keep snapshots of a stage."""
PATIENCE_S = 10.0
ASKED_AT_ONCE = 8


class WeightsOf(NamedTuple):
    """A stage whose weights are asked for. `kind`: STATE of its replicas, SNAPSHOT of peers that keep one."""

    number: int
    shapes: tuple[tuple[int, ...], ...]
    kind: str

    @property
    def weight_bytes(self) -> int:
        """Of the slow weights."""
        return 4 * sum(map(prod, self.shapes))

    @property
    def schema(self) -> Schema:
        """What is said about them."""
        return state_schema(self.shapes)

    def converse(self, network: PeerNetwork) -> Converse:
        """Return how to talk about them with a peer."""
        return lambda peer: network.talk(peer, topic(self.kind, self.number), self.schema)

    def wanted(self, deadline_s: float) -> StateWanted:
        """Return what to ask for: the slow weights alone."""
        like = tuple(torch.empty(shape, device="meta") for shape in self.shapes)
        return StateWanted(parts=Parts.SLOW, like=like, deadline_s=deadline_s)


def copying_s(weight_bytes: int, slowest_bytes_per_s: float) -> float:
    """Return how long a whole state may take over the slowest line: five sections, each as large as the weights."""
    return 60.0 + len(Section) * weight_bytes / slowest_bytes_per_s


class ManifestReplies(NamedTuple):
    """What was said: by those who answered, and by how many that they are busy with others just now."""

    manifests: dict[str, Manifest]
    busy: int


async def ask_manifests(network: PeerNetwork, peers: Iterable[str], subject: WeightsOf) -> ManifestReplies:
    """Return what each peer says of its weights, round and norm, as far as they answer soon."""
    turns, pieces = asyncio.Semaphore(ASKED_AT_ONCE), len(cut([4 * prod(shape) for shape in subject.shapes]))
    converse, told, busy = subject.converse(network), dict[str, Manifest](), list[str]()

    async def ask(peer: str) -> None:
        async with turns:
            try:
                async with asyncio.timeout(PATIENCE_S), converse(peer) as conversation:
                    reply = await manifest_of(conversation, StateRequest(parts=Parts.OUTLINE), pieces)
            except (ConnectionError, TimeoutError):
                return
            if isinstance(reply, Manifest):
                told[peer] = reply
            else:
                busy.append(peer)

    async with asyncio.TaskGroup() as group:
        for peer in peers:
            group.create_task(ask(peer))
    return ManifestReplies({peer: told[peer] for peer in sorted(told)}, len(busy))


def standings(told: Mapping[str, Manifest]) -> list[ReplicaSummary]:
    """Return what peers said, for a comparison."""
    return [
        ReplicaSummary(
            peer=peer, round=each.round, inner_steps=each.inner_steps, progress=each.progress, norm=each.norm
        )
        for peer, each in told.items()
    ]
