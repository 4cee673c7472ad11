"""The parts that a direct sync is made of, as arrays, and transfers made of them when asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sglang_rdt.plan import staging
from sglang_rdt.plan.buckets import pack
from sglang_rdt.plan.compose import Holders, Template
from sglang_rdt.plan.planner import Route, refuse_rounds
from sglang_rdt.plan.slices import Slice
from sglang_rdt.plan.specs import EngineRank, Want
from sglang_rdt.plan.spread import Share
from sglang_rdt.plan.strided import Ints
from sglang_rdt.plan.transfers import HOWS, How, Transfer


@dataclass(slots=True)
class Table:
    """Transfers as arrays, one row each."""

    param: NDArray[np.int32]
    entry: NDArray[np.int32]
    shape: Ints
    dst: Ints
    dst_stride: Ints
    holder: Ints  # row of Holders
    src: Ints
    src_stride: Ints


def holder_rows(template: Template, share: Share, holders: Holders) -> Ints:
    """The row of ``holders`` that gives each part."""
    return holders.first[template.entry[share.piece]] + share.slot


def axis_of(template: Template) -> NDArray[np.intp]:
    """The dimension by which each piece is cut: the outermost one of the parameter."""
    return np.where(template.shape > 1, template.dst_stride, -1).argmax(axis=1)


def table(template: Template, share: Share, holders: Holders, parts: NDArray[np.integer]) -> Table:
    """The rows ``parts`` of ``share``, spelled out."""
    piece, low, high = share.piece[parts], share.low[parts].astype(np.int64), share.high[parts]
    axis, row = axis_of(template)[piece], np.arange(len(piece))
    shape, delta = template.shape[piece], template.delta[piece]
    shape[row, axis] = high - low
    delta[row, axis] += low
    entry = template.entry[piece]
    holder = holders.first[entry] + share.slot[parts]
    src_stride = holders.strides[holders.layout[holder]]
    dst_stride = template.dst_stride[piece]
    return Table(
        template.param[piece],
        entry,
        shape,
        template.dst[piece] + low * dst_stride[row, axis],
        dst_stride,
        holder,
        holders.offset[holder] + (delta * src_stride).sum(axis=1),
        src_stride,
    )


@dataclass(slots=True)
class Parts:
    """What goes to which engine rank, one row per part.

    Compact: engine ranks with equal parameters and recordings share a template; of each engine
    rank there are only arrays with one number per part.

    Args:
        targets: the engine ranks.
        sources: the trainer ranks' numbers; ``holders.rank`` are indices into them.
        template_of: index into ``templates`` of each target.
        shares, hows: of each target, row by row.
    """

    targets: tuple[EngineRank, ...]
    sources: tuple[int, ...]
    holders: Holders
    templates: list[Template]
    template_of: list[int]
    shares: list[Share]
    hows: list[staging.Hows]

    def holder_rows(self, target: int) -> Ints:
        """The row of ``holders`` that gives each part of a target."""
        return holder_rows(
            self.templates[self.template_of[target]], self.shares[target], self.holders
        )

    def make(self, target: int, parts: NDArray[np.integer]) -> list[Transfer]:
        """The rows ``parts`` of a target as transfers."""
        template, holders = self.templates[self.template_of[target]], self.holders
        rows = table(template, self.shares[target], holders, parts)
        names = [(p.name, p.dtype) for p in template.params]
        made = []
        for param, entry, rank, block, shape, dst, dst_stride, src, src_stride, how in zip(
            rows.param.tolist(),
            rows.entry.tolist(),
            holders.rank[rows.holder].tolist(),
            holders.block[rows.holder].tolist(),
            rows.shape.tolist(),
            rows.dst.tolist(),
            rows.dst_stride.tolist(),
            rows.src.tolist(),
            rows.src_stride.tolist(),
            self.hows[target][parts].tolist(),
            strict=True,
        ):
            dims = [d for d, n in enumerate(shape) if n != 1]
            sizes = tuple([shape[d] for d in dims])
            name, dtype = names[param]
            made.append(
                Transfer(
                    self.sources[rank],
                    block,
                    Slice(src, sizes, tuple([src_stride[d] for d in dims])),
                    holders.dtypes[entry],
                    name,
                    Slice(dst, sizes, tuple([dst_stride[d] for d in dims])),
                    dtype,
                    HOWS[how],
                )
            )
        return made

    def pack(
        self, source: int, chosen: Mapping[int, NDArray[np.integer]], bucket_bytes: int
    ) -> tuple[Route, ...]:
        """The "pack" parts among ``chosen`` (target -> rows, all of ``source``) in rounds."""
        routes = []
        for target, parts in chosen.items():
            transfers = self.make(target, parts[self.hows[target][parts] == staging.PACK])
            wants = [Want(t.param, t.dst, f"{t.block}/{t.src_dtype}", t.src) for t in transfers]
            order = list(dict.fromkeys(w.source for w in wants))
            params = {p.name: p for p in self.templates[self.template_of[target]].params}
            rank = self.targets[target]
            refuse_rounds(rank, sum(t.nbytes for t in transfers) // bucket_bytes, bucket_bytes)
            rounds = pack(wants, order, params, bucket_bytes)
            refuse_rounds(rank, len(rounds), bucket_bytes)
            if rounds:
                routes.append(Route(source, rank, rounds))
        return tuple(routes)

    def only(self, source: int, chosen: Mapping[int, NDArray[np.integer]]) -> Parts:
        """These rows alone, as parts of their own, with nothing that they do not need.

        Args:
            source: the trainer rank that gives all of them.
            chosen: target -> rows, ascending.
        """
        pieces: dict[int, list[NDArray[np.int32]]] = {}
        for target, parts in chosen.items():
            pieces.setdefault(self.template_of[target], []).append(self.shares[target].piece[parts])
        used = {n: np.unique(np.concatenate(each)) for n, each in sorted(pieces.items())}
        entries = np.unique(
            np.concatenate([self.templates[n].entry[u] for n, u in used.items()] or [_NONE])
        )
        rows = np.zeros(len(entries), np.int64)
        for target, parts in chosen.items():
            template, share = self.templates[self.template_of[target]], self.shares[target]
            entry = template.entry[share.piece[parts]]
            row = self.holders.first[entry] + share.slot[parts]
            rows[np.searchsorted(entries, entry)] = row
        number = {n: i for i, n in enumerate(used)}
        return Parts(
            targets=tuple(self.targets[t] for t in chosen),
            sources=(source,),
            holders=_holders_of(self.holders, entries, rows),
            templates=[_template_of(self.templates[n], u, entries) for n, u in used.items()],
            template_of=[number[self.template_of[t]] for t in chosen],
            shares=[
                _share_of(self.shares[t], parts, used[self.template_of[t]])
                for t, parts in chosen.items()
            ],
            hows=[self.hows[t][parts] for t, parts in chosen.items()],
        )


_NONE = np.zeros(0, np.int32)


def _holders_of(holders: Holders, entries: NDArray[np.int32], rows: Ints) -> Holders:
    """One holder for each of ``entries``: that in ``rows``."""
    layouts, layout = np.unique(holders.layout[rows], return_inverse=True)
    return Holders(
        first=np.arange(len(rows) + 1, dtype=np.int64),
        rank=np.zeros(len(rows), np.int32),
        block=holders.block[rows],
        offset=holders.offset[rows],
        layout=layout.astype(np.int32),
        strides=holders.strides[layouts],
        dtypes=tuple(holders.dtypes[e] for e in entries.tolist()),
    )


def _template_of(
    template: Template, used: NDArray[np.int32], entries: NDArray[np.int32]
) -> Template:
    params, param = np.unique(template.param[used], return_inverse=True)
    return replace(
        template,
        params=tuple(template.params[p] for p in params.tolist()),
        param=param.astype(np.int32),
        entry=np.searchsorted(entries, template.entry[used]).astype(np.int32),
        delta=template.delta[used],
        shape=template.shape[used],
        dst=template.dst[used],
        dst_stride=template.dst_stride[used],
    )


def _share_of(share: Share, parts: NDArray[np.integer], used: NDArray[np.int32]) -> Share:
    piece = np.searchsorted(used, share.piece[parts]).astype(np.int32)
    return Share(piece, share.low[parts], share.high[parts], np.zeros(len(parts), np.int32))


@dataclass(frozen=True, slots=True)
class DirectShare:
    """What one trainer rank needs of a direct plan, small enough to be sent to each.

    It has what :class:`~sglang_rdt.plan.direct.DirectPlan` has for that rank; ``target`` is an
    index into its own ``targets``.

    Args:
        rank: the trainer rank's number.
        engines: all engines of the plan, also those that read nothing from this rank.
        nbytes, staged_bytes: of the whole plan.
        parts: those that this rank gives.
    """

    rank: int
    engines: tuple[str, ...]
    nbytes: int
    staged_bytes: dict[How, int]
    parts: Parts

    @property
    def targets(self) -> tuple[EngineRank, ...]:
        """The engine ranks that read from this trainer rank."""
        return self.parts.targets

    @property
    def sources(self) -> tuple[int, ...]:
        """This trainer rank."""
        return (self.rank,)

    def sources_of(self, target: int) -> tuple[int, ...]:
        """As far as is known here: this trainer rank.

        Raises:
            IndexError: there is no such target.
        """
        return (self.rank,) if self.targets[target] else ()

    def transfers_from(self, source: int) -> list[tuple[int, Transfer]]:
        """All transfers from trainer rank ``source``, each with its target.

        Raises:
            KeyError: this is the share of another one.
        """
        return [
            (t, one) for t, parts in self._all(source).items() for one in self.parts.make(t, parts)
        ]

    def packed_routes(self, source: int, bucket_bytes: int) -> tuple[Route, ...]:
        """See :meth:`sglang_rdt.plan.direct.DirectPlan.packed_routes`."""
        return self.parts.pack(source, self._all(source), bucket_bytes)

    def _all(self, source: int) -> dict[int, NDArray[np.intp]]:
        if source != self.rank:
            raise KeyError(f"this is the share of trainer rank {self.rank}, not of {source}")
        return {t: np.arange(len(s.piece)) for t, s in enumerate(self.parts.shares)}
