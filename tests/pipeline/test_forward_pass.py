"""Passes computed again, sets of weights, and memory that runs out."""

from contextlib import nullcontext
from threading import get_ident
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_stages import VOCABULARY, cuts, drawn_ids, make_stage, prepared
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.activation_codec import encode, seed_of
from pipeline.decoder_slice import Cut
from pipeline.forward_pass import CALM_WINDOWS, Masters, Slice
from pipeline.hardware.device_type import is_shortage
from pipeline.messages import ACTIVATION_CODECS
from pipeline.model_config import Prepared
from pipeline.partition import build
from pipeline.stage import Stage

BF16 = {"autocast": torch.bfloat16}
# Each token meets all experts: rounding chooses no others.
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2}
SIZES: dict[str, dict[str, Any]] = {
    "granite": {"logits_scaling": 4.0},
    "mixtral": EXPERTS,
    "gpt_oss": {**EXPERTS, "head_dim": 8},
}


def staged(family: str, number: int = 0, dropout: float = 0.0, **choices: Any) -> Stage:
    """Return one of two stages."""
    return make_stage(*drawn(family, number, dropout), **choices)


def drawn(family: str, number: int = 0, dropout: float = 0.0) -> tuple[Prepared, Cut]:
    depth = {"n_layer" if family == "gpt2" else "num_hidden_layers": 2}
    recipe = prepared(family, dropout, **SIZES.get(family, {}), **depth)
    return recipe, cuts(recipe, 2)[number]


def built(family: str, number: int) -> Slice:
    return build(*drawn(family, number), seed=3)


def ids(seed: int) -> Tensor:
    return drawn_ids(seed, 2, 9)


def gradients(stage: Stage) -> list[Tensor | None]:
    return [None if weight.grad is None else weight.grad.clone() for weight in stage._weights]


def same(ours: list[Tensor | None], theirs: list[Tensor | None]) -> bool:
    return all(
        (mine is None and yours is None) or (mine is not None and yours is not None and torch.equal(mine, yours))
        for mine, yours in zip(ours, theirs, strict=True)
    )


def two_windows(stage: Stage) -> list[Any]:
    """Take three passes, the second late by a step and the third by a step and a correction; return all results."""
    passes = [stage.forward(ids(seed)) for seed in range(3)]
    results: list[Any] = [waiting.output for waiting in passes]
    for number, waiting in enumerate(passes):
        waiting.backward(torch.full_like(waiting.output, 0.1 * (number + 1)))
        results += gradients(stage)
        stage.step(1e-2, 1)
        if number:
            stage.correct([torch.full(shape, 0.01) for shape in stage.shapes])
    return [*results, *stage.weights(), *stage.optimiser_state().moments]


@pytest.mark.parametrize("choices", [{}, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_pass_computed_again_gives_the_same_bits(family: str, dropout: float, choices: dict[str, Any]) -> None:
    results, states = [], []
    for graphs, by_layers in ((None, False), (1, False), (0, False), (None, True), (1, True)):
        stage = staged(family, 0, dropout, graphs=graphs, by_layers=by_layers, **choices)
        torch.manual_seed(7)
        results.append(two_windows(stage))
        states.append(torch.get_rng_state())
        assert stage.statistics()["recomputed"] == (3 if by_layers else 0 if graphs is None else 3 - graphs)
        assert stage.statistics()["stale_backwards"] == 2
    assert all(same(results[0], again) for again in results)
    assert all(torch.equal(states[0], state) for state in states), "others draw the same random numbers afterwards"


@pytest.mark.parametrize("choices", [{}, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("graphs", [None, 0])
def test_weights_that_change_under_a_waiting_pass_are_noticed(
    graphs: int | None, choices: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stage, "_leave_to_waiting", lambda self: None)
    stage = staged("llama", graphs=graphs, **choices)
    first, late = stage.forward(ids(0)), stage.forward(ids(1))
    first.backward(torch.ones_like(first.output))
    stage.step(1e-2, 1)
    with pytest.raises(RuntimeError, match="weights were changed under a forward pass"):
        late.backward(torch.ones_like(late.output))


def autocast_gradients(part: Slice, given: Tensor, gradient: Tensor | None) -> list[Tensor | None]:
    """Return what a plain module leaves in its weights, autocast entered for one pass."""
    leaf = given if part.cut.embeds else given.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        output = part.train()(leaf)
    if gradient is None:
        functional.cross_entropy(output.float().flatten(0, 1), ids(5).flatten()).backward()
    else:
        torch.autograd.backward(output, gradient.to(output.dtype))
    return [weight.grad for weight in part.parameters()]


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_set_in_bfloat16_is_autocast_to_the_bit(family: str, number: int) -> None:
    stage, plain = staged(family, number, **BF16), built(family, number)
    given = ids(4) if number == 0 else torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(1))
    if number == 0:
        waiting = stage.forward(given)
        gradient: Tensor | None = torch.full_like(waiting.output, 0.1)
        waiting.backward(torch.full_like(waiting.output, 0.1))
    else:
        gradient = None
        stage.loss(given, ids(5))
    assert same(gradients(stage), autocast_gradients(plain, given, gradient))
    stage.step(1e-2, 1)
    for name, master in zip(stage.names, stage._weights, strict=True):
        assert torch.equal(stage._set.leaves[name], master.to(stage._set.leaves[name].dtype)), "the set follows"


def test_all_graphs_share_one_copy_of_the_matrices_in_bfloat16() -> None:
    """Each graph keeps its activations alone; a second version of the weights is one more set."""
    stage = staged("llama", **BF16)
    halves = {leaf.data_ptr() for leaf in stage._set.leaves.values() if leaf.dtype == torch.bfloat16}
    assert len(halves) == 7, "the matrices of a layer"
    weight_sizes = {leaf.numel() for leaf in stage._set.leaves.values() if leaf.dtype == torch.bfloat16}
    kept: set[int] = set()

    def keep(tensor: Tensor) -> Tensor:
        if tensor.dtype == torch.bfloat16 and tensor.ndim == 2 and tensor.numel() in weight_sizes:
            kept.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        passes = [stage.forward(ids(seed)) for seed in range(2)]
    assert kept == halves
    assert all(waiting.has_graph for waiting in passes)


class _Products(TorchDispatchMode):
    """Notes the types of what all experts multiply at once."""

    def __init__(self) -> None:
        super().__init__()
        self.types: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._grouped_mm.default:
            self.types += [args[0].dtype, args[1].dtype]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_experts_are_multiplied_in_bfloat16_of_which_one_copy_exists(family: str) -> None:
    """Autocast would leave them in float32."""
    half, whole = staged(family, **BF16), staged(family)
    experts = {name for name, leaf in half._set.leaves.items() if leaf.ndim == 3}
    assert len(experts) == 2
    assert {half._set.leaves[name].dtype for name in experts} == {torch.bfloat16}
    products = _Products()
    for each in (half, whole):
        with products if each is half else nullcontext():
            waiting = each.forward(ids(4))
            waiting.backward(torch.full_like(waiting.output, 0.1))
    assert set(products.types) == {torch.bfloat16}
    assert len(products.types) >= 2 * 6, "two products of a pass, and two of the backward pass for each"
    mine, yours = (torch.cat([each.flatten() for each in gradients(of) if each is not None]) for of in (half, whole))
    assert torch.dist(mine, yours) <= 0.02 * yours.norm()
    half.step(1e-2, 1)
    assert all(torch.equal(half._set.leaves[name], half._masters[name].bfloat16()) for name in experts)


# The loss in chunks.


@pytest.mark.parametrize(("choices", "tokens"), [({}, 4), (BF16, 8)], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("family", "plain"), [("llama", True), ("gpt2", True), ("gemma2", False), ("granite", False)])
def test_the_loss_in_chunks_is_the_whole_one(
    family: str, plain: bool, choices: dict[str, Any], tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To rounding; families that do more to the logits than the head get no chunks."""
    whole, chunked = (staged(family, 1, **choices) for _ in range(2))
    hidden = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(1))
    expected = whole.loss(hidden, ids(5))
    monkeypatch.setattr("pipeline.forward_pass.LOGITS", VOCABULARY)
    monkeypatch.setattr("pipeline.forward_pass._PIECE", 3 * VOCABULARY)
    shapes: list[Any] = []
    head = chunked._module.get_submodule(chunked._module.head)
    head.register_forward_hook(lambda _, given, __: shapes.append(tuple(given[0].shape)))
    found = chunked.loss(hidden, ids(5))
    assert ((tokens, 32) in shapes) == plain
    assert expected.hidden is not None
    assert found.hidden is not None
    tolerance = 1e-6 if not choices else 4e-3
    assert found.loss == pytest.approx(expected.loss, rel=tolerance)
    assert torch.dist(found.hidden, expected.hidden) <= tolerance * expected.hidden.norm()
    for mine, yours in zip(gradients(chunked), gradients(whole), strict=True):
        assert mine is not None
        assert torch.dist(mine, yours) <= tolerance * yours.norm()
    with pytest.raises(ValueError, match="vocabulary"):
        chunked.loss(hidden, ids(5) + 60)


@pytest.mark.parametrize(("choices", "size"), [({}, 4), (BF16, 2)], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("share", [1, 4, 16])
def test_the_heads_gradient_is_added_to_once_a_chunk_and_a_chunk_is_long(
    choices: dict[str, Any], size: int, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits of 18 tokens, in memory for 18 / `share` of them at 16 bytes each."""
    stage, largest = staged("llama", 1, **choices), _LargestFloat()
    monkeypatch.setattr("pipeline.forward_pass.LOGITS", 18 * VOCABULARY // share - 1)
    monkeypatch.setattr("pipeline.forward_pass._PIECE", VOCABULARY)
    additions: list[Tensor] = []
    leaf = stage._set.leaves[f"{stage._module.head}.weight"]
    leaf.register_post_accumulate_grad_hook(additions.append)
    with largest:
        stage.loss(torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(1)), ids(5))
    tokens = 16 * (18 * VOCABULARY // share - 1) // (size * VOCABULARY)
    assert len(additions) == -(-18 // tokens)
    if size == 2:
        assert largest.rows == 1, "logits are float32 a piece at a time"


class _LargestFloat(TorchDispatchMode):
    """Notes the most rows of logits that are float32 at once."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and found.dtype == torch.float32 and found.shape[-1:] == (VOCABULARY,):
            self.rows = max(self.rows, found.numel() // VOCABULARY)
        return found


# The seeds of what travels back.


def test_each_message_is_hashed_once_and_not_in_the_devices_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that is computed again takes the seeds that it has."""
    recipe = prepared("llama", num_hidden_layers=3)
    middle, last = (make_stage(recipe, cuts(recipe, 3)[number], codec="int5-int3", graphs=0) for number in (1, 2))
    codec, hashed = ACTIVATION_CODECS["int5-int3"], list[tuple[bytes, int]]()

    def noted(wire: Tensor) -> int:
        hashed.append((wire.numpy().tobytes(), get_ident()))
        return seed_of(wire)

    monkeypatch.setattr("pipeline.activation_codec.seed_of", noted)
    came = encode(codec.down, torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(1)))
    waiting = middle.forward(came)
    below = last.loss(waiting.output, ids(5)).hidden
    assert below is not None
    waiting.backward(below)
    assert middle.statistics()["recomputed"] == 1
    sent = waiting.output.numpy().tobytes()
    assert sorted(message for message, _ in hashed) == sorted([came.numpy().tobytes(), sent, sent])
    assert get_ident() not in {thread for _, thread in hashed}


# Memory that runs out.


class Scarce:
    """Lets autograd fail as a GPU does: after some gradients of a backward pass, or in a forward pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: RuntimeError | None = None) -> None:
        self._patch = monkeypatch
        self._error = error or torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    def forwards(self, stage: Stage, times: int) -> None:
        run, left = Stage._graph.__get__(stage), iter(range(times))

        def failing(*given: Any, **more: Any) -> Any:
            if next(left, None) is not None:
                raise self._error
            return run(*given, **more)

        self._patch.setattr(stage, "_graph", failing)

    def backwards(self, stage: Stage) -> None:
        """The next backward pass fails half-way: some weights have their gradient by then, and others have not."""
        leaf = list(stage._set.leaves.values())[len(stage.names) // 2]

        def fail(_: Tensor) -> None:
            handle.remove()
            raise self._error

        handle = leaf.register_hook(fail)


@pytest.mark.parametrize("graphs", [None, 0])
def test_a_backward_pass_that_fails_half_way_costs_its_window_and_nothing_else(
    graphs: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, calm = staged("llama", graphs=graphs), staged("llama")
    before = stage.weights()
    good, bad, late = (stage.forward(ids(seed)) for seed in range(3))
    good.backward(torch.ones_like(good.output))
    Scarce(monkeypatch).backwards(stage)
    with pytest.raises(MemoryError):
        bad.backward(torch.ones_like(bad.output))
    assert any(weight.grad is not None for weight in stage._weights), "a part had been added"
    assert not late.has_graph, "it shrinks"
    assert not stage.step(1e-2, 2).applied
    assert all(torch.equal(was, now) for was, now in zip(before, stage.weights(), strict=True))
    assert stage.optimiser_state().steps == 0
    # The next window is an ordinary one, of what waited too.
    for each, waiting in ((stage, late), (calm, calm.forward(ids(2)))):
        waiting.backward(torch.ones_like(waiting.output))
        assert each.step(1e-2, 1).applied
    assert all(torch.equal(a, b) for a, b in zip(calm.weights(), stage.weights(), strict=True))
    assert (stage.statistics()["shortages"], stage.statistics()["skipped_steps"]) == (1, 1)


def test_a_backward_pass_that_fails_for_another_reason_costs_its_window_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure in a conversation with a peer ends that conversation, and the training goes on."""
    stage = staged("llama")
    before, bad, late = stage.weights(), *(stage.forward(ids(seed)) for seed in range(2))
    Scarce(monkeypatch, RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED")).backwards(stage)
    with pytest.raises(RuntimeError, match="cuDNN"):
        bad.backward(torch.ones_like(bad.output))
    assert any(weight.grad is not None for weight in stage._weights), "a part had been added"
    assert late.has_graph
    assert not stage.step(1e-2, 1).applied
    assert all(map(torch.equal, before, stage.weights()))
    late.backward(torch.ones_like(late.output))
    assert stage.step(1e-2, 1).applied


def test_a_forward_pass_without_memory_is_tried_again_without_the_other_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = staged("llama")
    waiting = stage.forward(ids(0))
    Scarce(monkeypatch).forwards(stage, 1)
    assert not stage.forward(ids(1)).has_graph
    assert not waiting.has_graph
    Scarce(monkeypatch).forwards(stage, 2)
    with pytest.raises(MemoryError, match="2 GiB"):
        stage.forward(ids(2))
    Scarce(monkeypatch).forwards(stage, 1)
    waiting.backward(torch.ones_like(waiting.output))
    assert stage.step(1e-2, 1).applied, "a forward pass spoils nothing, neither does one that is computed again"


@pytest.mark.parametrize("most", [None, 2])
def test_graphs_are_kept_again_once_memory_has_sufficed_for_a_while(
    most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = staged("llama", graphs=most)

    def window(passes: int) -> int:
        """Return how many of a window's passes kept their graph."""
        waiting = [stage.forward(ids(seed)) for seed in range(passes)]
        kept = sum(each.has_graph for each in waiting)
        for each in waiting:
            each.backward(torch.ones_like(each.output))
        stage.step(1e-3, passes)
        return kept

    Scarce(monkeypatch).forwards(stage, 1)
    stage.forward(ids(0)).give_up()
    kept = [window(3) for _ in range(3 * CALM_WINDOWS + 1)]
    assert kept == [0] * CALM_WINDOWS + [1] * CALM_WINDOWS + [2] * CALM_WINDOWS + [2 if most else 3]
    Scarce(monkeypatch).forwards(stage, 1)
    stage.forward(ids(0)).give_up()
    assert window(3) == 0


@pytest.mark.parametrize("choices", [{}, BF16], ids=["float32", "bfloat16"])
def test_where_the_old_weights_cannot_stay_their_passes_are_given_up(
    choices: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, calm = staged("llama", **choices), staged("llama", **choices)
    late = stage.forward(ids(1))
    for each in (stage, calm):
        waiting = each.forward(ids(0))
        waiting.backward(torch.ones_like(waiting.output))
    del waiting
    made = stage._set.__class__.__init__

    def scarce(self: Any, masters: Masters, *given: Any) -> None:
        made(self, masters, *given)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    with monkeypatch.context() as patch:
        patch.setattr("pipeline.forward_pass.WeightSet.__init__", scarce)
        stage.step(1e-2, 1)
    calm.step(1e-2, 1)
    assert all(torch.equal(a, b) for a, b in zip(calm.weights(), stage.weights(), strict=True))
    with pytest.raises(MemoryError, match="given up"):
        late.backward(torch.ones_like(late.output))
    assert torch.equal(stage.forward(ids(2)).output, calm.forward(ids(2)).output)


class ScarceAt(TorchDispatchMode):
    """Lets operations with floating-point numbers fail, from the n-th on or that one alone."""

    def __init__(self, number: int, *, once: bool) -> None:
        super().__init__()
        self._left, self._once = number, once

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), named: Any = None) -> Any:
        self._left -= any(isinstance(each, Tensor) and each.is_floating_point() for each in args)
        if self._left == 0 or (self._left < 0 and not self._once):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return function(*args, **(named or {}))


@settings(max_examples=100)
@given(
    st.sampled_from(["forward", "activations", "backward", "loss", "token_losses"]),
    st.integers(1, 350),
    st.booleans(),
    st.sampled_from([None, torch.float16]),
)
def test_wherever_memory_runs_out_it_is_said_and_no_part_of_a_gradient_counts(
    job: str, number: int, once: bool, autocast: torch.dtype | None
) -> None:
    last, codec = job in ("loss", "token_losses"), ACTIVATION_CODECS["int5-int3"]
    stage = staged("llama", int(last), codec="int5-int3", autocast=autocast)
    came = (encode(codec.down, torch.ones(2, 9, 32)), ids(0)) if last else (ids(0),)
    if job == "backward":
        work, came = stage.forward(ids(0)).backward, (encode(codec.back, torch.ones(2, 9, 32)),)
    else:
        work = getattr(stage, job)
    try:
        with ScarceAt(number, once=once):
            work(*came)
    except MemoryError:
        if job in ("backward", "loss") and any(gradient is not None for gradient in gradients(stage)):
            assert not stage.step(1e-2, 1).applied


def test_a_step_without_memory_for_the_norm_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = staged("llama")
    before = stage.weights()
    waiting, late = stage.forward(ids(0)), stage.forward(ids(1))
    waiting.backward(torch.ones_like(waiting.output))

    def fail(*_: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    with monkeypatch.context() as patch:
        patch.setattr(nn.utils, "clip_grads_with_norm_", fail)
        assert not stage.step(1e-2, 1).applied
    assert not late.has_graph, "it shrinks"
    assert all(map(torch.equal, before, stage.weights()))
    assert (stage.statistics()["shortages"], stage.statistics()["skipped_steps"]) == (1, 1)
    late.backward(torch.ones_like(late.output))
    assert stage.step(1e-2, 1).applied


def test_only_memory_is_a_shortage() -> None:
    cpu = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
    cublas = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    assert all(map(is_shortage, [MemoryError(), cpu, torch.OutOfMemoryError("CUDA out of memory"), cublas]))
    assert not is_shortage(OSError(5, "Input/output error"))
    assert not is_shortage(RuntimeError("the size of tensor a must match"))
