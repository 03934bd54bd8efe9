"""Gives a newcomer the run file, and the progress of the run when its peers were last seen.

An invite names the digest of the run file. The newcomer takes the text from the first peer that answers, and drops it
unless its digest agrees.

Bootstrap peers and nodes keep the progress of the run in their homes (`RunHistory`), so that no newcomer begins the run
anew by mistake. No peer vouches for that number; it only delays a newcomer, and `--begin-anew` overrules it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low
from typing import NoReturn

import msgspec

from noloco_node.admission.admission_state import not_admitted, not_for, told
from noloco_node.errors import Exit, UserError, one_line
from noloco_node.network.calls import ask, patient
from noloco_node.network.interface import Conversation, PeerNetwork, UnknownTopic
from noloco_node.network.schema import LONG_HEADER_BYTES, MessageSpec, Schema
from noloco_node.network.swarm_clock import CLOCK
from noloco_node.run.config import RunConfig
from noloco_node.run.runfile import check_paths, content_hashes, decode_run, run_digest
from noloco_node.storage import atomic_file
from noloco_node.swarm.membership import Membership
from noloco_node.swarm.roster import Roster
from noloco_node.swarm.shards import FOLLOWED
from noloco_node.terminal import say
from noloco_node.units import Fraction, UnixSeconds

TOPIC = "run"
PATIENCE_S = 20.0
ATTEMPTS = 4
ATTEMPT_EVERY_S = 5.0
"""A peer is reached a moment before it serves the run: after a power cut, all of a swarm starts at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRequest:
    """Asks for the run file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFileReply:
    """The run file as its author wrote it (TOML with comments), and the sender's time of day (Unix seconds)."""

    text: str
    unix_time: UnixSeconds


SCHEMA = Schema(
    {RunRequest: MessageSpec("RunRequest"), RunFileReply: MessageSpec("RunFile", header_bytes=LONG_HEADER_BYTES)}
)


class RunFileText:
    """A run file: `text` as written, `run` decoded, `digest` the run's id."""

    def __init__(self, text: str, origin: str, allowed: Sequence[str] | None = None) -> None:
        """Decode `text`; raise `UserError` naming the wrong field. `origin`: names the source in messages.

        `allowed`: the directories of this machine that it may name; None for our own file.
        """
        self.text = text
        self.run: RunConfig = decode_run(text, origin)
        if allowed is not None:
            check_paths(self.run, allowed)
        self.digest = run_digest(self.run, content_hashes(self.run))

    @classmethod
    def made(cls, run: RunConfig) -> RunFileText:
        """Return the text of a run without a file; no peer can fetch it."""
        recipe = cls.__new__(cls)
        recipe.text, recipe.run = "", run
        recipe.digest = run_digest(run, content_hashes(run))
        return recipe

    def membership(self, network: PeerNetwork, shards: int = FOLLOWED) -> Membership:
        """Return the view of this run's peers that a peer has which does not train; `shards`: as for `Membership`."""
        return Membership(network, self.digest, self.run.pipeline.stages, shards=shards)

    async def serve(self, conversation: Conversation) -> None:
        """Answer one `RunRequest`."""
        async with patient(conversation, PATIENCE_S):
            await conversation.receive()
            await conversation.send(RunFileReply(text=self.text, unix_time=CLOCK.unix_s()))


class _PerhapsStartingError(UserError):
    """No peer serves the run, and one that could not be reached may in a moment."""


async def fetch(network: PeerNetwork, peers: Sequence[str], digest: str, allowed: Sequence[str] = ()) -> RunFileText:
    """Return the run file with this digest from the first of `peers` that has it; raise `UserError` if none does.

    `allowed`: the directories of this machine that it may name.
    """
    for left in reversed(range(1, ATTEMPTS)):
        try:
            return await _from_first(network, peers, digest, allowed)
        except _PerhapsStartingError as trouble:
            again = f"asking again in {ATTEMPT_EVERY_S:.0f} s, {left} more time{'s' * (left > 1)}"
            say(f"waiting for a peer that serves the run file ({trouble.why}); {again}")
            await asyncio.sleep(ATTEMPT_EVERY_S)
    return await _from_first(network, peers, digest, allowed)


async def _from_first(network: PeerNetwork, peers: Sequence[str], digest: str, allowed: Sequence[str]) -> RunFileText:
    answers, kind, code = list[str](), UserError, Exit.UNREACHABLE
    for peer in peers:
        try:
            reply = await ask(network, peer, TOPIC, SCHEMA, RunRequest(), RunFileReply, PATIENCE_S)
        except ConnectionError as error:
            answers.append(str(error) if peer in str(error) else f"{peer}: {error}")
            kind, code = _PerhapsStartingError, Exit.OTHER_RUN if isinstance(error, UnknownTopic) else code
            continue
        code = Exit.OTHER_RUN
        try:
            recipe = await asyncio.to_thread(RunFileText, reply.text, f"the run file from {peer}", allowed)
        except UserError as trouble:  # that peer's text, or a directory that is not here: the next may do better
            answers.append(one_line(f"{peer}: {trouble.what} {trouble.why}"))
            continue
        if recipe.digest != digest:
            answers.append(f"{peer}: serves a run with the digest {recipe.digest[:12]}")
            continue
        return recipe
    refusals = [found for each in answers if (found := each.partition(not_for(network.peer_id))[2])]
    if refusals:
        raise not_admitted(told(refusals))
    raise kind(
        f"No peer of the invite serves the run {digest[:12]}.",
        why="; ".join(answers) or "the invite names nobody but us",
        hint="ask whoever sent the invite for a fresh one; if the model or the tokenizer is a local directory, it must "
        "hold the same files here as there, and be allowed with --local",
        code=code,
    )


HISTORY_TOPIC = "reached"
HISTORY_PATIENCE_S = 10.0
STEP = 0.01
"""Progress between two writes."""
LEAST = 1e-9
"""The progress kept of a run that was begun, and whose replicas report none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReachedRequest:
    """Asks for the progress of the run when the peer last saw a node at work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReachedReply:
    """The progress of the run, 0 to 1; 0: the peer has seen no replica that had finished a round."""

    progress: Fraction


HISTORY_SCHEMA = Schema({ReachedRequest: MessageSpec("ReachedRequest"), ReachedReply: MessageSpec("Reached")})


class _Note(msgspec.Struct, frozen=True):
    progress: Fraction


class RunHistory:
    """The progress of a run that a home remembers; 0 if no replica it saw had finished a round."""

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self._file = atomic_file.KeptFile(path, "how far the run is", say)
        self.progress = self._written = self._read()

    async def follow(self, membership: Membership) -> NoReturn:
        while True:
            self.note(await membership.changed())

    def note(self, roster: Roster) -> None:
        """Note the median progress of the replicas that have finished a round."""
        found = [record.progress for records in roster.stages for record in records if record.round > 0]
        if not found:
            return
        self.progress = max(LEAST, median_low(found))
        due = not self._written or abs(self.progress - self._written) >= STEP or self.progress == 1.0 > self._written
        if due and self._file.write(msgspec.json.encode(_Note(self.progress))):
            self._written = self.progress

    async def serve(self, conversation: Conversation) -> None:
        """Answer one `ReachedRequest`."""
        async with patient(conversation, HISTORY_PATIENCE_S):
            await conversation.receive()
            await conversation.send(ReachedReply(progress=self.progress))

    def _read(self) -> float:
        try:
            return msgspec.json.decode(self._file.path.read_bytes(), type=_Note).progress
        except (OSError, ValueError):
            return 0.0


async def reached(network: PeerNetwork, peers: Sequence[str]) -> float:
    """Return the furthest progress that these peers remember; 0 if none knows or answers."""
    return max(await asyncio.gather(*[_asked(network, peer) for peer in peers]), default=0.0)


async def _asked(network: PeerNetwork, peer: str) -> float:
    try:
        reply = await ask(
            network, peer, HISTORY_TOPIC, HISTORY_SCHEMA, ReachedRequest(), ReachedReply, HISTORY_PATIENCE_S
        )
    except ConnectionError:
        return 0.0
    return reply.progress
