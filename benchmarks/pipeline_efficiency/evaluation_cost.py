"""What an evaluation takes of a device beside an inner step and a round, in core seconds.

    python -m benchmarks.pipeline_efficiency.evaluation_cost [--width N] [--layers N] [--repeat N] [--json]

One stage that is the whole model of the preset tiny, unless other sizes are given, on one thread of a CPU. Medians of
the time for which that thread had a core: an inner step of a whole window, the inner steps of a round, an evaluation on
the sample that a node takes, and a continuation of one prompt. Less than a minute.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from statistics import median

import torch

from noloco_node.data.held_out_text import EvaluationText, LossSums
from noloco_node.data.token_text import Prompts
from noloco_node.evaluation.evaluator import SAMPLING
from noloco_node.planning.model_layout import make_stage, model_layout
from noloco_node.run.presets import run_text, with_fields
from noloco_node.run.runfile import decode_run
from pipeline.activation_codec import ids_of


def core_s(work: Callable[[], object], repeat: int) -> float:
    """Return the median time for which this thread had a core, after one try that is not counted."""
    times = []
    for _ in range(repeat + 1):
        before = time.thread_time()
        work()
        times.append(time.thread_time() - before)
    return median(times[1:])


def measure(width: int, layers: int, repeat: int) -> dict[str, float]:
    """Return core seconds by what they are taken for."""
    torch.set_num_threads(1)
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers}
    fields = {"pipeline": {"stages": 1}, "model.sizes": sizes, "data": {"evaluate_every_rounds": 4}}
    run = decode_run(with_fields(run_text("tiny"), fields), "the run file of the benchmark")
    stage = make_stage(run, model_layout(run), 0, torch.device("cpu"))
    text, prompts = EvaluationText(run, None).read(), Prompts(run.data, ["import "])
    shape = (run.pipeline.microbatch_size, run.pipeline.sequence_length + 1)
    window = torch.randint(3, 259, (run.pipeline.microbatches_per_step, *shape))

    def evaluate() -> None:
        sums = LossSums(text.documents)
        for batch in text.batches:
            for tokens in torch.split(batch, shape[0]):
                sums.add(tokens, stage.token_losses(ids_of(tokens[:, :-1]), tokens[:, 1:]))

    def sample() -> None:
        (ids,) = prompts.tokens.values()
        for _ in range(SAMPLING.tokens):
            ids = [*ids, int(stage.infer(torch.tensor([ids[-shape[1] + 1 :]]))[0, -1].argmax())]

    def step() -> None:
        for tokens in window:
            stage.loss(tokens[:, :-1], tokens[:, 1:])
        stage.step(1e-4, len(window))

    step_s = core_s(step, repeat)
    evaluation_s, sample_s = core_s(evaluate, repeat), core_s(sample, repeat)
    rounds, steps = run.data.evaluate_every_rounds, run.outer.inner_steps_per_round
    return {
        "inner step": step_s,
        "round": steps * step_s,
        "evaluation": evaluation_s,
        "sample": sample_s,
        "evaluation / inner step": evaluation_s / step_s,
        f"evaluation / {rounds} rounds": evaluation_s / (rounds * steps * step_s),
    }


def main() -> None:
    """Measure, and print what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    found = measure(options.width, options.layers, options.repeat)
    print(json.dumps(found) if options.json else "\n".join(f"{name:>24}  {value:.4f}" for name, value in found.items()))


if __name__ == "__main__":
    main()
