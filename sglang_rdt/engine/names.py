"""Names of scheduler actors: made and read in one place. Pure.

``sglang_scheduler_node{ip}_port{port}_dp{d}_pp{p}_tp{t}`` is stable: whoever knows an engine's
address can make it. Released SGLang puts a placement-group id and a bundle index into the name
instead of the port; :func:`parse` reads that form too.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from sglang_rdt.brief import brief
from sglang_rdt.plan.specs import RankId

# As they are written: of other digits, or of more, the number would not be the name again.
_N = "(?:0|[1-9][0-9]{0,8})"
_STABLE = re.compile(
    rf"sglang_scheduler_node(?P<node>.+?)_port(?P<port>{_N})"
    rf"_dp(?P<dp>{_N})_pp(?P<pp>{_N})_tp(?P<tp>{_N})"
)
# SGLang 0.5.16 to 0.5.23; dp is "None" nowhere in them, but was missing before #22917.
_RELEASED = re.compile(
    rf"sglang_scheduler_node(?P<node>.+?)(?:_dp(?P<dp>{_N}))?_pp(?P<pp>{_N})_tp(?P<tp>{_N})"
    rf"_pg(?P<pg>[0-9a-f]{{8}})_bundle(?P<bundle>{_N})"
)


MAX_PORT = 65535
MAX_ADDRESS = 1000


@dataclass(frozen=True, slots=True)
class ActorName:
    """A parsed name. ``port`` is None in the released form, ``group`` and ``bundle`` in ours."""

    node: str
    rank: RankId
    port: int | None = None
    group: str | None = None
    bundle: int | None = None


def actor_name(node_ip: str, port: int, *, dp: int = 0, pp: int = 0, tp: int = 0) -> str:
    """The stable name of one scheduler actor.

    Args:
        node_ip: address of the node that runs the engine's main process, as Ray reports it.
        port: the engine's HTTP port (``ServerArgs.port``).
    """
    return f"sglang_scheduler_node{node_ip}_port{port}_dp{dp}_pp{pp}_tp{tp}"


def parse(name: str) -> ActorName | None:
    """The parts of a scheduler actor's name, stable or released form; None for other actors."""
    match = _STABLE.fullmatch(name)
    if match and int(match["port"]) <= MAX_PORT:
        rank = RankId(int(match["dp"]), int(match["pp"]), int(match["tp"]))
        return ActorName(match["node"], rank, port=int(match["port"]))
    match = _RELEASED.fullmatch(name)
    if match:
        rank = RankId(int(match["dp"] or 0), int(match["pp"]), int(match["tp"]))
        return ActorName(match["node"], rank, group=match["pg"], bundle=int(match["bundle"]))
    return None


def engine_id(node_ip: str, port: int) -> str:
    """How an engine is called in messages: ``ip:port`` (``[ip]:port`` for IPv6)."""
    return f"[{node_ip}]:{port}" if ":" in node_ip else f"{node_ip}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """``host:port``, ``[v6]:port`` or ``http://host:port[/...]`` -> (host, port).

    Raises:
        ValueError: no host in it, or no port that can be.
    """
    if isinstance(address, str) and len(address) <= MAX_ADDRESS:
        rest = re.sub(r"^[a-z]+://", "", address.strip()).split("/", 1)[0]
        host, _, port = rest.rpartition(":")
        host = host.strip("[]")
        if host and re.fullmatch("[0-9]{1,5}", port) and int(port) <= MAX_PORT:
            return host, int(port)
    raise ValueError(f"expected host:port, got {brief(address, 200)}")


def is_wildcard_or_loopback(host: str) -> bool:
    """Whether ``host`` names this machine rather than an address that other nodes see."""
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified
