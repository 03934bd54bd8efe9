"""The weights that a run starts from travel from whoever has them, and lies are noticed."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from toy_gossip import at_once
from weight_files import write_file

from noloco_node.errors import Exit, UserError, user_error_of
from noloco_node.network.interface import Conversation
from noloco_node.sim.clock import run
from noloco_node.sim.network.sim_network import SimNetwork
from noloco_node.state_sync import weight_exchange
from noloco_node.state_sync.weight_exchange import SCHEMA, TOPIC, FileContent, WeightDownload, WeightServer
from noloco_node.storage.weight_store import FilePieceKey, WeightStore

KEYS = [FilePieceKey(0, number) for number in range(4)]


class Swarm:
    """An owner of one file, and newcomers."""

    def __init__(self, directory: Path) -> None:
        self.hub, self.directory = SimNetwork(), directory
        self.file = write_file(directory / "owner" / "a.safetensors")
        self.given: Counter[str] = Counter()
        self._lines = 0

    async def owner(self) -> None:
        await self.serve("owner", WeightStore.whole(self.directory / "owner", [self.file]))

    async def serve(self, name: str, store: WeightStore) -> None:
        read, given = store.read, self.given

        def counting(key: FilePieceKey) -> bytes | None:
            content = read(key)
            given[name] += content is not None
            return content

        store.read = counting  # type: ignore[method-assign]
        await self.hub.network(name).serve(TOPIC, SCHEMA, WeightServer(store, at_once).serve)

    def newcomer(self, name: str, **more: Any) -> tuple[WeightStore, WeightDownload]:
        store = WeightStore.filling(self.directory / name, [self.file])
        self._lines += 1
        return store, WeightDownload(self.hub.network(f"{name}, line {self._lines}"), store, at_once, **more)


def test_each_newcomer_has_all_and_asks_the_others_first(tmp_path: Path) -> None:
    async def main() -> None:
        swarm, told = Swarm(tmp_path), list[tuple[int, int]]()
        await swarm.owner()
        first, download = swarm.newcomer("first", tell=lambda *so_far: told.append(so_far))
        assert await download.digests(["owner"])
        assert await download.pieces(KEYS, ["owner"])
        assert told[-1][1] == 4
        assert (tmp_path / "first" / "a.safetensors").read_bytes() == (
            tmp_path / "owner" / "a.safetensors"
        ).read_bytes()
        await swarm.serve("first", first)
        before = swarm.given["owner"]
        second, download = swarm.newcomer("second")
        assert await download.digests(["first", "owner"])
        assert await download.pieces(KEYS[:2], ["first"])
        assert swarm.given["owner"] == before
        assert second.missing(KEYS) == KEYS[2:]

    run(main())


def test_nobody_there_and_nobody_who_has_it_is_no_error(tmp_path: Path) -> None:
    async def main() -> None:
        swarm = Swarm(tmp_path)
        await swarm.serve("empty", WeightStore.filling(tmp_path / "empty", [swarm.file]))
        store, download = swarm.newcomer("newcomer")
        assert not await download.digests(["nobody", "empty"])
        await swarm.owner()
        assert await download.digests(["nobody", "empty", "owner"])
        assert not await download.pieces(KEYS, [])
        assert not await download.pieces(KEYS, ["nobody", "empty"])
        assert store.missing(KEYS) == KEYS

    run(main())


Reply = Callable[[Any], Any]


@pytest.mark.parametrize("lie", [lambda _: FileContent(content=b"x" * 600_000), lambda asked: asked])
def test_a_liar_is_not_believed_and_the_next_one_is_asked(tmp_path: Path, lie: Reply) -> None:
    async def main() -> None:
        swarm = Swarm(tmp_path)
        await swarm.owner()

        async def answer(conversation: Conversation) -> None:
            while True:
                await conversation.send(lie(await conversation.receive()))

        await swarm.hub.network("liar").serve(TOPIC, SCHEMA, answer)
        store, download = swarm.newcomer("newcomer")
        assert not await download.digests(["liar"])
        assert await download.digests(["liar", "owner"])
        assert not await download.pieces(KEYS, ["liar"])
        assert store.missing(KEYS) == KEYS
        assert await download.pieces(KEYS, ["liar", "owner"])

    run(main())


def test_a_download_that_was_cut_goes_on_where_it_was(tmp_path: Path) -> None:
    async def main() -> None:
        swarm = Swarm(tmp_path)
        await swarm.owner()
        come = 0

        def dying(*_: int) -> None:
            nonlocal come
            come += 1
            if come == 2:
                raise asyncio.CancelledError

        store, download = swarm.newcomer("newcomer", tell=dying)
        assert await download.digests(["owner"])
        cut = asyncio.create_task(download.pieces(KEYS, ["owner"]))
        await asyncio.wait([cut])
        here = 4 - len(store.missing(KEYS))
        assert 2 <= here < 4
        swarm.given.clear()
        again, download = swarm.newcomer("newcomer")
        assert again.digests(0) is not None, "the digests are kept"
        assert await download.pieces(KEYS, ["owner"])
        assert swarm.given["owner"] == 4 - here

    run(main())


def test_what_strangers_ask_costs_little(tmp_path: Path) -> None:
    async def main() -> None:
        swarm = Swarm(tmp_path)
        await swarm.owner()
        stranger = swarm.hub.network("stranger")
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
        _, download = swarm.newcomer("newcomer")
        assert await download.digests(["owner"])

    run(main())


def test_a_disk_that_refuses_ends_it_with_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        swarm = Swarm(tmp_path)
        await swarm.owner()
        store, download = swarm.newcomer("newcomer")
        assert await download.digests(["owner"])

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(store, "write", full)
        with pytest.raises(BaseExceptionGroup) as caught:
            await download.pieces(KEYS, ["owner"])
        trouble = user_error_of(caught.value)
        assert trouble is not None
        assert trouble.code is Exit.STORAGE
        assert "cannot be kept" in trouble.what
        monkeypatch.setattr(store, "check_room", full)
        with pytest.raises(UserError, match="cannot be kept"):
            await download.pieces(KEYS, ["owner"])

    run(main())
