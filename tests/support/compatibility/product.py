"""All that the tests of compatibility use of the product: the one place that knows where it is, and what it is called.

The names here are these tests' own. What is renamed in the product is imported here by `as`.
"""
# ruff: noqa: F401

from __future__ import annotations

from gossip.exchange import codec
from gossip.exchange.formats import Format as Format
from gossip.exchange.messages import Accepted as Accepted
from gossip.exchange.messages import Ahead as Ahead
from gossip.exchange.messages import Busy as Busy
from gossip.exchange.messages import Declined as Declined
from gossip.exchange.messages import DeclineReason as DeclineReason
from gossip.exchange.messages import Gone as Gone
from gossip.exchange.messages import Manifest as Manifest
from gossip.exchange.messages import Offer as Offer
from gossip.exchange.messages import Parts as Parts
from gossip.exchange.messages import Piece as Piece
from gossip.exchange.messages import PieceRequest as PieceRequest
from gossip.exchange.messages import Probe as Probe
from gossip.exchange.messages import Received as Received
from gossip.exchange.messages import Section as Section
from gossip.exchange.messages import StateRequest as StateRequest
from gossip.exchange.messages import Weights as Weights
from gossip.exchange.swap import probe_coordinates as probe_coordinates
from gossip.rounds.matching import partners_of_round as partners_of_round
from gossip.rounds.matching import preferences as preferences
from gossip.transfer import chunks as pieces
from gossip.transfer.assembly import Key as PieceKey
from gossip.transfer.download import donors as donor_order
from noloco_node.cli.main import app as app
from noloco_node.cli.status import summary as status_summary
from noloco_node.data.blocks import open_blocks as open_blocks
from noloco_node.data.shuffled_blocks import mixed as mixed
from noloco_node.errors import Exit as Exit
from noloco_node.export.exporter import Order as ExportOrder
from noloco_node.export.exporter import export as export
from noloco_node.export.parts import Found as FoundStage
from noloco_node.export.parts import _file as lay_down
from noloco_node.export.parts import _write_part as write_part
from noloco_node.export.parts import laid_down as laid_down
from noloco_node.export.parts import path_of as replica_path
from noloco_node.export.parts import read_part as read_part
from noloco_node.export.replica_fetch import Copy as Copy
from noloco_node.export.replica_files import Merged as Merged
from noloco_node.export.replica_files import in_home as in_home
from noloco_node.journal import events as journal
from noloco_node.libp2p.dht import relay_records as told
from noloco_node.libp2p.dht import signing
from noloco_node.libp2p.endpoint import identity
from noloco_node.libp2p.streams import dialback
from noloco_node.limits.budget import Allowance as Allowance
from noloco_node.limits.rate_limit import MeteredNetwork as MeteredNetwork
from noloco_node.limits.traffic_ledger import Ledger as Ledger
from noloco_node.network.wire import Intake as Intake
from noloco_node.network.wire import Schema as Schema
from noloco_node.network.wire import beat as beat
from noloco_node.network.wire import encode as encode
from noloco_node.network.wire import end as end
from noloco_node.network.wire import error as error
from noloco_node.network.wrapper import Around as Around
from noloco_node.planning.model_layout import blueprint as blueprint
from noloco_node.planning.model_layout import build_stage as build_stage
from noloco_node.planning.plan_text import report as check_report
from noloco_node.run.peer_state import State as State
from noloco_node.run.presets import PRESETS as PRESETS
from noloco_node.run.presets import run_text as run_text
from noloco_node.run.protocols import gossip_schema as gossip_schema
from noloco_node.run.protocols import microbatch_schema as microbatch_schema
from noloco_node.run.protocols import state_schema as state_schema
from noloco_node.run.protocols import topic as topic
from noloco_node.run.runfile import canonical as canonical
from noloco_node.run.runfile import content_hashes as content_hashes
from noloco_node.sim.explore.schedule_generator import draw as drawn_scenario
from noloco_node.sim.report.collector import Tally as Tally
from noloco_node.sim.report.command import Flags as Flags
from noloco_node.sim.report.command import complete as complete
from noloco_node.sim.report.command import put_together as put_together
from noloco_node.sim.report.figures import Report as Report
from noloco_node.sim.report.figures import make_report as make_report
from noloco_node.sim.report.trace import Trace as Trace
from noloco_node.sim.scenario.toml_writer import scenario_text as scenario_text
from noloco_node.sim.world import Watcher as Watcher
from noloco_node.sim.world import World as World
from noloco_node.sim.world import simulate as simulate
from noloco_node.state_sync.manifests import SNAPSHOT as SNAPSHOT
from noloco_node.state_sync.replica_mean import LeftOut as LeftOut
from noloco_node.state_sync.replica_mean import Standing as Standing
from noloco_node.storage.checkpoint import Checkpoint as Checkpoint
from noloco_node.storage.checkpoint import Counters as Counters
from noloco_node.storage.checkpoint import save as save_checkpoint
from noloco_node.storage.checkpoint_store import OwnCheckpoints as OwnCheckpoints
from noloco_node.storage.home import Holder as Holder
from noloco_node.storage.home import Home as Home
from noloco_node.storage.home import holder as holder
from noloco_node.storage.partial_download import Partial as Partial
from noloco_node.storage.snapshot_store import DirectoryStore as DirectoryStore
from noloco_node.swarm import speed_test as measuring
from noloco_node.swarm.connection import prefix as prefix
from noloco_node.swarm.invite import format as format_invite
from noloco_node.swarm.invite import parse as parse_invite
from noloco_node.swarm.peer_records import Published as Published
from noloco_node.swarm.peer_records import SourceRecord as SourceRecord
from noloco_node.swarm.peer_records import decode_record as decode_record
from noloco_node.swarm.peer_records import decode_source as decode_source
from noloco_node.swarm.roster import PeerRecord as PeerRecord
from noloco_node.swarm.roster import Roster as Roster
from noloco_node.swarm.run_distribution import SCHEMA as RUN_SCHEMA
from noloco_node.swarm.run_distribution import TOPIC as RUN_TOPIC
from noloco_node.swarm.run_distribution import Recipe as Recipe
from noloco_node.swarm.run_distribution import RunFile as RunFile
from noloco_node.swarm.run_distribution import RunRequest as RunRequest
from pipeline.messages import Gradient as Gradient
from pipeline.messages import Microbatch as Microbatch
from pipeline.messages import Reason as Reason
from pipeline.messages import Refused as Refused
