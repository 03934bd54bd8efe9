"""Keys by number, of which 0 is the owner's, and tickets of a run."""

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from noloco_node.admission.admission_hook import AdmissionHook
from noloco_node.admission.admission_state import AdmissionState
from noloco_node.admission.ticket import MEMBER, encode, grant
from noloco_node.network.calls import HookedNetwork
from noloco_node.network.interface import PeerNetwork

RUN = "5" * 64
NOW_S = 1_800_000_000


def key(number: int) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(number.to_bytes(32))


def public(number: int) -> bytes:
    return key(number).public_key().public_bytes_raw()


OWNER = public(0)


def member(number: int, until: int = NOW_S + 10**6) -> bytes:
    """Return a ticket that the owner has signed for a peer."""
    return encode((grant(key(0), RUN, MEMBER, until, public(number)),))


def admitted(network: PeerNetwork, state: AdmissionState, ticket: bytes) -> HookedNetwork:
    return HookedNetwork(network, AdmissionHook(network, state, ticket))
