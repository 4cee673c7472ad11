"""The first job: engines that serve until this program is stopped."""

import sys
import tempfile
import time
from typing import Any

import ray
from ray.util.placement_group import placement_group

from sglang_rdt import cpu
from sglang_rdt.demo.models import TinyModel
from sglang_rdt.engine.placement import host_options


@ray.remote
class Engine:
    """RayEngine wants a process of its own. host_options says where."""

    def __init__(self, **kwargs: Any) -> None:
        from sglang.srt.ray.engine import RayEngine

        import sglang_rdt  # noqa: F401  (before the engine starts)

        self.engine = RayEngine(**kwargs)

    def generate(self, **kwargs: Any) -> Any:
        return self.engine.generate(**kwargs)


def main(count: int) -> None:
    ray.init(log_to_driver=False)  # engines are named in SGLANG_RDT_NAMESPACE
    path = tempfile.mkdtemp()  # several nodes: a folder that all of them see
    TinyModel("dense").save_random_checkpoint(path, seed=0)
    engines = []
    for i in range(count):
        group = placement_group([{"CPU": 1, "GPU": 1}], strategy="STRICT_PACK")
        # On GPUs: model_path=path, tp_size=..., port=..., use_ray=True, and a bundle per rank.
        kwargs = cpu.engine_kwargs(path, port=30000 + 10 * i)
        engines.append(Engine.options(**host_options(group, [0])).remote(**kwargs))
    ask = {"input_ids": [[7, 8, 9]], "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
    seen = None
    while True:  # your own serving
        replies = [r[0] for r in ray.get([e.generate.remote(**ask) for e in engines])]
        versions = [r["meta_info"]["weight_version"] for r in replies]
        if versions != seen:
            print("replies carry versions", versions, flush=True)
        seen = versions
        time.sleep(0.5)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
