"""What this machine gives to a node: device, text, disk, clocks and line."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from msgspec import structs

from gossip.exchange.messages import ReplicaState
from noloco_node.cli.options import JoinOptions
from noloco_node.data.encoding import with_tokenizer_in
from noloco_node.data.held_out_text import EvaluationText, HeldOutText
from noloco_node.data.text_source import BackgroundOpen, TextSource
from noloco_node.data.token_text import Prompts
from noloco_node.machine import memory
from noloco_node.machine.device import Device
from noloco_node.machine.interface import Dimensions, FirstWeights, Host
from noloco_node.machine.system import asleep_s
from noloco_node.network.swarm_clock import CLOCK
from noloco_node.planning.bandwidth import bandwidth_seconds, microbatch_bytes
from noloco_node.planning.checkpoint_map import RunWeights
from noloco_node.planning.model_layout import ModelLayout, make_stage, model_layout
from noloco_node.planning.plan import KeptGraphs, graphs_that_fit, memories_on
from noloco_node.run.config import RunConfig
from noloco_node.storage.checkpoint import Checkpoint, evaluated_among, files, save
from noloco_node.storage.checkpoint_store import CheckpointStore
from noloco_node.storage.home import RunPaths
from noloco_node.storage.transfer_files import PartialDownload, StateFile
from noloco_node.storage.weight_store import WeightStore
from noloco_node.swarm.run_distribution import RunFileText
from noloco_node.terminal import say
from pipeline.hardware.device_type import DEVICE_TYPES
from pipeline.stage import Stage


class MachineRequest(NamedTuple):
    """What this machine is asked to take part in: a run, as its owner chose, with this home and device."""

    options: JoinOptions
    home: RunPaths
    torch_device: torch.device
    recipe: RunFileText


class HostDisk(Host):
    """The part of a host that is its home: checkpoints, snapshots and copies of a node's stages; and its clock."""

    device: Device

    def __init__(self, request: MachineRequest, peer: str) -> None:
        super().__init__()
        options, home, self._torch_device, recipe = request
        self._options, self._home, self._recipe = options, home, recipe
        self.checkpoints = CheckpointStore(home.checkpoint, home.snapshots, recipe.digest, peer, say)

    async def save(self, checkpoint: Checkpoint) -> str:
        loop = asyncio.get_running_loop()

        def read() -> None:
            loop.call_soon_threadsafe(checkpoint.read)

        return await asyncio.to_thread(_save, self._home.checkpoint, checkpoint._replace(read=read), self._options.keep)

    async def hold(self, state: ReplicaState) -> StateFile:
        return await self.device.beside(StateFile, self._home.path, state)

    def partial_download(self, stage: int) -> PartialDownload:
        return PartialDownload(self._home.partial_download, stage, say)

    def unix_time(self) -> float:
        return CLOCK.unix_s()

    def clock_ahead_s(self) -> float:
        return CLOCK.ahead_s()

    def asleep_s(self) -> float:
        return asleep_s()


class EvaluationMachine:
    """Implements `noloco_node.machine.interface.EvaluationHost`; to be closed."""

    def __init__(self, run: RunConfig, options: JoinOptions, directory: Path) -> None:
        """`directory`: keeps the best weights on a text; another text, such as another --data, begins anew."""
        self._text, self._directory = EvaluationText(run, options.data), directory
        self._data, self._prompts = run.data, options.prompts
        self._digest = ""

    async def text(self) -> HeldOutText:
        held = await asyncio.to_thread(self._text.read)
        self._digest = held.digest
        return held

    async def prompts(self) -> Prompts:
        return await asyncio.to_thread(Prompts, self._data, self._prompts)

    async def best_loss(self) -> float | None:
        kept = await asyncio.to_thread(lambda: evaluated_among(files(self._directory)))
        return min((each.held_out_loss for each in kept.values() if each.text == self._digest), default=None)

    async def keep(self, evaluated: Checkpoint) -> None:
        counters = structs.replace(evaluated.counters, text=self._digest)
        await asyncio.to_thread(save, self._directory, evaluated._replace(counters=counters), 1)

    def close(self) -> None:
        self._text.close()


class StageHost(HostDisk):
    """The part of a host that trains stages on a text: device, memory, line, both kinds of text; to be closed."""

    evaluation: EvaluationMachine | None

    def __init__(self, layout: Dimensions, checkpoint: FirstCheckpoint, request: MachineRequest, peer: str) -> None:
        super().__init__(request, peer)
        options, home, torch_device, recipe = request
        self._dimensions = layout
        self.first_weights, self.tokenizer = checkpoint
        data = with_tokenizer_in(recipe.run.data, home.tokenizer)
        run = structs.replace(recipe.run, data=data)
        self._text = BackgroundOpen(partial(TextSource, run, options.data, peer, layout.vocabulary))
        self.evaluation = EvaluationMachine(run, options, home.best) if run.data.evaluate_every_rounds else None
        self.device = Device(torch_device, options.slowdown)

    def close(self) -> None:
        """Close the text and end the device's threads."""
        # The text first: a thread that waits for it ends with it.
        try:
            self._text.close()
            if self.evaluation is not None:
                self.evaluation.close()
        finally:
            self.device.close()

    def free_bytes(self, given_back: int = 0) -> int:
        memory.trim()
        bounds = [memory.free_bytes(self._torch_device) + given_back, self._options.most_memory_bytes]
        if DEVICE_TYPES[self._torch_device.type].shares_memory:
            bounds.append(self._options.most_ram_bytes)
        return min(bound for bound in bounds if bound is not None)

    def free_beside_bytes(self, given_back: int = 0) -> int:
        free, most = memory.machine_free_bytes() + given_back, self._options.most_ram_bytes
        return free if most is None else min(free, most)

    def prepare_text(self, stage: int) -> None:
        if stage == 0:
            self._text.begin()

    async def open_text(self) -> TextSource:
        return await self._text.opened()

    def line_s(self, stage: int) -> float:
        return bandwidth_seconds(microbatch_bytes(self._recipe.run, self._dimensions, stage), self._options.allowance)


class HostMachine(StageHost):
    """What this machine gives to one node of a run; to be closed."""

    def __init__(self, layout: ModelLayout, checkpoint: FirstCheckpoint, request: MachineRequest, peer: str) -> None:
        super().__init__(layout, checkpoint, request, peer)
        self._layout, free = layout, self.free_bytes()
        self._needs = memories_on(request.recipe.run, layout, request.torch_device)
        if DEVICE_TYPES[request.torch_device.type].shares_memory:
            self.needs_bytes = [each.total for each in self._needs]
        else:
            room = memory.usable_bytes(free), memory.usable_bytes(self.free_beside_bytes())
            self._needs = tuple(each.placed(*room) for each in self._needs)
            self.needs_bytes = [each.computing for each in self._needs]
            self.beside_bytes = [each.beside for each in self._needs]
        self.graph_bytes = [each.graphs for each in self._needs]
        pipeline, plain = request.recipe.run.pipeline, 1.0 + layout.backward
        kept = [self._kept(stage, free) for stage in range(len(self._needs))]
        self.passes = [plain + each.computed_again(pipeline.in_flight(stage)) for stage, each in enumerate(kept)]
        self.passes_alone = [plain + each.computed_again(1) for each in kept]

    def build(self, stage: int) -> Stage:
        # The driver still counts the memory of a stage that we left as ours.
        DEVICE_TYPES[self._torch_device.type].empty_cache(self._torch_device)
        run, kept, beside = self._recipe.run, self._kept(stage, self.free_bytes()), self._needs[stage].moments_beside
        return make_stage(
            run, self._layout, stage, self._torch_device, kept.number, by_layers=kept.by_layers, moments_beside=beside
        )

    def _kept(self, stage: int, free: int) -> KeptGraphs:
        """Return the graphs that a stage keeps on a device with so many bytes free."""
        most = self._recipe.run.pipeline.in_flight(stage)
        return graphs_that_fit(free, self.needs_bytes[stage], self.graph_bytes[stage], most)


class Machine(NamedTuple):
    """What this machine gives to a node of one run: the sizes of its model, and the host of the peer with an id."""

    dimensions: Dimensions
    host: Callable[[str], Host]


def machine_for(request: MachineRequest) -> Machine:
    """Work out what this machine gives to a node of a run; this may read large files, and raise `UserError`."""
    layout = model_layout(request.recipe.run)

    def put_by(store: WeightStore) -> RunWeights:
        return RunWeights(layout.prepared, layout.checkpoint, store, frozen=layout.adapter is not None)

    return Machine(layout, partial(HostMachine, layout, first_checkpoint(request, put_by), request))


class FirstCheckpoint(NamedTuple):
    """The weights and the tokenizer that a run starts from, here or still to come; None if it starts from its seed."""

    weights: FirstWeights | None
    tokenizer: WeightStore | None


def first_checkpoint(request: MachineRequest, put_by: Callable[[WeightStore], FirstWeights]) -> FirstCheckpoint:
    """Return the weights and tokenizer that a run starts from; this may read large files.

    `put_by`: makes of the files what puts them into stages. Raises `UserError` if the owner named a directory with
    other files.
    """
    options, home, _, recipe = request
    tokenizer, listed = None, recipe.run.data.tokenizer_files
    if listed:
        tokenizer = WeightStore.filling(home.tokenizer, listed, options.most_disk_bytes)
    weights = weight_store(request)
    if options.weights is not None and tokenizer is not None:
        WeightStore.whole(options.weights, tokenizer.files).copy_to(tokenizer)
    return FirstCheckpoint(None if weights is None else put_by(weights), tokenizer)


def weight_store(request: MachineRequest) -> WeightStore | None:
    """Return the files of the weights that a run starts from, as far as they are here; None if it lists none."""
    options, home, _, recipe = request
    listed = recipe.run.model.fetched
    if options.weights is not None:
        return WeightStore.whole(options.weights, listed)
    return WeightStore.filling(home.weights, listed, options.most_disk_bytes) if listed else None


def _save(directory: Path, checkpoint: Checkpoint, keep: int) -> str:
    path = str(save(directory, checkpoint, keep))
    memory.trim()  # about as often as anything large is made and dropped
    return path
