"""The states that a peer announces."""

from __future__ import annotations

from enum import StrEnum


class PeerState(StrEnum):
    """What a peer is doing, in one word."""

    JOINING = "joining"
    CATCHING_UP = "catching up"
    TRAINING = "training"
    FINISHED = "finished"
    LEAVING = "leaving"


AT_WORK = (PeerState.TRAINING, PeerState.FINISHED)
"""States in which a replica holds weights of the run."""
