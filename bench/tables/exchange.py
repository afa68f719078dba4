"""Cases, ratios and tables of `bench exchange`, computed from its blocks.

A block is every rank's answer to it (`workers.exchange_loop.Block`), in rank order. A step takes as long as its
slowest rank; bytes are those of one host, the mean over hosts; processor time is that of all ranks together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from harness import Measured, open_grid, print_machine, print_ratios
from rich.console import Console

PEER = "torchrec"
AUTO = "auto"
LATE = "bounded"
"""Word in the names of systems whose rows are read some steps late, so that their outputs are others at each step."""
CLOCK = "row_clock"
"""Word in the names of systems whose ranks cache rows, so that their outputs are others, too."""
LOSSY = "lossy"
"""Word in the names of systems whose outputs are not those of the others."""
UPLINK = " uplink"
"""Bytes that the interfaces of the hosts counted, headers and all."""
PAYLOAD = " payload"
"""Bytes that Colonnade counted on their way to other hosts or ranks."""
PREDICTED_PAYLOAD = " predicted payload"
PREDICTED = " predicted"
PROCESSOR = " processor"
EXPOSED = " exposed"
"""Time of a step beyond that between hosts whose links are not shaped."""
RESIDENT = " resident"
"""Memory of the largest rank, with all systems of its kind."""
SESSION = " session"
"""Largest growth of a rank's memory in a long session."""
MB = 1e6

Block = Sequence[Mapping[str, Any]]


def step_seconds(block: Block) -> float:
    return max(fmean(rank["seconds"]) for rank in block)


def median_seconds(blocks: Sequence[Block]) -> float:
    return median(step_seconds(block) for block in blocks)


def cases_of(
    name: str,
    system: str,
    blocks: Sequence[Block],
    ranks_per_host: int,
    free_seconds: float | None,
    predicted: Mapping[str, Any] | None,
) -> list[Measured]:
    """The rows of one system in one case. free_seconds: of its step between links that are not shaped; None where that
    was another system, as `auto` is for other links."""
    hosts = len(blocks[0]) // ranks_per_host
    steps = [1e3 * step_seconds(block) for block in blocks]
    rows = [
        Measured(name, system, "ms/step", steps),
        Measured(
            name + UPLINK,
            system,
            "MB/step",
            [sum(r["sent_bytes"] for r in b) / hosts / MB for b in blocks],
        ),
        Measured(
            name + PROCESSOR,
            system,
            "ms/step",
            [1e3 * sum(r["cpu_seconds"] for r in b) for b in blocks],
        ),
        Measured(
            name + RESIDENT, system, "MB", [max(r["rss_bytes"] for r in b) / MB for b in blocks]
        ),
    ]
    if free_seconds is not None:
        rows.append(
            Measured(name + EXPOSED, system, "ms/step", [median(steps) - 1e3 * free_seconds])
        )
    for phase in blocks[0][0]["phases"]:
        spent = [1e3 * fmean(rank["phases"][phase] for rank in block) for block in blocks]
        rows.append(Measured(f"{name} {phase}", system, "ms/step", spent))
    for purpose in sorted({p for block in blocks for rank in block for p in rank["payload_bytes"]}):
        sent = [sum(r["payload_bytes"].get(purpose, 0.0) for r in b) / hosts / MB for b in blocks]
        rows.append(Measured(f"{name}{PAYLOAD} {purpose}", system, "MB/step", sent))
    if blocks[0][0]["payload_bytes"]:
        total = [sum(sum(r["payload_bytes"].values()) for r in b) / hosts / MB for b in blocks]
        rows.append(Measured(name + PAYLOAD, system, "MB/step", total))
    if predicted is not None:
        of_host = sum(predicted["payload_bytes"].values()) * ranks_per_host / MB
        rows.append(Measured(name + PREDICTED_PAYLOAD, system, "MB/step", [of_host]))
        if "seconds" in predicted:
            rows.append(Measured(name + PREDICTED, system, "ms/step", [1e3 * predicted["seconds"]]))
    return rows


def session_of(name: str, system: str, before: Block, after: Block) -> Measured:
    grown = max(b["rss_bytes"] - a["rss_bytes"] for a, b in zip(before, after, strict=True))
    return Measured(
        name + SESSION, system, f"MB more after {len(after[0]['seconds'])} steps", [grown / MB]
    )


def has_session(measured: Sequence[Measured]) -> bool:
    return any(m.case.endswith(SESSION) for m in measured)


def is_peer(system: str) -> bool:
    return system.startswith(PEER)


def names_of(measured: Sequence[Measured]) -> list[str]:
    """The cases, in order."""
    uplinks = [m.case.removesuffix(UPLINK) for m in measured if m.case.endswith(UPLINK)]
    return list(dict.fromkeys(uplinks))


def steps_of(measured: Sequence[Measured], case: str) -> dict[str, float]:
    """ms of a step by system."""
    return {m.system: m.median for m in measured if m.case == case}


def ratios_of(measured: Sequence[Measured]) -> dict[str, float]:
    """The worst case of each; a case that has no peer or no prediction is in none of them."""
    faster, chosen, bytes_off, time_off, auto_off = {}, [], [], [], []
    medians = {(m.case, m.system): m.median for m in measured}
    for case in names_of(measured):
        steps = steps_of(measured, case)
        exact = {n: ms for n, ms in steps.items() if not is_peer(n) and LOSSY not in n}
        peers = [ms for n, ms in steps.items() if is_peer(n)]
        if peers and exact and not case.startswith("1x"):
            faster[case] = min(peers) / min(exact.values())
        forced = [ms for n, ms in exact.items() if n != AUTO]
        if AUTO in exact and forced:
            chosen.append(exact[AUTO] / min(forced))
        for system, ms in steps.items():
            for what, wanted, off in (
                (PREDICTED_PAYLOAD, medians.get((case + PAYLOAD, system)), bytes_off),
                (PREDICTED, ms, time_off),
            ):
                predicted = medians.get((case + what, system))
                if predicted is not None and wanted:
                    off.append(abs(predicted - wanted) / wanted)
                    if off is time_off and system == AUTO:
                        auto_off.append(off[-1])
    ratios = {}
    if faster:
        ratios["best_vs_torchrec_best"] = min(faster.values())
        ratios |= {f"best_vs_torchrec_best {case}": ratio for case, ratio in faster.items()}
    for name, values in (
        ("choice_within_of_best", chosen),
        ("predicted_bytes_error", bytes_off),
        ("predicted_time_error", time_off),
        ("predicted_time_error_of_the_chosen", auto_off),
    ):
        if values:
            ratios[name] = max(values)
    return ratios


def print_case(console: Console, measured: Sequence[Measured], case: str) -> None:
    """Systems of one case, the fastest first."""
    by_case = {(m.case, m.system): m for m in measured}
    headings = (
        "system", "ms/step", "spread", "exposed", "uplink MB", "payload MB", "predicted MB", "predicted ms",
        "processor ms", "resident MB",
    )  # fmt: skip
    grid = open_grid(headings, title=case)

    def figure(what: str, system: str, form: str = ".1f") -> str:
        one = by_case.get((case + what, system))
        return format(one.median, form) if one else ""

    for system, _ in sorted(steps_of(measured, case).items(), key=lambda pair: pair[1]):
        one = by_case[case, system]
        spread = (max(one.values) - min(one.values)) / one.median
        grid.add_row(
            system, f"{one.median:.1f}", f"{spread:.0%}", figure(EXPOSED, system), figure(UPLINK, system, ".2f"),
            figure(PAYLOAD, system, ".2f"), figure(PREDICTED_PAYLOAD, system, ".2f"), figure(PREDICTED, system),
            figure(PROCESSOR, system, ".0f"), figure(RESIDENT, system, ".0f"),
        )  # fmt: skip
    console.print(grid)


def print_result(console: Console, measured: Sequence[Measured], result: Mapping[str, Any]) -> None:
    """One line per case, then the ratios and the scaling over ranks."""
    headings = "case", "colonnade", "ms", "torchrec", "ms", "ratio"
    texts = "case", "colonnade", "torchrec"
    grid = open_grid(headings, texts=texts, title="The fastest of each, ms/step")
    for case in names_of(measured):
        steps = steps_of(measured, case)
        own_best = min(
            ((ms, n) for n, ms in steps.items() if not is_peer(n) and LOSSY not in n), default=None
        )
        peer_best = min(((ms, n) for n, ms in steps.items() if is_peer(n)), default=None)
        cells = [case]
        for one in (own_best, peer_best):
            cells += [one[1], f"{one[0]:.1f}"] if one else ["", ""]
        grid.add_row(*cells, f"{peer_best[0] / own_best[0]:.2f}" if own_best and peer_best else "")
    console.print(grid)
    print_ratios(console, result)
    for one in measured:
        if one.case.endswith(SESSION):
            console.print(f"{one.case}: {one.median:.1f} {one.unit}")
    for line in scaling_of(measured, result["machine"]["batch_size"]):
        console.print(line)
    print_machine(console, result)


def scaling_of(measured: Sequence[Measured], batch_size: int) -> list[str]:
    """Samples/s by world, of the fastest system of either kind, for what every world was measured with."""
    worlds = [case for case in names_of(measured) if case.startswith("1x")]
    if not worlds:
        return []
    same = worlds[0].split(" ", 1)[1]
    lines = [f"Scaling, {same}: samples/s of the fastest; all ranks share this machine's cores"]
    sized = [
        (hosts_and_ranks(case), case)
        for case in names_of(measured)
        if case.split(" ", 1)[1] == same
    ]
    for (hosts, ranks), case in sorted(sized):
        words = []
        for kind in (False, True):
            kind_steps = {
                n: ms
                for n, ms in steps_of(measured, case).items()
                if is_peer(n) is kind and LOSSY not in n
            }
            if kind_steps:
                name = min(kind_steps, key=lambda n: kind_steps[n])
                words.append(f"{name} {hosts * ranks * batch_size / kind_steps[name] * 1e3:,.0f}")
        lines.append(f"  {hosts * ranks} ranks on {hosts} hosts: {', '.join(words)}")
    return lines


def hosts_and_ranks(case: str) -> tuple[int, int]:
    hosts, ranks = case.split(" ", 1)[0].split("x")
    return int(hosts), int(ranks)
