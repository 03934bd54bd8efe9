"""Several sources in one run: shares, places, what is held out, and what a person sees of them."""

import json
from collections import Counter
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from user_errors import user_error

from noloco_node.data import blocks
from noloco_node.data.blocks import BlockSource, open_blocks, run_blocks
from noloco_node.data.held_out_text import validation_text
from noloco_node.data.row_preview import preview
from noloco_node.errors import Exit, UserError
from noloco_node.run.config import DataConfig, MixedSource
from noloco_node.run.presets import run_text
from noloco_node.run.runfile import decode_run

LENGTH = 16
A_RUN = decode_run(run_text("tiny"), "tiny")
LETTERS = "abc"


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return files of text, each of one letter, of very different sizes."""
    directory, found = tmp_path_factory.mktemp("letters"), []
    for number, letter in enumerate(LETTERS):
        path = directory / f"{letter}.jsonl"
        lines = (f"{line:03d}{letter * 97}" for line in range(30 * (number + 1)))
        path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
        found.append(str(path))
    return found


def mixed(places: list[str], *weights: float, held_out: float = 0.0) -> DataConfig:
    sources = [
        MixedSource(source="json", path=place, weight=weight) for place, weight in zip(places, weights, strict=False)
    ]
    return DataConfig(mixture=tuple(sources), validation_percent=held_out)


def letters_of(blocks: torch.Tensor) -> Counter[str]:
    """Count the blocks in which each letter is the most frequent."""
    texts = ("".join(chr(token - 3) for token in block.tolist() if token >= 3) for block in blocks.abs())
    return Counter(Counter(each for each in text if each in LETTERS).most_common(1)[0][0] for text in texts)


@settings(max_examples=25)
@given(weights=st.lists(st.floats(0.1, 20.0), min_size=2, max_size=3), count=st.integers(1, 90))
def test_each_source_has_its_share_of_any_first_blocks(places: list[str], weights: list[float], count: int) -> None:
    blocks = open_blocks(mixed(places, *weights), LENGTH, 3, "me")
    found = letters_of(blocks.next_batch(count))
    for letter, weight in zip(LETTERS, weights, strict=False):
        assert abs(found[letter] - count * weight / sum(weights)) <= len(weights)
    blocks.close()


@settings(max_examples=8)
@given(before=st.integers(0, 60), batch=st.integers(1, 7), shuffle=st.booleans())
def test_a_mixture_goes_on_from_any_place(places: list[str], before: int, batch: int, shuffle: bool) -> None:
    """Chunks of shuffled blocks are short, so that a place lies in the first, the second or the third of them."""
    data = msgspec.structs.replace(mixed(places, 1.0, 2.5, 0.3), shuffle=shuffle)
    run = msgspec.structs.replace(A_RUN, data=data)

    def opened() -> BlockSource:
        return run_blocks(run, None, "me", 384)

    first, again = opened(), opened()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "CHUNK_TOKENS", 24 * LENGTH)
        first, again = opened(), opened()
    for _ in range(before):
        first.next_batch(1)
    place = json.loads(json.dumps(first.position()))
    assert again.restore(place)
    for _ in range(4):
        assert torch.equal(first.next_batch(batch), again.next_batch(batch))
    first.close()
    again.close()


def test_places_of_other_sources_begin_anew(places: list[str]) -> None:
    blocks = open_blocks(mixed(places, 1.0, 2.0), LENGTH, 3, "me")
    alone = open_blocks(DataConfig(source="json", path=places[0], validation_percent=0.0), LENGTH, 3, "me")
    begun = blocks.position()
    blocks.next_batch(10)
    for other in (
        open_blocks(mixed(places[::-1], 1.0, 2.0), LENGTH, 3, "me"),
        open_blocks(mixed(places, 1.0, 2.0, 3.0), LENGTH, 3, "me"),
        alone,
    ):
        before = other.position()
        assert not other.restore(blocks.position())
        assert other.position() == before
    assert not blocks.restore(alone.position())
    with pytest.raises(ValueError, match="no position"):
        blocks.restore({**begun, "dealt": [-1, 0]})


def test_what_is_held_out_ends_with_the_last_source(places: list[str]) -> None:
    data = mixed(places, 1.0, 1.0, 1.0, held_out=20.0)
    together = list(open_blocks(data, LENGTH, 0, "", "validation").batches(1))
    alone = [list(open_blocks(each, LENGTH, 0, "", "validation").batches(1)) for each in data.sources]
    assert sum(letters_of(torch.cat(together)).values()) == sum(map(len, alone))
    assert {block.numpy().tobytes() for block in together} == {
        block.numpy().tobytes() for blocks in alone for block in blocks
    }


def test_documents_of_two_sources_are_two_whatever_their_names(places: list[str]) -> None:
    """Rows of the hub are named by their number alone, and the margin of a loss is that over documents."""
    data = mixed([places[0], places[0]], 1.0, 1.0, held_out=20.0)
    together = validation_text(data, LENGTH, 0, None)
    (alone, _) = (validation_text(each, LENGTH, 0, None) for each in data.sources)
    assert len(set(together.documents)) == 2 * len(set(alone.documents))


@settings(max_examples=20)
@given(bare=st.lists(st.booleans(), min_size=2, max_size=3))
def test_a_source_without_held_out_text_ends_no_evaluation(
    tmp_path_factory: pytest.TempPathFactory, places: list[str], bare: list[bool]
) -> None:
    tiny = tmp_path_factory.mktemp("tiny") / "tiny.jsonl"
    tiny.write_text(json.dumps({"text": "x"}))
    chosen = [str(tiny) if is_bare else place for is_bare, place in zip(bare, places, strict=False)]
    data = mixed(chosen, 1.0, 2.0, 0.5, held_out=20.0)
    evaluated = open_blocks(data, LENGTH, 0, "", "validation")
    if all(bare):
        with pytest.raises(UserError, match="too little text for validation"):
            evaluated.next_batch(1)
    else:
        found = letters_of(torch.cat(list(evaluated.batches(4))))
        assert set(found) == {letter for letter, is_bare in zip(LETTERS, bare, strict=False) if not is_bare}


def test_a_person_names_all_places_or_one(places: list[str], tmp_path: Path) -> None:
    data = mixed(places, 3.0, 1.0)
    named = data.with_source(f"{places[2]}+stdlib")
    assert [(each.source, each.path, each.weight) for each in named.mixture] == [
        ("json", places[2], 3.0),
        ("stdlib", None, 1.0),
    ]
    assert data.with_source("stdlib").mixture == ()
    with user_error(Exit.CONFIG, "names 3 sources"):
        data.with_source("+".join(places))
    odd = tmp_path / "a+b.txt"
    assert DataConfig().with_source(str(odd)).path == str(odd), "no mixture, no joined names"


def test_a_preview_shows_each_source_and_all_that_does_not_fit(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_text("".join(json.dumps({"prompt": "p", "completion": f"{n}"}) + "\n" for n in range(9)))
    bad.write_text(json.dumps({"prompt": "p"}) + "\n" + json.dumps({"prompt": "q", "completion": "r"}) + "\n")
    sources = [MixedSource(source="json", path=str(path), form="prompt") for path in (bad, good)]
    data = DataConfig(mixture=tuple(sources))
    shown = preview(A_RUN, data)
    lines: list[str] = []
    with user_error(Exit.DATA, "1 of 2 rows do not fit"):
        lines.extend(shown)
    assert " ".join(lines).count("50.0% of the sequences") == 2
    assert any("9 rows fit the form" in line for line in lines), "what follows a source that does not fit is shown"
