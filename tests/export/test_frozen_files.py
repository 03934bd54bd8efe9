"""The files that `init --lora` makes of a model: what a stage takes of them, and what is refused."""

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import LLAMA, write_model
from command_line import printed, refused
from safetensors.torch import load_file, save_file
from user_errors import user_error

from noloco_node.errors import Exit, UserError
from noloco_node.planning.checkpoint_map import RunWeights
from noloco_node.planning.model_layout import frozen_whole, make_stage, model_layout
from noloco_node.planning.plan_text import report
from noloco_node.run.config import RunConfig
from noloco_node.run.runfile import load_run
from noloco_node.storage.atomic_file import locked_aside
from noloco_node.storage.weight_store import WeightFile, WeightStore
from noloco_node.units import format_bytes

WIDE = LLAMA | {"hidden_size": 64, "intermediate_size": 192}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 384, "n_positions": 64}
BITS = {"bfloat16": 16, "int8": 8, "nf4": 4.25}


def init(directory: Path, base: str, *more: object) -> Path:
    path = directory / "run.toml"
    printed("init", "--from", directory / "model", "--lora", 2, "--base", base, *more, path)
    return path


def in_stages(path: Path, count: int) -> RunConfig:
    path.write_text(path.read_text().replace("\nstages = 1\n", f"\nstages = {count}\n"))
    return load_run(path)


def fetched(directory: Path, files: tuple[WeightFile, ...], run: RunConfig, stage: int, place: Path) -> RunWeights:
    """Return the weights of a machine that has fetched what one stage needs of the files in a directory."""
    layout = model_layout(run)
    owner, store = WeightStore.whole(directory, files), WeightStore.filling(place, files)
    weights = RunWeights(layout.prepared, layout.checkpoint, store, frozen=True)
    for number in range(len(files)):
        store.learn(number, owner.digests(number) or b"")
    for keys in (store.first_pieces, store.header_pieces, lambda: weights.pieces(stage)):
        for key in store.missing(keys()):
            store.write(key, owner.read(key) or b"")
    return weights


@pytest.mark.parametrize(
    ("family", "sizes", "base"),
    [
        ("llama", WIDE, "bfloat16"),
        ("llama", WIDE | {"tie_word_embeddings": True}, "nf4"),
        ("gpt2", GPT2, "int8"),
        ("gemma2", WIDE | {"head_dim": 32, "num_key_value_heads": 2}, "nf4"),
    ],
)
def test_a_stage_takes_the_frozen_files_as_it_takes_the_checkpoint(
    tmp_path: Path, family: str, sizes: dict[str, Any], base: str
) -> None:
    model = write_model(tmp_path / "model", family, sizes)
    run = in_stages(init(tmp_path, base), 2)
    layers = sum(each.numel() for name, each in model.named_parameters() if each.ndim == 2 and ".layers." in name)
    frozen_bytes, own_bytes = (
        sum(each.size_bytes for each in files) for files in (run.model.fetched, run.model.weights)
    )
    assert frozen_bytes < own_bytes - (4 - BITS[base] / 8) * layers + 20_000, "with headers"
    layout, ids = model_layout(run), torch.arange(16).view(2, 8)
    hidden = [ids, ids]
    for number in (0, 1):
        stages = [make_stage(run, layout, number, torch.device("cpu")) for _ in range(2)]
        places = ((tmp_path / "run-frozen", run.model.fetched), (tmp_path / "model", run.model.weights))
        for stage, (directory, files) in zip(stages, places, strict=True):
            fetched(directory, files, run, number, tmp_path / f"{directory.name}-{number}").put(number, stage)
        if number == 0:
            hidden = [stage.forward(each).output for stage, each in zip(stages, hidden, strict=True)]
            assert torch.equal(*hidden)
        else:
            found, expected = (stage.loss(each, ids).loss for stage, each in zip(stages, hidden, strict=True))
            assert found == expected


def test_files_that_are_no_smaller_are_not_written(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", shard_size="1GB")
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    for base in ("bfloat16", "float32"):
        path = init(tmp_path, base, "--force")
        assert not load_run(path).model.frozen_files
    assert not (tmp_path / "run-frozen").exists()


def test_a_directory_that_is_there_stays_unless_forced(tmp_path: Path) -> None:
    write_model(tmp_path / "model", sizes=WIDE)
    (tmp_path / "run-frozen").mkdir()
    with pytest.raises(UserError, match="is there already"):
        init(tmp_path, "nf4")
    assert not (tmp_path / "run.toml").exists()
    before = load_run(init(tmp_path, "nf4", "--force")).model
    path = init(tmp_path, "nf4", "--force")
    assert before == load_run(path).model, "all machines make the same codes"
    said = " ".join(report(load_run(path)).split())
    assert f"fetches the model that the run starts from, {format_bytes(before.fetched[0].size_bytes)}, once." in said


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.other", "up_proj.weight is missing"),
        ("model.layers.0.mlp.up_proj.scales", "model.norm.scales", "model.norm.scales is no frozen weight"),
    ],
)
def test_files_whose_tensors_have_strange_names_are_refused(tmp_path: Path, before: str, after: str, why: str) -> None:
    write_model(tmp_path / "model", sizes=WIDE)
    run = load_run(init(tmp_path, "nf4"))
    (path,) = (tmp_path / "run-frozen").glob("frozen-*")
    save_file({after if name == before else name: each for name, each in load_file(path).items()}, path)
    layout = model_layout(run)
    with user_error(Exit.CONFIG) as caught:
        frozen_whole(layout, [path], "nf4")
    assert why in caught.value.why


@pytest.mark.parametrize("base", ["int8", "nf4"])
def test_no_run_goes_on_from_codes(tmp_path: Path, base: str) -> None:
    write_model(tmp_path / "model", sizes=WIDE)
    init(tmp_path, base)
    (tmp_path / "run-frozen").rename(tmp_path / "again")
    assert "q_proj.weight holds integers" in refused("init", "--from", tmp_path / "again", tmp_path / "again.toml").why
    assert not (tmp_path / "again.toml").exists()


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "model", sizes=WIDE)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "none is left")

    monkeypatch.setattr("noloco_node.storage.atomic_file.require_room", full)
    with user_error(Exit.STORAGE, "cannot be written"):
        init(tmp_path, "nf4")
    assert [each.name for each in tmp_path.iterdir()] == ["model"]


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path) -> None:
    write_model(tmp_path / "model", sizes=WIDE)
    (left := tmp_path / ".run-frozen.aside").mkdir()
    (left / "frozen-nf4-00001.safetensors").write_bytes(b"half of a file")
    (left / "frozen-nf4-00002.safetensors").write_bytes(b"of a larger model")
    path = init(tmp_path, "nf4")
    assert {each.name for each in tmp_path.iterdir()} == {"model", "run-frozen", "run.toml"}
    listed = {each.file for each in load_run(path).model.frozen_files}
    assert {each.name for each in (tmp_path / "run-frozen").glob("*.safetensors")} == listed


def test_the_files_of_a_process_that_was_killed_before_the_run_file_serve_the_next(tmp_path: Path) -> None:
    write_model(tmp_path / "model", sizes=WIDE)
    path = init(tmp_path, "nf4")
    before = path.read_text()
    path.unlink()
    assert init(tmp_path, "nf4").read_text() == before
    path.unlink()
    frozen = next((tmp_path / "run-frozen").glob("frozen-*"))
    frozen.write_bytes(frozen.read_bytes()[:-1] + b"x")
    changed = {each.name: each.read_bytes() for each in (tmp_path / "run-frozen").iterdir()}
    with pytest.raises(UserError, match="is there already"):
        init(tmp_path, "nf4")
    assert {each.name: each.read_bytes() for each in (tmp_path / "run-frozen").iterdir()} == changed
    assert {each.name for each in tmp_path.iterdir()} == {"model", "run-frozen"}


def test_one_process_at_a_time_writes_the_files(tmp_path: Path) -> None:
    write_model(tmp_path / "model", sizes=WIDE)
    with locked_aside(tmp_path / "run-frozen") as aside:
        (aside / "half").write_bytes(b"of a file")
        with pytest.raises(UserError, match="Another process is writing"):
            init(tmp_path, "nf4")
        assert (aside / "half").read_bytes() == b"of a file"
    assert {each.name for each in tmp_path.iterdir()} == {"model"}
    init(tmp_path, "nf4")


def test_files_of_another_form_than_the_runs_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "model", sizes=WIDE)
    path = init(tmp_path, "nf4")
    frozen = next((tmp_path / "run-frozen").glob("frozen-*"))
    renamed = frozen.rename(frozen.with_name(frozen.name.replace("nf4", "int8")))
    text = path.read_text().replace('\nbase = "nf4"\n', '\nbase = "int8"\n').replace(frozen.name, renamed.name)
    path.write_text(text)
    run = load_run(path)
    weights = fetched(tmp_path / "run-frozen", run.model.fetched, run, 0, tmp_path / "here")
    with user_error(Exit.CONFIG, r"weight is uint8 .*, not int8"):
        weights.put(0, make_stage(run, model_layout(run), 0, torch.device("cpu")))
