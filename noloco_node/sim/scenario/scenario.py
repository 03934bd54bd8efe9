"""A scenario: which swarm to simulate, on what machines and lines, and what happens to it; its file.

A scenario may name a run file: model, cut and steps are then those of the run, a pass costs what its operations take
on a device of `tflops`, and messages weigh what they would; only the arithmetic is that of a quadratic model. Its
section `swarm` may change any field of the sections `pipeline`, `inner` and `outer` of the run, and
`evaluate_every_rounds` of its data. Without a run file the swarm is a small one of quadratic models, and the scenario
itself says what passes cost and messages weigh.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gossip.settings import OuterConfig
from noloco_node.errors import config_error, one_line
from noloco_node.run.config import DataConfig, PipelineConfig
from noloco_node.run.fields import Problem, converted, fields_of, out_of_bounds, refuse, short, toml_table
from noloco_node.sim.network.link_model import MOST, NetworkConditions, NotNegative, Positive, PositiveCount, Share
from noloco_node.sim.scenario import faults
from noloco_node.sim.scenario.faults import Fault, Join
from noloco_node.storage.home import typed
from pipeline.inner_step import InnerConfig

SCENARIO_BYTES = 2**20
MOST_PEERS = 20_000
MOST_SPREAD = 1e6
"""Times its mean, what a latency varies by at most: draws of more would be no numbers."""
ROUNDS_OF_A_RUN = 5
"""That are simulated of a run file by itself."""
_RUN_SECTION = re.compile(r"(?m)^\s*\[model(\.sizes)?\]")
"""Sections that every run file has, and no scenario."""
_HEADING = re.compile(r"\s*\[{1,2}([A-Za-z0-9_. -]+)\]{1,2}\s*(?:#.*)?$")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")

RUN_FIELDS = {
    field.name: (section, field.type)
    for section, kind in (("pipeline", PipelineConfig), ("inner", InnerConfig), ("outer", OuterConfig))
    for field in fields_of(kind)
} | {field.name: ("data", field.type) for field in fields_of(DataConfig) if field.name == "evaluate_every_rounds"}
"""The section and the type of each field of a run file that a scenario may change; `codec` is the rounds'."""


class SimulationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of a simulated swarm beside the fields of a run file."""

    run: str | None = None
    """Path of a run file, relative to the scenario's directory."""
    rounds: PositiveCount | None = None
    """Gossip rounds that a replica opens, when as many peers come as planned; sets the token budget."""
    model: Literal["quadratic", "wide quadratic", "transformer"] = "quadratic"
    """quadratic model: costs next to nothing. wide quadratic model: has weights enough for partners to be judged by
    them.

    transformer: the run's model is really trained, on its real text.
    """
    refresh_s: Annotated[float, Meta(ge=0.001, le=MOST)] = 10.0
    """How often each peer publishes its record and reads the roster."""
    save_every_s: Annotated[float, Meta(ge=0.001, le=MOST)] = 300.0
    moves: bool = False
    """Replicas go to another stage when they are needed there."""
    choose_stages: bool = False
    """Planned peers choose their stages as they join, and know their lines; otherwise each is told its stage."""
    duration_s: Positive = 86_400.0
    """Peers that are still at work after so long are asked to leave."""
    impatient: bool = True
    """False: no deadline on any exchange or microbatch, so that no timeout hides a wait that would never end."""


if TYPE_CHECKING:

    class SwarmConfig(SimulationConfig, frozen=True, kw_only=True):
        """The section `swarm`: `SimulationConfig`, and every one of `RUN_FIELDS`, None where the run's value stays."""

        def __init__(self, **fields: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

else:
    SwarmConfig = msgspec.defstruct(
        "SwarmConfig",
        [(name, kind | None, None) for name, (_, kind) in RUN_FIELDS.items()],
        bases=(SimulationConfig,),
        module=__name__,
        frozen=True,
        kw_only=True,
        forbid_unknown_fields=True,
    )


class NetworkConfig(NetworkConditions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The lines. Shares are of messages; rates hold for every peer, None is without limit."""

    up_mbit_per_s: Positive | None = None
    down_mbit_per_s: Positive | None = None
    dials_only: Share = 0.0
    """Share of peers that others cannot dial."""
    microbatch_bytes: PositiveCount = 2**18
    """Of activations, without a run file."""
    weights_bytes: PositiveCount = 2**22
    """Of a stage, without a run file."""


class DevicesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The devices. `slowness`: times as long as a device of speed 1, handed out to a stage's replicas in turn."""

    forward_s: Positive = 0.05
    """Of a microbatch at one stage, without `tflops`; a backward pass takes twice that."""
    tflops: Positive | None = None
    """Speed 1 in 10^12 floating-point operations a second, as reached in training; needs a run file."""
    memory_gib: Positive | None = None
    """Of a GPU, with a run file: graphs that it does not hold are computed again. None: it holds all."""
    step_s: NotNegative = 0.0
    slowness: tuple[Positive, ...] = (1.0,)
    stutter_share: Share = 0.0
    stutter_pause_s: NotNegative = 0.0


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that a simulation follows from."""

    name: str = "swarm"
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    swarm: SwarmConfig = SwarmConfig()
    network: NetworkConfig = NetworkConfig()
    devices: DevicesConfig = DevicesConfig()
    fault: tuple[Fault, ...] = ()


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
        if len(raw) > SCENARIO_BYTES:
            why = f"it has more than {SCENARIO_BYTES} bytes"
            raise config_error(f"{path} is too long for a scenario.", why, "shorten it")
        text = raw.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        hint = "check the path; docs/simulator.md shows a scenario"
        raise config_error(f"The scenario {path} cannot be read.", why, hint) from error
    if _RUN_SECTION.search(text):
        return Scenario(name=one_line(path.stem), swarm=SwarmConfig(run=str(path), rounds=ROUNDS_OF_A_RUN))
    scenario = decode_scenario(text, str(path))
    if scenario.swarm.run is None:
        return scenario
    run = str(path.parent / typed(scenario.swarm.run))
    return msgspec.structs.replace(scenario, swarm=msgspec.structs.replace(scenario.swarm, run=run))


def decode_scenario(text: str, origin: str) -> Scenario:
    """Decode the text of a scenario; raise `UserError` as `load_scenario` does. Does not look at the run file."""
    table = toml_table(text, origin)
    found = table.pop("fault", [])
    scenario = converted(table, Scenario, origin, partial(line_of, text))
    if not isinstance(found, list):
        where = line_of(text, "fault")
        raise config_error(
            f"{origin}{where}: fault is no list.", "each fault is a section of its own", "write [[fault]] above it"
        )
    each = tuple(_fault(fault, text, origin, number) for number, fault in enumerate(found))
    scenario = msgspec.structs.replace(scenario, fault=each)
    refuse(problems(scenario), origin, partial(line_of, text))
    return scenario


def _fault(found: object, text: str, origin: str, number: int) -> Fault:
    word = found.get("kind") if isinstance(found, dict) else None
    kind = faults.KINDS.get(str(word))
    if kind is None:
        where = line_of(text, f"fault[{number}].kind")
        what = f"{origin}{where}: {'this fault has no kind' if word is None else f'no fault is called {word!r}'}."
        raise config_error(short(what), "the kind says what happens", f"one of {', '.join(faults.KINDS)}")
    return converted(found, kind, origin, partial(line_of, text), f"fault[{number}]")


def problems(scenario: Scenario) -> Iterator[Problem]:
    """Yield what no type states and is wrong all the same. Peers are checked where the scenario says how many."""
    swarm, devices, latency = scenario.swarm, scenario.devices, scenario.network.latency
    yield from out_of_bounds(msgspec.to_builtins(msgspec.structs.replace(scenario, fault=())), Scenario)
    if not scenario.name.strip() or not scenario.name.isprintable():
        why = "it is empty, or cannot be printed in a line"
        yield Problem("name", repr(scenario.name), why, 'a name such as "two sites", or leave it out')
    if not devices.slowness:
        yield Problem("devices.slowness", "[]", "it needs one number or more, all above 0", "for example [1.0, 2.0]")
    if latency.std_s > MOST_SPREAD * latency.mean_s:
        why, hint = f"a latency of {latency.mean_s:g} s cannot vary so", "for example {mean_s = 0.05, std_s = 0.01}"
        yield Problem("network.latency.std_s", f"{latency.std_s}", why, hint)
    for name in ("inner_steps_per_round", "late_inner_steps_per_round"):
        overlap, per_round = swarm.overlap_steps, getattr(swarm, name)
        if overlap is not None and per_round is not None and overlap >= max(2, per_round):
            why = f"{overlap} steps do not fit between two rounds that are {per_round} apart"
            yield Problem("swarm.overlap_steps", f"{overlap}", why, f"less than swarm.{name}, which is {per_round}")
    for name, instead in (("tflops", "give swarm.run, or devices.forward_s"), ("memory_gib", "give swarm.run")):
        if (value := getattr(devices, name)) is not None and swarm.run is None:
            yield Problem(f"devices.{name}", f"{value}", "it needs a run file to know the work of the stages", instead)
    yield from _fault_problems(scenario)


def _fault_problems(scenario: Scenario) -> Iterator[Problem]:
    swarm = scenario.swarm
    known, first = None, dict[str, None]()
    if swarm.stages is not None and swarm.replicas is not None:
        if swarm.stages * swarm.replicas > MOST_PEERS:
            why = f"{swarm.stages * swarm.replicas} peers are too many"
            yield Problem("swarm.replicas", f"{swarm.replicas}", why, f"{MOST_PEERS} at most")
            return
        known = planned(swarm.stages, swarm.replicas)
        first = dict.fromkeys(known)
        known += [fault.peer for fault in scenario.fault if isinstance(fault, Join)]
    for number, fault in enumerate(scenario.fault):
        place = f"fault[{number}]"
        for field, why in faults.problems(fault):
            value = f"{getattr(fault, field)}"
            yield Problem(f"{place}.{field}", value, why, "see docs/simulator.md for what each kind of fault takes")
        field = f"{place}.{'groups' if isinstance(fault, faults.Partition) else 'peer'}"
        for peer in faults.peers_of(fault):
            if not _NAME.fullmatch(peer):
                yield Problem(field, repr(peer), "it is no name", "ASCII letters, digits, - and _")
            elif known is not None and peer not in known:
                hint = f"planned peers are {known[0]} to {known[-1]}; others come by a fault of the kind join"
                yield Problem(field, repr(peer), f"there is no peer {short(peer)}", hint)
        if isinstance(fault, Join) and fault.peer in first:
            hint = "another name; a fault of the kind restart brings a peer back"
            yield Problem(field, repr(fault.peer), f"{fault.peer} is there from the start", hint)
        if isinstance(fault, Join) and swarm.stages and fault.stage is not None and fault.stage >= swarm.stages:
            why = f"there is no stage {fault.stage}"
            yield Problem(f"{place}.stage", f"{fault.stage}", why, f"0 to {swarm.stages - 1}")


def planned(stages: int, replicas: int) -> list[str]:
    return [peer_name(stage, replica) for stage in range(stages) for replica in range(replicas)]


def unreachable(names: Sequence[str], share: float) -> list[str]:
    """Return the share of peers that others cannot dial: spread over the stages, the same ones each time."""
    return [names[int(number / share) % len(names)] for number in range(int(share * len(names) + 0.5))]


def line_of(text: str, where: str) -> str:
    """Return ", line N" for a field such as network.loss or fault[2].peer; nothing where the text has no such line."""
    path = [part for part in re.split(r"[.$\[\]]+", where) if part]
    if not path:
        return ""
    number = int(path.pop(1)) if len(path) > 1 and path[1].isdigit() else 0
    lines = text.split("\n")
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
