"""All that the tests of compatibility use of the product: the one place that knows where it is, and what it is called.

The names here are these tests' own. What is renamed in the product is imported here by `as`.
"""
# ruff: noqa: F401

from __future__ import annotations

from gossip import codec, pieces
from gossip.catch_up import donors as donor_order
from gossip.exchange import probe_coordinates
from gossip.formats import Format
from gossip.holding import Key as PieceKey
from gossip.matching import partners_of_round, preferences
from gossip.messages import (
    Accepted,
    Ahead,
    Busy,
    Declined,
    DeclineReason,
    Gone,
    Manifest,
    Offer,
    Parts,
    Piece,
    PieceRequest,
    Probe,
    Received,
    Section,
    StateRequest,
    Weights,
)
from noloco_node import journal
from noloco_node.around import Around
from noloco_node.blueprint import blueprint, build_stage
from noloco_node.budget import Allowance
from noloco_node.checkpoint import Checkpoint, Counters
from noloco_node.checkpoint import save as save_checkpoint
from noloco_node.cli import app
from noloco_node.copies import Merged, in_home
from noloco_node.data import open_blocks
from noloco_node.doctor import desk as measuring
from noloco_node.errors import Exit
from noloco_node.exporting import Found as FoundStage
from noloco_node.exporting import Order as ExportOrder
from noloco_node.exporting import _file as lay_down
from noloco_node.exporting import _write_part as write_part
from noloco_node.exporting import export, laid_down, read_part
from noloco_node.exporting import path_of as replica_path
from noloco_node.former import OwnCheckpoints
from noloco_node.gather import Copy
from noloco_node.home import Holder, Home, holder
from noloco_node.invite import format as format_invite
from noloco_node.invite import parse as parse_invite
from noloco_node.ledger import Ledger
from noloco_node.libp2p import dialback, identity, signing, told
from noloco_node.merging import LeftOut, Standing
from noloco_node.metered import MeteredNetwork
from noloco_node.mixing import mixed
from noloco_node.outlines import SNAPSHOT
from noloco_node.partial import Partial
from noloco_node.plan import report as check_report
from noloco_node.presets import PRESETS, run_text
from noloco_node.recipe import SCHEMA as RUN_SCHEMA
from noloco_node.recipe import TOPIC as RUN_TOPIC
from noloco_node.recipe import Recipe, RunFile, RunRequest
from noloco_node.roster import PeerRecord, Roster, State
from noloco_node.runfile import canonical, content_hashes
from noloco_node.sightings import Published, SourceRecord, decode_record, decode_source
from noloco_node.sim.explore.draw import draw as drawn_scenario
from noloco_node.sim.report.command import Flags, complete, put_together
from noloco_node.sim.report.figures import Report, make_report
from noloco_node.sim.report.tally import Tally
from noloco_node.sim.report.trace import Trace
from noloco_node.sim.scenario_text import scenario_text
from noloco_node.sim.world import Watcher, World, simulate
from noloco_node.snapshots import DirectoryStore
from noloco_node.status import summary as status_summary
from noloco_node.swarm import prefix
from noloco_node.topics import gossip_schema, microbatch_schema, state_schema, topic
from noloco_node.wire import Intake, Schema, beat, encode, end, error
from pipeline.messages import Gradient, Microbatch, Reason, Refused
