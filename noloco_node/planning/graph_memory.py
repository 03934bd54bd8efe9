"""What autograd keeps of a microbatch at a stage, measured on two small models of the run's own family.

Every width of the run's config is shrunk by one factor, everything else stays. Stages of one or two layers of these
models take a few short microbatches, and the bytes that autograd keeps are counted. For a layer they are linear in the
widths and in the sequences, and quadratic in the length where a family computes the scores of attention by itself. So
twelve passes determine them at the run's own sizes, up to rounding of the widths. Layers of one kind (same parameters,
same entry in the config's lists) are measured once. Logits are counted apart, for the loss takes many in chunks.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from noloco_node.machine.memory import GraphBytes, SavedTensors
from noloco_node.planning.model_layout import ModelLayout
from noloco_node.run.config import PipelineConfig
from pipeline.adapters.settings import AdapterConfig
from pipeline.decoder_slice import Cut, find_decoder_parts, multiplied_weights
from pipeline.forward_pass import LOGITS, Slice
from pipeline.model_config import Config, Prepared
from pipeline.partition import empty_slice, skeleton

_WIDTH = re.compile(r"(_size|_dim|_rank|^n_embd|^n_inner|^d_model)$")
_NO_WIDTH = re.compile(r"vocab|window|patch|kernel|chunk|batch|group")
_WINDOWS = ("sliding_window", "window_size")
_SHORT_WINDOW = 4
_HEADS = ((4, 8), (8, 16), (10, 20), (16, 32))
"""Widths of a head in the two small models; the first pair that the family can be built with. Rotary embeddings want
even parts of them."""
_BATCHES, _LENGTHS = (1, 2), (8, 16, 32)
_VOCABULARY = 97  # of the small models; no other size of theirs, so that logits are known by it
_LOGIT_BYTES, _LOGITS_BESIDE = 4, 12
"""What autograd keeps of a logit where a family neither scales nor caps them; what else a pass holds of it at its peak:
itself, and the gradients of it and of its softmax."""
_MOST_FAMILIES = 256

Point = tuple[float, float, float]  # scale of the widths, sequences of a microbatch, and their length


class _Kept(NamedTuple):
    """Bytes that autograd keeps of a microbatch, and of each logit. `plain`: logits are what the head gives."""

    rest: float
    a_logit: float
    plain: bool


class _Family:
    """The small models of one config, and what was measured of them."""

    def __init__(
        self, config: Config, lengths: tuple[int, ...], half: bool, packed: bool, adapter: AdapterConfig | None
    ) -> None:
        self._adapter = adapter
        self._config, self._lengths, self._half, self._packed = config, lengths, half, packed
        depth = int(config.num_hidden_layers)
        whole = skeleton(config)
        layers = whole.get_submodule(find_decoder_parts(whole, depth).spine[-1])
        lists = [value for value in vars(config).values() if isinstance(value, list) and len(value) == depth]
        self._kinds = [
            (
                str([value[number] for value in lists]),
                tuple((name, tuple(weight.shape)) for name, weight in layer.named_parameters()),
            )
            for number, layer in enumerate(layers.children())
        ]
        self._found: dict[Any, dict[Point, _Kept]] = {}
        self.stages: dict[tuple[Cut, tuple[int, int]], GraphBytes] = {}
        """What stages keep of a microbatch of a shape: a search for a plan asks again and again."""
        self._scales = self._usable_scales()

    def _usable_scales(self) -> tuple[float, ...]:
        """Return the scales of the first pair of small models that can be built; the run's own where there is none."""
        config = self._config
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        for pair in _HEADS:
            if max(pair) >= head:
                break
            scales = tuple(each / head for each in pair)
            if any(rotated * scale % 2 for rotated in _rotated(config, head) for scale in scales):
                continue
            try:
                for scale in scales:
                    self._measure(Cut(0, 1, embeds=True, head=False), scale, [(1, self._lengths[0])])
            except (AssertionError, AttributeError, IndexError, RuntimeError, TypeError, ValueError):
                continue
            return scales
        return (1.0,)

    def kept(self, cut: Cut, batch: int, length: int) -> _Kept:
        """Return what autograd keeps of a microbatch of this shape in a cut of the run's own widths."""
        key = (cut.embeds, cut.head, tuple(self._kinds[cut.first_layer : cut.end_layer]))
        if key not in self._found:
            shapes = list(product(_BATCHES, self._lengths))
            self._found[key] = {
                (scale, *shape): kept
                for scale in self._scales
                for shape, kept in zip(shapes, self._measure(cut, scale, shapes), strict=True)
            }
        found = self._found[key]
        some = next(reversed(found.values()))
        rest = {point: kept.rest for point, kept in found.items()}
        return some._replace(rest=extrapolated(rest, (1.0, float(batch), float(length))))

    def _measure(self, cut: Cut, scale: float, shapes: Sequence[tuple[int, int]]) -> list[_Kept]:
        config = shrunk(self._config, scale)
        part = _filled(empty_slice(config, cut._replace(adapter=self._adapter)), self._half)
        return [self._sample(part, int(config.hidden_size), *shape) for shape in shapes]

    def _sample(self, part: Slice, width: int, batch: int, length: int) -> _Kept:
        ids = torch.arange(batch * length).remainder(_VOCABULARY).view(batch, length)
        given = ids if part.cut.embeds else torch.zeros(batch, length, width, requires_grad=True)
        # Attention within rows takes a mask, which some of its implementations keep.
        positions = torch.arange(length).remainder(-(-length // 2)).expand(batch, -1) if self._packed else None
        logits, rest = SavedTensors(_are_logits), SavedTensors(lambda each: not _are_logits(each))
        plain = True
        for counted in (rest, logits) if part.cut.head else (rest,):
            with counted:
                with torch.autocast("cpu", torch.bfloat16) if self._half else nullcontext():
                    output = part(given, positions=positions)
                if part.cut.head:
                    plain = not str(output.grad_fn.name()).startswith(("Mul", "Div", "Tanh"))
                    functional.cross_entropy(output.float().flatten(0, 1), ids.flatten())
        return _Kept(rest.bytes, logits.bytes / (ids.numel() * _VOCABULARY), plain)


_families: dict[tuple[str, tuple[int, ...], bool, bool, AdapterConfig | None], _Family] = {}


def graph_bytes(
    pipeline: PipelineConfig, layout: ModelLayout, number: int, *, half: bool, packed: bool = False
) -> GraphBytes:
    """Return what autograd keeps of a microbatch at a stage, and what else the last one's pass holds of logits.

    By layers: the inputs of all of them, float32, and what autograd keeps of the one that keeps most. `half`: the
    matrices are multiplied in bfloat16. `packed`: rows share a sequence. What a stage is given does not count: it waits
    in main memory.
    """
    shape, cut = pipeline.ids_shape, layout.cuts[number]
    family = _family(layout.prepared, shape[1], half, packed, layout.adapter)
    if (cut, shape) not in family.stages:
        family.stages[cut, shape] = _graph_bytes(family, cut, shape, layout)
    return family.stages[cut, shape]


def _graph_bytes(family: _Family, cut: Cut, shape: tuple[int, int], layout: ModelLayout) -> GraphBytes:
    batch, length = shape

    def kept(first: int, end: int, *, embeds: bool = False, head: bool = False) -> _Kept:
        return family.kept(Cut(first, end, embeds=embeds, head=head), batch, length)

    first, end = cut.first_layer, cut.end_layer
    layers = [kept(first, first + 1).rest]
    layers += [kept(each - 1, each + 1).rest - kept(each - 1, each).rest for each in range(first + 1, end)]
    ends = kept(first, first + 1, embeds=True).rest - layers[0] if cut.embeds else 0.0
    if cut.head:
        last = kept(end - 1, end, head=True)
        ends += last.rest - kept(end - 1, end).rest
        plain = last.plain and last.a_logit <= _LOGIT_BYTES
        logits = batch * length * layout.vocabulary
        ends += (last.a_logit + _LOGITS_BESIDE) * (min(LOGITS, logits) if plain else logits)
    inputs = 4 * batch * length * layout.width * len(layers)
    return GraphBytes(round(ends + sum(layers)), round(ends + min(inputs + max(layers), sum(layers))))


def _rotated(config: Config, head: int) -> list[float]:
    """Return the parts of a head that are rotated by position: a narrower model needs even ones."""
    rope = getattr(config, "rope_parameters", None)
    share = (rope or {}).get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    named = (getattr(config, name, None) for name in ("rotary_dim", "qk_rope_head_dim"))
    return [round(share * head, 6), *(float(each) for each in named if each)]


def _family(prepared: Prepared, length: int, half: bool, packed: bool, adapter: AdapterConfig | None) -> _Family:
    """Return the family of a config, whose windows are short where sequences of this length are longer."""
    config = prepared.config
    cut = {name: _SHORT_WINDOW for name in _WINDOWS if 0 < (getattr(config, name, None) or 0) < length}
    lengths = _LENGTHS if length > _LENGTHS[-1] else (length,)
    key = (prepared.text + str(cut), lengths, half, packed, adapter)
    if key not in _families:
        if len(_families) >= _MOST_FAMILIES:
            _families.clear()
        config = copy.deepcopy(config)
        for name, window in cut.items():
            setattr(config, name, window)
        _families[key] = _Family(config, lengths, half, packed, adapter)
    return _families[key]


def extrapolated(values: Mapping[Point, float], where: Point) -> float:
    """Return the value at a point of the polynomial of least degree in each coordinate through values on a grid."""
    axes = [sorted({point[axis] for point in values}) for axis in range(3)]
    return sum(
        value
        * prod(
            (where[axis] - other) / (point[axis] - other)
            for axis in range(3)
            for other in axes[axis]
            if other != point[axis]
        )
        for point, value in values.items()
    )


def shrunk(config: Config, scale: float) -> Config:
    small = copy.deepcopy(config)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(small, name, None)
    small.vocab_size = _VOCABULARY
    for name, value in vars(config).items():
        if type(value) is int and value > 0 and _WIDTH.search(name) and not _NO_WIDTH.search(name):
            setattr(small, name, max(1, round(value * scale)))
    return small


def _filled(part: Slice, half: bool) -> Slice:
    """Give a slice weights of zero, which take hardly any memory. `half`: those that are multiplied are bfloat16."""
    multiplied = multiplied_weights(part) if half else frozenset()
    for prefix, module in part.named_modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            kind = torch.bfloat16 if f"{prefix}.{name}" in multiplied else torch.float32
            module.register_parameter(name, nn.Parameter(torch.zeros(weight.shape, dtype=kind)))
        for name, frozen in list(module.named_buffers(recurse=False)):
            if frozen.is_meta:
                module.register_buffer(name, torch.zeros_like(frozen, device="cpu"))
    return part


def _are_logits(tensor: Tensor) -> bool:
    return tensor.ndim > 1 and tensor.shape[-1] == _VOCABULARY
