from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_rdt.bench import options as module
from sglang_rdt.bench.options import BenchError, Options, make_options
from sglang_rdt.bench.shapes import NAMED, parse_model
from sglang_rdt.demo.models import TinyModel
from sglang_rdt.demo.trainer import Layout

MIB = 1 << 20


def options(**changes: Any) -> Options:
    given: dict[str, Any] = {
        "model": "tiny",
        "trainer": "tp=1,pp=1,ep=1,etp=1,dp=1",
        "engine": "tp=1",
        "engines": 1,
        "paths": "direct,direct_checksum,bucketed,sglang_distributed,sglang_disk,peer_copy",
        "device": "cpu",
        "syncs": 10,
        "warmup": 2,
        "disk_syncs": None,
        "bucket_bytes": None,
        "trainer_gpus": None,
        "engine_gpus": None,
        "verify": "off",
        "gap_ms": 100.0,
        "ddp": False,
        "train": 0,
        "disk_dir": None,
        "engine_args": None,
        "timeout_s": 60.0,
        "gpus": 0,
    }
    return make_options(**{**given, **changes})


def refused(**changes: Any) -> str:
    with pytest.raises(BenchError) as caught:
        options(**changes)
    text = str(caught.value)
    assert text.count("\n") == 0
    return text


def test_the_defaults() -> None:
    found = options()
    assert found.paths == module.PATHS
    assert (found.trainer, found.engine_tp) == (Layout(etp=1), 1)
    assert found.disk_syncs == 10
    assert found.layout == {
        "trainer": "tp=1,pp=1,ep=1,etp=1,dp=1",
        "engine": "tp=1",
        "engines": 1,
    }
    assert not found.shared_gpu


def test_a_layout() -> None:
    found = options(model="tiny-moe", trainer="ep=2, dp=2", engine="tp=2", engines=2)
    assert found.trainer == Layout(ep=2, dp=2)
    assert found.layout["trainer"] == "tp=1,pp=1,ep=2,dp=2"
    assert options(model="tiny-moe", trainer="tp=2,etp=1,ep=2").trainer == Layout(2, 1, 2, 1, 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "qwen9"}, ["--model", "qwen9", "tiny", "qwen3-30b-a3b", "config.json"]),
        ({"model": "tiny:3"}, ["--model", "1 to 2 layers"]),
        ({"model": "tiny:x"}, ["--model", "1 to 2 layers"]),
        ({"trainer": "tp=2,xp=1"}, ["--trainer", "xp=1"]),
        ({"trainer": "tp"}, ["--trainer", "'tp'"]),
        ({"trainer": "tp=0"}, ["--trainer", "tp must be a number"]),
        ({"trainer": "tp=1,ep=2"}, ["--trainer", "tp * cp * dp must be a multiple of ep"]),
        ({"trainer": "dp=2,ep=2"}, ["ep=2", "no experts"]),
        ({"trainer": "tp=4"}, ["tp=4", "key/value heads"]),
        ({"trainer": "tp=3"}, ["tp=3", "does not divide"]),
        ({"trainer": "pp=3"}, ["pp=3", "2 layers"]),
        ({"engine": "dp=2"}, ["--engine", "dp=2"]),
        ({"engine": "tp=3"}, ["--engine tp=3"]),
        ({"paths": "direct,nccl"}, ["--paths", "nccl", "sglang_distributed"]),
        ({"paths": ""}, ["--paths"]),
        ({"bucket_bytes": "1x"}, ["--bucket-bytes", "positive size"]),
        ({"bucket_bytes": "1k"}, ["--bucket-bytes 1k", "65536"]),
        ({"verify": "all"}, ["--verify", "checksum"]),
        ({"engine_args": "{"}, ["--engine-args", "JSON"]),
        ({"engine_args": "[]"}, ["--engine-args", "object"]),
        ({"trainer_gpus": "0"}, ["--device cuda"]),
        ({"device": "cuda", "gpus": 1}, ["no GPU is left for the trainer"]),
        ({"device": "cuda", "gpus": 2, "engines": 3}, ["3 engine(s)", "need 3"]),
        ({"device": "cuda", "gpus": 2, "engine_gpus": "1,1"}, ["twice"]),
        ({"device": "cuda", "gpus": 2, "engine_gpus": "2"}, ["2 GPU(s)"]),
        ({"device": "cuda", "gpus": 2, "engine_gpus": "one"}, ["GPU numbers"]),
        (
            {"device": "cuda", "gpus": 2, "trainer_gpus": "1", "engine_gpus": "1"},
            ["GPU 1", "their own"],
        ),
        ({"device": "cuda", "gpus": 2, "trainer": "tp=2", "train": 1}, ["--train", "NCCL"]),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], words: list[str]) -> None:
    text = refused(**changes)
    for word in words:
        assert word in text


def test_gpus_by_default_and_by_name() -> None:
    found = options(device="cuda", gpus=4, engine="tp=2", trainer="tp=2")
    assert (found.trainer_gpus, found.engine_gpus) == ((0, 1), (2, 3))
    assert not found.shared_gpu
    found = options(device="cuda", gpus=2, trainer="tp=2", trainer_gpus="1")
    assert (found.trainer_gpus, found.engine_gpus) == ((1,), (0,))
    assert found.gpu_of_rank == [1, 1]
    assert found.shared_gpu
    assert found.layout["trainer_gpus"] == [1]


def test_paths_come_in_the_order_in_which_they_run() -> None:
    assert module.parse_paths("sglang_disk, direct,peer_copy") == (
        "peer_copy",
        "direct",
        "sglang_disk",
    )


def test_bucket_sizes() -> None:
    assert module.parse_sizes(None) == ()
    assert module.parse_sizes("2g, 512MiB,512M") == (512 * MIB, 2048 * MIB)
    assert module.default_bucket_sizes(1000, "cpu", whole=True) == (MIB,)
    assert module.default_bucket_sizes(100 * MIB, "cpu", whole=True) == (64 * MIB, 100 * MIB)
    gpu = module.default_bucket_sizes(16 << 30, "cuda", whole=True)
    assert gpu == (512 * MIB, 2048 * MIB, 16 << 30)
    assert module.default_bucket_sizes(60 << 30, "cuda", whole=True) == (512 * MIB, 2048 * MIB)
    assert module.default_bucket_sizes(60 << 30, "cuda", whole=False)[-1] == 4096 * MIB


def test_shapes() -> None:
    assert parse_model("qwen3-8b").nbytes == 16_381_470_720  # as measured
    assert 1.0e9 < parse_model("cpu-1gb").nbytes < 1.2e9
    cut = parse_model("qwen3-30b-a3b:16")
    assert cut.name == "qwen3-30b-a3b-16layers"
    experts = [n for n in cut.model.hf_shapes() if ".experts." in n]
    assert len(experts) >= 6000


def test_a_vocabulary_is_padded_for_the_trainer() -> None:
    assert parse_model("tiny", 2).model.padded_vocab is None
    assert parse_model("tiny", 3).model.padded_vocab == 513


@pytest.mark.parametrize("name", ["tiny", "tiny-moe", "qwen3-30b-a3b"])
def test_a_folder_with_a_config(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    NAMED[name].hf_config().save_pretrained(folder)
    found = parse_model(str(folder))
    wanted = NAMED[name]
    assert found.name == "my-model"
    assert found.model.hf_shapes() == wanted.hf_shapes()
    assert parse_model(str(folder / "config.json")) == found


def test_qwen2_and_tied_weights_in_a_folder(tmp_path: Path) -> None:
    model = TinyModel("dense", tied=True, qkv_bias=True)
    model.hf_config().save_pretrained(tmp_path)
    assert parse_model(str(tmp_path)).model.hf_shapes() == model.hf_shapes()


def test_a_family_that_cannot_be_built(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "glm"}))
    assert "glm" in refused(model=str(tmp_path))
