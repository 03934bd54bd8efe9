"""A scenario: which swarm to simulate, on what machines and lines, and what happens to it. All that a seed needs.

A scenario is a small TOML file, or flags of the command line, or made by `explore`. It may name a run file: model, cut
and steps are then that run's, a pass costs what its floating-point operations take on a device of `tflops`, and
messages weigh what they would; only the arithmetic is a bowl's. So an operator sees what a swarm would do before
renting it. Without a run file it is a small swarm of bowls whose prices and sizes the scenario itself says.

Every mistake in the file is one message that names the line and the field.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import msgspec

from gossip.exchange.formats import Format
from noloco_node.errors import config_error
from noloco_node.run.fields import misfit, short
from noloco_node.sim.network.link_model import NetworkConditions
from noloco_node.sim.scenario import faults
from noloco_node.sim.scenario.faults import Fault, Join

T = TypeVar("T", bound=msgspec.Struct)

SCENARIO_BYTES = 2**20
MOST_PEERS = 20_000
ROUNDS_OF_A_RUN = 5
"""That are simulated of a run file by itself."""
_RUN_SECTION = re.compile(r"(?m)^\s*\[model(\.sizes)?\]")
"""What no scenario has and every run file."""
_HEADING = re.compile(r"\s*\[{1,2}([A-Za-z0-9_. -]+)\]{1,2}\s*(?:#.*)?$")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


class SwarmConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the swarm does. A field that is left out is the run file's, or the default of `run.base`."""

    run: str | None = None
    """Path of a run file, relative to the scenario's directory."""
    stages: int | None = None
    replicas: int | None = None
    rounds: int | None = None
    """Gossip rounds that a replica opens, when as many peers come as planned; sets the token budget."""
    inner_steps_per_round: int | None = None
    late_inner_steps_per_round: int | None = None
    dynamic_steps: bool | None = None
    weigh_by_steps: bool | None = None
    microbatches_per_step: int | None = None
    windows_in_flight: Literal[1, 2] | None = None
    overlap_steps: int | None = None
    blocking: bool | None = None
    codec: Format | None = None
    line_share: float | None = None
    alpha: float | None = None
    beta: float | None = None
    gamma: float | None = None
    momentum_period: int | None = None
    staleness_at_most: int | None = None
    learning_rate: float | None = None
    budget_s: float | None = None
    """For which a microbatch may travel; slow devices need more than the run's."""
    model: Literal["bowl", "wide bowl", "transformer"] = "bowl"
    """bowl: costs next to nothing. wide bowl: has weights enough for partners to be judged by them.

    transformer: the run's model is really trained, on its real text.
    """
    refresh_s: float = 10.0
    """How often each peer publishes its record and reads the roster."""
    save_every_s: float = 300.0
    moves: bool = False
    """Replicas go to another stage when they are needed there."""
    choose_stages: bool = False
    """Planned peers choose their stages as they join, and know their lines; otherwise each is told its stage."""
    duration_s: float = 86_400.0
    """Peers that are still at work after so long are asked to leave."""
    impatient: bool = True
    """False: no deadline on any exchange or microbatch, so that no timeout hides a wait that would never end."""


class NetworkConfig(NetworkConditions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The lines. Shares are of messages; rates hold for every peer, None is without limit."""

    up_mbit_per_s: float | None = None
    down_mbit_per_s: float | None = None
    dials_only: float = 0.0
    """Share of peers that others cannot dial."""
    microbatch_bytes: int = 2**18
    """Of activations, without a run file."""
    weights_bytes: int = 2**22
    """Of a stage, without a run file."""


class DevicesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The devices. `slowness`: times as long as a device of speed 1, handed out to a stage's replicas in turn."""

    forward_s: float = 0.05
    """Of a microbatch at one stage, without `tflops`; backward takes twice that."""
    tflops: float | None = None
    """Speed 1 in 10^12 floating-point operations a second, as reached in training; needs a run file."""
    memory_gib: float | None = None
    """Of a GPU, with a run file: graphs that it does not hold are computed again. None: it holds all."""
    step_s: float = 0.0
    slowness: tuple[float, ...] = (1.0,)
    stutter_share: float = 0.0
    stutter_pause_s: float = 0.0


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that a simulation follows from."""

    name: str = "swarm"
    seed: int = 0
    swarm: SwarmConfig = SwarmConfig()
    network: NetworkConfig = NetworkConfig()
    devices: DevicesConfig = DevicesConfig()
    fault: tuple[Fault, ...] = ()


class _Problem(NamedTuple):
    field: str
    why: str
    hint: str


def peer_name(stage: int, replica: int) -> str:
    """Return the name of a planned peer: s0r1 is the second replica of stage 0."""
    return f"s{stage}r{replica}"


def load_scenario(path: Path) -> Scenario:
    """Read a scenario file, or a run file: then it is a few rounds of that run on the default network and devices.

    Raises `UserError` (Exit.CONFIG) naming the line and the field at fault.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(SCENARIO_BYTES + 1)
        text = raw.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        hint = "check the path; docs/simulator.md shows a scenario"
        raise config_error(f"The scenario {path} cannot be read.", why, hint) from error
    if len(raw) > SCENARIO_BYTES:
        raise config_error(
            f"{path} is too long for a scenario.", f"it has more than {SCENARIO_BYTES} bytes", "shorten it"
        )
    if _RUN_SECTION.search(text):
        return Scenario(name=path.stem, swarm=SwarmConfig(run=str(path), rounds=ROUNDS_OF_A_RUN))
    scenario = decode_scenario(text, str(path))
    if scenario.swarm.run is None:
        return scenario
    run = str(path.parent / Path(scenario.swarm.run).expanduser())
    return msgspec.structs.replace(scenario, swarm=msgspec.structs.replace(scenario.swarm, run=run))


def decode_scenario(text: str, origin: str) -> Scenario:
    """Decode the text of a scenario; raise `UserError` as `load_scenario` does. Does not look at the run file."""
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise config_error(
            f"{origin} is not valid TOML.", str(error), "correct that line; see https://toml.io"
        ) from error
    faults_found = table.pop("fault", [])
    scenario = _convert(table, Scenario, text, origin, "")
    if not isinstance(faults_found, list):
        where = line_of(text, "fault", None)
        raise config_error(
            f"{origin}{where}: fault is no list.", "each fault is a section of its own", "write [[fault]] above it"
        )
    kinds = [_fault(found, text, origin, number) for number, found in enumerate(faults_found)]
    scenario = msgspec.structs.replace(scenario, fault=tuple(kinds))
    for problem in problems(scenario):
        where = line_of(text, problem.field)
        raise config_error(f"{origin}{where}: {short(problem.field)} is refused.", problem.why, problem.hint)
    return scenario


def _convert(table: object, kind: type[T], text: str, origin: str, section: str) -> T:
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        inside = str(error).partition(" - at ")[2].strip("`").removeprefix("$").removeprefix(".")
        where = line_of(text, f"{section}.{inside}", _unknown(str(error)))
        raise misfit(str(error), kind, f"{origin}{where}") from error


def _fault(found: object, text: str, origin: str, number: int) -> Fault:
    """Decode one fault as the kind that it says it is."""
    word = found.get("kind") if isinstance(found, dict) else None
    if not isinstance(found, dict) or word not in faults.KINDS:
        where = line_of(text, f"fault[{number}].kind")
        what = f"{origin}{where}: {'this fault has no kind' if word is None else f'no fault is called {word!r}'}."
        raise config_error(short(what), "the kind says what happens", f"one of {', '.join(faults.KINDS)}")
    fault: Fault = _convert(found, faults.KINDS[word], text, origin, f"fault[{number}]")
    return fault


def problems(scenario: Scenario) -> Iterator[_Problem]:
    """Yield what a type cannot state and is wrong all the same. Peers are checked where the scenario says how many."""
    if not 0 <= scenario.seed < 2**63:
        yield _Problem("seed", f"{scenario.seed} is no seed", "a whole number from 0 on")
    if not scenario.name.strip():
        yield _Problem("name", "it is empty", 'a name such as "two sites", or leave it out')
    for section in ("swarm", "network", "devices"):
        for name, value in msgspec.structs.asdict(getattr(scenario, section)).items():
            yield from _number(f"{section}.{name}", value)
    slowness = scenario.devices.slowness
    if not slowness or not all(faults.TINY <= each <= faults.MOST for each in slowness):
        yield _Problem("devices.slowness", "it needs one number or more, all above 0", "for example [1.0, 2.0]")
    latency = scenario.network.latency
    for name in ("mean_s", "std_s"):
        yield from _number(f"network.latency.{name}", getattr(latency, name))
    if latency.std_s > 0.0 == latency.mean_s:
        hint = "for example {mean_s = 0.05, std_s = 0.01}"
        yield _Problem("network.latency.std_s", "a latency of 0 cannot vary", hint)
    swarm = scenario.swarm
    for name in ("inner_steps_per_round", "late_inner_steps_per_round"):
        per_round = getattr(swarm, name)
        if swarm.overlap_steps is not None and per_round is not None and swarm.overlap_steps >= max(2, per_round):
            why = f"{swarm.overlap_steps} steps do not fit between two rounds that are {per_round} apart"
            yield _Problem("swarm.overlap_steps", why, f"less than swarm.{name}, which is {per_round}")
    if scenario.devices.tflops is not None and scenario.swarm.run is None:
        yield _Problem("devices.tflops", "it needs a run file to know the work", "give swarm.run, or devices.forward_s")
    if scenario.devices.memory_gib is not None and scenario.swarm.run is None:
        yield _Problem("devices.memory_gib", "it needs a run file to know the stages", "give swarm.run")
    if swarm.line_share == 0.0:
        yield _Problem("swarm.line_share", "rounds need a part of the line", "for example 0.2")
    yield from _faults(scenario)


_SHARES = ("line_share", "loss", "late", "duplicate", "dials_only", "stutter_share")
_MAY_BE_ZERO = (
    "mean_s",
    "std_s",
    "late_s",
    "roster_lag_s",
    "step_s",
    "overlap_steps",
    "stutter_pause_s",
)


def _number(field: str, value: object) -> Iterator[_Problem]:
    name = field.rpartition(".")[2]
    if not isinstance(value, int | float) or isinstance(value, bool):
        return
    if name in _SHARES:
        if not 0.0 <= value < 1.0:
            yield _Problem(field, f"{value} is no share", "a number from 0 to less than 1")
    elif not (0.0 if name in _MAY_BE_ZERO else faults.TINY) <= value <= faults.MOST:
        why = f"{short(str(value))} is {'negative' if value < 0 else 'no amount'}"
        yield _Problem(field, why, f"a number above 0, and {faults.MOST:.0e} at most")


def _faults(scenario: Scenario) -> Iterator[_Problem]:
    swarm = scenario.swarm
    known, first = None, dict[str, None]()
    if swarm.stages is not None and swarm.replicas is not None:
        known = planned(swarm.stages, swarm.replicas)
        first = dict.fromkeys(known)
        if len(known) > MOST_PEERS:
            yield _Problem("swarm.replicas", f"{len(known)} peers are too many", f"{MOST_PEERS} at most")
        known += [fault.peer for fault in scenario.fault if isinstance(fault, Join)]
    for number, fault in enumerate(scenario.fault):
        for field, why in faults.problems(fault):
            yield _Problem(f"fault[{number}].{field}", why, "see docs/simulator.md for what each kind of fault takes")
        field = f"fault[{number}].{'groups' if isinstance(fault, faults.Partition) else 'peer'}"
        for peer in faults.peers_of(fault):
            if not _NAME.fullmatch(peer):
                yield _Problem(field, f"{short(peer)!r} is no name", "ASCII letters, digits, - and _")
            elif known is not None and peer not in known:
                hint = f"planned peers are {known[0]} to {known[-1]}; others come by a fault of the kind join"
                yield _Problem(field, f"there is no peer {short(peer)}", hint)
        if isinstance(fault, Join) and fault.peer in first:
            hint = "another name; a fault of the kind restart brings a peer back"
            yield _Problem(field, f"{fault.peer} is there from the start", hint)
        if isinstance(fault, Join) and swarm.stages and fault.stage is not None and fault.stage >= swarm.stages:
            yield _Problem(f"fault[{number}].stage", f"there is no stage {fault.stage}", f"0 to {swarm.stages - 1}")


def planned(stages: int, replicas: int) -> list[str]:
    """Return the names of the planned peers, stage by stage."""
    return [peer_name(stage, replica) for stage in range(stages) for replica in range(replicas)]


def unreachable(names: Sequence[str], share: float) -> list[str]:
    """Return the share of peers that others cannot dial: spread over the stages, the same ones each time."""
    return [names[int(number / share) % len(names)] for number in range(int(share * len(names) + 0.5))]


def _unknown(complaint: str) -> str | None:
    found = re.search(r"unknown field `(.*?)`( - at |$)", complaint, re.DOTALL)
    return found[1] if found else None


def line_of(text: str, where: str, key: str | None = None) -> str:
    """Return ", line N" for a field such as network.loss or fault[2].peer; nothing where the text has no such line.

    `key`: a name inside `where`, if that is what is wrong.
    """
    path = [part for part in re.split(r"[.$\[\]]+", where) if part] + ([key] if key else [])
    if not path:
        return ""
    number = int(path.pop(1)) if len(path) > 1 and path[1].isdigit() else 0
    lines = text.splitlines()
    # The section that says most of the path: [network.latency] before [network].
    for depth in range(len(path), 0, -1):
        begins = [place for place, line in enumerate(lines) if _section(line) == path[:depth]]
        if number < len(begins):
            begin = begins[number]
            return _among(lines, begin + 1, path[depth:]) or f", line {begin + 1}"
    return _among(lines, 0, path)


def _section(line: str) -> list[str] | None:
    """Return the names in a section's heading; None for any other line."""
    found = _HEADING.match(line)
    return [name.strip() for name in found[1].split(".")] if found else None


def _among(lines: list[str], begin: int, path: list[str]) -> str:
    """Return the line that gives most of `path`, from line number `begin` to the next section."""
    end = next((place for place in range(begin, len(lines)) if _section(lines[place])), len(lines))
    for depth in range(len(path), 0, -1):
        dotted = r"\s*\.\s*".join(rf"[\"']?{re.escape(name)}[\"']?" for name in path[:depth])
        for place in range(begin, end):
            if re.match(rf"\s*{dotted}\s*[=.]", lines[place]):
                return f", line {place + 1}"
    return ""
