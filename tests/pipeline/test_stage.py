"""One slice at work. The anchor: stages one after the other are single-process training of the whole model."""

import gc
import weakref
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_stages import INNER, VOCABULARY, cuts, drawn_ids, make_stage, prepared, run_microbatch, whole_optimiser
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from pipeline import forward_pass
from pipeline.activation_codec import decode, encode, seed_of
from pipeline.decoder_slice import Cut
from pipeline.forward_pass import PendingForward
from pipeline.inner_step import OptimiserState
from pipeline.messages import ACTIVATION_CODECS
from pipeline.model_config import Prepared
from pipeline.stage import Stage

DEEPSEEK = {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
}


def make_stages(family: str, number: int, codec: str = "float32") -> list[Stage]:
    recipe = prepared(family)
    return [make_stage(recipe, piece, codec=codec) for piece in cuts(recipe, number)]


def batches(seed: int, number: int) -> list[Tensor]:
    return list(drawn_ids(seed, number, 3, 13))


def train(stages: list[Stage], batch: Tensor) -> float:
    """Walk one microbatch down and its gradient up; return the loss."""
    return run_microbatch(stages, batch[:, :-1], batch[:, 1:]).loss


def named(stages: list[Stage]) -> dict[str, Tensor]:
    return {name: weight for stage in stages for name, weight in zip(stage.names, stage.weights(), strict=True)}


def relative(ours: Tensor, theirs: Tensor) -> float:
    return (torch.dist(ours.double(), theirs.double()) / theirs.double().norm()).item()


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_stages_equal_training_of_the_whole_model(family: str, number: int) -> None:
    """Twenty inner steps, clipped per stage in both.

    Windows of two, so that dividing the sum and summing the halves round alike: the gradient of GPT-2's key bias is
    zero but for rounding, which AdamW blows up to whole steps.
    """
    stages, microbatches = make_stages(family, number), 2
    config = prepared(family).config
    whole = AutoModelForCausalLM.from_config(config)
    start = named(stages)
    whole.load_state_dict(start)
    weights = dict(whole.named_parameters())
    optimiser = whole_optimiser(weights)
    clipped = 0
    for step in range(20):
        rate = 3e-3 * (step + 1) / 20
        window = batches(step, microbatches)
        ours = [train(stages, batch) for batch in window]
        theirs = [
            functional.cross_entropy(whole(batch[:, :-1]).logits.flatten(0, 1), batch[:, 1:].flatten())
            for batch in window
        ]
        for loss in theirs:
            (loss / microbatches).backward()
        assert ours == pytest.approx([loss.item() for loss in theirs], rel=1e-5)
        for stage in stages:
            norm = torch.nn.utils.clip_grad_norm_([weights[name] for name in stage.names], INNER.clip_norm).item()
            report = stage.step(rate, microbatches)
            assert report.applied
            assert report.gradient_norm == pytest.approx(norm, rel=1e-5)
            clipped += norm > INNER.clip_norm
        for group in optimiser.param_groups:
            group["lr"] = rate
        optimiser.step()
        optimiser.zero_grad()
    assert clipped > 0
    end = named(stages)
    assert end.keys() == weights.keys()
    errors = {name: relative(weight, weights[name]) for name, weight in end.items()}
    assert all(error <= 1e-5 for error in errors.values()), errors
    embedding = next(name for name, weight in end.items() if weight.shape == (VOCABULARY, 32))
    assert relative(end[embedding], start[embedding]) > 1e-2


def test_a_dropped_forward_frees_its_graph() -> None:
    class Box:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor.detach()

    kept: list[weakref.ref[Box]] = []

    def pack(tensor: Tensor) -> Box:
        box = Box(tensor)
        kept.append(weakref.ref(box))
        return box

    stage = make_stages("llama", 2)[0]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor):
        passes = [stage.forward(batches(0, 1)[0][:, :-1]) for _ in range(2)]
    gc.collect()
    assert all(box() is not None for box in kept)
    given_up = passes.pop()
    del given_up
    gc.collect()
    assert sum(box() is None for box in kept) == len(kept) // 2
    passes[0].backward(torch.ones_like(passes[0].output))
    gc.collect()
    assert all(box() is None for box in kept)


def test_backward_once_and_only_with_a_gradient_that_fits() -> None:
    stage = make_stages("llama", 2)[0]
    waiting = stage.forward(batches(0, 1)[0][:, :-1])
    assert waiting.output.shape == (3, 12, 32)
    assert waiting.output.dtype == torch.float32
    assert not waiting.output.requires_grad
    with pytest.raises(ValueError, match="gradient of"):
        waiting.backward(torch.ones(3, 12, 31))
    assert waiting.backward(torch.ones(3, 12, 32)) is None
    with pytest.raises(RuntimeError, match="has had"):
        waiting.backward(torch.ones(3, 12, 32))
    counts = stage.statistics()
    assert (counts.pop("forwards"), counts.pop("backwards"), set(counts.values())) == (1, 1, {0})


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_non_finite_gradient_changes_nothing(poison: float) -> None:
    first = make_stages("llama", 2)[0]
    batch = batches(3, 1)[0]
    weights, state = first.weights(), first.optimiser_state()
    waiting = first.forward(batch[:, :-1])
    waiting.backward(torch.full_like(waiting.output, poison))
    report = first.step(1e-2, 1)
    assert not report.applied
    assert first.statistics()["skipped_steps"] == 1
    assert all(torch.equal(a, b) for a, b in zip(weights, first.weights(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(state.moments, first.optimiser_state().moments, strict=True))
    waiting = first.forward(batch[:, :-1])
    waiting.backward(torch.ones_like(waiting.output))
    assert first.step(1e-2, 1).applied
    assert first.optimiser_state().steps == 1


# Two windows in flight: weights that change while forward passes wait.


class Oracle:
    """What a stage has to do, worked out with a stage for each version of the weights and nothing in flight."""

    def __init__(self, recipe: Prepared, piece: Cut) -> None:
        self._alone, self._stepping = make_stage(recipe, piece), make_stage(recipe, piece)
        self.collected: list[Tensor | None] = [None] * len(self._alone.names)

    @property
    def weights(self) -> tuple[Tensor, ...]:
        return self._stepping.weights()

    def collect(self, weights: tuple[Tensor, ...], hidden: Tensor, gradient: Tensor) -> Tensor | None:
        """Add the gradient at these very weights; return that of the input."""
        self._alone.set_weights(weights)
        below = self._alone.forward(hidden).backward(gradient)
        for number, weight in enumerate(self._alone._weights):
            before = self.collected[number]
            if weight.grad is not None:
                self.collected[number] = weight.grad if before is None else before + weight.grad
        self._alone.discard()
        return below

    def step(self, microbatches: int) -> float:
        for weight, gradient in zip(self._stepping._weights, self.collected, strict=True):
            weight.grad = gradient
        self.collected = [None] * len(self.collected)
        return self._stepping.step(1e-2, microbatches).gradient_norm

    def correct(self, delta: list[Tensor]) -> None:
        self._stepping.correct(delta)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("number", [0, 1])
@settings(max_examples=8)
@given(
    acts=st.lists(st.sampled_from("ffbbsc"), min_size=4, max_size=24),
    seed=st.integers(0, 2**20),
    graphs=st.sampled_from([None, 0, 1]),
)
def test_every_backward_runs_on_the_weights_of_its_forward(
    family: str, number: int, acts: list[str], seed: int, graphs: int | None
) -> None:
    """Passes (f), their gradients in any order (b), steps (s) and corrections (c), bit for bit as worked out alone.

    However many graphs are kept, and the oracle keeps them all.
    """
    recipe = prepared(family)
    piece = cuts(recipe, 3)[number]
    stage, oracle = make_stage(recipe, piece, graphs=graphs), Oracle(recipe, piece)
    generator = torch.Generator().manual_seed(seed)
    waiting: list[tuple[PendingForward, tuple[Tensor, ...], Tensor]] = []
    collected = 0
    for act in [*acts, "b", "s"]:
        if act == "f":
            shape = (2, 5)
            ids = torch.randint(0, VOCABULARY, shape, generator=generator)
            hidden = ids if piece.embeds else torch.randn(*shape, 32, generator=generator)
            waiting.append((stage.forward(hidden), oracle.weights, hidden))
        elif act == "b" and waiting:
            place = int(torch.randint(0, len(waiting), (), generator=generator))
            forward, weights, hidden = waiting.pop(place)
            gradient = torch.randn(forward.output.shape, generator=generator)
            ours, theirs = forward.backward(gradient), oracle.collect(weights, hidden, gradient)
            assert (ours is None and theirs is None) or torch.equal(ours, theirs)
            collected += 1
        elif act == "s" and collected:
            assert stage.step(1e-2, collected).gradient_norm == oracle.step(collected)
            collected = 0
        elif act == "c":
            delta = [0.1 * torch.randn(size, generator=generator) for size in stage.shapes]
            stage.correct(delta)
            oracle.correct(delta)
        assert all(torch.equal(a, b) for a, b in zip(stage.weights(), oracle.weights, strict=True))
        assert stage.names == tuple(dict(stage._module.named_parameters()))


def test_weights_are_copied_only_for_graphs_that_wait_on_them_and_die_with_these() -> None:
    stage = make_stages("llama", 2)[0]
    batch = batches(9, 1)[0][:, :-1]

    def pass_back() -> None:
        waiting = stage.forward(batch)
        waiting.backward(torch.ones_like(waiting.output))

    for _ in range(3):
        given_up = stage.forward(batch)
        del given_up
        pass_back()
        stage.step(1e-2, 1)
    assert stage.statistics()["weight_copies"] == 0, "one window in flight costs nothing"
    late = stage.forward(batch)
    old = [weakref.ref(leaf) for leaf in stage._set.leaves.values()]
    pass_back()
    stage.step(1e-2, 1)
    stage.correct([torch.full(shape, 0.1) for shape in stage.shapes])
    assert stage.statistics()["weight_copies"] == 1, "the correction meets weights that nobody waits on"
    assert all(weight() is not None for weight in old)
    late.backward(torch.ones_like(late.output))
    del late
    gc.collect()
    assert all(weight() is None for weight in old)
    stage.step(1e-2, 1)
    assert (stage.statistics()["weight_copies"], stage.statistics()["stale_backwards"]) == (1, 1)


def test_a_graph_that_was_discarded_is_free_and_has_no_backward() -> None:
    stage = make_stages("llama", 2)[0]
    waiting = stage.forward(batches(9, 1)[0][:, :-1])
    stage.discard()
    with pytest.raises(RuntimeError, match="given up"):
        waiting.backward(torch.ones_like(waiting.output))
    stage.correct([torch.full(shape, 0.1) for shape in stage.shapes])
    assert stage.statistics()["weight_copies"] == 0


def test_discarded_gradients_are_gone_and_only_matrices_decay() -> None:
    stage = make_stages("gpt2", 1)[0]
    before = stage.weights()
    train([stage], batches(4, 1)[0])
    stage.discard()
    assert stage.step(0.5, 1) == (0.0, True)
    for name, old, new in zip(stage.names, before, stage.weights(), strict=True):
        expected = old * (1 - 0.5 * INNER.weight_decay) if old.ndim >= 2 else old
        torch.testing.assert_close(new, expected, msg=name)


def test_what_has_no_gradient_stays_as_it_came() -> None:
    recipe = prepared("deepseek_v3", **DEEPSEEK)
    stages = [make_stage(recipe, piece) for piece in cuts(recipe, 2)]
    fixed = [(stage, number) for stage in stages for number in stage.fixed]
    assert [stage.names[number].split(".")[-1] for stage, number in fixed] == ["e_score_correction_bias"] * 2
    for stage in stages:
        stage.set_weights([torch.randn_like(weight) * 0.1 for weight in stage.weights()])
    before = [stage.weights() for stage in stages]
    train(stages, batches(4, 1)[0])
    assert all(stage.step(1e-2, 1).applied for stage in stages)
    for stage, then in zip(stages, before, strict=True):
        moved = {n for n, (a, b) in enumerate(zip(then, stage.weights(), strict=True)) if not torch.equal(a, b)}
        assert not moved & stage.fixed
        assert len(moved | stage.fixed) == len(stage.names)


@pytest.mark.parametrize("steps", [0, 3])
def test_a_copied_optimiser_goes_on_bit_for_bit(steps: int) -> None:
    old = make_stages("gpt2", 1)[0]
    for number in range(steps):
        train([old], batches(number, 1)[0])
        old.step(1e-2, 1)
    recipe = prepared("gpt2")
    new = make_stage(recipe, cuts(recipe, 1)[0], seed=99)
    state = old.optimiser_state()
    new.set_weights(old.weights())
    new.load_optimiser_state(state)
    for number in range(3):
        for stage in (old, new):
            train([stage], batches(50 + number, 1)[0])
            stage.step(1e-2, 1)
    assert all(torch.equal(a, b) for a, b in zip(old.weights(), new.weights(), strict=True))
    assert new.optimiser_state().steps == steps + 3
    for mine, yours in zip(old.optimiser_state().moments, new.optimiser_state().moments, strict=True):
        assert torch.equal(mine, yours)


@pytest.mark.parametrize("apart", [True, False])
def test_the_next_copy_of_the_weights_takes_the_memory_of_a_correction_where_the_device_has_its_own(
    *, apart: bool
) -> None:
    stage = make_stages("gpt2", 2)[0]
    stage._type = stage._type._replace(shares_memory=not apart)
    first, expected = stage.weights(), stage.weights()
    assert not {each.data_ptr() for each in first} & {each.data_ptr() for each in expected}
    with pytest.raises(ValueError, match="is not"):
        stage.correct([torch.zeros(1), *first[1:]])
    stage.correct(first)
    second = stage.weights()
    assert [a.data_ptr() == b.data_ptr() for a, b in zip(first, second, strict=True)] == [apart] * len(first)
    assert all(torch.equal(2 * before, after) for before, after in zip(expected, second, strict=True))
    third = stage.weights()
    assert not {each.data_ptr() for each in second} & {each.data_ptr() for each in third}, "one caller has it"
    difference = stage.weights(third)
    assert not any(each.any() for each in difference)
    stage.correct(difference)
    assert all(each.dtype is torch.float32 for each in stage.weights()), "memory of another type is of no use"
    stage.correct(difference)
    again = stage.weights(third)
    assert [a.data_ptr() == b.data_ptr() for a, b in zip(difference, again, strict=True)] == [apart] * len(again)


def test_what_a_stage_lends_is_its_own_memory_and_what_it_copies_is_not() -> None:
    stage = make_stages("gpt2", 1)[0]
    lent, copies = (*stage.current_weights(), *stage.optimiser_state().moments), stage.weights()
    before = [tensor.clone() for tensor in lent]
    train([stage], batches(4, 1)[0])
    stage.step(1e-2, 1)
    now = (*stage.weights(), *stage.optimiser_state().moments)
    assert all(torch.equal(mine, own) for mine, own in zip(lent, now, strict=True))
    assert not any(torch.equal(mine, then) for mine, then in zip(lent, before, strict=True))
    assert all(torch.equal(copy, then) for copy, then in zip(copies, before, strict=False))


def test_weights_are_copied_out_and_corrected_in_place() -> None:
    stage = make_stages("llama", 2)[1]
    assert len(stage.names) == len(stage.shapes) == len(stage.weights())
    taken = stage.weights()
    stage.correct([torch.full(shape, 0.25) for shape in stage.shapes])
    for old, new in zip(taken, stage.weights(), strict=True):
        assert torch.equal(old + 0.25, new)
    difference = stage.weights(taken)
    assert all(
        torch.equal(each, torch.full(shape, 0.25).bfloat16())
        for each, shape in zip(difference, stage.shapes, strict=True)
    )
    stage.correct([-each for each in difference])
    stage.set_weights(taken)
    assert all(torch.equal(a, b) for a, b in zip(taken, stage.weights(), strict=True))
    wrong = [*taken[:-1], taken[-1][:-1]]
    for change in (stage.set_weights, stage.correct):
        for tensors in (wrong, taken[:-1], (*taken, taken[0])):
            with pytest.raises(ValueError, match=r"is not|tensors for"):
                change([tensor + 1 for tensor in tensors])
    with pytest.raises(ValueError, match=r"is not|tensors for"):
        stage.load_optimiser_state(OptimiserState(1, taken))
    assert all(torch.equal(a, b) for a, b in zip(taken, stage.weights(), strict=True))


@pytest.mark.parametrize("token", [-VOCABULARY - 1, VOCABULARY])
def test_targets_outside_the_vocabulary_are_refused(token: int) -> None:
    stage = make_stages("llama", 1)[0]
    batch = batches(5, 1)[0]
    targets = batch[:, 1:].clone()
    targets[1, 4] = token
    with pytest.raises(ValueError, match="vocabulary"):
        stage.loss(batch[:, :-1], targets)
    with pytest.raises(ValueError, match="targets of"):
        stage.loss(batch[:, :-1], targets[:, :-1])
    assert stage.step(0.0, 1).gradient_norm == 0.0


def test_a_stage_does_its_own_part_only() -> None:
    first, last = make_stages("llama", 2)
    batch = batches(6, 1)[0]
    hidden = first.forward(batch[:, :-1]).output
    with pytest.raises(ValueError, match="last stage"):
        last.forward(hidden)
    for only_last in (first.loss, first.token_losses):
        with pytest.raises(ValueError, match="last stage"):
            only_last(batch[:, :-1], batch[:, 1:])


def test_inference_has_no_dropout_and_no_graph() -> None:
    recipe = prepared("gpt2", dropout=0.5)
    stages = [make_stage(recipe, piece) for piece in cuts(recipe, 3)]
    plain = make_stages("gpt2", 3)
    ids = batches(7, 1)[0][:, :-1]
    ours = theirs = ids
    for stage, other in zip(stages, plain, strict=True):
        ours, theirs = stage.infer(ours), other.infer(theirs)
        assert not ours.requires_grad
    assert ours.shape == (3, 12, VOCABULARY)
    assert torch.equal(ours, theirs)
    trained = [stages[0].forward(ids).output for _ in range(2)]
    assert not torch.equal(*trained), "training has dropout"


class Hop(NamedTuple):
    """A microbatch at a middle stage: what came, what went on, what came back, and what is handed up."""

    came: Tensor
    output: Tensor
    gradient: Tensor
    reply: Tensor


def hop(stages: list[Stage], batch: Tensor) -> Hop:
    first, middle, last = stages
    came = first.forward(batch[:, :-1]).output
    waiting = middle.forward(came)
    gradient = last.loss(waiting.output, batch[:, 1:]).hidden
    assert gradient is not None
    reply = waiting.backward(gradient)
    assert reply is not None
    return Hop(came, waiting.output, gradient, reply)


@pytest.mark.parametrize(("number", "logits"), [(1, 1), (1, 2**24), (2, 2**24), (3, 2**24)])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_stages_have_the_loss_of_each_token_and_train_on_as_if_they_had_not_been_asked(
    family: str, number: int, logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits in parts or at once."""
    recipe = prepared(family, dropout=0.5)
    asked, other = ([make_stage(recipe, piece) for piece in cuts(recipe, number)] for _ in range(2))
    tokens, targets = batches(7, 1)[0][:, :-1], batches(7, 1)[0][:, 1:]
    marked = targets.clone()
    marked[:, 3:5] = ~marked[:, 3:5]  # only given, and not learnt
    (whole,) = (make_stage(recipe, piece) for piece in cuts(recipe, 1))
    expected = functional.cross_entropy(whole.infer(tokens).flatten(0, 1), targets.flatten(), reduction="none")
    expected = expected.view(targets.shape) * (marked >= 0)
    monkeypatch.setattr(forward_pass, "LOGITS", logits)
    for trained in (asked, other):
        torch.manual_seed(3)
        passes, hidden = [], tokens
        for stage in trained[:-1]:
            passes.append(stage.forward(hidden, marked))
            hidden = passes[-1].output
        if trained is asked:
            reached = tokens
            for stage in asked[:-1]:
                reached = stage.activations(reached, marked)
                assert not reached.requires_grad
            torch.testing.assert_close(asked[-1].token_losses(reached, marked), expected, rtol=1e-5, atol=1e-5)
        gradient = trained[-1].loss(hidden, marked).hidden
        for waiting in reversed(passes):
            assert gradient is not None
            gradient = waiting.backward(gradient)
        for stage in trained:
            stage.step(1e-2, 1)
    for one, same in zip(asked, other, strict=True):
        assert all(map(torch.equal, one.weights(), same.weights()))
    assert asked[0].statistics() == other[0].statistics(), "no pass of the training was added"


def test_activations_that_are_not_finite_are_not_sent() -> None:
    first, last = make_stages("llama", 2)
    first.set_weights([torch.full(shape, torch.inf) for shape in first.shapes])
    with pytest.raises(FloatingPointError, match="not finite"):
        first.activations(batches(7, 1)[0][:, :-1])
    with pytest.raises(ValueError, match="last stage"):
        last.activations(batches(7, 1)[0][:, :-1])


@pytest.mark.parametrize("codec", ACTIVATION_CODECS)
def test_a_microbatch_that_is_sent_again_has_the_same_bytes(codec: str) -> None:
    stages, (batch, other) = make_stages("llama", 3, codec=codec), batches(5, 2)
    one, again = hop(stages, batch), hop(stages, batch)
    assert all(map(torch.equal, one, again))
    assert not torch.equal(hop(stages, other).reply, one.reply)
    for wire, code in zip(one, [ACTIVATION_CODECS[codec].down] * 2 + [ACTIVATION_CODECS[codec].back] * 2, strict=True):
        assert wire.shape == (3, 12, code.row(32))
        assert str(wire.dtype) == f"torch.{code.dtype}"


@pytest.mark.parametrize("codec", ACTIVATION_CODECS)
def test_both_sides_of_a_boundary_use_what_travelled(codec: str) -> None:
    """A stage in float32 between stages with the codec: what it is given and gives is decoded and coded by hand."""
    down, back = ACTIVATION_CODECS[codec]
    (batch,) = batches(6, 1)
    found = hop(make_stages("llama", 3, codec=codec), batch)
    plain = make_stages("llama", 3)[1]
    waiting = plain.forward(decode(down, found.came))
    assert torch.equal(encode(down, waiting.output), found.output)
    gradient = waiting.backward(decode(back, found.gradient, seed_of(found.output)))
    assert gradient is not None
    assert torch.equal(encode(back, gradient, seed_of(found.came)), found.reply)


def test_a_gradient_of_another_codec_is_refused() -> None:
    first, *_ = make_stages("llama", 2, codec="int5-int3")
    (batch,) = batches(8, 1)
    waiting = first.forward(batch[:, :-1])
    with pytest.raises(ValueError, match="gradient of"):
        waiting.backward(torch.zeros(3, 12, 32))
