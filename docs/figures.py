"""Write the figures of README.md and docs/results.md from the files in bench/results.

    python docs/figures.py           rewrite every block between <!-- figures: NAME --> and <!-- end of figures -->
    python docs/figures.py --check   exit with status 1 where a page differs from what would be written

A figure is shown only if its file can be trusted: the file names a clean commit that is an ancestor of this one, and,
for a time or a rate, other processes used at most 5 % of the machine. Rows without such a file leave the page, and the
page names the files and why.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
PAGES = (ROOT / "README.md", ROOT / "docs" / "results.md")
BEGIN, END = "<!-- figures: {} -->", "<!-- end of figures -->"
NOT_TIMED = ("quality", "advise_batch", "codistill", "gplvmf", "mrmn")
"""First parts of names of files without times and rates."""
MAX_OTHERS_SHARE = 0.05
"""Share of the machine that other processes may have used while times were taken."""


def read_case(file: str, case: str, system: str, unit: str) -> dict[str, Any]:
    """Return the row of a result file. Raises StopIteration if it has none."""
    wanted = (case, system, unit)
    rows = read_results(file)["cases"]
    return next(row for row in rows if (row["case"], row["system"], row["unit"]) == wanted)


@dataclass(frozen=True)
class Best:
    """The best median of a case, over all systems whose name matches: the largest rate, or the shortest time."""

    file: str
    case: str
    system: str = "colonnade"
    digits: int = 0
    unit: str = "*"
    is_timing = True

    def text(self) -> str:
        medians = {
            c["median"]: c["unit"]
            for c in read_results(self.file)["cases"]
            if c["case"] == self.case
            and fnmatchcase(c["system"], self.system)
            and fnmatchcase(c["unit"], self.unit)
        }
        if not medians:
            raise LookupError(f"{self.file}.json has no {self.case!r} of {self.system!r}")
        is_rate = set(medians.values()) == {"samples/s"}
        return f"{(max if is_rate else min)(medians):,.{self.digits}f}"


@dataclass(frozen=True)
class UplinkOfBest:
    """Megabytes a host sends to other hosts a step, by the fastest system whose name matches."""

    file: str
    case: str
    system: str
    digits: int = 1
    is_timing = True

    def text(self) -> str:
        cases = read_results(self.file)["cases"]
        times = {
            c["system"]: c["median"]
            for c in cases
            if c["case"] == self.case and fnmatchcase(c["system"], self.system)
        }
        fastest = min(times, key=times.__getitem__)
        (sent,) = [
            c["median"]
            for c in cases
            if c["case"] == f"{self.case} uplink" and c["system"] == fastest
        ]
        return f"{sent:,.{self.digits}f}"


@dataclass(frozen=True)
class Ratio:
    """One of the ratios that a bench writes."""

    file: str
    name: str
    digits: int = 2
    is_timing: bool = True

    def text(self) -> str:
        return f"{read_results(self.file)['ratios'][self.name]:,.{self.digits}f}"


@dataclass(frozen=True)
class RatioInTurns:
    """Ratio of two systems' medians that were measured in turns; "level" if the ratios of the turns include 1."""

    file: str
    case: str
    system: str
    base: str
    unit: str = "samples/s"
    is_timing = True

    def text(self) -> str:
        measured, base = (
            read_case(self.file, self.case, system, self.unit)
            for system in (self.system, self.base)
        )
        turns = [a / b for a, b in zip(measured["values"], base["values"], strict=True)]
        level = " (level)" if min(turns) <= 1 <= max(turns) else ""
        return f"{measured['median'] / base['median']:.2f}{level}"


@dataclass(frozen=True)
class Mean:
    """Mean of a case's values."""

    file: str
    case: str
    system: str
    unit: str
    digits: int = 4
    is_timing = False

    def text(self) -> str:
        values = read_case(self.file, self.case, self.system, self.unit)["values"]
        return f"{sum(values) / len(values):.{self.digits}f}"


Figure = Best | UplinkOfBest | Ratio | RatioInTurns | Mean


@dataclass(frozen=True)
class Table:
    """Rows of cells, each a text or a figure."""

    header: tuple[str, ...]
    rows: tuple[tuple[str | Figure, ...], ...]


@cache
def read_results(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def find_distrust(results: dict[str, Any], is_timing: bool, commit_is_ancestor: bool) -> str:
    """Say why a result file cannot be trusted; "" if it can."""
    commit = results["commit"]
    if commit == "unknown" or commit.endswith("-dirty"):
        return f"its commit is {commit!r}"
    if not commit_is_ancestor:
        return f"its commit {commit} is no ancestor of this one"
    share = results["machine"].get("others_share")
    if is_timing and (share is None or share > MAX_OTHERS_SHARE):
        return f"others used {'an unknown share' if share is None else share} of the machine"
    return ""


@cache
def distrust_of(name: str, is_timing: bool) -> str:
    if not (RESULTS / f"{name}.json").exists():
        return "not measured yet"
    results = read_results(name)
    is_ancestor = not run_git("merge-base", "--is-ancestor", results["commit"], "HEAD").returncode
    return find_distrust(results, is_timing, is_ancestor)


def run_git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


def has_history() -> bool:
    """Return whether commits can be looked up: a full clone, not a shallow one nor an archive."""
    return run_git("rev-parse", "--is-shallow-repository").stdout.strip() == "false"


def render(table: Table) -> str:
    """Render a table as Markdown, without rows whose figures cannot be trusted."""
    lines = [format_row(table.header), format_row(["---", *["---:"] * (len(table.header) - 1)])]
    omitted: dict[str, str] = {}
    for row in table.rows:
        reasons = {
            cell.file: reason
            for cell in row
            if not isinstance(cell, str) and (reason := distrust_of(cell.file, cell.is_timing))
        }
        omitted.update(reasons)
        if not reasons:
            lines.append(format_row(cell if isinstance(cell, str) else cell.text() for cell in row))
    if len(lines) == 2:
        lines = []
    else:
        lines += ["", f"Measured: {describe_commits(table)}."]
    if omitted:
        reasons_text = "; ".join(f"`{file}.json`, {why}" for file, why in omitted.items())
        lines += ["", f"Rows that wait for a new run: {reasons_text}."]
    return "\n".join(lines).strip("\n")


def describe_commits(table: Table) -> str:
    """List the files of a table's figures with the commit that each was measured at and its date."""
    files = {cell.file: cell for row in table.rows for cell in row if not isinstance(cell, str)}
    texts = []
    for file, cell in sorted(files.items()):
        if not distrust_of(file, cell.is_timing):
            commit = read_results(file)["commit"][:8]
            date = run_git("show", "-s", "--format=%cs", commit).stdout.strip()
            texts.append(f"`{file}.json` at {commit}, {date}")
    return "; ".join(texts)


def format_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


def rewrite(text: str) -> str:
    """Replace the figures of a page's text. Raises LookupError for an unknown block."""
    for name in names_in(text):
        begin = BEGIN.format(name)
        before, rest = text.split(begin, 1)
        _, after = rest.split(END, 1)
        text = f"{before}{begin}\n\n{render(TABLES[name])}\n\n{END}{after}"
    return text


def names_in(text: str) -> list[str]:
    prefix, suffix = BEGIN.split("{}")
    return [part.split(suffix, 1)[0] for part in text.split(prefix)[1:]]


LINKS = {"0.2": "200 Mbit/s", "1": "1 Gbit/s", "10": "10 Gbit/s"}


def train_rows() -> Iterable[tuple[str | Figure, ...]]:
    both = ("torch", "torch helped", "torchrec", "torchrec helped*")
    for label, case, peers in (
        ("DLRM, D=16", "D=16", both),
        ("DLRM, D=64", "D=64", both),
        ("DeepFM, D=16", "DeepFM D=16", both[:2]),
        ("DCN-v2, D=16", "DCN-v2 D=16", both[:2]),
        ("embeddings of DLRM alone, D=16", "D=16 sparse only", both),
        ("embeddings of DLRM alone, D=64", "D=64 sparse only", both),
    ):
        file = "train_deepfm" if "DeepFM" in case else "train"
        figures = [Best(file, case, system, unit="samples/s") for system in ("colonnade", *peers)]
        yield (label, *figures, *[""] * (5 - len(figures)))


def split_rows() -> Iterable[tuple[str | Figure, ...]]:
    parts = ("step", "embeddings", "interaction", "products", "allocator", "rest")
    for dim in (16, 64):
        for label, system in (
            ("Colonnade", "colonnade"),
            ("Colonnade, malloc as shipped", "colonnade, malloc as shipped"),
            ("`nn.EmbeddingBag`, as shipped", "torch"),
            ("`nn.EmbeddingBag`, helped", "torch helped"),
            ("TorchRec, as shipped", "torchrec"),
            ("TorchRec, helped", "torchrec helped"),
        ):
            cases = (f"D={dim} split {part}" for part in parts)
            yield (f"{label}, D={dim}", *(Best("train", case, system, digits=1) for case in cases))


def partials_rows() -> Iterable[tuple[str | Figure, ...]]:
    files = {(500, 16): "partials_k500_d16"}
    for model, ids, dim in (
        ("LR+FM", 26, 16), ("LR+FM", 100, 16), ("LR+FM", 500, 8), ("LR+FM", 500, 16),
        ("Wide&Deep", 26, 16), ("Wide&Deep", 100, 16), ("Wide&Deep", 500, 8), ("Wide&Deep", 500, 16),
        ("DeepFM", 26, 16), ("DeepFM", 100, 16), ("DeepFM", 500, 8), ("DeepFM", 500, 16),
    ):  # fmt: skip
        file = files.get((ids, dim), "partials")
        case = f"2x2 {model} K={ids} D={dim} 1 Gbit/s"
        cells: list[Figure] = []
        for system in ("rows *", "pooled *", "partials *"):
            cells += [UplinkOfBest(file, case, system), Best(file, case, system)]
        yield (f"{model}, {ids}, {dim}", *cells, Best(file, case, "auto"), Best(file, case, "torchrec *"))  # fmt: skip


EXACT = "[!y]"
"""End of a pattern of systems that leaves out lossy ones."""


def tower_rows() -> Iterable[tuple[str | Figure, ...]]:
    for file, shape, net in (
        ("towers", "2x2 D=64", "D=64"), ("towers", "2x2 20-hot D=64", "20 ids a field, D=64"),
        ("towers_d128", "2x2 D=128", "D=128"), ("towers", "4x2 D=64", "D=64, 4 hosts of 2"),
    ):  # fmt: skip
        for link in ("0.2", "1"):
            case = f"{shape} {link} Gbit/s"
            flat = Best(file, case, "auto"), Best(file, case, f"rows *{EXACT}")
            modules = [Best(file, case, f"towers*CR {ratio} lossy") for ratio in (2, 4, 8)]
            torchrec = Best(file, case, f"torchrec *{EXACT}")
            yield (f"{net}, {LINKS[link]}", torchrec, *flat, *modules)


def hybrid_rows() -> Iterable[tuple[str | Figure, ...]]:
    for units in (32, 96, 256):
        for link in ("0.2", "1", "10"):
            case = f"2x2 {units} units {link} Gbit/s"
            systems = ("[rp]o[wo]*", "bounded(4) *", "bounded(1) *", "torchrec *")
            yield (
                f"{units} units, {LINKS[link]}",
                *(Best("hybrid", case, system) for system in systems),
            )


CLICK_MODELS = ("lr", "fm", "nfm", "wide_deep", "deepfm", "dlrm", "dcn", "dcnv2")


def own_data_rows() -> Iterable[tuple[str | Figure, ...]]:
    cases = read_results("own_data")["cases"]
    for case in dict.fromkeys(c["case"] for c in cases if c["system"] in CLICK_MODELS):
        for label, unit in (("AUC", "auc_behind_lr"), ("log loss", "log_loss_behind_lr")):
            yield (f"{case}, {label}", *(Mean("own_data", case, m, unit) for m in CLICK_MODELS))


def late_quality() -> Iterable[tuple[str | Figure, ...]]:
    for label, group in (("stream of 10 million", "stream"), ("MovieLens-1M", "ml-1m")):
        for k in (1, 4, 16):
            arm = f"{group} adagrad bounded({k})"
            if f"auc_lost {arm}" in read_results("quality_late")["ratios"]:
                names = (f"auc_lost {arm}", f"auc_lost {arm} +-")
                lost = (Ratio("quality_late", name, 4, False) for name in names)
                yield (f"{label}, `bounded({k})`", *lost)


SMALL_BATCHES = {
    "128 samples, 200 Mbit/s": "",
    "DeepFM": " DeepFM",
    "DCN": " DCN",
    "GraphSAGE": " GraphSAGE",
}
"""Models of which ranks train 128 samples."""


def cached_rows() -> Iterable[tuple[str | Figure, ...]]:
    small = [f"2x2 mixed 128 samples{model} 0.2 Gbit/s" for model in SMALL_BATCHES.values()]
    cases = [f"2x2 mixed {link} Gbit/s" for link in LINKS] + small
    for label, system in (
        ("no cache (HET without one)", "no cache"),
        ("`rows`, the default without a cache", "rows row-wise"),
        ("`auto` without a cache", "auto"),
        ("the default cache", "row_clock default"),
        ("`row_clock(100)` without the other bounds", "row_clock(100)"),
        ("`row_clock(10)` without the other bounds", "row_clock(10)"),
    ):
        yield (label, *(Best("staleness", case, system) for case in cases))


def affinity_rows() -> Iterable[tuple[str | Figure, ...]]:
    for label, model in (("DLRM", "dlrm"), ("DCN-v2", "dcnv2"), ("DeepFM", "deepfm")):
        names = (f"purity fields of {model} {kind}" for kind in ("interactions", "cosine"))
        yield (label, *(Ratio("quality_affinity", name, 2, False) for name in names))


def cached_quality() -> Iterable[tuple[str | Figure, ...]]:
    for label, group, arm in (
        ("MovieLens-1M, Adagrad, the default", "ml-1m adagrad", "default"),
        ("`write_share` 0.1", "ml-1m adagrad", "share 0.1"),
        ("`write_share` 0.2", "ml-1m adagrad", "share 0.2"),
        ("without `step_bound`", "ml-1m adagrad", "default, no step bound"),
        ("stream of 10 million, Adagrad, the default", "stream adagrad", "default"),
        ("stream of 10 million, SGD, the default", "stream sgd", "default"),
    ):
        names = (f"auc_lost {group} {arm}", f"auc_lost {group} {arm} +-", f"saved {group} {arm}")
        digits = (4, 4, 2)
        yield (
            label,
            *(
                Ratio("quality", name, count, False)
                for name, count in zip(names, digits, strict=True)
            ),
        )


def node_rows() -> Iterable[tuple[str | Figure, ...]]:
    if "one_tiered_of_four_dram" in read_results("capacity")["ratios"]:
        yield (
            "1, a quarter of the rows in memory, the others in files",
            Best("capacity", "nodes", "one tiered"),
        )
        yield (
            "4, a quarter of the rows in the memory of each",
            Best("capacity", "nodes", "four in DRAM"),
        )


def exchange_rows() -> Iterable[tuple[str | Figure, ...]]:
    for label, case in (("D=64", "2x2 D=64"), ("D=128", "2x2 D=128")):
        for link in ("1", "10"):
            name = f"{case} {link} Gbit/s"
            shardings = (f"torchrec {each}*" for each in ("table-wise", "row-wise", "planner"))
            yield (
                f"{label}, {LINKS[link]}",
                *(Best("exchange", name, system) for system in ("auto", "[rp]o[wo]*", *shardings)),
                UplinkOfBest("exchange", name, "auto"),
                UplinkOfBest("exchange", name, "torchrec *"),
            )


def kernels_rows() -> Iterable[tuple[str | Figure, ...]]:
    for label, name in (
        ("lookup, FBGEMM's time over ours", "forward_vs_fbgemm"),
        ("update, row-wise Adagrad, FBGEMM's time over ours", "update_vs_fbgemm_rowwise_adagrad"),
        ("update, SGD and Adagrad, FBGEMM's time over ours", "update_vs_fbgemm_other_optimizers"),
        ("lookup and update, `nn.EmbeddingBag`'s time over ours", "step_vs_torch_embeddingbag"),
        ("lookup, a bare memory loop's time over ours", "forward_of_roofline"),
        ("update, a bare memory loop's time over ours", "update_of_roofline"),
    ):
        yield (label, Ratio("kernels", name), Ratio("kernels", f"{name}_min"))


def tier_rows() -> Iterable[tuple[str | Figure, ...]]:
    sparse, beside = " sparse only", " sparse only, beside peers"
    for label, system, suffix in (
        ("Colonnade", "colonnade 1/8", beside),
        ("Colonnade, hints of the next use", "colonnade hints 1/8", sparse),
        ("RocksDB", "rocksdict 1/8", sparse),
        ("memory-mapped table", "mapped 1/8", sparse),
    ):
        files = {16: "tiers_peers", 64: "tiers"}
        yield (
            label,
            *(
                Best(file, f"D={dim} skew 1.1{suffix}", system, unit="samples/s")
                for dim, file in files.items()
            ),
        )
    system, case = "rocksdict 8 shards 1/8", f"D=16 skew 1.1{sparse}"
    yield ("RocksDB, 8 processes", Best("tiers_peers", case, system, unit="samples/s"), "")


def network_tier_rows() -> Iterable[tuple[str | Figure, ...]]:
    for dim in (16, 64):
        yield (
            f"D={dim}",
            *(
                RatioInTurns(
                    "tiers_peers", f"D={dim} skew 1.1", f"colonnade 1/{n}", "colonnade all"
                )
                for n in (2, 4, 8, 16)
            ),
        )


def crowded_rows() -> Iterable[tuple[str | Figure, ...]]:
    beside = ("alone", "beside 1", "beside 2", "beside 4", "quota 1", "quota 1.5")
    for label, system, cases in (
        ("Colonnade", "colonnade", beside),
        ("Colonnade, spinning as PyTorch does", "colonnade spinning", beside[:4]),
        ("`nn.EmbeddingBag`, Adagrad", "torch", beside),
        ("the same, `OMP_WAIT_POLICY=passive`", "torch passive", beside[:4]),
    ):
        figures = [Best("crowded", case, system, unit="samples/s") for case in cases]
        yield (label, *figures, *[""] * (len(beside) - len(cases)))


def capacity_rows() -> Iterable[tuple[str | Figure, ...]]:
    for size in ("6.25 T", "12.5 T", "25 T", "50 T", "100 T"):
        rate = Best("capacity", size, unit="samples/s")
        numbers = (
            Best("capacity", size, digits=digits, unit=unit)
            for unit, digits in (
                ("bytes/row in memory", 0), ("bytes/row in files", 0),
                ("seconds to save", 2), ("seconds to resume", 2),
            )
        )  # fmt: skip
        yield (size.removesuffix(" T") + " trillion", rate, *numbers)


def missed_rows() -> Iterable[tuple[str | Figure, ...]]:
    """Yield the ratios that do not reach what is wanted of them; a smaller error or regret is a better one."""
    for label, file, name, wanted in (
        ("late reads: time won of what overlap can win, worst case", "hybrid", "overlap_won", 0.7),
        ("towers, compression 4, against TorchRec, geometric mean", "towers", "cr4_vs_best_torchrec_mean", 1.9),
        ("towers, compression 4, against TorchRec, worst case", "towers", "cr4_vs_best_torchrec_worst", 1.3),
        ("towers, compression 4, against the best flat exchange, 200 Mbit/s", "towers", "cr4_vs_best_flat", 1),
        ("towers, compression 8, against the best flat exchange, 200 Mbit/s", "towers", "cr8_vs_best_flat", 1.6),
        ("towers, compression 8, against the best flat exchange, worst case", "towers",
         "cr8_vs_best_flat 4x2 D=64 1 Gbit/s", 1.3),
        ("towers, compression 4, 20 ids a field, against the best flat one", "towers", "bags_cr4_vs_best_flat", 1.9),
        ("towers: error of predicted seconds, worst case", "towers", "predicted_time_error", 0.15),
        ("partials: the chosen plan's time over the best plan's, worst case", "partials", "chooser_regret", 1.05),
        ("FM over ids: the chosen plan's time over the best plan's", "partials_over_ids", "chooser_regret", 1.05),
        ("thresholded sums against int8, sums half of an exact step, 100 Mbit/s", "dct", "vs_int8", 1.15),
        ("advice: error of predicted efficiency, median", "advise", "efficiency_error_median", 0.1),
        ("GPLVMF: RMSE over that of GPFM", "gplvmf", "rmse_vs_gpfm", 1),
        ("GPLVMF: distance to the noise over that of a factorization machine", "gplvmf", "noise_gap_of_fm", 0.5),
        ("the default cache against no cache, 200 Mbit/s", "staleness", "default_vs_no_cache", 2.2),
        ("server, 100 candidates: requests/s with a p99 of 10 ms", "serve", "rate_at_p99_10ms", 500),
        ("server, 100 candidates: share of bare calls' speed", "serve", "of_direct_call", 0.6),
        ("one call of a predictor, one sample: ms", "serve", "fixed_cost_ms", 0.2),
        ("exact best 10 of 100,000 items: times the speed of `implicit`, worst case", "serve", "topk_vs_implicit", 1),
        ("exchanges: the chosen plan's time over the best's, worst case", "exchange", "choice_within_of_best", 1.05),
        ("exchanges: error of predicted seconds, worst case", "exchange", "predicted_time_error", 0.15),
        ("lookup alone: times FBGEMM's speed", "kernels", "forward_vs_fbgemm", 4.5),
        ("update alone, SGD and Adagrad: times FBGEMM's speed", "kernels", "update_vs_fbgemm_other_optimizers", 9),
        ("lookup and update alone: times `nn.EmbeddingBag`'s speed", "kernels", "step_vs_torch_embeddingbag", 9),
        ("update alone: share of a bare memory loop's speed", "kernels", "update_of_roofline", 0.8),
        ("open tables: share of a vocabulary table's speed", "kernels", "hashed_vs_direct", 0.7),
    ):  # fmt: skip
        reached, is_smaller_better = (
            read_results(file)["ratios"][name],
            "error" in name or "regret" in name or "within" in name or "cost" in name,
        )
        if (reached > wanted) if is_smaller_better else (reached < wanted):
            digits = 3 if round(reached, 2) == wanted else 2
            yield (label, Ratio(file, name, digits), f"{wanted:g}")


def claim_rows() -> Iterable[tuple[str | Figure, ...]]:
    """Yield what the papers claim, beside what was measured of it; without figures that no file has yet."""
    stream, movielens = "synthetic stream", "MovieLens-1M"
    for claim, what, file, name, digits, command, minutes, data in (
        ("MTrainS: 4 to 8 times fewer nodes at a rate", "speed with an eighth of the rows in memory, over all of them",
         "tiers_peers", "throughput_of_all_dram_at_1_8", 2, "tiers", "40", "synthetic"),
        ("", "speed of one rank with files over four without", "capacity", "one_tiered_of_four_dram", 2, "capacity",
         "12", "synthetic"),
        ("PERSIA: 100 trillion parameters, as fast as 6.25", "speed at 100 trillion over that at 6.25", "capacity",
         "speed_100T_of_6T", 2, "capacity", "12", "synthetic"),
        ("PERSIA: faster to the same score", "time to synchronous training's last AUC over that of `bounded(4)`, mean",
         "hybrid", "time_to_score_bounded4_mean", 2, "hybrid", "25", stream),
        ("", "the same, worst case", "hybrid", "time_to_score_bounded4_worst", 2, "hybrid", "25", stream),
        ("PERSIA: converges as synchronous training does", "R² of what late reads cost, as derived", "quality_theory",
         "theory_r2", 3, "quality --suite theory", "10", "synthetic"),
        ("HET: up to 88 % of communication saved", "row messages saved", "quality", "saved_at_default", 2,
         "quality --suite cache", "90", movielens),
        ("HET: no AUC lost", "AUC lost, worst case", "quality", "auc_lost_at_default", 4, "quality --suite cache", "90",
         movielens),
        ("HET: faster", "times the speed of no cache, 200 Mbit/s", "staleness", "default_vs_no_cache", 2, "staleness",
         "30", "synthetic"),
        ("DES: up to 68.7 % fewer bytes", "bytes saved against rows from owners, best case", "partials_k500_d16",
         "des_bytes_saved_vs_ps_best", 2, "partials", "60", "synthetic"),
        ("", "times the speed of rows from owners, best case", "partials_k500_d16", "des_throughput_vs_ps_best", 2,
         "partials", "60", "synthetic"),
        ("", "time of partial results over rows's, FM over ids", "partials_over_ids", "ids_vs_rows", 2, "partials",
         "60", "synthetic"),
        ("DES: better AUC than asynchronous workers", "AUC lost by 64 workers in the tail, DeepFM", "quality_partials",
         "tail_auc_lost deepfm 64 x 256 against synchronous", 3, "quality --suite workers", "60", "stream of ads"),
        ("DMT: up to 1.9 times as fast", "speed at compression 4 over TorchRec's best, mean", "towers",
         "cr4_vs_best_torchrec_mean", 2, "towers", "30", "synthetic"),
        ("DMT: quality unchanged", "AUC lost at compression 4, worse of two models", "quality_towers", "loss_cr4", 4,
         "quality --suite towers", "60", stream),
        ("DMT: groups of features that interact", "features in their planted group, DLRM", "quality_affinity",
         "purity fields of dlrm interactions", 2, "quality --suite affinity", "30", stream),
        ("DCT: 100 times fewer bytes", "bytes of exact sums over those of 1 % of the elements, after the warm-up",
         "quality_dct", "bytes_saved_99", 1, "dct", "2", "counted"),
        ("", "the same, of a whole run of 5,000 steps", "quality_dct", "bytes_saved_5000_steps", 1, "dct", "2",
         "counted"),
        ("DCT: quality unchanged", "AUC lost at 1 %, batches of 600, 5,000 steps", "quality_dct", "auc_lost_99_ml1m", 4,
         "dct --parts ml-1m", "15", movielens),
        ("", "AUC lost by int8 in the same runs", "quality_dct", "auc_lost_99_ml1m_int8", 4, "dct --parts ml-1m", "15",
         movielens),
        ("", "AUC lost at 1 %, 10 million samples in batches of 2,000", "quality_dct", "auc_lost_99_stream", 4,
         "dct --parts stream", "40", stream),
        ("DCT: faster", "times the speed of int8 sums at 100 Mbit/s, sums half of an exact step", "dct", "vs_int8", 2,
         "dct --parts steps", "10", "synthetic"),
        ("", "the same, sums 80 % of an exact step", "dct", "vs_int8_80", 2, "dct --parts steps", "10", "synthetic"),
        ("", "times the speed of exact sums, half of an exact step", "dct", "vs_exact", 2, "dct --parts steps", "10",
         "synthetic"),
        ("Lemmas: number of ranks", "error of predicted efficiency of 2 and 4 hosts, median", "advise",
         "efficiency_error_median", 2, "advise", "6", "synthetic"),
        ("", "the same, worst case", "advise", "efficiency_error_worst", 2, "advise", "6", "synthetic"),
        ("Lemmas: number of servers", "advised numbers within 1 of the right one, of 10", "advise_servers",
         "servers_within_1", 0, "advise_servers", "14", "synthetic"),
        ("", "advised numbers that are the right one, of 10", "advise_servers", "servers_equal", 0, "advise_servers",
         "14", "synthetic"),
        ("Lemmas: batch", "log loss at the advised batch less the lowest of seven batches", "advise_batch",
         "loss_at_advised_batch", 4, "advise_batch", "12", movielens),
        ("Online distillation: less churn", "part of one model's churn saved, log loss at most 0.0005 higher",
         "codistill", "reduced_equal_loss", 2, "codistill --cases ml-1m", "40", movielens),
        ("", "the same, log loss at most 0.0015 higher", "codistill", "reduced_loss_0015", 2, "codistill --cases ml-1m",
         "40", movielens),
        ("MRMN: several types of feedback", "NDCG@10 over that of the same model on fives alone", "mrmn",
         "ndcg_vs_primary", 2, "mrmn", "150", movielens),
        ("", "NDCG@10 over that of the best of other models", "mrmn", "ndcg_vs_best_peer", 2, "mrmn", "150", movielens),
        ("", "share of seeds in which strengths of types are in order", "mrmn", "strength_ordered", 1, "mrmn", "150",
         movielens),
        ("GPLVMF: ratings in contexts", "RMSE on the food ratings' test file, mean of five seeds", "gplvmf",
         "rmse_food", 3, "gplvmf", "20", "food"),
        ("", "MAE, likewise", "gplvmf", "mae_food", 3, "gplvmf", "20", "food"),
        ("GPLVMF: better than GPFM", "RMSE over that of GPFM, mean of five folds", "gplvmf", "rmse_vs_gpfm", 3,
         "gplvmf", "20", "food"),
        ("GPLVMF: real-valued contexts", "distance to the noise over that of a factorization machine", "gplvmf",
         "noise_gap_of_fm", 3, "gplvmf", "20", "synthetic"),
        ("GPLVMF: which contexts matter", "relevance of one that does over one that does not, least of five seeds",
         "gplvmf", "relevance_ratio", 0, "gplvmf", "20", "synthetic"),
    ):  # fmt: skip
        is_measured = (RESULTS / f"{file}.json").exists() and name in read_results(file)["ratios"]
        is_timing = not file.startswith(NOT_TIMED)
        reached = Ratio(file, name, digits, is_timing) if is_measured else "not measured"
        yield (claim, what, reached, f"`colonnade bench {command}`", minutes, data)


def readme_rows() -> Iterable[tuple[str | Figure, ...]]:
    for dim in (16, 64):
        yield (
            f"DLRM, D={dim}, one process: samples/s",
            Best("train", f"D={dim}"),
            Best("train", f"D={dim}", "torchrec helped*"),
            "TorchRec, helped",
        )
    yield (
        "DLRM, D=64, one process: samples/s",
        Best("train", "D=64"), Best("train", "D=64", "torch helped"), "`nn.EmbeddingBag`, helped",
    )  # fmt: skip
    for label, link, units in (("1 Gbit/s", "1", 32), ("10 Gbit/s", "10", 32)):
        case = f"2x2 {units} units {link} Gbit/s"
        yield (
            f"26 fields and a small network, 2 hosts of 2 ranks, {label}, synchronous: ms a step",
            Best("hybrid", case, "[rp]o[wo]*"), Best("hybrid", case, "torchrec *"), "TorchRec's best, synchronous",
        )  # fmt: skip
    yield (
        "26 fields and a small network, 2 hosts of 2 ranks, 1 Gbit/s, reads four steps late: ms a step",
        Best("hybrid", "2x2 32 units 1 Gbit/s", "bounded(4) *"),
        Best("hybrid", "2x2 32 units 1 Gbit/s", "torchrec *"), "TorchRec's best, synchronous",
    )  # fmt: skip
    case = "2x2 LR+FM K=500 D=16 1 Gbit/s"
    for system, peer in (("rows *", "rows from owners"), ("pooled *", "pooled by owners")):
        yield (
            "LR and FM, 500 ids a sample, partial results: MB over the uplink a step",
            UplinkOfBest("partials_k500_d16", case, "partials *"),
            UplinkOfBest("partials_k500_d16", case, system), peer,
        )  # fmt: skip


TABLES = {
    "readme": Table(("question", "Colonnade", "peer's value", "peer"), tuple(readme_rows())),
    "train": Table(
        ("", "Colonnade", "`nn.EmbeddingBag`, as shipped", "helped", "TorchRec 1.8.0, as shipped", "helped"),
        tuple(train_rows()),
    ),
    "split": Table(
        ("", "step", "embeddings", "interaction", "dense products", "allocator", "rest"), tuple(split_rows())
    ),
    "kernels": Table(("", "geometric mean", "worst case"), tuple(kernels_rows())),
    "tiers": Table(("rows in memory: 1/8", "D=16", "D=64"), tuple(tier_rows())),
    "tiers network": Table(("rows in memory", "1/2", "1/4", "1/8", "1/16"), tuple(network_tier_rows())),
    "capacity": Table(
        ("parameters", "samples/s", "bytes a row in memory", "in files", "seconds to save", "to resume"),
        tuple(capacity_rows()),
    ),
    "nodes": Table(
        ("nodes", "samples/s"),
        tuple(node_rows()),
    ),
    "exchange": Table(
        ("", "chosen plan", "best forced plan", "TorchRec table-wise", "row-wise", "planner", "chosen: MB",
         "TorchRec's best: MB"),
        tuple(exchange_rows()),
    ),
    "hybrid": Table(("", "synchronous", "`bounded(4)`", "`bounded(1)`", "TorchRec's best"), tuple(hybrid_rows())),
    "own_data": Table(("files", *CLICK_MODELS), tuple(own_data_rows())),
    "late_quality": Table(("", "AUC lost", "± (95 %)"), tuple(late_quality())),
    "theory": Table(
        ("", "part of the differences that is explained (R²)"),
        (("what late reads add to the loss", Ratio("quality_theory", "theory_r2", 3, False)),),
    ),
    "partials": Table(
        ("operators, ids a sample, D", "rows: MB", "ms", "pooled: MB", "ms", "partials: MB", "ms",
         "chosen: ms", "TorchRec's best: ms"),
        tuple(partials_rows()),
    ),
    "towers": Table(
        ("", "TorchRec", "chosen flat plan", "`rows`", "towers, CR 2", "CR 4", "CR 8"),
        tuple(tower_rows()),
    ),
    "affinity": Table(("", "interactions", "cosines"), tuple(affinity_rows())),
    "cached": Table(("", *LINKS.values(), *SMALL_BATCHES), tuple(cached_rows())),
    "cached_quality": Table(("", "AUC lost", "± (95 %)", "row messages saved"), tuple(cached_quality())),
    "crowded": Table(
        ("", "alone", "beside 1", "beside 2", "beside 4", "quota of 1", "quota of 1.5"),
        tuple(crowded_rows()),
    ),
    "claims": Table(
        ("claim of the paper", "measured here", "reached", "command", "minutes", "data"), tuple(claim_rows())
    ),
    "missed": Table(("measure", "reached", "wanted"), tuple(missed_rows())),
}  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    pages = {page: page.read_text(encoding="utf-8") for page in PAGES}
    changed = {page: text for page, old in pages.items() if (text := rewrite(old)) != old}
    if "--check" in arguments:
        for page in changed:
            print(f"{page.relative_to(ROOT)}: figures differ from bench/results; run make figures")
        return bool(changed)
    for page, text in changed.items():
        page.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
