"""Moments as 8-bit codes: what a code keeps, and what no code can do."""

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_stages import CPU, INNER, cuts, drawn_ids, make_stage, nadam, prepared
from torch import Tensor, nn

from pipeline import adamw
from pipeline.adamw import ORTHOGONAL_SIZE, AdamW, Form, decode_first, decode_second, encode_first, encode_second
from pipeline.hardware.moments_beside import Codes, main_memory, shared
from pipeline.inner_step import InnerConfig, OptimiserState, moment_bytes, moment_ratio, orthogonalise
from pipeline.stage import Stage

CODED = replace(INNER, state="int8")
FORMS: dict[str, tuple[Callable[[Tensor], Codes], Callable[..., Tensor]]] = {
    "first": (encode_first, decode_first),
    "second": (encode_second, decode_second),
}
seeds = st.integers(0, 2**32)


@pytest.fixture(autouse=True)
def _compiled_anew() -> Iterator[None]:
    yield
    adamw.compiled.cache_clear()


def drawn(seed: int, *shape: int, spread: float = 2.0) -> Tensor:
    """Return values over many powers of ten, of either sign."""
    chance = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=chance) * 10 ** (spread * torch.randn(shape, generator=chance))


def optimiser(
    inner: InnerConfig = CODED, *shapes: tuple[int, ...], seed: int = 0, beside: int = 0, orthogonal: int = 0
) -> tuple[AdamW, list[nn.Parameter]]:
    weights = [nn.Parameter(drawn(seed + n, *shape, spread=0.0)) for n, shape in enumerate(shapes)]
    return AdamW(weights, inner, CPU, beside=beside, orthogonal=weights[:orthogonal]), weights


def train(stepping: AdamW, weights: list[nn.Parameter], steps: int, seed: int) -> None:
    for step in range(steps):
        for number, weight in enumerate(weights):
            weight.grad = drawn(seed + 100 * step + number, *weight.shape)
        stepping.step(1e-2)


@given(seed=seeds, spread=st.floats(0.0, 8.0), magnitude=st.floats(-15.0, 15.0))
def test_a_code_is_within_half_a_code_of_its_moment(seed: int, spread: float, magnitude: float) -> None:
    values = drawn(seed, 3, 256, spread=spread) * 10.0**magnitude
    for moments, power, largest, encode, decode in (
        (values, 2, 127, *FORMS["first"]),
        (values.abs(), 4, 255, *FORMS["second"]),
    ):
        found = decode(*encode(moments)).double()
        scale = moments.abs().amax(-1, keepdim=True).double()
        shares = moments.double().abs() / scale
        nearest = (shares ** (1 / power) + 0.501 / largest) ** power - shares
        assert bool(((found - moments).abs() <= scale * nearest + 1e-44).all())
        assert torch.equal(found.abs().amax(-1).float(), moments.abs().amax(-1)), "the largest is exact"
        assert bool((found * moments >= 0.0).all()), "no sign turns"


@given(seed=seeds, form=st.sampled_from(sorted(FORMS)))
def test_a_moment_that_is_decoded_has_the_same_code(seed: int, form: str) -> None:
    encode, decode = FORMS[form]
    values = drawn(seed, 4, 256)
    coded = encode(values if form == "first" else values.abs())
    assert all(map(torch.equal, encode(decode(*coded)), coded))


@pytest.mark.parametrize("value", [0.0, 1e-45, -1e-39])
def test_a_block_of_nothing_is_zeros(value: float) -> None:
    for encode, decode in FORMS.values():
        coded = encode(torch.full((1, 256), abs(value)))
        assert not any(tensor.any() for tensor in (*coded, decode(*coded)))


@given(seed=seeds, piece=st.sampled_from([256, 512, 1024]), rows=st.integers(1, 40), columns=st.integers(1, 40))
def test_a_step_does_not_depend_on_where_pieces_end(seed: int, piece: int, rows: int, columns: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        found = []
        for size in (piece, 2**20):
            patch.setattr(adamw, "PIECE", size)
            stepping, weights = optimiser(CODED, (rows, columns), (7,), (2, 3, 200))
            train(stepping, weights, 2, seed)
            found.append([*weights, *stepping.moments()])
    assert all(map(torch.equal, *found))


@given(seed=seeds, piece=st.sampled_from([256, 512, 1024]), rows=st.integers(1, 40), columns=st.integers(1, 40))
def test_moments_in_main_memory_are_the_same(seed: int, piece: int, rows: int, columns: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adamw, "PIECE", piece)
        found = []
        for beside in (0, 1, 2**40):  # none, those of the first matrix, all
            stepping, weights = optimiser(CODED, (rows, columns), (7,), (2, 3, 200), beside=beside)
            assert len(stepping._far) == (0, 1, 2)[len(found)]
            train(stepping, weights, 2, seed)
            found.append([*weights, *stepping.moments()])
    for others in found[1:]:
        assert all(map(torch.equal, found[0], others))


@pytest.mark.parametrize(
    ("vocabulary", "width", "inner", "layers"), [(32_000, 2048, 5632, 22), (32_000, 4096, 11_008, 4)]
)
def test_pinned_moments_take_little_more_than_their_bytes(vocabulary: int, width: int, inner: int, layers: int) -> None:
    shapes = [(vocabulary, width), *[(width, width)] * 4 * layers, *[(width, inner)] * 3 * layers]
    sizes = [moment_bytes(shape, "int8") for shape in shapes for _ in range(2)]
    blocks = shared(sizes)
    assert sorted(number for block in blocks for number in block) == list(range(len(sizes)))
    taken = [1 << (sum(sizes[number] for number in block) - 1).bit_length() for block in blocks]  # as torch rounds
    assert sum(taken) < 1.06 * sum(sizes)


@given(sizes=st.lists(st.integers(1, 2000), max_size=20))
def test_moments_that_share_memory_do_not_overlap(sizes: list[int]) -> None:
    memory = main_memory(sizes, pinned=False)
    for number, each in enumerate(memory):
        each += number + 1
    for number, (each, size) in enumerate(zip(memory, sizes, strict=True)):
        assert torch.equal(each, torch.full((size,), number + 1, dtype=torch.int8))


@given(seed=seeds, steps=st.integers(1, 4), beta1=st.sampled_from([0.0, 0.5, 0.9, 0.99]))
def test_steps_by_nesterovs_momentum_are_those_of_torchs_nadam(seed: int, steps: int, beta1: float) -> None:
    inner = InnerConfig(beta1=beta1, beta2=0.99, weight_decay=0.1)
    for state, allowed in (("float32", 1e-4), ("int8", 0.3)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(adamw, "PIECE", 256)
            stepping, weights = optimiser(replace(inner, state=state), (3, 200), (7,), seed=seed)
            plain = [nn.Parameter(weight.detach().double()) for weight in weights]
            matrices, vectors = plain[:1], plain[1:]
            groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
            theirs = nadam(groups, inner, 1e-2)
            for step in range(steps):
                for number, (weight, other) in enumerate(zip(weights, plain, strict=True)):
                    weight.grad = 1.0 + 0.5 * drawn(seed + 100 * step + number, *weight.shape, spread=0.0)
                    other.grad = weight.grad.double()
                stepping.step(1e-2)
                theirs.step()
        for weight, other in zip(weights, plain, strict=True):
            assert float((weight - other).detach().abs().max()) < allowed * 1e-2


@given(seed=seeds, steps=st.integers(0, 3))
def test_a_state_that_is_loaded_goes_on_with_the_same_bits(seed: int, steps: int) -> None:
    shapes = ((5, 77), (9,), (3, 4))
    stepping, weights = optimiser(CODED, *shapes)
    train(stepping, weights, steps, seed)
    other, others = optimiser(CODED, *shapes, seed=9)
    for own, weight in zip(others, weights, strict=True):
        own.data.copy_(weight)
    other.load(stepping.steps, [moment.clone() for moment in stepping.moments()])
    for each in ((stepping, weights), (other, others)):
        train(*each, 2, seed + 1)
    assert all(map(torch.equal, [*weights, *stepping.moments()], [*others, *other.moments()]))


@given(
    seed=seeds,
    scales=st.tuples(*[st.sampled_from([0.0, 1e-45, 1e-38, 1e-20, 1e-3, 1.0, 1e12])] * 2),
    betas=st.sampled_from([(0.9, 0.95), (0.9, 0.999), (0.0, 0.5), (0.9, 0.5)]),
    rate=st.sampled_from([0.0, 1e-3, 1.0]),
)
def test_no_codes_make_a_step_longer_than_the_betas_allow(
    seed: int, scales: tuple[float, float], betas: tuple[float, float], rate: float
) -> None:
    inner = replace(CODED, beta1=betas[0], beta2=betas[1], weight_decay=0.0, epsilon=1e-30)
    stepping, [weight] = optimiser(inner, (4, 256))
    chance = torch.Generator().manual_seed(seed)
    for moment, scale in zip(stepping.moments(), scales, strict=True):
        moment.copy_(torch.randint(-128, 128, moment.shape, generator=chance, dtype=torch.int8))
        adamw.scales_of(moment).fill_(scale)
    stepping.steps, before = 50, weight.detach().clone()
    weight.grad = drawn(seed, 4, 256) * 1e-6
    stepping.step(rate)
    ratio = min(moment_ratio(*betas), adamw.LARGEST_RATIO)
    most = rate / (1.0 - betas[0] ** 51) * ratio
    assert bool(((weight.detach() - before).abs() <= 1.001 * most + 1e-5).all())
    assert all(bool(adamw.scales_of(moment).isfinite().all()) for moment in stepping.moments())


def test_matrices_have_codes_and_vectors_float32() -> None:
    stepping, weights = optimiser(CODED, (30, 30), (30,), (2, 3, 5))
    for moment, weight in zip(stepping.moments(), weights * 2, strict=True):
        assert moment.dtype == (torch.float32 if weight.ndim < 2 else torch.int8)
        assert moment.nbytes == moment_bytes(weight.shape, "int8")
        assert moment_bytes(weight.shape, "float32") == 4 * weight.numel()
    plain, same = optimiser(INNER, (30,))
    coded, others = optimiser(CODED, (30,))
    for each in ((plain, same), (coded, others)):
        train(*each, 3, 1)
    assert torch.equal(same[0], others[0])


@pytest.mark.parametrize("own", [CODED, INNER])
def test_moments_of_another_form_are_refused(own: InnerConfig) -> None:
    stepping, weights = optimiser(own, (4, 100), (3,))
    train(stepping, weights, 1, 1)
    before = [moment.clone() for moment in stepping.moments()]
    other, _ = optimiser(INNER if own is CODED else CODED, (4, 100), (3,))
    for moments in (other.moments(), before[:-1], [*before, before[0]]):
        with pytest.raises(ValueError, match=r"is not|tensors for"):
            stepping.load(9, moments)
    assert stepping.steps == 1
    assert all(map(torch.equal, before, stepping.moments()))


def train_stage(inner: InnerConfig, steps: int = 25) -> tuple[Stage, list[float]]:
    recipe = prepared("llama")
    [piece] = cuts(recipe, 1)
    stage, losses = make_stage(recipe, piece, inner=inner), []
    batch = drawn_ids(1, 4, 17)
    for _ in range(steps):
        losses.append(stage.loss(batch[:, :-1], batch[:, 1:]).loss)
        stage.step(1e-2, 1)
    return stage, losses


def test_a_model_trains_with_codes_as_with_float32() -> None:
    (coded, found), (_, usual) = train_stage(CODED), train_stage(INNER)
    assert usual[-1] < 0.5 * usual[0], "it learns by heart"
    assert all(math.isclose(a, b, rel_tol=0.05) for a, b in zip(found, usual, strict=True))
    moments = coded.optimiser_state().moments
    assert sum(moment.nbytes for moment in moments) < 2.2 * sum(map(math.prod, coded.shapes))
    assert coded.statistics()["uncompiled_steps"] == 0


def test_a_stage_goes_on_from_the_codes_of_another() -> None:
    (stage, _), (other, _) = train_stage(CODED), train_stage(replace(CODED, beta1=0.5))
    other.set_weights(stage.weights())
    other.load_optimiser_state(OptimiserState(*stage.optimiser_state()))
    assert all(map(torch.equal, stage.optimiser_state().moments, other.optimiser_state().moments))


def test_where_torch_cannot_compile_the_plain_body_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", lambda _: fails)
    form = Form((torch.float32,), torch.float32)
    assert adamw.compiled(CPU, form) is None
    adamw.compiled.cache_clear()
    monkeypatch.setattr(torch, "compile", lambda function: function)
    assert adamw.compiled(CPU, form) is adamw.move
    monkeypatch.setattr(AdamW, "compiled", property(lambda _: False, lambda *_: None), raising=False)
    stage, losses = train_stage(CODED)
    assert stage.statistics()["uncompiled_steps"] == len(losses)


@given(seed=seeds, shape=st.sampled_from([(40, 300), (300, 40), (64, 64), (3, 20, 50)]))
def test_singular_values_become_nearly_one(seed: int, shape: tuple[int, ...]) -> None:
    given = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    found = given.clone()
    orthogonalise(found)
    left, values, right = torch.linalg.svd(given, full_matrices=False)
    sure = (values > 0.02 * values.amax(-1, keepdim=True)).all()
    turned = left.mT @ found @ right.mT
    assert not sure or bool(((turned.diagonal(dim1=-2, dim2=-1) - 0.9).abs() < 0.35).all())
    assert torch.allclose(turned, torch.diag_embed(turned.diagonal(dim1=-2, dim2=-1)), atol=1e-4), "the same vectors"


def test_nothing_becomes_nothing() -> None:
    nothing = torch.zeros(5, 7)
    orthogonalise(nothing)
    assert not nothing.any()


@given(
    seed=seeds,
    state=st.sampled_from(["float32", "int8"]),
    shape=st.sampled_from([(20, 30), (33, 8), (3, 12, 9)]),
    beside=st.sampled_from([0, 2**40]),
)
def test_an_orthogonal_step_is_of_the_step_that_adamw_would_take(
    seed: int, state: str, shape: tuple[int, ...], beside: int
) -> None:
    inner, rate = InnerConfig(beta2=0.99, weight_decay=0.1, state=state), 1e-2
    (plain, plainly), (turned, turning) = (
        optimiser(inner, shape, (5, 6), (4,), seed=seed, beside=beside, orthogonal=number) for number in (0, 1)
    )
    for step in range(3):
        before = [weight.detach().clone() for weight in (plainly[0], turning[0])]
        for number, pair in enumerate(zip(plainly, turning, strict=True)):
            for weight in pair:
                weight.grad = drawn(seed + 10 * step + number, *weight.shape, spread=0.3)
        for stepping in (plain, turned):
            stepping.step(rate)
        moments = zip(plain.moments(), turned.moments(), strict=True)
        assert all(torch.allclose(*pair, atol=1e-7) for pair in moments), "they are AdamW's"
        kept = 1.0 - rate * inner.weight_decay
        direction = plainly[0].detach() - kept * before[0]
        orthogonalise(direction)
        size = rate * ORTHOGONAL_SIZE * math.sqrt(max(shape[-2:]))
        assert torch.allclose(turning[0].detach(), kept * before[1] + size * direction, atol=3e-4)
        assert all(map(torch.equal, plainly[1:], turning[1:])), "other weights step as before"


def test_a_stage_steps_the_matrices_of_its_layers_orthogonally() -> None:
    stages = [train_stage(inner, steps=1)[0] for inner in (INNER, replace(INNER, orthogonal=True))]
    begun = train_stage(INNER, steps=0)[0].weights()
    for name, start, *found in zip(stages[0].names, begun, *(stage.weights() for stage in stages), strict=True):
        inside = "layers" in name and start.ndim >= 2
        assert torch.equal(*found) is not inside, name
        if inside:
            assert 0.1 < float((found[1] - start).square().mean().sqrt()) / 1e-2 < 0.3, name


@pytest.mark.parametrize("fails", [False, True])
def test_memory_that_is_gone_after_a_step_fails_no_step_and_hides_no_failure(
    monkeypatch: pytest.MonkeyPatch, *, fails: bool
) -> None:
    """Another program on the same GPU may have taken it meanwhile."""
    stepping, _ = optimiser(CODED, (4, 4))

    def reserve() -> Tensor:
        raise torch.OutOfMemoryError("another program has it")

    monkeypatch.setattr(stepping, "_reserve", reserve)
    with pytest.raises(ValueError, match="not finite") if fails else nullcontext(), stepping.room():
        if fails:
            raise ValueError("not finite")
    monkeypatch.undo()
    with stepping.room():
        pass
