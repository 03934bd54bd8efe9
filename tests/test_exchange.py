"""One exchange: what arrives is checked, a loss is one plain error, and receipts decide who has stepped."""

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
from toys import CUT, SWALLOW, Line, at_once, honest, line_pair

from gossip.exchange import (
    NORM_RATIO,
    PROBE,
    check_plausible,
    conclude,
    gap,
    norm,
    probe,
    probe_coordinates,
    size_bytes,
    swap,
)
from gossip.messages import Implausible, Offer, Received, Weights
from noloco_node.sim.clock import run


def weights(value: float = 1.0, *, slow: bool = False) -> Weights:
    fast = (torch.full((3, 4), value), torch.full((5,), -value))
    return Weights(fast=fast, slow=fast if slow else (), probe=torch.full((17,), value))


def swapped(mine: Weights, theirs: Any, tamper: Callable[[str, str, Any], Any] = honest) -> tuple[Any, float]:
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
                result = await swap(a, mine, at_once)
        except (ConnectionError, TimeoutError, ExceptionGroup) as error:
            result = error
        took_s = asyncio.get_running_loop().time()
        a.cut()
        await task
        return result, took_s

    return run(main())


@pytest.mark.parametrize("slow", [False, True])
def test_both_directions_travel_at_the_same_time(slow: bool) -> None:
    theirs = weights(1.5, slow=slow)
    result, took_s = swapped(weights(slow=slow), theirs)
    assert result is theirs
    assert took_s == pytest.approx(1.0)


def spoiled(number: int, tensor: torch.Tensor) -> Weights:
    good = weights(1.5)
    return replace(good, fast=tuple(tensor if index == number else t for index, t in enumerate(good.fast)))


IMPLAUSIBLE = {
    "one tensor less": replace(weights(), fast=weights().fast[:1]),
    "one tensor more": replace(weights(), fast=(*weights().fast, torch.ones(1))),
    "another shape": spoiled(1, torch.ones(6)),
    "the same size in another shape": spoiled(0, torch.ones(4, 3)),
    "another dtype": spoiled(1, torch.ones(5, dtype=torch.float64)),
    "one NaN": spoiled(1, torch.tensor([1.0, 1.0, math.nan, 1.0, 1.0])),
    "one infinity": spoiled(0, torch.full((3, 4), 1.0).index_fill(0, torch.tensor([1]), -math.inf)),
    "far too large": weights(1e6),
    "far too small": weights(1e-6),
    "nothing at all": weights(0.0),
    "slow weights where none are wanted": weights(slow=True),
    "a short probe": replace(weights(), probe=torch.ones(16)),
    "a probe that is not finite": replace(weights(), probe=torch.full((17,), math.nan)),
}


@pytest.mark.parametrize("what", IMPLAUSIBLE)
def test_implausible_weights_are_named(what: str) -> None:
    result, _ = swapped(weights(), IMPLAUSIBLE[what])
    assert isinstance(result, Implausible)
    assert str(result).startswith(("fast weights", "slow weights", "probe"))


def test_implausible_slow_weights_are_found_too() -> None:
    theirs = replace(weights(slow=True), slow=(torch.full((3, 4), math.nan), torch.ones(5)))
    assert isinstance(swapped(weights(slow=True), theirs)[0], Implausible)
    assert isinstance(swapped(weights(slow=True), weights())[0], Implausible)


@pytest.mark.parametrize("factor", [0.99 / NORM_RATIO, 1.01 / NORM_RATIO, 0.99 * NORM_RATIO, 1.01 * NORM_RATIO])
def test_norms_are_compared_in_both_directions(factor: float) -> None:
    plausible = 1 / NORM_RATIO <= factor <= NORM_RATIO
    if plausible:
        check_plausible(weights(factor), weights())
    else:
        with pytest.raises(Implausible, match="norm"):
            check_plausible(weights(factor), weights())


def test_a_message_of_another_kind_is_a_violation() -> None:
    result, _ = swapped(weights(), Offer(round=1))
    assert isinstance(result, ConnectionAbortedError)
    assert "Offer" in str(result)


def test_a_broken_line_is_one_plain_error() -> None:
    for sender in ("a", "b"):
        result, _ = swapped(weights(), weights(), lambda s, r, m, cutter=sender: CUT if s == cutter else m)
        assert type(result) is ConnectionResetError


def test_silence_lasts_until_the_callers_deadline() -> None:
    result, took_s = swapped(weights(), weights(), lambda s, r, m: SWALLOW if s == "b" else m)
    assert isinstance(result, TimeoutError)
    assert took_s == pytest.approx(30.0)


def test_a_bug_is_not_taken_for_a_loss() -> None:
    async def broken(function: Callable[..., Any], /, *args: object) -> Any:
        raise AssertionError("not reached")

    class Buggy(Line):
        async def send(self, message: Any) -> None:
            raise KeyError("a bug")

    async def main() -> None:
        with pytest.raises(KeyError):
            await swap(Buggy("a", "b", 1.0, honest), weights(), broken)

    run(main())


def test_a_cancellation_in_the_moment_of_a_loss_is_not_forgotten() -> None:
    class Cut(Line):
        async def send(self, message: Any) -> None:
            await asyncio.sleep(1.0)
            raise ConnectionResetError("cut")

        async def receive(self) -> Any:
            await asyncio.sleep(100.0)

    async def main() -> None:
        async def trade() -> None:
            with pytest.raises(ConnectionResetError):
                await swap(Cut("a", "b", 1.0, honest), weights(), at_once)

        trading = asyncio.create_task(trade())
        asyncio.get_running_loop().call_later(1.0, trading.cancel)
        await asyncio.wait({trading})
        assert trading.cancelled()

    run(main())


# Receipts.


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
def test_a_lost_first_receipt_leaves_both_as_they_were(fate: object) -> None:
    commits, losses = concluded(lambda s, r, m: fate if s == "a" else m)
    assert commits == []
    assert sorted(losses) == ["a", "b"]


def test_a_lost_last_receipt_leaves_only_the_asker_deferred() -> None:
    assert concluded(lambda s, r, m: CUT if s == "b" else m)[0] == ["b"]
    assert concluded(lambda s, r, m: SWALLOW if s == "b" else m) == (["b"], ["a"])


def test_only_a_receipt_is_a_receipt() -> None:
    commits, losses = concluded(lambda s, r, m: Offer(round=1) if isinstance(m, Received) else m)
    assert commits == []
    assert "a" in losses
    assert "b" in losses


# Probes.


@hypothesis_settings(max_examples=50, deadline=None)
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


def test_the_probe_is_the_weights_at_the_coordinates() -> None:
    slow = (torch.arange(6.0).reshape(2, 3), torch.arange(100.0, 104.0))
    assert probe(slow, (torch.tensor([1, 5]), torch.tensor([3]))).tolist() == [1.0, 5.0, 103.0]
    assert probe(slow, probe_coordinates(0, [6, 4])).tolist() == [0, 1, 2, 3, 4, 5, 100, 101, 102, 103]


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
    assert gap(probe(own, coordinates), probe(other, coordinates)) == pytest.approx(exact, rel=0.05)


def test_norm_and_size() -> None:
    assert norm((torch.tensor([3.0]), torch.tensor([[4.0]]))) == pytest.approx(5.0)
    assert norm(()) == 0.0
    assert size_bytes(weights()) == 4 * (12 + 5 + 17)
    assert size_bytes(weights(slow=True)) == 4 * (2 * (12 + 5) + 17)
