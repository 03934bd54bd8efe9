"""Whatever donors and lives a copy has had, each unit is of one replica, and no counter is better than its worst."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

from hypothesis import given
from hypothesis import strategies as st
from state_copies import LIKE, state
from torch import Tensor, equal

from gossip.exchange.messages import Manifest, ReplicaState, Section
from gossip.transfer.assembly import Key, StateAssembly
from gossip.transfer.chunks import StateCut, digest, gather, held_sections, tensors_of
from gossip.transfer.donor import _manifest

CUT = StateCut([4 * tensor.numel() for tensor in LIKE])
DONORS = 3


class Disk:
    """What an assembly has told of its pieces, for the next life."""

    def __init__(self) -> None:
        self.followed: tuple[Manifest | None, frozenset[int]] = (None, frozenset())
        self.kept: dict[Key, tuple[bytes, Tensor]] = {}

    def follow(self, manifest: Manifest | None, settled: frozenset[int]) -> None:
        self.followed = (manifest, settled)

    def put(self, key: Key, digest: bytes, data: Tensor) -> None:
        self.kept[key] = (digest, data)

    def pieces(self) -> Iterator[tuple[Key, bytes, Tensor]]:
        return ((key, *each) for key, each in self.kept.items())

    def last(self) -> tuple[Manifest | None, frozenset[int]]:
        return self.followed

    def discard(self) -> None: ...


class Then(Enum):
    """What happens after some pieces have come."""

    GOES_ON = "goes on"
    RESTARTS = "restarts"
    LIED = "lied"


def piece(whole: ReplicaState, key: Key) -> Tensor:
    return gather(tensors_of(whole, key.section), CUT.of(key.section)[key.number])


def manifest_of(whole: ReplicaState) -> Manifest:
    hashes = {
        section: tuple(digest(piece(whole, Key(section, number))) for number in range(len(CUT.spans)))
        for section in held_sections(whole)
    }
    return _manifest(whole, 1.0, hashes)


steps = st.tuples(st.integers(0, DONORS - 1), st.floats(0.0, 1.0), st.sampled_from(Then))


@given(
    st.lists(steps, max_size=5),
    st.integers(0, DONORS - 1),
    st.lists(st.integers(0, 5), min_size=DONORS, max_size=DONORS),
)
def test_a_copy_is_as_stale_as_the_stalest_donor_of_a_part_of_it(
    before: list[tuple[int, float, Then]], last: int, met: list[int]
) -> None:
    wholes = [state(seed, last_met=each) for seed, each in enumerate(met)]
    manifests, disk = [manifest_of(whole) for whole in wholes], Disk()
    held = StateAssembly(LIKE, keep=disk)
    held.load()
    for donor, share, then in [*before, (last, 1.0, Then.GOES_ON)]:
        needed, _ = held.follow(manifests[donor], str(donor))
        for key in needed[: round(share * len(needed))]:
            held.put(key, piece(wholes[donor], key).clone())
        if then is Then.LIED:
            held.forget()
        if then is Then.RESTARTS:
            held = StateAssembly(LIKE, keep=disk)
            held.load()
    found = held.state()
    origins = dict[int, set[int]]()
    for span in CUT.spans:
        for part in span.parts:
            for section in Section:
                if tensors_of(found, section):
                    mine = tensors_of(found, section)[part.tensor]
                    those = {
                        n for n, whole in enumerate(wholes) if equal(mine, tensors_of(whole, section)[part.tensor])
                    }
                    origins[span.unit] = origins.get(span.unit, set(range(DONORS))) & those
    assert all(origins.values())
    assert found.last_met <= min(met[donor] for donors in origins.values() for donor in donors)
