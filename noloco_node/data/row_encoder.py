"""From the text of a row to tokens, each learnt or only given (`pipeline.messages`).

    prompt     the tokenizer's beginning and the prompt are given; the completion and the end token are learnt
    messages   a chat template writes the conversation as a text; what the assistant says is learnt, with the mark that
               ends it

A token that holds a character of an answer is learnt. What an answer is in a template's text, the template says itself
(`{% generation %}`), or it follows from the text of the messages before it and of those up to it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from noloco_node.data.encoding import Encoder, of_unicode, open_encoder, open_tokenizer, tokenized
from noloco_node.data.row_forms import ASSISTANT, data_error
from noloco_node.errors import one_line
from noloco_node.run.config import DataConfig
from pipeline.activation_codec import first, given, ids_of, learnt

_SAYS_ANSWERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
KEPT_TOKENS = 2**21  # tokens of rows that are kept: few rows are read again and again
Span = tuple[int, int]


class UnfitRowError(ValueError):
    """A row does not become tokens; the text is the rest of a sentence about it, the same for all rows of its kind.

    `detail`: what is wrong with this one.
    """

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(kind)
        self.detail = detail

    def noted(self, where: str) -> tuple[str, str]:
        """Return the arguments of `UnreadText.note` about the row at a place."""
        return f"{self} and is left out", f"{where} ({self.detail})" if self.detail else where


class RowEncoder:
    """Turns the text of a row (`row_of`) into marked tokens."""

    def __init__(self, data: DataConfig) -> None:
        """Open the run's tokenizer and its template; raise `UserError` if one is missing."""
        in_messages = data.form == "messages"
        tokenizer = None if data.has_byte_tokenizer and not in_messages else open_tokenizer(data)
        self._plain: Encoder = open_encoder(data, tokenizer)
        self._tokenizer = None if data.has_byte_tokenizer else tokenizer
        self._template = _template_of(data, tokenizer) if in_messages else None
        self._ends = not in_messages or data.chat_template != ""
        """Whether the end token follows a row: a tokenizer's own template has its own end."""
        self.name = f"{self._plain.name}|{data.form}|{data.chat_template}"
        self.end = self._plain.end
        self._kept: dict[str, Tensor] = {}
        """The tokens of rows, by their text, until their number reaches `KEPT_TOKENS`."""
        self._room = KEPT_TOKENS

    def filling(self, count: int) -> Tensor:
        """Return tokens that stand where a row has ended."""
        return given(torch.full((count,), self.end, dtype=torch.int32))

    def document(self, text: str) -> Tensor:
        """Return a row as marked tokens, however many; raise `UnfitRowError` where none would be learnt.

        The first one is only given: a sequence may end with the first token of the next row. Nobody changes them.
        """
        found = self._kept.get(text)
        if found is None:
            found = self._document(text)
            if len(found) <= self._room:
                self._room -= len(found)
                self._kept[text] = found
        return found

    def _document(self, text: str) -> Tensor:
        try:
            content = msgspec.json.decode(text)
        except RecursionError:
            raise UnfitRowError("is nested too deeply") from None
        if self._template is None:
            prompt, completion = content
            answer, ends_learnt = (len(prompt), len(prompt) + len(completion)), True
            begin = given(torch.tensor(self._plain.begin, dtype=torch.int32))
            parts = [begin, self._marked(prompt + completion, [answer])]
        else:
            parts, ends_learnt = [self._marked(*self._template.written(content))], content[-1]["role"] == ASSISTANT
        if self._ends:
            end = torch.tensor([self.end], dtype=torch.int32)
            parts.append(end if ends_learnt else given(end))
        tokens = torch.cat(parts)
        tokens[:1] = first(ids_of(tokens[:1]))
        if not learnt(tokens):
            raise UnfitRowError("has no token to learn")
        return tokens

    def prompt(self, text: str) -> list[int]:
        """Return the tokens that a model goes on from; in messages with the answer to a user who says `text`."""
        if self._template is None:
            ids = self._plain.encode(text).tolist()
            return [*self._plain.begin, *ids] if ids else []
        try:
            written = self._template.render([{"role": "user", "content": of_unicode(text)}], True)
        except Exception as error:  # a template may raise whatever it likes
            raise data_error(
                "The chat template does not write this prompt.",
                why=one_line(error, 120),
                hint="a template that takes what a user says as its first message",
            ) from error
        return self._segment(written, True).tolist()

    def closing(self) -> tuple[frozenset[int], str]:
        """Return the tokens, and the text if there is one, that end what a model has to say.

        Of a text with a special token behind it only the text is spelled.
        """
        text = "" if self._template is None else self._template.closing()
        if self._tokenizer is None or not text:
            return frozenset({self.end}), text
        ids, special = self._segment(text, True).tolist(), self._tokenizer.all_special_ids
        ends = frozenset({self.end, *[each for each in ids if each in special][:1]})
        before = min((text.find(each) for each in self._tokenizer.all_special_tokens if each in text), default=0)
        return ends, text[:before].strip() or text

    def _marked(self, text: str, spans: list[Span]) -> Tensor:
        """Return the tokens of a text; those that hold a character of a span are learnt."""
        tokenizer, in_template = self._tokenizer, self._template is not None
        if tokenizer is None or not tokenizer.is_fast:
            return torch.cat([self._segment(text[begin:end], is_learnt) for begin, end, is_learnt in _cut(text, spans)])
        encoded = tokenized(tokenizer, text, split_special_tokens=not in_template, return_offsets_mapping=True)
        ids = torch.tensor(encoded["input_ids"], dtype=torch.int32)
        places = encoded["offset_mapping"]
        is_learnt = [any(at < end and until > begin for begin, end in spans) for at, until in places]
        return ids.where(torch.tensor(is_learnt, dtype=torch.bool), given(ids))

    def _segment(self, text: str, is_learnt: bool) -> Tensor:
        if self._tokenizer is None or self._template is None:
            ids = self._plain.encode(text)
        else:
            encoded = tokenized(self._tokenizer, text)
            ids = torch.tensor(encoded["input_ids"], dtype=torch.int32)
        return ids if is_learnt else given(ids)


def sequences_of(lengths: Iterable[int], room: int) -> int:
    """Return how many sequences rows of these lengths take, one after the other, where each fits into one."""
    count, left = 0, 0
    for length in lengths:
        if length > left:
            count, left = count + 1, room
        left -= length
    return count


def _cut(text: str, spans: list[Span]) -> Iterator[tuple[int, int, bool]]:
    """Yield the stretches of a text, inside and outside of spans."""
    at = 0
    for begin, end in spans:
        yield at, begin, False
        yield begin, end, True
        at = end
    yield at, len(text), False


class ChatTemplate(NamedTuple):
    """Writes messages as a text. `render`: messages, and whether the beginning of an answer follows, to a text."""

    render: Callable[[list[dict[str, Any]], bool], str]
    render_marked: Callable[[list[dict[str, Any]]], tuple[str, list[Span]]] | None

    def written(self, messages: list[dict[str, Any]]) -> tuple[str, list[Span]]:
        """Return a conversation as a text, and where its answers are; raise `UnfitRowError` where that fails."""
        try:
            if self.render_marked is not None:
                return self.render_marked(messages)
            whole = self.render(messages, False)
            places = [place for place, message in enumerate(messages) if message["role"] == ASSISTANT]
            return whole, [self._answer(whole, messages, place) for place in places]
        except UnfitRowError:
            raise
        except Exception as error:  # a template may raise whatever it likes
            raise UnfitRowError("does not fit the chat template", one_line(error, 120)) from error

    def closing(self) -> str:
        """Return the mark behind an answer; empty where the template does not write an answer as it is."""
        answer = "an answer"
        messages = [{"role": "user", "content": "a question"}, {"role": ASSISTANT, "content": answer}]
        with suppress(Exception):  # a template may raise whatever it likes
            return self.render(messages, False).rpartition(answer)[2].strip()
        return ""

    def _answer(self, whole: str, messages: list[dict[str, Any]], place: int) -> Span:
        before = self.render(messages[:place], False) if place else ""
        until = self.render(messages[: place + 1], False)
        if not (whole.startswith(before) and whole.startswith(until) and len(before) < len(until)):
            raise UnfitRowError("has answers that the chat template writes otherwise once another message follows")
        # A template may begin an answer with more than it writes of an answer that is there.
        begun = _common(self.render(messages[:place], True), until) if place else 0
        return max(len(before), begun), len(until)


def _common(one: str, other: str) -> int:
    """Return how many characters two texts have in common at their beginning."""
    shorter = min(len(one), len(other))
    return next((place for place in range(shorter) if one[place] != other[place]), shorter)


def _template_of(data: DataConfig, tokenizer: Any) -> ChatTemplate:
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        template = tokenizer.get_chat_template()
    except ValueError as error:
        raise data_error(
            f"The tokenizer {data.tokenizer} has no chat template.",
            why='data.form = "messages" needs one, to write a conversation as a text',
            hint='data.chat_template = "chatml", a built-in one; or a tokenizer with a chat_template.jinja',
        ) from error
    special = dict(tokenizer.special_tokens_map)

    def render(messages: list[dict[str, Any]], begins: bool) -> str:
        (text,), _ = render_jinja_template([messages], chat_template=template, add_generation_prompt=begins, **special)
        return str(text)

    def render_marked(messages: list[dict[str, Any]]) -> tuple[str, list[Span]]:
        (text,), (spans,) = render_jinja_template(
            [messages], chat_template=template, return_assistant_tokens_mask=True, **special
        )
        return text, list(spans)

    return ChatTemplate(render, render_marked if _SAYS_ANSWERS.search(template) else None)
