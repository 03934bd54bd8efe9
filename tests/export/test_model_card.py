"""The model card: what the hub reads of it is well-formed, whatever authors and peers wrote, and it stays short."""

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from noloco_node.export.model_card import MOST_ROWS, Library, held_out_curve, model_card
from noloco_node.export.sources import Provenance, evaluations_of
from noloco_node.journal import events
from noloco_node.journal.writer import Journal
from noloco_node.run.peer_state import Evaluation
from noloco_node.state_sync.replica_mean import LeftOut, ReplicaSummary
from noloco_node.storage.home import HomePaths

RUN = '[model]\narchitecture = "llama"\nsizes = { vocab_size = 384, hidden_size = 32 }\n'


def evaluation(number: int, loss: float = 2.0) -> Evaluation:
    return Evaluation(number=number, round=4 * number, loss=loss, margin=0.1, tokens=64, documents=2)


def notes(name: str = "tiny", replicas: int = 1, evaluations: int = 0, text: str = "") -> Provenance:
    taken = tuple(
        ReplicaSummary(peer=f"peer{each}", round=3, inner_steps=12, progress=0.5, norm=1.0) for each in range(replicas)
    )
    return Provenance(
        run_id="ab" * 32,
        rounds=(3,),
        replicas=(replicas,),
        untied=False,
        run_file=f"name = {json.dumps(name)}\n{RUN}{text}",
        taken=(taken,),
        left_out=((LeftOut(peer="odd", why="its weights are not finite"),),),
        evaluations=tuple(map(evaluation, range(1, evaluations + 1))),
    )


@given(st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9 ._-]{0,60}[A-Za-z0-9])?", fullmatch=True))
def test_no_name_of_a_run_breaks_the_head_or_a_table(name: str) -> None:
    card = model_card(notes(name), Library.TRANSFORMERS)
    _, head, body = card.split("---\n", 2)
    assert yaml.safe_load(head)["tags"] == ["noloco", "decentralized-training"]
    assert "<" not in body.split("## Run file")[0]
    assert "| 0 | peer0 | 3 | 12 | 50.0% |" in body


@pytest.mark.parametrize(
    ("library", "loads"), [("transformers", "AutoModel"), ("peft", "Peft"), ("torch", "load_file")]
)
def test_it_says_how_to_load_the_files(library: Library, loads: str) -> None:
    card = model_card(notes(), Library(library))
    assert f"library_name: {library}" in card
    assert loads in card.split("## Load it")[1].split("##")[0]


def test_a_model_and_data_of_the_hub_are_named_for_it() -> None:
    text = f'[data]\nsource = "hub"\npath = "some/text"\ncommit = "{"0" * 40}"\n'
    assert "datasets:\n- some/text\n" in model_card(notes(text=text), Library.TRANSFORMERS)


@pytest.mark.parametrize("count", [0, 1, 2, MOST_ROWS, MOST_ROWS + 1, 1000])
def test_many_evaluations_are_thinned_out_and_the_last_one_stays(count: int) -> None:
    card = model_card(notes(evaluations=count), Library.TRANSFORMERS)
    rows = [line for line in card.splitlines() if line.endswith("| 64 |")]
    assert len(rows) <= MOST_ROWS
    assert rows[-1:] == ([f"| {4 * count} | 2.0000 | 0.1000 | 64 |"] if count else [])
    assert (held_out_curve(notes(evaluations=min(count, 9)).evaluations) is not None) == (count > 1)
    assert ("](held-out-loss.png)" in card) == (count > 1)


def test_many_replicas_are_counted() -> None:
    assert "lists 76 more" in model_card(notes(replicas=MOST_ROWS + 76), Library.TRANSFORMERS)


def test_the_run_file_ends_no_block_early() -> None:
    card = model_card(notes(text="# ```\n# ````\n"), Library.TRANSFORMERS)
    assert card.count("`````") == 2


def test_evaluations_are_those_of_the_run_and_a_home_counts_before_what_others_told(tmp_path: Path) -> None:
    began = events.Started(peer="p", stage=0, run="r", version="1")
    done = events.Evaluated(number=2, round=8, step=9, progress=0.1, loss=1.0, margin=0.1, tokens=64, documents=2)
    with Journal(tmp_path / "journal.jsonl") as journal:
        for event in (done, began, done, events.Started(peer="p", stage=0, run="other", version="1"), done):
            journal.write(event)
    for place in (tmp_path, HomePaths(tmp_path).run("r").path):  # export --from-home takes the directory of a run too
        found = evaluations_of([place], "r", [evaluation(3), evaluation(2)])
        assert [(each.number, each.loss) for each in found] == [(2, 1.0), (3, 2.0)]
    assert evaluations_of([tmp_path], "none") == ()
