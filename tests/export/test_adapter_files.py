"""Adapters taken home from what lies in homes: as PEFT's files, and as a whole model."""

import argparse
import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from checkpoints import LLAMA, write_model
from command_line import printed, refused
from safetensors.torch import load_file
from sample_counters import counters
from transformers import AutoModelForCausalLM, AutoTokenizer
from user_errors import user_error

from noloco_node.errors import Exit
from noloco_node.export.adapter_files import AdapterExport, check_wanted, peft_adapter
from noloco_node.export.continue_run import continuing_text
from noloco_node.export.exporter import export
from noloco_node.export.frozen_files import with_frozen_files
from noloco_node.export.sources import model_in, read_provenance
from noloco_node.planning.model_layout import build_stage, model_layout
from noloco_node.run.presets import run_text, with_fields
from noloco_node.run.runfile import decode_run, load_run
from noloco_node.storage.checkpoint import Checkpoint, save
from noloco_node.storage.home import Home
from noloco_node.storage.weight_store import WeightStore
from noloco_node.swarm.run_distribution import RunFileText
from pipeline.adapters.settings import AdapterConfig, Form

pytestmark = pytest.mark.usefixtures("short_text")
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 384, "n_positions": 64},
}
LINEAR = {
    "llama": ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"],
    "gpt2": ["c_attn", "c_fc", "c_proj"],
}
"""Layers of which nodes keep codes."""


class Adapted:
    """Replicas of each stage, whose adapters lie in their homes, and the checkpoint that they adapt.

    `noises`: what each replica of a stage adds to its adapters, times the same noise. `ahead`: rounds that the last one
    claims. `learnt`: whether the checkpoint predicts its text better than a guess.
    """

    def __init__(
        self,
        directory: Path,
        family: str,
        *,
        freeze_a: bool,
        stages: int = 2,
        noises: Sequence[float] = (0.1, 0.11),
        ahead: int = 0,
        learnt: bool = False,
        base: Form = "bfloat16",
        alpha: float = 4.0,
    ) -> None:
        self.family, self.directory, self.checkpoint = family, directory, directory / "checkpoint"
        self.model = write_model(self.checkpoint, family, FAMILIES[family])
        if learnt:
            self._learn()
        adapter = AdapterConfig(rank=2, alpha=alpha, freeze_a=freeze_a, base=base)
        fields: dict[str, dict[str, object]] = {
            "data": {"source": '"stdlib"'},
            "pipeline": {"stages": stages, "replicas": len(noises)},
        }
        text = with_fields(continuing_text(self.checkpoint, "tiny", adapter), fields).replace('path = "your-text/"', "")
        self.frozen = directory / "frozen"
        text = with_frozen_files(text, self.checkpoint, self.frozen, overwrite=False)
        self.recipe = RunFileText(text, "the test's run file")
        self.layout = model_layout(self.recipe.run)
        rounds = [*[40] * (len(noises) - 1), 40 + ahead]
        self.homes = [
            self._home(stage, peer, noise, rounds[peer]) for stage in range(stages) for peer, noise in enumerate(noises)
        ]

    def _learn(self) -> None:
        words = AutoTokenizer.from_pretrained(self.checkpoint)(Path(argparse.__file__).read_text()[:20_000])
        tokens = torch.tensor(words["input_ids"])
        optimiser = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        for batch in tokens[: len(tokens) // 256 * 256].view(-1, 8, 32):
            self.model(input_ids=batch, labels=batch).loss.backward()
            optimiser.step()
            optimiser.zero_grad()
        self.model.save_pretrained(self.checkpoint, max_shard_size="100KB")

    def _home(self, stage: int, peer: int, noise: float, round: int) -> Path:
        part = build_stage(self.recipe.run, self.layout, stage, torch.device("cpu"))
        generator = torch.Generator().manual_seed(stage)
        moved = tuple(
            each.detach() + noise * torch.randn(each.shape, generator=generator) for each in part.parameters()
        )
        taken = counters(run_id=self.recipe.digest, stage=stage, round=round, peer=f"peer-{stage}-{peer}")
        place = self.directory / taken.peer
        with Home.open(place) as home:
            paths = home.enter(self.recipe.digest)
            files = self.recipe.run.data.tokenizer_files
            WeightStore.whole(self.checkpoint, files).copy_to(WeightStore.filling(paths.tokenizer, files))
            save(paths.checkpoint, Checkpoint(taken, {"slow": moved, "fast": moved}), 1)
            for each in (paths, home):
                each.keep_run_file(self.recipe.text)
        return place

    def export(self, name: str, *, merge: bool = False, base: Path | None = None) -> Path:
        out = self.directory / name
        asyncio.run(export(out, homes=tuple(self.homes), wanted=AdapterExport(merge, base)))
        return out


class Taken(NamedTuple):
    """Adapters in their homes, and what was taken home from there: the adapter, and the model with it."""

    made: Adapted
    adapter: Path
    merged: Path


@pytest.fixture(scope="module", params=FAMILIES)
def taken(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Taken:
    made = Adapted(tmp_path_factory.mktemp(request.param), request.param, freeze_a=request.param == "gpt2")
    return Taken(made, made.export("adapter"), made.export("merged", merge=True, base=made.checkpoint))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=torch.arange(3, 19).view(2, 8), use_cache=False).logits
    return found


def test_the_mean_of_the_adapters_is_what_both_forms_hold(taken: Taken) -> None:
    made, adapter, merged = taken
    turned = made.family == "gpt2"
    settings, weights = (
        json.loads((adapter / "adapter_config.json").read_bytes()),
        load_file(adapter / "adapter_model.safetensors"),
    )
    assert (settings["peft_type"], settings["r"], settings["lora_alpha"]) == ("LORA", 2, 4.0)
    assert settings["fan_in_fan_out"] == turned
    own = made.model.state_dict()
    own.setdefault("lm_head.weight", made.model.get_output_embeddings().weight)
    for name, weight in own.items():
        a, b = (weights.get(f"base_model.model.{name.removesuffix('.weight')}.lora_{each}.weight") for each in "AB")
        if a is not None and b is not None:
            delta = 2.0 * (b @ a)
            own[name] = weight + (delta.t() if turned else delta)
    found = AutoModelForCausalLM.from_pretrained(merged)
    assert any(
        not torch.equal(each, made.model.state_dict()[name]) for name, each in own.items() if name != "lm_head.weight"
    )
    notes = [json.loads((place / "noloco.json").read_bytes())["untied"] for place in (adapter, merged)]
    assert notes == [False, turned], "an adapter holds neither embedding nor head"
    for name, each in found.state_dict().items():
        assert torch.allclose(each, own[name], atol=1e-6), name
    assert model_in(merged).run == made.recipe.run


def test_of_adapters_of_one_stage_those_that_predict_make_the_mean(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two of three spoil the model, and one claims to be rounds ahead. Without the model norms and rounds decide."""
    noises = (0.001, 0.1, 0.11)
    made = Adapted(tmp_path, "llama", freeze_a=False, stages=1, noises=noises, ahead=9, learnt=True, alpha=40.0)
    judged = read_provenance(made.export("adapter", base=made.checkpoint))
    assert [each.peer for each in judged.taken[0]] == ["peer-0-0"]
    assert all(each.why.startswith("loss") for each in judged.left_out[0])
    assert "not judged" not in capsys.readouterr().err
    (taken,) = read_provenance(made.export("unjudged")).taken
    assert {"peer-0-1", "peer-0-2"} <= {each.peer for each in taken}
    assert "the model that they adapt is not here" in capsys.readouterr().err


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_are_added_to_the_model_as_nodes_keep_it_if_that_alone_is_here(tmp_path: Path, family: str) -> None:
    made = Adapted(tmp_path, family, freeze_a=False, base="nf4")
    own, kept = (
        AutoModelForCausalLM.from_pretrained(made.export(name, merge=True, base=base)).state_dict()
        for name, base in (("own", made.checkpoint), ("kept", made.frozen))
    )
    before = made.model.state_dict()
    codes = [name for name, each in own.items() if not torch.allclose(each, kept[name], rtol=2.0**-7, atol=1e-7)]
    assert sorted({name.split(".")[-2] for name in codes}) == LINEAR[family]
    for name in codes:
        error = (kept[name] - own[name]).abs().max()
        assert error <= 0.16 * before[name].abs().max(), "half of the widest gap between two codes"
    named = [
        json.loads((made.export(f"adapter-{base.name}", base=base) / "adapter_config.json").read_bytes())
        for base in (made.checkpoint, made.frozen)
    ]
    assert [each["base_model_name_or_path"] for each in named] == [str(made.checkpoint), None]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_peft_loads_the_adapter_over_the_model(taken: Taken) -> None:
    peft = pytest.importorskip("peft")
    made, adapter, merged = taken
    base = AutoModelForCausalLM.from_pretrained(made.checkpoint)
    before, expected = logits(base), logits(AutoModelForCausalLM.from_pretrained(merged))
    found = logits(peft.PeftModel.from_pretrained(base, adapter))
    assert torch.dist(found, expected) <= 1e-5 * expected.norm() < 1e-2 * torch.dist(before, expected)


@pytest.mark.parametrize(
    ("targets", "named"), [(("mlp.c_proj",), ["mlp.c_proj"]), (("all-linear",), ["c_attn", "c_fc", "c_proj"])]
)
def test_peft_is_told_of_the_layers_that_have_an_adapter_alone(
    tmp_path: Path, targets: tuple[str, ...], named: list[str]
) -> None:
    write_model(tmp_path, "gpt2", FAMILIES["gpt2"])
    run = RunFileText(continuing_text(tmp_path, "tiny", AdapterConfig(rank=2, targets=targets)), "the test's").run
    assert peft_adapter(run, model_layout(run), None, [])[0]["target_modules"] == named


def test_a_base_that_is_not_the_runs_is_refused(taken: Taken, tmp_path: Path) -> None:
    write_model(tmp_path / "other", sizes={**LLAMA, "intermediate_size": 64})
    for base, why in ((tmp_path / "other", "run file lists"), (None, "no home")):
        with user_error(Exit.CONFIG, why):
            taken.made.export("refused", merge=True, base=base)
    assert not (taken.made.directory / "refused").exists()


def test_an_adapter_alone_is_no_model(taken: Taken, tmp_path: Path) -> None:
    adapter = str(taken.adapter)
    for command in (["evaluate", adapter], ["generate", adapter, "--prompt", "a"]):
        assert "--weights DIR" in refused(*command).hint
    assert "--merge" in refused("init", "--from", adapter, tmp_path / "run.toml").hint


def test_an_adapter_over_its_model_is_the_merged_model(taken: Taken, tmp_path: Path) -> None:
    made, adapter, merged = taken
    over, few = ("--weights", str(made.checkpoint)), ("--batches", "1")
    losses = [printed("evaluate", each, "--json", *few, *more) for each, *more in ((merged,), (adapter, *over))]
    assert json.loads(losses[0])["loss"] == pytest.approx(json.loads(losses[1])["loss"], rel=1e-6)
    texts = [printed("generate", each, "--prompt", "import ", *more) for each, *more in ((merged,), (adapter, *over))]
    assert texts[0] == texts[1]
    assert refused("evaluate", merged, *over, code=Exit.USAGE).what == "There is no adapter to put over --weights."
    # An export that knew the model names it.
    assert printed("evaluate", str(made.export("named", base=made.checkpoint)), "--json", *few) == losses[1]
    write_model(tmp_path / "other", made.family, FAMILIES[made.family] | {"vocab_size": 400})
    assert "run file lists" in refused("evaluate", adapter, "--weights", tmp_path / "other").why


def test_homes_of_adapters_are_evaluated_over_a_model_that_is_named(taken: Taken) -> None:
    made = taken.made
    homes = [word for home in made.homes for word in ("--from-home", str(home))]
    assert "--weights DIR" in refused("evaluate", *homes).hint
    rows = json.loads(printed("evaluate", *homes, "--weights", made.checkpoint, "--json", "--batches", "1"))
    assert [row["model"] for row in rows["models"]][:2] == ["merged", "stage 0, peer-0-0, round 40"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--target", "q_prj"], "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"),
        (["--base", "int3"], "bfloat16"),
    ],
)
def test_init_refuses_adapters_that_do_not_fit(tmp_path: Path, options: list[str], said: str) -> None:
    write_model(tmp_path / "checkpoint")
    run = tmp_path / "run.toml"
    shown = refused("init", "--from", tmp_path / "checkpoint", "--lora", 4, *options, run)
    assert said in str(shown)
    assert not run.exists()


def test_init_plans_adapters_for_machines(tmp_path: Path) -> None:
    write_model(tmp_path / "checkpoint")
    run = tmp_path / "run.toml"
    printed("init", "--from", tmp_path / "checkpoint", "--lora", 4, "--gpu", "4GiB", "--peers", 3, run)
    found = load_run(run)
    assert (found.adapter.rank, found.adapter.alpha, found.adapter.base) == (4, 8.0, "bfloat16")
    assert (found.pipeline.stages, found.pipeline.replicas) == (1, 3)


def test_init_wants_a_model_for_adapters(tmp_path: Path) -> None:
    refused("init", "--lora", 4, tmp_path / "run.toml", code=Exit.USAGE)


@pytest.mark.parametrize("wanted", [AdapterExport(merge=True), AdapterExport(base=Path("model"))])
def test_a_run_of_all_weights_has_no_adapters_to_export(wanted: AdapterExport) -> None:
    run = decode_run(run_text("tiny"), "a test")
    check_wanted(run, AdapterExport(), [])
    with user_error(Exit.USAGE, "There are no adapters"):
        check_wanted(run, wanted, [])
