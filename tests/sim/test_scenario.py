"""Scenario files: what they mean, and what is said about a mistake."""

import math
import re
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from user_errors import user_error

from benchmarks.pipeline_efficiency.volunteers import text_of, volunteers
from gossip.exchange.messages import Propose, Weights
from gossip.settings import Format
from noloco_node.errors import Exit, UserError
from noloco_node.planning.model_layout import model_layout
from noloco_node.planning.plan import mean_steps_per_round, plan
from noloco_node.planning.throughput import CODING_FLOPS, gpu_memories, stage_loads
from noloco_node.planning.windows import BACKWARD, FROZEN_BACKWARD
from noloco_node.run.presets import run_text, write_text
from noloco_node.run.runfile import load_run
from noloco_node.sim.scenario import faults
from noloco_node.sim.scenario.scenario import (
    ROUNDS_OF_A_RUN,
    SCENARIO_BYTES,
    Scenario,
    SwarmConfig,
    decode_scenario,
    load_scenario,
)
from noloco_node.sim.scenario.setup import FOREVER_S, base, build_setup
from pipeline.messages import Gradient, Microbatch
from tests.explorer.scenario_file import scenario_text

SMALL = "[swarm]\nstages = 2\nreplicas = 2\n"


def refusal(text: str) -> str:
    with user_error(Exit.CONFIG) as caught:
        decode_scenario(text, "swarm.toml")
    return str(caught.value)


def test_an_empty_scenario_is_a_swarm() -> None:
    assert decode_scenario("", "swarm.toml") == Scenario()


@pytest.mark.parametrize(
    ("text", "first_line", "more"),
    [
        ("name = 'x'\n[swarm]\nstages = 2\nreplica = 2\n", "swarm.toml, line 4", "did you mean"),
        ("[network]\nlatency = {mean_s = 0.1}\nloss = -0.5\n", "swarm.toml, line 3: network.loss", "outside"),
        ("[network]\nlatency = {mean_s = -0.1}\n", "swarm.toml, line 2: network.latency", "outside"),
        ("[network]\n[network.latency]\nmean_s = -1\n", "swarm.toml, line 3: network.latency.mean_s", "outside"),
        ("[network.latency]\nmean_s = 1e-200\nstd_s = 1\n", "line 3: network.latency.std_s", "cannot vary"),
        ("[network.latency]\nmeans_s = 1\n", "swarm.toml, line 2", "did you mean mean_s?"),
        ("network.latency.mean_s = inf\n", "swarm.toml, line 1: network.latency.mean_s", "outside"),
        ("swarm.stages = 2\nswarm.replicas = -1\n", "swarm.toml, line 2: swarm.replicas", "outside"),
        ("[devices]\nslowness = [1.0, inf]\n", "line 2: devices.slowness.1", "outside"),
        ("[swarm]\noverlap_steps = 4\ninner_steps_per_round = 4\n", "line 2: swarm.overlap_steps", "do not fit"),
        ("[swarm]\noverlap_steps = 4\nlate_inner_steps_per_round = 3\n", "line 2: swarm.overlap_steps", "do not fit"),
        ("[swarm]\nlate_inner_steps_per_round = 0\n", "line 2: swarm.late_inner_steps_per_round", "outside"),
        ("[swarm]\nwindows_in_flight = 3\n", "line 2: swarm.windows_in_flight", "give 1 or 2"),
        ("[swarm]\ndynamic_steps = 'yes'\n", "line 2: swarm.dynamic_steps", "true or false"),
        ("[swarm]\ncodec = 'int3'\n", "line 2: swarm.codec", '"int4"'),
        ("[[fault]]\nkind = 'storm'\nat_s = 1\nfor_s = nan\n", "line 4: fault[0].for_s", "outside"),
        (
            SMALL + "[[fault]]\nkind = 'partition'\nat_s = 1\ngroups = [\n['s0r0'],\n['s1r0', 's0r0']\n]\nfor_s = 1\n",
            "line 7: fault[0].groups",
            "s0r0 is in two groups",
        ),
        (
            SMALL + "[[fault]]\nkind = 'partition'\nat_s = 1\nfor_s = 1\ngroups = [['s9r0']]\n",
            "line 8: fault[0].groups",
            "no peer s9r0",
        ),
        ("[devices]\ntflops = 10.0\n", "swarm.toml, line 2: devices.tflops", "run file"),
        ("[swarm]\n\nstages = -1\n", "swarm.toml, line 3: swarm.stages", "outside"),
        ("[swarm]\nstages = 200\nreplicas = 1000\n", "swarm.toml, line 3: swarm.replicas", "20000 at most"),
        ("seed = 'seven'\n", "swarm.toml, line 1: seed", "whole number"),
        (SMALL + "[[fault]]\nat_s = 1\n", "swarm.toml, line 4: this fault has no kind", "crash, restart"),
        (SMALL + "[[fault]]\nat_s = 1\nkind = 'explode'\n", "swarm.toml, line 6: no fault is called", "crash, restart"),
        (SMALL + "[[fault]]\nat_s = 1\nkind = 'crash'\npeer = 's2r0'\n", "line 7: fault[0].peer", "no peer s2r0"),
        (SMALL + "[[fault]]\nat_s = 1\nkind = 'crash'\n", "swarm.toml, line 4: fault[0].peer is missing", "text"),
        (
            SMALL
            + "[[fault]]\nat_s = 1\nkind = 'crash'\npeer = 's0r0'\n"
            + "[[fault]]\nat_s = -2.0\nkind = 'leave'\npeer = 's0r0'\n",
            "swarm.toml, line 9: fault[1].at_s",
            "outside",
        ),
        (SMALL + "[[fault]]\nat_s = 1\nkind = 'join'\npeer = 'a b'\n", "line 7: fault[0].peer", "letters"),
        (SMALL + "[[fault]]\nat_s = 1\nkind = 'join'\npeer = 'late'\nstage = 2\n", "line 8: fault[0].stage", "0 to 1"),
        (SMALL + "[[fault]]\nat_s = 1\nkind = 'storm'\nfor_s = 1\nloss = 1.5\n", "line 8: fault[0].loss", "outside"),
        (
            "[[fault]]\nkind = 'churn'\nat_s = 0\nfor_s = 1e5\nper_hour = 1e6\naway_s = 10\n",
            "line 5: fault[0].per_hour",
            "more than 1000 times",
        ),
        ("fault = 3\n", "swarm.toml, line 1: fault is no list", "[[fault]]"),
        ("# a\u2028b\nname = ''\n", "swarm.toml, line 2: name", "empty"),
        ("name = '\\u001b[31m'\n".replace("'", '"'), "swarm.toml, line 1: name", "printed"),
        ("[swarm]\nrefresh_s = 1e-12\n", "line 2: swarm.refresh_s", "0.001"),
        (SMALL + "[[fault]]\nkind = ['crash']\nat_s = 1\n", "swarm.toml, line 5: no fault is called", "crash, restart"),
        (
            SMALL + "[[fault]]\nkind = 'join'\nat_s = 1\npeer = 'late'\nstage = -1\n",
            "line 8: fault[0].stage",
            "outside",
        ),
        (SMALL + "[fault]\nat_s = 1\nkind = 'crash'\n", "swarm.toml, line 4: fault is no list", "[[fault]]"),
        ("[swarm\n", "swarm.toml is not valid TOML", "line 1"),
    ],
)
def test_a_mistake_names_its_line_and_field(text: str, first_line: str, more: str) -> None:
    said = refusal(text)
    assert first_line in said.splitlines()[0]
    assert more in said


@given(st.text(max_size=200))
def test_any_text_is_a_scenario_or_one_message(text: str) -> None:
    with suppress(UserError):
        assert isinstance(decode_scenario(text, "swarm.toml"), Scenario)


def test_a_file_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        load_scenario(tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="cannot be read"):
        load_scenario(tmp_path / "bytes.toml")
    (tmp_path / "long.toml").write_bytes(b"#" + SCENARIO_BYTES * "é".encode())  # cut off within a letter
    with pytest.raises(UserError, match="too long"):
        load_scenario(tmp_path / "long.toml")


def test_the_run_file_lies_beside_the_scenario(tmp_path: Path) -> None:
    (tmp_path / "swarm.toml").write_text("[swarm]\nrun = 'big.toml'\n")
    assert load_scenario(tmp_path / "swarm.toml").swarm.run == str(tmp_path / "big.toml")
    with pytest.raises(UserError, match=r"big\.toml cannot be read"):
        build_setup(load_scenario(tmp_path / "swarm.toml"))


def test_every_kind_of_fault_is_read() -> None:
    text = SMALL + "".join(
        f"[[fault]]\nkind = '{kind}'\nat_s = {number}\n{fields}\n"
        for number, (kind, fields) in enumerate(
            {
                "join": "peer = 'late'",
                "crash": "peer = 's0r0'",
                "restart": "peer = 's0r0'",
                "leave": "peer = 's0r1'",
                "slow": "peer = 's0r1'\nfactor = 2.0",
                "stutter": "peer = 's0r1'\nshare = 0.1\npause_s = 2.0",
                "silence": "peer = 'late'\nfor_s = 5.0",
                "partition": "groups = [['s0r0', 'late'], ['s1r0']]\nfor_s = 5.0",
                "storm": "for_s = 3\nloss = 0.2",
                "line": "peer = 's1r1'\nup_bytes_per_s = 1000.0",
                "tamper": "peer = 's1r1'\nhow = 'not finite'",
                "hostile": "peer = 's1r1'\nhow = 'gradient flipped'",
                "disk": "peer = 's1r1'\nfor_s = 60",
                "churn": "for_s = 60\nper_hour = 0.5\naway_s = 5",
            }.items()
        )
    )
    found = decode_scenario(text, "swarm.toml").fault
    assert [faults.kind_of(fault) for fault in found] == [*faults.KINDS]
    assert [faults.ends_s(fault) - fault.at_s for fault in found] == [0, 0, 0, 0, 0, 0, 5, 5, 3, 0, 0, 0, 60, 65]
    assert faults.peers_of(found[7]) == ("s0r0", "late", "s1r0")


def test_what_is_left_out_is_the_run_files(tmp_path: Path) -> None:
    write_text(tmp_path / "run.toml", run_text("125m"), overwrite=False)
    (tmp_path / "swarm.toml").write_text(
        "[swarm]\nrun = 'run.toml'\nrounds = 9\nreplicas = 5\n[devices]\ntflops = 50.0\n"
    )
    setting = build_setup(load_scenario(tmp_path / "swarm.toml"))
    run = setting.run
    assert (run.outer.inner_steps_per_round, run.outer.late_inner_steps_per_round) == (10, 50)
    assert run.inner.steps == pytest.approx(9 * mean_steps_per_round(run.outer), abs=2)
    assert len(setting.peers) == 5 * run.pipeline.stages
    # A microbatch weighs what it would: gradients of width 768 in 3 bits, with a top and 24 scales.
    hidden = 100 + setting.microbatch_tokens * (2 + 24 + 288)
    assert setting.sizes.size_bytes(Gradient(hidden=None, loss=0.0, tokens=1), "microbatch/1") == hidden
    weights = Weights(fast=(torch.zeros(1),), slow=())
    # Two weights a byte in a round.
    parameters = sum(setting.sizes.size_bytes(weights, f"gossip/{stage}") for stage in range(run.pipeline.stages)) * 2
    assert 110e6 < parameters < 140e6
    # And costs what its operations take: two a parameter and attention's, at 50 * 10**12 a second.
    operations = sum(prices.forward_s for prices in setting.prices) * 50e12 / setting.microbatch_tokens
    assert 1.8 * parameters < operations < 3 * parameters
    # Arithmetic is a quadratic model's.
    assert setting.dimensions.width == 1
    assert run.pipeline.sequence_length == 1


def test_planner_and_simulator_charge_a_frozen_model_alike(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(text_of("125m", 4, sizes={}))
    (tmp_path / "swarm.toml").write_text("[swarm]\nrun = 'run.toml'\n[devices]\ntflops = 60.0\nmemory_gib = 200.0\n")
    setting, machines = build_setup(load_scenario(tmp_path / "swarm.toml")), volunteers(20.0, 200.0)
    run = load_run(tmp_path / "run.toml")
    layout = model_layout(run)
    (load,) = stage_loads(run, layout, machines, gpu_memories(run, layout, machines))
    (prices,) = setting.prices
    assert prices.passes_s == pytest.approx(load.device_s)
    assert prices.backward == layout.backward == FROZEN_BACKWARD < BACKWARD
    assert plan(run).backward == layout.backward


def test_a_codec_costs_time_and_saves_bytes(tmp_path: Path) -> None:
    write_text(tmp_path / "run.toml", run_text("125m"), overwrite=False)
    (tmp_path / "swarm.toml").write_text("[swarm]\nrun = 'run.toml'\nstages = 3\n[devices]\ntflops = 50.0\n")
    coded = build_setup(load_scenario(tmp_path / "swarm.toml"))
    assert coded.run.pipeline.codec == "float32", "a quadratic model's number travels as it is"
    tokens = coded.microbatch_tokens
    # A top, 24 scales, and 3 bits a value on the way back; 5 bits and a target of 8 bytes on the way down.
    gradient = Gradient(hidden=None, loss=0.0, tokens=1)
    assert coded.sizes.size_bytes(gradient, "microbatch/1") == 100 + tokens * (2 + 24 + 288)
    assert coded.sizes.size_bytes(Microbatch.__new__(Microbatch), "microbatch/1") == 100 + tokens * (2 + 24 + 480 + 8)
    # Those in the middle have a neighbour on either side.
    each_s = tokens * 768 * CODING_FLOPS / 50e12
    assert [prices.coding_s for prices in coded.prices] == pytest.approx([each_s, 2 * each_s, each_s])


def test_without_a_run_file_the_scenario_says_what_things_cost() -> None:
    setting = build_setup(
        decode_scenario(
            SMALL + "[network]\nup_mbit_per_s = 8.0\nmicrobatch_bytes = 1000\n[devices]\nforward_s = 0.5\n", "x"
        )
    )
    assert [prices.forward_s for prices in setting.prices] == [0.5, 0.5]
    assert setting.access.up_bytes_per_s == 1e6
    assert setting.access.down_bytes_per_s == math.inf
    microbatch = Microbatch.__new__(Microbatch)
    assert setting.sizes.size_bytes(microbatch, "microbatch/1") == 1100
    assert setting.sizes.size_bytes(Propose(round=1), "gossip/0") == 100


@given(
    st.builds(
        SwarmConfig,
        stages=st.integers(2, 4),
        rounds=st.integers(1, 50),
        inner_steps_per_round=st.integers(2, 100),
        late_inner_steps_per_round=st.none() | st.integers(2, 100),
        dynamic_steps=st.none() | st.booleans(),
        windows_in_flight=st.none() | st.sampled_from([1, 2]),
        codec=st.none() | st.sampled_from(Format),
        momentum_period=st.none() | st.integers(1, 4),
    )
    | st.builds(SwarmConfig, rounds=st.integers(1, 50), weigh_by_steps=st.none() | st.booleans())
)
def test_what_a_scenario_says_of_rounds_and_windows_is_the_runs(swarm: SwarmConfig) -> None:
    scenario = Scenario(swarm=swarm)
    text = scenario_text(scenario)
    assert decode_scenario(text, "x") == scenario
    run, usual = build_setup(scenario).run, base(False)
    fields = ("inner_steps_per_round", "late_inner_steps_per_round", "dynamic_steps", "codec", "momentum_period")
    for name in (*fields, "weigh_by_steps"):
        given_value = getattr(swarm, name)
        assert getattr(run.outer, name) == (getattr(usual.outer, name) if given_value is None else given_value)
    assert run.pipeline.windows_in_flight == (swarm.windows_in_flight or 1)
    early, late = run.outer.inner_steps_per_round, run.outer.late_inner_steps_per_round
    assert 1 <= run.outer.overlap_steps < min(early, late or early)
    assert run.inner.steps >= swarm.rounds * min(early, late or early)
    assert run.inner.steps / mean_steps_per_round(run.outer) == pytest.approx(swarm.rounds, abs=1.0)


def test_an_overlap_that_does_not_fit_a_run_files_late_rounds_is_refused(tmp_path: Path) -> None:
    write_text(tmp_path / "run.toml", run_text("125m"), overwrite=False)
    file = tmp_path / "run.toml"
    file.write_text(re.sub(r"(?m)^late_inner_steps_per_round.*\n", "", file.read_text()))
    file.write_text(file.read_text().replace("[outer]", "[outer]\nlate_inner_steps_per_round = 20"))
    swarm = SwarmConfig(run=str(file), inner_steps_per_round=60)
    assert build_setup(Scenario(swarm=swarm)).run.outer.overlap_steps < 20
    with pytest.raises(UserError, match=r"overlap_steps = 30"):
        build_setup(Scenario(swarm=structs.replace(swarm, overlap_steps=30)))


def test_without_deadlines_nothing_is_bounded_by_time() -> None:
    setting = build_setup(Scenario(swarm=SwarmConfig(impatient=False)))
    assert setting.run.pipeline.budget_s == FOREVER_S


def test_a_run_that_no_swarm_could_train_is_refused() -> None:
    with pytest.raises(UserError, match="inner_steps_per_round"):
        build_setup(Scenario(swarm=SwarmConfig(inner_steps_per_round=10**9)))
    with pytest.raises(UserError, match="peers"):
        build_setup(Scenario(swarm=SwarmConfig(stages=2, replicas=60_000)))


def test_a_run_file_by_itself_is_a_few_rounds_of_that_run(tmp_path: Path) -> None:
    path = tmp_path / "mine\udcff.toml"  # a name that is no text
    path.write_text(run_text("tiny"))
    scenario = load_scenario(path)
    assert scenario == Scenario(name="mine", swarm=SwarmConfig(run=str(path), rounds=ROUNDS_OF_A_RUN))
    setup, run = build_setup(scenario), load_run(path)
    assert setup.recipe.run.pipeline.stages == run.pipeline.stages
    assert setup.microbatch_tokens == run.pipeline.microbatch_size * run.pipeline.sequence_length
