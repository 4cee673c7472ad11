"""SGLang's own quantisation after loading: what a session would do to it, and that it is refused.

With SGLang's real classes, in a process of their own (importing them takes long).
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.families

PROGRAM = """
import json
from types import SimpleNamespace

import torch
from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod, UnquantizedLinearMethod
from sglang.srt.model_loader.loader import DefaultModelLoader

from sglang_rdt.engine import loadable

method = Fp8LinearMethod.__new__(Fp8LinearMethod)
# What quantization="fp8" sets up for a bf16 checkpoint, on a device without special kernels.
method.quant_config = SimpleNamespace(is_checkpoint_fp8_serialized=False)
method.block_quant = method.is_checkpoint_fp8_serialized = False
method.cutlass_fp8_supported = method.use_marlin = method.use_aiter_fp8_per_token = False
torch.manual_seed(0)
layer = torch.nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)
layer.weight.weight_loader = print
before = layer.weight.detach().float().clone()
model = torch.nn.Sequential(layer)
layer.quant_method = method
device = torch.device("cpu")
out = {}

DefaultModelLoader.postprocess_weights(model, device)
once = layer.weight.float().t() * layer.weight_scale
out["error"] = float((once - before).abs().max() / before.abs().max())
DefaultModelLoader.restore_weights_before_loading(model, device)
out["restored"] = list(layer.weight.shape) == [32, 64]
out["loader"] = hasattr(layer.weight, "weight_loader")
try:
    DefaultModelLoader.postprocess_weights(model, device)
    again = layer.weight.float() * layer.weight_scale
    out["same"] = again.shape == before.shape and bool(torch.equal(again, once))
except Exception as error:
    out["same"] = False
out["why"] = loadable.why_not(model)
for kind in (UnquantizedLinearMethod, UnquantizedFusedMoEMethod):
    made = kind.__new__(kind)
    if isinstance(made, torch.nn.Module):
        torch.nn.Module.__init__(made)
    del layer.quant_method
    layer.quant_method = made
    out[kind.__name__] = loadable.why_not(model)
print("RESULT", json.dumps(out))
"""


def test_a_session_without_any_sync_would_quantise_twice() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, check=False
    )
    (line,) = [x for x in done.stdout.splitlines() if x.startswith("RESULT")] or [done.stderr]
    found = json.loads(line.removeprefix("RESULT"))
    assert found["error"] < 0.07
    assert not found["restored"]
    assert not found["loader"]
    assert not found["same"]
    assert "Fp8LinearMethod of an unquantised checkpoint" in found["why"]
    assert found["UnquantizedLinearMethod"] is None
    assert found["UnquantizedFusedMoEMethod"] is None
