"""The rules that a run must keep beyond the types of its fields, each with its reason.

A run file may come from a stranger, and a peer allocates, loops and waits by its numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from math import prod
from typing import Any

import msgspec

from gossip.rule.stability import MOST, stability_bound, weighed_stability_bound
from gossip.settings import OuterConfig
from noloco_node.run import config
from noloco_node.run.fields import Problem, out_of_bounds, within
from noloco_node.storage.weight_store import WeightFile
from pipeline.adapters.settings import NO_ADAPTER, AdapterConfig
from pipeline.messages import check_width

_COMMIT = re.compile(r"[0-9a-f]{40}")
WEIGHT_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\.safetensors")
_TOKENIZER_FILE = re.compile("|".join(map(re.escape, config.TOKENIZER_FILES)))
_AS_INIT_WRITES = "as `noloco_node.init` writes it"
_MOST_PARAMETERS = 4096  # of a foreign module: one entry of the run file each
_LAYER = re.compile(r"[A-Za-z0-9_-]{1,64}(\.[A-Za-z0-9_-]{1,64}){0,7}")
_AS_WRITTEN = "as `noloco-node init --from DIR` writes them"
_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")

MOST_TARGETS = 64  # of adapters: each is compared with the name of every layer
MOST_SOURCES = 64  # of a mixture: each is opened, and keeps a chunk of its rows in memory
_WIDTHS = ("hidden_size", "n_embd", "d_model")  # names that families have for the width of their activations
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")  # and for the number of their layers
_LARGEST_SIZE = {
    **dict.fromkeys(_WIDTHS, 65_536),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim"), 1_048_576),
    **dict.fromkeys(_LAYERS, 1024),
    "attention_types": 1024,  # of GPT-Neo: kinds of attention, each with the number of its layers
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads"), 1024),
    "head_dim": 4096,
    "vocab_size": 4_194_304,
}
"""Largest value of the sizes that memory and time grow with, under the names that families give them."""


def problems(run: config.RunConfig) -> Iterator[Problem]:
    """Yield every number outside the bounds of its type; where there is none, every other broken rule, in order."""
    outside = list(out_of_bounds(msgspec.to_builtins(run), config.RunConfig))
    if outside:
        yield from outside
        return
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,63}", run.name):
        yield Problem(
            "name", repr(run.name), "a name is a label for people", "1 to 64 ASCII letters, digits, spaces, . _ -"
        )
    yield from _model(run.model)
    yield from _pipeline(run.pipeline, layers_of(run.model))
    if run.model.is_foreign:
        yield from _foreign(run)
    yield from _width(run.pipeline, run.model)
    yield from _data(run.data)
    yield from _evaluation(run)
    yield from _inner(run)
    yield from _outer(run.outer)
    yield from _adapter(run.adapter, run.model)
    yield from _admission(run.admission)


def _wrong(section: str, fields: Any, name: str, why: str, hint: str) -> Problem:
    """Return what is wrong with the field of this name in a section."""
    return Problem(f"{section}.{name}", repr(getattr(fields, name)), why, hint)


def _adapter(adapter: AdapterConfig, model: config.ModelConfig) -> Iterator[Problem]:
    wrong = partial(_wrong, "adapter", adapter)
    if model.frozen_files and not (adapter.is_trained and model.weights):
        why = "they are files of model.weights as adapters are trained over it"
        yield Problem("model.frozen_files", "given", why, "leave them out")
    if not adapter.is_trained:
        if adapter != NO_ADAPTER:
            yield wrong("rank", "without a rank there is no adapter", "16, for example")
        return
    for each in model.frozen_files:
        if not each.file.startswith(f"frozen-{adapter.base}-"):
            why = f"the frozen model in {each.file} is of another form"
            yield wrong("base", why, "the form of `init --lora --base FORM`; or call it again")
            break
    if model.hub is None and not model.weights:
        why = "adapters are trained over a finished model, and this one starts from random weights"
        yield wrong("rank", why, "`noloco-node init --from DIR --lora RANK`, or model.hub")
    if not adapter.targets:
        yield Problem("adapter.targets", "[]", "no layer would have an adapter", '["all-linear"]')
    if len(adapter.targets) > MOST_TARGETS or len(set(adapter.targets)) < len(adapter.targets):
        why = f"a name stands there once, and {MOST_TARGETS} names are the most"
        yield Problem("adapter.targets", f"{len(adapter.targets)} names", why, '["all-linear"]')
    for number, target in enumerate(adapter.targets):
        if not _LAYER.fullmatch(target):
            hint = '"all-linear", or the end of a name such as "q_proj"'
            yield Problem(f"adapter.targets.{number}", repr(target), "it is no name of a layer", hint)


def _admission(admission: config.AdmissionConfig) -> Iterator[Problem]:
    wrong = partial(_wrong, "admission", admission)
    if admission.owner is None and admission.rule != "open":
        why = "without an owner nobody could sign the tickets"
        hint = "admission.owner, as `noloco-node init --admission RULE` writes it"
        yield wrong("rule", why, hint)
    if admission.owner is not None and not re.fullmatch(r"[0-9a-f]{64}", admission.owner):
        hint = "the 64 hexadecimal digits that `noloco-node init --admission RULE` wrote"
        yield wrong("owner", "it is no public key", hint)


def layers_of(model: config.ModelConfig) -> int | None:
    """Return the number of layers where the run file itself says it, under the names that families give it."""
    for name in _LAYERS:
        if isinstance(model.sizes.get(name), int):
            return int(model.sizes[name])
    return None


def _model(model: config.ModelConfig) -> Iterator[Problem]:
    wrong = partial(_wrong, "model", model)
    given = [name for name in ("architecture", "hub") if getattr(model, name) is not None]
    given += ["foreign_parameters"] * model.is_foreign
    if len(given) != 1:
        hint = (
            "`architecture` with `sizes`, or `hub` with `commit`; `noloco-node init --from DIR` writes a checkpoint's"
        )
        yield Problem("model", " and ".join(given) or "nothing", "a model comes from exactly one place", hint)
        return
    if model.is_foreign:
        yield from _parameters(model)
    elif model.foreign_width or model.foreign_vocabulary or model.foreign_frozen:
        yield wrong("foreign_vocabulary", "it is of a foreign module, and there is none", "leave foreign_* out")
    if model.architecture is not None and not model.sizes:
        why = f"the default sizes of {model.architecture!r} are some published model's, often of billions of parameters"
        hint = "give the sizes, for example hidden_size, num_hidden_layers, num_attention_heads, vocab_size"
        yield wrong("sizes", why, hint)
    if model.architecture is None and model.sizes:
        yield Problem("model.sizes", "given", f"the sizes come with the model at model.{given[0]}", "leave `sizes` out")
    if model.hub == "":
        yield wrong("hub", "it is empty", "a directory, or owner/name")
    if model.hub is not None and model.weights:
        yield Problem("model.weights", "given", "the weights come with the model on the hub", "leave them out")
    yield from _files("model.weights", model.weights, WEIGHT_FILE, "it is no name of a safetensors file")
    yield from _files("model.frozen_files", model.frozen_files, WEIGHT_FILE, "it is no name of a safetensors file")
    yield from _hub("model", "hub", model.hub, model.commit)
    for name, value in model.sizes.items():
        yield from _size(f"model.sizes.{name}", value, _LARGEST_SIZE.get(name, 2**31), depth=0)


def _foreign(run: config.RunConfig) -> Iterator[Problem]:
    """Yield what a run of a foreign module cannot have."""
    model, pipeline = run.model, run.pipeline
    wrong = partial(_wrong, "pipeline", pipeline)
    if run.adapter.is_trained:
        yield _wrong(
            "adapter", run.adapter, "rank", "a program makes the adapters of its module itself", "leave it out"
        )
    if pipeline.boundaries is not None:
        why = "a program cuts its module itself"
        yield Problem("pipeline.boundaries", str(list(pipeline.boundaries)), why, "leave it out")
    if not model.is_in_stages:
        if model.foreign_width:
            yield _wrong("model", model, "foreign_vocabulary", "the last stage returns logits", _AS_INIT_WRITES)
        if pipeline.stages > 1:
            why = "each peer holds the whole of a foreign module"
            yield wrong("stages", why, "1, or a list of modules for noloco_node.init")
        if pipeline.microbatches_per_step > 1:
            yield wrong("microbatches_per_step", "an inner step of a foreign module counts as one microbatch", "1")
        return
    if run.data.packs:
        why = "a stage of a program is not told where rows begin"
        yield Problem("data.packed", "true", why, "false: each row is a sequence of its own")
    if pipeline.stages > 1 and not model.foreign_width:
        yield _wrong("model", model, "foreign_width", "stages hand on numbers", _AS_INIT_WRITES)
    numbers = {name.partition(".")[0] for name in model.foreign_parameters}
    if numbers != set(map(str, pipeline.all_stages)):
        why = "the name of each parameter begins with the number of its stage, and each stage has one"
        yield Problem("model.foreign_parameters", f"of the stages {', '.join(sorted(numbers))}", why, _AS_INIT_WRITES)


def _parameters(model: config.ModelConfig) -> Iterator[Problem]:
    if not model.weights:
        why = "peers build a foreign module each for itself, and would begin with different weights"
        yield Problem("model.weights", "nothing", why, _AS_INIT_WRITES)
    for field, names, fewer in (
        ("foreign_parameters", model.foreign_parameters, "fewer parameters that require a gradient"),
        ("foreign_frozen", model.foreign_frozen, _AS_INIT_WRITES),
    ):
        if len(names) > _MOST_PARAMETERS:
            why = f"a module of so many parameters has no room in a run file: at most {_MOST_PARAMETERS}"
            yield Problem(f"model.{field}", str(len(names)), why, fewer)
        for name in names:
            if not name.isprintable() or not 0 < len(name) <= 512:
                yield Problem(f"model.{field}", repr(name), "it is no name of a parameter", _AS_INIT_WRITES)
    for name, digest in model.foreign_frozen.items():
        if not re.fullmatch(r"([0-9a-f]{16})?", digest):
            yield Problem(f"model.foreign_frozen.{name}", repr(digest), "it is no digest", _AS_INIT_WRITES)
    for name, shape in model.foreign_parameters.items():
        field = f"model.foreign_parameters.{name}"
        for size in shape:
            yield from within(field, size, 1, 2**31)
        yield from within(field, prod(shape), 1, 2**34)


def _files(section: str, files: tuple[WeightFile, ...], names: re.Pattern[str], misnamed: str) -> Iterator[Problem]:
    """Yield what is wrong with a list of files that travel; `names`: that they may have."""
    if len({each.file for each in files}) < len(files):
        yield Problem(section, "given", "two of its files have one name", _AS_WRITTEN)
    for number, each in enumerate(files):
        field = f"{section}.{number}"
        if not names.fullmatch(each.file):
            yield Problem(f"{field}.file", repr(each.file), misnamed, _AS_WRITTEN)
        if not re.fullmatch(r"[0-9a-f]{64}", each.digest):
            yield Problem(f"{field}.digest", repr(each.digest), "it is no SHA-256", _AS_WRITTEN)


def _hub(section: str, field: str, name: str | None, commit: str | None) -> Iterator[Problem]:
    if name is None:
        if commit is not None:
            yield Problem(f"{section}.commit", repr(commit), "only what lies on the hub has a commit", "leave it out")
        return
    if not _HUB_NAME.fullmatch(name):
        yield Problem(f"{section}.{field}", repr(name), "it is not the name of a hub repository", "owner/name")
    if commit is None or not _COMMIT.fullmatch(commit):
        why = "a branch or a tag can move while the run lasts, and then peers would train different models"
        hint = "the 40 hexadecimal digits of a commit, from the repository's history on the hub"
        yield Problem(f"{section}.commit", repr(commit), why, hint)


def _size(field: str, value: Any, largest: int, depth: int) -> Iterator[Problem]:
    """Accept what JSON can say, finite, of bounded size and depth: it becomes part of a transformers config."""
    if isinstance(value, dict | list) and depth < 4 and len(value) <= 4096:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _size(f"{field}.{key}", item, _LARGEST_SIZE.get(str(key), largest), depth + 1)
    elif isinstance(value, int | float):
        yield from within(field, value, -largest, largest)
    elif not isinstance(value, str):
        yield Problem(field, type(value).__name__, "a config of transformers holds no such value", "a number or a text")


def oversized(sizes: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield each size of a transformers config that is too large: the library makes lists of so many layers at once."""
    for name, value in sizes.items():
        if isinstance(value, Mapping):
            yield from oversized(value)
        elif name in _LARGEST_SIZE and value is not None:
            yield from _size(name, value, _LARGEST_SIZE[name], depth=0)


def _pipeline(pipeline: config.PipelineConfig, layers: int | None) -> Iterator[Problem]:
    wrong = partial(_wrong, "pipeline", pipeline)
    if layers is not None and pipeline.stages > layers:
        why = f"the model has {layers} layers and every stage needs one"
        yield wrong("stages", why, f"at most {layers} stages")
    if pipeline.boundaries is not None:
        yield from _boundaries(pipeline.boundaries, pipeline.stages, layers)
    if pipeline.windows_in_flight > 1 and pipeline.stages == 1:
        why = "a single stage waits for no other: a second window would make gradients stale and nothing faster"
        yield wrong("windows_in_flight", why, "1, or more stages")
    tokens = pipeline.microbatch_tokens
    if tokens > 2**22:
        why = f"a microbatch of {tokens} tokens travels as one message, and a peer must keep several in memory"
        hint = f"a product with sequence_length of at most {2**22}; more microbatches_per_step instead"
        yield wrong("microbatch_size", why, hint)


def _width(pipeline: config.PipelineConfig, model: config.ModelConfig) -> Iterator[Problem]:
    """Widths of models that come from elsewhere are known, and checked, when the model is laid out."""
    named = (model.sizes[name] for name in _WIDTHS if isinstance(model.sizes.get(name), int))
    width = model.foreign_width or next(named, None)
    subspace = pipeline.subspace
    if subspace is not None:
        yield from _subspace(pipeline, subspace, width, model)
    try:
        if width is not None and (subspace is None or subspace < width):
            check_width(pipeline.codec, width, subspace)
    except ValueError as error:
        yield Problem("pipeline.codec", repr(pipeline.codec), str(error), '"bfloat16", or another width')


def _subspace(
    pipeline: config.PipelineConfig, subspace: int, width: int | None, model: config.ModelConfig
) -> Iterator[Problem]:
    wrong = partial(_wrong, "pipeline", pipeline, "subspace")
    if subspace < 1 or (width is not None and subspace >= width):
        why = "nothing would travel" if subspace < 1 else f"it is no smaller than the model's width, {width}"
        yield wrong(why, "a quarter of the width, for example; or leave it out")
    if pipeline.stages == 1:
        yield wrong("a single stage sends nothing to another", "leave it out, or more stages")
    if model.hub is not None or model.weights:
        why = "the weights that the run starts from write into all channels"
        yield wrong(why, "leave it out, or start from random weights")


def _boundaries(boundaries: tuple[int, ...], stages: int, layers: int | None) -> Iterator[Problem]:
    wrong = partial(Problem, "pipeline.boundaries", str(list(boundaries)))
    if len(boundaries) != stages - 1:
        why = f"{stages} stages have {stages - 1} boundaries, and these are {len(boundaries)}"
        yield wrong(why, "the number of the first layer of every stage but the first; or leave it out")
    if any(b <= a for a, b in zip((0, *boundaries), boundaries, strict=False)):
        yield wrong("every stage needs a layer of its own", "numbers from 1 on, each larger than the last")
    if layers is not None and boundaries and boundaries[-1] >= layers:
        yield wrong(f"the model has {layers} layers, numbered from 0", f"numbers of at most {layers - 1}")


def _data(data: config.DataConfig) -> Iterator[Problem]:
    for number, each in enumerate(data.mixture):
        yield from _source(each, f"data.mixture.{number}")
    yield from _mixture(data) if data.mixture else _source(data, "data")
    has_messages = any(each.form == "messages" for each in data.sources)
    if data.chat_template and not has_messages:
        why = "only messages are written by a template"
        yield _wrong("data", data, "chat_template", why, 'the form "messages"; or leave it out')
    if has_messages and data.has_byte_tokenizer and not data.chat_template:
        yield _wrong("data", data, "chat_template", "the tokenizer byt5 has none of its own for messages", '"chatml"')
    yield from _tokenizer(data)


def _evaluation(run: config.RunConfig) -> Iterator[Problem]:
    wrong = partial(_wrong, "data", run.data, "evaluate_every_rounds")
    if not run.data.evaluate_every_rounds:
        return
    if run.model.is_foreign and not run.model.is_in_stages:
        yield wrong("only the program can compute with a foreign module", "0")
    if run.data.validation_percent == 0:
        yield wrong("data.validation_percent is 0: no text is held out", "0, or 2 percent of the text")


def _mixture(data: config.DataConfig) -> Iterator[Problem]:
    for name, value in msgspec.structs.asdict(config.SourceConfig()).items():
        if getattr(data, name) != value:
            why = "each source of the mixture has its own"
            yield _wrong("data", data, name, why, "leave it out, and name it under [[data.mixture]]")
    if len({each.learns_answers for each in data.mixture}) > 1:
        why = "some of its sources are text, of which all is learnt, and some are rows, of which the answers are"
        yield Problem("data.mixture", "given", why, 'rows with the form "prompt" (an empty prompt) in place of text')
    if len(data.mixture) > MOST_SOURCES:
        yield Problem("data.mixture", f"{len(data.mixture)} sources", f"{MOST_SOURCES} are the most", "fewer of them")


def _source(data: config.SourceConfig, section: str) -> Iterator[Problem]:
    wrong = partial(_wrong, section, data)
    if data.source == "stdlib":
        if data.path is not None:
            yield wrong("path", "the source stdlib needs no path", "leave it out")
    elif not data.path:
        place = "owner/name" if data.source == "hub" else "a file, a directory or a glob"
        why = f'a run with {section}.source = "{data.source}" reads its text from there'
        yield wrong("path", why, f'path = "...", with {place}')
    yield from _hub(section, "path", data.path or None if data.source == "hub" else None, data.commit)
    if data.source != "hub":
        if data.subset is not None:
            yield wrong("subset", "only hub data sets have subsets", "leave it out")
        if data.split != "train":
            yield wrong("split", "only hub data sets have splits", "leave it out")
    if not data.split or "[" in data.split:
        yield wrong("split", "a split is named whole", '"train"')
    if not data.field:
        yield wrong("field", "it is empty", 'the name of the column that holds the text, often "text"')
    if data.learns_answers and data.source in ("stdlib", "text"):
        why = f"the source {data.source} has documents, and no rows"
        yield wrong("form", why, 'the source "json", "parquet" or "hub"; or the form "text"')
    for name in ("prompt_field", "completion_field", "messages_field"):
        if not getattr(data, name):
            yield wrong(name, "it is empty", "the name of a column, or of a key of JSON")
    if data.prompt_field == data.completion_field:
        yield wrong("completion_field", f"it is {section}.prompt_field as well", "another field")


def _tokenizer(data: config.DataConfig) -> Iterator[Problem]:
    wrong, commit = partial(_wrong, "data", data), data.tokenizer_commit
    if not data.tokenizer:
        yield wrong("tokenizer", "it is empty", '"byt5", a local directory, or owner/name with its commit')
    if commit is not None:
        if data.has_byte_tokenizer or data.has_travelling_tokenizer:
            why = "byt5 is built without files" if data.has_byte_tokenizer else "its files are named by their digests"
            yield wrong("tokenizer_commit", why, "leave it out")
        elif not _HUB_NAME.fullmatch(data.tokenizer):
            yield wrong("tokenizer", "with a commit it has to be a hub repository", "owner/name")
        if not _COMMIT.fullmatch(commit):
            yield wrong("tokenizer_commit", "a branch or a tag can move", "the 40 hexadecimal digits of a commit")
    field, files = "data.tokenizer_files", data.tokenizer_files
    if bool(files) != data.has_travelling_tokenizer:
        why = f'files are listed where the tokenizer is "{config.TRAVELLING}", and only there'
        yield Problem(field, "given" if files else "missing", why, _AS_WRITTEN)
    yield from _files(field, files, _TOKENIZER_FILE, "it is no file of a tokenizer that may travel")
    if sum(each.size_bytes for each in files) > config.LARGEST_TOKENIZER_BYTES:
        most = f"together they have more than {config.LARGEST_TOKENIZER_BYTES // 2**20} MiB"
        yield Problem(field, "given", most, "a tokenizer on the hub, with tokenizer_commit")


def _inner(run: config.RunConfig) -> Iterator[Problem]:
    inner = run.inner
    wrong = partial(_wrong, "inner", inner)
    if inner.orthogonal and (run.adapter.is_trained or run.model.is_foreign):
        what = "trains adapters" if run.adapter.is_trained else "trains a foreign module"
        why = f"the run {what}; orthogonal steps are for the matrices of a model's decoder layers"
        yield Problem("inner.orthogonal", "true", why, "false")
    if not 0 <= inner.warmup_steps < inner.steps:
        why = f"the run takes {inner.steps} inner steps, and would end before its warm-up does"
        yield wrong("warmup_steps", why, "at least 0 and below inner.steps; a twentieth of it is usual")
    if inner.weight_decay * inner.learning_rate >= 1:
        why = "times the learning rate it reaches 1: a step would erase all weights"
        yield wrong("weight_decay", why, "0.1, or 0 as in the paper")


def _outer(outer: OuterConfig) -> Iterator[Problem]:
    early, late = outer.inner_steps_per_round, outer.late_inner_steps_per_round
    shortest = early if late is None else min(early, late)
    often = f"every {early} inner steps" if late is None else f"every {early} to {late} inner steps"
    name = "inner_steps_per_round" if shortest == early else "late_inner_steps_per_round"
    wrong = partial(_wrong, "outer", outer)
    if not outer.blocking and not 1 <= outer.overlap_steps < shortest:
        yield wrong(
            "overlap_steps",
            f"a round comes {often}, and a snapshot has to be used or retaken before the next; below 1 no exchange "
            "could ever overlap with training",
            f"at least 1 and below outer.{name}; for a round after every step set outer.blocking",
        )
    period, spread = outer.momentum_period, outer.momentum_spread
    if not 0 <= outer.alpha < 1:
        why = "the outer momentum of alpha 1 and more never decays"
        yield wrong("alpha", why, "at least 0 and below 1; the paper takes 0.5")
    elif not 0 <= spread <= 1 / period:
        yield wrong(
            "momentum_spread",
            f"each outer step of a period of {period} but the last applies this share of the momentum, and the last "
            "what is left of the whole: that would be less than the others apply, or more than there is",
            f"from 0 to 1 / momentum_period = {1 / period:.4g}; 0 if in doubt",
        )
    elif outer.weigh_by_steps and period > 1:
        yield Problem(
            "outer.weigh_by_steps",
            "true",
            "means weighed by inner steps are known to draw replicas together with a momentum that moves in every "
            f"outer step, not with one that moves once in {period}",
            "false, or outer.momentum_period 1",
        )
    else:
        yield from _stable(outer)


def _stable(outer: OuterConfig) -> Iterator[Problem]:
    """Hold beta and gamma to the range in which the outer steps converge, and the replicas towards each other.

    Replicas that meet in random disjoint pairs come together if and only if 0 < gamma < 2 (1 - alpha^2): this follows
    from the exact recursion of the second moments, and simulations confirm it. The range printed in the paper (arXiv
    2506.10911, equation 74) is another one: it admits choices that diverge and forbids good ones. With a momentum
    period above 1 the same recursion over a period gives the range (`gossip.rule.stability`), and beta has to be below
    2, because then the gradient acts without the momentum that would damp it.
    """
    wrong = partial(_wrong, "outer", outer)
    alpha, beta, gamma = outer.alpha, outer.beta, outer.gamma
    period, spread = outer.momentum_period, outer.momentum_spread
    bound = weighed_stability_bound(alpha, MOST) if outer.weigh_by_steps else stability_bound(alpha, period, spread)
    delayed = f" and a momentum that moves once in {period} outer steps" if period > 1 else ""
    if not 0 < gamma < bound:
        is_plain = period == 1 and not outer.weigh_by_steps
        limit = "0 < gamma < 2 (1 - alpha^2), which is" if is_plain else "gamma above 0 and below"
        yield wrong(
            "gamma",
            f"with random pairs{delayed} the disagreement of many replicas shrinks only for {limit} {bound:.4g} for "
            f"alpha {alpha:g}; outside, the replicas drift apart without end. (The range printed in the paper, arXiv "
            "2506.10911, equation 74, admits choices that diverge.)",
            f"above 0 and below {bound:.4g} at alpha {alpha:g}, such as {min(0.7, bound / 2):.2g}; the paper takes 0.7 "
            "at alpha 0.5",
        )
    longest = 2 * (1 + alpha) if period == 1 else 2.0
    if not 0 < beta < longest:
        limit = f"0 < beta < 2 (1 + alpha) = {longest:g}" if period == 1 else f"0 < beta < {longest:g}"
        why = f"heavy-ball steps{delayed} on a pseudo-gradient that reaches the optimum are stable for {limit} only"
        yield wrong("beta", why, f"above 0 and below {longest:g} at alpha {alpha:g}; the paper takes 0.7")
