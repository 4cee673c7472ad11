"""Each rank's parallel configuration over HTTP, for frameworks that ask there.

``GET http://HOST:ENGINE_INFO_BOOTSTRAP_PORT/get_parallelism_config?rank=N``, on the address of SGLang's
own engine-info server, and ``GET /parallelism_config?rank=N`` on the HTTP server. Released SGLang
starts that server only to seed weights over Mooncake, and has neither path; sgl-project/sglang#20907
and #27723 add them, with the same JSON.

There, ranks write what they are into the server, over HTTP. Here the engine's main process asks its
actors, so nothing can be written from outside; SGLang's own path for that is taken away where the
server runs for this alone.

Source: sglang.srt.entrypoints.engine_info_bootstrap_server.EngineInfoBootstrapServer, the same in
0.5.16 to 0.5.23.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, MutableMapping
from typing import Any

from sglang_rdt import settings as settings_module
from sglang_rdt.errors import PlacementError

logger = logging.getLogger("sglang_rdt")

# As upstream calls it: a keyword of RayEngine, and a server argument in patched sources.
KEYWORD = "enable_engine_info_bootstrap"
PATH = "/get_parallelism_config"
SERVER_PATH = "/parallelism_config"
_ASK_TIMEOUT_S = 60.0
_LISTEN_TIMEOUT_S = 30.0
_POLL_S = 0.02

_asked = threading.local()


def of_this_rank() -> dict[str, int]:
    """This scheduler process's parallel configuration; called on every rank."""
    import torch.distributed as dist
    from sglang.srt.distributed import parallel_state as state

    try:
        from sglang.srt.layers.dp_attention import get_attention_dp_rank, get_attention_dp_size

        attn_dp = get_attention_dp_size(), get_attention_dp_rank()
    except ImportError:  # 0.5.21 and later
        from sglang.srt.runtime_context import get_parallel

        attn_dp = get_parallel().attn_dp_size, get_parallel().attn_dp_rank
    tp_rank = state.get_tensor_model_parallel_rank()
    pairs = {
        "tp": (state.get_tensor_model_parallel_world_size(), tp_rank),
        "pp": (
            state.get_pipeline_model_parallel_world_size(),
            state.get_pipeline_model_parallel_rank(),
        ),
        "ep": (
            state.get_moe_expert_parallel_world_size(),
            state.get_moe_expert_parallel_rank(),
        ),
        "moe_tp": (
            state.get_moe_tensor_parallel_world_size(),
            state.get_moe_tensor_parallel_rank(),
        ),
        "moe_dp": (state.get_moe_data_parallel_world_size(), state.get_moe_data_parallel_rank()),
        "attn_tp": (
            state.get_attn_tensor_model_parallel_world_size(),
            state.get_attn_tensor_model_parallel_rank(),
        ),
        "attn_cp": (
            state.get_attn_context_model_parallel_world_size(),
            state.get_attn_context_model_parallel_rank(),
        ),
        "attn_dp": attn_dp,
    }
    out = {}
    for name, (size, rank) in pairs.items():
        out[f"{name}_size"], out[f"{name}_rank"] = int(size), int(rank)
    out |= {"world_size": dist.get_world_size(), "global_rank": dist.get_rank()}
    # Upstream calls it so, and means the rank in the tensor-parallel group.
    return {**out, "local_rank": int(tp_rank)}


def take_keyword(kwargs: MutableMapping[str, Any]) -> bool | None:
    """The keyword among those of ``RayEngine``, which makes server arguments of what it leaves there.

    It stays where it is one of them (patched sources), so that they say what the engine does.
    """
    from sglang.srt.server_args import ServerArgs

    keyword = kwargs.pop(KEYWORD, None)
    if keyword is not None and hasattr(ServerArgs, KEYWORD):
        kwargs[KEYWORD] = bool(keyword)
    return keyword


@contextlib.contextmanager
def asked_for(keyword: bool | None) -> Iterator[None]:
    """``RayEngine(enable_engine_info_bootstrap=...)``, for the launch inside."""
    _asked.value = keyword
    try:
        yield
    finally:
        _asked.value = None


def wanted(server_args: Any) -> bool:
    """Keyword, else server argument (patched sources), else SGLANG_RDT_ENGINE_INFO."""
    keyword = getattr(_asked, "value", None)
    if keyword is not None:
        return bool(keyword)
    return bool(getattr(server_args, KEYWORD, False)) or settings_module.load().engine_info


def _seeds(server_args: Any) -> bool:
    return bool(server_args.remote_instance_weight_loader_start_seed_via_transfer_engine)


def check_port(server_args: Any) -> None:
    """Refuses a port that is taken before ranks are started for nothing.

    Raises:
        PlacementError: it is.
    """
    from sglang.srt.utils.network import is_port_available

    port = server_args.engine_info_bootstrap_port
    if wanted(server_args) and not _seeds(server_args) and not is_port_available(port):
        raise PlacementError(
            f"engine_info_bootstrap_port {port} is taken: engines on one node need different ones"
        )


def start(result: Any, server_args: Any) -> None:
    """Serves what the ranks behind ``result`` say of themselves, if somebody wants it."""
    if not wanted(server_args):
        return
    import ray

    ranks = ray.get(
        [actor.rdt_parallelism.remote() for actor in result.scheduler_actors],
        timeout=_ASK_TIMEOUT_S,
    )
    configs = dict(enumerate(ranks))
    _add_to_http_server(configs)
    if _seeds(server_args):
        # SGLang has its own server, which it hands to the result after this: too late to add to.
        logger.warning(
            "engine info: SGLang's own server runs at port %d; ask %s of the HTTP server",
            server_args.engine_info_bootstrap_port,
            SERVER_PATH,
        )
        return
    from sglang.srt.entrypoints.engine_info_bootstrap_server import EngineInfoBootstrapServer

    server = EngineInfoBootstrapServer(
        host=server_args.host, port=server_args.engine_info_bootstrap_port
    )
    app = server._server.config.app
    app.router.routes[:] = [r for r in app.router.routes if "PUT" not in (r.methods or ())]
    app.add_api_route(PATH, _answer(configs), methods=["GET"])
    _wait_until_it_listens(server)
    result.rdt_engine_info = server


def _wait_until_it_listens(server: Any) -> None:
    """SGLang starts it on a thread and goes on: who asks an engine that has just started is refused.

    Raises:
        PlacementError: it does not come.
    """
    deadline = time.monotonic() + _LISTEN_TIMEOUT_S
    while not server._server.started:
        if not server._thread.is_alive() or time.monotonic() > deadline:
            server.close()
            raise PlacementError(
                f"the engine-info server does not start on {server.host}:{server.port}; is the port taken?"
            )
        time.sleep(_POLL_S)


def stop(result: Any) -> None:
    """Ends the server of :func:`start`."""
    server = getattr(result, "rdt_engine_info", None)
    if server is not None:
        result.rdt_engine_info = None
        server.close()


def _answer(configs: dict[int, dict[str, int]]) -> Any:
    from fastapi import HTTPException

    # No postponed annotations in here: FastAPI reads them.
    def get_parallelism_config(rank):  # type: ignore[no-untyped-def]
        if rank not in configs:
            raise HTTPException(status_code=404, detail=f"No parallelism config for rank {rank}")
        return configs[rank]

    get_parallelism_config.__annotations__ = {"rank": int}
    return get_parallelism_config


def _add_to_http_server(configs: dict[int, dict[str, int]]) -> None:
    """The path on the HTTP server, where this process runs one."""
    import sys

    module = sys.modules.get("sglang.srt.entrypoints.http_server")
    if module is None:
        return
    routes = module.app.router.routes
    routes[:] = [r for r in routes if getattr(r, "path", None) != SERVER_PATH]
    answer = _answer(configs)
    # Asks for the keys that SGLang asks for on the paths beside it.
    from sglang.srt.utils.auth import AuthLevel, auth_level

    module.app.add_api_route(
        SERVER_PATH, auth_level(AuthLevel.ADMIN_OPTIONAL)(answer), methods=["GET"]
    )
