"""Several Ray nodes on one machine, each in a network namespace of its own, with its own address.

``Cluster(["a", "b"])`` makes a bridge, one namespace per name with an interface on that bridge, a
Ray head on the bridge's address (for the driver; it has no CPUs and no GPUs) and a Ray node in each
namespace. It needs root and ``ip``; :func:`why_not` says what is missing.

Everything that is made is told to a guard first: this file, run as a program. It undoes all of it
when its standard input ends, which it also does when the tests are killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

PREFIX = "rdt"
PORT = 6390
_START_S = 150.0
_STOP_S = 10.0


class NoNamespacesError(Exception):
    """This machine cannot have the cluster; the message says why."""


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False, timeout=30)
    if done.returncode:
        raise NoNamespacesError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def why_not() -> str | None:
    """Why there can be no network namespaces here, or None."""
    missing = [tool for tool in ("ip", "nsenter", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"there is no {', '.join(missing)} (packages iproute2 and util-linux)"
    if os.geteuid():
        return "network namespaces need root"
    name = f"{PREFIX}{os.getpid()}t"
    try:
        _ip("netns", "add", name)
        try:
            _ip("link", "add", f"{name}0", "type", "veth", "peer", "name", f"{name}1")
            _ip("link", "del", f"{name}0")
        finally:
            _ip("netns", "del", name)
    except (NoNamespacesError, OSError, subprocess.TimeoutExpired) as error:
        return f"the sandbox forbids network namespaces ({error})"
    return None


class Node:
    """One Ray node in its own namespace."""

    def __init__(self, name: str, netns: str, ip: str, ip6: str) -> None:
        self.name, self.netns, self.ip, self.ip6 = name, netns, ip, ip6
        self.pid: int | None = None

    def command(self, words: Sequence[str]) -> list[str]:
        """``words`` as a command that runs on this node."""
        if self.pid is None:
            return ["ip", "netns", "exec", self.netns, *words]
        return [
            "nsenter",
            f"--target={inside(self.pid)}",
            "--net",
            "--mount",
            "--ipc",
            "--pid",
            *words,
        ]

    def first_command(self, words: Sequence[str], folder: str) -> list[str]:
        """The process that makes the node. From here on it shares no memory with other nodes, which
        SGLang and UCX would take for a sign that they are one machine; nor processes and Ray's
        ``folder``, where a driver would find another node's raylet and join that."""
        own = f'mount -t tmpfs t /dev/shm && mount -t tmpfs t "{folder}" && exec "$@"'
        alone = ["unshare", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
        return self.command([*alone, "sh", "-c", own, "sh", *words])

    def received(self) -> int:
        """Bytes that its interface has received."""
        text = _ip("-n", self.netns, "-j", "-s", "link", "show", "eth0")
        return int(json.loads(text)[0]["stats64"]["rx"]["bytes"])


class Cluster:
    """A Ray cluster with one node per name, and the head beside them. Use with ``with``.

    Args:
        gpus: GPUs of each node that Ray believes in.
        environ: variables for all Ray processes besides this process's own.
    """

    def __init__(
        self, names: Sequence[str], *, gpus: int = 2, environ: Mapping[str, str] | None = None
    ) -> None:
        self._tag = f"{PREFIX}{os.getpid()}"
        # Ray gives up after 30 s, which a busy machine needs.
        patience = {"RAY_raylet_start_wait_time_s": "120"}
        self._environ = {**os.environ, **patience, **(environ or {})}
        self._guard: subprocess.Popen[str] | None = None
        self._started: list[subprocess.Popen[bytes]] = []
        self._gpus = gpus
        self._subnet = _free_subnet()
        self.head_ip = f"{self._subnet}.254"
        self.address = f"{self.head_ip}:{PORT}"
        self.folder = Path()
        self._ray_folder = ""
        self.nodes = {
            name: Node(
                name,
                f"{self._tag}{name}",
                f"{self._subnet}.{i}",
                f"fd5d:{os.getpid() & 0xFFFF:x}::{i}",
            )
            for i, name in enumerate(names, 1)
        }

    def __enter__(self) -> Cluster:
        try:
            self._start_guard()
            self._make_network()
            self._check_network()
            self._start_ray()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Undoes everything; the guard does it."""
        if self._guard is None:
            return
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait(60)
        self._guard = None
        for process in self._started:
            process.wait(10)

    def lose(self, name: str) -> None:
        """What happens when the machine dies: all processes of the node are killed."""
        node = self.nodes[name]
        for pid in _ip("netns", "pids", node.netns).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def _start_guard(self) -> None:
        self._guard = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve())],
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,  # what kills the tests by their group must not kill it
        )

    def _tell(self, kind: str, what: str | int) -> None:
        assert self._guard is not None
        assert self._guard.stdin is not None
        self._guard.stdin.write(f"{kind} {what}\n")
        self._guard.stdin.flush()

    def _make_network(self) -> None:
        # Short: Ray puts sockets there, and their paths may have 107 characters.
        self.folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}n-", dir="/tmp"))
        self._tell("folder", str(self.folder))
        self._ray_folder = f"{self.folder}/ray"
        os.mkdir(self._ray_folder)
        bridge = f"{self._tag}br"
        self._tell("link", bridge)
        _ip("link", "add", bridge, "type", "bridge")
        _ip("addr", "add", f"{self.head_ip}/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for i, node in enumerate(self.nodes.values()):
            self._tell("netns", node.netns)
            _ip("netns", "add", node.netns)
            outside = f"{self._tag}v{i}"
            self._tell("link", outside)
            _ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", node.netns)
            _ip("link", "set", outside, "master", bridge, "up")
            _ip("-n", node.netns, "link", "set", "lo", "up")
            _ip("-n", node.netns, "addr", "add", f"{node.ip}/24", "dev", "eth0")
            # Without duplicate address detection, which would take a second.
            _ip("-n", node.netns, "addr", "add", f"{node.ip6}/64", "dev", "eth0", "nodad")
            _ip("-n", node.netns, "link", "set", "eth0", "up")
            _ip("-n", node.netns, "route", "add", "default", "via", self.head_ip)
            self._write_hosts(node)

    def _write_hosts(self, node: Node) -> None:
        """``ip netns exec`` shows these files in /etc. As on Debian, a machine's own name means its
        loopback interface. Nobody is asked for other names: torch looks up the name of everyone who
        connects, and each time waits for a name server that cannot be reached from here."""
        etc = Path("/etc/netns") / node.netns
        self._tell("folder", str(etc))
        etc.mkdir(parents=True)
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        lines += [f"127.0.1.1 {socket.gethostname()} node-{node.name}", f"{self.head_ip} head"]
        for other in self.nodes.values():
            lines.append(f"{other.ip} {'self' if other is node else f'node-{other.name}'}")
            lines.append(f"{other.ip6} {'self6' if other is node else f'node6-{other.name}'}")
        (etc / "hosts").write_text("\n".join(lines) + "\n")
        (etc / "resolv.conf").write_text("")
        (etc / "nsswitch.conf").write_text("hosts: files\n")

    def _check_network(self) -> None:
        """A firewall for bridges (Docker's, say) may drop everything: better known now."""
        with socket.socket() as server:
            server.bind((self.head_ip, 0))
            server.listen()
            port = server.getsockname()[1]
            program = f"import socket; socket.create_connection(({self.head_ip!r}, {port}), 5)"
            for node in self.nodes.values():
                done = subprocess.run(
                    node.command([sys.executable, "-S", "-c", program]),
                    capture_output=True,
                    check=False,
                    timeout=30,
                )
                if done.returncode:
                    raise NoNamespacesError("the machine's firewall drops what crosses a bridge")

    def _start_ray(self) -> None:
        common = ["--include-log-monitor=False", "--disable-usage-stats"]
        common += ["--object-store-memory=100000000", f"--temp-dir={self._ray_folder}"]
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *common]
        head = [*ray, "--head", f"--node-ip-address={self.head_ip}", f"--port={PORT}"]
        head += ["--include-dashboard=False", "--num-cpus=0", "--num-gpus=0"]
        self._spawn("head", head)
        # Ray's port is open long before all services behind it are; a driver dies of that.
        self._wait(lambda: self._says("head", "Ray runtime started"), "the Ray head")
        for node in self.nodes.values():
            words = [*ray, f"--address={self.address}", f"--node-ip-address={node.ip}"]
            words += ["--num-cpus=8", f"--num-gpus={self._gpus}"]
            node.pid = self._spawn(node.name, node.first_command(words, self._ray_folder)).pid

    def _spawn(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                command,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._tell("pid", process.pid)
        self._started.append(process)
        return process

    def _says(self, name: str, words: str) -> bool:
        return words in (self.folder / f"{name}.log").read_text()

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _START_S
        while not ready():
            if time.monotonic() > deadline or any(p.poll() is not None for p in self._started):
                logs = "\n".join(p.read_text()[-2000:] for p in sorted(self.folder.glob("*.log")))
                raise TimeoutError(f"{what} did not appear within {_START_S:g} s\n{logs}")
            time.sleep(0.2)

    def connect(self, namespace: str) -> None:
        """Makes this process a driver of the cluster, and waits until all nodes have joined."""
        import logging

        import ray

        ray.init(
            address=self.address,
            namespace=namespace,
            _node_ip_address=self.head_ip,
            logging_level=logging.ERROR,
            log_to_driver=False,
        )
        self._wait(lambda: len(self.alive()) == len(self.nodes), "a Ray node")

    def alive(self) -> set[str]:
        """Names of the nodes that Ray believes to be alive."""
        import ray

        ips = {n["NodeManagerAddress"] for n in ray.nodes() if n["Alive"]}
        return {node.name for node in self.nodes.values() if node.ip in ips}


def _free_subnet() -> str:
    """A /24 of the range for benchmarks (RFC 2544) that no interface here has."""
    taken = _ip("-o", "-4", "addr")
    for _ in range(100):
        subnet = f"198.18.{secrets.randbelow(256)}"
        if f" {subnet}." not in taken:
            return subnet
    raise NoNamespacesError("all subnets of 198.18.0.0/16 are taken")


def inside(pid: int) -> int:
    """The process that ``unshare`` or ``nsenter`` with this id has started. They pass no signals on."""
    return _descendants(pid)[1]


def _descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def _kill(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _guard(lines: IO[str]) -> None:
    """Remembers what it is told, and undoes it when there is nothing more to hear."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    told: list[tuple[str, str]] = []
    for line in lines:
        kind, _, what = line.rstrip("\n").partition(" ")
        told.append((kind, what))
    started = [int(what) for kind, what in told if kind == "pid"]
    trees = [pid for root in started for pid in _descendants(root)]
    _kill(started, signal.SIGTERM)  # `ray start --block` ends what it has started
    deadline = time.monotonic() + _STOP_S
    while time.monotonic() < deadline and any(_running(pid) for pid in trees):
        time.sleep(0.1)
    _kill([pid for pid in trees if _running(pid)], signal.SIGKILL)
    for kind, what in reversed(told):
        with contextlib.suppress(NoNamespacesError, OSError, subprocess.TimeoutExpired):
            if kind == "netns":
                _kill([int(pid) for pid in _ip("netns", "pids", what).split()], signal.SIGKILL)
                _ip("netns", "del", what)
            elif kind == "link":
                _ip("link", "del", what)
            elif kind == "folder":
                shutil.rmtree(what, ignore_errors=True)
    with contextlib.suppress(OSError):
        Path("/etc/netns").rmdir()  # only if nothing of others is in there


def _running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return False


def main() -> Any:
    """The guard."""
    _guard(sys.stdin)


if __name__ == "__main__":
    main()
