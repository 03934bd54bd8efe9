"""Numbers of strangers at the bounds of their types, and beyond: each is declared, refused where it must be, and no
decision, no view and no node ends by one.
"""

import math
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.robustness.extremes import RECIPE, decide_by_draws, history_of_draws, live
from noloco_node.admission import admission_hook, ticket_service
from noloco_node.libp2p import reachability
from noloco_node.network.schema import Schema, Violation
from noloco_node.network.wire import check_numbers
from noloco_node.observe.metrics import NodeMetrics
from noloco_node.observe.roster_observer import RosterObserver
from noloco_node.run.peer_state import PeerState
from noloco_node.run.protocols import gossip_schema, microbatch_schema, state_schema
from noloco_node.state_sync import weight_exchange
from noloco_node.storage.checkpoint import Counters
from noloco_node.swarm import run_distribution, speed_test
from noloco_node.swarm.receipts import ReceiptRecord, SourceRecord
from noloco_node.swarm.roster import PeerRecord
from noloco_node.swarm.stage_records import Published, decode_record
from noloco_node.units import LARGEST, LEAST

SHAPES = ((3, 5), (7,))
SCHEMAS: dict[str, Schema] = {
    "gossip": gossip_schema(RECIPE.run, SHAPES),
    "state": state_schema(SHAPES),
    "microbatch": microbatch_schema(RECIPE.run, 32),
    "admission": admission_hook.SCHEMA,
    "tickets": ticket_service.SCHEMA,
    "dial back": reachability.SCHEMA,
    "weights": weight_exchange.SCHEMA,
    "run": run_distribution.SCHEMA,
    "history": run_distribution.HISTORY_SCHEMA,
    "speed": speed_test.SCHEMA,
}
RECORDS = (Published, PeerRecord, SourceRecord, ReceiptRecord, Counters)
OUTSIDE = (math.nan, math.inf, -math.inf, 1.7e308, -1.7e308, 5e-324, -5e-324, LEAST / 2, 2 * LARGEST)


def bare(kind: Any) -> bool:
    """Say whether a type is a number without bounds, or holds one."""
    if get_origin(kind) is Annotated:
        return get_args(kind)[0] not in (int, float) and bare(get_args(kind)[0])
    return kind in (int, float) or any(map(bare, get_args(kind)))


@pytest.mark.parametrize("kind", RECORDS)
def test_each_number_of_a_record_is_declared_with_its_bounds(kind: type) -> None:
    assert not [field.name for field in msgspec.structs.fields(kind) if bare(field.type)]


@pytest.mark.parametrize("name", SCHEMAS)
def test_each_number_of_a_message_is_declared_with_its_bounds(name: str) -> None:
    for rule in SCHEMAS[name].rules.values():
        assert not [field.name for field in msgspec.structs.fields(rule.scalars) if bare(field.type)], rule.name


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_message_with_a_number_outside_of_its_bounds_is_a_violation(name: str) -> None:
    """By its header alone, before any tensor has come."""
    for rule in SCHEMAS[name].rules.values():
        usual = {number: (least + most) / 2 for number, least, most in rule.numbers}
        for number, least, most in rule.numbers:
            whole = isinstance(most, int)
            for value in (least - 1, most + 1) if whole else (least - 1.0, 2.0 * most, *OUTSIDE):
                message = type("Said", (), {**usual, number: value})()
                with pytest.raises(Violation, match=f"{rule.name}.{number} is"):
                    check_numbers(rule, message)


@pytest.mark.parametrize("value", OUTSIDE)
@pytest.mark.parametrize("field", ["device_s", "loss", "gap", "tokens_per_s", "claimed_at", "progress"])
def test_a_record_with_a_number_outside_of_its_bounds_is_none(field: str, value: float) -> None:
    told = msgspec.to_builtins(Published(1, PeerRecord(peer="", stage=1, state=PeerState.TRAINING)))
    assert decode_record(msgspec.msgpack.encode(told), "liar", 1) is not None
    told[1][PeerRecord.__struct_fields__.index(field)] = value
    assert decode_record(msgspec.msgpack.encode(told), "liar", 1) is None


@settings(max_examples=300)
@given(st.integers(0, 2**64))
def test_no_decision_and_no_view_fails_by_what_strangers_say(seed: int) -> None:
    decide_by_draws(seed, RosterObserver(RECIPE.run, "run"), METRICS)
    history_of_draws(run_distribution.RunHistory(Path("nowhere", "reached"), lambda line: None), seed)


METRICS = NodeMetrics("run")


@pytest.mark.parametrize("seed", [1, 2])
def test_a_swarm_trains_on_among_peers_that_say_extremes(seed: int) -> None:
    heard = live(seed, rounds=4)
    assert heard["records"] > 300
    assert heard["messages"] > (50 if seed % 2 == 0 else 0)
    assert heard["steps"] > 50
