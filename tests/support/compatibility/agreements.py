"""What peers of different versions must agree on beside messages and files: names, records, orders, what seeds mean."""

import asyncio
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import torch
import typer
from msgspec import structs
from safetensors.torch import load_file

from compatibility import product
from compatibility.files import DONOR, ME, OUT, recipe
from compatibility.recorded import RECORDED, mapped, sha256

PEERS = [f"12D3KooW{letter}" for letter in "abcdefg"]
PLACE = "/ip4/192.0.2.1/tcp/4001/p2p/12D3KooWALMXjWCsCWroGW8A7t1aSjkS2AUzg1EYu8M4CtecrnPu"
OTHER_PLACE = "/dns4/example.org/tcp/443/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
EXPIRY = 1_800_000_060.25
SEEDS = 12
TEXTS = {f"{name}/{number}.txt": f"{name} {number}: Grüße\n" * (3 + number) for name in "abc" for number in range(4)}
_DIGITS = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"


def names(topics: set[str], keys: set[str]) -> dict[str, Any]:
    """Return the names of a run. `topics` and `keys`: those that a simulated swarm served, and published under."""
    digest = recipe().digest
    secret = product.RunSecret(digest)
    served = {*topics, product.RUN_TOPIC, product.measuring.TOPIC, product.reachability.TOPIC}
    served |= {product.topic(product.SNAPSHOT, 0)}
    return {
        "run": digest,
        "proof": secret.proof(PEERS[0], PEERS[1], "run").hex(),
        "protocols": sorted(secret.prefix + topic for topic in served),
        # Each begins with the run's digest.
        "keys": sorted(key.partition("/")[2] for key in keys),
        "key of relays": secret.key(product.told.KEY),
        "invite": product.format_invite(digest, [PLACE, OTHER_PLACE]),
        # A field at its default is not in a run's id: a default that changes needs a new version of the wire.
        "defaults": msgspec.to_builtins(product.RunConfig(model=product.ModelConfig())),
        "presets": {preset: _preset(preset) for preset in product.PRESETS},
    }


def _preset(preset: str) -> dict[str, Any]:
    found = product.Recipe(product.run_text(preset), preset)
    return {
        "digest": found.digest,
        "fields": json.loads(product.canonical(found.run, product.content_hashes(found.run))),
    }


def command_line() -> dict[str, Any]:
    """Return what scripts rely on: commands with their arguments and options, and exit codes."""
    group: Any = typer.main.get_command(product.app)
    commands = {
        name: sorted(
            "/".join((*parameter.opts, *parameter.secondary_opts)) if parameter.opts else parameter.name
            for parameter in command.params
        )
        for prefix, found in [("", group), ("journal ", group.commands["journal"])]
        for name, command in ((prefix + name, each) for name, each in found.commands.items() if name != "journal")
    }
    return {"commands": commands, "exit codes": sorted(map(int, product.Exit))}


def records() -> dict[str, Any]:
    key = (RECORDED / "home" / "identity.key").read_bytes()
    me = peer_id(key)
    signer = product.signing.read_signer(RECORDED / "home" / "identity.key")
    assert signer is not None
    place = product.signing.place_of("a key of the DHT")
    return {
        "peer": me,
        "peers": {name: product.encode_record(each).hex() for name, each in published().items()},
        "sources": {name: msgspec.msgpack.encode(each).hex() for name, each in sources().items()},
        "place": place.hex(),
        "signed": signer.signed(place, EXPIRY, b"a record").hex(),
        "relays": product.told.record_of([PLACE, OTHER_PLACE]).hex(),
    }


def published() -> dict[str, Any]:
    """Return a peer's record in each of its states, and one in which every field says something."""
    found = {str(state): product.PeerRecord(peer=ME, stage=1, state=state) for state in product.State}
    found["everything"] = product.PeerRecord(
        peer=ME,
        stage=1,
        state=product.State.TRAINING,
        claimed_at=1_800_000_000.5,
        round=6,
        inner_steps=27,
        progress=0.375,
        samples=216,
        device_s=0.125,
        tokens_per_s=1024.5,
        loss=5.5,
        gap=0.0625,
        partner=DONOR,
        waiting=(product.Wait(product.WaitCause.ROOM, 12.0, "all its 2 replicas refused for now"),),
        budget="upload 10 kbit/s of 20 kbit/s",
        addresses=(f"/ip4/192.0.2.1/tcp/4001/p2p/{ME}", f"{PLACE}/p2p-circuit/p2p/{ME}"),
        may_serve=(0, 2),
        moves_to=2,
        version="1.2.3",
        hops=((DONOR[-8:], 300), (ME[-8:], 12)),
        given=product.Given(10**9, 36_000, 10**11, 10**10, 7_200_000),
        evaluation=product.Evaluation(number=2, round=6, loss=5.25, margin=0.125, tokens=65_536, documents=120),
    )
    return {
        name: product.Published(1_800_000_000_500 + n, record, 1_800_000_000.5, 30.0)
        for n, (name, record) in enumerate(found.items())
    }


def sources() -> dict[str, Any]:
    return {"at work": product.SourceRecord(216, False), "finished": product.SourceRecord(2**40, True)}


def peer_id(key: bytes) -> str:
    """Return the peer id of an identity file in base 58: a multihash of the public key itself."""
    number = int.from_bytes(bytes((0x00, 0x24, 0x08, 0x01, 0x12, 0x20)) + key[-32:], "big")
    text = ""
    while number:
        number, digit = divmod(number, 58)
        text = _DIGITS[digit] + text
    return "1" + text


def orders() -> dict[str, Any]:
    sizes = [40_000, 12, 0, 4, 8_200, 300]
    coordinates = product.probe_coordinates(recipe().run.seed, [size * 7 for size in sizes])
    return {
        "pieces": [[span.unit, list(map(list, span.parts))] for span in product.pieces.cut(sizes)],
        "name of a copy": product.pieces.name_of((3, 0.5, 2.25), [bytes(32), bytes(range(32))]),
        "probes": sha256(json.dumps([each.tolist() for each in coordinates])),
        "partners": [dict(product.partners_of_round(PEERS, 11, round)) for round in range(1, 5)],
        "preferences": [product.preferences(PEERS[0], PEERS, 11, round) for round in range(1, 5)],
        "donors": [product.donor_order(peer, PEERS, 11) for peer in PEERS[:3]],
        "explored": {str(seed): sha256(product.scenario_text(product.drawn_scenario(seed))) for seed in range(SEEDS)},
        "text": _blocks(),
    }


def _blocks() -> dict[str, Any]:
    """Return the first text that a peer trains on, where it then stands, and the text that nobody trains on."""
    with TemporaryDirectory() as directory:
        for name, text in TEXTS.items():
            path = Path(directory, name)
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        data = structs.replace(recipe().run.data, source="text", path=directory, validation_percent=20.0)
        plain = product.open_blocks(data, 16, 11, ME)
        blocks = product.mixed(product.open_blocks(data, 16, 11, ME), 16, 11, ME)
        held_out = product.open_blocks(data, 16, 11, ME, "validation")
        return {
            "in order": plain.next_batch(3).tolist(),
            "place": plain.position(),
            "mixed": blocks.next_batch(3).tolist(),
            "mixed place": blocks.position(),
            "held out": held_out.next_batch(2).tolist(),
        }


def initial_weights() -> dict[str, Any]:
    """Return of each parameter that a run starts from its shape, and figures that say which numbers it holds."""
    run = recipe().run
    plan = product.model_layout(run)
    found = {}
    for number in range(run.pipeline.stages):
        for name, weight in product.build_stage(run, plan, number, torch.device("cpu")).named_parameters():
            flat = weight.detach().double().flatten()
            found[name] = [
                number,
                list(weight.shape),
                *flat[:3].tolist(),
                float((flat * (torch.arange(len(flat)) % 7 + 1)).sum()),
            ]
    return mapped(found, lambda value: float(f"{value:.7g}"))


def printed() -> dict[str, Any]:
    stages = tuple(
        tuple(each.record for each in published().values() if stage) for stage in range(recipe().run.pipeline.stages)
    )
    roster = product.Roster(stages=stages, run_samples=40, own_samples=3, sources=2, sources_finished=1)
    status = product.status_summary(recipe(), roster, product.format_invite(recipe().digest, [PLACE]))
    check = json.loads(product.check_report(recipe().run, as_json=True))
    check["warnings"] = len(check["warnings"])  # which are sentences
    return {"check": check, "status": json.loads(msgspec.json.encode(status))}


def exported(home: Path, directory: Path) -> dict[str, Any]:
    """Export what lies in a home as `noloco-node export --from-home` does, and return what was written."""
    out = directory / OUT
    asyncio.run(product.export(out, homes=(home,)))
    tensors = load_file(out / "model.safetensors")
    config = json.loads((out / "config.json").read_bytes())
    config.pop("transformers_version")
    return {
        "tensors": {
            name: [str(each.dtype), list(each.shape), sha256(each.numpy().tobytes())]
            for name, each in sorted(tensors.items())
        },
        "config.json": config,
        "noloco.json": json.loads((out / "noloco.json").read_bytes()),
    }
