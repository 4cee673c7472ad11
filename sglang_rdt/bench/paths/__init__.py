"""The paths that are compared, one file each."""

from __future__ import annotations

from sglang_rdt.bench.options import PathName
from sglang_rdt.bench.paths.base import BenchPath


def make(name: PathName) -> BenchPath:
    """The path called ``name``."""
    from sglang_rdt.bench.paths.peer_copy import PeerCopyPath
    from sglang_rdt.bench.paths.rdt import RdtPath
    from sglang_rdt.bench.paths.sglang_disk import DiskPath
    from sglang_rdt.bench.paths.sglang_distributed import DistributedPath

    if name == "peer_copy":
        return PeerCopyPath()
    if name == "sglang_distributed":
        return DistributedPath()
    if name == "sglang_disk":
        return DiskPath()
    if name == "direct_checksum":
        return RdtPath("direct", name, verify="checksum")
    return RdtPath(name)
