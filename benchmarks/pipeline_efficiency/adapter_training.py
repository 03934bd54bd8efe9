"""Three peers train adapters over one model on rows of their own, beside each of them alone with as many steps.

    python -m benchmarks.pipeline_efficiency.adapter_training OUT [--seeds 1 2 3 4 5]

The model is a small Llama, trained here on the standard library's source text. The rows are conversations made of its
docstrings: who asks what a function does gets the docstring's first line. Each peer has a third of the modules. The
swarm is a bootstrap peer and three `noloco-node join` processes with real daemons; one of the three is killed at two
fifths of the run and comes back. Each peer alone, and one machine with the rows of all, is plain transformers and PEFT
in float32 with as many steps as are planned of a replica; the nodes share them out by their speed. The learning rates
of the swarm, of the peers alone and of that machine are chosen from --rates on seed 0, which is not shown. Losses are
over all rows that are held out, by plain transformers, on the answers.

OUT gets the results, a line of JSON for each run; runs that stand there are not repeated.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import hashlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from peft import LoraConfig, get_peft_model
from scipy import stats
from torch.nn import functional
from transformers import AutoModelForCausalLM, ByT5Tokenizer
from transformers.utils.logging import disable_progress_bar

from benchmarks.pipeline_efficiency.libp2p_overhead import BareLoop, run_text
from gossip.interface import OuterStepTaken
from noloco_node.data.blocks import run_blocks
from noloco_node.data.encoding import with_tokenizer_in
from noloco_node.data.file_documents import stdlib_files
from noloco_node.data.held_out_text import text_loss, validation_text
from noloco_node.demo.child_processes import Child, Children, tied_command
from noloco_node.export.held_out_loss import logits_of
from noloco_node.journal import events, reader
from noloco_node.run.config import RunConfig
from noloco_node.run.runfile import load_run
from noloco_node.swarm.invite import SCHEME
from pipeline.activation_codec import as_targets, ids_of
from pipeline.inner_step import learning_rate
from pipeline.messages import UNLEARNT

PEERS = 3
RANK = 8
LENGTH = 128
KILLED_AT = 0.4
"""Of the run."""
BASE_STEPS = 1500
ALONE = tuple(f"alone {number}" for number in range(PEERS))
WHOLE = "one machine, all rows"
FIELDS = {
    "replicas": str(PEERS),
    "sequence_length": str(LENGTH),
    "microbatch_size": "8",
    "microbatches_per_step": "2",
    "source": '"json"',
    "form": '"messages"',
    "chat_template": '"chatml"',
    "packed": "false",
    "validation_percent": "10.0",
    "inner_steps_per_round": "10",
    "late_inner_steps_per_round": "10",
    "overlap_steps": "4",
}
"""Of the run file; rows are not packed, so that plain attention sees each row alone as a node does."""


class Rates(NamedTuple):
    """Learning rates: of the swarm, of each peer alone, and of one machine with the rows of all."""

    swarm: float
    alone: float
    whole: float


class Rows(NamedTuple):
    """Files of rows: of all peers together, and of each."""

    whole: Path
    parts: list[Path]


def questions() -> Iterator[tuple[str, str, str]]:
    """Yield module, question and answer for each documented function of the standard library."""
    for name, path in stdlib_files():
        if "test" in name:
            continue
        try:
            tree = ast.parse(path.read_text())
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and (doc := ast.get_docstring(node)):
                answer = doc.partition("\n")[0].strip()
                if 10 <= len(answer) <= 60:
                    yield name, f"What does {node.name} do?", answer


def write_rows(directory: Path, seed: int) -> Rows:
    """Deal the modules to the peers by a hash of seed and name."""
    rows = Rows(directory / "rows.jsonl", [directory / f"rows-{number}.jsonl" for number in range(PEERS)])
    parts: list[list[str]] = [[] for _ in range(PEERS)]
    for module, question, answer in questions():
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        owner = hashlib.sha256(f"{seed}|{module}".encode()).digest()[0] % PEERS
        parts[owner].append(json.dumps({"messages": messages}) + "\n")
    for path, lines in zip(rows.parts, parts, strict=True):
        path.write_text("".join(lines))
    rows.whole.write_text("".join(line for lines in parts for line in lines))
    return rows


def train_base(directory: Path) -> None:
    """Train the model to adapt on source text, and write it."""
    sizes = argparse.Namespace(width=72, layers=3, sequence=LENGTH, batch=8, window=2, replicas=1, gossip_every=10)
    sizes.windows_in_flight, sizes.state = 1, "float32"
    run_file = directory / "base.toml"
    run_file.write_text("seed = 7\n" + run_text(sizes, 1, BASE_STEPS, 50, 2e-3))
    run = load_run(run_file)
    loop = BareLoop(run)
    for step in range(BASE_STEPS):
        loop.step(learning_rate(step / BASE_STEPS, run.inner))
    loop.model.save_pretrained(directory / "base")
    ByT5Tokenizer().save_pretrained(directory / "base")


def noloco_node(*arguments: str) -> None:
    command = [sys.executable, "-m", "noloco_node", *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def home(directory: Path, number: int) -> Path:
    """Return the home of a peer."""
    return directory / f"home-{number}"


def write_run(path: Path, base: Path, rows: Rows, seed: int, steps: int, rate: float) -> RunConfig:
    noloco_node("init", "--force", "--from", str(base), "--lora", str(RANK), "--base", "bfloat16", str(path))
    text = path.read_text()
    chosen = {"seed": str(seed), "steps": str(steps), "learning_rate": f"{rate}", "path": json.dumps(str(rows.whole))}
    for name, value in (FIELDS | chosen).items():
        text, found = re.subn(rf"(?m)^{name} = .*$", f"{name} = {value}", text, count=1)
        if not found:
            raise SystemExit(f"init writes no field {name!r} any more")
    path.write_text(text)
    run = load_run(path)
    return msgspec.structs.replace(run, data=with_tokenizer_in(run.data, base))


async def train_swarm(run_file: Path, base: Path, rows: Rows, out: Path) -> dict[str, float]:
    """Train the run to its end with real nodes; return the inner steps of each, and all their meetings, by name."""
    children, homes = Children(), [home(out, number) for number in range(PEERS)]
    listen = ("--listen", "/ip4/127.0.0.1/tcp/0")

    def join(number: int) -> Child:
        command = ("join", invite, "--stage", "0", "--data", str(rows.parts[number]), "--home", str(homes[number]))
        options = ("--device", "cpu", "--threads", "1", "--refresh", "2", *listen)
        return children.start(f"peer {number}", tied_command("noloco_node", *command, *options), homes[number])

    try:
        frozen = run_file.with_name(f"{run_file.stem}-frozen")
        command = ("bootstrap", "--run", str(run_file), "--weights", str(frozen), "--home", str(out / "bootstrap"))
        bootstrap = children.start("bootstrap", tied_command("noloco_node", *command, *listen), out / "bootstrap")
        invite = await bootstrap.line(SCHEME, 120)
        nodes = [join(number) for number in range(PEERS)]
        killed = False
        while not all(_seen(each, events.Finished) for each in homes):
            await asyncio.sleep(0.5)
            if not killed and (steps := _seen(homes[-1], events.InnerStep)) and steps[-1].progress > KILLED_AT:
                nodes[-1].kill()
                nodes[-1], killed = join(PEERS - 1), True
            for node in nodes:
                if node.exit_code is not None:
                    raise node.trouble("it ended before its run")
    finally:
        await children.stop()
    taken = {f"steps {number}": len(_seen(each, events.InnerStep)) for number, each in enumerate(homes)}
    return {**taken, "meetings": len([step for each in homes for step in _seen(each, OuterStepTaken) if step.partner])}


def _seen(home: Path, kind: type[Any]) -> list[Any]:
    path = home / "journal.jsonl"
    return [event for event in reader.read(path) if isinstance(event, kind)] if path.exists() else []


def train_alone(run: RunConfig, base: Path, source: Path, steps: int) -> Any:
    """Return a model that plain transformers and PEFT trained with as many steps as a replica of the run takes."""
    torch.manual_seed(run.seed)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    settings = LoraConfig(r=RANK, lora_alpha=run.adapter.alpha, target_modules="all-linear")
    model: Any = get_peft_model(plain, settings)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    inner = run.inner
    optimiser = torch.optim.AdamW(
        trained, betas=(inner.beta1, inner.beta2), eps=inner.epsilon, weight_decay=inner.weight_decay, fused=True
    )
    blocks = run_blocks(run, str(source), "alone", plain.config.vocab_size)
    for step in range(steps):
        batches = [blocks.next_batch(run.pipeline.microbatch_size) for _ in range(run.pipeline.microbatches_per_step)]
        targets = [as_targets(batch[:, 1:]).flatten() for batch in batches]
        learnt = sum(int((each >= 0).sum()) for each in targets)
        for batch, wanted in zip(batches, targets, strict=True):
            logits = model(ids_of(batch[:, :-1]), use_cache=False).logits.flatten(0, 1)
            loss = functional.cross_entropy(logits, wanted, ignore_index=UNLEARNT, reduction="sum")
            torch.autograd.backward(loss / learnt)
        torch.nn.utils.clip_grad_norm_(trained, inner.clip_norm)
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(step / steps, run.inner)
        optimiser.step()
        optimiser.zero_grad()
    return model.merge_and_unload()


def losses(out: Path, seed: int, steps: int, rates: Rates) -> dict[str, float]:
    """Train all arms of one seed; return their held-out loss [nats a token of an answer] by name."""
    with tempfile.TemporaryDirectory(dir=out) as name:
        directory, base = Path(name), out / "base"
        rows = write_rows(directory, seed)
        run = write_run(directory / "run.toml", base, rows, seed, steps, rates.swarm)
        text = validation_text(run.data, LENGTH, seed, None)

        def loss(model: Any) -> float:
            return text_loss(logits_of(model.eval()), text).mean

        def loss_alone(rate: float, source: Path) -> float:
            loop = write_run(directory / "loop.toml", base, rows, seed, steps, rate)
            return loss(train_alone(loop, base, source, steps))

        found = {"base": loss(AutoModelForCausalLM.from_pretrained(base))}
        found |= asyncio.run(train_swarm(directory / "run.toml", base, rows, directory))
        homes = [option for number in range(PEERS) for option in ("--from-home", str(home(directory, number)))]
        noloco_node("export", *homes, "--merge", "--out", str(directory / "merged"))
        found["swarm"] = loss(AutoModelForCausalLM.from_pretrained(directory / "merged"))
        for arm, part in zip(ALONE, rows.parts, strict=True):
            found[arm] = loss_alone(rates.alone, part)
        found[WHOLE] = loss_alone(rates.whole, rows.whole)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--steps", type=int, default=200, help="of a replica, and of each loop")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 2e-3, 5e-3, 1e-2, 2e-2])
    given = parser.parse_args()
    disable_progress_bar()
    torch.set_num_threads(1)
    given.out.mkdir(parents=True, exist_ok=True)
    if not (given.out / "base").exists():
        train_base(given.out)
    record = given.out / "results.jsonl"

    def of(seed: int, rates: Rates) -> dict[str, float]:
        key = {"seed": seed, "steps": given.steps, "rates": list(rates)}
        done = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
        for row in done:
            if row["key"] == key:
                return dict(row["losses"])
        found = losses(given.out, seed, given.steps, rates)
        with record.open("a") as file:
            file.write(json.dumps({"key": key, "losses": found}) + "\n")
        print(f"seed {seed}, {rates}: {found}; load {os.getloadavg()[0]:.1f}", flush=True)
        return found

    tried = {rate: of(0, Rates(rate, rate, rate)) for rate in given.rates}
    best_rates = Rates(*(_best(tried, arms) for arms in (("swarm",), ALONE, (WHOLE,))))
    shown = [of(seed, best_rates) for seed in given.seeds]
    print(f"{best_rates}, {given.steps} steps of each loop")
    taken = [[int(row[f"steps {number}"]) for number in range(PEERS)] for row in shown]
    print(f"inner steps of the nodes: {taken}, {statistics.mean(map(sum, taken)) / PEERS:.0f} on average")
    for other in ("base", *ALONE, WHOLE):
        gains = [row[other] - row["swarm"] for row in shown]
        print(f"{other}: {statistics.mean(row[other] for row in shown):.3f}; the swarm is lower by {interval(gains)}")
    best = [min(row[arm] for arm in ALONE) - row["swarm"] for row in shown]
    swarm = statistics.mean(row["swarm"] for row in shown)
    print(f"swarm: {swarm:.3f}; lower than the best of the peers alone by {interval(best)}")


def _best(tried: dict[float, dict[str, float]], arms: tuple[str, ...]) -> float:
    """Return the learning rate with the least loss of these arms together."""
    return min(tried, key=lambda rate: sum(tried[rate][arm] for arm in arms))


def interval(values: list[float]) -> str:
    """Return mean and 95 % confidence interval by Student's t, in words."""
    mean = statistics.mean(values)
    if len(values) < 2:
        return f"{mean:+.3f}"
    margin = stats.t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return f"{mean:+.3f} ± {margin:.3f} nats ({', '.join(f'{value:+.3f}' for value in values)})"


if __name__ == "__main__":
    main()
