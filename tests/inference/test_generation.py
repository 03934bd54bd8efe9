"""Going on from a prompt: what is drawn, and how it becomes characters."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from noloco_node.data.token_text import ByteSpelling, Prompts, Sampling, Spelling, _until, draw
from noloco_node.errors import UserError
from noloco_node.inference.generation import continuation
from noloco_node.run.config import DataConfig

MESSAGES = {"source": "json", "path": "rows.jsonl", "form": "messages", "chat_template": "chatml"}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@given(
    logits=st.lists(st.floats(-20, 20), min_size=2, max_size=30, unique=True),
    top_k=st.integers(0, 40),
    temperature=st.floats(0.0, 5.0),
    seed=st.integers(0, 100),
)
def test_only_the_most_probable_are_drawn(logits: list[float], top_k: int, temperature: float, seed: int) -> None:
    values = torch.tensor(logits)
    token = draw(values, Sampling(temperature=temperature, top_k=top_k), generator(seed))
    place = int((values > values[token]).sum())
    assert place < (1 if temperature == 0.0 else top_k or len(logits))


def test_draws_follow_the_probabilities() -> None:
    shares = torch.tensor([0.5, 0.3, 0.2])
    rng, counts = generator(), torch.zeros(3)
    for _ in range(3000):
        counts[draw(shares.log(), Sampling(temperature=1.0, top_k=0), rng)] += 1
    torch.testing.assert_close(counts / 3000, shares, atol=0.04, rtol=0.0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("logits", [[torch.nan], [torch.inf], [0.0, torch.nan, torch.inf], [-torch.inf]])
def test_a_model_that_computes_what_is_no_number_says_so(temperature: float, logits: list[float]) -> None:
    def model(ids: Tensor, **_: Any) -> Any:
        return SimpleNamespace(logits=torch.tensor(logits).expand(1, ids.shape[1], -1), past_key_values=None)

    model.config = SimpleNamespace(max_position_embeddings=8)
    with pytest.raises(UserError, match="what is no number"):
        next(continuation(model, [1, 2], Sampling(temperature=temperature)))


@given(text=st.text(), cut=st.integers(0, 12))
def test_bytes_become_whole_characters_however_they_end(text: str, cut: int) -> None:
    raw = text.encode(errors="replace")
    raw = raw[: max(0, len(raw) - cut)]
    spelling, shown = ByteSpelling(), []
    for byte in raw:
        shown.append(spelling.add(byte + 3))
        shown[-1].encode()
    shown.append(spelling.rest())
    assert "".join(shown) == raw.decode(errors="replace")


@given(tokens=st.lists(st.integers(0, 383), max_size=60))
def test_any_tokens_become_some_text(tokens: list[int]) -> None:
    spelling = ByteSpelling()
    shown = "".join([*map(spelling.add, tokens), spelling.rest()])
    raw = bytes(token - 3 for token in tokens if 3 <= token < 259)
    assert shown == raw.decode(errors="replace")


def test_other_tokenizers_show_what_they_would_show_at_once() -> None:
    """One that writes a space before each word but the first, and has a character of three tokens."""
    words = {1: "to", 2: "be", 3: "or"}

    def decode(tokens: list[int]) -> str:
        parts, held = [], 0
        for token in tokens:
            held = held + 1 if token == 9 else 0
            if token == 9:
                parts += ["€"] if held % 3 == 0 else []
            else:
                parts.append(words[token])
        return " ".join(parts) + ("\N{REPLACEMENT CHARACTER}" if held % 3 else "")

    tokens = [1, 2, 3, 9, 9, 9, 1, 2]
    spelling = Spelling(decode)
    shown = [*map(spelling.add, tokens), spelling.rest()]
    assert "".join(shown) == decode(tokens) == "to be or € to be"
    assert shown[3:6] == ["", "", " €"]


@given(tokens=st.lists(st.integers(0, 9), min_size=1, max_size=30), cut=st.integers(0, 30))
def test_a_prompt_and_what_goes_on_from_it_are_spelled_like_one_text(tokens: list[int], cut: int) -> None:
    """By a tokenizer that writes a space before each word but the first."""

    def decode(ids: list[int]) -> str:
        return " ".join(map(str, ids))

    spelling = Spelling(decode, tokens[:cut])
    shown = "".join([*map(spelling.add, tokens[cut:]), spelling.rest()])
    assert decode(tokens[:cut]) + shown == decode(tokens)


@given(before=st.text("ab<|"), after=st.text("ab<|"), mark=st.text("a<|", max_size=4), cuts=st.lists(st.integers(1, 5)))
def test_a_text_ends_before_its_mark_and_is_shown_as_soon_as_it_may(
    before: str, after: str, mark: str, cuts: list[int]
) -> None:
    whole, pieces, at = before + mark + after, [], 0
    for size in [*cuts, max(1, len(whole))]:
        pieces.append(whole[at : at + size])
        at += size
    shown = list(_until(mark, filter(None, pieces)))
    given = "".join(pieces)
    assert "".join(shown) == (given.partition(mark)[0] if mark else given)
    assert all(shown)


@pytest.mark.parametrize(("mine", "going_on"), [({}, " be or"), (MESSAGES, "be or")])
def test_what_follows_a_prompt_is_spelled_behind_it_and_an_answer_by_itself(
    tmp_path: Path, mine: dict[str, Any], going_on: str
) -> None:
    words = Tokenizer(models.WordLevel({"to": 0, "be": 1, "or": 2, "<end>": 3, "?": 4}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained(tmp_path)
    prompts = Prompts(DataConfig(tokenizer=str(tmp_path), **mine), ["to"])
    assert "".join(prompts.spelled("to", [1, 2])) == going_on


def small() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=24,
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config).eval()


def greedy(model: Any, text: list[int], count: int) -> list[int]:
    for _ in range(count):
        with torch.no_grad():
            text = [*text, int(model(torch.tensor([text])).logits[0, -1].argmax())]
    return text[-count:]


def test_what_is_remembered_changes_nothing() -> None:
    model, prompt = small(), [3, 5, 7]
    assert list(continuation(model, prompt, Sampling(tokens=20, temperature=0.0))) == greedy(model, prompt, 20)


def test_equal_seeds_give_equal_texts_and_nobody_elses_randomness_is_touched() -> None:
    model = small()
    before = torch.get_rng_state()
    texts = [list(continuation(model, [1], Sampling(tokens=12, temperature=1.5, seed=seed))) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert torch.equal(before, torch.get_rng_state())


def test_a_text_longer_than_the_models_positions_goes_on() -> None:
    seen: list[int] = []

    def model(ids: Tensor, past_key_values: int | None, use_cache: bool) -> Any:
        length = (past_key_values or 0) + ids.shape[1]
        seen.append(length)
        return SimpleNamespace(logits=torch.zeros(1, ids.shape[1], 8), past_key_values=length)

    model_with_config: Callable[..., Any] = model
    model_with_config.config = SimpleNamespace(max_position_embeddings=10)
    assert len(list(continuation(model_with_config, [1] * 25, Sampling(tokens=40)))) == 40
    assert max(seen) == 10
    assert min(seen[1:]) == 5


def test_the_end_token_ends_it_and_no_prompt_is_no_start() -> None:
    model = small()
    first = greedy(model, [3], 1)[0]
    assert list(continuation(model, [3], Sampling(tokens=5, temperature=0.0), {first})) == []
    with pytest.raises(ValueError, match="no token"):
        list(continuation(model, [], Sampling()))
