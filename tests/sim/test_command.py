"""`noloco-node simulate`: the figures fit together, the sentence is right, the output is what was asked for."""

import json
import os
import signal
import struct
from pathlib import Path

import msgspec
import pytest
from repository import ROOT
from typer.testing import CliRunner

from noloco_node.cli.main import app
from noloco_node.errors import Exit, UserError
from noloco_node.run.presets import run_text
from noloco_node.sim.report.collector import EventCollector
from noloco_node.sim.report.command import SimulationRequest, complete, put_together, simulate_scenario
from noloco_node.sim.report.figures import COMPUTING, MOMENTS, PeerSpread, Report, make_report
from noloco_node.sim.report.plot import picture
from noloco_node.sim.report.text import COLUMNS, WIDTH, bottleneck, heading, lines
from noloco_node.sim.report.watchers import done_share, progress_line
from noloco_node.sim.scenario.scenario import Scenario, decode_scenario, load_scenario
from noloco_node.sim.scenario.setup import build_setup
from noloco_node.sim.world import Watcher, World, simulate

SCENARIOS = ROOT / "docs" / "scenarios"
SMALL = "[swarm]\nstages = 2\nreplicas = 2\nrounds = 3\nrefresh_s = 2.0\n"
NINE = SMALL.replace("stages = 2", "stages = 3").replace("replicas = 2", "replicas = 3")


def simulated(text: str) -> Report:
    tallies: list[EventCollector] = []

    def watch(world: World) -> list[EventCollector]:
        tallies.append(EventCollector(world))
        return tallies

    return simulate(build_setup(decode_scenario(text, "x")), watch, lambda world: make_report(world, tallies[0]))


def faults(*each: str) -> str:
    return "".join(f"[[fault]]\n{one}\n" for one in each)


@pytest.fixture(scope="module")
def calm() -> Report:
    return simulated(SMALL)


@pytest.fixture(scope="module")
def troubled() -> Report:
    return simulated(
        NINE
        + "[network]\nloss = 0.01\nup_mbit_per_s = 50.0\n"
        + faults(
            "kind = 'crash'\nat_s = 6.0\npeer = 's1r1'",
            "kind = 'restart'\nat_s = 20.0\npeer = 's1r1'",
            "kind = 'leave'\nat_s = 10.0\npeer = 's0r2'",
        )
    )


def test_peers_that_choose_their_stages_share_them_out() -> None:
    report = simulated(NINE + "choose_stages = true\n")
    assert [stage.peers for stage in report.stages] == [3, 3, 3]
    assert report.tokens > 0


@pytest.mark.parametrize("name", ["calm", "troubled"])
def test_the_figures_fit_together(name: str, request: pytest.FixtureRequest) -> None:
    report: Report = request.getfixturevalue(name)
    assert report.tokens == report.microbatches * report.microbatch_tokens > 0
    assert report.tokens_per_s == pytest.approx(report.tokens / report.training_s)
    assert 0.0 < report.training_s <= report.virtual_s
    for stage in report.stages:
        assert 0.0 < stage.devices.least <= stage.devices.mean <= stage.devices.most <= 1.0
        assert sum(stage.time.values()) == pytest.approx(1.0)
        assert min(stage.time.values()) >= 0.0
        assert stage.time[COMPUTING] == stage.devices.mean
        assert stage.devices.mean <= stage.work <= 1.0
        assert stage.met > 0
    assert sum(report.microbatch_bytes.values()) == pytest.approx(report.sent_bytes["microbatch"], rel=0.01)
    assert 1 < len(report.course) <= MOMENTS
    times_s = [moment.until_s for moment in report.course]
    assert times_s == sorted(times_s)
    assert times_s[-1] == report.virtual_s
    spans_s = [now - then for then, now in zip([0.0, *times_s], times_s, strict=False)]
    trained = sum(moment.tokens_per_s * span_s for moment, span_s in zip(report.course, spans_s, strict=True))
    assert trained == pytest.approx(report.tokens)
    assert report.loss_first is not None
    assert report.loss_last is not None
    assert report.loss_last < report.loss_first


def test_a_calm_swarm_loses_nothing(calm: Report) -> None:
    stages = calm.stages
    # Each microbatch is in a step of each stage, or in a last window that was not filled.
    used = sum(stage.inner_steps for stage in stages) * calm.window + calm.discarded
    assert used == calm.microbatches * len(stages)
    assert not any(calm.retried.values()) or set(calm.retried) == {"refused_full"}
    assert calm.counted_twice == calm.true_suspects == calm.false_suspects == calm.exchanges_lost == 0
    assert all(stage.up is None and stage.down is None for stage in stages)
    assert all(stage.sent_bytes == sum(calm.sent_bytes.values()) / 2 for stage in stages) or len(stages) != 2
    assert "joining" not in {cause for stage in stages for cause, share in stage.time.items() if share > 0.2}


def test_trouble_is_counted(troubled: Report) -> None:
    assert troubled.retried["lost_broken"] > 0
    assert troubled.true_suspects > 0
    assert [happened.at_s for happened in troubled.happened] == [6.0, 10.0, 20.0]
    assert troubled.stages[1].peers == 3
    for stage in troubled.stages:
        assert stage.up is not None
        assert stage.down is None
        assert 0.0 < stage.up.least <= stage.up.mean <= stage.up.most <= 1.0
    assert troubled.sent_bytes["state"] > 0


def test_the_same_seed_gives_the_same_report(calm: Report) -> None:
    assert msgspec.json.encode(simulated(SMALL)) == msgspec.json.encode(calm)
    # Not another swarm's: a seed decides who meets whom.
    assert simulated("seed = 1\n" + NINE).digest != simulated(NINE).digest


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[network]\nlatency = {mean_s = 0.5}\n", "too small for the latency"),
        (
            "inner_steps_per_round = 2\nmicrobatches_per_step = 16\n"
            "[network]\nup_mbit_per_s = 20.0\n[devices]\nforward_s = 0.01\n",
            "uplinks of stage 1",
        ),
        ("[network]\nup_mbit_per_s = 40.0\nweights_bytes = 1000\n[devices]\nforward_s = 0.02\n", "too slow for the"),
        ("[network]\nlatency = {mean_s = 0.0}\n", "too small for so many stages"),
    ],
)
def test_the_sentence_tells_latency_from_lines(text: str, sentence: str) -> None:
    assert sentence in bottleneck(simulated(NINE + text))


def test_who_is_dead_is_no_bottleneck_but_out_of_reach() -> None:
    """A stage that died was busy for all of its short session."""
    gone = faults(*(f"kind = 'crash'\nat_s = 6.0\npeer = 's1r{replica}'" for replica in (0, 1)))
    sentence = bottleneck(simulated(SMALL.replace("[swarm]", "[swarm]\nduration_s = 90.0") + gone))
    assert sentence.startswith("Stage 1 was out of reach"), sentence
    early = simulated(SMALL.replace("[swarm]", "[swarm]\nduration_s = 60.0") + gone.replace("6.0", "0.0"))
    assert early.microbatches == 0
    assert (
        bottleneck(early) == "Nothing was trained: most peers looked for a replica of the next stage, and reached none."
    )
    assert picture(early).startswith(b"\x89PNG")


def test_blocking_rounds_are_the_bottleneck_where_they_are() -> None:
    report = simulated(
        SMALL.replace("replicas = 2", "replicas = 4")
        + "blocking = true\ncodec = 'float32'\ninner_steps_per_round = 1\n"
        + "[network]\nweights_bytes = 20000000\nup_mbit_per_s = 50.0\n"
    )
    assert bottleneck(report).startswith("Blocking rounds are the bottleneck")


def test_the_way_of_a_microbatch_explains_the_speed() -> None:
    """Window by window, a stage works for a window and waits for the way: the sentence's own figures say how long."""
    text = "[swarm]\nstages = 3\nreplicas = 1\nrounds = 4\nmicrobatches_per_step = 1\n"
    report = simulated(text + "[network]\nlatency = {mean_s = 1.0}\n")
    sentence = "0.15 s of work at a stage; the way of one through the others adds 0.3 s of passes, 4 s of latency."
    assert sentence in bottleneck(report)
    assert report.training_s / report.microbatches == pytest.approx(0.15 + 0.3 + 4.0, rel=0.06)


def test_a_wide_window_keeps_devices_busy() -> None:
    wide = simulated(SMALL + "microbatches_per_step = 16\n[network]\nlatency = {mean_s = 0.001}\n")
    assert "devices are the limit" in bottleneck(wide)


def test_nobody_is_innocent_who_was_gone() -> None:
    """One peer is silent for a while and nothing else goes wrong: every suspicion is of it, and true."""
    silent = faults("kind = 'silence'\nat_s = 5.0\nfor_s = 60.0\npeer = 's1r1'")
    report = simulated(SMALL.replace("rounds = 3", "rounds = 6") + silent)
    assert report.true_suspects > 0
    assert report.false_suspects == 0
    # And where nobody is ever gone, a dial that is lost accuses an innocent one.
    report = simulated(SMALL + "[network]\nloss = 0.2\n")
    assert report.true_suspects == 0
    assert report.false_suspects > 0


def test_deadlines_are_those_of_the_weights_that_a_bowl_stands_for() -> None:
    """A gigabyte takes 80 s on these lines: an exchange must not be given up after a quadratic model's minute."""
    report = simulated(
        "[swarm]\nstages = 1\nreplicas = 2\nrounds = 2\ninner_steps_per_round = 200\n"
        "codec = 'float32'\n"
        "[network]\nup_mbit_per_s = 100.0\nweights_bytes = 1000000000\n"
    )
    assert report.stages[0].met >= 2
    assert report.sent_bytes["gossip"] >= 2 * 10**9


def test_looking_on_changes_nothing(calm: Report) -> None:
    assert simulate(build_setup(decode_scenario(SMALL, "x")), lambda _: [], World.digest) == calm.digest


def test_the_text_says_what_matters(calm: Report, troubled: Report) -> None:
    assert max(map(len, (*lines(troubled), *lines(calm)))) <= WIDTH
    text = " ".join(" ".join(lines(troubled)).split())
    assert text.startswith("swarm: a swarm of quadratic models, 3 stages of 3 replicas, seed 0.")
    assert bottleneck(troubled) in text
    assert f"{troubled.tokens:,} tokens of {troubled.budget_tokens:,} planned" in text
    assert "3 of 3 happened" in text
    assert "crash s1r1" in text
    assert troubled.digest in text
    assert "faults" not in "\n".join(lines(calm))


def test_a_swarm_that_waits_for_everything_fits_the_screen_too(calm: Report) -> None:
    time, all_of_it = dict.fromkeys(COLUMNS, 1.0), PeerSpread(mean=1.0, least=1.0, most=1.0)
    worst = {"time": time, "devices": all_of_it, "up": all_of_it, "down": all_of_it}
    stages = tuple(msgspec.structs.replace(each, **worst) for each in calm.stages)
    text = lines(msgspec.structs.replace(calm, stages=stages, tokens=10**15, budget_tokens=10**15))
    assert max(map(len, text)) <= WIDTH
    assert all(word in "\n".join(text) for each in COLUMNS.values() for word in each.split())


def test_a_run_file_is_named_in_the_first_line(calm: Report) -> None:
    report = msgspec.structs.replace(calm, parameters=6_738_415_616)
    first, second = heading(report)
    assert "6.74 billion parameters in 2 stages of 2 replicas" in first
    assert "only the arithmetic is replaced" in second


@pytest.mark.parametrize("name", ["calm", "troubled"])
def test_the_picture_is_one(name: str, request: pytest.FixtureRequest) -> None:
    png = picture(request.getfixturevalue(name))
    assert png.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", png[16:24])
    assert width == 1650
    assert 1000 < height < 2000


def test_a_swarm_of_many_stages_is_drawn(calm: Report) -> None:
    many = msgspec.structs.replace(
        calm,
        scenario=msgspec.structs.replace(calm.scenario, name="$\\frac$"),
        stages=calm.stages * 20,
        course=tuple(
            msgspec.structs.replace(moment, devices=moment.devices * 20, gap=moment.gap * 20) for moment in calm.course
        ),
    )
    assert picture(many).startswith(b"\x89PNG")


def test_a_swarm_that_ends_at_once_is_drawn() -> None:
    swarm = "[swarm]\nstages = 1\nreplicas = 1\n"
    assert picture(simulated(swarm + faults("kind = 'crash'\nat_s = 0\npeer = 's0r0'"))).startswith(b"\x89PNG")


def test_progress_is_said_in_a_line() -> None:
    assert progress_line(0.42, 75.0, 2.0, 3.0) == "42%, virtual time 1:15, 37.5 times real time, about 0:03 left"
    assert progress_line(0.0, 0.0, 0.0, None) == "0%, virtual time 0:00, just begun"


def test_the_share_done_never_goes_back() -> None:
    shares: list[float] = []

    class Looks(Watcher):
        def __init__(self, world: World) -> None:
            self.world = world

        def look(self) -> None:
            shares.append(done_share(self.world))

    simulate(build_setup(decode_scenario(SMALL, "x")), lambda world: [Looks(world)], lambda _: None)
    assert shares == sorted(shares)
    assert 0.0 < shares[0] < 0.5 < shares[-1] <= 1.0


# The command.


def run(*arguments: str) -> tuple[int, str]:
    """Return the exit code of a command and what it printed, or said of what is wrong."""
    result = CliRunner().invoke(app, ["simulate", *arguments])
    if isinstance(result.exception, UserError):
        return result.exception.code, str(result.exception)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


def test_json_is_all_that_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calm: Report) -> None:
    monkeypatch.chdir(tmp_path)
    code, text = run("--peers", "4", "--stages", "2", "--rounds", "3", "--seed", "5", "--json")
    assert code == 0
    found = json.loads(text)
    assert found["scenario"]["seed"] == 5
    assert found["scenario"]["swarm"]["replicas"] == 2
    assert len(found["digest"]) == 64
    assert found["version"]
    assert list(tmp_path.iterdir()) == []
    again = json.loads(run("--peers", "4", "--stages", "2", "--rounds", "3", "--seed", "5", "--json")[1])
    assert {**found, "real_s": 0} == {**again, "real_s": 0}


def test_a_scenario_is_read_from_a_pipe() -> None:
    read, write = os.pipe()
    os.write(write, b"[swarm]\nstages = 3\nreplicas = 1\nrounds = 1\n")
    os.close(write)
    assert len(json.loads(run(f"/dev/fd/{read}", "--json")[1])["stages"]) == 3
    os.close(read)


def test_files_lie_where_they_were_asked_for(tmp_path: Path) -> None:
    file, out = tmp_path / "swarm.toml", tmp_path / "deep" / "out"
    file.write_text(SMALL + faults("kind = 'crash'\nat_s = 5.0\npeer = 's1r1'"))
    code, text = run(str(file), "--out", str(out), "--trace")
    assert code == 0
    assert {path.name for path in out.iterdir()} == {"swarm.png", "report.txt", "report.json", "events.jsonl"}
    assert (out / "report.txt").read_text() in text + "\n"
    report = msgspec.json.decode((out / "report.json").read_bytes(), type=Report)
    assert bottleneck(report) in " ".join(text.split())
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    assert [event["at"] for event in events] == sorted(event["at"] for event in events)
    assert [event["peer"] for event in events if event["event"] == "fault"] == ["s1r1"]
    steps = [event for event in events if event["event"] == "inner_step"]
    assert len(steps) == sum(stage.inner_steps for stage in report.stages)
    assert not any(event["node"] == "s1r1" and event["at"] > 5.0 for event in steps)


def test_flags_override_the_file(tmp_path: Path) -> None:
    file = tmp_path / "swarm.toml"
    file.write_text("seed = 3\n" + SMALL)
    swarm = put_together(file, SimulationRequest(peers=9, stages=3, rounds=7)).swarm
    assert (swarm.stages, swarm.replicas, swarm.rounds, swarm.refresh_s) == (3, 3, 7, 2.0)
    assert put_together(file, SimulationRequest()).seed == 3
    assert put_together(file, SimulationRequest(seed=0)).seed == 0
    assert put_together(file, SimulationRequest(peers=6)).swarm.replicas == 3
    assert put_together(None, SimulationRequest()) == Scenario()
    # Quadratic models need no layers, so that there may be any number of them.
    assert len(complete(put_together(None, SimulationRequest(peers=24, stages=12)), None).peers) == 24


@pytest.mark.parametrize(
    ("text", "arguments", "code", "words"),
    [
        (None, ["nowhere.toml"], Exit.CONFIG, ["nowhere.toml", "No such file"]),
        ("[swarm]\nreplica = 2\n", ["FILE"], Exit.CONFIG, ["line 2", "did you mean replicas?"]),
        ("[swarm]\nrun = 'missing.toml'\n", ["FILE"], Exit.CONFIG, ["swarm.run", "missing.toml"]),
        (
            faults("kind = 'crash'\nat_s = 1.0\npeer = 's7r0'"),
            ["FILE"],
            Exit.CONFIG,
            ["line 4: fault[0].peer", "no peer s7r0"],
        ),
        ("[swarm]\noverlap_steps = 5\n", ["FILE"], Exit.CONFIG, ["line 2: swarm.overlap_steps", "5 apart"]),
        (
            SMALL + faults("kind = 'crash'\nat_s = 1.0\npeer = 's1r1'"),
            ["FILE", "--peers", "2"],
            Exit.CONFIG,
            ["line 9: fault[0].peer", "no peer s1r1"],
        ),
        (None, ["--peers", "10", "--stages", "4"], Exit.USAGE, ["--peers 8 or --peers 12"]),
        (None, ["--peers", "2", "--stages", "3"], Exit.USAGE, ["3 stages", "try: --peers 3"]),
        (SMALL, ["FILE", "--out", "FILE"], Exit.STORAGE, ["no directory", "--out"]),
        (
            SMALL + faults("kind = 'hostile'\nat_s = 1.0\npeer = 's0r0'\nhow = 'silent'"),
            ["FILE"],
            Exit.CONFIG,
            ["hostile peers", "python -m tests.explorer --scenario"],
        ),
        (None, ["--rounds", "0"], 2, []),
        (None, ["--rounds", "1" + 400 * "0"], 2, []),
        ("[devices]\nforward_s = 1e12\n", ["FILE"], Exit.CONFIG, ["too slow to be simulated"]),
    ],
)
def test_bad_input_is_refused(
    text: str | None, arguments: list[str], code: int, words: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "swarm.toml"
    if text is not None:
        file.write_text(text)
    given = [str(file) if argument == "FILE" else argument for argument in arguments]
    found, said = run(*given)
    assert found == code
    assert not [word for word in words if word not in said], said
    assert {path.name for path in tmp_path.iterdir()} <= {"swarm.toml"}


def test_who_interrupts_finds_nothing_half_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    look = EventCollector.look

    def interrupted(collector: EventCollector) -> None:
        nonlocal looks
        looks += 1
        if looks == 5:
            signal.raise_signal(signal.SIGINT)
        look(collector)

    monkeypatch.setattr(EventCollector, "look", interrupted)
    with pytest.raises(KeyboardInterrupt):
        simulate_scenario(None, SimulationRequest(rounds=3, out=tmp_path / "out", trace=True), lambda _: None)
    assert list(tmp_path.iterdir()) == []


def test_a_swarm_where_all_wait_for_ever_has_its_report_and_code_1(tmp_path: Path) -> None:
    file, out = tmp_path / "swarm.toml", tmp_path / "out"
    dead = faults(*(f"kind = 'crash'\nat_s = 5.0\npeer = 's1r{replica}'" for replica in (0, 1)))
    file.write_text(SMALL.replace("rounds = 3", "rounds = 30").replace("refresh_s = 2.0", "refresh_s = 10.0") + dead)
    code, text = run(str(file), "--out", str(out))
    assert code == 1
    assert "nobody serves stage 1. s0r0, s0r1 waited for ever." in " ".join(text.split())
    report = msgspec.json.decode((out / "report.json").read_bytes(), type=Report)
    assert report.standstill is not None
    assert report.standstill in " ".join(text.split())


@pytest.mark.parametrize("name", ["two-sites", "crash-and-restart"])
def test_the_scenarios_of_the_documentation_are_right(name: str) -> None:
    setting = complete(load_scenario(SCENARIOS / f"{name}.toml"), None)
    assert setting.scenario.fault


def test_the_run_of_the_largest_scenario_is_its_preset() -> None:
    run_file = load_scenario(SCENARIOS / "7b.toml").swarm.run
    assert run_file is not None
    assert (SCENARIOS / run_file).read_text() == run_text("7b")


def test_very_unequal_replicas_keep_each_other_from_nothing() -> None:
    """The documentation's scenario of unequal machines, with quadratic models; and what it would be otherwise."""
    text = (SCENARIOS / "uneven.toml").read_text().replace('"transformer"', '"quadratic"')
    (ours,), (fixed,), (blocking,) = (
        simulated(other).stages
        for other in (
            text,
            text.replace("dynamic_steps = true", "dynamic_steps = false"),
            text.replace("overlap_steps = 4", "blocking = true"),
        )
    )
    assert ours.work == 1.0
    assert ours.devices.mean >= 0.95
    assert ours.met > 1.5 * fixed.met
    assert ours.gap_last is not None
    assert fixed.gap_last is not None
    assert ours.gap_last < fixed.gap_last / 2
    assert blocking.work < 0.95


def test_a_second_window_fills_what_a_first_leaves_idle() -> None:
    deep = SMALL.replace("stages = 2", "stages = 4") + "microbatches_per_step = 8\n"
    one, two = (
        simulated(f"{deep}windows_in_flight = {windows}\n[network]\nlatency = {{mean_s = 0.1}}\n") for windows in (1, 2)
    )
    assert (one.windows_in_flight, two.windows_in_flight) == (1, 2)
    assert all(second.work > first.work + 0.15 for first, second in zip(one.stages, two.stages, strict=True))
    # What a source with two windows waits for is the replies to both.
    assert two.stages[0].time.get("no route", 0.0) < two.stages[0].time["replies"] / 2
    used = sum(stage.inner_steps for stage in two.stages) * two.window + two.discarded
    assert used == two.microbatches * len(two.stages)
