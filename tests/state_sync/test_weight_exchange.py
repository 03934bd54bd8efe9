"""The weights that a run starts from travel from whoever has them, and lies are noticed."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from toy_gossip import at_once

from noloco_node.errors import Exit, UserError, user_error_of
from noloco_node.network.interface import Conversation
from noloco_node.sim.network.sim_network import SimNetwork
from noloco_node.state_sync import weight_exchange
from noloco_node.state_sync.weight_exchange import SCHEMA, TOPIC, FileContent, WeightDownload, WeightServer
from noloco_node.storage import weight_store
from noloco_node.storage.weight_store import MOST_HELD_BYTES, PIECE_BYTES, FilePieceKey, WeightStore, described
from noloco_node.tasks import loop_s


class Crowd:
    """Newcomers and peers of one file, 0.1 s away from each other; `asked`: how often each peer was asked."""

    def __init__(self, directory: Path, pieces: int = 4) -> None:
        self.hub, self.directory, self.asked = SimNetwork(), directory, Counter[str]()
        self._lines = 0
        path = directory / "owner" / "long.safetensors"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"".join(number.to_bytes(4, "little") * (PIECE_BYTES // 4) for number in range(pieces)))
        self.file = described(path)
        self.whole = WeightStore.whole(path.parent, [self.file])
        self.keys = self.whole.all_pieces()

    def store(self, name: str, held: Sequence[int] = ()) -> WeightStore:
        store = WeightStore.filling(self.directory / name, [self.file])
        store.learn(0, self.whole.digests(0) or b"")
        for number in held:
            store.write(self.keys[number], self.whole.read(self.keys[number]) or b"")
        return store

    async def serve(self, name: str, store: WeightStore) -> None:
        async def job(function: Callable[..., Any], *arguments: Any) -> Any:
            self.asked[name] += 1
            await asyncio.sleep(0.1)
            return function(*arguments)

        await self.hub.network(name).serve(TOPIC, SCHEMA, WeightServer(store, job).serve)

    async def owner(self) -> None:
        await self.serve("owner", self.whole)

    def newcomer(self, name: str, **more: Any) -> tuple[WeightStore, WeightDownload]:
        """Return a newcomer that has no digests yet, or what an earlier life of that name has left."""
        store = WeightStore.filling(self.directory / name, [self.file])
        self._lines += 1
        return store, WeightDownload(self.hub.network(f"{name}, line {self._lines}"), store, at_once, **more)


async def test_each_newcomer_has_all_and_asks_the_others_first(tmp_path: Path) -> None:
    crowd, told = Crowd(tmp_path), list[tuple[int, int]]()
    await crowd.owner()
    first, download = crowd.newcomer("first", tell=lambda *so_far: told.append(so_far))
    assert await download.digests(["owner"])
    assert await download.pieces(crowd.keys, ["owner"])
    assert told[-1][1] == 4
    assert (tmp_path / "first" / crowd.file.file).read_bytes() == (tmp_path / "owner" / crowd.file.file).read_bytes()
    await crowd.serve("first", first)
    before = crowd.asked["owner"]
    second, download = crowd.newcomer("second")
    assert await download.digests(["first", "owner"])
    assert await download.pieces(crowd.keys[:2], ["first"])
    assert crowd.asked["owner"] == before
    assert second.missing(crowd.keys) == crowd.keys[2:]


async def test_nobody_there_and_nobody_who_has_it_is_no_error(tmp_path: Path) -> None:
    crowd = Crowd(tmp_path)
    await crowd.serve("empty", WeightStore.filling(tmp_path / "empty", [crowd.file]))
    store, download = crowd.newcomer("newcomer")
    assert not await download.digests(["nobody", "empty"])
    await crowd.owner()
    assert await download.digests(["nobody", "empty", "owner"])
    assert not await download.pieces(crowd.keys, [])
    assert not await download.pieces(crowd.keys, ["nobody", "empty"])
    assert store.missing(crowd.keys) == crowd.keys


Reply = Callable[[Any], Any]


@pytest.mark.parametrize("lie", [lambda _: FileContent(content=b"x" * 600_000), lambda asked: asked])
async def test_a_liar_is_not_believed_and_the_next_one_is_asked(tmp_path: Path, lie: Reply) -> None:
    crowd = Crowd(tmp_path)
    await crowd.owner()

    async def answer(conversation: Conversation) -> None:
        while True:
            await conversation.send(lie(await conversation.receive()))

    await crowd.hub.network("liar").serve(TOPIC, SCHEMA, answer)
    store, download = crowd.newcomer("newcomer")
    assert not await download.digests(["liar"])
    assert await download.digests(["liar", "owner"])
    assert not await download.pieces(crowd.keys, ["liar"])
    assert store.missing(crowd.keys) == crowd.keys
    assert await download.pieces(crowd.keys, ["liar", "owner"])


async def test_a_download_that_was_cut_goes_on_where_it_was(tmp_path: Path) -> None:
    crowd = Crowd(tmp_path)
    await crowd.owner()
    come = 0

    def dying(*_: int) -> None:
        nonlocal come
        come += 1
        if come == 2:
            raise asyncio.CancelledError

    store, download = crowd.newcomer("newcomer", tell=dying)
    assert await download.digests(["owner"])
    cut = asyncio.create_task(download.pieces(crowd.keys, ["owner"]))
    await asyncio.wait([cut])
    here = 4 - len(store.missing(crowd.keys))
    assert 2 <= here < 4
    crowd.asked.clear()
    again, download = crowd.newcomer("newcomer")
    assert again.digests(0) is not None, "the digests are kept"
    assert await download.pieces(crowd.keys, ["owner"])
    assert crowd.asked["owner"] == 4 - here


async def test_what_strangers_ask_costs_little(tmp_path: Path) -> None:
    crowd = Crowd(tmp_path)
    await crowd.owner()
    stranger = crowd.hub.network("stranger")
    async with asyncio.TaskGroup() as group:
        turned_away = list[str]()

        async def occupy() -> None:
            try:
                async with stranger.talk("owner", TOPIC, SCHEMA) as conversation:
                    await conversation.receive()
            except ConnectionError as loss:
                turned_away.append(str(loss))

        for _ in range(weight_exchange.STREAMS + 3):
            group.create_task(occupy())
    assert len(turned_away) == weight_exchange.STREAMS + 3, "the idle ones end, too"
    # Nobody's place is taken for good.
    _, download = crowd.newcomer("newcomer")
    assert await download.digests(["owner"])


async def test_peers_are_asked_for_what_they_have(tmp_path: Path) -> None:
    """Peers without a piece cost some questions altogether, and the first piece comes at once."""
    crowd, came = Crowd(tmp_path, 40), list[float]()
    empty = [f"empty-{number:02}" for number in range(12)]
    for name in empty:
        await crowd.serve(name, crowd.store(name))
    # Pieces of an earlier life are announced too: the store is opened anew.
    crowd.store("half", range(0, 40, 2))
    await crowd.serve("half", crowd.store("half"))
    await crowd.serve("owner", crowd.whole)
    store, begun = crowd.store("newcomer"), loop_s()
    network = crowd.hub.network("newcomer")
    download = WeightDownload(network, store, at_once, lambda *_: came.append(loop_s() - begun))
    assert await download.pieces(crowd.keys[:1], [*empty, "half", "owner"])
    assert await download.pieces(crowd.keys, [*empty, "half", "owner"])
    assert came[0] < 3.0
    assert came[-1] < 6.0
    assert all(crowd.asked[name] <= weight_exchange.STREAMS for name in empty)
    assert crowd.asked["half"] + crowd.asked["owner"] <= 40 + 2 * weight_exchange.STREAMS
    assert crowd.asked["half"] >= 15


async def test_a_peer_that_had_nothing_is_asked_again_after_a_while(tmp_path: Path) -> None:
    crowd = Crowd(tmp_path, 8)
    late = crowd.store("late")
    await crowd.serve("late", late)
    store = crowd.store("newcomer")
    download = WeightDownload(crowd.hub.network("newcomer"), store, at_once)
    assert not await download.pieces(crowd.keys, ["late"])
    asked = crowd.asked["late"]
    for key in crowd.keys:
        late.write(key, crowd.whole.read(key) or b"")
    assert not await download.pieces(crowd.keys, ["late"])
    assert crowd.asked["late"] == asked
    await asyncio.sleep(weight_exchange.ASK_AGAIN_S)
    assert await download.pieces(crowd.keys, ["late"])


@given(st.lists(st.booleans(), min_size=1, max_size=20), st.binary(max_size=4))
async def test_what_a_peer_announces_costs_no_more_than_it_gives(has: list[bool], told: bytes) -> None:
    """Whatever a peer says that it has, right or wrong: it is asked for a piece in vain once, and all others come."""
    hub, asked, here = SimNetwork(), Counter[int](), set[FilePieceKey]()

    async def serve(peer: str, gives: Callable[[int], bool]) -> None:
        async def answer(conversation: Conversation) -> None:
            while True:
                number = (await conversation.receive()).number
                asked[number] += 1
                given = gives(number)
                reply = FileContent(content=b"a piece" if given else b"", held=b"" if given else told)
                await conversation.send(reply)

        await hub.network(peer).serve(TOPIC, SCHEMA, answer)

    class Store:
        directory = Path()

        def missing(self, keys: Sequence[FilePieceKey]) -> list[FilePieceKey]:
            return [key for key in keys if key not in here]

        def check_room(self, pieces: int) -> None: ...

        def write(self, key: FilePieceKey, data: bytes) -> None:
            here.add(key)

    keys = [FilePieceKey(0, number) for number in range(len(has))]
    await serve("peer", has.__getitem__)
    await serve("owner", lambda _: True)
    store: Any = Store()
    download = WeightDownload(hub.network("newcomer"), store, at_once)
    assert await download.pieces(keys, ["peer", "owner"])
    assert max(asked.values()) <= 2 + weight_exchange.STREAMS


@pytest.mark.parametrize(("names", "pause_s"), [(8, weight_exchange.PATIENCE_S - 1.0), (40, 59.0), (8, 0.0)])
async def test_peers_that_take_all_streams_keep_no_newcomer_out(tmp_path: Path, names: int, pause_s: float) -> None:
    """Whether they hardly ask or ask at once again: a stream that stands still, or of a peer with many, gives way."""
    crowd = Crowd(tmp_path, 8)
    await crowd.serve("owner", crowd.whole)

    async def hold(name: str) -> None:
        while True:
            with suppress(ConnectionError):
                async with crowd.hub.network(name).talk("owner", TOPIC, SCHEMA) as conversation:
                    while True:
                        await conversation.send(weight_exchange.FilePieceRequest(file=0, number=0))
                        await conversation.receive()
                        await asyncio.sleep(pause_s)
            await asyncio.sleep(1.0 if pause_s else 0.5)

    count = weight_exchange.STREAMS_SERVED + (8 if pause_s else 0)
    holders = [asyncio.create_task(hold(f"name {n % names}")) for n in range(count)]
    await asyncio.sleep(10.0)
    begun = loop_s()
    download = WeightDownload(crowd.hub.network("newcomer"), crowd.store("newcomer"), at_once)
    tries = [await download.pieces(crowd.keys, ["owner"]) for _ in range(3 if pause_s else 1)]
    assert tries[-1]
    assert loop_s() - begun < 30.0
    for holder in holders:
        holder.cancel()


@pytest.mark.parametrize("slow", [1, 4, 9])
async def test_peers_that_give_slowly_hold_nobody_up_and_are_enough_alone(tmp_path: Path, slow: int) -> None:
    crowd, names, taken_s = Crowd(tmp_path, 24), [f"slow {number}" for number in range(slow)], 50.0

    async def give(conversation: Conversation) -> None:
        while True:
            number = (await conversation.receive()).number
            await asyncio.sleep(taken_s)
            await conversation.send(FileContent(content=crowd.whole.read(crowd.keys[number]) or b""))

    for name in names:
        await crowd.hub.network(name).serve(TOPIC, SCHEMA, give)
    await crowd.owner()
    took_s = []
    for peers in ([*names, "owner"], names):
        begun, network = loop_s(), crowd.hub.network(f"newcomer of {len(peers)}")
        assert await WeightDownload(network, crowd.store(network.peer_id), at_once).pieces(crowd.keys, peers)
        took_s.append(loop_s() - begun)
    tried_s = (1 + slow / weight_exchange.STREAMS) * weight_exchange.SLOW_S
    assert took_s[0] < tried_s + 10.0
    assert took_s[1] < tried_s + 24 / min(slow, weight_exchange.STREAMS) * taken_s + 10.0


@pytest.mark.parametrize("silent", [1, 12])
async def test_peers_that_answer_nothing_hold_nobody_up_for_a_minute_each(tmp_path: Path, silent: int) -> None:
    """Anybody may put many names into the roster, before those of the bootstrap peers."""
    crowd, peers = Crowd(tmp_path, 24), [*(f"silent {number}" for number in range(silent)), "owner"]
    for name in peers[:-1]:
        await crowd.hub.network(name).serve(TOPIC, SCHEMA, lambda _: asyncio.sleep(1000.0))
    await crowd.owner()
    _, download = crowd.newcomer("newcomer")
    began_s, patience_s = loop_s(), weight_exchange.PATIENCE_S
    assert await download.digests(peers)
    assert loop_s() - began_s < 1.1 * patience_s
    began_s = loop_s()
    assert await download.pieces(crowd.keys[:1], peers)
    assert await download.pieces(crowd.keys, peers)
    assert loop_s() - began_s < (1.1 + silent / weight_exchange.STREAMS) * patience_s


async def test_what_a_peer_says_that_it_has_takes_no_more_memory_than_the_largest_file_needs(tmp_path: Path) -> None:
    crowd = Crowd(tmp_path)

    async def boast(conversation: Conversation) -> None:
        while True:
            await conversation.receive()
            await conversation.send(FileContent(content=b"", held=bytes(2**19)))

    await crowd.hub.network("boaster").serve(TOPIC, SCHEMA, boast)
    download = WeightDownload(crowd.hub.network("newcomer"), crowd.store("newcomer"), at_once)
    assert not await download.pieces(crowd.keys, ["boaster"])
    assert sum(len(each.pieces) for each in download._held.values()) <= MOST_HELD_BYTES


async def test_a_peer_without_the_digests_of_a_file_is_not_asked_for_those_of_the_next(tmp_path: Path) -> None:
    """It may take a minute for each answer, and a checkpoint may have hundreds of files."""
    crowd, asked = Crowd(tmp_path), Counter[int]()

    async def nothing(conversation: Conversation) -> None:
        while True:
            asked[(await conversation.receive()).file] += 1
            await conversation.send(FileContent(content=b""))

    await crowd.hub.network("empty").serve(TOPIC, SCHEMA, nothing)
    files = [structs.replace(crowd.file, file=f"{number}.safetensors") for number in range(9)]
    store = WeightStore.filling(tmp_path / "newcomer", files)
    assert not await WeightDownload(crowd.hub.network("newcomer"), store, at_once).digests(["empty"])
    assert asked == {0: 1}


async def test_a_disk_that_an_earlier_process_filled_is_looked_at_in_short_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_store, "LOOKED_AT_ONCE", 4)
    crowd, most = Crowd(tmp_path, 24), 0
    crowd.store("half", range(12))
    half = crowd.store("half")

    async def job(function: Callable[..., Any], *arguments: Any) -> Any:
        nonlocal most
        with monkeypatch.context() as patch:
            read, count = half.read, Counter[str]()
            patch.setattr(half, "read", lambda key: (count.update(["read"]), read(key))[1])
            found = function(*arguments)
        most = max(most, count["read"])
        return found

    await crowd.hub.network("half").serve(TOPIC, SCHEMA, WeightServer(half, job).serve)
    store = crowd.store("newcomer")
    assert not await WeightDownload(crowd.hub.network("newcomer"), store, at_once).pieces(crowd.keys, ["half"])
    assert store.missing(crowd.keys) == crowd.keys[12:]
    assert most == 5


async def test_a_disk_that_refuses_ends_it_with_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crowd = Crowd(tmp_path)
    await crowd.owner()
    store, download = crowd.newcomer("newcomer")
    assert await download.digests(["owner"])

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "write", full)
    with pytest.raises(BaseExceptionGroup) as caught:
        await download.pieces(crowd.keys, ["owner"])
    trouble = user_error_of(caught.value)
    assert trouble.code is Exit.STORAGE
    assert "cannot be kept" in trouble.what
    monkeypatch.setattr(store, "check_room", full)
    with pytest.raises(UserError, match="cannot be kept"):
        await download.pieces(crowd.keys, ["owner"])
