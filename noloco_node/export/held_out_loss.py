"""The losses of replicas on text that no peer trained on, and which replicas leave a mean for theirs.

Each replica takes its stage's place among the means of the other stages and predicts the same text. While a replica is
worse than the best of its stage by more than `WORSE`, the worst of all leaves its stage's mean, and the others are
judged anew. Of several snapshots of a dead stage the newest is taken, unless another has so much less loss.

Of more sequences than wanted, every k-th is kept, with k doubling: they lie evenly over all that was read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from noloco_node.data.blocks import open_blocks
from noloco_node.errors import UserError
from noloco_node.export.huggingface import joined
from noloco_node.export.replica_files import MergedReplicas, ReplicaFile, ReplicaReader
from noloco_node.planning.model_layout import ModelLayout
from noloco_node.run.config import DataConfig, RunConfig
from noloco_node.state_sync.replica_mean import LeftOut
from noloco_node.terminal import say
from pipeline.messages import UNLEARNT, as_targets, ids_of, learnt

BATCH = 8  # sequences evaluated at a time
MOST_READ = 8  # times as many sequences are read as are wanted
READ_TOKENS = 2**19  # at least, where there are so many: few short sequences shall come from many documents too
JUDGED_TOKENS = 4096  # judge a replica, one batch at least: few will do, because all replicas read the same
WORSE = 0.1  # share of the best loss of its stage by which a replica may be worse than it
FEW_DOCUMENTS = 5
Model = Callable[[Tensor], Tensor]


class HeldOutText(NamedTuple):
    """Sequences of marked tokens [at most `BATCH`, s + 1], the document in which each begins, and the number read.

    `complete`: whether the whole text was read.
    """

    batches: list[Tensor]
    documents: list[str]
    read: int
    complete: bool

    @property
    def share(self) -> float:
        return len(self.documents) / max(1, self.read)

    def described(self) -> str:
        if self.complete and self.share == 1.0:
            return "all of the text"
        share = f"{self.share:.1%}" if self.share < 0.095 else f"{self.share:.0%}"
        return f"{share} of the text" if self.complete else f"{share} of the text that was read; there is more"


def validation_text(data: DataConfig, sequence_length: int, seed: int, batches: int | None) -> HeldOutText:
    """Return a sample of at most so many batches of the text that a run holds out; None takes all."""
    wanted = None if batches is None else batches * BATCH
    kept: list[tuple[Tensor, str]] = []
    every, read, complete = 1, 0, False
    most = None if wanted is None else max(MOST_READ * wanted, READ_TOKENS // sequence_length)
    blocks = open_blocks(data, sequence_length, seed, "", "validation")
    try:
        while most is None or read < most:
            block = blocks.next_batch(1)
            if complete := not len(block):
                break
            if read % every == 0:
                kept.append((block[0].to(torch.int32), blocks.document))
                if wanted is not None and len(kept) == 2 * wanted:
                    kept, every = kept[::2], 2 * every
            read += 1
    finally:
        blocks.close()
    if wanted is not None and len(kept) > wanted:
        kept = [kept[number * len(kept) // wanted] for number in range(wanted)]
    rows = [kept[at : at + BATCH] for at in range(0, len(kept), BATCH)]
    return HeldOutText(
        [torch.stack([block for block, _ in row]).long() for row in rows], [name for _, name in kept], read, complete
    )


class Loss(NamedTuple):
    """`mean`: nats a token, over so many `tokens` of so many `documents`.

    `margin`: half the 95 % confidence interval over other documents of this kind; None for fewer than `FEW_DOCUMENTS`.
    """

    mean: float
    tokens: int
    documents: int = 0
    margin: float | None = None

    @property
    def perplexity(self) -> float:
        """Return the exponential of the mean; infinite if it does not fit a float."""
        return math.exp(self.mean) if self.mean < 709.0 else math.inf


def _losses(model: Model, batch: Tensor) -> Tensor:
    """Return the loss of each token, 0 where it is only given."""
    logits, targets = model(ids_of(batch[:, :-1])), as_targets(batch[:, 1:]).flatten()
    return functional.cross_entropy(
        logits.flatten(0, 1).float(), targets.to(logits.device), ignore_index=UNLEARNT, reduction="none"
    )


@torch.no_grad()
def text_loss(model: Model, text: HeldOutText) -> Loss:
    """Return the mean cross-entropy on the tokens of a sample of a text that are learnt, with its margin."""
    sums: dict[str, tuple[float, int]] = {}
    names = iter(text.documents)
    for batch in text.batches:
        for row, losses in zip(batch, _losses(model, batch).view(len(batch), -1), strict=True):
            name = next(names)
            total, tokens = sums.get(name, (0.0, 0))
            sums[name] = (total + losses.sum(dtype=torch.float64).item(), tokens + learnt(row[1:]))
    if not sums:
        raise ValueError("there is no token to evaluate on")
    tokens = sum(count for _, count in sums.values())
    mean = sum(total for total, _ in sums.values()) / tokens
    return Loss(mean, tokens, len(sums), _margin(list(sums.values()), mean, tokens))


def _margin(sums: Sequence[tuple[float, int]], mean: float, tokens: int) -> float | None:
    """Return half of the 95 % interval of a ratio of sums over documents; documents are drawn, not tokens."""
    count = len(sums)
    if count < FEW_DOCUMENTS or not math.isfinite(mean):
        return None
    squares = sum((total - mean * of_it) ** 2 for total, of_it in sums)
    deviation = math.sqrt(count / (count - 1) * squares) / tokens
    # Student's quantile from the normal one (Cornish and Fisher), 0.05 too small at 4 degrees of freedom.
    z, free = 1.959964, count - 1
    quantile = z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
    return quantile * deviation


def logits_of(model: Any) -> Model:
    return lambda ids: model(ids).logits


class WholeModel:
    """The model of all stages on one text; the weights of single stages may be put in place of others."""

    def __init__(self, layout: ModelLayout, stages: Sequence[MergedReplicas], text: HeldOutText) -> None:
        ordinary = [layout.ordinary(number, stage.weights) for number, stage in enumerate(stages)]
        self._model = joined(layout.prepared.config, ordinary).eval()
        self._layout, self._text = layout, text

    def put(self, number: int, weights: dict[str, Tensor]) -> None:
        self._model.load_state_dict(self._layout.ordinary(number, weights), strict=False, assign=True)

    def loss(self) -> Loss:
        return text_loss(logits_of(self._model), self._text)


def without_worse(
    run: RunConfig, layout: ModelLayout, stages: Sequence[MergedReplicas], filed: Sequence[Sequence[ReplicaFile]]
) -> list[MergedReplicas]:
    """Return the stages without the replicas whose loss is too high. `filed`: the files of each stage's replicas.

    If there is no choice, or the run's held-out text cannot be read here, no replica is left out.
    """
    judged = [_members(stage, files) for stage, files in zip(stages, filed, strict=True)]
    with _judgement(run, layout, stages, judged) as judgement:
        return list(stages) if judgement is None else judgement.of(stages)


def best_snapshots(
    run: RunConfig, layout: ModelLayout, stages: Sequence[MergedReplicas], snapshots: Sequence[Sequence[ReplicaFile]]
) -> list[MergedReplicas]:
    """Return the stages; one from a snapshot with another snapshot alone, if that has much less loss."""
    judged = [found if stage.kept_by is not None else [] for stage, found in zip(stages, snapshots, strict=True)]
    with _judgement(run, layout, stages, judged) as judgement:
        return list(stages) if judgement is None else judgement.best_of(stages)


@contextmanager
def _judgement(
    run: RunConfig, layout: ModelLayout, stages: Sequence[MergedReplicas], judged: Sequence[Sequence[ReplicaFile]]
) -> Iterator[_Judgement | None]:
    """Open the judged replicas; None if there is no choice, or the text cannot be read here."""
    if all(len(members) < 2 for members in judged):
        yield None
        return
    length = run.pipeline.sequence_length
    try:
        text = validation_text(run.data, length, run.seed, max(1, JUDGED_TOKENS // (BATCH * length)))
    except UserError as trouble:
        say(f"the replicas are not judged by their loss: {trouble.what} {trouble.why}")
        yield None
        return
    say("judging the replicas by their loss on held-out text")
    with ExitStack() as opened:
        readers = [
            opened.enter_context(ReplicaReader(members, shapes))
            for members, shapes in zip(judged, layout.shapes, strict=True)
        ]
        yield _Judgement(WholeModel(layout, stages, text), readers)


def _members(stage: MergedReplicas, filed: Sequence[ReplicaFile]) -> list[ReplicaFile]:
    """Return the files of the replicas in a stage's mean, in its order; none if one is missing."""
    lying = {(each.peer, each.counters.round): each for each in filed}
    members = [lying.get((each.peer, each.round)) for each in stage.taken]
    return [each for each in members if each is not None] if None not in members else []


class _Judgement(NamedTuple):
    """Replicas of all stages in one model. `readers`: a stage's replicas, in the order of its mean."""

    model: WholeModel
    readers: Sequence[ReplicaReader]

    def of(self, stages: Sequence[MergedReplicas]) -> list[MergedReplicas]:
        """Return the stages without the replicas that are too bad."""
        found = list(stages)
        kept = [list(range(len(reader.filed))) for reader in self.readers]
        while True:
            losses = [self._losses(number, places, found[number]) for number, places in enumerate(kept)]
            excess, number, worst = max((_worst(of_stage, number) for number, of_stage in enumerate(losses)))
            if excess <= WORSE:
                return found
            best = min(losses[number].values())
            kept[number].remove(worst)
            found[number] = self._without(found[number], number, kept[number], worst, losses[number][worst], best)

    def best_of(self, stages: Sequence[MergedReplicas]) -> list[MergedReplicas]:
        """Return the stages with the best of their readers' snapshots, if that is much better than the present."""
        found = list(stages)
        for number, reader in enumerate(self.readers):
            losses = self._losses(number, range(len(reader.filed)), found[number])
            present = next((place for place in losses if reader.filed[place].peer == found[number].kept_by), None)
            if present is None or losses[present] <= (1.0 + WORSE) * min(losses.values()):
                continue
            best = min(losses, key=lambda place: losses[place])
            before, keeper, weights = found[number], reader.filed[best].peer, reader.weights(best)
            why = f"loss {losses[present]:.3f} with what {before.kept_by} keeps, {losses[best]:.3f} with {keeper}'s"
            left_out = [LeftOut(peer=each.peer, why=why) for each in before.taken]
            found[number] = MergedReplicas(weights, (reader.standing(best),), (*before.left_out, *left_out), keeper)
            self.model.put(number, weights)
        return found

    def _losses(self, number: int, places: Sequence[int], stage: MergedReplicas) -> dict[int, float]:
        """Return the loss with each of these replicas in the stage's place, infinite if it is not finite."""
        losses = {}
        for place in places if len(places) > 1 else ():
            self.model.put(number, self.readers[number].weights(place))
            mean = self.model.loss().mean
            losses[place] = mean if math.isfinite(mean) else math.inf
        self.model.put(number, stage.weights)
        return losses

    def _without(
        self, stage: MergedReplicas, number: int, kept: Sequence[int], worst: int, loss: float, best: float
    ) -> MergedReplicas:
        reader = self.readers[number]
        peer = reader.filed[worst].peer
        weights, why = reader.mean(kept), f"loss {loss:.3f} in its stage's place, the best has {best:.3f}"
        self.model.put(number, weights)
        return stage._replace(
            weights=weights,
            taken=tuple(each for each in stage.taken if each.peer != peer),
            left_out=(*stage.left_out, LeftOut(peer=peer, why=why)),
            kept_by=None if stage.kept_by == peer else stage.kept_by,
        )


def _worst(losses: dict[int, float], number: int) -> tuple[float, int, int]:
    """Return by which share the worst replica of a stage is worse than the best, and which it is."""
    best = min(losses.values(), default=math.inf)
    if not math.isfinite(best):
        return -math.inf, number, -1
    worst = max(losses, key=lambda place: losses[place])
    return losses[worst] / best - 1.0, number, worst
