"""Modules of a program as the stages of a run: they compute what the program's own loop would, and are checked."""

import copy
import math
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from process_swarm import host, is_finished
from processes import Command, Commands
from safetensors.torch import load_file
from small_stages import nadam
from torch import Tensor, nn
from torch.nn import functional
from user_errors import user_error

import noloco_node
from noloco_node.api.program_stages import MOST_NOT_FINITE, program_slice, tried
from noloco_node.errors import Exit, UserError
from noloco_node.journal.events import InnerStep
from noloco_node.machine.device import Device, WatchedDevice
from noloco_node.machine.interface import TrainingFailed
from noloco_node.planning.foreign_layout import foreign_layout
from noloco_node.planning.model_layout import model_layout, with_optimiser
from noloco_node.run.config import PipelineConfig, RunConfig
from noloco_node.run.runfile import load_run
from pipeline.forward_pass import StageSettings

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_stages.py"
WIDTH, VOCABULARY = 6, 384
CPU = torch.device("cpu")


class Scaled(nn.Module):
    """A parameter by itself, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.scale * torch.tanh(self.layer(hidden))


def modules(seed: int = 0) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [nn.Embedding(VOCABULARY, WIDTH), Scaled(), nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))]


def written(directory: Path, stages: list[nn.Module] | nn.ModuleList, **sections: dict[str, object]) -> RunConfig:
    chosen: dict[str, dict[str, object]] = {"pipeline": {"codec": "float32"}, "inner": {"warmup_steps": 0}}
    return load_run(
        noloco_node.init(
            directory / "run.toml", stages, steps=9, batch=2, sequence_length=5, sections={**chosen, **sections}
        )
    )


def test_a_run_without_a_length_counts_a_module_s_samples_and_reads_text_in_the_usual_rows(tmp_path: Path) -> None:
    usual = PipelineConfig().sequence_length
    sizes = {"hidden_size": 8, "num_hidden_layers": 4, "num_attention_heads": 2, "vocab_size": VOCABULARY}
    chosen = [(modules(), usual), ({"architecture": "llama", "sizes": sizes}, usual), (nn.Linear(2, 2), 1)]
    for number, (model, length) in enumerate(chosen):
        run = load_run(noloco_node.init(tmp_path / f"{number}.toml", model, steps=9))
        assert run.pipeline.sequence_length == length


def test_the_run_of_a_list_has_a_stage_for_each_module(tmp_path: Path) -> None:
    run = written(tmp_path, nn.ModuleList(modules()))
    layout = foreign_layout(run)
    assert [*layout.shapes[1]] == ["1.scale"], "what is frozen stays with the program"
    assert [*layout.shapes[2]] == ["2.0.weight", "2.0.bias", "2.1.weight", "2.1.bias"]
    assert (layout.width, layout.vocabulary, len(layout.work), run.pipeline.stages) == (WIDTH, VOCABULARY, 3, 3)
    assert load_file(tmp_path / "run.safetensors").keys() == run.model.foreign_parameters.keys()
    with pytest.raises(UserError, match="foreign module") as refused:
        model_layout(run)
    assert "noloco_node.join with its stages" in refused.value.hint


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**31), sequences=st.integers(1, 2), length=st.integers(1, 5))
def test_stages_apart_take_the_step_of_the_modules_in_one_loop(
    tmp_path_factory: pytest.TempPathFactory, seed: int, sequences: int, length: int
) -> None:
    run = written(tmp_path_factory.mktemp("run"), modules(seed))
    layout, whole = foreign_layout(run), nn.Sequential(*modules(seed))
    parts = [
        with_optimiser(run, program_slice(number, modules(seed).__getitem__, layout, run), number, StageSettings(CPU))
        for number in range(3)
    ]
    ids, targets = torch.randint(VOCABULARY, (2, sequences, length))
    first = parts[0].forward(ids)
    second = parts[1].forward(first.output)
    found = parts[2].loss(second.output, targets)
    assert found.hidden is not None
    back = second.backward(found.hidden)
    assert back is not None
    first.backward(back)

    trained = [each for each in whole.parameters() if each.requires_grad]
    inner = run.inner
    plain = nadam(trained, inner, 0.01)
    loss = functional.cross_entropy(whole(ids).flatten(0, 1), targets.flatten())
    loss.backward()
    for number, part in enumerate(parts):
        nn.utils.clip_grad_norm_(whole[number].parameters(), inner.clip_norm)
        part.step(0.01, 1.0)
    plain.step()
    torch.testing.assert_close(found.loss, loss.item())
    for ours, theirs in zip([each for part in parts for each in part.weights()], trained, strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-4, atol=1e-6)


def test_a_trial_leaves_each_module_in_its_mode() -> None:
    stage = modules()[2].train()
    kept = next(iter(stage.children())).eval()
    tried(2, stage, torch.zeros(1, 2, WIDTH))
    assert stage.training
    assert not kept.training


def reordered() -> nn.Module:
    stage = modules()[2]
    assert isinstance(stage, nn.Sequential)
    bias = stage[0].bias
    del stage[0].bias
    del stage[0].weight
    stage[0].register_parameter("bias", bias)
    stage[0].register_parameter("weight", nn.Parameter(torch.ones(WIDTH)))
    return stage


def narrow() -> nn.Module:
    scaled = Scaled()
    scaled.layer = nn.Linear(WIDTH, 1).requires_grad_(False)
    scaled.forward = lambda hidden: (scaled.scale * hidden)[..., :2]
    return scaled


def failing() -> nn.Module:
    raise OSError("no such file")


@pytest.mark.parametrize(
    ("number", "build", "said"),
    [
        (0, lambda: nn.Embedding(VOCABULARY, 2), r"its parameter 0.weight is [384, 2], and the run's is [384, 6]"),
        (1, nn.Identity, "no parameter that requires a gradient"),
        (1, lambda: Scaled().requires_grad_(True), "its parameter 1.layer.weight is trained"),
        (1, lambda: modules(1)[1], "its frozen parameter 1.layer.weight has other values"),
        (1, narrow, "it returns 2 numbers a token, and the run's 6"),
        (1, failing, "OSError: no such file"),
        (1, lambda: None, "could not build stage 1. AttributeError: 'NoneType'"),
        (2, reordered, "registered in another order"),
        (2, lambda: modules()[2].bfloat16(), "The parameter 2.0.weight is bfloat16"),
    ],
)
def test_a_stage_that_is_not_the_runs_is_refused_by_what_differs(
    tmp_path: Path, number: int, build: Callable[[], nn.Module], said: str
) -> None:
    run = written(tmp_path, modules())
    layout = foreign_layout(run)
    with user_error(Exit.CONFIG) as refused:
        program_slice(number, lambda _: build(), layout, run)
    assert said in f"{refused.value.what} {refused.value.why}"


class Cut(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden.detach())


class Pair(nn.Embedding):
    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(ids), ids


class Ahead(nn.Linear):
    """Sees a little of the token after each."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden + 0.01 * hidden.roll(-1, dims=1))


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ([], "The list of stages holds no module"),
        (["first"], "The list of stages holds str"),
        (2 * [nn.Linear(1, 1)], "Two stages share a parameter"),
        ([nn.Linear(3, 3), nn.Linear(3, 3)], "Stage 0 cannot compute with an input of [1, 2]"),
        ([Pair(9, 3), nn.Linear(3, 9)], "Stage 0 returns no activations"),
        ([nn.Embedding(9, 3), nn.Linear(3, 4), nn.Linear(4, 9)], "The stages hand on different widths"),
        ([nn.Embedding(9, 3), Cut(3, 9)], "Stage 1 passes no gradient back"),
        ([Cut(9, 3), nn.Linear(3, 9)], "Stage 0 cannot compute"),
        ([nn.Embedding(9, 3), Ahead(3, 9)], "The stages look at the tokens that they have to predict"),
        (
            [nn.Embedding(9, 3), nn.Sequential(nn.Linear(3, 9), nn.Threshold(math.inf, math.nan))],
            "Stage 1 computes what",
        ),
    ],
)
def test_a_list_that_is_no_pipeline_is_refused_and_nothing_is_written(
    tmp_path: Path, stages: list[nn.Module], said: str
) -> None:
    with pytest.raises(UserError) as refused:
        written(tmp_path, stages)
    assert said in refused.value.what
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("field", "sections"),
    [
        ("data.packed", {"data": {"source": "json", "path": "rows.jsonl", "form": "prompt"}}),
        ("pipeline.boundaries", {"pipeline": {"boundaries": [1, 2]}}),
        ("adapter.rank", {"adapter": {"rank": 4}}),
        ("pipeline.codec", {"pipeline": {"codec": "int8"}}),
        ("pipeline.subspace", {"pipeline": {"subspace": 2}}),
        ("model.foreign_parameters", {"pipeline": {"stages": 2}}),
        ("model.foreign_width", {"model": {"foreign_width": 0}}),
        ("model.foreign_vocabulary", {"model": {"foreign_vocabulary": 0}}),
    ],
)
def test_what_stages_of_a_program_cannot_do_is_named(tmp_path: Path, field: str, sections: dict[str, object]) -> None:
    with pytest.raises(UserError) as refused:
        written(tmp_path, modules(), **copy.deepcopy(sections))
    assert field in refused.value.what


class Odd(Scaled):
    """Returns, once it was built and tried, what its `later` says."""

    later: Callable[[Tensor], object] | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        computed: Any = super().forward(hidden)
        return computed if self.later is None else self.later(computed)


def short(_: Tensor) -> Tensor:
    raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")


@pytest.mark.real_time
@pytest.mark.parametrize(
    ("later", "why"),
    [
        (lambda _: 1 // 0, "ZeroDivisionError"),
        (lambda made: (made, made), "it makes tuple"),
        (lambda made: made.long(), "it makes torch.int64"),
        (lambda made: made.mean(0), "it makes torch.float32 [5, 6]"),
        (lambda made: made[..., :4], "it returns 4 numbers a token, and the run's 6"),
        (short, None),
    ],
)
async def test_a_stage_that_fails_later_ends_its_node_and_a_shortage_of_memory_does_not(
    tmp_path: Path, later: Callable[[Tensor], object], why: str | None
) -> None:
    """In the job of a partner's conversation, which by itself would end no node."""
    torch.manual_seed(0)
    built = [nn.Embedding(VOCABULARY, WIDTH), Odd(), nn.Linear(WIDTH, VOCABULARY)]
    run = written(tmp_path, built)
    stage = with_optimiser(run, program_slice(1, lambda _: built[1], foreign_layout(run), run), 1, StageSettings(CPU))
    device = Device(CPU)
    watched = WatchedDevice(device)
    hidden = torch.randn(2, 5, WIDTH)
    await watched.run(stage.forward, hidden)
    built[1].later = later
    with pytest.raises(MemoryError if why is None else TrainingFailed):
        await watched.run(stage.forward, hidden)
    device.close()
    assert watched.failed.done() == (why is not None)
    if why is not None:
        assert why in watched.failed.result().why


@pytest.mark.parametrize(("number", "odd"), [(0, math.inf), (1, -math.nan), (1, -math.inf), (2, math.nan)])
def test_a_stage_that_goes_on_returning_nan_ends_its_node_by_its_name(tmp_path: Path, number: int, odd: float) -> None:
    built = modules()
    run = written(tmp_path, built)
    stage = program_slice(number, built.__getitem__, foreign_layout(run), run)
    inputs = torch.zeros(1, 2, WIDTH) if number else torch.zeros(1, 2, dtype=torch.int64)
    few = (MOST_NOT_FINITE - 1) * [odd]
    added = iter([*few, 0.0, *few, odd])
    built[number].register_forward_hook(lambda _module, _given, made: made + next(added))
    for _ in [*few, 0.0, *few]:
        stage(inputs)
    with pytest.raises(TrainingFailed, match=f"Stage {number} of the program") as failed:
        stage(inputs)
    assert "NaN" in failed.value.why


def test_logits_of_masked_tokens_are_infinite(tmp_path: Path) -> None:
    built = modules()
    run = written(tmp_path, built)
    stage = program_slice(2, built.__getitem__, foreign_layout(run), run)
    built[2].register_forward_hook(lambda _module, _given, made: made.index_fill(2, torch.tensor([0]), -math.inf))
    for _ in range(2 * MOST_NOT_FINITE):
        stage(torch.zeros(1, 2, WIDTH))


@pytest.mark.network
def test_stages_of_a_program_train_over_real_daemons(tmp_path: Path) -> None:
    with Commands() as commands:
        path = commands.directory / "run.toml"
        done = commands.start("--init", str(path), "--steps", "30", name="init", program=EXAMPLE)
        assert done.wait() == Exit.OK, done.complaint
        bootstrap, invite = host(commands, path, "--weights", str(commands.directory))

        def member(stage: int, name: str) -> Command:
            options = ("--swarm", invite, "--stage", str(stage), "--refresh", "1")
            return commands.start(*options, name=name, home=True, program=EXAMPLE)

        first, last = member(0, "first"), member(1, "last")
        for each in (first, last):
            assert each.wait() == Exit.OK, each.complaint
            assert is_finished(each)
        losses = [step.loss for step in last.events(InnerStep) if step.loss is not None]
        assert losses[-1] < losses[0] - 1.0
        out = tmp_path / "model"
        noloco_node.export(None, out, homes=[first.home, last.home])
        bootstrap.interrupt()
        assert bootstrap.wait() == Exit.OK
    example = runpy.run_path(str(EXAMPLE))
    whole = nn.Sequential(example["stage"](0), example["stage"](1))
    whole.load_state_dict(load_file(out / "model.safetensors"))
    ids = torch.tensor([[each + 3 for each in b"    def __init__(self, name):\n        self.name = name\n"]])
    loss = functional.cross_entropy(whole(ids[:, :-1])[0], ids[0, 1:])
    assert loss < 4.5, "it has learnt: without, it is 6"
