"""A replica asks living partners for a meeting, where its roster is a sample and some of the listed are dead."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from noloco_node.run.peer_state import PeerState
from noloco_node.swarm.partners import Partners
from noloco_node.swarm.roster import PeerRecord, Roster
from noloco_node.swarm.shards import StageSize


def roster(steps: dict[str, int], *, sampled: bool) -> Roster:
    records = [PeerRecord(peer=p, stage=0, state=PeerState.TRAINING, inner_steps=n) for p, n in steps.items()]
    return Roster(stages=(tuple(records),), sizes=(StageSize(1000.0, 0.1),) if sampled else ())


@given(st.sets(st.sampled_from("abcdefgh"), min_size=1), st.sets(st.sampled_from("abcdefgh")), st.booleans())
def test_who_could_not_be_reached_is_left_out_until_there_is_news(
    listed: set[str], lost: set[str], sampled: bool
) -> None:
    now = roster(dict.fromkeys(["me", *sorted(listed)], 1), sampled=sampled)
    partners = Partners("me", 0, lambda: now)
    assert {each.peer for each in partners()} == listed
    for peer in sorted(lost):
        partners.lose(peer)
    there = {each.peer for each in partners()}
    lost &= listed
    assert there == (listed - lost if sampled and 2 * len(lost) <= len(listed) else listed)
    assert partners() is partners()
    now = msgspec.structs.replace(now, read_at=5.0)
    assert {each.peer for each in partners()} == there, "the same records are no news"
    now = roster(dict.fromkeys(sorted(listed), 2), sampled=sampled)
    assert {each.peer for each in partners()} == listed
