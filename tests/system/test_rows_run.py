"""Real nodes fine-tune a small model on conversations: only answers are learnt, from the file to the evaluation."""

import json
from pathlib import Path

import pytest
from command_line import printed
from process_swarm import TINY_MODEL, host, join
from processes import Command, Commands
from transformers import AutoTokenizer

from noloco_node.errors import Exit
from noloco_node.export.continue_run import continuing_text
from noloco_node.journal.events import Evaluated, Finished, InnerStep, Noticed
from noloco_node.run.runfile import decode_run

pytestmark = pytest.mark.network

RUN = f"""
name = "answers"
seed = 3
{TINY_MODEL.replace("64", "256")}
[pipeline]
stages = 2
replicas = 1
sequence_length = 160
microbatch_size = 4
microbatches_per_step = 2
[data]
source = "json"
path = "rows.jsonl"
shuffle = false
form = "messages"
chat_template = "chatml"
validation_percent = 20.0
evaluate_every_rounds = 2
[inner]
steps = 80
learning_rate = 0.01
warmup_steps = 5
[outer]
inner_steps_per_round = 10
overlap_steps = 4
"""


def conversation(number: int) -> dict[str, object]:
    asked = {"role": "user", "content": f"Is {number} even?"}
    return {"messages": [asked, {"role": "assistant", "content": "no" if number % 2 else "yes"}]}


def write_rows(directory: Path) -> Path:
    """Write two hundred rows, of which the third is no conversation. Two of them fit into a sequence."""
    rows = [conversation(number) for number in range(200)]
    rows[2] = {"text": "no conversation"}
    path = directory / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def losses(command: Command) -> list[float]:
    return [step.loss for step in command.events(InnerStep) if step.loss is not None]


def test_real_nodes_learn_the_answers_of_conversations_and_take_them_home(tmp_path: Path) -> None:
    with Commands() as commands:
        run = commands.directory / "run.toml"
        run.write_text(RUN)
        rows = write_rows(commands.directory)
        bootstrap, invite = host(commands, run)
        source = join(commands, invite, 0, "--data", str(rows), "--linger", "30")
        last = join(commands, invite, 1, "--linger", "30")
        commands.until(
            lambda: source.events(Finished) and last.events(Finished), "both finish", alive=[bootstrap, source, last]
        )
        ours, theirs = losses(source), losses(last)
        assert ours[0] > 5.0, "no better than chance"
        assert ours[-1] < 1.0
        assert theirs[-1] < 1.0
        assert {step.tokens for step in source.events(InnerStep)} == {2 * 4 * 160}
        (noticed,) = [event.text for event in source.events(Noticed) if event.what == "text"]
        assert noticed == "text: rows.jsonl:3, whose fields are text, has no field 'messages' and is left out"
        commands.until(
            lambda: any("of the final weights" in line for line in source.complaint.splitlines()),
            "the final weights are evaluated",
            alive=[bootstrap, source, last],
        )
        evaluated = source.events(Evaluated)
        assert not last.events(Evaluated)
        assert len(evaluated) >= 3, "while it trained, and at the end"
        assert evaluated[-1].loss < 0.5 * evaluated[0].loss
        out = tmp_path / "model"
        export = commands.start("export", invite, "--out", str(out))
        assert export.wait() == Exit.OK, export.complaint
        for command in (source, last, bootstrap):
            command.interrupt()
        assert [command.wait() for command in (source, last, bootstrap)] == [Exit.OK] * 3
        found = json.loads(printed("evaluate", out, "--data", rows, "--json"))
        said = printed("generate", out, "--prompt", "Is 8 even?", "--temperature", 0)
        again = decode_run(continuing_text(out, "tiny"), "the run that goes on")
    # A run this short learns the answer before it learns in all cases where the answer ends.
    assert said.startswith(("yes", "no"))
    assert again.data == decode_run(RUN, "the run").data, "held out and evaluated on as before, too"
    assert found["loss"] < 1.0
    # An answer, the marks that end it, and the end token.
    assert found["tokens"] == sum(
        len("no" if number % 2 else "yes") + len("<|im_end|>\n") + 1 for number in range(200) if number != 2
    )
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert "<|im_start|>user\nIs 8 even?<|im_end|>\n" in tokenizer.apply_chat_template(
        conversation(8)["messages"], tokenize=False
    )
