"""The losses of held-out text through a pipeline: forward passes alone, from stage to stage by the routes of training.

Each microbatch goes through replicas that its senders draw, so that the loss of an evaluation is a mean over chains of
replicas, and not that of one model. Weights change meanwhile, as training goes on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from noloco_node.data.held_out_text import evaluated_sequences
from noloco_node.run.config import RunConfig
from pipeline.activation_codec import as_microbatch, learnt
from pipeline.admission_window import EvaluationQuota
from pipeline.messages import EvaluationReply, Microbatch, Reason, SequenceLosses

if TYPE_CHECKING:
    from torch import Tensor

TRIES = 3  # of a microbatch, each by another route as far as there is one
MOST_LOSS = 1000.0
"""Nats a token that a replica may claim: a model that knows nothing has 12 with the largest vocabularies."""


def evaluation_quota(run: RunConfig) -> EvaluationQuota:
    """Return what senders may ask of a stage, by the evaluations that the run file plans."""
    pipeline, outer, every = run.pipeline, run.outer, run.data.evaluate_every_rounds
    if not every:
        return EvaluationQuota()
    passes = -(-evaluated_sequences(run) // pipeline.microbatch_size)
    steps = min(outer.inner_steps_per_round, outer.late_inner_steps_per_round or outer.inner_steps_per_round)
    return EvaluationQuota(passes, every * steps * pipeline.microbatches_per_step)


async def routed_losses(
    run: RunConfig, evaluate: Callable[[Microbatch], Awaitable[EvaluationReply]], tokens: Tensor
) -> Tensor:
    """Return the sum of the losses of each sequence of marked tokens [b, s + 1], b no more than a microbatch has.

    Raises ConnectionError if no route leads to the last stage, and ValueError for losses that no model has.
    """
    pipeline, count = run.pipeline, len(tokens)
    if not learnt(tokens[:, 1:]):
        return torch.zeros(count)  # which no stage takes
    # A microbatch has one size: the last sequence fills it up.
    whole = torch.cat([tokens, tokens[-1:].expand(pipeline.microbatch_size - count, -1)])
    asked = as_microbatch(whole, told=pipeline.subspace is not None, progress=0.0, budget_s=pipeline.budget_s)
    reason = Reason.NO_ROUTE
    for _ in range(TRIES):
        reply = await evaluate(replace(asked, forward_only=True))
        if isinstance(reply, SequenceLosses):
            sums = reply.sums[:count]
            if not bool(((sums >= 0.0) & (sums <= MOST_LOSS * pipeline.sequence_length)).all()):
                raise ValueError(f"a replica claims a loss of {sums.max():.4g} nats in a sequence")
            return sums
        if (reason := reply.reason) in (Reason.QUOTA, Reason.NOT_FINITE):
            break
    raise ConnectionRefusedError(f"the stages behind refused it: {reason}")
