"""Rows of which the answers are learnt: which tokens these are, and that no row gets lost without a word."""

import gzip
import json
from collections import Counter
from itertools import groupby, islice, pairwise
from pathlib import Path
from typing import Any

import datasets
import msgspec
import pyarrow
import pyarrow.parquet
import pytest
import torch
from checkpoints import write_tokenizer
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from tokenizers import decoders
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from user_errors import user_error

from noloco_node.data import dataset_documents, local_rows
from noloco_node.data.blocks import Blocks, open_blocks
from noloco_node.data.encoding import CHATML, open_tokenizer
from noloco_node.data.local_rows import JsonShard, ParquetShard
from noloco_node.data.row_encoder import RowEncoder, UnfitRowError, sequences_of
from noloco_node.data.row_forms import BadRow, GoodRow, row_of
from noloco_node.data.token_text import Prompts
from noloco_node.errors import Exit, UserError
from noloco_node.planning.model_layout import model_layout
from noloco_node.run.config import DataConfig, ModelConfig, PipelineConfig, RunConfig
from pipeline.activation_codec import ids_of
from pipeline.messages import FIRST

PROMPT = DataConfig(source="json", path="rows.jsonl", form="prompt")
MESSAGES = DataConfig(source="json", path="rows.jsonl", form="messages", chat_template="chatml")
quick = settings(max_examples=60)
texts = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), max_size=12)
conversations = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(("system", "user", "assistant")), "content": texts}),
    min_size=1,
    max_size=5,
).filter(lambda messages: any(message["role"] == "assistant" for message in messages))


def stretches(tokens: Tensor, decode: Any) -> list[tuple[bool, str]]:
    """Return the text of tokens, by whether they are learnt."""
    return [
        (is_learnt, decode(ids_of(tokens.new_tensor(list(each))).tolist()))
        for is_learnt, each in groupby(tokens.tolist(), lambda token: token >= 0)
    ]


def of_bytes(ids: list[int]) -> str:
    return bytes(each - 3 for each in ids if each >= 3).decode()


def spelt(tokenizer: Any) -> Any:
    """Return what turns ids of the tokenizer `words` into text: it has no decoder."""

    def decode(ids: list[int]) -> str:
        return "".join(tokenizer.convert_ids_to_tokens(ids)).replace("Ġ", " ").replace("Ċ", "\n")

    return decode


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of byte pairs, whose template ends each message with its end token."""
    directory = tmp_path_factory.mktemp("words")
    write_tokenizer(directory, ["the answer is four, and the question is what two and two are "] * 3)
    return directory


def templated(directory: Path, template: str, place: Path) -> DataConfig:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(place)
    return msgspec.structs.replace(MESSAGES, chat_template="", tokenizer=str(place))


# Which tokens are learnt.


@drawn(st.tuples(texts, texts.filter(bool)))
@quick
def test_the_completion_and_its_end_are_learnt(pair: tuple[str, str]) -> None:
    prompt, completion = pair
    tokens = RowEncoder(PROMPT).document(json.dumps(pair))
    assert ids_of(tokens).tolist() == [*(byte + 3 for byte in (prompt + completion).encode()), 1]
    given = max(1, len(prompt.encode()))
    assert tokens.lt(0).tolist() == [True] * given + [False] * (len(tokens) - given)


@drawn(st.lists(conversations, min_size=1, max_size=4), st.lists(st.integers(0, 3), max_size=9), st.integers(0, 300))
@quick
def test_a_row_that_is_read_again_is_the_same_whether_it_is_kept_or_not(
    rows: list[list[dict[str, str]]], order: list[int], room: int
) -> None:
    keeping = RowEncoder(MESSAGES)
    keeping._room = room
    for place in order:
        text = json.dumps(rows[place % len(rows)])
        assert torch.equal(keeping.document(text), RowEncoder(MESSAGES).document(text))
    assert sum(map(len, keeping._kept.values())) <= room


@drawn(conversations)
@quick
def test_what_the_assistant_says_is_learnt(messages: list[dict[str, str]]) -> None:
    tokens = RowEncoder(MESSAGES).document(json.dumps(messages))
    whole = "".join(f"<|im_start|>{each['role']}\n{each['content']}<|im_end|>\n" for each in messages)
    assert of_bytes(ids_of(tokens).tolist()) == whole
    assert ids_of(tokens)[-1] == 1
    answers = [f"{each['content']}<|im_end|>\n" for each in messages if each["role"] == "assistant"]
    said = [text for is_learnt, text in stretches(tokens, of_bytes) if is_learnt]
    if messages[0]["role"] == "assistant":
        # Nothing is there to begin the answer, and its first token is predicted by no other.
        answers[0] = f"|im_start|>assistant\n{answers[0]}".removeprefix("<")
    assert said == answers
    assert bool(tokens[-1] >= 0) == (messages[-1]["role"] == "assistant")


ASKED = [
    {"role": "user", "content": "what is two and two"},
    {"role": "assistant", "content": "the answer is four"},
    {"role": "user", "content": "and the question"},
    {"role": "assistant", "content": "two and two"},
]
SAYS = r"""
{%- for message in messages -%}
{{ message['role'] + ':\n' }}
{%- if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}
{%- else %}{{ message['content'] + eos_token }}{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ 'assistant:\n' }}{% endif -%}"""
FOLLOWS = SAYS.replace("{% generation %}", "").replace("{% endgeneration %}", "")
THINKS = FOLLOWS.replace(r"{{ 'assistant:\n' }}", r"{{ 'assistant:\n<think>' }}")


@pytest.mark.parametrize("template", [SAYS, FOLLOWS, THINKS], ids=["says", "follows", "thinks"])
def test_a_tokenizers_own_template_says_what_answers_are(words: Path, tmp_path: Path, template: str) -> None:
    data = templated(words, template, tmp_path)
    tokenizer = open_tokenizer(data)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    tokens = RowEncoder(data).document(json.dumps(ASKED))
    assert ids_of(tokens).tolist() == tokenizer.apply_chat_template(ASKED, return_dict=False)
    assert stretches(tokens, spelt(tokenizer)) == [
        (False, "user:\nwhat is two and two<|end|>assistant:\n"),
        (True, "the answer is four<|end|>"),
        (False, "user:\nand the question<|end|>assistant:\n"),
        (True, "two and two<|end|>"),
    ]


@drawn(texts, texts.filter(bool))
@quick
def test_a_prompt_is_what_stands_before_an_answer(question: str, answer: str) -> None:
    conversation = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    for data, row in ((PROMPT, [question, answer]), (MESSAGES, conversation)):
        encoder = RowEncoder(data)
        prompt = encoder.prompt(question)
        assert ids_of(encoder.document(json.dumps(row)))[: len(prompt)].tolist() == prompt
    assert encoder.closing() == ({1}, "<|im_end|>")


def test_a_prompt_in_a_tokenizers_own_template_and_what_ends_the_answer(words: Path, tmp_path: Path) -> None:
    data = templated(words, SAYS, tmp_path / "says")
    tokenizer = open_tokenizer(data)
    begun = tokenizer.apply_chat_template(ASKED[:1], add_generation_prompt=True, return_dict=False)
    assert RowEncoder(data).prompt(ASKED[0]["content"]) == begun
    assert RowEncoder(data).closing() == ({tokenizer.eos_token_id}, "<|end|>")
    turns = templated(words, SAYS.replace("eos_token", "'<|turn|>'"), tmp_path / "turns")
    tokenizer = open_tokenizer(turns)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    tokenizer.save_pretrained(tmp_path / "turns")
    assert RowEncoder(turns).closing() == (set(tokenizer.all_special_ids), "<|turn|>")


def test_of_a_text_and_a_special_token_that_end_an_answer_the_text_is_not_shown(words: Path, tmp_path: Path) -> None:
    data = templated(words, SAYS.replace("eos_token", "' the end' + eos_token"), tmp_path)
    tokenizer = open_tokenizer(data)
    tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save_pretrained(tmp_path)
    assert RowEncoder(data).closing() == ({tokenizer.eos_token_id}, "the end")
    question = "what is two and two"
    prompts = Prompts(data, [question])
    answer = tokenizer("the answer is four the end<|end|>", add_special_tokens=False)["input_ids"]
    assert "".join(prompts.spelled(question, answer)).strip() == "the answer is four"
    over = [count for count in range(len(answer) + 1) if prompts.is_over(answer[:count])]
    assert over
    assert tokenizer.decode(answer[: over[0]]).endswith("the end")


def test_a_template_that_does_not_take_a_prompt_is_said(words: Path, tmp_path: Path) -> None:
    strict = "{% if messages[0]['role'] == 'user' %}{{ raise_exception('a system begins') }}{% endif %}" + FOLLOWS
    encoder = RowEncoder(templated(words, strict, tmp_path))
    assert encoder.closing()[1] == ""
    with pytest.raises(UserError, match="does not write this prompt") as caught:
        encoder.prompt("what is two and two")
    assert (caught.value.code, caught.value.why) == (Exit.DATA, "a system begins")


def test_a_token_across_the_beginning_of_an_answer_is_learnt(words: Path) -> None:
    """The prompt ends with a space that the tokenizer joins to the answer's first word."""
    data = msgspec.structs.replace(PROMPT, tokenizer=str(words))
    tokenizer = open_tokenizer(data)
    tokens = RowEncoder(data).document(json.dumps(["the answer is ", "four"]))
    assert ids_of(tokens).tolist() == [*tokenizer("the answer is four")["input_ids"], tokenizer.eos_token_id]
    assert stretches(tokens, spelt(tokenizer)) == [(False, "the answer is"), (True, " four<|end|>")]


def test_special_tokens_in_a_prompt_are_text(words: Path) -> None:
    data = msgspec.structs.replace(PROMPT, tokenizer=str(words))
    tokens = RowEncoder(data).document(json.dumps(["<|end|>", "four"]))
    assert (ids_of(tokens) == open_tokenizer(data).eos_token_id).sum() == 1


def test_what_a_template_does_not_take_or_writes_in_two_ways_is_unfit(words: Path, tmp_path: Path) -> None:
    strict = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('the user begins') }}{% endif %}" + FOLLOWS
    with pytest.raises(UnfitRowError, match="does not fit the chat template") as caught:
        RowEncoder(templated(words, strict, tmp_path / "a")).document(json.dumps(ASKED[1:]))
    assert caught.value.detail == "the user begins"
    forgets = FOLLOWS.replace("message['content'] + eos_token", "(message['content'] if loop.last else '') + eos_token")
    with pytest.raises(UnfitRowError, match="otherwise once another message follows"):
        RowEncoder(templated(words, forgets, tmp_path / "b")).document(json.dumps(ASKED))


@pytest.mark.parametrize("tokenizer", ["byt5", "words"])
def test_a_tokenizer_without_a_template_is_said(words: Path, tokenizer: str) -> None:
    name = str(words) if tokenizer == "words" else tokenizer
    data = msgspec.structs.replace(MESSAGES, chat_template="", tokenizer=name)
    with user_error(Exit.DATA, "has no chat template") as caught:
        RowEncoder(data)
    assert "chatml" in caught.value.hint
    assert RowEncoder(msgspec.structs.replace(data, chat_template="chatml"))


def test_a_run_that_names_the_built_in_template_hands_it_on(words: Path) -> None:
    assert open_tokenizer(msgspec.structs.replace(MESSAGES, tokenizer=str(words))).chat_template == CHATML


# Which rows fit.

ANSWER = {"role": "assistant", "content": "four"}


@pytest.mark.parametrize(
    ("data", "row", "why"),
    [
        (PROMPT, {"prompt": "a"}, "has no field 'completion'"),
        (PROMPT, {"prompt": None, "completion": "b"}, "has null in the field 'prompt'"),
        (PROMPT, {"prompt": "a", "completion": 3}, "has no text in the field 'completion'"),
        (PROMPT, {"prompt": "a", "completion": ""}, "has an empty text in the field 'completion'"),
        (MESSAGES, {"messages": "hello"}, "has in the field 'messages' no list of messages"),
        (MESSAGES, {"messages": []}, "has in the field 'messages' no list of messages"),
        (MESSAGES, {"messages": ["hello"]}, "a message that is no object"),
        (MESSAGES, {"messages": [{"role": "user"}, ANSWER]}, "a message whose content is no text"),
        (MESSAGES, {"messages": [{"content": "x"}, ANSWER]}, "a message whose role is no text"),
        (MESSAGES, {"messages": ASKED[:1]}, "no message whose role is 'assistant'"),
        (MESSAGES, {"text": "x", "more": 1}, "has no field 'messages'"),
    ],
)
def test_a_row_that_does_not_fit_is_named_with_the_reason(data: DataConfig, row: dict[str, Any], why: str) -> None:
    found = row_of(data, row, row, "rows.jsonl:7")
    assert isinstance(found, BadRow)
    assert why in found.kind
    assert found.where.startswith("rows.jsonl:7")


def test_other_fields_of_rows_and_messages_do_no_harm() -> None:
    row = {"messages": [{"role": "user", "content": "x", "name": None, "id": 3}, ANSWER], "source": "y"}
    assert row_of(MESSAGES, row, row, "a:1") == GoodRow(
        '[{"content":"x","id":3,"role":"user"},{"content":"four","role":"assistant"}]', "a:1"
    )


@drawn(st.dictionaries(st.text(), st.none(), max_size=30))
def test_a_message_about_fields_is_short_and_moves_no_cursor(row: dict[str, None]) -> None:
    found = row_of(MESSAGES, row, row, "a:1")
    assert isinstance(found, BadRow)
    assert found.where.isprintable()
    assert len(found.where) < 6000


@pytest.mark.parametrize("depth", [500, 985, 3000, 100_000])
def test_a_row_of_any_depth_ends_nothing(tmp_path: Path, depth: int) -> None:
    good = json.dumps({"messages": [*ASKED[:1], ANSWER]})
    deep = good[:-2] + ', {"role": "user", "content": "x", "more": ' + "[" * depth + "]" * depth + "}]}"
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{good}\n{deep}\n{good}\n")
    first, second, third = JsonShard("rows.jsonl", path, MESSAGES)
    assert isinstance(first, GoodRow)
    assert isinstance(third, GoodRow)
    assert isinstance(second, GoodRow | BadRow)


@drawn(
    lengths=st.lists(st.integers(1, 120), min_size=1, max_size=12),
    packed=st.booleans(),
    read=st.integers(0, 12),
    ended=st.booleans(),
)
def test_a_line_that_is_too_long_is_left_out_and_never_held_whole(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], packed: bool, read: int, ended: bool
) -> None:
    path = tmp_path_factory.mktemp("long") / ("rows.jsonl.gz" if packed else "rows.jsonl")
    lines = [json.dumps({"text": "x" * length}) for length in lengths]
    content = ("\n".join(lines) + "\n" * ended).encode()
    path.write_bytes(gzip.compress(content) if packed else content)
    most, data = 64, DataConfig(source="json", path=str(path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_rows, "MOST_LINE_BYTES", most)
        first, rest = JsonShard("rows", path, data), JsonShard("rows", path, data)
        found = list(islice(first, read))
        rest.load_state_dict(first.state_dict())
        found += rest
    for number, (row, line) in enumerate(zip(found, lines, strict=True), 1):
        is_long = len(line) + (ended or number < len(lines)) > most
        assert isinstance(row, BadRow) == is_long
        assert row.where == f"rows:{number}"


def test_rows_in_another_encoding_than_utf_8_are_told_as_such(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    data = DataConfig(source="json", path=str(path))
    for rows, kind in (
        ('{"text": "Öl"}\n', "is not text in UTF-8 and is left out"),
        ('[{"text": "Öl"}]', "is not text in UTF-8 and is left out with all that follows"),
    ):
        path.write_bytes(rows.encode("latin-1"))
        (bad,) = JsonShard("rows", path, data)
        assert isinstance(bad, BadRow)
        assert bad.kind == kind


SCALAR = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)


@drawn(
    rows=st.lists(SCALAR | st.lists(SCALAR, max_size=2) | st.fixed_dictionaries({"text": SCALAR}), max_size=8),
    indent=st.sampled_from([None, 0, 3]),
    ascii_only=st.booleans(),
    chunk=st.integers(1, 30),
    most=st.sampled_from([30, 10**6]),
    kept=st.floats(0.0, 1.0) | st.just(1.0),
    before=st.sampled_from(["", "\ufeff", "\n" * 100, "\ufeff" + " \t\r\n" * 3000]),
    behind=st.sampled_from(["", "\r\n", "[1]", ","]),
    read=st.integers(0, 12),
)
def test_an_array_is_read_in_pieces_and_what_is_whole_of_it_is_used(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[Any],
    indent: int | None,
    ascii_only: bool,
    chunk: int,
    most: int,
    kept: float,
    before: str,
    behind: str,
    read: int,
) -> None:
    path = tmp_path_factory.mktemp("array") / "rows.json"
    content = json.dumps(rows, indent=indent, ensure_ascii=ascii_only).encode(errors="replace")
    torn = content[: max(1, int(kept * len(content)))] + (behind.encode() if kept == 1.0 else b"")
    path.write_bytes(before.encode() + torn)
    data = DataConfig(source="json", path=str(path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_rows, "READ_CHARACTERS", chunk)
        patch.setattr(local_rows, "MOST_LINE_BYTES", most)
        first, rest = JsonShard("rows", path, data), JsonShard("rows", path, data)
        found = list(islice(first, read))
        if all(isinstance(row, GoodRow) or "left out with" not in row.kind for row in found):
            rest.load_state_dict(first.state_dict())
            found += rest
    ends = [each for each in found if isinstance(each, BadRow) and "left out with all that follows" in each.kind]
    assert found[len(found) - len(ends) :] == ends
    assert len(ends) <= 1
    whole = kept == 1.0 and not behind.strip()
    if whole and most > len(content):
        assert not ends
        assert len(found) == len(rows)
    if not whole or len(found) - len(ends) < len(rows):
        assert len(ends) == 1
    texts = [each.text for each in found if isinstance(each, GoodRow)]
    parsed = json.loads(content)[: len(found) - len(ends)]
    assert texts == [row["text"] for row in parsed if isinstance(row, dict) and isinstance(row.get("text"), str)]
    for number, each in enumerate(found, 1):
        assert each.where.split(", ")[:2] == ["rows", f"row {number}"]


def test_a_row_of_a_table_that_python_cannot_hold_is_left_out_alone(tmp_path: Path) -> None:
    message = pyarrow.struct({"role": pyarrow.string(), "content": pyarrow.string(), "at": pyarrow.timestamp("us")})
    rows = [[ANSWER | {"at": at}] for at in (0, 2**62, 1)]
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"messages": pyarrow.array(rows, pyarrow.list_(message))}), path)
    before, unreadable, after = ParquetShard("rows.parquet", path, 0, MESSAGES)
    assert unreadable == BadRow("cannot be read and is left out", "rows.parquet, row group 0, row 2")
    for row in (before, after):
        assert isinstance(row, GoodRow | BadRow)
        assert row.where.startswith("rows.parquet, row group 0, row ")


# In blocks.

LENGTH = 24
ROWS = [{"prompt": f"{number} + 1 =", "completion": f" {number + 1}"} for number in range(60)]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_documents, "CHUNK_ROWS", 7)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """The rows as JSON Lines, and as parquet; line 31 has no completion, line 41 is long."""
    rows: list[dict[str, str]] = [*ROWS[:30], {"prompt": "x"}, *ROWS[30:39], {"prompt": "x" * 99, "completion": "y"}]
    rows += ROWS[39:]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = pyarrow.Table.from_pylist([{"prompt": None, "completion": None} | row for row in rows])
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=8)
    return tmp_path


def config(files: Path, source: str, **others: Any) -> DataConfig:
    path = str(files / {"json": "rows.jsonl", "parquet": "rows.parquet"}[source])
    return msgspec.convert(
        {"source": source, "path": path, "form": "prompt", "validation_percent": 20.0} | others, DataConfig
    )


def rows_in(batch: Tensor) -> list[str]:
    """Return the rows of blocks as text; check that each is whole, and that the next row's first token follows."""
    found = []
    for block in batch:
        assert block[0] < -FIRST
        assert block[-1] < 0, "the next row's first token is not learnt here"
        begins = [*(block[:-1] < -FIRST).nonzero().flatten().tolist(), len(block) - 1]
        for begin, end in pairwise(begins):
            row = block[begin:end]
            ends = int((row >= 0).nonzero().max())
            assert (ids_of(row)[ends:] == 1).all(), "nothing but filling follows"
            assert (end == begins[-1]) or ends + 1 == len(row), "filling stands at the end of a sequence"
            found.append(of_bytes(ids_of(row[:ends]).tolist()))
    return found


@pytest.mark.parametrize("source", ["json", "parquet"])
@pytest.mark.parametrize(("shuffle", "packed"), [(True, True), (True, False), (False, True)])
def test_each_row_that_fits_is_read_once_an_epoch_here_or_held_out(
    files: Path, source: str, shuffle: bool, packed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    data = config(files, source, shuffle=shuffle, packed=packed)
    expected = Counter(row["prompt"] + row["completion"] for row in ROWS)
    held_out = Counter(rows_in(torch.cat(list(open_blocks(data, LENGTH, 0, "", "validation").batches(3)))))
    assert 3 < len(held_out) < 30
    assert held_out.total() == len(held_out)
    trained = open_blocks(data, LENGTH, 0, "peer")
    found, blocks, count = list[str](), 0, len(ROWS) - len(held_out)
    while len(found) < 2 * count:
        found, blocks = found + rows_in(trained.next_batch(1)), blocks + 1
    for epoch in range(2):
        assert Counter(found[epoch * count :][:count]) == expected - held_out
    assert blocks == 2 * count if not packed else blocks < 1.4 * count
    said = [line.partition("warning: ")[2] for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert sum("completion" in line for line in said) == 2, "by each of the two readers"
    assert sum(f"is longer than a sequence of {LENGTH} tokens and is left out" in line for line in said) in (1, 2)
    if source == "json":
        assert any("rows.jsonl:31" in line for line in said)
        assert any("rows.jsonl:41 (101 tokens)" in line for line in said)


def test_json_and_parquet_hold_the_same_rows_and_hold_out_the_same(files: Path) -> None:
    one, other = (
        Counter(rows_in(torch.cat(list(open_blocks(config(files, each), LENGTH, 0, "", "validation").batches(4)))))
        for each in ("json", "parquet")
    )
    assert one == other


@pytest.mark.parametrize("source", ["json", "parquet"])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("cut", [0, 1, 29, 47, 90])
def test_cut_anywhere_and_restored_it_goes_on_the_same(files: Path, source: str, packed: bool, cut: int) -> None:
    data = config(files, source, packed=packed)
    whole, resumed = (open_blocks(data, LENGTH, 5, "peer") for _ in range(2))
    for blocks in (whole, resumed):
        blocks.next_batch(cut)
    position = json.loads(json.dumps(resumed.position()))
    resumed = open_blocks(data, LENGTH, 5, "peer")
    assert resumed.restore(position)
    for _ in range(6):
        assert torch.equal(whole.next_batch(9), resumed.next_batch(9))


def test_a_position_is_of_one_form_and_one_template(files: Path) -> None:
    position = open_blocks(config(files, "json"), LENGTH, 5, "peer").position()
    turned = config(files, "json", prompt_field="completion", completion_field="prompt")
    for other in (turned, config(files, "json", form="text", field="prompt")):
        assert not open_blocks(other, LENGTH, 5, "peer").restore(position)


@pytest.mark.parametrize("part", ["train", "validation"])
def test_where_no_row_fits_a_sequence_that_is_said(files: Path, part: Any) -> None:
    data = config(files, "json", validation_percent=20.0)
    with pytest.raises(UserError) as caught:
        list(islice(open_blocks(data, 4, 0, "p", part).batches(1), 1))
    assert caught.value.code is (Exit.DATA if part == "train" else Exit.CONFIG)
    assert "longer than a sequence of 4 tokens" in caught.value.why


@pytest.mark.parametrize("first_that_fits", [29, 30])
def test_of_the_hub_a_part_says_that_no_row_fits(monkeypatch: pytest.MonkeyPatch, first_that_fits: int) -> None:
    """A whole pass over a data set of the hub may take weeks."""
    rows = [{"prompt": "x" * 99, "completion": "y"}] * first_that_fits + [{"prompt": "x", "completion": "y"}] * 99
    stream = datasets.Dataset.from_list(rows).to_iterable_dataset()
    monkeypatch.setattr("noloco_node.data.blocks.load_rows", lambda data: stream)
    monkeypatch.setattr("noloco_node.data.blocks.MOST_UNFIT", 30)
    data = DataConfig(
        source="hub", path="some/rows", commit="0" * 40, form="prompt", validation_percent=0.0, shuffle=False
    )
    blocks = open_blocks(data, LENGTH, 0, "p")
    if first_that_fits < 30:
        assert len(blocks.next_batch(100)) == 100
    else:
        with user_error(Exit.DATA, "No row of the data fits"):
            blocks.next_batch(1)


def test_where_no_row_fits_the_form_that_is_said(files: Path) -> None:
    data = config(files, "json", form="messages", chat_template="chatml")
    with user_error(Exit.DATA, "no rows that fit") as caught:
        open_blocks(data, LENGTH, 0, "p").next_batch(1)
    assert "rows.jsonl:1" in caught.value.why


def test_rows_share_a_sequence_as_far_as_they_fit(tmp_path: Path) -> None:
    """In the order in which they are read, and no row is divided."""
    rows = [{"prompt": "x" * count, "completion": "y"} for count in (3, 4, 9, 8, 30, 2)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = config(tmp_path, "json", validation_percent=0.0, shuffle=False)
    one, two, three = open_blocks(data, LENGTH, 0, "p").next_batch(3)
    assert [rows_in(block[None]) for block in (one, two, three)] == [
        ["xxxy", "xxxxy", "x" * 9 + "y"],
        ["x" * 8 + "y", "xxy", "xxxy"],
        ["xxxxy", "x" * 9 + "y"],
    ]
    assert sequences_of([5, 6, 11, 10, 4, 5, 6, 11], LENGTH) == 3


def test_the_last_row_held_out_is_evaluated_too(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[7]))
    data = msgspec.structs.replace(config(tmp_path, "json"), validation_percent=100.0)
    (batch,) = open_blocks(data, LENGTH, 0, "", "validation").batches(8)
    assert rows_in(batch) == ["7 + 1 = 8"]
    assert len(batch) == 1


def test_rows_of_a_data_set_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"messages": ASKED, "other": 1}, {"messages": ASKED[:1], "other": 2}]
    stream = datasets.Dataset.from_list(rows).to_iterable_dataset()
    monkeypatch.setattr("noloco_node.data.blocks.load_rows", lambda data: stream)
    data = DataConfig(
        source="hub", path="some/rows", commit="0" * 40, form="messages", chat_template="chatml", validation_percent=0.0
    )
    blocks: Blocks = open_blocks(data, 512, 0, "p")
    text = of_bytes(ids_of(blocks.next_batch(1)[0, :-1]).tolist())
    assert text.startswith("<|im_start|>user\nwhat is two and two<|im_end|>\n<|im_start|>assistant\nthe answer is four")
    assert blocks.news() == [
        "text: row 2 has in the field 'messages' no message whose role is 'assistant' and is left out"
    ]
    monkeypatch.setattr(
        "noloco_node.data.blocks.load_rows", lambda data: datasets.Dataset.from_list([{"a": 1}]).to_iterable_dataset()
    )
    with pytest.raises(UserError, match="no field 'messages'"):
        open_blocks(data, 512, 0, "p").next_batch(1)


def test_a_run_whose_rows_would_see_each_other_is_refused() -> None:
    sizes = {"hidden_size": 32, "n_layer": 3, "n_head": 4, "vocab_size": 384}
    model, pipeline = ModelConfig(architecture="bloom", sizes=sizes), PipelineConfig(sequence_length=32)
    run = RunConfig(model=model, pipeline=pipeline, data=PROMPT)
    with user_error(Exit.CONFIG, "cannot share a sequence"):
        model_layout(run)
    assert model_layout(msgspec.structs.replace(run, data=msgspec.structs.replace(PROMPT, packed=False)))
