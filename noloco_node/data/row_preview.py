"""What a run reads of its data: three sequences as text, with the tokens that are learnt marked, and counts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import groupby
from statistics import median
from textwrap import wrap
from typing import Any

import msgspec
from torch import Tensor

from noloco_node.data.blocks import open_blocks
from noloco_node.data.dataset_documents import RowDocuments, load_rows
from noloco_node.data.encoding import open_tokenizer
from noloco_node.data.file_documents import ReadingOrder, UnreadText, row_side_of
from noloco_node.data.row_encoder import RowEncoder, UnfitRowError, sequences_of
from noloco_node.data.row_forms import data_error, printable
from noloco_node.errors import Exit, UserError, config_error
from noloco_node.run.config import DataConfig, RunConfig
from pipeline.activation_codec import ids_of, learnt

SHOWN = 3
MEASURED = 10_000  # rows of which the tokens are counted, or until some fit; of a data set on the hub no more are read
WIDTH = 80
GIVEN, LEARNT = "  | ", "  > "  # begin a line of text: tokens that are only given, and tokens that are learnt
MOST_LINES = 12  # lines shown of a stretch of text; of a longer one its two ends


def preview(run: RunConfig, data: DataConfig) -> Iterator[str]:
    """Yield the lines of a preview of `data`, read as in this run.

    Raises `UserError` (DATA) at the end if rows do not fit, (CONFIG) if there is no data.
    """
    if run.model.is_foreign and not run.model.is_in_stages:
        raise config_error(
            "The run reads no data of its run file.",
            "it trains a module of a program, which reads its own",
            "look at the data in that program (docs/python.md)",
        )
    length, unfit = run.pipeline.sequence_length, None
    weights = [each.weight for each in data.mixture] or [1.0]
    for number, (source, weight) in enumerate(zip(data.sources, weights, strict=True)):
        share = f"{weight / sum(weights):.1%} of the sequences are of this source." if data.mixture else ""
        if number:
            yield ""
        yield from _filled(f"{source.text_name}, {_what_is_read(source)}. Sequences of {length:,} tokens. {share}")
        yield ""
        try:
            yield from _rows(source, length) if source.has_rows else _text(source, length, run.seed)
        except UserError as error:
            if error.code is not Exit.DATA:
                raise
            unfit = unfit or error  # a reader of several sources sees them all
    if unfit is not None:
        raise unfit


def _what_is_read(data: DataConfig) -> str:
    fields = " and ".join(data.row_fields)
    match data.form:
        case "prompt":
            return f"rows of a prompt and its completion (fields {fields})"
        case "messages":
            template = "the built-in template chatml" if data.chat_template else "the tokenizer's own chat template"
            return f"rows of messages (field {fields}), by {template}"
    return "text" if data.source in ("stdlib", "text") else f"rows of text (field {fields})"


def _text(data: DataConfig, length: int, seed: int) -> Iterator[str]:
    with closing(open_blocks(data, length, seed, "")) as blocks:
        tokenizer = open_tokenizer(data)
        for number in range(1, SHOWN + 1):
            (block,) = blocks.next_batch(1)
            yield f"Sequence {number}, which begins in {blocks.document}"
            yield from _shown(block[:length], tokenizer)
            yield ""
    yield f"Each token is learnt ({LEARNT.strip()}): the form is text."


def _rows(data: DataConfig, length: int) -> Iterator[str]:
    encoder, unread = RowEncoder(data), UnreadText(tell=None)
    whole = msgspec.structs.replace(data, validation_percent=100.0)
    documents = RowDocuments(whole, ReadingOrder("validation", 0, "", shuffle=False), lambda: load_rows(data), unread)
    tokenizer = open_tokenizer(data)
    sizes = list[tuple[int, int]]()  # of each row that is measured: its tokens, and how many of them are learnt
    shown, fitting, held_out, more = 0, 0, 0, False
    with closing(documents):
        while (document := documents.next()) is not None:
            if data.source == "hub" and fitting + sum(unread.counts.values()) >= MEASURED:
                more = True
                break
            (text,) = document.texts
            if fitting < MEASURED or shown < SHOWN:
                try:
                    tokens = encoder.document(text)
                except UnfitRowError as error:
                    unread.note(*error.noted(document.name))
                    continue
                sizes.append((len(tokens), learnt(tokens)))
                if shown < SHOWN and len(tokens) <= length:
                    shown += 1
                    yield f"{document.name}: {len(tokens):,} tokens, {learnt(tokens):,} of them learnt"
                    yield from _shown(tokens, tokenizer)
                    yield ""
            fitting += 1
            held_out += bool(row_side_of(text, "validation", data.validation_percent))
    if any(tokens <= length for tokens, _ in sizes):
        yield from _summary(sizes, length, data, fitting, held_out, more=more)
    reasons = [each.removeprefix("text: ") for each in unread.summary()]
    if reasons:
        yield ""
        yield "Rows that do not fit, the first of each kind:"
        for reason in reasons:
            yield from _filled(reason, "  ")
    unfit = sum(unread.counts.values())
    all_rows = f"{fitting + unfit:,} rows"
    if not shown:
        raise data_error(
            f'None of {all_rows} fits data.form = "{data.form}" and a sequence.',
            "; ".join([*reasons[:1], *([f"{fitting:,} are longer than {length:,} tokens"] if fitting else [])])
            or "there are no rows",
            "other fields, another data.form, or a larger pipeline.sequence_length",
        )
    if unfit:
        raise data_error(
            f'{unfit:,} of {all_rows} do not fit data.form = "{data.form}".',
            reasons[0],
            "correct them; in training such rows are left out",
        )


def _summary(
    sizes: list[tuple[int, int]], length: int, data: DataConfig, fitting: int, held_out: int, *, more: bool
) -> Iterator[str]:
    measured, too_long = len(sizes), [tokens for tokens, _ in sizes if tokens > length]
    tokens, learnt_ones = zip(*(each for each in sizes if each[0] <= length), strict=True)
    total, shortest, longest = sum(tokens), min(tokens), max(tokens)
    of = "" if measured == fitting and not more else f" of the first {measured:,}"
    rows = "row fits" if fitting == 1 else "rows fit"
    yield from _filled(
        f"{fitting:,} {rows} the form{' so far; there are more' if more else ''}; {held_out:,} held out for evaluation."
    )
    if measured < fitting:
        yield from _filled(f"Of those after the first {measured:,} only the fields were looked at.")
    yield from _filled(
        f"Those{of} that fit a sequence have {shortest:,} to {longest:,} tokens, half of them "
        f"{median(tokens):,.0f} or fewer; {sum(learnt_ones) / total:.0%} of the tokens are learnt "
        f"({LEARNT.strip()}), the others are only given ({GIVEN.strip()})."
    )
    sequences = sequences_of(tokens, length) if data.packs else len(tokens)
    together = f"{len(tokens) / sequences:.1f} rows share a sequence" if data.packs else "A row is a sequence"
    yield from _filled(f"{together}: {1 - total / (length * sequences):.0%} of what is computed is filling.")
    if count := len(too_long):
        are = "is" if count == 1 else "are"
        yield from _filled(
            f"{count:,}{of or ' of them'} {are} longer than a sequence and {are} left out in training: the longest has "
            f"{max(too_long):,} tokens."
        )


def _shown(tokens: Tensor, tokenizer: Any) -> Iterator[str]:
    """Yield marked tokens as lines of text, each with its mark."""
    for is_learnt, stretch in groupby(tokens.tolist(), lambda token: token >= 0):
        ids = ids_of(tokens.new_tensor(list(stretch))).tolist()
        lines = list(_lines(str(tokenizer.decode(ids, skip_special_tokens=False))))
        if len(lines) > MOST_LINES:
            half = MOST_LINES // 2
            lines[half:-half] = [f"... {len(lines) - 2 * half:,} more lines"]
        yield from (f"{LEARNT if is_learnt else GIVEN}{line}" for line in lines)


def _lines(text: str) -> Iterator[str]:
    """Yield a text as lines that fit; the end of a line is shown, and what cannot be printed."""
    for line in text.splitlines(keepends=True):
        shown = printable(line)
        yield from (shown[at : at + WIDTH - len(GIVEN)] for at in range(0, len(shown), WIDTH - len(GIVEN)))


def _filled(text: str, indent: str = "") -> list[str]:
    return wrap(text, WIDTH, initial_indent=indent, subsequent_indent=2 * indent)
