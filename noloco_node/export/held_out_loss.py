"""The losses of replicas on text that no peer trained on, and which replicas make a stage's mean by theirs.

Neither names nor claimed rounds have a voice here: all replicas of which a file is here are judged on the same text.
docs/design/export.md has the two steps, and why.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from torch import Tensor

from noloco_node.data.held_out_text import BATCH, HeldOutText, Loss, Model, text_loss, validation_text
from noloco_node.errors import UserError
from noloco_node.export.huggingface import joined
from noloco_node.export.replica_files import MergedReplicas, ReplicaFile, ReplicaReader, keeper_of
from noloco_node.planning.model_layout import ModelLayout, frozen_whole
from noloco_node.run.config import RunConfig
from noloco_node.state_sync.replica_mean import FACTOR, LeftOut
from noloco_node.tasks import check_wanted
from noloco_node.terminal import say

JUDGED_TOKENS = 4096  # judge a replica, one batch at least: few will do, because all replicas read the same
WORSE = 0.1  # share of the best loss of its stage by which a replica may be worse than it
SPOILS = 0.01  # share of the least loss by which one more replica may worsen the mean: honest ones do by chance
MOST_ROUTES = 32


def logits_of(model: Any) -> Model:
    return lambda ids: model(ids).logits


class WholeModel:
    """The model of all stages on one text; the weights of single stages may be put in place of others.

    `base`: the files of the model over which the run trains adapters; none where all of it is trained.
    """

    def __init__(
        self, layout: ModelLayout, stages: Sequence[MergedReplicas], text: HeldOutText, base: Sequence[Path] = ()
    ) -> None:
        self._layout, self._text = layout, text
        if layout.adapter is None:
            ordinary = [layout.ordinary(number, stage.weights) for number, stage in enumerate(stages)]
            self._model = joined(layout.prepared.config, ordinary).eval()
            self._compute = logits_of(self._model)
            return
        self._model = self._compute = frozen_whole(layout, base, layout.adapter.base)
        for number, stage in enumerate(stages):
            self.put(number, stage.weights)

    def put(self, number: int, weights: dict[str, Tensor]) -> None:
        self._model.load_state_dict(self._layout.ordinary(number, weights), strict=False, assign=True)

    def loss(self) -> Loss:
        return text_loss(self._compute, self._text)


def judged_by_loss(
    run: RunConfig,
    layout: ModelLayout,
    stages: Sequence[MergedReplicas],
    filed: Sequence[Sequence[ReplicaFile]],
    base: Sequence[Path] = (),
) -> list[MergedReplicas]:
    """Return the stages with the means that have the least loss, made of all files, whatever their rounds say.

    `filed`: the newest file of each peer, a replica's or a snapshot, of each stage.
    `base`: as in `WholeModel`; a run that trains adapters is not judged without these files.
    If there is no choice, or the run's held-out text cannot be read here, the stages are returned as they are.
    """
    pools = [_pool(stage, files) for stage, files in zip(stages, filed, strict=True)]
    if not any(pools):
        return list(stages)
    if layout.adapter is not None and not base:
        say("the replicas are not judged by their loss: the model that they adapt is not here (--weights DIR)")
        return list(stages)
    length = run.pipeline.sequence_length
    try:
        text = validation_text(run.data, length, run.seed, max(1, JUDGED_TOKENS // (BATCH * length)))
    except UserError as trouble:
        say(f"the replicas are not judged by their loss: {trouble.what} {trouble.why}")
        return list(stages)
    say("judging the replicas by their loss on held-out text")
    with ExitStack() as opened:
        readers = [
            opened.enter_context(ReplicaReader(pool, shapes)) for pool, shapes in zip(pools, layout.shapes, strict=True)
        ]
        guess = math.log(layout.prepared.config.vocab_size)
        judgement = _Judgement(WholeModel(layout, stages, text, base), readers, guess)
        return judgement.of(stages, Random(run.seed))


def _pool(stage: MergedReplicas, filed: Sequence[ReplicaFile]) -> Sequence[ReplicaFile]:
    """Return the files to choose from; none where there is no choice, or a replica of the mean has no file."""
    here = {(each.peer, each.counters.round) for each in filed}
    complete = all((each.peer, each.round) in here for each in stage.taken)
    return filed if complete and len(filed) > 1 else ()


def routes_of(counts: Sequence[int], rng: Random) -> list[tuple[int, ...]]:
    """Return routes, each with one of the replicas of each stage: all, or `MOST_ROUTES` by chance.

    `counts`: of the replicas of each stage that has a choice. One stage alone needs no routes.
    """
    if len(counts) < 2:
        return []
    if math.prod(counts) <= MOST_ROUTES:
        return list(itertools.product(*map(range, counts)))
    return [tuple([rng.randrange(count) for count in counts]) for _ in range(MOST_ROUTES)]


class _Judgement(NamedTuple):
    """Replicas of all stages in one model.

    `readers`: of a stage's files, none where it has no choice. `guess`: the loss of a model that knows nothing.
    """

    model: WholeModel
    readers: Sequence[ReplicaReader]
    guess: float

    def of(self, stages: Sequence[MergedReplicas], rng: Random) -> list[MergedReplicas]:
        found = list(stages)
        loss = self._begin(found, rng)
        for number, reader in enumerate(self.readers):
            if reader.filed:
                found[number], loss = self._chosen(number, found[number], loss)
        return found

    def _begin(self, stages: Sequence[MergedReplicas], rng: Random) -> float:
        """Put the best route into the model, or leave the stages as they are if none is better; return the loss."""
        numbers = [number for number, reader in enumerate(self.readers) if reader.filed]
        best, loss = None, self._loss()
        for route in routes_of([len(self.readers[number].filed) for number in numbers], rng):
            self._put(numbers, route)
            if (of_route := self._loss()) < loss:
                best, loss = route, of_route
        if best is not None:
            self._put(numbers, best)
            return loss
        for number in numbers:
            self.model.put(number, stages[number].weights)
        return loss

    def _put(self, numbers: Sequence[int], route: Sequence[int]) -> None:
        for number, place in zip(numbers, route, strict=True):
            self.model.put(number, self.readers[number].weights(place))

    def _loss(self) -> float:
        """Return the loss of the model as it is; infinite if it is not finite."""
        check_wanted()
        loss = self.model.loss().mean
        return loss if math.isfinite(loss) else math.inf

    def _chosen(self, number: int, stage: MergedReplicas, before: float) -> tuple[MergedReplicas, float]:
        """Return a stage with the mean of the replicas that belong in it, and the loss of the model with it.

        The stage stays as it is if that is better, for the model as it is has the loss `before`, or if no replica does
        better than a guess: of untrained ones loss says nothing.
        """
        reader = self.readers[number]
        standings = [reader.standing(place) for place in range(len(reader.filed))]
        losses = self._losses(number, [place for place, each in enumerate(standings) if 0.0 < each.norm < math.inf])
        order = sorted(losses, key=lambda place: losses[place])
        if not order or losses[order[0]] >= self.guess:
            self.model.put(number, stage.weights)
            return stage, math.inf
        first = order[0]
        taken, mean, loss, least = [first], reader.weights(first), losses[first], losses[first]
        why = {
            place: "its weights are not finite, or all zero" for place in range(len(standings)) if place not in losses
        }
        for place in order[1:]:
            if losses[place] > (1.0 + WORSE) * losses[first]:
                why[place] = f"loss {losses[place]:.3f} in its stage's place, the best has {losses[first]:.3f}"
            elif not 1.0 / FACTOR <= standings[place].norm / standings[first].norm <= FACTOR:
                why[place] = f"norm {standings[place].norm:.4g}, the best has {standings[first].norm:.4g}"
            elif reader.filed[place].is_snapshot and keeper_of(reader.filed[other] for other in taken):
                why[place] = "another snapshot of the stage has less loss"
            else:
                tried = reader.mean_with(mean, len(taken), place)
                self.model.put(number, tried)
                with_it = self._loss()
                if with_it <= (1.0 + SPOILS) * least:
                    taken, mean, loss, least = [*taken, place], tried, with_it, min(least, with_it)
                else:
                    why[place] = f"the mean has the loss {with_it:.3f} with it, {loss:.3f} without it"
        if loss > (1.0 + SPOILS) * before:
            self.model.put(number, stage.weights)
            return stage, before
        found = MergedReplicas(
            reader.mean(sorted(taken)),
            tuple([standings[place] for place in sorted(taken)]),
            tuple([LeftOut(peer=standings[place].peer, why=why[place]) for place in sorted(why)]),
            keeper_of(reader.filed[place] for place in taken),
        )
        self.model.put(number, found.weights)
        return found, loss

    def _losses(self, number: int, places: Sequence[int]) -> dict[int, float]:
        """Return the loss with each of these replicas in the stage's place."""
        losses = {}
        for place in places:
            self.model.put(number, self.readers[number].weights(place))
            losses[place] = self._loss()
        return losses
