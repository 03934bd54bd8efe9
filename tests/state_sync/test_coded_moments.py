"""Moments as 8-bit codes travel, are kept and are taken over as codes; what a donor makes up is refused or harmless."""

import math
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_swarms import Peer, asked_to_leave, recipe, until
from sample_counters import counters
from small_stages import PlainAdamW
from torch import Tensor, nn
from toy_gossip import at_once
from user_errors import user_error

from gossip.exchange.messages import Implausible, Parts, ReplicaState, Section
from gossip.interface import OuterStepTaken
from gossip.transfer.chunks import StateCut, gather, tensors_of
from gossip.transfer.donor import Donor, DonorLimits
from gossip.transfer.download import MomentBounds, check_values
from noloco_node.errors import Exit
from noloco_node.journal import events as journal_events
from noloco_node.machine.interface import Reporter, StageModel
from noloco_node.run.protocols import STATE, state_schema, topic
from noloco_node.sim.hardware.priced_stage import VirtualDevice
from noloco_node.sim.network.sim_network import SimNetwork
from noloco_node.state_sync.download import DownloadLink, StateDownload
from noloco_node.state_sync.starting_state import from_checkpoint, from_donor
from noloco_node.storage import checkpoint as checkpoints
from noloco_node.storage.checkpoint import Checkpoint
from noloco_node.storage.transfer_files import PartialDownload, StateFile
from noloco_node.swarm.run_distribution import RunFileText
from pipeline.adamw import AdamW, magnitudes, scales_of
from pipeline.inner_step import InnerConfig, OptimiserState, moment_bytes, moment_ratio

SHAPES = ((60, 77), (12,), (7, 3), (1, 5), (30, 256), (1, 1))
"""Large matrices of many pieces, and small ones whose codes lie unaligned beside vectors."""
SIZES = tuple(moment_bytes(shape, "int8") for shape in SHAPES)
INNER = PlainAdamW(beta2=0.99, state="int8")
BOUNDS = MomentBounds(moment_ratio(INNER.beta1, INNER.beta2), INNER.clip_norm, magnitudes)
FORM = '[inner]\nstate = "int8"\n'


def drawn(seed: int, spread: float = 0.0) -> list[Tensor]:
    chance = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=chance) * 10.0 ** (spread * torch.randn(shape, generator=chance))
        for shape in SHAPES
    ]


def trained(seed: int, steps: int = 3, inner: InnerConfig = INNER, spread: float = 1.0) -> AdamW:
    """Return an optimiser after steps on gradients that are clipped."""
    weights = [nn.Parameter(tensor) for tensor in drawn(seed)]
    adamw = AdamW(weights, inner, torch.device("cpu"))
    for step in range(steps):
        for weight, gradient in zip(weights, drawn(seed + step, spread), strict=True):
            weight.grad = gradient
        nn.utils.clip_grad_norm_(weights, inner.clip_norm)
        adamw.step(1e-3)
    return adamw


def state(seed: int, moments: tuple[Tensor, ...] | None = None) -> ReplicaState:
    given = trained(seed).moments() if moments is None else moments
    return ReplicaState(
        slow=tuple(drawn(seed)),
        momentum=(),
        optimiser=given,
        round=6,
        inner_steps=170,
        progress=0.25,
        optimiser_steps=3,
    )


def norm_of(whole: ReplicaState) -> float:
    return math.hypot(*(float(tensor.norm()) for tensor in whole.slow))


shapes = st.lists(st.lists(st.integers(0, 200), max_size=3).map(tuple), max_size=6)


@given(shapes=shapes)
def test_a_section_of_codes_is_cut_into_the_same_units_without_a_gap(shapes: list[tuple[int, ...]]) -> None:
    sizes = [moment_bytes(shape, "int8") for shape in shapes]
    cut = StateCut([4 * math.prod(shape) for shape in shapes], sizes)
    spans = cut.of(Section.FIRST)
    assert [span.unit for span in spans] == [span.unit for span in cut.of(Section.SLOW)]
    ends = dict.fromkeys(range(len(shapes)), 0)
    for part in (part for span in spans for part in span.parts):
        assert part.start == ends[part.tensor]
        ends[part.tensor] = part.stop
    assert [ends[number] for number, shape in enumerate(shapes) if math.prod(shape)] == [
        size for size, shape in zip(sizes, shapes, strict=True) if math.prod(shape)
    ]


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32), steps=st.integers(0, 30), spread=st.sampled_from([0.0, 1.0, 4.0]))
def test_what_training_leaves_is_never_refused(seed: int, steps: int, spread: float) -> None:
    honest = state(seed % 1000, trained(seed, steps, spread=spread).moments())
    check_values(honest, norm_of(honest), BOUNDS)


@given(
    scale=st.sampled_from([math.inf, -math.inf, math.nan, -1.0, -0.0, 1e-45, 1e-38, 1e-3, 0.5, 1.0, 2.0, 3e38]),
    number=st.integers(0, 2 * len(SHAPES) - 1),
    code=st.integers(-128, 127),
    seed=st.integers(0, 2**32),
)
def test_made_up_codes_are_refused_or_harmless(scale: float, number: int, code: int, seed: int) -> None:
    moments = tuple(moment.clone() for moment in trained(1).moments())
    lie = moments[number]
    if lie.dtype is torch.int8:
        scales = scales_of(lie).clone()
        lie.fill_(code)
        scales[seed % len(scales)] = scale
        scales_of(lie).copy_(scales)
    else:
        lie[seed % len(lie)] = scale
    made_up = state(1, moments)
    try:
        check_values(made_up, norm_of(made_up), BOUNDS)
    except Implausible:
        return
    assert abs(scale) <= 1.01
    weights = [nn.Parameter(tensor) for tensor in drawn(1)]
    adamw = AdamW(weights, INNER, torch.device("cpu"))
    adamw.load(3, moments)
    for weight, gradient in zip(weights, drawn(seed), strict=True):
        weight.grad = gradient / 1e3
    adamw.step(1e-3)
    most = 1e-3 * moment_ratio(INNER.beta1, INNER.beta2) / (1.0 - INNER.beta1**4)
    for weight, before in zip(weights, drawn(1), strict=True):
        if weight.ndim >= 2:
            assert float((weight.detach() - before).abs().max()) <= 1.01 * most


class _Shapes:
    shapes = SHAPES


async def _copy(directory: Path, whole: ReplicaState, sizes: tuple[int, ...] | None) -> ReplicaState | str:
    """Copy a state over a line, from a file of the donor into one of the newcomer."""
    network, said = SimNetwork(), list[str]()

    async def provide(parts: Parts) -> StateFile:
        return StateFile(directory, whole)

    donor = Donor(provide, at_once, SHAPES, DonorLimits(deadline_s=600.0, piece_s=60.0), sizes)
    await network.network("donor").serve(topic(STATE, 1), state_schema(SHAPES, sizes), donor.serve)
    reporter = Reporter(record=lambda _: None, say=said.append)
    link = DownloadLink(network.network("new"), VirtualDevice(), 300.0)
    keep = PartialDownload(directory, 1, said.append)
    stage = cast(StageModel, _Shapes())
    return await StateDownload(1, stage, link, reporter, keep, None, BOUNDS, SIZES).attempt(("donor",))


async def test_a_newcomer_gets_the_codes_themselves(tmp_path: Path) -> None:
    whole = state(3)
    found = await _copy(tmp_path, whole, SIZES)
    assert isinstance(found, ReplicaState)
    for section in Section:
        assert all(map(torch.equal, tensors_of(found, section), tensors_of(whole, section)))
    assert [moment.dtype for moment in found.optimiser] == [moment.dtype for moment in whole.optimiser]


async def test_a_donor_of_another_form_is_refused(tmp_path: Path) -> None:
    floats = trained(3, inner=replace(INNER, state="float32")).moments()
    told = await _copy(tmp_path, state(3, floats), None)
    assert isinstance(told, str)
    assert "it is of another form" in told


def test_a_copy_on_the_disk_reads_as_one_in_memory(tmp_path: Path) -> None:
    whole, cut = state(2), StateCut([4 * math.prod(shape) for shape in SHAPES], SIZES)
    held = StateFile(tmp_path, whole)
    for section in held.sections:
        for span in cut.of(section):
            assert torch.equal(held.read(section, span), gather(tensors_of(whole, section), span))


def test_a_checkpoint_keeps_codes_as_they_are(tmp_path: Path) -> None:
    moments = trained(5).moments()
    path = checkpoints.save(
        tmp_path, Checkpoint(counters(optimiser_steps=3), {"slow": tuple(drawn(5)), "optimiser": moments})
    )
    found = checkpoints.load(path).tensors["optimiser"]
    assert [each.dtype for each in found] == [each.dtype for each in moments]
    assert all(map(torch.equal, found, moments))
    assert path.stat().st_size < sum(4 * math.prod(s) + 2 * moment_bytes(s, "int8") for s in SHAPES) + 4096


async def test_a_newcomer_of_a_coded_run_goes_on_from_codes_and_from_its_checkpoint() -> None:
    what = recipe(stages=1, replicas=2, steps=400, per_round=4)
    what = RunFileText(what.text.replace("[inner]\n", FORM), "coded")
    hub = SimNetwork()
    first = Peer(hub, what, "peer-a", 0)
    await until(lambda: len(first.of(journal_events.InnerStep)) >= 6)
    second = Peer(hub, what, "peer-b", 0)
    await until(lambda: len(second.of(OuterStepTaken)) >= 2)
    assert any(event.what == "done" for event in second.of(journal_events.CatchUp))
    for peer in (first, second):
        moments = peer.stages[-1].optimiser_state().moments
        assert {moment.dtype for moment in moments} == {torch.int8, torch.float32}
        await asked_to_leave(peer)
    saved = second.saved
    assert saved is not None
    stage = second.stages[-1]
    from_checkpoint(stage, saved)
    other = _plain_form(saved)
    with user_error(Exit.CONFIG) as refused:
        from_checkpoint(stage, other)
    assert "inner.state" in refused.value.hint
    with pytest.raises(ValueError, match="is not"):
        from_donor(stage, replace(state(1), slow=saved.tensors["slow"], optimiser=other.tensors["optimiser"]))
    assert isinstance(stage.optimiser_state(), OptimiserState)


def _plain_form(saved: Checkpoint) -> Checkpoint:
    """Return a checkpoint with moments of float32."""
    slow = saved.tensors["slow"]
    return saved._replace(tensors={**saved.tensors, "optimiser": tuple(torch.zeros_like(each) for each in slow * 2)})
