"""What a run with an owner adds to the network: peers that talk with us, or whose records we read, have shown a ticket.

Before the first conversation with a peer we show ours (topic `admit`). The peer remembers it, and checks it before a
handler runs and at every message. Every record carries its peer's ticket, and records without a good one are not read.
The list of revocations goes along with both: a peer that has a later one hands it on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from noloco_node.admission.admission_state import (
    EXPIRED,
    AdmissionState,
    HeldTicket,
    addressed,
    not_admitted,
    not_for,
    stamped,
    told,
    unstamped,
)
from noloco_node.admission.ticket import LIST_BYTES, TICKET_BYTES, Right
from noloco_node.errors import Exit, UserError
from noloco_node.network.calls import HookedConversation, ask, patient
from noloco_node.network.interface import Conversation, NetworkHook, PeerNetwork, Records
from noloco_node.network.schema import MessageSpec, Schema, Violation

TOPIC = "admit"
PATIENCE_S = 20.0
FOR_LOOKERS = ("run", "reached", "doctor", "state", "snapshot", "tokenizer")
"""The topics of a peer that may only look; all others are for peers that train."""
LIST_LIFETIME_S = 600.0
ENOUGH_COPIES = 8  # so many copies of the list in the DHT are enough
GRACE_S = 600.0  # we go on so long with an expired ticket while no signing peer answers
SHOWN_EVERY_S = 15.0
"""So often a ticket is shown again, to one peer after the other: a peer that is shut out reads no list in the DHT."""
MOST_TRIES = 4  # tickets of ours that are tried, one after the other, where they are refused
_MOST_WELCOMES = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class ShowTicket:
    """My ticket, and the latest list of revocations that I know."""

    ticket: bytes
    revocations: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class TicketVerdict:
    """Why you are not let in, empty where you are; and the latest list that I know."""

    refusal: str
    revocations: bytes


SCHEMA = Schema({ShowTicket: MessageSpec("ShowTicket"), TicketVerdict: MessageSpec("TicketVerdict")})


class AdmissionHook(NetworkHook):
    """The tickets of one member, or of a visitor.

    `network`: on which tickets are shown. `ticket`: our own, or one that is never replaced.
    """

    def __init__(self, network: PeerNetwork, state: AdmissionState, ticket: HeldTicket | bytes) -> None:
        self._network, self._state = network, state
        self.held = state.own = HeldTicket.fixed(ticket) if isinstance(ticket, bytes) else ticket
        self._welcomes: dict[str, bytes] = {}
        """Which ticket of ours each peer has taken last; another one is shown anew."""
        self._answers = False
        self._list_told: tuple[bytes, float] = b"", 0.0  # the list that we have published last, and when (loop seconds)
        self._expired_since_s: float | None = None

    async def enter(self, peers: Sequence[str]) -> None:
        """Show our ticket to the first of these peers that answers; `UserError` if all that answer refuse it."""
        refusals: list[str] = []
        for peer in peers:
            try:
                await self._show(peer)
                return
            except PermissionError as refusal:
                refusals.append(str(refusal))
            except ConnectionError:
                continue
        if refusals:
            raise not_admitted(told(refusals))

    async def calling(self, peer: str, dial: Callable[[], Awaitable[Conversation]]) -> Conversation:
        self.check(peer)
        await self.introduce(peer)
        try:
            return await dial()
        except ConnectionError as error:
            self.lost(peer, error)
            raise

    def lost(self, peer: str, error: ConnectionError) -> None:
        """Show our ticket again before the next call: the peer may have started anew, and know us no more."""
        self._welcomes.pop(peer, None)

    def opened(self, conversation: Conversation, topic: str) -> Conversation:
        """Check the peer of a conversation that we opened, and keep our ticket known to it."""
        return _Opened(conversation, self, self._state)

    def check(self, peer: str, *, expiry: bool = True) -> None:
        """Raise ConnectionRefusedError where we do not talk with a peer. `expiry`: nor when its ticket has expired."""
        why = self._state.known_refusal(peer)
        if why and (expiry or why != EXPIRED):
            raise ConnectionRefusedError(f"{peer} is no member: {why}")

    async def introduce(self, peer: str) -> None:
        """Have a peer know a good ticket of ours; ConnectionRefusedError where it does not let us in."""
        if self.held.is_expired:
            with suppress(UserError):  # which the next reading of records raises
                await self.held.another(addressed(EXPIRED))
        if self._welcomes.get(peer) == self.held.raw:
            return
        try:
            await self._show(peer)
        except PermissionError as refusal:
            raise ConnectionRefusedError(f"{peer} does not let us in: {refusal}") from None

    async def before_serve(self) -> None:
        if not self._answers:
            self._answers = True
            await self._network.serve(TOPIC, SCHEMA, self._admit)

    @contextmanager
    def answering(self, conversation: Conversation, topic: str) -> Iterator[Conversation]:
        right = Right.LOOK if topic.partition("/")[0] in FOR_LOOKERS else Right.TRAIN
        checked = _Answered(conversation, self._state, right)
        checked.check()
        yield checked

    async def stay_shown(self) -> NoReturn:
        """Show our ticket again and again, to one peer at a time: its answer brings a later list of revocations."""
        while True:
            await asyncio.sleep(SHOWN_EVERY_S)
            for peer in tuple(self._welcomes)[:1]:
                # Known meanwhile, or each message of a call would wait for a showing of its own.
                self._welcomes[peer] = self._welcomes.pop(peer)
                try:
                    await self._show(peer)
                except (ConnectionError, PermissionError):
                    self._welcomes.pop(peer, None)

    def stamped(self, value: bytes) -> bytes:
        return stamped(self.held.raw, value)

    async def read(
        self, read_all: Callable[[Sequence[str]], Awaitable[Sequence[Records]]], keys: Sequence[str]
    ) -> list[Records]:
        """Return the records of members alone; `UserError` where we are a member no more."""
        *found, lists = await read_all([*keys, self._list_key])
        copies = 0
        if lists is not None:
            copied = list(self._of_members(lists).values())
            for raw in copied:
                self._state.take_revocations(raw)
            copies = copied.count(self._state.raw_revocations)
        await self._tell_list(copies)
        await self._remain_member()
        return [None if records is None else self._of_members(records) for records in found]

    async def _remain_member(self) -> None:
        """Give a ticket of ours that is refused up for another one; `UserError` where there is none.

        An expired ticket harms nobody but us. So where no signing peer answers, as after a sleep, we wait for one.
        """
        for _ in range(MOST_TRIES):
            why = self._state.show(self._network.peer_id, self.held.raw) if self._state.is_pinned else ""
            if not why:
                self._expired_since_s = None
                return
            try:
                await self.held.another(addressed(why))
            except UserError as error:
                if error.code is not Exit.UNREACHABLE:
                    raise
                if why != EXPIRED:
                    raise not_admitted(addressed(why)) from error
                now_s = asyncio.get_running_loop().time()
                if self._expired_since_s is None:
                    self._expired_since_s = now_s
                if now_s - self._expired_since_s > GRACE_S:
                    raise
                return
        raise not_admitted(addressed(why))

    def _of_members(self, records: Mapping[str, bytes]) -> dict[str, bytes]:
        # In an order: of two who hold one single-use invite the first stays.
        return {
            peer: unstamped(records[peer])[1] for peer in sorted(records) if self._state.accepts(peer, records[peer])
        }

    @property
    def _list_key(self) -> str:
        return f"{self._state.run}/revocations"

    async def _tell_list(self, copies: int) -> None:
        """Publish the list that we know, unless others have, or we have lately."""
        raw, now_s = self._state.raw_revocations, asyncio.get_running_loop().time()
        told, told_s = self._list_told
        due = raw != told or now_s - told_s > LIST_LIFETIME_S / 2
        if raw and Right.TRAIN in self.held.rights and due and copies < ENOUGH_COPIES:
            me, value = self._network.peer_id, self.stamped(raw)
            if await self._network.publish(self._list_key, me, value, LIST_LIFETIME_S):
                self._list_told = raw, now_s

    async def list_known_to(self, peer: str) -> int:
        """Hand a peer the list of revocations that we know, and return the number of the list that it has then.

        Raises PermissionError where it lets us not in, or a `ConnectionError`.
        """
        return self._state.number_of(await self._show(peer))

    async def _show(self, peer: str) -> bytes:
        """Show our ticket to a peer; return the list that it knows. PermissionError where it lets us not in."""
        shown = self.held.raw
        question = ShowTicket(ticket=shown, revocations=self._state.raw_revocations)
        answer = await ask(self._network, peer, TOPIC, SCHEMA, question, TicketVerdict, PATIENCE_S)
        self._state.take_revocations(answer.revocations[:LIST_BYTES])
        if answer.refusal:
            why = addressed(answer.refusal)
            in_time = why == addressed(EXPIRED) and not self.held.is_expired
            raise PermissionError(why + ", by that peer's clock alone: is this machine's clock right?" * in_time)
        self._welcomes[peer] = shown
        if len(self._welcomes) > _MOST_WELCOMES:
            del self._welcomes[next(iter(self._welcomes))]
        return answer.revocations[:LIST_BYTES]

    async def _admit(self, conversation: Conversation) -> None:
        async with patient(conversation, PATIENCE_S):
            shown = await conversation.receive()
            if not isinstance(shown, ShowTicket) or len(shown.ticket) > TICKET_BYTES:
                raise Violation("a caller about tickets shows one")
            self._state.take_revocations(shown.revocations[:LIST_BYTES])
            why = self._state.show(conversation.peer, shown.ticket)
            # A peer that is not let in learns nothing else.
            known = b"" if why and not self._state.was_member(conversation.peer) else self._state.raw_revocations
            await conversation.send(TicketVerdict(refusal=why, revocations=known))


class _Answered(HookedConversation):
    """Ends a conversation that we answer when its peer is shut out, or its ticket expires."""

    def __init__(self, conversation: Conversation, state: AdmissionState, right: Right) -> None:
        super().__init__(conversation)
        self._state, self._right = state, right

    def check(self) -> None:
        if self._right not in self._state.rights(self.peer):
            why = self._state.refusal(self.peer) or f"its ticket does not let it {self._right.name}".lower()
            raise ConnectionRefusedError(not_for(self.peer) + why)

    async def send(self, message: Any) -> None:
        self.check()
        await super().send(message)

    async def receive(self) -> Any:
        message = await super().receive()
        self.check()
        return message


class _Opened(HookedConversation):
    """Ends a conversation that we opened when the owner shuts its peer out; it goes on when our ticket changes.

    That a ticket of the peer has expired does not end it: the peer may have another one, of which we have not read yet.
    """

    def __init__(self, conversation: Conversation, admission: AdmissionHook, state: AdmissionState) -> None:
        super().__init__(conversation)
        self._admission, self._state = admission, state

    @property
    def is_quiet(self) -> bool:
        return super().is_quiet and self._state.known_refusal(self.peer) in ("", EXPIRED)

    async def send(self, message: Any) -> None:
        self._admission.check(self.peer, expiry=False)
        await self._admission.introduce(self.peer)
        await super().send(message)

    async def receive(self) -> Any:
        message = await super().receive()
        self._admission.check(self.peer, expiry=False)
        with suppress(ConnectionError):  # the message is there; the next one will show whether the peer is
            await self._admission.introduce(self.peer)
        return message
