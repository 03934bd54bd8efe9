"""What the doctor sees of this machine: files, memory, disk, device; and what a finding is.

Each judgement is pure; `basics` and `capacity` measure.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from gossip.exchange import kernels
from noloco_node.admission.ticket import peer_of_file
from noloco_node.errors import Exit, UserError, reason_of, storage_error
from noloco_node.libp2p.settings import ensure_identity
from noloco_node.machine.memory import free_bytes, machine_free_bytes, usable_bytes, wanted_bytes
from noloco_node.machine.system import allow_files, allowed_files
from noloco_node.storage.atomic_file import SPARE_BYTES
from noloco_node.storage.checkpoint import KEPT, files
from noloco_node.storage.home import HomePaths, RunPaths, typed
from noloco_node.terminal import say
from noloco_node.units import format_bytes

if TYPE_CHECKING:
    from noloco_node.planning.plan import Memory

ENOUGH_FILES, FEW_FILES = 1024, 256
CHECKPOINT_SETS = 5  # slow and fast weights, outer momentum and the optimiser's two moments
LITTLE_DISK_BYTES = 2 * 10**9
NO_DISK_BYTES = 10**6  # with less not even an identity and a run file fit: no home can be made
DISK_ROOM = 1.2  # of what checkpoints need, so much of the disk should be free: the journal and snapshots take some too


class Grade(StrEnum):
    """Fine; worth a look; prevents joining."""

    GOOD = "good"
    DOUBTFUL = "doubtful"
    BAD = "bad"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that the doctor looked at. `hint`: what to do about it, if anything."""

    about: str
    grade: Grade
    says: str
    hint: str | None = None


def ok(about: str, says: str) -> Finding:
    return Finding(about=about, grade=Grade.GOOD, says=says)


def warn(about: str, says: str, hint: str) -> Finding:
    return Finding(about=about, grade=Grade.DOUBTFUL, says=says, hint=hint)


def fail(about: str, says: str, hint: str) -> Finding:
    """Return a finding that prevents joining, or makes it useless."""
    return Finding(about=about, grade=Grade.BAD, says=says, hint=hint)


_SIGNS = {Grade.GOOD: "ok", Grade.DOUBTFUL: "look", Grade.BAD: "BAD"}


def line(finding: Finding) -> str:
    """Return a finding as one line, and a second one with its hint."""
    text = f"{_SIGNS[finding.grade]:>4}  {finding.about}: {finding.says}"
    return text + (f"\n      try: {finding.hint}" if finding.hint else "")


def verdict(findings: Sequence[Finding]) -> str:
    """Return the last line: whether this machine can join."""
    count = sum(finding.grade is Grade.BAD for finding in findings)
    if count:
        return f"{count} of {len(findings)} findings will prevent joining."
    open_ones = sum(finding.grade is Grade.DOUBTFUL for finding in findings)
    return "Nothing is in the way." + (f" Worth a look: {open_ones} of {len(findings)} findings." if open_ones else "")


def exit_code(findings: Sequence[Finding]) -> Exit:
    """Return OK, or UNFIT where something will prevent joining."""
    return Exit.UNFIT if any(finding.grade is Grade.BAD for finding in findings) else Exit.OK


class Needs(NamedTuple):
    """What each stage of a run needs of a machine: memory, and bytes on the disk for checkpoints, by stage."""

    memory: Sequence[Memory] = ()
    disk: Mapping[int, int] = {}


def judge_files(limit: int) -> Finding:
    """Judge the number of files and connections that one process may have open."""
    about, says = "open files", f"{limit} allowed a process"
    remedy = "a hard limit of 4096 for the user, or LimitNOFILE=4096 in the systemd unit"
    if limit < FEW_FILES:
        return fail(about, f"{says}: each conversation takes one, and a node has hundreds", remedy)
    if limit < ENOUGH_FILES:
        return warn(about, f"{says}: enough for a small swarm", remedy)
    return ok(about, says)


def judge_rounds(compiled: object | None) -> Finding:
    """Say whether the arithmetic of rounds is compiled; a node works without."""
    slow = "by torch, some five times slower than compiled: no C compiler was there when this was installed"
    return ok("arithmetic of rounds", slow if compiled is None else "compiled")


def judge_memory(free: int, needs: Sequence[int]) -> Finding:
    """Judge the free main memory by the bytes that each stage needs of it."""
    wanted = dict(enumerate(map(wanted_bytes, needs)))
    return _against("memory", free, wanted, "close other programs, or ask for a run with more stages")


def judge_gpu(free: int, needs: Sequence[int]) -> Finding:
    wanted = dict(enumerate(map(wanted_bytes, needs)))
    return _against("GPU memory", free, wanted, "--device cpu, or end what else runs on the GPU")


def judge_disk(free: int | None, needs: Mapping[int, int], home: Path) -> Finding:
    """Judge the free disk by the bytes that stages need of it; None where it cannot be looked at."""
    if free is None:
        return fail("disk", f"{home} cannot be looked at", "give a directory of yours with --home")
    if needs or free >= LITTLE_DISK_BYTES:
        wanted = {stage: DISK_ROOM * size + SPARE_BYTES for stage, size in needs.items()}
        return _against("disk", free, wanted, f"free some space at {home}, or give another --home")
    judge = warn if free >= NO_DISK_BYTES else fail
    return judge("disk", f"{format_bytes(free)} free at {home}", "free some space, or give another --home")


def disk_bytes(weights: int, kept: int = KEPT, *, keeps_best: bool) -> int:
    """Return the bytes of a stage's `kept` checkpoints and of one more, given those of its weights.

    `keeps_best`: the weights of the best evaluation lie beside them, and those of a better one while it is written.
    """
    return weights * (CHECKPOINT_SETS * (kept + 1) + 2 * keeps_best)


def require_disk(paths: RunPaths, weights: Mapping[int, int], kept: int, *, keeps_best: bool = False) -> str | None:
    """Return a warning if the disk has no room for the checkpoints of any of these stages, given their weights.

    Raises `UserError` if there is no checkpoint to go on from either: such a node would never save anything. A node
    that has a checkpoint starts on a full disk, as it would have gone on there.
    """
    needs = {stage: disk_bytes(size, kept, keeps_best=keeps_best) for stage, size in weights.items()}
    finding = judge_disk(_free_disk(paths.path, [paths]), needs, paths.path)
    if finding.grade is not Grade.BAD:
        return None
    if files(paths.checkpoint):
        return (
            f"the disk has no room for checkpoints ({finding.says}): nothing is saved until there is; the last"
            f" checkpoint stays, and we go on from it; {finding.hint}"
        )
    raise storage_error(
        f"The disk at {paths.path} has no room for checkpoints.", finding.says, f"{finding.hint}; --keep 1 takes less"
    )


def _against(about: str, free: int, wanted: dict[int, float], hint: str) -> Finding:
    """Compare what is free with what each stage of a run wants, if there is a run."""
    has = f"{format_bytes(free)} free"
    if not wanted:
        return ok(about, has)
    fits = [stage for stage, size in wanted.items() if size <= free]
    least, most = min(wanted.values()), max(wanted.values())
    if not fits:
        return fail(about, f"{has}, and the smallest stage takes {format_bytes(least)}", hint)
    if len(fits) < len(wanted):
        listed = " and ".join(map(str, fits))
        return warn(about, f"{has}: enough for stage {listed}, not for all", f"join with --stage {fits[0]}")
    return ok(about, f"{has}, the largest stage takes {format_bytes(most)}")


def basics(home: Path) -> list[Finding]:
    """Return the findings that need neither a run nor torch."""
    allow_files()  # as a node does
    system = f"{sys.platform}, Python {sys.version.split()[0]}, {os.cpu_count() or 1} cores"
    return [ok("system", system), judge_files(allowed_files()), judge_rounds(kernels.COMPILED), _identity(home)]


def capacity(home: Path, device: str, needs: Needs, run_id: str | None) -> Iterator[Finding]:
    """Yield findings about the disk, and then, with torch, about the device and the memory.

    `needs`: of the stages of the run `run_id`, if there is one.
    """
    free_disk = _free_disk(home, [] if run_id is None else HomePaths(home).places_of(run_id))
    yield judge_disk(free_disk, needs.disk, home)
    announce_torch()
    seen, gpu = _device(device)
    yield seen
    memory = machine_free_bytes()
    if gpu is None:
        yield judge_memory(memory, [each.total for each in needs.memory])
        return
    placed = [each.placed(usable_bytes(gpu), usable_bytes(memory)) for each in needs.memory]
    yield judge_memory(memory, [each.beside for each in placed])
    yield judge_gpu(gpu, [each.computing for each in placed])


def announce_torch() -> None:
    """Say that torch is loaded now, if it was not before."""
    if "torch" not in sys.modules:
        say("loading torch (a few seconds)")


def _identity(home: Path) -> Finding:
    """Say the node's peer id: an owner who lists peers must know it before the node can join."""
    path = HomePaths(typed(home).absolute())
    try:
        path.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        ensure_identity(path.identity)
        peer = peer_of_file(path.identity)
    except UserError as error:
        return fail("identity", error.why, error.hint)
    except OSError as error:
        return fail("identity", reason_of(error), "another --home, on a disk that you may write to")
    return ok("identity", f"you are {peer}")


def _device(wish: str) -> tuple[Finding, int | None]:
    """Return what torch sees, and the free bytes of the GPU if it would train on one with memory of its own."""
    import torch

    from noloco_node.machine.device import choose_device

    try:
        device = choose_device(wish)
    except UserError as error:
        return fail("device", f"{error.what} {error.why}", error.hint), None
    if device.type == "mps":
        return ok("device", f"torch {torch.__version__} trains on the GPU of this Apple processor"), None
    if device.type == "cpu":
        return ok("device", f"torch {torch.__version__} trains on the CPU, {torch.get_num_threads()} threads"), None
    return ok("device", f"torch {torch.__version__} trains on {torch.cuda.get_device_name(device)}"), free_bytes(device)


def _free_disk(home: Path, places: Iterable[RunPaths]) -> int | None:
    """Return the free bytes of the home's disk, with those of checkpoints in `places`, which new ones replace."""
    place = typed(home).absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        own = sum(path.stat().st_size for paths in places for path in files(paths.checkpoint))
        usable = place.is_dir() and os.access(place, os.W_OK)
        return shutil.disk_usage(place).free + own if usable else None
    except OSError:
        return None
