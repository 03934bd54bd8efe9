"""The model card of an export, README.md: what a person, or a hub of models, reads of a checkpoint first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum

from huggingface_hub import ModelCardData

from noloco_node import __version__
from noloco_node.charts import COLOURS, QUIET, dress, new_figure, png
from noloco_node.export.sources import Provenance
from noloco_node.observe.swarm_view import plain
from noloco_node.run.config import RunConfig
from noloco_node.run.peer_state import Evaluation
from noloco_node.run.runfile import decode_run

CARD, CURVE = "README.md", "held-out-loss.png"
MOST_ROWS = 24  # of a table: more evaluations are thinned out, further replicas counted


class Library(StrEnum):
    """What loads the files of an export."""

    TRANSFORMERS = "transformers"
    PEFT = "peft"
    TORCH = "torch"


_LOADING = {
    Library.TRANSFORMERS: """from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("DIR")
tokenizer = AutoTokenizer.from_pretrained("DIR")""",
    Library.PEFT: """from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained("BASE")
model = PeftModel.from_pretrained(base, "DIR")""",
    Library.TORCH: """from safetensors.torch import load_file

module.load_state_dict(load_file("DIR/model.safetensors"), strict=False)""",
}


def model_card(notes: Provenance, library: Library) -> str:
    """Return a card in Markdown, with the head that the Hugging Face hub reads. DIR in it is the export's directory."""
    run = decode_run(notes.run_file, CARD)
    head = ModelCardData(
        library_name=str(library),
        base_model=run.model.hub,
        datasets=[each.path for each in run.data.sources if each.source == "hub" and each.path] or None,
        pipeline_tag=None if run.model.is_foreign else "text-generation",
        tags=["noloco", "decentralized-training"],
    )
    parts = [
        f"---\n{head.to_yaml()}\n---",
        f"# {_cell(run.name)}",
        _origin(run, notes),
        f"## Load it\n\n```python\n{_LOADING[library]}\n```",
        *_held_out(notes.evaluations),
        _replicas(notes),
        f"## Run file\n\n{_fenced(notes.run_file)}",
    ]
    return "\n\n".join(parts) + "\n"


def held_out_curve(evaluations: Sequence[Evaluation]) -> bytes | None:
    """Return the losses of evaluations over their rounds as a PNG; None for fewer than two."""
    if len(evaluations) < 2:
        return None
    figure = new_figure(7, 3.5)
    panel = figure.subplots()
    figure.subplots_adjust(left=0.12, right=0.97, top=0.95, bottom=0.15)
    rounds, losses = [each.round for each in evaluations], [each.loss for each in evaluations]
    panel.errorbar(
        rounds, losses, [each.margin or 0.0 for each in evaluations], color=COLOURS[0], marker="o", markersize=3
    )
    dress(panel)
    panel.set_xlabel("round", color=QUIET)
    panel.set_ylabel("held-out loss, nats a token", color=QUIET)
    return png(figure)


def _origin(run: RunConfig, notes: Provenance) -> str:
    lines = [
        "A swarm of noloco_node peers trained this model without a coordinator. Each peer trained one stage of it, and "
        "once a round averaged its weights with one random peer of its stage ([NoLoCo]).",
        "",
        *(f"- {_cell(line)}" for line in run.summary()),
        f"- run {notes.run_id}, exported with noloco_node {__version__}",
        "",
        "[NoLoCo]: https://arxiv.org/abs/2506.10911",
    ]
    return "\n".join(lines)


def _held_out(evaluations: Sequence[Evaluation]) -> Iterator[str]:
    if not evaluations:
        return
    yield (
        "## Held-out loss\n\nPeers evaluated, one of them at a time: in a run of one stage their own replicas, in"
        " others chains of replicas of all stages. In nats a token."
    )
    if len(evaluations) > 1:
        yield f"![The held-out loss over the rounds]({CURVE})"
    step = -(-len(evaluations) // MOST_ROWS)
    shown = evaluations[::-1][::step][::-1]  # the last one is among them
    rows = (
        (each.round, f"{each.loss:.4f}", "" if each.margin is None else f"{each.margin:.4f}", each.tokens)
        for each in shown
    )
    yield _table(("round", "loss", "±", "tokens"), rows)


def _replicas(notes: Provenance) -> str:
    rows = [
        (stage, each.peer, each.round, each.inner_steps, f"{each.progress:.1%}")
        for stage, taken in enumerate(notes.taken)
        for each in taken
    ]
    parts = [
        "## Replicas\n\nEach stage is the mean of these replicas.",
        _table(("stage", "peer", "round", "inner steps", "of the run"), rows[:MOST_ROWS]),
    ]
    if len(rows) > MOST_ROWS:
        parts.append(f"`noloco.json` lists {len(rows) - MOST_ROWS} more.")
    if left_out := sum(map(len, notes.left_out)):
        parts.append(f"Replicas left out, with the reason in `noloco.json`: {left_out}.")
    return "\n\n".join(parts)


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(_cell(str(cell)) for cell in line)} |" for line in lines)


def _cell(text: str) -> str:
    """Return text on one line that ends no cell and begins no tag: authors of runs and peers are strangers."""
    return plain(text).replace("|", "\\|").replace("<", "&lt;")


def _fenced(text: str) -> str:
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}toml\n{text.rstrip()}\n{fence}"
