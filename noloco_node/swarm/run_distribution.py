"""The run file on its way from peer to peer: anyone may serve it, and its digest says whether it is the right one.

An invite names the digest; the text comes from whichever peer answers first. Nothing of a wrong text is believed: it is
decoded, its digest computed, and the text thrown away unless the two agree.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from noloco_node.admission.admission_state import not_admitted, not_for, told
from noloco_node.errors import Exit, UserError
from noloco_node.network.interface import Conversation, PeerNetwork
from noloco_node.network.question import ask, patient
from noloco_node.network.schema import LONG_HEADER_BYTES, MessageSpec, Schema
from noloco_node.run.config import RunConfig
from noloco_node.run.runfile import check_paths, content_hashes, decode_run, run_digest
from noloco_node.units import UnixSeconds

TOPIC = "run"
PATIENCE_S = 20.0
JOINING_CLOCK_ERROR_S = 60.0
"""With more, others refuse our records as made in the future, or take them for old."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRequest:
    """Send me the run file, please."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFileReply:
    """The run file as its author wrote it (TOML, comments included), and the sender's time of day (Unix seconds)."""

    text: str
    unix_time: UnixSeconds


SCHEMA = Schema(
    {RunRequest: MessageSpec("RunRequest"), RunFileReply: MessageSpec("RunFile", header_bytes=LONG_HEADER_BYTES)}
)


class RunFileText:
    """A run file and what it says: `text` as written, `run` decoded, `digest` the run's id."""

    def __init__(self, text: str, origin: str, allowed: Sequence[str] | None = None) -> None:
        """Decode `text`; raise `UserError` naming the field at fault. `origin` is where it came from, for messages.

        `allowed`: the directories of this machine that it may name; None where the file is our own.
        """
        self.text = text
        self.run: RunConfig = decode_run(text, origin)
        if allowed is not None:
            check_paths(self.run, allowed)
        self.digest = run_digest(self.run, content_hashes(self.run))

    @classmethod
    def made(cls, run: RunConfig) -> RunFileText:
        """Return that of a run that was never a file: nobody can fetch it."""
        recipe = cls.__new__(cls)
        recipe.text, recipe.run = "", run
        recipe.digest = run_digest(run, content_hashes(run))
        return recipe

    async def serve(self, conversation: Conversation) -> None:
        """Answer one `RunRequest`."""
        async with patient(conversation, PATIENCE_S):
            await conversation.receive()
            await conversation.send(RunFileReply(text=self.text, unix_time=time.time()))


def check_clock(ahead_s: float, peer: str) -> None:
    """Raise `UserError` if our clock is so far from a peer's that records would expire too early or too late."""
    if abs(ahead_s) > JOINING_CLOCK_ERROR_S:
        raise UserError(
            f"This machine's clock is {abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} a peer's.",
            why=f"{peer} says so, and records of who is there expire by the time of day",
            hint="set the clock (timedatectl set-ntp true); if it is right, ask that peer's owner to set theirs",
            code=Exit.UNREACHABLE,
        )


async def fetch(network: PeerNetwork, peers: Sequence[str], digest: str, allowed: Sequence[str] = ()) -> RunFileText:
    """Return the run file with this digest from the first of `peers` that has it; raise `UserError` if none does.

    `allowed`: the directories of this machine that it may name.
    """
    answers: list[str] = []
    for peer in peers:
        try:
            reply = await ask(network, peer, TOPIC, SCHEMA, RunRequest(), RunFileReply, PATIENCE_S)
        except ConnectionError as error:
            answers.append(f"{peer}: {error}")
            continue
        try:
            recipe = RunFileText(reply.text, f"the run file from {peer}", allowed)
        except UserError as trouble:  # that peer's text, or a directory that is not here: the next may do better
            answers.append(f"{peer}: {trouble.what} {trouble.why}")
            continue
        if recipe.digest == digest:
            check_clock(time.time() - reply.unix_time, peer)
            return recipe
        answers.append(f"{peer}: serves a run with the digest {recipe.digest[:12]}")
    refusals = [found for each in answers if (found := each.partition(not_for(network.peer_id))[2])]
    if refusals:
        raise not_admitted(told(refusals))
    raise UserError(
        f"No peer of the invite serves the run {digest[:12]}.",
        why="; ".join(answers),
        hint="ask whoever sent the invite for a fresh one; if the model or the tokenizer is a local directory, it must "
        "hold the same files here as there, and be allowed with --local",
        code=Exit.OTHER_RUN,
    )
