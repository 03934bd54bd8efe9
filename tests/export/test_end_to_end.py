"""The model of a run taken home: from a living swarm, from homes, from snapshots; and what is done with it there."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from checkpoints import LLAMA, write_model
from command_line import printed
from limits import LAST_RESORT_S
from safetensors.torch import load_file
from sample_counters import counters
from torch import Tensor
from typer.testing import CliRunner
from user_errors import user_error

from noloco_node.cli.main import app
from noloco_node.data.token_text import Sampling
from noloco_node.errors import Exit, UserError
from noloco_node.export import exporter, replica_files
from noloco_node.export.continue_run import continuing_text
from noloco_node.export.exporter import export, merge_files, of_homes
from noloco_node.export.replica_files import ReplicaReader, in_home, newest, under_other_ids
from noloco_node.export.sources import model_in, read_provenance, recipe_of
from noloco_node.inference import evaluation
from noloco_node.inference.evaluation import _text, evaluate
from noloco_node.inference.generation import generate
from noloco_node.planning.checkpoint_map import RunWeights
from noloco_node.planning.model_layout import ModelLayout, build_stage, make_stage, model_layout
from noloco_node.run.presets import PRESETS, demo_run_text, run_text
from noloco_node.run.runfile import decode_run
from noloco_node.storage.checkpoint import Checkpoint, save
from noloco_node.storage.home import Home
from noloco_node.storage.weight_store import WeightStore
from noloco_node.swarm.invite import SCHEME
from noloco_node.swarm.run_distribution import RunFileText
from pipeline.model_config import prepare

pytestmark = pytest.mark.usefixtures("short_text")
CONTINUED: dict[str, dict[str, Any]] = {
    "mistral": {**LLAMA, "num_key_value_heads": 1, "sliding_window": None},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 384, "n_positions": 64},
    "gemma3_text": {**LLAMA, "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 5},
    "qwen3_moe": {**LLAMA, "num_key_value_heads": 1, "num_experts": 8, "moe_intermediate_size": 24, "head_dim": 32},
}
TEXT = demo_run_text(stages=2, replicas=2, steps=100, seed=0).replace(
    "evaluate_every_rounds = 0", "evaluate_every_rounds = 3"
)
"""A run whose model has 0.75 million parameters."""


# From homes.


class Homes:
    """Homes of one run as nodes leave them: each with a run file and one replica's checkpoint."""

    def __init__(self, directory: Path, text: str = TEXT) -> None:
        self.directory, self.text = directory, text
        self.recipe = RunFileText(text, "the test's run file")
        self.plan: ModelLayout = model_layout(self.recipe.run)

    def weights(self, stage: int) -> tuple[Tensor, ...]:
        part = build_stage(self.recipe.run, self.plan, stage, torch.device("cpu"))
        return tuple(weight.detach() for weight in part.parameters())

    def checkpoint(self, stage: int, peer: str, tensors: tuple[Tensor, ...], round: int = 40) -> Checkpoint:
        taken = counters(run_id=self.recipe.digest, stage=stage, round=round, inner_steps=10 * round, peer=peer)
        return Checkpoint(taken, {"slow": tensors, "fast": tuple(2 * tensor for tensor in tensors)})

    def make(self, name: str, stage: int, tensors: tuple[Tensor, ...], round: int = 40) -> Path:
        home = self.directory / name
        home.mkdir(exist_ok=True)
        (home / "run.toml").write_text(self.text)
        save(home / "checkpoint", self.checkpoint(stage, name, tensors, round))
        return home


def moved(tensors: tuple[Tensor, ...], by: float, seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(tensor + by * torch.randn(tensor.shape, generator=generator) for tensor in tensors)


def exported(out: Path) -> dict[str, Tensor]:
    return load_file(out / "model.safetensors")


def text_in(directory: Path) -> str:
    """Write a text of one document into a directory, for --data."""
    (directory / "text.txt").write_text("to be or not to be, that is the question\n" * 100)
    return str(directory / "text.txt")


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_homes_are_merged_without_the_outlier_and_the_straggler(tmp_path: Path) -> None:
    made = Homes(tmp_path)
    first, last = made.weights(0), made.weights(1)
    homes = [
        made.make("a", 0, moved(first, 0.01, 1), round=40),
        made.make("b", 0, moved(first, 0.01, 2), round=42),
        made.make("mad", 0, tuple(9 * tensor for tensor in first), round=42),
        made.make("asleep", 0, moved(first, 0.01, 3), round=3),
        made.make("d", 1, last, round=41),
    ]
    # A node's own checkpoint of long ago, and a snapshot that another peer took of it later.
    made.make("b", 0, moved(first, 0.5, 4), round=7)
    save(tmp_path / "d" / "snapshots" / "0", made.checkpoint(0, "a", moved(first, 0.5, 5), round=12))

    told = asyncio.run(export(tmp_path / "model", homes=tuple(homes)))
    notes = read_provenance(tmp_path / "model")
    assert notes.replicas == (2, 1)
    assert notes.rounds == (42, 41)
    assert [[each.peer for each in stage] for stage in notes.taken] == [["a", "b"], ["d"]]
    assert {each.peer for each in notes.left_out[0]} == {"mad", "asleep"}
    assert "stage 0: 2, rounds 40 to 42; stage 1: 1, round 41" in told
    assert "Left out of stage 0: mad (norm" in told
    names = list(made.plan.shapes[0])
    means = [(x.double() + y.double()) / 2 for x, y in zip(moved(first, 0.01, 1), moved(first, 0.01, 2), strict=True)]
    found = exported(tmp_path / "model")
    assert all(torch.equal(found[name], mean.float()) for name, mean in zip(names, means, strict=True))
    assert all(torch.equal(found[name], each) for name, each in zip(made.plan.shapes[1], last, strict=True))


def test_each_run_of_a_home_is_exported_from_its_own_directory(tmp_path: Path) -> None:
    """Also the run that the home has left: its directory is a home by itself."""
    made, home = Homes(tmp_path), tmp_path / "a"
    recipe, kept = made.recipe, made.checkpoint(0, "a", made.weights(0))
    with Home.open(home) as opened:
        paths = opened.enter(recipe.digest)
        paths.keep_run_file(recipe.text)
        save(paths.checkpoint, kept)
        opened.keep_run_file(recipe.text.replace('name = "', 'name = "another-'))
        other = opened.enter("b" * 64)
    assert recipe_of([home]).digest != recipe_of([paths.path]).digest == recipe.digest
    for place in (home, paths.path):
        (found,) = of_homes([place], recipe)
        assert found.counters == kept.counters
    assert of_homes([other.path], recipe) == []


def test_weights_of_a_run_under_another_id_are_named(tmp_path: Path) -> None:
    """Another version of the program gave the same run file another id: nothing else says where that work lies."""
    made, home = Homes(tmp_path), tmp_path / "a"
    recipe = made.recipe
    with Home.open(home) as opened:
        opened.keep_run_file(recipe.text)
        paths = opened.enter("b" * 64)
        paths.keep_run_file(recipe.text)
        assert list(under_other_ids(home, recipe.digest)) == []
        tensors = made.checkpoint(0, "a", made.weights(0)).tensors
        save(paths.checkpoint, Checkpoint(counters(run_id="b" * 64, stage=0, peer="a"), tensors))
    for place in (home, paths.path):
        (line,) = under_other_ids(place, recipe.digest)
        assert line.startswith(f"{paths.path} holds weights of this run under another id")
    save(home / "runs" / recipe.digest[:32] / "checkpoint", made.checkpoint(0, "a", made.weights(0)))
    assert len(list(under_other_ids(home, recipe.digest))) == 1
    paths.run_file.write_text(recipe.text.replace('name = "', 'name = "another-'))
    assert list(under_other_ids(home, recipe.digest)) == []


def test_a_stage_is_found_in_a_snapshot_alone(tmp_path: Path) -> None:
    made = Homes(tmp_path)
    home = made.make("a", 0, made.weights(0))
    with user_error(Exit.UNREACHABLE, "no usable weights of stage 1"):
        asyncio.run(export(tmp_path / "model", homes=(home,)))
    assert not (tmp_path / "model").exists()
    save(home / "snapshots" / "1", made.checkpoint(1, "gone", made.weights(1)))
    asyncio.run(export(tmp_path / "model", homes=(home,)))
    assert read_provenance(tmp_path / "model").taken[1][0].peer == "gone"


def test_homes_of_two_runs_are_not_one_model(tmp_path: Path) -> None:
    home = Homes(tmp_path).make("a", 0, Homes(tmp_path).weights(0))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "run.toml").write_text(demo_run_text(stages=2, replicas=2, steps=101, seed=0))
    with user_error(Exit.OTHER_RUN, "another run"):
        recipe_of([home, tmp_path / "b"])
    with user_error(Exit.CONFIG, "not the home of a node"):
        recipe_of([home, tmp_path / "nowhere"])
    with pytest.raises(UserError, match="nothing to export"):
        asyncio.run(export(tmp_path / "model"))


def test_what_a_running_node_rotates_away_is_read_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Homes(tmp_path)
    home = made.make("a", 0, made.weights(0), round=1)
    filed = newest(in_home(home, made.recipe.digest), 0)
    (path,) = (home / "checkpoint").iterdir()
    path.unlink()
    with ReplicaReader(filed, made.plan.shapes[0]) as opened:
        assert opened.standing(0).round == 1
    # Written anew between a look at the directory and at its files, twice over.
    made.make("a", 0, made.weights(0), round=2)
    looks, listed = 0, replica_files.files

    def rotating(directory: Path) -> list[Path]:
        nonlocal looks
        looks, found = looks + 1, listed(directory)
        if directory.name == "checkpoint" and looks < 3:
            for path in found:
                path.unlink()
            made.make("a", 0, made.weights(0), round=2 + looks)
        return found

    monkeypatch.setattr(replica_files, "files", rotating)
    (found,) = in_home(home, made.recipe.digest)
    assert found.counters.round == 4


def test_every_file_that_is_skipped_is_named(tmp_path: Path) -> None:
    made = Homes(tmp_path)
    home = made.make("a", 0, made.weights(0), round=1)
    made.make("a", 0, made.weights(0), round=2)
    older, newer = sorted((home / "checkpoint").iterdir())
    newer.write_bytes(newer.read_bytes()[:-1])
    said: list[str] = []
    (found,) = in_home(home, made.recipe.digest, said.append)
    assert found.path == older
    assert said == [f"{newer} is skipped: its checksum is wrong: the disk has lost or changed some of it"]
    said.clear()
    newer.write_bytes(b"\1\2\3\4\5\6\7\0")
    assert [each.path for each in in_home(home, made.recipe.digest, said.append)] == [older]
    assert said == [f"{newer} is skipped: a header of {0x07060504030201} bytes is none"]
    newer.unlink()
    newer.mkdir()
    said.clear()
    assert [each.path for each in in_home(home, made.recipe.digest, said.append)] == [older]
    assert said == [f"{newer} is skipped: Is a directory"]
    newer.rmdir()
    newer.write_bytes(older.read_bytes())
    said.clear()
    assert in_home(home, "0" * 64, said.append) == []
    assert len(said) == 2
    assert "is of the run" in said[0]


# At home.


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Homes, list[Path], Path]:
    """Homes of a small run, and what was exported from them."""
    made = Homes(tmp_path_factory.mktemp("taken"))
    homes = [made.make(f"{stage}{n}", stage, moved(made.weights(stage), 0.02, n)) for stage in (0, 1) for n in (0, 1)]
    out = made.directory / "model"
    asyncio.run(export(out, homes=tuple(homes)))
    return made, homes, out


@pytest.mark.processes
def test_a_stranger_with_transformers_alone_loads_it(taken: tuple[Homes, list[Path], Path]) -> None:
    """A process that cannot see this project: nothing of it is on its path."""
    _, _, out = taken
    program = f"""
import sys
import torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained({str(out)!r}, local_files_only=True)
tokenizer = transformers.AutoTokenizer.from_pretrained({str(out)!r}, local_files_only=True)
ids = tokenizer("import os", return_tensors="pt", add_special_tokens=False).input_ids
with torch.no_grad():
    assert model(ids).logits.shape == (1, 9, 384)
made = model.generate(ids, max_new_tokens=4, do_sample=False)
assert made.shape[1] <= 13
ours = {{"noloco_node", "gossip", "pipeline", "hivemind"}} & {{name.split(".")[0] for name in sys.modules}}
try:
    import noloco_node
except ImportError:
    seen = False
else:
    seen = True
sys.exit(f"saw {{ours}}" if ours or seen else 0)
"""
    packages = {str(Path(module.__file__ or "").parent.parent) for module in (torch, msgspec)}
    environment = {"PYTHONPATH": os.pathsep.join(sorted(packages)), "OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"]}
    # -S: no site packages, so that an editable install of this project is not seen.
    done = subprocess.run(
        [sys.executable, "-S", "-P", "-c", program],
        capture_output=True,
        text=True,
        env=environment,
        cwd=out,
        timeout=LAST_RESORT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_run_that_goes_on_from_an_export_begins_with_exactly_that_model(
    taken: tuple[Homes, list[Path], Path], tmp_path: Path
) -> None:
    """Export, `init --from`, the first weights of the run that this makes, export: the same bits."""
    made, _, out = taken
    text = continuing_text(out, "tiny")
    assert str(out) not in text
    again = Homes(tmp_path, text)
    run_ = again.recipe.run
    assert (run_.pipeline.stages, run_.pipeline.sequence_length) == (2, 128)
    before = made.recipe.run.data
    assert (run_.data.source, run_.data.path, run_.data.field) == (before.source, before.path, before.field)
    assert run_.data.evaluate_every_rounds == before.evaluate_every_rounds == 3
    first = RunWeights(again.plan.prepared, again.plan.shapes, WeightStore.whole(out, run_.model.weights))
    parts = [make_stage(run_, again.plan, stage, torch.device("cpu")) for stage in (0, 1)]
    for number, part in enumerate(parts):
        first.put(number, part)
    homes = [again.make(f"again-{number}", number, part.weights()) for number, part in enumerate(parts)]
    asyncio.run(export(tmp_path / "again", homes=tuple(homes)))
    assert same(exported(out), exported(tmp_path / "again"))


def test_every_preset_can_go_on_from_a_checkpoint_of_any_depth(tmp_path: Path) -> None:
    write_model(tmp_path, sizes={**LLAMA, "num_hidden_layers": 3})
    for preset in PRESETS:
        plan = decode_run(continuing_text(tmp_path, preset), "the test's run file")
        assert plan.pipeline.stages <= 3
        assert plan.batch <= min(128, decode_run(run_text(preset), "a preset").batch), "less than for a long run"
        assert plan.pipeline.sequence_length == 64
        assert plan.data.tokenizer == "files"
        assert (plan.data.source, plan.data.path) == ("text", "your-text/"), "nobody's text is picked silently"
        assert {each.file for each in plan.data.tokenizer_files} >= {"config.json", "tokenizer_config.json"}
        assert plan.inner.learning_rate < decode_run(run_text(preset), "a preset").inner.learning_rate
        assert len(plan.model.weights) == len(list(tmp_path.glob("*.safetensors"))) > 1


@pytest.mark.parametrize("family", CONTINUED)
def test_a_run_that_goes_on_has_the_model_of_the_checkpoint(tmp_path: Path, family: str) -> None:
    model = write_model(tmp_path, family, CONTINUED[family])
    layout = model_layout(decode_run(continuing_text(tmp_path, "tiny"), "the test's run file"))
    given, found = prepare(model.config).config.to_dict(), layout.prepared.config.to_dict()
    told = {"architectures", "transformers_version", "_name_or_path"}
    assert {name: value for name, value in found.items() if value != given.get(name)}.keys() <= told


def resize(directory: Path, **fields: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | fields))


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda at: (at / "config.json").unlink(), "no config.json"),
        (lambda at: (at / "config.json").write_text("[]"), "none that transformers knows"),
        (lambda at: (at / "config.json").write_text('{"model_type": "nosuch"}'), "none that transformers knows"),
        (
            lambda at: resize(at, model_type="qwen2", num_hidden_layers=2**20),
            "num_hidden_layers = 1048576: it is outside",
        ),
        (lambda at: resize(at, text_config={"vocab_size": 2**40}), "vocab_size = 1099511627776: it is outside"),
        (lambda at: resize(at, num_hidden_layers=0), "the model has 0 layers"),
        (lambda at: [path.unlink() for path in at.glob("*.safetensors*")], "it has no safetensors file"),
        (lambda at: (at / "model.safetensors.index.json").write_text("{}"), "no table weight_map"),
        (
            lambda at: (at / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b/c.safetensors"}}'),
            "b/c.safetensors is no file beside it",
        ),
        (lambda at: sorted(at.glob("*.safetensors"))[0].write_bytes(b"torn" * 30), "deserializing header"),
        (lambda at: (at / "tokenizer_config.json").unlink(), "its tokenizer cannot be used"),
        (lambda at: [path.unlink() for path in at.glob("*token*")], "it has no tokenizer"),
    ],
)
def test_what_is_no_checkpoint_is_refused_before_a_run_file_is_written(
    tmp_path: Path, spoil: Callable[[Path], object], why: str
) -> None:
    write_model(tmp_path)
    spoil(tmp_path)
    with user_error(Exit.CONFIG) as caught:
        continuing_text(tmp_path, "tiny")
    assert why in caught.value.why


def test_evaluation_of_homes_is_that_of_the_export_and_of_each_replica(
    taken: tuple[Homes, list[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, homes, out = taken
    told: list[str] = []
    monkeypatch.setattr(evaluation, "say", told.append)
    asked = partial(evaluate, data=text_in(tmp_path), batches=1)
    rows = json.loads(asked(homes=homes, as_json=True))["models"]
    names = ["merged", *[f"stage {stage}, {stage}{n}, round 40" for stage in (0, 1) for n in (0, 1)]]
    assert [row["model"] for row in rows] == names
    plain = json.loads(asked((out,), as_json=True))
    assert plain["loss"] == pytest.approx(rows[0]["loss"], rel=1e-6)
    # The merged model is back in its place after each: stage 1's replicas were measured with the mean of stage 0.
    mixed = merge_files(of_homes(homes, made.recipe), made.recipe, made.plan)
    alone = [each for each in homes if each.name in ("00", "10", "11")]
    assert len({row["loss"] for row in rows}) == 5
    assert mixed[0].taken[0].round == 40
    single = json.loads(asked(homes=alone, as_json=True))["models"]
    assert single[0]["loss"] == pytest.approx(rows[1]["loss"], rel=1e-6), "stage 0 has one replica: that is its mean"
    assert (
        json.loads(asked(homes=[*homes, shutil.copytree(homes[0], tmp_path / "copy")], as_json=True))["models"] == rows
    )
    assert [line.partition(", each")[0] for line in told if line.startswith("evaluating")] == [
        "evaluating the merged model and 4 replicas",
        *[line.partition(", each")[0] for line in told if str(out) in line],
        "evaluating the merged model and 3 replicas",
        "evaluating the merged model and 4 replicas",
    ]
    said = asked((out, out))
    assert said.count(f"{out}: loss ") == 2


def test_a_run_with_a_subspace_is_judged_evaluated_and_taken_home_as_an_ordinary_model(tmp_path: Path) -> None:
    made = Homes(tmp_path, TEXT.replace("[pipeline]\n", "[pipeline]\nsubspace = 16\n"))
    assert made.plan.shapes[0]["model.embed_tokens.weight"][1] == made.plan.width == 16
    homes = [made.make(f"{stage}{n}", stage, moved(made.weights(stage), 0.02, n)) for stage in (0, 1) for n in (0, 1)]
    asyncio.run(export(tmp_path / "model", homes=tuple(homes)))
    found = exported(tmp_path / "model")
    whole = made.plan.prepared.config.hidden_size
    assert found["model.layers.0.mlp.down_proj.weight"].shape[0] == whole
    assert not found["model.layers.0.mlp.down_proj.weight"][16:].any()
    assert found["model.embed_tokens.weight"][:, 16:].abs().unique().tolist() == [1.0]
    asked = partial(evaluate, data=text_in(tmp_path), batches=1, as_json=True)
    rows = json.loads(asked(homes=homes))["models"]
    assert json.loads(asked((tmp_path / "model",)))["loss"] == pytest.approx(rows[0]["loss"], rel=1e-6)
    assert len({row["loss"] for row in rows}) == 5


def test_evaluation_wants_one_kind_of_model(tmp_path: Path) -> None:
    for directories, homes in (((), ()), ((tmp_path,), (tmp_path,))):
        with user_error(Exit.USAGE):
            evaluate(directories, homes)


def test_a_checkpoint_of_anybody_is_evaluated_on_a_text_that_is_named(
    taken: tuple[Homes, list[Path], Path], tmp_path: Path
) -> None:
    _, _, out = taken
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    for path in out.iterdir():
        if path.name != "noloco.json":
            (stranger / path.name).write_bytes(path.read_bytes())
    asked = partial(evaluate, data=text_in(tmp_path), batches=1, as_json=True)
    ours, theirs = json.loads(asked((out,))), json.loads(asked((stranger,)))
    assert theirs["loss"] == pytest.approx(ours["loss"], rel=1e-6)
    with pytest.raises(UserError, match="no checkpoint of a swarm"):
        asked((stranger,), data=None)
    # Bytes that are no text are marked by one, and passed over by the tokenizer of the other.
    one, other = (
        "".join(generate(model_in(each), "to be", Sampling(40))).replace("\ufffd", "") for each in (out, stranger)
    )
    assert one == other
    assert one


def test_the_command_line_does_all_of_it(taken: tuple[Homes, list[Path], Path], tmp_path: Path) -> None:
    _, homes, out = taken
    from_homes = [word for home in homes for word in ("--from-home", str(home))]
    assert "stage 1: 2, round 40" in printed("export", *from_homes, "--out", tmp_path / "model")
    assert same(exported(out), exported(tmp_path / "model"))
    on = ("--data", text_in(tmp_path), "--batches", "1")
    assert printed("evaluate", tmp_path / "model", *on).startswith("loss ")
    prompt = "to be"
    greedy = ("--prompt", prompt, "--max-tokens", "3", "--temperature", "0")
    said = printed("generate", tmp_path / "model", *greedy)
    assert said == printed("generate", tmp_path / "model", *greedy, "--seed", "5")
    assert said.startswith(prompt)
    printed("init", tmp_path / "run.toml", "--from", tmp_path / "model")
    assert "[[model.weights]]" in (tmp_path / "run.toml").read_text()


def test_an_export_takes_the_invite_that_a_home_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = list[str | None]()

    async def export(out: Path, invite: str | None, *_: object, **__: object) -> str:
        given.append(invite)
        return "done"

    monkeypatch.setattr(exporter, "export", export)
    kept, another = (
        f"{SCHEME}{digit * 64}@/ip4/127.0.0.1/tcp/1/p2p/12D3KooWALMXjWCsCWroGW8A7t1aSjkS2AUzg1EYu8M4CtecrnPu"
        for digit in "ab"
    )
    (tmp_path / "invite").write_text(f"{kept}\n")
    for words in ([str(tmp_path)], [another]):
        printed("export", *words, "--out", tmp_path / "model")
    assert given == [kept, another]


def test_a_model_that_is_not_there_is_said_before_anything_is_printed(tmp_path: Path) -> None:
    for words in (["generate", str(tmp_path / "none"), "--prompt", "import"], ["evaluate", str(tmp_path / "none")]):
        done = CliRunner().invoke(app, words)
        assert isinstance(done.exception, UserError)
        assert (done.exception.code, done.exception.why) == (Exit.CONFIG, "nothing has this name")
        assert done.stdout == ""


def test_evaluate_says_where_text_may_be_named_and_how_little_few_documents_say(
    taken: tuple[Homes, list[Path], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, _, out = taken
    elsewhere = msgspec.structs.replace(made.recipe.run.data, source="text", path=str(tmp_path / "not here"))
    with pytest.raises(UserError, match="There is no data at") as caught:
        _text(elsewhere, 64, 0, 1, named=False)
    assert "or --data with the place of that text on this machine" in caught.value.hint
    with pytest.raises(UserError) as caught:
        evaluate((out,), data=str(tmp_path / "not here"), batches=1)
    assert "on this machine" not in caught.value.hint
    capsys.readouterr()
    evaluate((out,), data=text_in(tmp_path), batches=1)
    assert "comes from 1 document only" in capsys.readouterr().err
