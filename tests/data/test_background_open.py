"""What is opened ahead is opened once, and closed whatever becomes of it."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from limits import LAST_RESORT_S

from noloco_node.data import blocks
from noloco_node.data.blocks import Blocks, ShuffledBlocks
from noloco_node.data.text_source import BackgroundOpen, TextSource
from noloco_node.run.presets import demo_run_text
from noloco_node.run.runfile import decode_run

OPENS_S = 5.0
RUN = decode_run(demo_run_text(stages=2, replicas=2, steps=100, seed=0), "the test's run file")


def source(directory: Path) -> TextSource:
    (directory / "text.txt").write_text("".join(f"line {number} of a text\n" for number in range(2000)))
    return TextSource(RUN, str(directory / "text.txt"), "peer", 384)


class Text:
    """Something that counts how often it is closed."""

    def __init__(self, trouble: Exception | None = None) -> None:
        self.closed = self.read = 0
        self._trouble = trouble

    def read_ahead(self) -> None:
        self.read += 1
        if self._trouble is not None:
            raise self._trouble

    def close(self) -> None:
        self.closed += 1


@pytest.fixture(autouse=True)
def threads_in_virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def later(job: Any, *args: Any) -> Any:
        await asyncio.sleep(OPENS_S)
        return job(*args)

    monkeypatch.setattr(asyncio, "to_thread", later)


@given(
    begins=st.lists(st.floats(0.0, 20.0), max_size=3),
    asks=st.lists(st.floats(0.0, 20.0), max_size=3),
    patience_s=st.floats(0.1, 10.0),
    closes_s=st.floats(0.0, 30.0),
)
async def test_it_is_opened_once_as_soon_as_anybody_wants_it_and_closed_once(
    begins: list[float], asks: list[float], patience_s: float, closes_s: float
) -> None:
    made: list[Text] = []
    got: list[tuple[Text, float]] = []

    def make() -> Text:
        made.append(Text())
        return made[-1]

    loop, opening = asyncio.get_running_loop(), BackgroundOpen(make)
    wanted_s = min((at for at in (*begins, *asks) if at < closes_s), default=None)

    async def ask(at_s: float) -> None:
        await asyncio.sleep(at_s)
        # Whoever gives up waiting takes it from nobody else.
        async with asyncio.timeout(patience_s):
            got.append((await opening.opened(), loop.time()))

    for at_s in begins:
        if at_s < closes_s:
            loop.call_later(at_s, opening.begin)
    tasks = [asyncio.create_task(ask(at_s)) for at_s in asks if at_s < closes_s]
    await asyncio.sleep(closes_s)
    opening.close()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(OPENS_S + 1.0)  # a text that was asked for at the very end is closed a turn after it is open
    assert len(made) == (wanted_s is not None)
    assert all(text is made[0] for text, _ in got)
    assert all(text.closed == 1 for text in made)
    if wanted_s is not None:
        in_time = [at_s for at_s in asks if at_s < closes_s and at_s + patience_s > wanted_s + OPENS_S + 1e-6]
        assert len(got) >= len(in_time)
        assert all(at_s >= wanted_s + OPENS_S - 1e-6 for _, at_s in got)


@pytest.mark.parametrize("begun", [True, False])
async def test_it_is_read_ahead_only_where_it_is_opened_ahead(begun: bool) -> None:
    opening = BackgroundOpen(Text)
    if begun:
        opening.begin()
    assert (await opening.opened()).read == begun


async def test_what_fails_ahead_is_closed_and_said() -> None:
    made: list[Text] = []

    def make() -> Text:
        made.append(Text(ValueError("nothing in it")))
        return made[-1]

    opening = BackgroundOpen(make)
    opening.begin()
    with pytest.raises(ValueError, match="nothing in it"):
        await opening.opened()
    opening.close()
    assert [text.closed for text in made] == [1]


@pytest.mark.real_time
async def test_a_text_that_was_read_ahead_is_where_it_was(tmp_path: Path) -> None:
    plain, ahead, again = (source(tmp_path) for _ in range(3))
    ahead.read_ahead()
    assert ahead.position() == plain.position()
    assert not await ahead.restore({**plain.position(), "chunk": {"source": "another one"}})
    drawn = [await plain.draw() for _ in range(3)]
    assert torch.equal(await ahead.draw(), drawn[0])
    assert ahead.position() == (position := ahead.position())
    again.read_ahead()
    assert await again.restore(position)
    assert again.position() == position
    for text in (ahead, again):
        assert torch.equal(await text.draw(), drawn[1])
    for text in (plain, ahead, again):
        text.close()


@pytest.mark.real_time
async def test_a_position_that_is_asked_for_while_the_thread_reads_is_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    length, batch = RUN.pipeline.sequence_length, RUN.pipeline.microbatch_size
    monkeypatch.setattr(blocks, "CHUNK_TOKENS", 3 * batch * length)
    text, again = source(tmp_path), source(tmp_path)
    reading, go_on = threading.Event(), threading.Event()
    read = Blocks.next_batch

    def slow_read(blocks: Blocks, size: int) -> torch.Tensor:
        reading.set()
        go_on.wait(LAST_RESORT_S)
        return read(blocks, size)

    for _ in range(4):  # a chunk, and the first batch of the next one, which was there
        await text.draw()
    with monkeypatch.context() as patch:
        patch.setattr(Blocks, "next_batch", slow_read)
        drawing = asyncio.ensure_future(text.draw())
        await asyncio.get_running_loop().run_in_executor(None, reading.wait, LAST_RESORT_S)
        position = text.position()
        go_on.set()
        drawn = await drawing
    assert await again.restore(position)
    assert torch.equal(await again.draw(), drawn)
    for opened in (text, again):
        opened.close()


async def test_what_cannot_be_opened_says_so_to_everybody_who_asks_and_to_nobody_else() -> None:
    def make() -> Text:
        raise FileNotFoundError("no such text")

    opening = BackgroundOpen(make)
    opening.begin()
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            await opening.opened()
    opening.close()
    unwanted = BackgroundOpen(make)
    unwanted.begin()
    unwanted.close()
    await asyncio.sleep(2 * OPENS_S)


@pytest.mark.real_time
async def test_a_text_is_read_in_one_thread_and_by_one_reader_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = source(tmp_path)
    threads: set[int] = set()
    inside: list[int] = []
    most = 0
    read = ShuffledBlocks.next_batch

    def noted(blocks: ShuffledBlocks, size: int) -> torch.Tensor:
        nonlocal most
        threads.add(threading.get_ident())
        inside.append(size)
        most = max(most, len(inside))
        try:
            return read(blocks, size)
        finally:
            inside.pop()

    monkeypatch.setattr(ShuffledBlocks, "next_batch", noted)
    for _ in range(5):
        given_up = asyncio.ensure_future(text.draw())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        given_up.cancel()
        loop = asyncio.get_running_loop()
        await asyncio.gather(text.draw(), *(loop.run_in_executor(None, int) for _ in range(2)))
    text.close()
    assert len(threads) == 1
    assert most == 1
