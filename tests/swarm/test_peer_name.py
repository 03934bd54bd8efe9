"""Names of peers: checked where an owner gives one, harmless where a stranger does."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_swarms import recipe

from noloco_node.cli.status import picture
from noloco_node.errors import UserError
from noloco_node.observe.roster_observer import RosterObserver
from noloco_node.observe.screen import lines
from noloco_node.run.peer_state import PeerState
from noloco_node.sim.network.sim_network import SimNetwork
from noloco_node.swarm.membership import Membership
from noloco_node.swarm.roster import MOST_LETTERS, Given, PeerRecord, Roster, checked_name, shown_name
from noloco_node.tasks import loop_s


@pytest.mark.parametrize("name", ["alice", "Jürgen's box", "GPU 4090 [attic]", "机器"])
def test_plain_names_are_kept(name: str) -> None:
    assert checked_name(name) == name
    assert checked_name(None) == checked_name("") == ""


@pytest.mark.parametrize("name", ["x" * 25, " a", "a  b", "a\nb", "\x1b[2J", "a\u202eb", "e\u0301\u0302", "\u200b"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(UserError, match="is no name"):
        checked_name(name)


@given(st.text(max_size=300))
def test_what_a_stranger_calls_itself_is_shown_harmless(name: str) -> None:
    shown = shown_name(name)
    assert shown.isprintable()
    assert len(shown) <= MOST_LETTERS
    assert shown_name(shown) == shown
    assert not any(unicodedata.combining(letter) for letter in shown)


def test_a_name_stands_beside_the_id_and_never_in_its_place() -> None:
    record = PeerRecord(peer="12D3KooWabcdefgh", stage=0, state=PeerState.TRAINING, name="[red]ijklmnop\x1b[2J")
    run_file, roster = recipe(), Roster(stages=((record,), ()))
    [peer] = RosterObserver(run_file.run, run_file.digest).view(roster, 1e9).peers
    assert peer.name == "abcdefgh [red]ijklmnop[2J"
    assert "\x1b" not in "".join(lines(RosterObserver(run_file.run, run_file.digest).view(roster, 1e9)))
    assert "Names:\n abcdefgh [red]ijklmnop[2J" in picture(run_file, roster)


async def test_a_name_and_what_was_given_are_published_with_every_record() -> None:
    hub, given = SimNetwork(), Given(1000, 200, 110, 10)
    one, other = (
        Membership(hub.network(name), "run", 1, unix_time=loop_s, name=name, given=lambda: given)
        for name in ("one", "other")
    )
    await one.claim(PeerRecord(peer="one", stage=0, state=PeerState.TRAINING))
    published = (await other.peek()).stages[0][0]
    assert (published.name, published.given) == ("one", Given(1000, 200, 110, 10))
