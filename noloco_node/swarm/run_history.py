"""How far a run had come when its peers were last seen, so that nobody begins it anew without knowing.

Bootstrap peers and nodes keep it in their homes and tell whoever asks. It is what replicas that had finished a round
said of themselves, their median: nobody vouches for it, and so it only ever holds a newcomer up, who may be told to
begin all the same (`noloco_node.node.joining.state_source`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low
from typing import NoReturn

import msgspec

from noloco_node.errors import reason_of
from noloco_node.network.interface import Conversation, PeerNetwork, ask, patient
from noloco_node.network.schema import MessageSpec, Schema
from noloco_node.storage import atomic_file
from noloco_node.swarm.membership import Membership
from noloco_node.swarm.roster import Roster
from noloco_node.units import Fraction

TOPIC = "reached"
PATIENCE_S = 10.0
STEP = 0.01
"""Of progress, after which it is written anew."""
LEAST = 1e-9
"""Progress of a run of which nothing is known but that it was begun."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReachedRequest:
    """How far had the run come when you last saw anybody at work?"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReachedReply:
    """The progress of the run, 0 to 1; 0: no replica has been seen that had finished a round."""

    progress: Fraction


SCHEMA = Schema({ReachedRequest: MessageSpec("ReachedRequest"), ReachedReply: MessageSpec("Reached")})


class _Note(msgspec.Struct, frozen=True):
    run_id: str
    progress: Fraction


class RunHistory:
    """What one home remembers of a run: `progress`, 0 where it has seen nobody who had finished a round."""

    def __init__(self, path: Path, run_id: str, say: Callable[[str], None]) -> None:
        self._path, self._run_id, self._say = path, run_id, say
        self._refused = False
        self.progress = self._written = self._read()

    async def follow(self, membership: Membership) -> NoReturn:
        """Note what the roster says, until cancelled."""
        while True:
            self.note(await membership.changed())

    def note(self, roster: Roster) -> None:
        """Note how far the replicas are that have finished a round."""
        found = [record.progress for records in roster.stages for record in records if record.round > 0]
        if not found:
            return
        self.progress = max(LEAST, median_low(found))
        if not self._written or abs(self.progress - self._written) >= STEP or self.progress == 1.0 > self._written:
            self._write()

    async def serve(self, conversation: Conversation) -> None:
        """Answer one `ReachedRequest`."""
        async with patient(conversation, PATIENCE_S):
            await conversation.receive()
            await conversation.send(ReachedReply(progress=self.progress))

    def _read(self) -> float:
        try:
            note = msgspec.json.decode(self._path.read_bytes(), type=_Note)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return 0.0
        return note.progress if note.run_id == self._run_id else 0.0

    def _write(self) -> None:
        try:
            atomic_file.write(self._path, msgspec.json.encode(_Note(self._run_id, self.progress)))
        except OSError as error:
            if not self._refused:
                self._say(f"cannot note in {self._path} how far the run is: {reason_of(error)}")
            self._refused = True
        else:
            self._written, self._refused = self.progress, False


async def reached(network: PeerNetwork, peers: Sequence[str]) -> float:
    """Return the furthest that any of these peers has seen the run at; 0 where none knows, or none answers."""
    return max(await asyncio.gather(*[_asked(network, peer) for peer in peers]), default=0.0)


async def _asked(network: PeerNetwork, peer: str) -> float:
    try:
        reply = await ask(network, peer, TOPIC, SCHEMA, ReachedRequest(), ReachedReply, PATIENCE_S)
    except ConnectionError:  # of an older version, say, that does not remember
        return 0.0
    return reply.progress
