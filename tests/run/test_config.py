"""A run file is understood or refused with one sentence about one field; its digest is its meaning and nothing else."""

import json
import math
import random
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from user_errors import user_error

from gossip.rule.outer_step import MOST
from gossip.rule.stability import stability_bound, weighed_stability_bound
from noloco_node.errors import Exit, UserError
from noloco_node.run import runfile
from noloco_node.run.config import DataConfig, ModelConfig, RunConfig
from noloco_node.run.fields import fields_of, toml, toml_table
from noloco_node.run.presets import PRESETS, demo_run_text, numbers_of, run_text, with_fields, write_text, written
from noloco_node.run.runfile import (
    RUN_TEXT_BYTES,
    canonical,
    content_hashes,
    decode_run,
    load_run,
    read_run_text,
    run_digest,
    validate,
)

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MODEL = '[model]\narchitecture = "llama"\nsizes = {hidden_size = 8, num_hidden_layers = 4}\n'
ALONE = "[pipeline]\nstages = 1\n"
WEIGHTS = f'[[model.weights]]\nfile = "model.safetensors"\nsize_bytes = 1000\ndigest = "{"ab" * 32}"\n'
FROZEN = WEIGHTS.replace("model.weights", "model.frozen_files").replace("model.safe", "frozen-nf4-00001.safe")
WORDS = f"""[data]
tokenizer = 'files'
[[data.tokenizer_files]]
file = "tokenizer.json"
size_bytes = 1000
digest = "{"ab" * 32}"
"""
MIX = MODEL + "[[data.mixture]]\n"
ADAPTER = f"{MODEL}{WEIGHTS}[adapter]\nrank = 16\n"
SECTIONS = ("model", "pipeline", "data", "inner", "outer", "adapter", "admission")


def refused(text: str) -> UserError:
    with user_error(Exit.CONFIG) as caught:
        decode_run(text, "here.toml")
    assert caught.value.what.startswith("here.toml")
    return caught.value


def run_with(**sections: dict[str, Any]) -> RunConfig:
    table = {"model": {"architecture": "llama", "sizes": {"hidden_size": 8, "num_hidden_layers": 4}}}
    return msgspec.convert({**table, **sections}, RunConfig)


def test_it_loads_without_torch_or_transformers() -> None:
    heavy = "print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    code = f"import sys, noloco_node.run.runfile, noloco_node.run.presets; {heavy}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("text", "field", "advice"),
    [
        ("", "model is missing", "architecture"),
        ("[model]\n", "model = nothing", "hub"),
        (MODEL + 'hub = "x"\n', "model = architecture and hub", ""),
        ("[model]\narchitecture = 'llama'\n", "model.sizes", "hidden_size"),
        ("[model]\nhub = 'a/b'\n", "model.commit is missing", "40 hexadecimal"),
        (f"[model]\nhub = '../b'\ncommit = '{COMMIT}'\n", "model.hub", "owner/name"),
        (MODEL + f"commit = '{COMMIT}'\n", "model.commit", "leave it out"),
        (f"[model]\nhub = 'x'\ncommit = '{COMMIT}'\nsizes = {{hidden_size = 3}}\n", "model.sizes", "leave"),
        (f"[model]\nhub = 'x'\ncommit = '{COMMIT}'\n" + WEIGHTS, "model.weights = given", "leave"),
        (MODEL + WEIGHTS + WEIGHTS, "model.weights = given", "init --from"),
        (MODEL + WEIGHTS.replace("model.safe", "../model.safe"), "model.weights.0.file", "init --from"),
        (MODEL + WEIGHTS.replace("abab", "ABAB"), "model.weights.0.digest", "init --from"),
        (MODEL + WEIGHTS.replace("1000", "99999999999999"), "model.weights.0.size_bytes", "a value from"),
        (MODEL + WEIGHTS + FROZEN, "model.frozen_files = given", "leave"),
        (MODEL + FROZEN + "[adapter]\nrank = 4\n", "model.frozen_files = given", "leave"),
        (MODEL + WEIGHTS + FROZEN + "[adapter]\nrank = 4\nbase = 'int8'\n", "adapter.base = 'int8'", "init --lora"),
        (MODEL + WEIGHTS + FROZEN.replace("abab", "ABAB"), "model.frozen_files.0.digest", "init --from"),
        ("[model]\narchitecture = 'llama'\nsizes = {hidden_size = 1e9}\n", "model.sizes.hidden_size", "65,536"),
        ("[model]\narchitecture = 'gpt_neo'\nsizes = {num_layers = 9999}\n", "model.sizes.num_layers", "1,024"),
        ("[model]\narchitecture = 'mpt'\nsizes = {n_layers = 9999}\n", "model.sizes.n_layers", "1,024"),
        (
            "[model]\narchitecture = 'gpt_neo'\nsizes = {attention_types = [[['local'], 2000000000]]}\n",
            "model.sizes.attention_types.0.1",
            "1,024",
        ),
        (
            "[model]\narchitecture = 'gemma3'\nsizes = {text_config = {num_hidden_layers = 2000000000}}\n",
            "model.sizes.text_config.num_hidden_layers",
            "1,024",
        ),
        ("[model]\narchitecture = 'llama'\nsizes = {a = 2020-01-01}\n", "model.sizes.a", "number"),
        ("[model]\narchitecture = 'llama'\nsizes = {a = [[[[[1]]]]]}\n", "model.sizes.a.0.0.0.0", ""),
        (MODEL + "[pipeline]\nstages = 5\n", "pipeline.stages = 5", "4"),
        (MODEL + "[pipeline]\nstages = '2'\n", "pipeline.stages", "a whole number"),
        (MODEL + "[pipeline]\nstages = true\n", "pipeline.stages", "a whole number"),
        (MODEL + "[pipeline]\nstages = 3\nboundaries = [2]\n", "pipeline.boundaries", "first layer"),
        (MODEL + "[pipeline]\nstages = 3\nboundaries = [2, 2]\n", "pipeline.boundaries", "larger"),
        (MODEL + "[pipeline]\nboundaries = [0]\n", "pipeline.boundaries", "from 1"),
        (MODEL + "[pipeline]\nboundaries = [4]\n", "pipeline.boundaries", "at most 3"),
        (MODEL + "[pipeline]\nsequence_length = 1048576\n", "pipeline.microbatch_size = 8", "4194304"),
        (MODEL + "[pipeline]\nwindows_in_flight = 3\n", "pipeline.windows_in_flight", "give 1 or 2"),
        (MODEL + "[pipeline]\ncodec = 'float16'\n", "pipeline.codec", "bfloat16"),
        (MODEL + "[pipeline]\ncodec = 'int4'\n", "pipeline.codec", "int5-int3"),
        (
            MODEL.replace("hidden_size = 8", "hidden_size = 65") + "[pipeline]\ncodec = 'int8'\n",
            "pipeline.codec = 'int8'",
            '"bfloat16"',
        ),
        (MODEL + "[pipeline]\nsubspace = 8\n", "pipeline.subspace = 8", "a quarter of the width"),
        (MODEL + "[pipeline]\nsubspace = 0\n", "pipeline.subspace = 0", "a quarter of the width"),
        (MODEL + "[pipeline]\nsubspace = 2\nstages = 1\n", "pipeline.subspace = 2", "more stages"),
        (MODEL + WEIGHTS.replace("[[", "[pipeline]\nsubspace = 2\n[[", 1), "pipeline.subspace = 2", "random weights"),
        (
            MODEL.replace("hidden_size = 8", "hidden_size = 64") + "[pipeline]\nsubspace = 8\ncodec = 'int8'\n",
            "pipeline.codec = 'int8'",
            '"bfloat16"',
        ),
        (MODEL + "[data]\nsource = 'web'\n", "data.source", "stdlib"),
        (MODEL + "[data]\nsource = 'text'\n", "data.path is missing", "path = "),
        (MODEL + "[data]\npath = 'x'\n", "data.path", "leave it out"),
        (MODEL + "[data]\nsource = 'hub'\npath = 'a/b'\n", "data.commit", "40"),
        (MODEL + "[data]\nsource = 'json'\npath = 'x'\nsubset = 'en'\n", "data.subset", ""),
        (MODEL + "[data]\nsource = 'json'\npath = 'x'\nsplit = 'test'\n", "data.split", ""),
        (MODEL + "[data]\nsource = 'json'\npath = 'x'\nfield = ''\n", "data.field", ""),
        (
            MODEL + ALONE + "[data]\nevaluate_every_rounds = 4\nvalidation_percent = 0.0\n",
            "data.evaluate_every",
            "2 percent",
        ),
        (MODEL + "[data]\ntokenizer = ''\n", "data.tokenizer", "byt5"),
        (MODEL + "[data]\nsource = 'json'\npath = 'x'\nform = 'messages'\n", "data.chat_template = ''", "chatml"),
        (MODEL + f"[data]\ntokenizer_commit = '{COMMIT}'\n", "data.tokenizer_commit", "leave it out"),
        (MODEL + "[data]\ntokenizer = 'a/b'\ntokenizer_commit = 'main'\n", "data.tokenizer_commit", "40"),
        (MODEL + "[data]\npath = 'x'\n[[data.mixture]]\n", "data.path = 'x'", "[[data.mixture]]"),
        (
            MIX + "[[data.mixture]]\nsource = 'json'\npath = 'x'\nform = 'prompt'\n",
            "data.mixture = given",
            "empty prompt",
        ),
        (MIX + "[[data.mixture]]\nsource = 'json'\n", "data.mixture.1.path is missing", "a glob"),
        (MIX + "[[data.mixture]]\nweight = 0.0\n", "data.mixture.1.weight = 0.0", "1e-06"),
        (MIX + 64 * "[[data.mixture]]\n", "data.mixture = 65 sources", "fewer"),
        (MODEL + "[data]\ntokenizer = 'files'\n", "data.tokenizer_files = missing", "init --from"),
        (MODEL + WORDS.replace("'files'", "'byt5'"), "data.tokenizer_files = given", "init --from"),
        (MODEL + WORDS.replace("[[", f"tokenizer_commit = '{COMMIT}'\n[["), "data.tokenizer_commit", "leave it out"),
        (MODEL + WORDS.replace("tokenizer.json", "tokenizer.py"), "data.tokenizer_files.0.file", "init --from"),
        (MODEL + WORDS.replace("tokenizer.json", "../tokenizer.json"), "data.tokenizer_files.0.file", "init --from"),
        (MODEL + WORDS.replace("1000", "99999999"), "data.tokenizer_files = given", "on the hub"),
        (MODEL + "[inner]\nsteps = 1000\n", "inner.warmup_steps = 1000", "below inner.steps"),
        (MODEL + "[inner]\nlearning_rate = 0.5\nweight_decay = 2\n", "inner.weight_decay", ""),
        (MODEL + "[outer]\nalpha = 1.0\n", "outer.alpha", "below 1"),
        (MODEL + "[outer]\nalpha = nan\n", "outer.alpha", ""),
        (MODEL + "[outer]\nbeta = 3.0\n", "outer.beta", "0.7"),
        (MODEL + "[outer]\nalpha = 0.9\ngamma = 0.7\n", "outer.gamma = 0.7", "0.19"),
        (MODEL + "[outer]\nmomentum_period = 2\nmomentum_spread = 0.51\n", "outer.momentum_spread = 0.51", "0.5"),
        (MODEL + "[outer]\nmomentum_spread = -0.1\n", "outer.momentum_spread", "from 0"),
        (MODEL + "[outer]\nmomentum_spread = nan\n", "outer.momentum_spread", "from 0"),
        (MODEL + "[outer]\ncodec = 'int3'\n", "outer.codec", "int4"),
        (MODEL + "[outer]\nweigh_by_steps = true\nmomentum_period = 3\n", "outer.weigh_by_steps", "momentum_period 1"),
        (MODEL + "[pipeline]\nboundaries = 2\n", "pipeline.boundaries", "a list"),
        (MODEL + "[data]\nshuffle = 1\n", "data.shuffle", "true or false"),
        (MODEL + "[outer]\ninner_steps_per_round = 8\n", "outer.overlap_steps = 8", "below"),
        (MODEL + "[outer]\noverlap_steps = 0\n", "outer.overlap_steps", "outer.blocking"),
        (MODEL + "[adapter]\nalpha = 8.0\n", "adapter.rank = 0", "16"),
        (MODEL + "[adapter]\nrank = 16\n", "adapter.rank = 16", "init --from DIR --lora"),
        (ADAPTER + "[inner]\northogonal = true\n", "inner.orthogonal = true", "false"),
        (ADAPTER + "targets = []\n", "adapter.targets = []", "all-linear"),
        (ADAPTER + "targets = ['q_proj', 'q_proj']\n", "adapter.targets = 2 names", "all-linear"),
        (ADAPTER + "targets = ['q proj']\n", "adapter.targets.0", "q_proj"),
        (ADAPTER + "base = 'int3'\n", "adapter.base", '"bfloat16"'),
        (MODEL + "[admission]\nrule = 'listed'\n", "admission.rule", "`noloco-node init --admission RULE`"),
        (MODEL + "[admission]\nowner = 'x'\n", "admission.owner", "`noloco-node init --admission RULE`"),
        ("name = ''\n" + MODEL, "name", "letters"),
        ("name = '" + "x" * 65 + "'\n" + MODEL, "name", ""),
        ("precision = 'fp8'\n" + MODEL, "precision", '"auto" or "float32"'),
        ("model = 3\n", "model", "architecture"),
        (MODEL + "[inner]\nlerning_rate = 1.0\n", "inner.lerning_rate", "learning_rate?"),
        (MODEL + "boundries = [1]\n", "model.boundries", "pipeline.boundaries?"),
        (MODEL + "[optimizer]\nlr = 1\n", "optimizer", ""),
    ],
)
def test_a_wrong_field_is_named_with_what_would_be_right(text: str, field: str, advice: str) -> None:
    trouble = refused(text)
    assert field in trouble.what
    assert advice in trouble.hint
    assert trouble.why


RULED = {f"outer.{name}" for name in ("alpha", "beta", "gamma", "momentum_spread", "overlap_steps")}
RULED |= {"inner.warmup_steps", "pipeline.subspace"}
"""Numbers whose bounds depend on other fields."""


def test_every_number_is_bounded_where_it_is_declared_or_by_a_rule() -> None:
    unbounded, sections = set(), {field.name: field.type for field in fields_of(RunConfig)}
    for section, name in leaves():
        hint = {field.name: field.type for field in fields_of(sections.get(section, RunConfig))}[name]
        types = [each for each in (hint, *get_args(hint)) if get_origin(each) is Annotated or each in (int, float)]
        path = f"{section}.{name}".lstrip(".")
        if types and get_origin(types[0]) is not Annotated:
            unbounded.add(path)
        elif types:
            said = types[0].__metadata__[0]
            low, high = (said.ge, said.lt or said.le) if isinstance(said, msgspec.Meta) else (said[0], said[-1])
            above = high if getattr(said, "lt", None) else 2 * high
            for value in (low - 1, above, math.nan, math.inf, -math.inf):
                given_value = f"{name} = {value}\n"
                begin = given_value if not section else "" if section == "model" else f"[{section}]\n{given_value}"
                text = f"{begin}{MODEL}{given_value if section == 'model' else ''}"
                assert path in refused(text).what, value
    assert unbounded == RULED


@given(st.floats(0, 0.999), st.floats(-1, 3))
def test_gamma_is_stable_below_its_bound(alpha: float, gamma: float) -> None:
    run = run_with(outer={"alpha": alpha, "gamma": gamma})
    if 0 < gamma < 2 * (1 - alpha * alpha) == stability_bound(alpha):
        validate(run)
    else:
        with pytest.raises(UserError, match=r"outer\.gamma"):
            validate(run)


@given(st.floats(0, 0.99), st.floats(0.01, 3))
def test_weighed_means_have_a_bound_of_their_own(alpha: float, gamma: float) -> None:
    run = run_with(outer={"alpha": alpha, "gamma": gamma, "beta": 1.0, "weigh_by_steps": True})
    if gamma < weighed_stability_bound(alpha, MOST):
        validate(run)
    else:
        with pytest.raises(UserError, match=r"outer\.gamma"):
            validate(run)


def test_all_wrong_fields_are_mentioned() -> None:
    outside = refused(MODEL + "[pipeline]\nreplicas = 0\n[inner]\nsteps = 0\n[outer]\nstaleness_at_most = 0\n")
    assert "pipeline.replicas" in outside.what
    assert "inner.steps, outer.staleness_at_most" in outside.what
    broken = refused(MODEL + "[inner]\nwarmup_steps = -1\n[outer]\nalpha = -1\noverlap_steps = 0\n")
    assert "inner.warmup_steps" in broken.what
    assert "outer.overlap_steps, outer.alpha" in broken.what


def test_the_blocking_form_may_meet_after_every_step() -> None:
    decode_run(MODEL + "[outer]\nblocking = true\ninner_steps_per_round = 1\n", "run.toml")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a = \n", "line 1"),
        ("a = 1\nb = [\n", "end of document"),
        ("a = 1\na = 2\n", "line 2"),
        ("x = " + "[" * 100_000, "recursion"),
        ("x = " + "9" * 5000, "digits"),
        ("#" * (RUN_TEXT_BYTES + 1), "256 KiB"),
    ],
)
def test_broken_toml_names_the_line(text: str, part: str) -> None:
    assert part in refused(text).why


@given(st.text(max_size=60) | st.binary(max_size=60).map(lambda raw: raw.decode("latin-1")))
@settings(max_examples=200)
def test_any_text_is_a_run_or_trouble(text: str) -> None:
    with pytest.raises(UserError):
        decode_run(text, "here")


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(-3, 3), max_size=3),
    st.dictionaries(st.text(max_size=3), st.floats() | st.text(max_size=3), max_size=2),
)
TABLES = st.fixed_dictionaries(
    {
        section: st.dictionaries(
            st.sampled_from([f.name for f in fields_of(field.type)]) | st.text(max_size=3), VALUES, max_size=3
        )
        for field in fields_of(RunConfig)
        for section in [field.name]
        if section in SECTIONS
    }
)


@given(TABLES)
@settings(max_examples=200)
def test_any_table_is_a_run_or_trouble(table: dict[str, Any]) -> None:
    said = ""
    try:
        canonical(decode_run(file_of(table, random.Random(0)), "here"), {})
    except UserError as trouble:
        said = str(trouble)
    assert len(said) < 1200
    assert all(line.isprintable() for line in said.splitlines())


# The digest.


def spelled(value: Any, rng: random.Random) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return msgspec.json.encode(value).decode().replace("\x7f", "\\u007f")
    if isinstance(value, dict):
        items = rng.sample(list(value.items()), len(value))
        return "{" + ", ".join(f"{spelled(key, rng)} = {spelled(item, rng)}" for key, item in items) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(spelled(item, rng) for item in value) + "]"
    return repr(value)


def file_of(table: dict[str, Any], rng: random.Random) -> str:
    """Write nested dicts as TOML, in any order and with comments in any place."""

    def shuffled(items: Any) -> list[tuple[str, Any]]:
        found = [(key, value) for key, value in items if value is not None]
        rng.shuffle(found)
        return found

    def remark() -> str:
        return rng.choice(["", "  # a comment", "\n\n# another = comment"])

    def line(key: str, value: Any) -> str:
        return f"{spelled(key, rng)} = {spelled(value, rng)}{remark()}"

    lines = [line(k, v) for k, v in shuffled(table.items()) if k not in SECTIONS]
    for section, fields in shuffled((k, v) for k, v in table.items() if k in SECTIONS):
        lines += [f"[{section}]{remark()}", *(line(k, v) for k, v in shuffled(fields.items()))]
    return "\n".join(lines)


CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(["run", "a", "b"]),
        "seed": st.integers(0, 3),
        "pipeline": st.fixed_dictionaries(
            {},
            optional={
                "stages": st.integers(1, 4),
                "replicas": st.integers(1, 3),
                "budget_s": st.sampled_from([300, 9.5]),
            },
        ),
        "data": st.fixed_dictionaries(
            {}, optional={"shuffle": st.booleans(), "validation_percent": st.sampled_from([2, 5.5])}
        ),
        "outer": st.fixed_dictionaries({}, optional={"gamma": st.sampled_from([0.7, 0.3]), "blocking": st.booleans()}),
    },
)


@given(CHANGES, st.randoms(use_true_random=False))
@settings(max_examples=40)
def test_the_digest_sees_neither_comments_nor_order_nor_spelled_out_defaults(change: Any, rng: random.Random) -> None:
    run = run_with(**change)
    everything = msgspec.to_builtins(run)
    sparse = {"model": everything["model"], **change}
    texts = [file_of(table, rng) for table in (sparse, sparse, everything, everything)]
    digests = {run_digest(decode_run(text, "x"), {}) for text in texts}
    assert digests == {run_digest(run, {})}
    assert all(len(digest) == 64 for digest in digests)


def leaves() -> Iterator[tuple[str, str]]:
    for field in fields_of(RunConfig):
        if field.name in SECTIONS:
            yield from ((field.name, inner.name) for inner in fields_of(field.type))
        else:
            yield "", field.name


def other_value(value: Any) -> Any:
    """Return another value of the same type, or any where there was none."""
    return {bool: not value, int: 7, float: 0.125, str: "another", dict: {"a": 1}}.get(type(value), "something")


@pytest.mark.parametrize(("section", "name"), list(leaves()))
def test_the_digest_sees_every_field(section: str, name: str) -> None:
    run = run_with()
    part = getattr(run, section) if section else run
    change = replace if is_dataclass(part) else msgspec.structs.replace
    changed: Any = change(part, **{name: other_value(getattr(part, name))})
    if section:
        changed = msgspec.structs.replace(run, **{section: changed})
    assert run_digest(changed, {}) != run_digest(run, {})


def test_a_field_at_its_default_does_not_count() -> None:
    """So a later version may add fields, and its nodes still find a run that does not use them."""
    counted = json.loads(canonical(decode_run(MODEL, "x"), {}))["run"]
    assert counted.keys() == {"model"}
    spelled = decode_run(MODEL + "[outer]\nline_share = 0.2\n[inner]\n", "x")
    assert run_digest(spelled, {}) == run_digest(decode_run(MODEL, "x"), {})


def test_the_digest_sees_contents_and_the_wire_version(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_with()
    assert run_digest(run, {"a": "1", "b": "2"}) == run_digest(run, {"b": "2", "a": "1"})
    assert run_digest(run, {"data.tokenizer": "a"}) != run_digest(run, {"data.tokenizer": "b"}) != run_digest(run, {})
    before = run_digest(run, {})
    monkeypatch.setattr(runfile, "WIRE_VERSION", runfile.WIRE_VERSION + 1)
    assert run_digest(run, {}) != before


def test_what_lies_in_directories_is_pinned_by_content(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name / "sub").mkdir(parents=True)
        (tmp_path / name / "model.bin").write_bytes(b"weights")
        (tmp_path / name / "sub" / "config.json").write_text("{}")
    (tmp_path / "b" / ".cache").mkdir()
    (tmp_path / "b" / ".cache" / "x").write_text("of a downloader")

    def hashes(name: str) -> dict[str, str]:
        path = str(tmp_path / name)
        return content_hashes(RunConfig(model=ModelConfig(architecture="llama"), data=DataConfig(tokenizer=path)))

    assert set(hashes("a")) == {"data.tokenizer"}
    assert hashes("a") == hashes("b")
    (tmp_path / "b" / "sub" / "config.json").write_text("{ }")
    assert hashes("a") != hashes("b")
    (tmp_path / "b" / "sub" / "config.json").rename(tmp_path / "b" / "config.json")
    (tmp_path / "b" / "config.json").write_text("{}")
    assert hashes("a") != hashes("b"), "the same bytes under another name"
    with pytest.raises(UserError, match=r"data\.tokenizer.*no directory"):
        hashes("c")


def test_what_lies_on_the_hub_is_pinned_by_its_commit() -> None:
    data = DataConfig(tokenizer="o/t", tokenizer_commit=COMMIT)
    run = RunConfig(model=ModelConfig(hub="o/m", commit=COMMIT), data=data)
    validate(run)
    assert content_hashes(run) == {"model.hub": f"o/m@{COMMIT}", "data.tokenizer": f"o/t@{COMMIT}"}
    assert content_hashes(run_with()) == {}


# Files, sources, this machine.


def test_a_run_file_is_read_within_bounds(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xef\xbb\xbf" + MODEL.encode())
    assert load_run(path) == load_run(str(path)) == decode_run(MODEL, "x")
    assert read_run_text(path) == MODEL
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="not text"):
        load_run(path)
    path.write_text(MODEL + "#" * RUN_TEXT_BYTES)
    with pytest.raises(UserError, match="too long"):
        load_run(path)
    with pytest.raises(UserError, match="cannot be read"):
        load_run(tmp_path / "no.toml")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("stdlib", {"source": "stdlib"}),
        ("books/*.txt", {"source": "text", "path": "books/*.txt"}),
        ("rows.jsonl.gz", {"source": "json", "path": "rows.jsonl.gz"}),
        ("a.parquet", {"source": "parquet", "path": "a.parquet"}),
        ("rows.jsonl#words", {"source": "json", "path": "rows.jsonl", "field": "words"}),
        ("parquet:a/*.parquet#my words", {"source": "parquet", "path": "a/*.parquet", "field": "my words"}),
        (f"hub:o/d@{COMMIT}#words", {"source": "hub", "path": "o/d", "commit": COMMIT, "field": "words"}),
        ("books/c#.txt", {"source": "text", "path": "books/c#.txt"}),
        ("books/#1", {"source": "text", "path": "books/#1"}),
        ("text:odd.jsonl", {"source": "text", "path": "odd.jsonl"}),
        ("C:/words", {"source": "text", "path": "C:/words"}),
        (f"hub:o/d@{COMMIT}", {"source": "hub", "path": "o/d", "commit": COMMIT}),
        (f"hub:o/c@{COMMIT}", {"source": "hub", "path": "o/c", "commit": COMMIT, "subset": "en", "split": "all"}),
    ],
)
def test_another_source_keeps_the_tokenizer(source: str, expected: dict[str, Any]) -> None:
    data = DataConfig(source="hub", path="o/c", commit="x", subset="en", split="all", field="body", tokenizer="t")
    found = data.with_source(source)
    assert found == msgspec.convert({"field": "body", "tokenizer": "t", **expected}, DataConfig)
    validate(RunConfig(model=ModelConfig(architecture="llama", sizes={"hidden_size": 8}), data=found))


@pytest.mark.parametrize("source", ["", "hub:o/d", "text:", "hub:@" + COMMIT, "hub:o/d@main", "hub:o/d@" + COMMIT[:12]])
def test_half_a_source_or_a_branch_that_moves_is_refused(source: str) -> None:
    with pytest.raises(UserError, match=r"not understood|names no commit"):
        DataConfig().with_source(source)


# Presets.


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_a_run_with_every_field_explained(preset: str) -> None:
    text = run_text(preset)
    run = decode_run(text, preset)
    assert run.name == preset
    assert all(len(line) <= 120 for line in text.splitlines())
    lines = text.splitlines()
    names = [
        name
        for section, name in leaves()
        if (section, name) not in {("model", n) for n in ("sizes", "weights", "hub", "commit")}
        and not name.startswith("foreign_")  # which `noloco_node.init` writes
        and name not in {"tokenizer_files", "frozen_files"}  # which `init --from` lists
    ]
    for name in names:
        places = [k for k, line in enumerate(lines) if line.removeprefix("# ").startswith(f"{name} = ")]
        assert places, f"{name} is not in the file"
        above = lines[places[0] - 1]
        assert above.startswith("#") or above.split(" = ")[0].isidentifier(), f"{name} has no comment"


@given(st.integers(1, 12), st.integers(1, 9), st.integers(1, 3000), st.integers(0, 2**40))
def test_any_demo_is_a_run(stages: int, replicas: int, steps: int, seed: int) -> None:
    run = decode_run(demo_run_text(stages=stages, replicas=replicas, steps=steps, seed=seed), "demo")
    assert (run.pipeline.stages, run.pipeline.replicas, run.inner.steps, run.seed) == (stages, replicas, steps, seed)
    assert run.pipeline.microbatches_per_step >= 2 * stages or stages <= 2
    if steps >= 60:
        assert run.inner.steps // run.outer.inner_steps_per_round >= 10


def test_a_run_file_in_the_way_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    write_text(path, run_text("tiny"), overwrite=False)
    assert load_run(path).name == "tiny"
    with user_error(Exit.USAGE, "is there already"):
        write_text(path, run_text("125m"), overwrite=False)
    assert load_run(path).name == "tiny"
    write_text(path, run_text("125m"), overwrite=True)
    assert load_run(path).name == "125m"
    with pytest.raises(UserError, match="no preset 'huge'"):
        write_text(path, run_text("huge"), overwrite=True)
    with user_error(Exit.STORAGE):
        write_text(tmp_path / "no" / "run.toml", run_text("tiny"), overwrite=False)


NAMES_LIKE_PLACES = ["a - at b", "x - at `$.nowhere`", "x - at `$.model.sizes[...]`", "`", "missing required field `x`"]


@given(name=st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.sampled_from(NAMES_LIKE_PLACES))
def test_a_field_of_any_name_is_refused_in_a_sentence(name: str) -> None:
    """A run file may be a stranger's: whatever it calls a field, the answer is no traceback."""
    for section in ("", "[outer]\n", "[data]\n"):
        with suppress(UserError):
            decode_run(f"{MODEL if section else ''}{section}{json.dumps(name)} = 1\n{'' if section else MODEL}", "x")


@pytest.mark.parametrize("before", ["", "\n  ", "x = {", "x = [{a=1, ", "[", " [[ "])
@pytest.mark.parametrize("part", ["a.", " 'a b' . ", '"." .', r'"\"\\" . '])
def test_a_key_of_many_parts_is_refused_before_it_takes_the_memory(before: str, part: str) -> None:
    """One of two hundred kilobytes took all memory of the machine that read it, or half a minute."""
    with pytest.raises(UserError, match="a key has more than 16 parts"):
        decode_run(f"{before}{1000 * part}a=1", "a stranger's")
    assert toml_table(f"{15 * 'a.'}a = '{1000 * part}'\n".replace("'a b'", "ab"), "ours")


@pytest.mark.parametrize("number", ["9" * 5000, "0x" + "f" * 5000, "0b" + "1" * 50_000, "0o1" + "_7" * 5000])
@pytest.mark.parametrize("text", ["seed = {}\n" + MODEL, MODEL + "[pipeline]\nsubspace = {}", MODEL + "x = [[{}]]"])
def test_a_number_that_python_does_not_write_down_is_refused_in_a_sentence(text: str, number: str) -> None:
    with pytest.raises(UserError, match="is not valid TOML"):
        decode_run(text.replace("{}", number), "a stranger's")


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_any_text_of_a_field_stays_what_it_is(text: str) -> None:
    mixture = f"[[data.mixture]]\npath = {toml(text)}"
    file = written(numbers_of("tiny"), "a", 0, data={"source": "text", "path": text}, data_sections=mixture)
    table = tomllib.loads(with_fields(file, {"adapter": {"targets": toml([text])}}))
    found = (table["data"]["path"], table["data"]["mixture"][0]["path"], table["adapter"]["targets"][0])
    assert found == (text, text, text)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e-9, 1e300, -0.0])
def test_a_number_of_a_field_stays_what_it_is(value: float) -> None:
    assert repr(tomllib.loads(f"field = {toml(value)}")["field"]) == repr(value)


@pytest.mark.parametrize("value", [None, "\ud800", ["a\udfff"]])
def test_what_no_file_can_hold_is_an_error_of_its_type(value: object) -> None:
    with pytest.raises(TypeError):
        toml(value)
