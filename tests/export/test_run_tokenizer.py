"""A checkpoint's own tokenizer travels: into homes, to who exports, and beside the model that is written."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import LLAMA, write_model, write_tokenizer
from safetensors.torch import load_file, save_file
from toy_gossip import at_once
from user_errors import user_error

from noloco_node.data.encoding import open_encoder, open_tokenizer
from noloco_node.errors import Exit, UserError
from noloco_node.export.continue_run import continuing_text
from noloco_node.export.replica_fetch import fetched_tokenizer, reading_with_tokenizer
from noloco_node.planning.plan import plan
from noloco_node.run.config import DataConfig
from noloco_node.sim.network.sim_network import SimNetwork
from noloco_node.state_sync.weight_exchange import SCHEMA, TOKENIZER_TOPIC, WeightServer
from noloco_node.storage.home import HomePaths
from noloco_node.storage.weight_store import WeightStore
from noloco_node.swarm.invite import SCHEME
from noloco_node.swarm.roster import Roster
from noloco_node.swarm.run_distribution import RunFileText
from pipeline.model_config import longest_sequence

OWNER = "12D3KooWALMXjWCsCWroGW8A7t1aSjkS2AUzg1EYu8M4CtecrnPu"
NOBODY = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
INDEX = "model.safetensors.index.json"
SENTENCE = "the swarm trains on words of its own, <|end|> and on others"


@pytest.fixture(name="checkpoint")
def _checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "checkpoint"
    write_model(directory)
    write_tokenizer(directory, ["the swarm trains on words of its own"] * 3)
    return directory


async def nobody_seen() -> Roster:
    return Roster(stages=((), ()))


def recipe_of(checkpoint: Path) -> RunFileText:
    return RunFileText(continuing_text(checkpoint, "tiny"), "the test's run file")


@pytest.mark.real_time
async def test_it_comes_from_a_peer_and_reads_as_it_did_there(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "tokenization_own.py").write_text("raise SystemExit('code of a stranger')")
    recipe = recipe_of(checkpoint)
    files = recipe.run.data.tokenizer_files
    settings = {"config.json", "generation_config.json", "tokenizer_config.json"}
    assert {each.file for each in files} == {*settings, "tokenizer.json"}
    assert plan(recipe.run).run_id, "what is not here yet keeps nobody from asking what a run means"
    there, back = DataConfig(tokenizer=str(checkpoint)), tmp_path / "another machine"
    hub = SimNetwork()
    server = WeightServer(WeightStore.whole(checkpoint, files), at_once)
    await hub.network(OWNER).serve(TOKENIZER_TOPIC, SCHEMA, server.serve)
    visitor, owners = hub.network("visitor"), f"{SCHEME}{recipe.digest}@/ip4/192.0.2.1/tcp/4001/p2p/{OWNER}"
    stranger = owners.replace(OWNER, NOBODY)
    with user_error(Exit.UNREACHABLE, "Nobody who was reached"):
        await fetched_tokenizer(visitor, recipe, nobody_seen, stranger, back)
    data = await fetched_tokenizer(visitor, recipe, nobody_seen, owners, back)
    here, theirs = open_encoder(data), open_encoder(there)
    assert here.encode(SENTENCE).tolist() == theirs.encode(SENTENCE).tolist()
    assert here.end == theirs.end == 0
    assert str(back) not in here.name, "a home that moves to another disk goes on in its text"


@pytest.mark.real_time
async def test_files_that_the_export_of_another_run_left_there_are_not_read(checkpoint: Path, tmp_path: Path) -> None:
    other, back = tmp_path / "other", tmp_path / "left"
    write_model(other)
    write_tokenizer(other, ["words"])
    (other / "chat_template.jinja").write_text("{{ messages }}")
    templates = []
    for directory in (other, checkpoint):
        recipe, hub = recipe_of(directory), SimNetwork()
        server = WeightServer(WeightStore.whole(directory, recipe.run.data.tokenizer_files), at_once)
        await hub.network(OWNER).serve(TOKENIZER_TOPIC, SCHEMA, server.serve)
        invite = f"{SCHEME}{recipe.digest}@/ip4/192.0.2.1/tcp/4001/p2p/{OWNER}"
        data = await fetched_tokenizer(hub.network("visitor"), recipe, nobody_seen, invite, back)
        templates.append(open_tokenizer(data).chat_template)
    assert templates == ["{{ messages }}", None]


def test_a_home_keeps_it_for_an_export(checkpoint: Path, tmp_path: Path) -> None:
    recipe = recipe_of(checkpoint)
    homes = [tmp_path / "one", tmp_path / "two"]
    with user_error(Exit.CONFIG, "None of these homes"):
        reading_with_tokenizer(homes, recipe)
    kept = WeightStore.filling(HomePaths(homes[1]).run(recipe.digest).tokenizer, recipe.run.data.tokenizer_files)
    WeightStore.whole(checkpoint, kept.files).copy_to(kept)
    assert open_tokenizer(reading_with_tokenizer(homes, recipe)).eos_token == "<|end|>"
    (kept.directory / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="None of these homes"):
        reading_with_tokenizer(homes, recipe)


def test_what_a_stranger_calls_a_tokenizer_ends_in_a_sentence(checkpoint: Path) -> None:
    for content in ('{"model": 3}', "[]", "not JSON"):
        (checkpoint / "tokenizer.json").write_text(content)
        with user_error(Exit.CONFIG):
            open_tokenizer(DataConfig(tokenizer=str(checkpoint)))


def test_a_model_without_the_files_of_its_tokenizer_is_said_to_have_none(checkpoint: Path) -> None:
    """The library makes a tokenizer of the model's config that turns every text into nothing."""
    for path in checkpoint.glob("*token*"):
        path.unlink()
    with pytest.raises(UserError, match="cannot be loaded") as caught:
        open_tokenizer(DataConfig(tokenizer=str(checkpoint)))
    assert "tokenizer.json" in caught.value.hint


@pytest.mark.parametrize(
    ("size", "end", "why"),
    [
        (200, "<|end|>", "cannot be used: the ids of .* go up to 2.., "),
        (384, None, "cannot be used: documents are joined"),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_refused_by_init(tmp_path: Path, size: int, end: str | None, why: str) -> None:
    directory = tmp_path / "checkpoint"
    write_model(directory, sizes={**LLAMA, "vocab_size": size})
    write_tokenizer(directory, ["words"])
    if end is None:
        tokenizer = open_tokenizer(DataConfig(tokenizer=str(directory)))
        tokenizer.eos_token = None
        tokenizer.save_pretrained(directory)
    with pytest.raises(UserError, match="no model to go on from") as caught:
        continuing_text(directory, "tiny")
    assert re.search(why, caught.value.why)


@pytest.mark.parametrize("rope", ['{"rope_theta": 10000.0, "odd": [null]}', "[" * 10**5])
def test_a_config_that_no_run_file_can_hold_is_refused_by_init(tmp_path: Path, rope: str) -> None:
    write_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_bytes()) | {"rope_parameters": "rope"}
    (tmp_path / "config.json").write_text(json.dumps(config).replace('"rope"', rope))
    with pytest.raises(UserError, match="no model to go on from"):
        continuing_text(tmp_path, "tiny")


@pytest.mark.parametrize(
    ("index", "why"),
    [
        ({"weight_map": {"a": "none.safetensors"}}, "none.safetensors is not there"),
        ({"weight_map": {"a": "empty.safetensors"}}, "empty.safetensors is empty"),
        ({"weight_map": {"a": "directory.safetensors"}}, "or is no file"),
        ({"weight_map": {"a": "../model.safetensors"}}, "is no file beside it"),
        *(({"weight_map": odd}, "no table weight_map") for odd in (3, [], [[]], None, {"a": 3}, {"a": []})),
        *((odd, "no table weight_map") for odd in (3, [], None, {})),
    ],
)
def test_shards_that_are_not_all_there_are_named(tmp_path: Path, index: Any, why: str) -> None:
    write_model(tmp_path)
    (tmp_path / "empty.safetensors").touch()
    (tmp_path / "directory.safetensors").mkdir()
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match="no model to go on from") as caught:
        continuing_text(tmp_path, "tiny")
    assert why in caught.value.why


def test_what_a_run_leaves_out_of_a_checkpoint_is_said(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = checkpoint / json.loads((checkpoint / INDEX).read_bytes())["weight_map"]["lm_head.weight"]
    save_file(load_file(path) | {f"model.layers.9.{name}": torch.ones(1) for name in "abcd"}, path)
    continuing_text(checkpoint, "tiny")
    said = capsys.readouterr().err
    assert "no place for model.layers.9.a, model.layers.9.b and 2 more: left out" in said


@pytest.mark.parametrize("positions", ["x", [None], math.inf, math.nan, -1, None, 0])
def test_a_length_that_is_none_is_no_bound(positions: Any) -> None:
    assert longest_sequence({"max_position_embeddings": positions}) is None
    assert longest_sequence({"max_position_embeddings": positions, "n_positions": 64}) == 64
