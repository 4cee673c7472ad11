"""How long a plan would take on links of given speeds.

The model: every link carries its bytes at its full speed, all links at once, and the slowest one
decides. Beside that each engine rank posts its descriptors, one after the other, while bytes move
already. Then come the copies of what was staged, and a fixed time for all other phases. So:

    pull = max(slowest link, slowest engine rank's posting)
    sync = pull + staging + fixed

Where posting and moving do not overlap at all the pull takes their sum: ``pull_worst_s``. What was
measured on two H200s of one host lies between the two, or up to 25 % above ``pull_worst_s``, for up
to 4,096 descriptors; 65,536 small ones took 45 % more than that, because a descriptor costs more
there than the default says. Between nodes nothing has been measured: speeds of NICs are what the
caller says, and seconds per descriptor are those of NVLink unless the caller says otherwise.

Left out: contention inside the network (switches, oversubscription, unlucky routing), latency, how
links slow down with many small reads or many peers, several NICs of a GPU or GPUs that share one
unevenly (``node_nic_bytes_per_s`` bounds their sum), PCIe and host memory, what training or
generation does meanwhile, connecting and the first sync, verification beyond what ``fixed_s`` says,
and what the engine does after the bytes are there, such as post-processing of MLA's weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from sglang_rdt.plan.costs import LinkCosts
from sglang_rdt.plan.direct import DirectPlan
from sglang_rdt.plan.runs import direct_runs
from sglang_rdt.plan.specs import TrainerRank
from sglang_rdt.plan.strided import count_runs, padded
from sglang_rdt.plan.transfers import Transfer
from sglang_rdt.simulate.errors import SimulateError

# What all phases but the pull may take together: this project's own limit, not a measurement.
FIXED_S = 10e-3
# Engine ranks whose transfers are looked at one by one, unless trainer and engines share nodes.
MAX_LOOKED_AT = 32


@dataclass(frozen=True)
class Links:
    """Speeds, all in bytes per second of 10^9 bytes per GB, in each direction.

    Args:
        nvlink_bytes_per_s: of a GPU, to and from GPUs of its own node.
        nic_bytes_per_s: of a GPU, to and from other nodes.
        node_nic_bytes_per_s: of all NICs of a node together; None: no other limit than its GPUs'.
        costs: seconds per descriptor and per round of packing, and the rate of local copies.
        fixed_s: seconds of all phases but moving.

    Raises:
        SimulateError: a speed is not above 0, or ``fixed_s`` is below it.
    """

    nvlink_bytes_per_s: float
    nic_bytes_per_s: float
    node_nic_bytes_per_s: float | None = None
    costs: LinkCosts = LinkCosts()
    fixed_s: float = FIXED_S

    def __post_init__(self) -> None:
        speeds = [self.nvlink_bytes_per_s, self.nic_bytes_per_s, self.node_nic_bytes_per_s]
        if not all(s > 0 for s in speeds if s is not None) or self.fixed_s < 0:
            raise SimulateError("speeds of links must be above 0, the fixed time 0 or more")


@dataclass(frozen=True)
class Load:
    """Bytes of one sync over one link, in one direction."""

    name: str
    nbytes: int
    bytes_per_s: float

    @property
    def seconds(self) -> float:
        """Time at full speed."""
        return self.nbytes / self.bytes_per_s


@dataclass(frozen=True)
class Balance:
    """How evenly links of one kind are loaded; links that carry nothing count."""

    kind: str
    links: int
    worst_bytes: int
    mean_bytes: float

    @property
    def ratio(self) -> float:
        """Worst over mean; 1.0 is perfect."""
        return self.worst_bytes / self.mean_bytes if self.mean_bytes else 1.0


@dataclass(frozen=True)
class Prediction:
    """What :func:`predict` says; times in seconds.

    Args:
        bottleneck: the link that takes longest.
        link_s: its time.
        post_s: the longest time that an engine rank posts descriptors for.
        descriptors: of the engine rank with most.
        looked_at: of so many engine ranks descriptors and staged bytes were counted; those of the
            others are taken to be like theirs.
        staging_s: copies on the engine and the trainer rank with most, one after the other, and a
            round of packing.
        node_bytes: bytes that stay inside a node.
    """

    bottleneck: Load
    link_s: float
    post_s: float
    descriptors: int
    looked_at: int
    staging_s: float
    fixed_s: float
    node_bytes: int
    balances: tuple[Balance, ...]

    @property
    def pull_s(self) -> float:
        """Posting behind moving."""
        return max(self.link_s, self.post_s)

    @property
    def pull_worst_s(self) -> float:
        """Posting and moving one after the other."""
        return self.link_s + self.post_s

    @property
    def sync_s(self) -> float:
        """The whole sync."""
        return self.pull_s + self.staging_s + self.fixed_s

    @property
    def sync_worst_s(self) -> float:
        """The whole sync where nothing overlaps."""
        return self.pull_worst_s + self.staging_s + self.fixed_s


def predict(plan: DirectPlan, trainers: Sequence[TrainerRank], links: Links) -> Prediction:
    """What a sync by ``plan`` would take.

    Args:
        trainers: those that the plan was made of.
    """
    node = {t.rank: t.node_ip for t in trainers}
    names = [str(t) for t in trainers]
    shared = set(node.values()) & {t.node_ip for t in plan.targets}
    staged = any(plan.staged_bytes[how] for how in ("unpack", "pack"))
    look_at: Iterable[int] = range(len(plan.targets))
    if not shared and len(plan.targets) > MAX_LOOKED_AT:
        # Bytes by link are known; descriptors and what is staged hardly differ.
        every = np.linspace(0, len(plan.targets) - 1, MAX_LOOKED_AT)
        look_at = np.unique(every.astype(np.int64)).tolist()

    index = {rank: i for i, rank in enumerate(plan.sources)}
    inside_out, inside_in = np.zeros(len(trainers), np.int64), np.zeros(len(plan.targets), np.int64)
    packed_out = np.zeros(len(trainers), np.int64)
    descriptors, copied, looked_at = 0, 0, 0
    for target in look_at:
        looked_at += 1
        transfers = plan.transfers(target)
        descriptors = max(descriptors, _descriptors(transfers))
        if shared or staged:
            mine = 0
            for one in transfers:
                if node[one.source] == plan.targets[target].node_ip:
                    inside_out[index[one.source]] += one.nbytes
                    inside_in[target] += one.nbytes
                if one.how != "direct":
                    mine += one.nbytes
                if one.how == "pack":
                    packed_out[index[one.source]] += one.nbytes
            copied = max(copied, mine)

    out, into = plan.egress, plan.ingress
    far_out, far_in = out - inside_out, into - inside_in
    nvlink, nic = links.nvlink_bytes_per_s, links.nic_bytes_per_s
    node_nic = links.node_nic_bytes_per_s
    targets = [str(t) for t in plan.targets]
    kinds: list[tuple[str, Sequence[str], Sequence[int], float]] = []
    if inside_out.any():
        kinds += [
            ("NVLink out of trainer GPUs", names, inside_out.tolist(), nvlink),
            ("NVLink into engine GPUs", targets, inside_in.tolist(), nvlink),
        ]
    if far_out.any():
        kinds += [
            ("NICs out of trainer GPUs", names, far_out.tolist(), nic),
            ("NICs into engine GPUs", targets, far_in.tolist(), nic),
        ]
        speed = node_nic or float("inf")
        for kind, where, amount in (
            ("NICs out of trainer nodes", [t.node_ip for t in trainers], far_out),
            ("NICs into engine nodes", [t.node_ip for t in plan.targets], far_in),
        ):
            by_node = _by_node(where, amount.tolist())
            kinds.append((kind, list(by_node), list(by_node.values()), speed))
    loads = [
        Load(f"{kind}: {name}", nbytes, speed)
        for kind, ends, amounts, speed in kinds
        for name, nbytes in zip(ends, amounts, strict=True)
    ]
    worst = max(loads, key=lambda load: load.seconds, default=Load("none", 0, nic))
    costs = links.costs
    # Trainer ranks pack for all engine ranks, also for those that were not looked at.
    packed = int(packed_out.max(initial=0)) * len(plan.targets) / max(looked_at, 1)
    staging_s = (copied + packed) / costs.copy_bytes_per_s
    if plan.staged_bytes["pack"]:
        staging_s += costs.round_s
    return Prediction(
        bottleneck=worst,
        link_s=worst.seconds,
        post_s=descriptors * costs.descriptor_s,
        descriptors=descriptors,
        looked_at=looked_at,
        staging_s=staging_s,
        fixed_s=links.fixed_s,
        node_bytes=int(inside_in.sum()),
        balances=tuple(
            Balance(kind, len(amounts), max(amounts), sum(amounts) / len(amounts))
            for kind, _, amounts, _ in kinds
        ),
    )


def _by_node(nodes: Sequence[str], amounts: Sequence[int]) -> dict[str, int]:
    total: dict[str, int] = defaultdict(int)
    for name, nbytes in zip(nodes, amounts, strict=True):
        total[name] += nbytes
    return total


def _descriptors(transfers: Sequence[Transfer]) -> int:
    """Reads that one engine rank posts: runs, merged, and one per source that packs."""
    direct: dict[int, list[Transfer]] = defaultdict(list)
    for one in transfers:
        if one.how == "direct":
            direct[one.source].append(one)
    count = sum(len(direct_runs(each)) for each in direct.values())
    unpack = [t.src for t in transfers if t.how == "unpack"]
    if unpack:
        runs = count_runs(
            padded([s.shape for s in unpack], 1), padded([s.stride for s in unpack], 0)
        )
        count += int(runs.sum())
    return count + len({t.source for t in transfers if t.how == "pack"})
