"""Which tensors of a checkpoint make which parameters of a model.

On disk a family may keep other names, and other tensors, than its modules have in memory: Mixtral's experts lie one by
one and are computed with as one. transformers knows how one becomes the other (`transformers.conversion_mapping`), and
does so for a whole model at once; a stage asks the same rules for its own parameters, and reads nothing else. With
tensors on the meta device they say whether a checkpoint fits before any of it is read. `RunWeights` reads a stage's
part of the weights that a run starts from.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from noloco_node.errors import UserError, config_error, one_line
from noloco_node.machine.interface import StageModel
from noloco_node.storage.weight_store import FilePieceKey, WeightStore
from pipeline.decoder_slice import find_decoder_parts
from pipeline.model_config import Prepared
from pipeline.partition import skeleton
from pipeline.stage import Stage

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]  # name and shape of parameters


class _Origin(NamedTuple):
    """What makes a parameter, and perhaps others: `first`, the first of them. `converter`: None renames one tensor.

    `tensors`: names in the checkpoint, each with the pattern of the converter that it fits.
    """

    first: str
    converter: Any
    tensors: list[tuple[str, str | None]]


class CheckpointMap:
    """The way from the tensors of one checkpoint, by their names, to the parameters of a model."""

    def __init__(self, prepared: Prepared, names: Iterable[str]) -> None:
        self._whole = skeleton(prepared.config)
        self._state: dict[str, Tensor] = self._whole.state_dict()
        rules = get_model_conversion_mapping(self._whole)
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._origins: dict[str, _Origin] = {}
        self.left_out: list[str] = []
        """Tensors that are part of nothing in the model, but for those that its family leaves out by itself."""
        self.twins: tuple[str, ...] = ()
        """The embedding and the head of a checkpoint that holds both, of a model whose head is its embedding."""
        # Tensors of a list, such as experts, are taken in the order of their numbers.
        for name in sorted(names, key=dot_natural_key):
            self._add(name)
        if prepared.tied:
            anatomy = find_decoder_parts(self._whole, prepared.config.num_hidden_layers)
            embedding = self._origins.get(f"{anatomy.embedding}.weight")
            if embedding is not None:
                head = self._origins.get(f"{anatomy.head}.weight", embedding)
                self.twins = () if head is embedding else (embedding.tensors[-1][0], head.tensors[-1][0])
                self._origins[f"{anatomy.head}.weight"] = embedding

    def sources(self, parameters: Iterable[str]) -> list[str]:
        """Return the names in the checkpoint of what makes these parameters."""
        origins = (self._origins[name] for name in parameters if name in self._origins)
        return list(dict.fromkeys(name for origin in origins for name, _ in origin.tensors))

    def is_shared(self, parameter: str) -> bool:
        """Say whether a parameter is the tensor of another one: a head that is tied to the embedding."""
        origin = self._origins.get(parameter)
        return origin is not None and origin.converter is None and origin.first != parameter

    def load(self, shapes: Shapes, read: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield these parameters as float32, in their order; `read` returns a tensor of the checkpoint by its name.

        At the end it raises ValueError naming what is missing, of another shape, or no float.
        """
        wrong: list[str] = []
        made: tuple[_Origin | None, dict[str, Tensor]] = (None, {})
        for name, shape in shapes.items():
            origin = self._origins.get(name)
            if origin is None:
                wrong.append(f"{name} is missing")
                continue
            if made[0] is not origin:
                try:
                    made = (origin, self._made(origin, read))
                except RuntimeError as error:  # of torch: these tensors cannot be one
                    wrong.append(f"{origin.first} cannot be put together: {error}")
                    continue
            tensor = made[1].get(name if origin.converter is not None else origin.first)
            if tensor is None:
                wrong.append(f"{name} is missing")
            elif not tensor.is_floating_point():
                wrong.append(f"{name} holds integers: codes, and no weights")
            elif tuple(tensor.shape) != shape:
                wrong.append(f"{name} is {list(tensor.shape)}, not {list(shape)}")
            else:
                yield name, tensor.to(torch.float32)
        if wrong:
            more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise ValueError(f"the checkpoint does not fit the model: {'; '.join(wrong[:3])}{more}")

    def _add(self, name: str) -> None:
        prefix = self._whole.base_model_prefix
        first, pattern = rename_source_key(name, self._renamings, self._converters, prefix, self._state)
        if first not in self._state and name in self._state:
            first, pattern = name, None
        if first not in self._state:  # of something that this model has not, such as another head
            ignored = self._whole._keys_to_ignore_on_load_unexpected or ()
            if not any(re.search(each, name) for each in ignored):
                self.left_out.append(name)
            return
        origin = self._origins.get(first)
        if origin is None:
            # As transformers chooses: of several the last.
            fitting = (each for each in reversed(self._converters) if pattern in each.source_patterns)
            converter = None if pattern is None else next(fitting)
            origin = _Origin(first, converter, [])
            targets = [""] if converter is None else converter.target_patterns
            for target in targets:
                self._origins.setdefault(first.replace(targets[0], target) if target else first, origin)
        origin.tensors.append((name, pattern))

    def _made(self, origin: _Origin, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        if origin.converter is None:
            return {origin.first: read(origin.tensors[-1][0])}
        converter = copy.deepcopy(origin.converter)
        for name, pattern in origin.tensors:
            converter.add_tensor(origin.first, name, pattern, read(name))
        made = converter.convert(origin.first, model=self._whole, config=self._whole.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def read_parameters(prepared: Prepared, shapes: Shapes, paths: Sequence[Path]) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters from safetensors files; `UserError` (CONFIG) where these are of another model."""
    with opened(paths) as files:
        yield from CheckpointMap(prepared, files).load(shapes, lambda name: files[name].get_tensor(name))


def load_frozen(
    prepared: Prepared, shapes: Shapes, paths: Sequence[Path], load: Callable[[Iterable[tuple[str, Tensor]]], None]
) -> None:
    """Let `load` take parameters as `read_parameters` yields them, or codes and scales of those that files have so.

    Raises `UserError` (CONFIG) where the files are of another model, or have codes of another form.
    """
    with opened(paths) as files:

        def read(name: str) -> Tensor:
            if name not in files:
                raise ValueError(f"{name} is missing")
            found: Tensor = files[name].get_tensor(name)
            return found

        codes = [(name, scales) for name in shapes if (scales := scales_of(name)) in files]
        others = {name: shape for name, shape in shapes.items() if scales_of(name) not in files}
        load((name, read(name)) for pair in codes for name in pair)
        load(CheckpointMap(prepared, files).load(others, read))


def scales_of(name: str) -> str:
    """Return the name of the scales of a weight, if it is codes."""
    return f"{name.rpartition('.')[0]}.scales"


def check_files(prepared: Prepared, stages: Iterable[Shapes], paths: Sequence[Path]) -> list[str]:
    """Return the tensors of safetensors files that the model has no place for.

    Raises `UserError` (CONFIG) unless they hold the parameters of all stages, in finite numbers, and one head.
    """
    with opened(paths) as files:
        slices = {name: file.get_slice(name) for name, file in files.items()}
        found = {name: (each.get_dtype(), each.get_shape()) for name, each in slices.items()}
        outline = CheckpointMap(prepared, found)
        if outline.twins and not torch.equal(*(files[name].get_tensor(name) for name in outline.twins)):
            # Transformers takes it for an untied model, whatever its config says.
            raise ValueError(
                f"{' and '.join(outline.twins)} differ, and by config.json (tie_word_embeddings) they are one tensor;"
                " where each has its own, false is right there"
            )
        for name in check_tensors(prepared, stages, found):
            tensor = files[name].get_tensor(name)
            # Torch cannot ask it of each kind of 8 bits.
            if not (tensor.float() if tensor.itemsize == 1 else tensor).isfinite().all():
                raise ValueError(f"{name} holds what is no finite number")
        return outline.left_out


def check_tensors(
    prepared: Prepared, stages: Iterable[Shapes], found: Mapping[str, tuple[str, Sequence[int]]]
) -> list[str]:
    """Return the tensors that make the parameters of all stages; raise ValueError unless there are all.

    `found`: dtype, as safetensors spells it, and shape of each tensor, by their names in a checkpoint.
    """

    def read(name: str) -> Tensor:
        dtype, shape = found[name]
        kind = torch.float32 if "F" in dtype else torch.int8  # of integers
        return torch.empty(tuple(shape), dtype=kind, device="meta")

    outline = CheckpointMap(prepared, found)
    return outline.sources([name for shapes in stages for name, _ in outline.load(shapes, read)])


@contextmanager
def opened(paths: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """Yield the safetensors file of each tensor; raise `UserError` (CONFIG) for none, or those of another model.

    What the caller says of them meanwhile as ValueError becomes that error.
    """
    try:
        with ExitStack() as stack:
            where: dict[str, Any] = {}
            for path in paths:
                try:
                    file = stack.enter_context(safe_open(path, framework="pt"))
                except (OSError, SafetensorError) as error:
                    raise ValueError(f"{path.name} is no whole safetensors file: {error}") from error
                where |= dict.fromkeys(file.keys(), file)
            if not where:
                raise ValueError("there is no tensor in any safetensors file there")
            yield where
    except (ValueError, OSError, SafetensorError) as error:
        raise unfit(str(paths[0].parent) if paths else "this directory", error) from error


def unfit(where: str, error: Exception) -> UserError:
    return config_error(
        f"The weights in {where} cannot be loaded.",
        one_line(error),
        "a Hugging Face directory with safetensors files of the model's own family and sizes",
    )


class RunWeights:
    """The weights that a run starts from; implements `noloco_node.machine.interface.FirstWeights`.

    `stages`: what each stage has of them. `store`: the files as this machine has them. `frozen`: whether adapters are
    trained over them.
    """

    def __init__(
        self, prepared: Prepared, stages: Sequence[Shapes], store: WeightStore, *, frozen: bool = False
    ) -> None:
        self._prepared, self._stages, self.store, self.frozen = prepared, stages, store, frozen

    def pieces(self, stage: int) -> list[FilePieceKey]:
        """Return the pieces that hold a stage's parameters; the headers of all files are here.

        Raises `UserError` where these are none.
        """
        try:
            there, wanted = self.store.tensors(), self._stages[stage]
            codes = map(scales_of, wanted) if self.frozen else ()
            return self.store.pieces_of((*CheckpointMap(self._prepared, there).sources(wanted), *codes))
        except ValueError as error:
            raise unfit(str(self.store.directory), error) from error

    def put(self, stage: int, part: StageModel) -> None:
        """Put a stage's parameters into it; its pieces are here. Raises `UserError` for files of another model."""
        paths = [self.store.directory / each.file for each in self.store.files]
        if self.frozen:
            assert isinstance(part, Stage)
            load_frozen(self._prepared, self._stages[stage], paths, part.load_frozen)
        else:
            found = read_parameters(self._prepared, self._stages[stage], paths)
            part.set_weights([weight for _, weight in found])
