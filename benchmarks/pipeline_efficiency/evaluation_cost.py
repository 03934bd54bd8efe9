"""What an evaluation takes of a device beside an inner step and a round, in core seconds.

    python -m benchmarks.pipeline_efficiency.evaluation_cost [--stages N] [--width N] [--layers N] [--repeat N] [--json]

The model of the preset tiny, unless other sizes are given, on one thread of a CPU, which is all its stages. Medians of
the time for which that thread had a core: an inner step of a whole window at every stage, the inner steps of a round,
an evaluation on the sample that a node takes, and in one stage a continuation of one prompt. What travels between
stages is coded and decoded, and its bytes are counted. Less than a minute.
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
from noloco_node.planning.bandwidth import hop_bytes
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


def measure(stages: int, width: int, layers: int, repeat: int) -> dict[str, float]:
    """Return core seconds by what they are taken for, and bytes between stages."""
    torch.set_num_threads(1)
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers}
    fields = {"pipeline": {"stages": stages}, "model.sizes": sizes, "data": {"evaluate_every_rounds": 4}}
    run = decode_run(with_fields(run_text("tiny"), fields), "the run file of the benchmark")
    layout = model_layout(run)
    *before, last = (make_stage(run, layout, number, torch.device("cpu")) for number in range(stages))
    text, prompts = EvaluationText(run, None).read(), Prompts(run.data, ["import "])
    shape = (run.pipeline.microbatch_size, run.pipeline.sequence_length + 1)
    window = torch.randint(3, 259, (run.pipeline.microbatches_per_step, *shape))

    def evaluate() -> None:
        sums = LossSums(text.documents)
        # A pipeline fills its microbatches up, one stage takes a shorter one.
        batches = text.batches if stages == 1 else [torch.cat(text.batches)]
        for batch in batches:
            for tokens in torch.split(batch, shape[0]):
                hidden = ids_of(tokens[:, :-1])
                for stage in before:
                    hidden = stage.activations(hidden)
                sums.add(tokens, last.token_losses(hidden, tokens[:, 1:]))

    def sample() -> None:
        (ids,) = prompts.tokens.values()
        for _ in range(SAMPLING.tokens):
            ids = [*ids, int(last.infer(torch.tensor([ids[-shape[1] + 1 :]]))[0, -1].argmax())]

    def step() -> None:
        for tokens in window:
            hidden, passes = tokens[:, :-1], []
            for stage in before:
                passes.append(stage.forward(hidden))
                hidden = passes[-1].output
            gradient: torch.Tensor | None = last.loss(hidden, tokens[:, 1:]).hidden
            for each in reversed(passes):
                assert gradient is not None
                gradient = each.backward(gradient)
        for stage in (*before, last):
            stage.step(1e-4, len(window))

    step_s = core_s(step, repeat)
    evaluation_s = core_s(evaluate, repeat)
    rounds, steps = run.data.evaluate_every_rounds, run.outer.inner_steps_per_round
    hop, microbatches = hop_bytes(run.pipeline, layout.width), -(-len(text.documents) // shape[0])
    found = {
        "inner step": step_s,
        "round": steps * step_s,
        "evaluation": evaluation_s,
        "evaluation / inner step": evaluation_s / step_s,
        f"evaluation / {rounds} rounds": evaluation_s / (rounds * steps * step_s),
    }
    if stages == 1:
        return found | {"sample": core_s(sample, repeat)}
    trained_bytes = (hop.down + hop.back) * len(window)
    return found | {
        "MB a hop, evaluation": microbatches * hop.down / 1e6,
        "MB a hop, inner step": trained_bytes / 1e6,
        "bytes / inner step": microbatches * hop.down / trained_bytes,
    }


def main() -> None:
    """Measure, and print what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    found = measure(options.stages, options.width, options.layers, options.repeat)
    print(json.dumps(found) if options.json else "\n".join(f"{name:>24}  {value:.4f}" for name, value in found.items()))


if __name__ == "__main__":
    main()
