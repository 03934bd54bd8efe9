"""What an invite holds to get into a run that has an owner: nothing but the right to ask, an invitation, or a ticket.

open              ask a bootstrap peer for a ticket
i<base64>         an invitation: a key, and the owner's grant for it; its holder signs its own peer id
t<base64>         the ticket of one peer id
"""

from __future__ import annotations

import base64
import binascii

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from noloco_node.admission.peer_keys import KEY_BYTES, key_of
from noloco_node.admission.ticket import TICKET_BYTES, Chain, Right, decode, encode, extended

LOOK_S = 3600
"""For which a temporary identity may look."""
_TEXT_CHARACTERS = 2 * TICKET_BYTES


class InviteCredential(msgspec.Struct, frozen=True):
    """`seed`: of an invitation's private key, for which the chain's last grant is; else it is for a peer."""

    chain: Chain = ()
    seed: bytes = b""

    def __str__(self) -> str:
        if not self.chain:
            return "open"
        raw = base64.urlsafe_b64encode(self.seed + encode(self.chain)).decode().rstrip("=")
        return ("i" if self.seed else "t") + raw

    def __repr__(self) -> str:
        """Return no secret."""
        return f"InviteCredential({'open' if not self.chain else 'invitation' if self.seed else 'ticket'})"

    def ticket(
        self, run: str, peer: str, rights: Right, unix_s: float, own_key: Ed25519PrivateKey | None
    ) -> bytes | None:
        """Return the ticket of a peer, as far as this credential makes one; None where one must be asked for.

        `own_key`: of the identity at home, which lets a temporary one look. Raises ValueError where the credential is
        somebody else's.
        """
        subject = key_of(peer)
        if subject is None:
            raise ValueError("the identity of this peer is not an Ed25519 key")
        if not self.chain:
            return None
        last = self.chain[-1]
        if self.seed:
            key = Ed25519PrivateKey.from_private_bytes(self.seed)
            until = last.until if Right.TRAIN in rights else min(last.until, int(unix_s) + LOOK_S)
            return encode(extended(self.chain, key, run, rights, until, subject))
        if last.subject == subject:
            return encode(self.chain)
        if own_key is not None and last.subject == own_key.public_key().public_bytes_raw() and rights == Right.LOOK:
            until = min(last.until, int(unix_s) + LOOK_S)
            return encode(extended(self.chain, own_key, run, rights, until, subject))
        raise ValueError("the invite is for another identity than that of this home")


def parse_credential(text: str) -> InviteCredential:
    """Return the credential that a text is; ValueError says what is wrong with it."""
    if text == "open":
        return InviteCredential()
    if len(text) > _TEXT_CHARACTERS or text[:1] not in ("i", "t"):
        raise ValueError("what stands behind the # is no credential")
    try:
        raw = base64.urlsafe_b64decode(text[1:] + "=" * (-len(text[1:]) % 4))
    except (binascii.Error, ValueError):
        raise ValueError("what stands behind the # is damaged") from None
    seed, raw = (raw[:KEY_BYTES], raw[KEY_BYTES:]) if text[0] == "i" else (b"", raw)
    chain = decode(raw)
    if chain is None or len(seed) not in (0, KEY_BYTES):
        raise ValueError("what stands behind the # is damaged")
    return InviteCredential(chain, seed)
