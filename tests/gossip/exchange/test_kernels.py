"""The compiled arithmetic of a round yields the bits of torch's, whatever the machine's vectors and the values are."""

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch
from zlib import crc32

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import LAST_RESORT_S
from torch import Tensor

from gossip.exchange import kernels
from gossip.exchange.codec import DIFFERENCE, Coded, OwnWeights, Sides, encode
from gossip.exchange.swap import measure
from gossip.rounds.outer_optimiser import Rule, Step, take_step
from gossip.rule.outer_step import EVEN, Delay, Outer, OuterState, Shares, Tensors, shares_by_steps
from gossip.settings import BLOCK, Format

ROOT = Path(__file__).resolve().parents[3]
Forms = dict[str, kernels.Kernels | None]
SIZES = (0, 1, 2, 3, BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 4 * BLOCK + 37, 3000)
steps = st.tuples(st.integers(128, 255), st.integers(-100, 60)).map(lambda each: each[0] * 2.0 ** each[1])
"""As `common_steps` makes them: numbers of 8 significant bits."""
spreads = st.sampled_from([0.0, 2.0**-60, 0.5, 3.0, 2.0**10, 2.0**24, 2.0**60])
outers = st.sampled_from([Outer(0.0, 1.0, 1.0), Outer(0.5, 0.7, 0.7), Outer(0.9, 1.25, 1.25)])
both_shares = st.sampled_from([EVEN, shares_by_steps(11, 3), shares_by_steps(1, 9)])
huges = st.sampled_from([1.0, 1e9, 3e38])
seeds = st.integers(0, 2**31)


def build(folder: Path, **environment: str) -> kernels.Kernels | None:
    """Build the library into a folder as an installation does, and load it; None where there is no compiler."""
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", folder, "--build-temp", folder / "objects"]
    options = {"cwd": ROOT, "env": os.environ | environment, "timeout": LAST_RESORT_S}
    subprocess.run(command, check=True, capture_output=True, **options)
    return kernels.load(folder / "gossip" / "exchange")


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Forms:
    widest = build(tmp_path_factory.mktemp("widest"))
    if widest is None:
        pytest.skip("no C compiler")
    return {"torch": None, "widest": widest, "plain": build(tmp_path_factory.mktemp("plain"), CFLAGS="-DKERNELS_PLAIN")}


def each(forms: Forms) -> Iterator[str]:
    for name, form in forms.items():
        with patch.object(kernels, "COMPILED", form):
            yield name


class Case(NamedTuple):
    """One side of a meeting. `theirs`: codes that may be anything."""

    slow: Tensors
    learned: Tensors
    momentum: Tensors
    theirs: Tensors
    steps: tuple[float, ...]


def draw(seed: int, step: float, spread: float, huge: float = 1e9) -> Case:
    """Draw values in whole and half steps and between, some of them zero, with either sign, tiny or huge."""
    source = torch.Generator().manual_seed(seed)

    def uniform(size: int) -> Tensor:
        # Of whole numbers: other draws have other last bits on other processors.
        return torch.randint(-(2**20), 2**20, (size,), generator=source) / 2**19

    def values(size: int, width: float) -> Tensor:
        ties = torch.randint(-20, 21, (size,), generator=source) / 2
        drawn = (uniform(size) * width + ties) * step
        odd = torch.tensor([0.0, -0.0, 1e-45, -1e-39, 1.2e-38, huge, -huge])
        places = torch.randint(0, 40, (size,), generator=source)
        return torch.where(places < len(odd), odd[places.clamp(max=len(odd) - 1)], drawn)

    return Case(
        tuple([values(size, spread) for size in SIZES]),
        tuple([values(size, spread).to(DIFFERENCE) for size in SIZES]),
        tuple([values(size, spread) for size in SIZES]),
        (torch.randint(0, 256, (sum((size + 1) // 2 for size in SIZES),), generator=source, dtype=torch.uint8),),
        (step,) * len(SIZES),
    )


def stepped(case: Case, outer: Outer, shares: Shares) -> Tensors:
    """Take a step; return all that it has written."""
    slow, learned, momentum = (tuple([tensor.clone() for tensor in each]) for each in case[:3])
    sides = Sides(Coded(Format.INT4, case.theirs, case.steps), Coded(Format.INT4, case.theirs, case.steps))
    state = OuterState(slow, momentum if outer.alpha else ())
    after = take_step(Step(OwnWeights(slow, learned), sides, shares=shares), state, Rule(outer, Delay()))
    assert (after.gathered, after.meetings) == ((), 0)
    return (*after.slow, *after.momentum, *learned)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Minus zero differs from zero; what is no number has no particular bits."""
    bits = torch.int32 if one.dtype is torch.float32 else torch.int16
    a, b = (each.masked_fill(each.isnan(), math.nan).view(bits) for each in (one, other))
    return one.shape == other.shape and torch.equal(a, b)


@given(seeds, steps, spreads, huges, st.booleans())
@settings(max_examples=60)
def test_what_travels_is_the_same(
    forms: Forms, seed: int, step: float, spread: float, huge: float, on_top: bool
) -> None:
    """And so is what is refused because it is not finite."""
    case, found = draw(seed, step, spread, huge), []
    for _ in each(forms):
        try:
            own = OwnWeights(case.slow, case.learned if on_top else ())
            found.append(encode(Format.INT4, own, case.steps))
        except ConnectionAbortedError as error:
            found.append(error)
    for other in found[1:]:
        assert type(other) is type(found[0])
        if isinstance(other, ConnectionAbortedError):
            assert str(other) == str(found[0])
        else:
            assert torch.equal(other.coded.wire[0], found[0].coded.wire[0])
            if math.isfinite(other.norm) and math.isfinite(found[0].norm):  # each form overflows at its own norm
                assert other.norm == pytest.approx(found[0].norm, rel=1e-4, abs=1e-18)


@given(seeds, steps, spreads, huges, outers, both_shares)
@settings(max_examples=60)
def test_a_step_is_the_same(
    forms: Forms, seed: int, step: float, spread: float, huge: float, outer: Outer, shares: Shares
) -> None:
    case = draw(seed, step, spread, huge)
    after = [stepped(case, outer, shares) for _ in each(forms)]
    for written in after[1:]:
        assert [same_bits(*pair) for pair in zip(written, after[0], strict=True)] == [True] * len(written)


@given(seeds, st.integers(-20, 20), st.floats(0.1, 100.0), st.booleans())
@settings(max_examples=40)
def test_what_is_measured_is_the_same(forms: Forms, seed: int, exponent: int, spread: float, slow: bool) -> None:
    case = draw(seed, 2.0**exponent, spread)
    slows, learned = (tuple([t.where(t.abs() < 1e20, 1.0) for t in tensors]) for tensors in case[:2])
    fast = OwnWeights(slows, learned)
    theirs = Coded(Format.INT4, case.theirs, case.steps)
    found = [measure(theirs, OwnWeights(slows) if slow else fast, slows, fast) for _ in each(forms)]
    assert found[1] == found[2], "the sums do not depend on the machine's vectors"
    assert found[1] == pytest.approx(found[0], rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 7, 1500, 2999])
def test_what_is_not_finite_is_not_encoded(forms: Forms, poison: float, at: int) -> None:
    case = draw(1, 0.01, 3.0)
    case.slow[-1][at] = poison
    for _ in each(forms):
        with pytest.raises(ConnectionAbortedError, match=f"not finite: tensor {len(SIZES) - 1}"):
            encode(Format.INT4, OwnWeights(case.slow, case.learned), case.steps)


def test_a_meeting_has_the_bits_that_it_had(forms: Forms) -> None:
    """So peers of different versions and machines that meet hold the same numbers."""
    case = draw(7, 0.0078125, 3.0)
    for name in each(forms):
        wire = encode(Format.INT4, OwnWeights(case.slow, case.learned), case.steps).coded.wire[0]
        after = stepped(case, Outer(0.5, 0.7, 0.7), shares_by_steps(11, 3))
        sums = [crc32(tensor.view(torch.uint8).numpy().tobytes()) for tensor in (wire, *after)]
        assert (name, crc32(repr(sums).encode())) == (name, 3139807647)


def test_a_library_of_another_source_is_not_used(forms: Forms, tmp_path: Path) -> None:
    built = build(tmp_path)
    assert built is not None
    with patch.object(kernels, "crc32", return_value=1):
        assert kernels.load(tmp_path / "gossip" / "exchange") is None


def test_an_installation_without_a_compiler_works(tmp_path: Path) -> None:
    assert build(tmp_path, CC="false") is None
