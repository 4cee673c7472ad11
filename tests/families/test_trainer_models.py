"""Every family, from Megatron's live parameters to HF tensors.

What is exported is judged by three that do not know one another: the checkpoint that was put into
Megatron's parameters by hand (every bit), transformers' own model of the family (its logits are
those of Megatron's forward, after training), and live memory (direct mode: every bit).
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from .trainer_worker import Finding, parse, same
from .zoo import FAMILIES

pytest.importorskip("megatron.core")
pytest.importorskip("mbridge")
pytestmark = pytest.mark.families

Passed = Callable[..., None]
ROOT = Path(__file__).parents[2]
_MTP = {"glm4_moe", "deepseek_v3", "glm4_moe_lite"}
# Every process group is slow to start, the models are not.
ALONE = [f"{name}:mtp" if name in _MTP else f"{name}:" for name in FAMILIES]
PAIR = [
    job + ("," if job[-1] != ":" else "") + ("tp=2,ep=2,etp=1" if FAMILIES[name].moe else "tp=2")
    for name, job in zip(FAMILIES, ALONE, strict=True)
]


MOE = [name for name, family in FAMILIES.items() if family.moe]
LONG = [
    *(f"{job}{',' if job[-1] != ':' else ''}pp=2" for job in ALONE),
    *(f"{name}:ep=2,dp=2" for name in MOE),
    # Megatron has no biases of experts that are cut over ETP.
    *(f"{name}:tp=2,ep=1,etp=2" for name in MOE if name != "gpt_oss"),
    *(f"{name}:tp=2,ep=2,etp=1,dtype=bfloat16" for name in MOE),
    *(f"{name}:tp=2,dtype=bfloat16" for name in FAMILIES if name not in MOE),
    "deepseek_v3:nolora,tp=2,ep=2,etp=1",
    "qwen3:tied,pp=2",
    "qwen2_5:tied,tp=2",
    "llama3:tied,tp=2",
]


def run_jobs(
    directory: Path, world: int, jobs: list[str], timeout_s: float = 900
) -> dict[str, Finding]:
    """What the jobs came to, in ``world`` processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    out = directory / "findings.pt"
    command = [sys.executable, "-m", "tests.families.trainer_worker", str(out), str(world)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    logs = [open(directory / f"rank{rank}.log", "w+") for rank in range(world)]  # noqa: SIM115
    processes = [
        subprocess.Popen(
            [*command, str(rank), port, *jobs], cwd=ROOT, env=env, stdout=log, stderr=log
        )
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [process.wait(timeout_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for log in logs:
        log.seek(0)
    assert not any(codes), "\n".join(log.read()[-4000:] for log in logs)
    return torch.load(out, weights_only=False)


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finding]:
    return run_jobs(tmp_path_factory.mktemp("alone"), 1, ALONE)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finding]:
    return run_jobs(tmp_path_factory.mktemp("pair"), 2, PAIR)


@pytest.mark.parametrize("job", ALONE)
def test_one_rank(job: str, alone: dict[str, Finding], passed: Passed) -> None:
    check(job, alone[job])
    passed(**said(job))


@pytest.mark.parametrize("job", PAIR)
def test_tensor_and_expert_parallel(job: str, pair: dict[str, Finding], passed: Passed) -> None:
    check(job, pair[job])
    passed(**said(job))


@pytest.fixture(scope="session")
def more(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finding]:
    return run_jobs(tmp_path_factory.mktemp("more"), 2, LONG, 1200)


@pytest.mark.long
@pytest.mark.parametrize("job", LONG)
def test_other_layouts(job: str, more: dict[str, Finding], passed: Passed) -> None:
    check(job, more[job])
    passed(**said(job))


def said(job: str) -> dict[str, str]:
    """For the table in docs/families.md."""
    from megatron_rdt.sources.families import MODEL_TYPES

    name, layout, options = parse(job)
    ours = FAMILIES[name].make_config().model_type in MODEL_TYPES
    sizes = [f"{key.upper()} {getattr(layout, key)}" for key in ("tp", "pp", "ep", "dp")]
    return {
        "family": name,
        "trainer": ", ".join(s for s in sizes if not s.endswith(" 1")) or "one rank",
        "bridge": "ours for mbridge" if ours else "mbridge",
        "mode": "both",
        "dtype": str(options.get("dtype", torch.float32)).removeprefix("torch."),
    }


def check(job: str, finding: Finding) -> None:
    """Names, bits, logits, live memory."""
    from .megatron_models import hf_config, hf_state

    assert not finding.error, finding.error
    name, _, options = parse(job)
    dtype, mtp = options.pop("dtype", torch.float32), options.pop("mtp", False)
    expected = hf_state(name, dtype, mtp, **options)
    assert_equal(finding.started, expected, name)
    still = [n for n, t in finding.trained.items() if same(t, finding.started[n])]
    assert still == [], "not trained: nothing is said about these"
    assert finding.logits is not None
    theirs = transformers_logits(
        FAMILIES[name].architecture, hf_config(name, **options), finding.trained, finding.ids
    )
    scale = theirs.abs().max()
    difference = (finding.logits - theirs).abs() / scale
    if dtype == torch.float32:
        assert difference.max() < 2e-5, difference.max()
    else:
        # Rounding sends a token to another expert here and there.
        assert difference.median() < 0.02, difference.median()
    assert_equal(finding.held, finding.trained, name)


def assert_equal(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], name: str
) -> None:
    """The same names, and the same bits."""
    found = _fused(found) if name == "qwen3_5_moe" and "experts.0." in " ".join(found) else found
    expected = _fused(expected) if name == "qwen3_5_moe" else expected
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for key, tensor in expected.items():
        assert same(found[key], tensor), f"{key}: {found[key].dtype} {tuple(found[key].shape)}"


def _fused(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts of a layer in one tensor, as Qwen3.5's checkpoints have them."""
    out, experts = {}, {}
    for key, tensor in state.items():
        head, split, tail = key.partition(".mlp.experts.")
        if split and tail[0].isdigit():
            number, part, _ = tail.split(".")
            experts.setdefault(f"{head}{split}", {})[int(number), part] = tensor
        else:
            out[key] = tensor
    for head, parts in experts.items():
        numbers = sorted({number for number, _ in parts})
        out[f"{head}gate_up_proj"] = torch.stack(
            [torch.cat([parts[n, "gate_proj"], parts[n, "up_proj"]]) for n in numbers]
        )
        out[f"{head}down_proj"] = torch.stack([parts[n, "down_proj"] for n in numbers])
    return out


def transformers_logits(
    architecture: str, config: Any, state: dict[str, torch.Tensor], ids: Any
) -> torch.Tensor:
    """By the family's own class, which must miss nothing and know everything."""
    import transformers

    behind = f"model.layers.{config.num_hidden_layers}."
    # Of multi-token prediction it has no code.
    known = {n: t for n, t in state.items() if not n.startswith(behind)}
    model, info = getattr(transformers, architecture).from_pretrained(
        None,
        config=config,
        state_dict=known,
        dtype=next(iter(known.values())).dtype,
        attn_implementation="eager",
        output_loading_info=True,
    )
    assert not info["missing_keys"], info["missing_keys"]
    assert not info["unexpected_keys"], info["unexpected_keys"]
    assert not info.get("mismatched_keys"), info["mismatched_keys"]
    with torch.no_grad():
        return model.eval()(ids).logits.float()
