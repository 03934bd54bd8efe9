"""All that the tests of compatibility use of the product: the one place that knows where it is, and what it is called.

The names here are these tests' own. What is renamed in the product is imported here by `as`.
"""
# ruff: noqa: F401

from types import SimpleNamespace

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from gossip.exchange import codec
from gossip.exchange.messages import (
    Accept,
    Acknowledge,
    Busy,
    Decline,
    DeclineReason,
    Gone,
    Manifest,
    Parts,
    Piece,
    PieceRequest,
    Probe,
    Propose,
    ProposePrefetch,
    Section,
    StateRequest,
    Weights,
)
from gossip.exchange.swap import common_steps, probe_coordinates
from gossip.interface import OuterStepTaken, PartnerTooStale, RoundSkipped
from gossip.rounds.matching import partners_of_round, preferences
from gossip.settings import Format
from gossip.transfer import chunks as pieces
from gossip.transfer.assembly import Key as PieceKey
from gossip.transfer.download import donors as donor_order
from noloco_node.admission import admission_hook, owner_files, ticket, ticket_service
from noloco_node.cli.main import app
from noloco_node.cli.status import summary as status_summary
from noloco_node.data.blocks import open_blocks
from noloco_node.data.blocks import shuffled as mixed
from noloco_node.errors import Exit
from noloco_node.export.exporter import export
from noloco_node.export.replica_files import PartsDirectory, in_home
from noloco_node.journal import events as journal
from noloco_node.journal import writer as journal_writer
from noloco_node.journal.reader import read as read_journal
from noloco_node.libp2p import reachability, settings
from noloco_node.libp2p import record_checks as signing
from noloco_node.libp2p.addresses import RELAYS_KEY, relay_record, relays_of
from noloco_node.libp2p.settings import RunSecret
from noloco_node.limits.budget import OwnerLimits as Allowance
from noloco_node.limits.budget import TrafficLedger as Ledger
from noloco_node.limits.rate_limit import LimitHook
from noloco_node.network.calls import HookedNetwork
from noloco_node.network.schema import Schema
from noloco_node.network.wire import FrameDecoder as Intake
from noloco_node.network.wire import beat, encode, end, error
from noloco_node.planning.model_layout import build_stage, model_layout
from noloco_node.planning.plan_text import report as check_report
from noloco_node.run.config import ModelConfig, RunConfig
from noloco_node.run.peer_state import Evaluation, Wait, WaitCause
from noloco_node.run.peer_state import PeerState as State
from noloco_node.run.presets import PRESETS, run_text
from noloco_node.run.protocols import gossip_schema, microbatch_schema, state_schema, topic
from noloco_node.run.runfile import canonical, content_hashes
from noloco_node.sim.report.collector import EventCollector
from noloco_node.sim.report.command import SimulationRequest, complete, put_together, trace_file
from noloco_node.sim.report.figures import Report, make_report
from noloco_node.sim.report.watchers import EventTrace as Trace
from noloco_node.sim.world import Watcher, World, simulate
from noloco_node.state_sync.download import SNAPSHOT
from noloco_node.storage.checkpoint import Checkpoint, Counters
from noloco_node.storage.checkpoint import save as save_checkpoint
from noloco_node.storage.checkpoint_store import CheckpointStore as OwnCheckpoints
from noloco_node.storage.home import Home, HomePaths, holder
from noloco_node.storage.home import LockHolder as Holder
from noloco_node.storage.transfer_files import PartialDownload as Partial
from noloco_node.swarm import speed_test as measuring
from noloco_node.swarm.invite import format as format_invite
from noloco_node.swarm.invite import parse as parse_invite
from noloco_node.swarm.receipts import SourceRecord, decode_source
from noloco_node.swarm.roster import Given, PeerRecord, Roster
from noloco_node.swarm.run_distribution import HISTORY_SCHEMA, ReachedReply, ReachedRequest, RunRequest
from noloco_node.swarm.run_distribution import SCHEMA as RUN_SCHEMA
from noloco_node.swarm.run_distribution import TOPIC as RUN_TOPIC
from noloco_node.swarm.run_distribution import RunFileReply as RunFile
from noloco_node.swarm.run_distribution import RunFileText as Recipe
from noloco_node.swarm.stage_records import Published, decode_record, encode_record
from pipeline.messages import Gradient, Microbatch, Reason, Refused, SequenceLosses
from tests.explorer.scenario_file import scenario_text
from tests.explorer.schedule_generator import draw as drawn_scenario

told = SimpleNamespace(KEY=RELAYS_KEY, record_of=relay_record, listed=relays_of)
