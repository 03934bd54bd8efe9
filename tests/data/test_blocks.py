"""Blocks of tokens: cut anywhere and restored they go on the same; nothing held out is ever trained on."""

from __future__ import annotations

import bz2
import errno
import gzip
import http.server
import itertools
import json
import lzma
import os
import random
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
import huggingface_hub
import msgspec
import pyarrow
import pyarrow.parquet
import pytest
import torch
from checkpoints import write_tokenizer
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, processors
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast
from user_errors import user_error

from noloco_node.data import dataset_documents
from noloco_node.data.blocks import Blocks, _documents, open_blocks
from noloco_node.data.dataset_documents import RowDocuments, check_source, load_rows
from noloco_node.data.encoding import check_vocabulary, encode_bytes, open_encoder, open_tokenizer, vocab_size
from noloco_node.data.file_documents import (
    FileDocuments,
    Part,
    ReadingOrder,
    TextRange,
    _text_of,
    find_files,
    is_held_out,
    parts_of,
    pieces_of,
    side_of,
    stdlib_files,
)
from noloco_node.data.row_forms import BadRow, GoodRow
from noloco_node.data.token_text import Prompts
from noloco_node.errors import NEEDS_A_PERSON, Exit, UserError
from noloco_node.run.config import DataConfig

END = 1
BYT5 = ByT5Tokenizer()
datasets.disable_progress_bars()


def text_of(number: int) -> str:
    return f"document {number} " + "xyz " * (number % 7) + f"end of {number}\n"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same 90 texts as files, as JSON Lines in three files, and as parquet in row groups of eight."""
    root = tmp_path_factory.mktemp("corpus")
    texts = [text_of(number) for number in range(90)]
    for number, text in enumerate(texts):
        file = root / "files" / f"part{number % 3}" / f"{number:03}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (root / "files" / ".hidden").write_text("never seen")
    (root / "files" / "binary.dat").write_bytes(b"\xff\xfe\x00not utf-8")
    for shard in range(3):
        mine = texts[shard * 30 : shard * 30 + 30]
        (root / f"part[{shard}].jsonl").write_text("".join(json.dumps({"text": t, "other": 1}) + "\n" for t in mine))
        table = pyarrow.table({"text": mine, "other": list(range(len(mine)))})
        pyarrow.parquet.write_table(table, root / f"{shard}.parquet", row_group_size=8)
    return root


def config(corpus: Path, source: str, **others: Any) -> DataConfig:
    path = {"text": corpus / "files", "json": corpus / "*.jsonl", "parquet": corpus}.get(source)
    fields = {"source": source, "path": str(path) if path else None, "validation_percent": 10.0, **others}
    return msgspec.convert(fields, DataConfig)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_documents, "CHUNK_ROWS", 7)


SOURCES = ("text", "json", "parquet")


def documents_in(blocks: Blocks, count: int) -> list[str]:
    """Join blocks into the first `count` whole documents."""
    parts: list[torch.Tensor] = []
    found = 0
    while found < count and len(batch := blocks.next_batch(4)):
        parts.append(batch[:, :-1].flatten())
        found += int((parts[-1] == END).sum())
    joined = bytes(0 if i == END else i - 3 for i in torch.cat(parts).tolist())
    return [part.decode() for part in joined.split(b"\0")[:count]]


@pytest.mark.parametrize("source", SOURCES)
def test_an_epoch_reads_every_document_once_and_none_held_out(corpus: Path, source: str) -> None:
    data = config(corpus, source)
    # Blocks of one token leave nothing over at the end.
    validation = documents_in(open_blocks(data, 1, 0, "", "validation"), 1000)
    assert set(validation) <= all_texts()
    training = open_blocks(data, 16, 3, "peer")
    expected = sorted(all_texts() - set(validation))
    assert 1 <= len(validation) <= 25
    first = documents_in(training, len(expected))
    second = documents_in(open_blocks(data, 16, 3, "peer"), 2 * len(expected))
    assert sorted(first) == expected
    assert sorted(second[len(expected) :]) == expected
    assert second[: len(expected)] == first, "the same seed and peer, the same order"
    assert second[len(expected) :] != first, "another epoch, another order"


def all_texts() -> set[str]:
    return {text_of(number) for number in range(90)}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("shuffle", [True, False])
def test_each_peer_has_an_order_of_its_own(corpus: Path, source: str, shuffle: bool) -> None:
    data = config(corpus, source, shuffle=shuffle)
    orders = [tuple(documents_in(open_blocks(data, 16, 0, f"peer {n}"), 20)) for n in range(4)]
    assert len(set(orders)) >= 2
    if shuffle:
        assert len(set(orders)) == 4
        assert documents_in(open_blocks(data, 16, 1, "peer 0"), 20) != list(orders[0])


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(source="text", shuffle=True, part="train", length=64, cuts=[57, 3])  # beyond an epoch
@example(source="json", shuffle=True, part="train", length=64, cuts=[57, 3])
@example(source="parquet", shuffle=True, part="train", length=64, cuts=[57, 3])
@given(
    source=st.sampled_from(SOURCES),
    shuffle=st.booleans(),
    part=st.sampled_from(("train", "train", "validation")),
    length=st.sampled_from((1, 5, 16, 200)),
    cuts=st.lists(st.integers(0, 9), min_size=1, max_size=2),
)
def test_cut_anywhere_and_restored_it_goes_on_the_same(
    corpus: Path, source: str, shuffle: bool, part: Part, length: int, cuts: list[int]
) -> None:
    data = config(corpus, source, shuffle=shuffle)
    whole, resumed = (open_blocks(data, length, 5, "peer", part) for _ in range(2))
    for cut in cuts:
        for size in (1,) * cut + (3,):
            assert torch.equal(whole.next_batch(size), resumed.next_batch(size))
        position = json.loads(json.dumps(resumed.position()))
        assert len(json.dumps(position)) < 2000
        resumed.close()
        resumed = open_blocks(data, length, 5, "peer", part)
        assert resumed.restore(position)
        assert resumed.position() == position
    for _ in range(6):
        assert torch.equal(whole.next_batch(2), resumed.next_batch(2))


def test_blocks_overlap_by_one_token_and_hold_the_text(corpus: Path) -> None:
    blocks = open_blocks(config(corpus, "text"), 16, 0, "peer")
    batch = blocks.next_batch(50)
    assert batch.shape == (50, 17)
    assert batch.dtype == torch.int64
    assert torch.equal(batch[1:, 0], batch[:-1, -1])
    assert (batch == END).sum() > 3


def test_a_block_costs_nothing_of_the_rest_of_its_document(tmp_path: Path) -> None:
    (tmp_path / "long.jsonl").write_text(json.dumps({"text": "a long text " * 1000}))
    blocks = open_blocks(config(tmp_path, "json", validation_percent=0.0), 16, 0, "me")
    blocks.next_batch(1)
    with patch.object(torch, "cat", wraps=torch.cat) as copied:
        assert len(blocks.next_batch(2)) == 2
    assert all(sum(map(len, call.args[0])) <= 2 * 16 + 1 for call in copied.call_args_list)


def test_a_position_of_another_peer_seed_source_or_tokenizer_is_not_taken(corpus: Path, tmp_path: Path) -> None:
    blocks = open_blocks(config(corpus, "text"), 16, 0, "peer")
    start = blocks.next_batch(3)
    position = blocks.position()
    for other in (
        open_blocks(config(corpus, "text"), 16, 1, "peer"),
        open_blocks(config(corpus, "text"), 16, 0, "another"),
        open_blocks(config(corpus, "text", shuffle=False), 16, 0, "peer"),
        open_blocks(config(corpus, "json"), 16, 0, "peer"),
        open_blocks(config(corpus, "text", tokenizer=str(bpe(tmp_path))), 16, 0, "peer"),
    ):
        assert not other.restore(position)
        assert not torch.equal(other.next_batch(3), blocks.next_batch(3))
    fresh = open_blocks(config(corpus, "text"), 16, 0, "peer")
    assert not fresh.restore({})
    assert torch.equal(fresh.next_batch(3), start)


@pytest.mark.parametrize(
    "broken", [{"offset": "x"}, {"offset": -1}, {"place": {}}, {"place": {"epoch": 0, "index": -1}}]
)
def test_a_broken_position_is_refused(corpus: Path, broken: dict[str, Any]) -> None:
    blocks = open_blocks(config(corpus, "text"), 16, 0, "peer")
    with pytest.raises(ValueError, match=r"position|place"):
        blocks.restore({**blocks.position(), **broken})


def test_a_position_behind_the_end_of_its_document_is_of_another_text(corpus: Path) -> None:
    blocks, plain = (open_blocks(config(corpus, "text"), 16, 0, "peer") for _ in range(2))
    assert torch.equal(blocks.next_batch(3), plain.next_batch(3))
    assert not blocks.restore({**blocks.position(), "offset": 10**9})
    assert torch.equal(blocks.next_batch(30), plain.next_batch(30))


@pytest.mark.parametrize("source", ["json", "parquet"])
@pytest.mark.parametrize("words", [3, 200], ids=["shorter", "as long"])
def test_a_file_of_rows_that_was_written_anew_is_another_source(tmp_path: Path, source: str, words: int) -> None:
    path = tmp_path / f"text.{source}"

    def write(words: int, word: str) -> None:
        texts = [f"{number} " + f"{word} " * words for number in range(50)]
        if source == "json":
            path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        else:
            pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=8)

    def opened() -> Blocks:
        return open_blocks(config(tmp_path, source, path=str(path), validation_percent=1.0), 64, 7, "me")

    write(200, "word")
    blocks = opened()
    for _ in range(5):
        blocks.next_batch(3)
    path.rename(tmp_path / "aside")
    path.write_bytes((tmp_path / "aside").read_bytes())
    assert opened().restore(blocks.position()), "merely copied"
    write(words, "text")
    assert not opened().restore(blocks.position())


def test_validation_is_one_pass_the_same_for_all(corpus: Path) -> None:
    for source in SOURCES:
        data = config(corpus, source)
        passes = [
            list(open_blocks(data, 16, seed, peer, "validation").batches(3)) for seed, peer in ((0, "a"), (1, "b"))
        ]
        assert len(passes[0]) > 1
        assert all(len(batch) == 3 for batch in passes[0][:-1])
        assert all(torch.equal(a, b) for a, b in zip(*passes, strict=True))


@settings(max_examples=40)
@given(st.lists(st.text(min_size=1, max_size=80), max_size=30), st.integers(0, 40), st.floats(0.0, 100.0))
def test_the_two_sides_of_a_text_are_its_parts_each_once(words: list[str], times: int, percent: float) -> None:
    text = "\n".join(f"{number} {word}" for number in range(times) for word in words)
    parts = list(parts_of(text))
    assert "".join(parts) == text
    assert all(len(part) >= 2048 for part in parts[:-1])
    train, validation = (side_of(text, part, percent) for part in ("train", "validation"))
    assert sum(map(len, (*train, *validation))) == len(text)
    for part in parts:
        sides = [any(part in stretch for stretch in side) for side in (train, validation)]
        assert sides[is_held_out(part, percent)]


@settings(max_examples=8)
@given(st.integers(0, 10**9), st.sampled_from(["texts", "te*/*.txt", ".", "texts/*.txt"]), st.sampled_from([5.0, 30.0]))
def test_no_peer_trains_on_what_another_holds_out(
    tmp_path_factory: pytest.TempPathFactory, seed: int, spelling: str, percent: float
) -> None:
    """However the path is typed, whatever files lie beside, and in files or in rows."""
    rng, place = random.Random(seed), tmp_path_factory.mktemp("peers")
    books = [[f"{seed} {number} {line} {rng.random()}\n" for line in range(rng.randrange(400))] for number in range(6)]

    def write(name: str, texts: list[str]) -> Path:
        (place / name / "texts").mkdir(parents=True)
        for number, text in enumerate(texts):
            (place / name / "texts" / f"book{number}.txt").write_text(text)
        return place / name

    one, rows = write("one", ["".join(book) for book in books]), place / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": "".join(book)}) + "\n" for book in reversed(books)))
    elsewhere = write(
        "elsewhere", ["".join(book) for book in books[3:]] + ["".join(f"a new one {line}\n" for line in range(900))]
    )

    def lines_of(data: DataConfig, part: Part) -> set[str]:
        documents = _documents(data, ReadingOrder(part, 0, "p", True), 64)
        found = set[str]()
        for _ in range(30):  # more than an epoch
            if (document := documents.next()) is None:
                break
            found |= {line for text in document.texts for line in text.splitlines()}
        return found

    def both(source: str, path: Path) -> list[set[str]]:
        data = msgspec.convert({"source": source, "path": str(path), "validation_percent": percent}, DataConfig)
        return [lines_of(data, "train"), lines_of(data, "validation")]

    peers = [both("text", one / "texts"), both("text", one / spelling), both("json", rows)]
    peers.append(both("text", elsewhere / spelling))
    trained, held = (set().union(*(peer[side] for peer in peers)) for side in (0, 1))
    assert trained
    assert not trained & held
    assert trained | held >= {line.strip() for book in books for line in book}


def test_an_edit_moves_few_parts() -> None:
    text = "".join(f"{number} line of a book that is edited at its beginning\n" for number in range(4000))
    before, after = set(parts_of(text)), set(parts_of("a preface\n" + text))
    assert len(before - after) <= 0.1 * len(before)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text("aé漢\n", max_size=40), max_size=6), st.integers(8, 40))
def test_the_pieces_of_a_file_join_to_the_file(tmp_path: Path, lines: list[str], step: int) -> None:
    file = tmp_path / "one.txt"
    text = "".join(lines)
    file.write_bytes(text.encode())
    pieces = pieces_of([("one.txt", file)], step)
    assert "".join(map(_text_of, pieces)) == text
    assert len({piece.name for piece in pieces}) == len(pieces)


def test_pieces_end_at_line_ends(tmp_path: Path) -> None:
    file = tmp_path / "novel.txt"
    file.write_text("".join(f"line {n}\n" for n in range(15_000)))
    texts = [_text_of(piece) for piece in pieces_of([("novel.txt", file)], 65_536)]
    assert len(texts) == 2
    assert all(text.startswith("line") and text.endswith("\n") for text in texts)
    assert "".join(texts) == file.read_text()
    assert _text_of(TextRange(tmp_path / "gone", "gone", 0, 5, 5)) == ""
    os.mkfifo(tmp_path / "pipe")  # that took the place of a file: to open it would wait for a writer
    assert _text_of(TextRange(tmp_path / "pipe", "pipe", 0, 5, 5)) == ""


def test_text_that_vanishes_while_it_is_read_is_named_once_and_not_called_empty(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.txt" for number in range(3)]
    for path in paths:
        path.write_text("text\n" * 9)
    documents = FileDocuments(
        pieces_of([(path.name, path) for path in paths], 65_536), ReadingOrder("train", 0, "p", True), 0.0
    )
    for _ in range(2 * len(paths)):
        assert documents.next() is not None
    paths[0].unlink()
    for _ in range(3 * len(paths)):
        assert documents.next() is not None
    assert list(documents.unread.counts.values()) == [1]
    for path in paths[1:]:
        path.unlink()
    with pytest.raises(UserError, match="has no text") as caught:
        documents.next()
    assert "cannot be read and is left out" in caught.value.why


def test_the_standard_library_is_whole_modules_without_tests_or_packages() -> None:
    pieces = pieces_of(stdlib_files(), 2**30)
    documents = FileDocuments(pieces, ReadingOrder("train", 0, "p", True), 0.0)
    texts = [text for found in (documents.next() for _ in range(300)) if found for text in found.texts]
    root = Path(sysconfig.get_paths()["stdlib"])
    known = {(root / name).read_text() for name in ("abc.py", "json/decoder.py", "asyncio/tasks.py")}
    rest = [found for found in (documents.next() for _ in range(len(pieces))) if found]
    everything = set(texts) | {text for found in rest for text in found.texts}
    assert len(set(texts)) > 290
    assert known <= everything
    for foreign in ("test/test_json/test_decode.py", "unittest/test/test_case.py"):
        if (root / foreign).exists():
            assert (root / foreign).read_text() not in everything
    with pytest.raises(UserError, match="no text out"):
        open_blocks(DataConfig(validation_percent=0.0), 128, 0, "", "validation")


@given(st.text())
@example("a</s>b<pad> <extra_id_7>\r\n\t")
@settings(max_examples=60)
def test_the_byte_encoder_is_byt5(text: str) -> None:
    text = text.encode(errors="replace").decode()
    expected = BYT5(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert encode_bytes(text).tolist() == expected
    assert open_encoder(DataConfig()).end == BYT5.eos_token_id == END
    assert vocab_size(DataConfig()) == len(BYT5)


def bpe(directory: Path) -> Path:
    """Write a small byte-pair tokenizer."""
    (directory / "bpe").mkdir()
    write_tokenizer(directory / "bpe", [text_of(7)] * 3)
    return directory / "bpe"


def test_a_directory_without_rows_is_told_in_a_line(tmp_path: Path) -> None:
    data = DataConfig(source="json", path=str(tmp_path))
    with pytest.raises(UserError, match="There is no data at") as caught:
        open_blocks(data, 16, 0, "p")
    assert "this directory has no .jsonl or .json or .ndjson files" in caught.value.why
    (tmp_path / "there").symlink_to(tmp_path)
    with pytest.raises(UserError, match="links to other directories, are passed over"):
        open_blocks(data, 16, 0, "p")
    with pytest.raises(UserError, match=r"no directory with \.jsonl or \.json or \.ndjson files in it"):
        open_blocks(msgspec.structs.replace(data, path=str(tmp_path / "*.jsonl")), 16, 0, "p")


def test_a_file_of_rows_that_goes_while_it_is_opened_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = dataset_documents.find_files
    (tmp_path / "rows.jsonl").write_text('{"text": "here"}\n')

    def found_before(path: str, suffixes: tuple[str, ...]) -> list[tuple[str, Path]]:
        return [("gone.jsonl", tmp_path / "gone.jsonl"), *find(path, suffixes)]

    monkeypatch.setattr(dataset_documents, "find_files", found_before)
    data = DataConfig(source="json", path=str(tmp_path), validation_percent=0.0)
    assert documents_in(open_blocks(data, 2, 0, "p"), 1) == ["here"]


def test_text_that_may_not_be_read_is_not_said_to_be_missing(tmp_path: Path) -> None:
    around = tmp_path / "around"
    around.symlink_to(around)  # the system refuses it, also to root
    with user_error(Exit.CONFIG) as caught:
        find_files(str(around))
    assert str(around) in caught.value.why
    assert "symbolic links" in caught.value.why
    with pytest.raises(UserError, match="There is no data at"):
        find_files("a\0b")


SURROGATE = '{"text": "x \\ud800 y"}\n'


@pytest.mark.parametrize("tokenizer", ["byt5", "bpe"])
def test_half_a_surrogate_pair_in_a_row_ends_nothing(tmp_path: Path, tokenizer: str) -> None:
    (tmp_path / "rows.jsonl").write_text(40 * SURROGATE)
    named = "byt5" if tokenizer == "byt5" else str(bpe(tmp_path))
    data = DataConfig(source="json", path=str(tmp_path / "rows.jsonl"), tokenizer=named, validation_percent=0.0)
    assert len(open_blocks(data, 8, 0, "p").next_batch(2)) == 2
    assert Prompts(data, ["\udcff x"]).tokens["\udcff x"]


def test_a_vocabulary_reaches_up_to_the_highest_id(tmp_path: Path) -> None:
    place = bpe(tmp_path) / "tokenizer.json"
    told = json.loads(place.read_bytes())
    vocabulary = told["model"]["vocab"]
    vocabulary["zzzz"] = 5000
    place.write_text(json.dumps(told))
    data = DataConfig(tokenizer=str(place.parent))
    assert vocab_size(data) == 5001
    with pytest.raises(UserError, match="up to 5000"):
        check_vocabulary(data, 5000)


def test_rows_without_text_are_passed_over_wherever_they_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_documents, "CHUNK_ROWS", 7)
    (tmp_path / "a.jsonl").write_text(20 * '{"other": 1}\n')
    (tmp_path / "b.jsonl").write_text(20 * '{"text": "some text"}\n')
    data = DataConfig(source="json", path=str(tmp_path), validation_percent=0.0)
    for peer in "abcdef":  # some begin with the one file, some with the other
        assert len(open_blocks(data, 8, 0, peer).next_batch(1))


def test_the_name_of_a_file_that_is_no_text_becomes_a_sentence(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"\xff.txt")).write_bytes(b"\xff\xff\xff")
    (tmp_path / "b.txt").write_text("some text")
    blocks = open_blocks(DataConfig(source="text", path=str(tmp_path), validation_percent=0.0), 8, 0, "p")
    blocks.next_batch(8)
    (said,) = blocks.news()
    assert said.encode()


def test_a_directory_that_may_be_listed_and_not_entered_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody but its owner may look at a file in it."""
    (tmp_path / "closed").mkdir()
    for name in ("open.txt", "closed/a.txt"):
        (tmp_path / name).write_text("some text")
    stat = os.stat

    def refused(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if "closed/" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, *args, **options)

    monkeypatch.setattr(os, "stat", refused)
    assert [name for name, _ in find_files(str(tmp_path))] == ["open.txt"]
    with pytest.raises(UserError, match="no data at") as caught:
        find_files(str(tmp_path / "closed"))
    assert "Permission denied" in caught.value.why


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "JSONL", "Jsonl.GZ", "PARQUET"])
def test_rows_in_a_file_whose_name_is_no_text_are_read(tmp_path: Path, ending: str) -> None:
    """pyarrow takes no such name."""
    rows = 8 * b'{"text": "some text"}\n'
    table = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table({"text": 8 * ["some text"]}), table)
    content = {
        "jsonl": rows,
        "gz": gzip.compress(rows),
        "zst": pyarrow.compress(rows, "zstd", asbytes=True),
        "parquet": table.getvalue().to_pybytes(),
    }[ending.lower().split(".")[-1]]
    path = tmp_path / os.fsdecode(b"\xff." + ending.encode())
    path.write_bytes(content)
    named = DataConfig(validation_percent=0.0).with_source(str(path))  # by its suffix, as other systems write it too
    for data in (named, msgspec.structs.replace(named, path=str(tmp_path))):
        assert len(open_blocks(data, 8, 0, "p").next_batch(4)) == 4
        assert data.source == ("parquet" if ending.lower() == "parquet" else "json")


@pytest.mark.parametrize(
    "model",
    [models.WordLevel({"a": 0, "<end>": 1}), models.WordPiece({"a": 0}), models.Unigram([("a", 0.0), ("<end>", 0.0)])],
)
@pytest.mark.parametrize("form", ["text", "prompt", "messages"])
def test_a_tokenizer_that_does_not_know_a_character_says_so(tmp_path: Path, model: Any, form: str) -> None:
    """Its library raises a bare Exception, in the thread that reads the text."""
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), eos_token="<end>").save_pretrained(tmp_path)
    said = {"text": "be", "prompt": "a", "completion": "be", "messages": [{"role": "assistant", "content": "be"}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(said))
    data = DataConfig(
        source="json",
        path=str(tmp_path / "rows.jsonl"),
        form=form,  # type: ignore[arg-type]
        tokenizer=str(tmp_path),
        chat_template="chatml" if form == "messages" else "",
        validation_percent=0.0,
    )
    with user_error(Exit.CONFIG, "takes no such text"):
        open_blocks(data, 8, 0, "p").next_batch(1)


@pytest.mark.parametrize("field", ["text", "other"])
@pytest.mark.parametrize("rows", [1, 4])
def test_a_parquet_file_that_changes_once_it_is_listed_costs_its_rows_alone(
    tmp_path: Path, field: str, rows: int
) -> None:
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": 4 * ["some text"]}), path, row_group_size=1)
    stream = load_rows(DataConfig(source="parquet", path=str(path)))
    pyarrow.parquet.write_table(pyarrow.table({field: rows * ["some text"]}), path, row_group_size=1)
    read = [type(row) for number in range(4) for row in stream.shard(4, number)]
    kept = rows if field == "text" else 0
    assert read == kept * [GoodRow] + (4 - kept) * [BadRow]


def test_what_save_to_disk_wrote_is_refused(tmp_path: Path) -> None:
    split = datasets.Dataset.from_dict({"text": [text_of(1)]})
    split.save_to_disk(tmp_path / "split")
    datasets.DatasetDict(train=split).save_to_disk(tmp_path / "dictionary of splits")
    for name, source in itertools.product(("split", "dictionary of splits"), ("text", "json")):
        with pytest.raises(UserError, match="save_to_disk") as caught:
            open_blocks(config(tmp_path, source, path=str(tmp_path / name)), 16, 0, "p")
        assert "to_parquet" in caught.value.hint


def test_a_local_tokenizer_and_its_end_token(corpus: Path, tmp_path: Path) -> None:
    data = config(corpus, "text", tokenizer=str(bpe(tmp_path)))
    encoder = open_encoder(data)
    assert END not in encoder.encode("x<|end|>y").tolist()
    assert encoder.end == 0
    assert (open_blocks(data, 16, 0, "p").next_batch(20) == 0).sum() > 3
    check_vocabulary(data, vocab_size(data))
    with pytest.raises(UserError, match=r"vocabulary of 100 .*") as caught:
        check_vocabulary(data, 100)
    assert str(vocab_size(data)) in str(caught.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"source": "text", "path": "/nowhere/*.txt"}, "no data at"),
        ({"source": "json", "path": "/nowhere.jsonl"}, "no data at"),
        ({"source": "json", "field": "body"}, "whose fields are text, other"),
        ({"source": "parquet", "field": "body"}, "whose fields are text, other"),
        ({"source": "json", "field": "other"}, "where it is int"),
        ({"source": "text", "tokenizer": "no/such"}, "no directory"),
    ],
)
def test_what_is_not_there_is_one_clear_message(corpus: Path, change: dict[str, Any], says: str) -> None:
    with user_error(Exit.CONFIG) as caught:
        open_blocks(config(corpus, **change), 16, 0, "p").next_batch(1)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", b'["text"]\n{"text": \n', "is no JSON"),
        ("a.jsonl.gz", b"not packed", "cannot be read"),
        ("a.jsonl", b"", "are empty"),
        ("a.jsonl", b'{"text": null}\n{"text": ""}\n', "no rows with text"),
        ("a.jsonl", b"\n\n", "it has no rows"),
        ("a.json", b"[]", "it has no rows"),
        ("a.parquet", b"not parquet", "cannot be read"),
        ("a.txt", b"\xff\xff", "no text"),
        ("a.txt", b"a\0b\0" * 900, "is not text in UTF-8"),
    ],
)
def test_data_without_text_is_one_clear_message(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    source = {"gz": "json", "parquet": "parquet", "txt": "text"}.get(name.split(".")[-1], "json")
    data = DataConfig(source=source, path=str(tmp_path / name), validation_percent=0.0)
    with pytest.raises(UserError) as caught:
        open_blocks(data, 16, 0, "p").next_batch(1)
    assert says in str(caught.value)
    assert says != "it has no rows" or "data.path" in caught.value.hint


def test_too_little_validation_text(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"{number}.txt").write_text("short")
    for percent, advises in ((50.0, True), (100.0, False)):  # a person named all of it: nothing is held out
        data = DataConfig(source="text", path=str(tmp_path), validation_percent=percent)
        with pytest.raises(UserError, match="too little text for validation") as caught:
            open_blocks(data, 1000, 0, "", "validation").next_batch(1)
        assert ("validation_percent" in caught.value.hint) == ("held out" in caught.value.why) == advises


class Cable:
    """A network that fails at given reads, in front of a real stream of rows."""

    def __init__(self, stream: Any, reads: Any, broken: set[int]) -> None:
        self.stream, self.reads, self.broken = stream, reads, broken
        self.num_shards, self.column_names = getattr(stream, "num_shards", 1), None

    def shard(self, num_shards: int, index: int) -> Cable:
        return Cable(self.stream.shard(num_shards=num_shards, index=index), self.reads, self.broken)

    def load_state_dict(self, state: Any) -> None:
        self.stream.load_state_dict(state)

    def state_dict(self) -> Any:
        return self.stream.state_dict()

    def __iter__(self) -> Any:
        for row in self.stream:
            if next(self.reads) in self.broken:
                raise ConnectionResetError("the cable was cut")
            yield row


def texts_of(documents: RowDocuments, count: int) -> list[str]:
    return ["".join(found.texts) for found in (documents.next() for _ in range(count)) if found]


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(broken=st.sets(st.integers(0, 150), max_size=5))
def test_a_network_that_fails_loses_and_repeats_nothing(corpus: Path, broken: set[int]) -> None:
    data, order = config(corpus, "json"), ReadingOrder("train", 0, "p", True)
    pauses = dataset_documents.PAUSES_S
    dataset_documents.PAUSES_S = (0.0,) * 6
    try:
        reads = itertools.count()
        failing = RowDocuments(data, order, lambda: Cable(load_rows(data), reads, broken))
        assert texts_of(failing, 100) == texts_of(RowDocuments(data, order, lambda: load_rows(data)), 100)
        done = next(reads)
        assert failing.retries == sum(read < done for read in broken)
    finally:
        dataset_documents.PAUSES_S = pauses


def test_a_network_that_stays_away_is_given_up_in_the_end(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_documents, "PAUSES_S", (0.0,) * 7)
    calls: list[int] = []

    def load() -> Any:
        calls.append(1)
        raise TimeoutError("no answer")

    with user_error(Exit.UNREACHABLE, "TimeoutError: no answer") as caught:
        RowDocuments(config(corpus, "json"), ReadingOrder("train", 0, "p", True), load)
    assert len(calls) == 1, "the person who starts a node waits for it"
    assert caught.value.code not in NEEDS_A_PERSON, "a service tries again"


class OutOfMemory(MemoryError):
    """As pyarrow and numpy have their own."""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), Exit.STORAGE),
        (huggingface_hub.errors.HTTPError("no hub"), Exit.UNREACHABLE),
        (EOFError("torn"), Exit.UNREACHABLE),
        (FileNotFoundError("no such file"), Exit.CONFIG),
        (MemoryError(), None),
        (OutOfMemory(), None),
        (AttributeError("a bug of ours"), None),
    ],
)
def test_only_what_may_pass_is_tried_again(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, code: Exit | None
) -> None:
    monkeypatch.setattr(dataset_documents, "PAUSES_S", (0.0,) * 2)

    class Failing(Cable):
        def shard(self, num_shards: int, index: int) -> Cable:
            raise error

    data = config(corpus, "json")
    order = ReadingOrder("train", 0, "p", True)
    documents = RowDocuments(data, order, lambda: Failing(load_rows(data), itertools.count(), set()))
    with pytest.raises(type(error) if code is None else UserError) as caught:
        documents.next()
    assert getattr(caught.value, "code", None) is code
    assert documents.retries == (3 if code in (Exit.STORAGE, Exit.UNREACHABLE) else 0)
    assert code is None or ("the network" in str(caught.value)) == (code is Exit.UNREACHABLE)


class Hub(http.server.BaseHTTPRequestHandler):
    """A hub that knows no commit."""

    def do_GET(self) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", "RevisionNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_: Any) -> None: ...


def test_a_commit_that_the_hub_has_not_is_said_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for settings_ in (datasets.config, huggingface_hub.constants):
            monkeypatch.setattr(settings_, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        with pytest.raises(UserError, match="The data source hub some/data cannot be read") as caught:
            open_blocks(DataConfig(source="hub", path="some/data", commit="0" * 40), 32, 0, "peer")
        server.shutdown()
    assert "doesn't exist for dataset 'some/data'" in caught.value.why
    assert "trying again" not in capsys.readouterr().err


def test_closing_ends_a_pause(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_documents, "PAUSES_S", (3600.0,))
    data = config(corpus, "json")
    reached, ended = threading.Event(), threading.Event()

    class Stuck(Cable):
        def shard(self, num_shards: int, index: int) -> Cable:
            reached.set()
            raise TimeoutError("no answer")

    documents = RowDocuments(
        data, ReadingOrder("train", 0, "p", True), lambda: Stuck(load_rows(data), itertools.count(), set())
    )

    def read() -> None:
        with pytest.raises(ConnectionAbortedError):
            documents.next()
        ended.set()

    thread = threading.Thread(target=read)
    thread.start()
    assert reached.wait(10)
    documents.close()
    assert ended.wait(10)
    thread.join()


@pytest.mark.parametrize("source", ["text:no/such/file", "no/such/*.txt", "rows.jsonl", "json:", "hub:owner/name"])
def test_a_source_that_is_not_here_is_refused_before_anything_begins(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with user_error(Exit.CONFIG):
        check_source(source)
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "a+b.txt").write_text("a")
    each = ("rows.jsonl", "text:rows.*", "json:rows.jsonl", "rows.jsonl#chat", "stdlib", f"hub:owner/name@{'a' * 40}")
    for here in (*each, "a+b.txt", *map("+".join, itertools.permutations(each, 2))):
        check_source(here)
    for lacking in ("no.jsonl+rows.jsonl", "rows.jsonl+no.jsonl"):
        with pytest.raises(UserError):
            check_source(lacking)


@pytest.mark.parametrize("form", ["text", "messages"])
def test_a_path_may_hold_what_names_a_field_elsewhere(form: Any) -> None:
    data = DataConfig(form=form)
    named = data.with_source("chats#2.jsonl#x")
    assert (named.path, named.row_fields) == ("chats#2.jsonl", ("x",))
    assert data.with_source("chats#2.jsonl").path == "chats#2.jsonl"


def test_a_tokenizer_runs_no_code_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where somebody is at hand to say yes: transformers would ask on the terminal."""
    config = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Own: pass\n")
    monkeypatch.setattr("builtins.input", lambda _="": "y")
    with pytest.raises(UserError, match="cannot be loaded"):
        open_tokenizer(DataConfig(tokenizer=str(tmp_path)))
    assert not (tmp_path / "ran").exists()


def heard(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.partition("warning: ")[2] for line in capsys.readouterr().err.splitlines()]


def test_what_is_not_read_is_counted_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(12):
        (tmp_path / f"{number:02}.txt").write_bytes("Das Käuzchen schläft.\n".encode("latin-1") * 90)
    (tmp_path / "ok.txt").write_text("plain\n" * 2000)
    (tmp_path / "torn.txt").write_bytes(b"plain\n" * 2000 + b"\xff")
    (tmp_path / "zeros.txt").write_bytes(b"plain\n" * 2000 + b"\0\0")
    blocks = open_blocks(DataConfig(source="text", path=str(tmp_path), validation_percent=0.0), 64, 0, "peer")
    while blocks.position()["place"]["epoch"] < 2:
        blocks.next_batch(50)
    said = heard(capsys)
    assert said == blocks.news()
    counts = [line for line in said if "is not text in UTF-8 and is left out" in line]
    assert [line.rpartition("(")[2] for line in counts[1:]] == ["the first of 10 so far)", "the first of 12 so far)"]
    assert "text: torn.txt has characters that are not UTF-8, and they are replaced" in said
    about_zeros = [line for line in said if "zeros.txt" in line]
    assert about_zeros == ["text: zeros.txt has zero bytes, and they are trained on as they are"]
    assert len(said) == 5
    assert blocks.news() == []


ROWS = [
    b'{"text": "good 1", "n": 1}',
    b'{"text": 7}',
    b"",
    b'{"text": "good 2", "late": {"deep": [NaN]}}',
    b'{"other": "x"}',
    b'{"text": null}',
    b'["no", "object"]',
    b'{"text": "good 3"}',
    b'{"text": "torn',
]


@pytest.mark.parametrize("packing", ["", ".gz", ".bz2", ".xz", ".zst"])
def test_rows_that_hold_no_text_end_nothing(tmp_path: Path, packing: str, capsys: pytest.CaptureFixture[str]) -> None:
    packed: dict[str, Callable[[bytes], bytes]] = {
        "": lambda raw: raw,
        ".gz": gzip.compress,
        ".bz2": bz2.compress,
        ".xz": lzma.compress,
        ".zst": lambda raw: pyarrow.Codec("zstd").compress(raw, asbytes=True),
    }
    path = tmp_path / f"rows.jsonl{packing}"
    path.write_bytes(packed[packing](b"\xef\xbb\xbf" + b"\n".join(ROWS)))
    data = msgspec.structs.replace(DataConfig(validation_percent=0.0).with_source(str(path)), shuffle=False)
    found = documents_in(open_blocks(data, 4, 0, "p"), 9)
    assert found == ["good 1", "good 2", "good 3"] * 3
    said = heard(capsys)
    assert len(said) == 5, said
    assert f"text: {path.name}:2, where it is int, has no text in the field 'text' and is left out" in said
    assert f"text: {path.name}:5, whose fields are other, has no field 'text' and is left out" in said
    assert any(f"{path.name}:9 is no JSON" in line for line in said)


def test_an_array_of_rows_and_files_of_different_columns(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([{"text": "one"}, {"text": "two", "more": 1}], indent=1))
    (tmp_path / "b.jsonl").write_text('{"text": "three", "another": [1]}\n')
    data = DataConfig(source="json", path=str(tmp_path), validation_percent=0.0)
    assert set(documents_in(open_blocks(data, 2, 0, "p"), 3)) == {"one", "two", "three"}
    pyarrow.parquet.write_table(pyarrow.table({"text": ["four", None]}), tmp_path / "a.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"n": [1], "text": ["five"]}), tmp_path / "b.parquet")
    (tmp_path / "c.parquet").write_bytes(b"no parquet")
    data = DataConfig(source="parquet", path=str(tmp_path), validation_percent=0.0)
    assert set(documents_in(open_blocks(data, 2, 0, "p"), 2)) == {"four", "five"}


@pytest.mark.parametrize("source", ["json", "text"])
def test_another_spelling_of_a_path_is_the_same_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(json.dumps({"text": f"row {n} " * 40}) + "\n" for n in range(200)))
    first, again = (
        open_blocks(msgspec.convert({"source": source, "path": path}, DataConfig), 64, 0, "peer")
        for path in ("rows.jsonl", "./rows.jsonl")
    )
    first.next_batch(50)
    assert again.restore(first.position())
    assert torch.equal(first.next_batch(3), again.next_batch(3))


def test_a_document_begins_as_the_tokenizer_begins_a_text(tmp_path: Path) -> None:
    directory = bpe(tmp_path)
    plain = open_encoder(DataConfig(tokenizer=str(directory)))
    tokenizer = open_tokenizer(DataConfig(tokenizer=str(directory)))
    rule = processors.TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", 0)])
    tokenizer.backend_tokenizer.post_processor = rule
    tokenizer.save_pretrained(directory)
    encoder = open_encoder(DataConfig(tokenizer=str(directory)))
    assert (plain.begin, encoder.begin) == ((), (0,))
    assert encoder.document("xyz").tolist() == [0, *plain.document("xyz").tolist()]
    assert encoder.name != plain.name, "its positions are others"
    assert open_encoder(DataConfig()).begin == ()
    assert open_encoder(DataConfig(tokenizer=f"{directory}/../{directory.name}")).name == encoder.name
