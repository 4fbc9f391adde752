"""Routers of experts that ranks share: by how much they decide, and what recomputation decides otherwise."""

from __future__ import annotations

from harness.report.content.columns import number_cell
from harness.report.facts import quantities
from harness.report.facts.document import Table
from harness.report.facts.sweep_records import SweepRecords


def routers(sweep: SweepRecords) -> Table:
    """Return each router of each rank: its least margin, and tokens that change experts in recomputation."""
    return Table(
        key="routers",
        title="Routers",
        columns=("trial", "router", "rank", "tokens", "margin", "changed tokens"),
        rows=tuple(
            (
                (entry.trial,),
                (each.router,),
                (str(each.rank),),
                number_cell(entry, quantities.routed_tokens(index)),
                number_cell(entry, quantities.router_margin(index)),
                number_cell(entry, quantities.changed_tokens(index)),
            )
            for entry in sweep.entries
            if entry.record.work is not None
            for index, each in enumerate(entry.record.work.routing)
        ),
        about=(
            "margin: the least distance of a token's worst chosen score to its best other one, where scores "
            "alone decide; rounding of that size changes its experts. changed tokens: the most that one "
            "recomputation has sent to other experts than forward."
        ),
        is_folded=True,
    )
