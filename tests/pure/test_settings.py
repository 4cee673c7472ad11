from __future__ import annotations

import dataclasses
import pickle
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_rdt import settings as module
from sglang_rdt.errors import SettingError
from sglang_rdt.settings import Settings, load, table

FIELDS = {f.name: f for f in dataclasses.fields(Settings)}
ENV = {name: f.metadata["env"] for name, f in FIELDS.items()}


def test_defaults_need_no_environment() -> None:
    assert load({}) == Settings()
    assert load({"PATH": "/bin", "SGLANG_OTHER": "x", "SGLANGRDT": "x"}) == Settings()


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENV.values():
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SGLANG_RDT_BUCKET_BYTES", "64M")
    assert load() == Settings(bucket_bytes=64 << 20)


@pytest.mark.parametrize("text", ["1", "true", "TRUE", "Yes", "on", " 1 "])
def test_true(text: str) -> None:
    assert module.parse_bool(text) is True


@pytest.mark.parametrize("text", ["0", "false", "False", "no", "OFF", "0\n"])
def test_false(text: str) -> None:
    assert module.parse_bool(text) is False


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1", 1),
        ("268435456", 1 << 28),
        ("256M", 256 << 20),
        ("256MiB", 256 << 20),
        ("256mb", 256 << 20),
        ("1g", 1 << 30),
        ("3 GiB", 3 << 30),
        ("5k", 5120),
        ("7b", 7),
        (" 7 ", 7),
    ],
)
def test_sizes(text: str, count: int) -> None:
    assert module.parse_bytes(text) == count


# Field, and texts that it must not take.
BAD = {
    "enabled": ["", "2", "maybe", "truefalse"],
    "monkeypatch": ["", "nope"],
    "bucket_bytes": ["", "0", "-1", "1.5G", "1T", "M", "0M", "12 34", "1e6"],
    "connect_timeout_s": ["", "0", "-1", "inf", "nan", "1e12", "soon"],
    "phase_timeout_s": ["0"],
    "stall_timeout_s": ["0"],
    "export_every": ["", "-1", "1.5", "often"],
    "verify": ["", "crc", "checksums"],
    "pause_mode": ["abort", ""],
    "engine_failures": ["ignore", ""],
    "log_level": ["loud"],
}


@pytest.mark.parametrize(("name", "text"), [(n, t) for n, texts in BAD.items() for t in texts])
def test_bad_values_are_named(name: str, text: str) -> None:
    with pytest.raises(SettingError) as caught:
        load({ENV[name]: text})
    assert f"{ENV[name]}={text!r}: " in str(caught.value)
    assert len(str(caught.value)) > len(f"{ENV[name]}={text!r}: ")
    assert caught.value.name == ENV[name]


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("verify", "EQUAL", "equal"),
        ("verify", "off", "off"),
        ("pause_mode", " in_place ", "in_place"),
        ("export_every", "0", 0),
        ("connect_timeout_s", "0.5", 0.5),
        ("namespace", "", None),
        ("namespace", "  rl ", "rl"),
        ("hf_config", "/models/x", "/models/x"),
        ("ray_address", "ray://head:10001", "ray://head:10001"),
        ("log_level", "DEBUG", "debug"),
        ("enabled", "0", False),
        ("allow_cast", "yes", True),
        (
            "include",
            " *.q_proj.weight, model.norm.weight ,",
            ("*.q_proj.weight", "model.norm.weight"),
        ),
        ("exclude", "", ()),
    ],
)
def test_good_values(name: str, text: str, value: object) -> None:
    assert load({ENV[name]: text}) == Settings().replace(**{name: value})


@pytest.mark.parametrize(
    "name", ["SGLANG_RDT_BUCKETBYTES", "SGLANG_RDT_", "MEGATRON_RDT_VERIFY", "SGLANG_RDT_verify"]
)
def test_unknown_variables_are_refused(name: str) -> None:
    with pytest.raises(SettingError, match=rf"{name}='\.\.\.': no such setting"):
        load({name: "1"})


def test_variables_of_the_test_and_cpu_tools_are_known() -> None:
    assert load({"SGLANG_RDT_CPU_STANDINS": "0", "SGLANG_RDT_TEST_CACHE": "/tmp/x"}) == Settings()


TEXT = st.text(string.ascii_letters + string.digits + ":/._-", min_size=1, max_size=20)
VALUES = {
    **dict.fromkeys([n for n, f in FIELDS.items() if isinstance(f.default, bool)], st.booleans()),
    "namespace": st.none() | TEXT,
    "placement_group": st.none() | TEXT,
    "hf_config": st.none() | TEXT,
    "ray_address": TEXT,
    "mode": st.sampled_from(["auto", "direct", "bucketed"]),
    "include": st.lists(TEXT, max_size=3).map(tuple),
    "exclude": st.lists(TEXT, max_size=3).map(tuple),
    "keep": st.lists(TEXT, max_size=3).map(tuple),
    "runner": st.sampled_from(["target", "draft", "both"]),
    "link_costs": st.none() | TEXT,
    "plan_report": st.none() | TEXT,
    "nixl_threads": st.integers(0, 64),
    "bucket_bytes": st.integers(1 << 16, 1 << 50),
    "verify": st.sampled_from(["off", "checksum", "equal"]),
    "verify_every": st.integers(0, 10**6),
    "pause_mode": st.sampled_from(["retract", "in_place"]),
    "engine_failures": st.sampled_from(["raise", "log"]),
    "export_every": st.integers(0, 10**9),
    "log_level": st.sampled_from(["debug", "info", "warning", "error"]),
    **dict.fromkeys(
        ["connect_timeout_s", "phase_timeout_s"],
        st.floats(1e-6, 1e4, allow_nan=False),
    ),
    "stall_timeout_s": st.floats(1e5, 1e8, allow_nan=False),
}


def test_every_setting_has_values_here() -> None:
    assert set(VALUES) == set(FIELDS)


@given(st.fixed_dictionaries(VALUES))
def test_env_reproduces_the_settings(values: dict[str, object]) -> None:
    settings = Settings(**values)  # type: ignore[arg-type]
    env = settings.env()
    assert all(isinstance(v, str) for v in env.values())
    assert load(env) == settings
    assert pickle.loads(pickle.dumps(settings)) == settings


def test_settings_are_immutable_and_replace_copies() -> None:
    settings = Settings()
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.enabled = False  # type: ignore[misc]
    assert settings.replace(enabled=False).enabled is False
    assert settings.enabled is True


def test_the_table_shows_every_variable_once_with_a_default_that_parses() -> None:
    rows = table()
    names = [env for env, _, _ in rows]
    assert len(set(names)) == len(names)
    assert set(names) == {*ENV.values(), "SGLANG_RDT_CPU_STANDINS"}
    assert all(doc.strip().endswith(".") for _, _, doc in rows)
    shown = {env: default for env, default, _ in rows if default and env in ENV.values()}
    assert load(shown) == Settings()
    defaults = {env: default for env, default, _ in rows}
    by_field = {name: defaults[env] for name, env in ENV.items()}
    assert by_field["enabled"] == "1"
    assert by_field["allow_cast"] == "0"
    assert by_field["namespace"] == ""
