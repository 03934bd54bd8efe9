"""One exchange: what arrives is checked, a loss is one plain error, and acknowledgements decide who has stepped."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from toy_gossip import CUT, SWALLOW, Line, honest, line_pair

from gossip.exchange.codec import NORM_RATIO, check_norm, norm
from gossip.exchange.messages import NOTHING, Acknowledge, Implausible, Probe, Propose, Weights
from gossip.exchange.swap import PROBE, all_or_failure, check_own, check_probe, conclude, gap, probe_coordinates, swap
from noloco_node.sim.clock import run


def weights(value: float = 1.0, *, slow: bool = False) -> Weights:
    fast = (torch.full((3, 4), value), torch.full((5,), -value))
    return Weights(fast=fast, slow=fast if slow else ())


def probed(value: float = 1.0, *, fast: bool = False) -> Probe:
    slow = torch.full((17,), value)
    return Probe(round=5, last_met=4, version=3, holds=NOTHING, slow=slow, fast=slow if fast else None)


def swapped(mine: Probe | Weights, theirs: Any, tamper: Callable[[str, str, Any], Any] = honest) -> tuple[Any, float]:
    """Return what a's swap returned or raised, and how long it took."""

    async def main() -> tuple[Any, float]:
        a, b = line_pair("a", "b", 1.0, tamper)

        async def other() -> None:
            try:
                await b.send(theirs)
                await b.receive()
            except ConnectionError:
                pass

        task = asyncio.create_task(other())
        result: Any
        try:
            async with asyncio.timeout(30.0):
                result = await swap(a, mine)
        except (ConnectionError, TimeoutError, ExceptionGroup) as error:
            result = error
        took_s = asyncio.get_running_loop().time()
        a.cut()
        await task
        return result, took_s

    return run(main())


@pytest.mark.parametrize(("mine", "theirs"), [(weights(), weights(1.5, slow=True)), (probed(), probed(2.0, fast=True))])
def test_both_directions_travel_at_the_same_time(mine: Probe | Weights, theirs: Probe | Weights) -> None:
    result, took_s = swapped(mine, theirs)
    assert result is theirs
    assert took_s == pytest.approx(1.0)


IMPLAUSIBLE = {
    "a short probe": replace(probed(), slow=torch.ones(16)),
    "another dtype": replace(probed(), slow=torch.ones(17, dtype=torch.float64)),
    "one NaN": replace(probed(), slow=torch.full((17,), math.nan)),
    "a probe of the snapshot where none is wanted": probed(fast=True),
    "met in a round to come": replace(probed(), last_met=6),
}


@pytest.mark.parametrize("what", IMPLAUSIBLE)
def test_implausible_probes_are_named(what: str) -> None:
    check_probe(probed(1e9), probed())
    with pytest.raises(Implausible, match=r"^probe"):
        check_probe(IMPLAUSIBLE[what], probed())


def test_a_probe_of_the_snapshot_is_checked_likewise() -> None:
    check_probe(probed(fast=True), probed(fast=True))
    for theirs in (
        probed(),
        replace(probed(), fast=torch.ones(3)),
        replace(probed(), fast=torch.full((17,), math.inf)),
    ):
        with pytest.raises(Implausible, match=r"^probe"):
            check_probe(theirs, probed(fast=True))


@pytest.mark.parametrize("factor", [0.99 / NORM_RATIO, 1.01 / NORM_RATIO, 0.99 * NORM_RATIO, 1.01 * NORM_RATIO])
def test_norms_are_compared_in_both_directions(factor: float) -> None:
    plausible = 1 / NORM_RATIO <= factor <= NORM_RATIO
    if plausible:
        check_norm(factor * norm(weights().fast), norm(weights().fast), "weights")
    else:
        with pytest.raises(Implausible, match="norm"):
            check_norm(factor * norm(weights().fast), norm(weights().fast), "weights")


@pytest.mark.parametrize("theirs", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_is_the_sender_s_fault_whatever_ours_is(theirs: float) -> None:
    for ours in (1.0, math.nan):
        with pytest.raises(Implausible, match="weights: not finite"):
            check_norm(theirs, ours, "weights")


def test_nobody_else_is_blamed_where_ours_are_not_finite() -> None:
    for mine in (probed(math.nan), replace(probed(), fast=torch.full((17,), math.inf))):
        with pytest.raises(ConnectionAbortedError, match="our own") as caught:
            check_own(mine)
        assert not isinstance(caught.value, Implausible)
    with pytest.raises(ConnectionAbortedError, match="our own") as caught:
        check_norm(1.0, math.nan, "weights")
    assert not isinstance(caught.value, Implausible)


def test_a_message_of_another_kind_is_a_violation() -> None:
    result, _ = swapped(weights(), Propose(round=1))
    assert isinstance(result, ConnectionAbortedError)
    assert "Propose" in str(result)


def test_a_broken_line_is_one_plain_error() -> None:
    for sender in ("a", "b"):
        result, _ = swapped(weights(), weights(), lambda s, r, m, cutter=sender: CUT if s == cutter else m)
        assert type(result) is ConnectionResetError


def test_silence_lasts_until_the_callers_deadline() -> None:
    result, took_s = swapped(weights(), weights(), lambda s, r, m: SWALLOW if s == "b" else m)
    assert isinstance(result, TimeoutError)
    assert took_s == pytest.approx(30.0)


async def test_a_bug_is_not_taken_for_a_loss() -> None:
    class Buggy(Line):
        async def send(self, message: Any) -> None:
            raise KeyError("a bug")

    with pytest.raises(KeyError):
        await swap(Buggy("a", "b", 1.0, honest), weights())


@pytest.mark.parametrize("first", [KeyError("a bug"), Implausible("a lie")])
async def test_of_failures_in_one_moment_the_gravest_is_raised(first: Exception) -> None:
    async def fail(error: Exception) -> None:
        raise error

    errors = [ConnectionResetError("cut"), first, ConnectionResetError("cut")]
    with pytest.raises(type(first)):
        await all_or_failure([asyncio.create_task(fail(error)) for error in errors])


async def test_a_cancellation_in_the_moment_of_a_loss_is_not_forgotten() -> None:
    class Cut(Line):
        async def send(self, message: Any) -> None:
            await asyncio.sleep(1.0)
            raise ConnectionResetError("cut")

        async def receive(self) -> Any:
            await asyncio.sleep(100.0)

    async def trade() -> None:
        with pytest.raises(ConnectionResetError):
            await swap(Cut("a", "b", 1.0, honest), weights())

    trading = asyncio.create_task(trade())
    asyncio.get_running_loop().call_later(1.0, trading.cancel)
    await asyncio.wait({trading})
    assert trading.cancelled()


# Acknowledgements.


def concluded(tamper: Callable[[str, str, Any], Any] = honest) -> tuple[list[str], list[str]]:
    """Let a (the asker) and b conclude; return the order of commits and who ended with a loss."""
    commits: list[str] = []
    losses: list[str] = []

    async def side(line: Line, *, asked: bool) -> None:
        async def commit() -> None:
            commits.append(line.me)

        try:
            async with asyncio.timeout(10.0):
                await conclude(line, commit, asked=asked)
        except (ConnectionError, TimeoutError):
            losses.append(line.me)
        if not asked:
            line.cut()

    async def main() -> None:
        a, b = line_pair("a", "b", 0.5, tamper)
        async with asyncio.TaskGroup() as group:
            group.create_task(side(a, asked=False))
            group.create_task(side(b, asked=True))

    run(main())
    return commits, losses


def test_the_asked_commits_first_and_has_the_last_word() -> None:
    assert concluded() == (["b", "a"], [])


@pytest.mark.parametrize("fate", [CUT, SWALLOW])
def test_a_lost_first_acknowledgement_leaves_both_as_they_were(fate: object) -> None:
    commits, losses = concluded(lambda s, r, m: fate if s == "a" else m)
    assert commits == []
    assert sorted(losses) == ["a", "b"]


def test_a_lost_last_acknowledgement_leaves_only_the_asker_skipped() -> None:
    assert concluded(lambda s, r, m: CUT if s == "b" else m)[0] == ["b"]
    assert concluded(lambda s, r, m: SWALLOW if s == "b" else m) == (["b"], ["a"])


def test_only_an_acknowledgement_is_an_acknowledgement() -> None:
    commits, losses = concluded(lambda s, r, m: Propose(round=1) if isinstance(m, Acknowledge) else m)
    assert commits == []
    assert "a" in losses
    assert "b" in losses


# Probes.


@hypothesis_settings(max_examples=50)
@given(st.integers(0, 99), st.lists(st.integers(0, 5000), max_size=8), st.integers(1, 300))
def test_probe_coordinates_are_valid_and_counted(seed: int, sizes: list[int], k: int) -> None:
    coordinates = probe_coordinates(seed, sizes, k)
    assert len(coordinates) == len(sizes)
    assert sum(len(indices) for indices in coordinates) == min(k, sum(sizes))
    for size, indices in zip(sizes, coordinates, strict=True):
        assert indices.dtype == torch.int64
        assert all(0 <= index < size for index in indices.tolist())
        assert indices.tolist() == sorted(indices.tolist())


def test_both_sides_draw_the_same_coordinates_and_another_run_others() -> None:
    sizes = [10_000, 1, 30_000]
    first, second, other = (probe_coordinates(seed, sizes) for seed in (4, 4, 5))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    assert not all(x.shape == y.shape and torch.equal(x, y) for x, y in zip(first, other, strict=True))
    # Uniform over elements, so a tensor gets its share.
    assert len(first[2]) / PROBE == pytest.approx(0.75, abs=0.03)


def test_gap_worked_by_hand() -> None:
    # Means (2, 4): own is off by (1, 2) and the mean is twice that.
    assert gap(torch.tensor([3.0, 6.0]), torch.tensor([1.0, 2.0])) == pytest.approx(0.5)
    assert gap(torch.zeros(3), torch.zeros(3)) == 0.0
    assert gap(torch.ones(3), -torch.ones(3)) == math.inf


def test_a_probe_estimates_the_gap_of_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    own = (torch.randn(200, 300, generator=generator), torch.randn(50_000, generator=generator))
    other = tuple(tensor + 0.1 * torch.randn(tensor.shape, generator=generator) for tensor in own)
    coordinates = probe_coordinates(1, [tensor.numel() for tensor in own])
    exact = gap(torch.cat([t.flatten() for t in own]), torch.cat([t.flatten() for t in other]))
    probes = [
        torch.cat([tensor.flatten()[at] for tensor, at in zip(side, coordinates, strict=True)]) for side in (own, other)
    ]
    assert gap(*probes) == pytest.approx(exact, rel=0.05)
