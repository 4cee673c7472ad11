"""Text that people write: environment variables, JSON files, layouts on a command line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sglang_rdt import settings
from sglang_rdt.errors import SettingError
from sglang_rdt.plan.costs import LEAST, MOST, LinkCosts
from sglang_rdt.settings import Settings
from sglang_rdt.simulate import layouts, shapes
from sglang_rdt.simulate.errors import SimulateError
from sglang_rdt.simulate.predict import Links
from sglang_rdt.simulate.run import Job, simulate

from . import strategies as hostile

VARIABLES = [f.metadata["env"] for f in dataclasses.fields(Settings)]
VALUES = st.one_of(
    hostile.TEXTS,
    st.sampled_from(
        ["1", "0", "on", "nan", "inf", "-1", "1e400", "5e-324", "1e8", "256MiB", "0B", "64k", "9" * 400 + "G",
         "checksum", "retract", "direct"]
    ),
)  # fmt: skip
SECRET = "hunter2-do-not-print"


@hostile.examples(250)
@given(st.dictionaries(st.sampled_from(VARIABLES), VALUES, min_size=1, max_size=3))
def test_any_environment_is_settings_or_names_the_variable(environ: dict[str, str]) -> None:
    secrets = {"AWS_SECRET": SECRET, "RDT_TOKEN": SECRET, "HF_TOKEN": SECRET}
    refused: SettingError | None = None
    try:
        made = settings.load(secrets | environ)
    except SettingError as error:
        refused = error
    if refused is None:
        assert settings.load(made.env()) == made
        return
    # The stall timeout is also refused beside a longer phase timeout.
    assert refused.name in {*environ, "SGLANG_RDT_STALL_TIMEOUT_S"}
    assert str(refused).startswith(refused.name)
    assert SECRET not in str(refused)
    assert "\n" not in str(refused)


JSON = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-2, 1 << 70), hostile.FLOATS,
        st.text(max_size=5), st.just(10**400),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)  # fmt: skip
BYTES = st.one_of(
    st.binary(max_size=20),
    st.sampled_from([b"", b"[" * 100_000, b"\xff\xfe", b"1" + b"0" * 5000, b'{"a": NaN}', b"{}"]),
    JSON.map(lambda value: json.dumps(value).encode()),
)
COSTS = st.dictionaries(
    st.sampled_from([f.name for f in dataclasses.fields(LinkCosts)]), JSON, max_size=4
).map(lambda value: json.dumps(value).encode())


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("json") / "config.json"


@hostile.examples(200)
@given(st.one_of(BYTES, COSTS))
def test_any_file_of_costs(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    try:
        costs = LinkCosts.load(path)
    except SettingError as error:
        hostile.check_sentence(error)
    else:
        assert all(LEAST <= v <= MOST for v in dataclasses.astuple(costs))
        assert 1 <= costs.descriptor_bytes <= 1 << 48


@hostile.examples(100)
@given(BYTES)
def test_any_file_as_a_model(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(SimulateError) as caught:
        shapes.load_shape(str(path))
    hostile.check_sentence(caught.value)


PLACE = layouts.Placement()


def attempt(
    shape: shapes.ModelShape, trainer: str, stages: str | None, engine: str, n: int
) -> None:
    """A simulation, or a sentence."""
    try:
        job = Job(
            shape, layouts.parse_trainer(trainer, stages), layouts.parse_engine(engine), n, PLACE,
            Links(396e9, 50e9, None, LinkCosts(), 0.01),
        )  # fmt: skip
        # What may take a while is a large cluster, which is what was asked for.
        assume(job.trainer.world <= 64 and job.engine.world * n <= 64)
        assume(shape.parameters <= 1e10 and shape.layers * max(shape.experts, 1) <= 300)
        with hostile.quickly():
            simulate(job)
    except SimulateError as error:
        hostile.check_sentence(error)


COUNTS = st.one_of(
    st.sampled_from(["1", "2", "3", "4", "8", "0", "-1", "٣", "²", "1e3", "65537", hostile.LONG]),
    hostile.TEXTS,
)


def options(names: list[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        hostile.TEXTS,
        st.dictionaries(st.sampled_from(names), COUNTS, max_size=3).map(
            lambda d: ",".join(f"{k}={v}" for k, v in d.items())
        ),
    )


SMALL = {
    "model_type": "qwen3_moe", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 64, "num_experts": 4,
    "moe_intermediate_size": 32, "vocab_size": 100,
}  # fmt: skip


@hostile.examples(200)
@given(
    options(["tp", "pp", "ep", "etp", "dp", "cp", "vpp", "xp"]),
    st.one_of(st.none(), st.lists(COUNTS, max_size=3).map(",".join)),
    options(["tp", "ep", "pp", "dp"]),
    st.sampled_from([1, 2, 0, -1, 1 << 40]),
)
def test_any_layout(trainer: str, stages: str | None, engine: str, engines: int) -> None:
    attempt(shapes.from_config("small", SMALL), trainer, stages, engine, engines)


MLA = SMALL | {
    "model_type": "kimi_k2", "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 8, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "tie_word_embeddings": False,
}  # fmt: skip


@hostile.examples(200)
@given(st.data(), st.sampled_from(["tp=1", "tp=2", "tp=2,ep=2,etp=1"]))
def test_any_model(data: st.DataObject, trainer: str) -> None:
    config: Any = data.draw(hostile.mutated(data.draw(st.sampled_from([SMALL, MLA]))))
    if not isinstance(config, dict):
        return
    try:
        shape = shapes.from_config("small", config)
    except SimulateError as error:
        hostile.check_sentence(error)
    else:
        attempt(shape, trainer, None, "tp=2", 1)
