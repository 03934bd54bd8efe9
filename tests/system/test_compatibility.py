"""What was recorded is what the product writes, and reads. The package's docstring says what to do where it is not."""

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import torch
from compatibility import admissions, agreements, everything, files, messages, product, simulations
from compatibility.recorded import RECORDED, TOLERANCE, read, unlike, written
from typer.testing import CliRunner

from research.codec.whole_sets import decode

HOME, PARTS = RECORDED / "home", RECORDED / "parts"
SAID = messages.said()


MEANT = "\nWhere this change is meant: python tests/support/record_compatibility.py, and look at the diff."


def compare(now: Any, name: str, tolerance: float = TOLERANCE) -> None:
    """Fail where a table is not as it was recorded."""
    found = list(unlike(json.loads(written(now)), read(name), tolerance))
    assert not found, f"{name}: " + "\n".join(found[:20]) + MEANT


# What swarms do.


@pytest.fixture(scope="module")
def simulated() -> Callable[[str], simulations.Simulated]:
    known: dict[str, simulations.Simulated] = {}

    def once(name: str) -> simulations.Simulated:
        if name not in known:
            known[name] = simulations.simulated(name)
        return known[name]

    return once


@pytest.mark.parametrize("name", simulations.SCENARIOS)
def test_a_swarm_does_what_it_did(name: str, simulated: Callable[[str], simulations.Simulated]) -> None:
    now = simulations.digested(simulated(name))
    compare(now, simulations.recorded_of(name), simulations.TOLERANCES.get(name, TOLERANCE))


def test_the_command_prints_the_same_report(simulated: Callable[[str], simulations.Simulated]) -> None:
    done = CliRunner().invoke(product.app, ["simulate", str(simulations.SCENARIOS["calm"]), "--json"])
    assert done.exit_code == 0
    found = simulated("calm")
    assert simulations.digested(found._replace(report=json.loads(done.stdout))) == simulations.digested(found)


def test_the_names_of_a_run_are_the_same(simulated: Callable[[str], simulations.Simulated]) -> None:
    found = simulated(everything.NAMED_BY)
    compare(agreements.names(found.topics, found.keys), "names.json", 0.0)
    names = read("names.json")
    assert str(product.parse_invite(names["invite"])) == names["invite"]


# What travels, and what peers agree on.


def test_messages_are_written_as_they_were() -> None:
    compare(messages.recorded(), "messages.json")


@pytest.mark.parametrize("name", SAID)
def test_messages_of_then_are_understood(name: str) -> None:
    frame = bytes.fromhex(read("messages.json")["messages"][name])
    assert messages.alike(SAID[name].message, messages.heard(frame, SAID[name].schema))


@pytest.mark.parametrize("form", product.Format)
def test_weights_of_then_are_decoded(form: product.Format) -> None:
    name = f"gossip, {form}, gamma is beta: weights"
    received = messages.heard(bytes.fromhex(read("messages.json")["messages"][name]), SAID[name].schema)
    steps = messages.steps() if form is product.Format.INT4 else ()
    meant = messages.weights(0)
    decoded = decode(form, received.fast, meant, steps)
    for one, other in zip(decoded, meant, strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=max(steps, default=0.02) / 2)


def test_every_message_of_a_schema_is_recorded() -> None:
    known = {(type(each.message), each.schema.names[type(each.message)]) for each in SAID.values()}
    for each in SAID.values():
        assert set(each.schema.names.items()) <= known


def test_records_are_written_and_read_as_they_were() -> None:
    compare(agreements.records(), "records.json")
    then = read("records.json")
    for name, each in agreements.published().items():
        assert product.decode_record(bytes.fromhex(then["peers"][name]), files.ME, 1) == each
    for name, source in agreements.sources().items():
        assert product.decode_source(bytes.fromhex(then["sources"][name])) == source
    place, signed = bytes.fromhex(then["place"]), bytes.fromhex(then["signed"])
    assert product.signing.content_of(place, then["peer"], agreements.EXPIRY, signed) == b"a record"
    places = (agreements.PLACE, agreements.OTHER_PLACE)
    assert product.told.listed({"a relay": bytes.fromhex(then["relays"])}) == places


def test_admissions_are_written_and_read_as_they_were(tmp_path: Path) -> None:
    compare(admissions.recorded(tmp_path), "admissions.json")
    then, ticket, owner_files = read("admissions.json"), product.ticket, product.owner_files
    owner, run = bytes.fromhex(then["owner"]), files.recipe().digest
    for name, chain in admissions.chains().items():
        found = ticket.decode(bytes.fromhex(then["tickets"][name]))
        assert found == chain
        assert ticket.facts_of(found, owner, run) is not None
    for name, credential in admissions.credentials().items():
        assert ticket.parse_credential(then["credentials"][name]) == credential
    (tmp_path / "run.owner").write_text(then["run.owner"])
    assert admissions.public(owner_files.load_key(tmp_path / "run.toml")) == owner
    for name, members in admissions.lists().items():
        (tmp_path / "run.members").write_text(then["run.members"][name])
        assert owner_files.load_members(tmp_path / "run.toml") == members
        if members.number:
            signed = ticket.decode_list(members.signed, owner, run)
            assert {key.hex(): until for key, until in signed.revoked.items()} == members.revoked


def test_orders_and_initial_weights_follow_from_seeds_as_they_did() -> None:
    compare(agreements.orders(), "orders.json", 0.0)
    compare(agreements.initial_weights(), "initial-weights.json")


# What lies on disks.


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return Path(shutil.copytree(HOME, tmp_path / "home"))


def test_a_home_is_written_as_it_was(tmp_path: Path) -> None:
    files.write_home(tmp_path / "home")
    assert files.files_below(tmp_path / "home") == files.files_below(HOME)


def test_a_home_of_then_is_opened(home: Path) -> None:
    holder = product.holder(home)
    assert holder.pid == 4242
    with product.Home.open(home) as opened:
        opened.keep_run_file(opened.run_file.read_text())
        assert product.Recipe(opened.run_file.read_text(), "the home").digest == files.recipe().digest
        assert product.settings.ensure_identity(opened.identity)
        ledger = product.Ledger(home / "traffic.json", lambda: files.NOW, files.unheard)
        assert (ledger.spent.sent_bytes, ledger.spent.received_bytes) == (123_456, 654_321)
        then = files.files_below(HOME) | {"lock": b""}
        assert files.files_below(home) | {"lock": b""} == then, "to open a home changes nothing in it"


def test_a_journal_of_then_is_read(home: Path) -> None:
    journal = product.journal
    wanted = [
        msgspec.convert({**journal.fields_of(each), "at": files.BEGAN_AT + n}, type(each))
        for n, each in enumerate(files.events())
    ]
    assert list(product.read_journal(home / "journal.jsonl")) == wanted
    assert {type(each) for each in wanted} == set(get_args(journal.Event)), "an event of each kind"


def test_a_checkpoint_of_then_is_loaded(home: Path) -> None:
    digest = files.recipe().digest
    own = files.checkpoints_in(home)
    assert asyncio.run(own.served()) == files.STAGE
    loaded = asyncio.run(own.load(files.STAGE))
    assert loaded is not None
    assert files.same_checkpoint(loaded, files.checkpoint())
    assert {(each.peer, each.counters.stage) for each in product.in_home(home, digest)} == {
        (files.ME, files.STAGE),
        (files.KEPT_OF, files.OTHER_STAGE),
    }


def test_a_snapshot_of_then_is_loaded(home: Path) -> None:
    loaded = asyncio.run(files.checkpoints_in(home).slow(files.OTHER_STAGE))
    assert loaded is not None
    assert files.same_checkpoint(loaded, files.snapshot())


def test_a_copy_of_then_goes_on(home: Path) -> None:
    manifest, settled, pieces = files.followed()
    keep = files.partial(home)
    last, units = keep.last()
    assert messages.alike(last, manifest)
    assert units == settled
    assert {(key, digest, bytes(data.tolist())) for key, digest, data in keep.pieces()} == {
        (key, digest, bytes(data.tolist())) for key, digest, data in pieces
    }


def test_an_export_of_then_goes_on(tmp_path: Path) -> None:
    files.write_parts(tmp_path / "parts")
    assert files.files_below(tmp_path / "parts") == files.files_below(PARTS)
    parts = files.parts(PARTS)
    (replica,) = parts.replicas(files.STAGE, [])
    (snapshot,) = parts.replicas(files.OTHER_STAGE, [], are_snapshots=True)
    assert (replica.peer, snapshot.peer) == (files.DONOR, files.KEPT_OF)


# What people and scripts see.


def test_a_model_is_exported_as_it_was(home: Path, tmp_path: Path) -> None:
    compare(agreements.exported(home, tmp_path), "export.json")


def test_commands_and_exit_codes_are_the_same() -> None:
    compare(agreements.command_line(), "command-line.json")


def test_what_commands_print_as_json_is_the_same() -> None:
    compare(agreements.printed(), "printed.json")
