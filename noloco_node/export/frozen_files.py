"""The files of a frozen model in the form in which nodes keep it: `init --lora` makes them, and nodes fetch these."""

from __future__ import annotations

import filecmp
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from noloco_node.errors import os_errors_as, storage_error
from noloco_node.export.continue_run import sections
from noloco_node.planning.checkpoint_map import CheckpointMap, opened
from noloco_node.planning.model_layout import model_layout
from noloco_node.run.config import RunConfig
from noloco_node.run.presets import check_free
from noloco_node.run.runfile import decode_run
from noloco_node.storage.atomic_file import Array, TensorBytes, array, flush, locked_aside, write_tensors
from noloco_node.storage.home import typed
from noloco_node.terminal import Bar, say
from noloco_node.units import format_bytes
from pipeline.adapters import frozen_weights
from pipeline.partition import empty_slice

WORTH = 0.9  # share of the checkpoint's bytes up to which its owner keeps a second copy of the model
FILE_BYTES = 4 * 2**30  # a file that has so much takes no further tensor


def with_frozen_files(text: str, origin: Path, out: Path, *, overwrite: bool) -> str:
    """Write the frozen model of a run, and its tokenizer, to `out`; return the run file's text with its files.

    `origin`: the checkpoint that the run starts from. If its files are hardly larger, or the run has no adapters,
    nothing is written and the text is returned as it is. Raises `UserError` if the disk refuses, or if `out` is there
    and must not be overwritten.
    """
    run = decode_run(text, "the new run file")
    if not run.adapter.is_trained or not run.model.weights:
        return text
    origin, before_bytes = typed(origin), sum(each.size_bytes for each in run.model.weights)
    with opened([origin / each.file for each in run.model.weights]) as files:
        arrays = _arrays(run, files)
        size_bytes = sum(each.size_bytes for each in arrays)
        if size_bytes > WORTH * before_bytes:
            return text
        if not overwrite and not any(out.glob(f"frozen-{run.adapter.base}-*")):
            check_free(out)
        sizes = f"{format_bytes(size_bytes)} instead of {format_bytes(before_bytes)}"
        say(f"writing the model in {run.adapter.base} to {out}: {sizes} for each machine to fetch")
        what, hint = f"The frozen model cannot be written to {out}.", "free some space, or write the run file elsewhere"
        with os_errors_as(storage_error, what, hint), locked_aside(out) as aside:
            written = _write(arrays, aside, run.adapter.base)
            for each in run.data.tokenizer_files:
                flush(Path(shutil.copy(origin / each.file, aside)))
            lines = "\n\n".join((*sections("model.frozen_files", written), "[[model.weights]]"))
            _put(aside, out, overwrite=overwrite)
    return text.replace("[[model.weights]]", lines, 1)


def _put(aside: Path, out: Path, *, overwrite: bool) -> None:
    """Put the files of one directory into another, all at once if that is not there.

    Raises `UserError` if other files are there and must not be overwritten. The same ones are what a process left that
    was killed before it wrote the run file.
    """
    names = sorted(each.name for each in aside.iterdir())
    flush(aside)
    if not out.exists():
        os.rename(aside, out)
        flush(out.absolute().parent)
    elif overwrite:
        for name in names:
            os.replace(aside / name, out / name)
        flush(out)
    elif (
        names != sorted(each.name for each in out.iterdir())
        or filecmp.cmpfiles(aside, out, names, shallow=False)[0] != names
    ):
        check_free(out)


def _arrays(run: RunConfig, files: Mapping[str, Any]) -> list[Array]:
    """Return the tensors of a run's frozen model, each made of those of its checkpoint when it is written."""
    layout = model_layout(run)
    outline, shapes = CheckpointMap(layout.prepared, files), layout.whole_checkpoint
    part = empty_slice(layout.prepared.config, layout.whole(run.adapter.base))

    @lru_cache(1)  # codes and scales follow each other
    def made(name: str) -> dict[str, Tensor]:
        found = outline.load({name: shapes[name]}, lambda source: files[source].get_tensor(source))
        return dict(frozen_weights.coded(part, found))

    def chunks(name: str, own: str) -> Iterator[memoryview]:
        data = array(own, made(name)[own]).data
        assert isinstance(data, TensorBytes)
        return data.read()

    found: list[Array] = []
    for name, shape in shapes.items():
        if outline.is_shared(name):
            continue
        for own, empty in frozen_weights.coded(part, [(name, torch.empty(shape, device="meta"))]):
            entry = array(own, empty)
            found.append(entry._replace(data=TensorBytes(entry.size_bytes, partial(chunks, name, own))))
    return found


def _write(arrays: list[Array], directory: Path, form: str) -> list[Path]:
    """Write tensors into files of a directory, and return these."""
    shards: list[list[Array]] = [[]]
    for each in arrays:
        if sum(other.size_bytes for other in shards[-1]) >= FILE_BYTES:
            shards.append([])
        shards[-1].append(each)
    paths = [directory / f"frozen-{form}-{number:05d}.safetensors" for number in range(1, len(shards) + 1)]
    done, total = 0, sum(each.size_bytes for each in arrays)

    def told(each: Array, bar: Bar) -> Array:
        def read() -> Iterator[memoryview]:
            nonlocal done
            for chunk in each.chunks():
                done += len(chunk)
                bar.draw(done / total, f"{format_bytes(done)} of {format_bytes(total)}")
                yield chunk

        return each._replace(data=TensorBytes(each.size_bytes, read))

    with closing(Bar()) as bar:
        for path, shard in zip(paths, shards, strict=True):
            write_tensors(path, [told(each, bar) for each in shard], about=f"frozen {form}")
    return paths
