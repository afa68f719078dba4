"""Colonnade between hosts: an EmbeddingCollection for each choice of exchange, sharding and codec, as a user opens it.

A choice is {"exchange": .., "sharding": .., "codec": ..}, and may have a "cache", as settings have it, and "lookahead";
one that this version does not have is left out, with what it said. Ids of coming batches travel ahead, as its default
plan says. `payload_bytes` is what `Traffic` counted.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

import colonnade
from colonnade import (
    Batch,
    ColonnadeError,
    Concat,
    EmbeddingCollection,
    Feature,
    Ids,
    Mesh,
    PlanConfig,
    RowOptimizer,
    RowWiseAdagrad,
    Table,
    Uniform,
    World,
    build_plan,
    open_mesh,
)
from colonnade.hops.load import ColumnLoad, TableLoad
from colonnade.plan.comparison import describe_exchanges, order_plans_to_time
from colonnade.plan.constraints import resolve_plan_config
from colonnade.plan.cost.consumers import build_model_load, check_whole_bags
from colonnade.plan.measure.device import RowRate
from colonnade.plan.plan import EXACT
from colonnade.plan.search import choose
from colonnade.plan.search.candidates import Constraint, PlanDecision, Problem, step_seconds
from colonnade.planning.choices import NUM_RUNNERS_UP
from colonnade.planning.measure import measure_links, measure_rows
from colonnade.planning.timing import count_plans_to_time, time_in_turns
from colonnade.store.budget import slot_bytes
from colonnade.topology.sharding import Sharding, host_wise, replicated, row_wise, table_wise
from workers.exchange_loop import EPS, ROWS_LR, Case, Iterations, digest_of, serve

AUTO = "auto"
REHEARSED = "rows row-wise"
"""The system whose processor time is measured; of all others, formulas say how much more or less."""
COUNTED = 4
"""Batches that tell how many different rows a step asks for."""
REHEARSAL_STEPS = 8
PHASES = ("wait", "forward", "backward", "rows")
NO_CHOICE: Mapping[str, Any] = {}


class Opened:
    """One collection and its batches."""

    def __init__(
        self, case: Case, choice: Mapping[str, Any], stored: list[Batch], mesh: Mesh
    ) -> None:
        self.case, self.stored, self.mesh = case, stored, mesh
        tables, features, consumers = self.declared(case, choice)
        self.collection = EmbeddingCollection(tables, features, consumers=consumers)
        self.rows = RowOptimizer(self.collection)
        plan = plan_of(tables, choice, case, mesh)
        of_tables = [table.sharding for table in plan.tables], [t.exchange for t in plan.tables]
        bags = case.names if case.lookups > 1 else ()
        check_whole_bags(self.collection.declaration, *of_tables, bags)
        self.collection.open(plan, mesh)
        self.gradient = case.gradient()
        self.next = 0

    @staticmethod
    def declared(
        case: Case, choice: Mapping[str, Any] = NO_CHOICE
    ) -> tuple[list[Table], list[Feature], dict[str, Any] | None]:
        """Tables, features and consumers."""
        optimizer = RowWiseAdagrad(lr=ROWS_LR, eps=EPS)
        tables = [
            Table(name, case.dim, rows=rows, optimizer=optimizer, initializer=Uniform(scale=0.0))
            for name, rows in zip(case.names, case.rows, strict=True)
        ]
        pooling = "sum" if case.pooled else "sequence"
        features = [Feature(name, name, pooling=pooling) for name in case.names]
        return tables, features, {"fields": (Concat(), case.names)} if case.pooled else None

    def outputs(self, result: dict[str, Tensor]) -> list[Tensor]:
        """Return the outputs that get gradients."""
        return [result["fields"]] if self.case.pooled else [result[n] for n in self.case.names]

    def before_backward(self) -> None:
        """Prepare weights beside rows for backward; there are none here."""

    def gradients(self, outputs: list[Tensor]) -> list[Tensor]:
        return [self.gradient] * len(outputs)

    def update(self) -> None:
        self.rows.step()
        self.dense_step()

    def dense_step(self) -> None:
        """Update weights beside rows; there are none here."""

    def own_seconds(self) -> float:
        """Processor seconds of a rank's step for operators that the rehearsed system does not have."""
        return 0.0

    def batches(self) -> Iterator[Batch]:
        for number in itertools.count(self.next):
            yield self.stored[number % len(self.stored)]

    def run(self, warm_up: int, steps: int, start: Callable[[], None]) -> Iterations:
        seconds: list[float] = []
        phases = dict.fromkeys(PHASES, 0.0)
        outputs: list[Tensor] = []
        before = self.sent()
        # Endless, so that as many ids travel ahead in the last step as in any other; what is left is dropped.
        with self.collection.lookahead(self.batches()) as ready:
            for step in range(warm_up + steps):
                if step == warm_up:
                    start()
                    before = self.sent()
                marks = [time.perf_counter()]
                batch = next(ready)
                marks.append(time.perf_counter())
                outputs = self.outputs(self.collection(batch))
                marks.append(time.perf_counter())
                self.before_backward()
                torch.autograd.backward(outputs, self.gradients(outputs))
                marks.append(time.perf_counter())
                self.update()
                marks.append(time.perf_counter())
                if step >= warm_up:
                    seconds.append(marks[-1] - marks[0])
                    for name, begin, end in zip(PHASES, marks, marks[1:], strict=False):
                        phases[name] += end - begin
        self.next += warm_up + steps
        sent = {name: count - before.get(name, 0) for name, count in self.sent().items()}
        return Iterations(seconds, digest_of(outputs), sent, phases)

    def train_steps(self, warm_up: int, steps: int, start: Callable[[], None]) -> float:
        """Train steps as a run's copies do (`colonnade.planning.timing`)."""
        return sum(self.run(warm_up, steps, start).seconds)

    def sent(self) -> dict[str, float]:
        """Bytes this rank has sent, by "purpose link"."""
        return {" ".join(key): count for key, count in dict(self.mesh.traffic.sent_bytes).items()}


def plan_of(tables: list[Table], choice: Mapping[str, Any], case: Case, mesh: Mesh) -> Any:
    if "plan" in choice:
        return build_plan(tables, mesh.world, choice["plan"])
    shardings = SHARDINGS[choice["sharding"]](case.rows, mesh)
    own = zip(case.names, shardings, strict=True)
    late, codec = choice.get("late", 0), choice.get("codec", "exact")
    config = PlanConfig(
        exchange=choice["exchange"], tables={name: {"sharding": sharding} for name, sharding in own},
        codec={"values": codec, "gradients": codec},
        staleness_steps=late, lookahead=choice.get("lookahead", late + 2), cache=choice.get("cache"),
    )  # fmt: skip
    return build_plan(tables, mesh.world, config)


def assign_shares(rows: list[int], shares: int) -> list[int]:
    """Assign each table to a share: the largest first, to the share with the fewest tables, then the fewest rows."""
    loads = [(0, 0, share) for share in range(shares)]
    shares_of_tables = [0] * len(rows)
    for t in sorted(range(len(rows)), key=lambda t: -rows[t]):
        tables, size, share = min(loads)
        loads[loads.index((tables, size, share))] = (tables + 1, size + rows[t], share)
        shares_of_tables[t] = share
    return shares_of_tables


SHARDINGS: dict[str, Callable[[list[int], Mesh], list[Sharding]]] = {
    "row_wise": lambda rows, mesh: [row_wise(mesh.num_ranks)] * len(rows),
    "table_wise": lambda rows, mesh: [
        table_wise(rank) for rank in assign_shares(rows, mesh.num_ranks)
    ],
    "host_wise": lambda rows, mesh: [
        host_wise(mesh.world, host) for host in assign_shares(rows, mesh.world.num_hosts)
    ],
    "replicated": lambda rows, mesh: [replicated(mesh.num_ranks)] * len(rows),
}


def batch_of(case: Case, ids: Tensor) -> Batch:
    """ids (F, B * L)"""
    offsets = None
    if case.lookups > 1 or not case.pooled:
        offsets = torch.arange(case.batch_size + 1) * case.lookups
    values = {name: Ids(ids[f].contiguous(), offsets) for f, name in enumerate(case.names)}
    return Batch(case.batch_size, torch.zeros(case.batch_size, 0), values)


@cache
def the_mesh() -> Mesh:
    """Return the mesh, one for all cases. Collective when called first."""
    return open_mesh()


class Chooser:
    """Predictions of `colonnade.plan.search` for every system between the links as they are, and its choice."""

    def __init__(
        self,
        case: Case,
        stored: list[Batch],
        mesh: Mesh,
        systems: dict[str, Any],
        system: type[Opened],
    ) -> None:
        self.case, self.stored, self.mesh = case, stored, mesh
        self.systems, self.system = systems, system
        self.loads = loads_of(case, mesh)
        # All ranks at once, as they compute in a step: they share the processors.
        mesh.barrier()
        rate = measure_rows(case.width)
        own_rates = torch.tensor([rate.gathered, rate.updated, rate.planned, rate.packed])
        all_rates = mesh.all_gather("control", own_rates)
        self.rates = [RowRate(rate.width, *torch.stack(all_rates).min(0).values.tolist())]
        tables, features, consumers = system.declared(case)
        declaration = EmbeddingCollection(tables, features, consumers=consumers).declaration
        self.model = build_model_load(declaration, self.loads, world=mesh.world)
        self.rehearsed: float | None = None
        self.own: dict[str, float] = {}  # by system
        self.crowding = max(1.0, mesh.num_ranks / (os.cpu_count() or 1))

    def plan(self) -> dict[str, Any]:
        """Predict every system between the links as they are, and open the plan that Colonnade chooses. Collective.

        Return {"links": in words, "predicted": by system, "chosen": in words, "same": the system whose plan that is,
        where it is a system's, "left_out": why there is no `auto`}. `auto` is opened anew where there is no "same".
        """
        # All ranks of all hosts share this machine.
        links = replace(measure_links(self.mesh), crowding=self.crowding)
        answer: dict[str, Any] = {"links": str(links), "predicted": {}, "left_out": {}}
        choices = {
            n: self.forced(links, s.collection)
            for n, s in self.systems.items()
            if n != AUTO and is_predicted(s.collection)
        }
        try:
            choices[AUTO] = choose(
                Problem(self.loads, links, rates=self.rates, model=self.model),
                num_runners_up=NUM_RUNNERS_UP,
            )
            self.systems.pop(AUTO, None)
            if self.rehearsed is not None:  # the first plan is for free links, and not quoted
                answer["measured"], choices[AUTO] = self.keep_fastest(links, choices[AUTO])
            chosen = self.open_choice(links, choices[AUTO])
            if same := self.opened_with(chosen):
                answer["same"] = same
            else:
                self.systems[AUTO] = self.system(self.case, chosen, self.stored, self.mesh)
            answer["chosen"] = describe_decision(choices[AUTO])
        except ColonnadeError as error:
            choices.pop(AUTO, None)
            answer["left_out"][AUTO] = str(error)
        if self.rehearsed is None:  # once all systems have shown that they do the same work
            self.rehearsed = rehearse(self.systems[REHEARSED], self.mesh)
        if new := [name for name in self.systems if name not in self.own]:
            # Each rank for itself, as it computes in a step: beside all others.
            seconds = torch.tensor([self.systems[name].own_seconds() for name in new])
            means = torch.stack(self.mesh.all_gather("control", seconds)).mean(0)
            self.own |= zip(new, means.tolist(), strict=True)
        base = choices[REHEARSED].seconds.processor
        for name, choice in choices.items():
            own = self.own.get(answer.get("same", AUTO) if name == AUTO else name, 0.0)
            answer["predicted"][name] = {
                "payload_bytes": {" ".join(key): size for key, size in choice.sent.items()},
                "seconds": self.step_seconds(choice, base - own, links.crowding),
            }
        return answer

    def open_choice(self, links: World, decision: PlanDecision) -> dict[str, Any]:
        """Return a choice with the decision's plan."""
        is_open = PlanConfig(exchange=AUTO, sharding=AUTO)
        tables, _, _ = self.system.declared(self.case)
        return {"plan": resolve_plan_config(is_open, tables, links, decision)}

    def keep_fastest(self, links: World, decision: PlanDecision) -> tuple[str, PlanDecision]:
        """Time the decision and its runners-up as a run does at its start. Return milliseconds in words, and the
        fastest. Collective."""
        decisions = [decision, *decision.runners_up]
        base = self.forced(links, self.systems[REHEARSED].collection).seconds.processor
        predicted = [self.step_seconds(other, base, links.crowding) for other in decisions]
        exchanges = [[table.chosen.option[0] for table in other.tables] for other in decisions]
        order = order_plans_to_time(exchanges, predicted)
        count = count_plans_to_time([predicted[i] for i in order], None)
        decisions = [decisions[i] for i in order[:count]]
        if not decisions:
            return "", decision
        opened = [
            self.system(self.case, self.open_choice(links, other), self.stored, self.mesh)
            for other in decisions
        ]
        seconds = time_in_turns([system.train_steps for system in opened], self.mesh)
        words = ", ".join(
            f"{describe_decision(other)} {1e3 * step:.1f} ms"
            for other, step in zip(decisions, seconds, strict=True)
        )
        return words, decisions[seconds.index(min(seconds))]

    def opened_with(self, choice: Mapping[str, Any]) -> str | None:
        """Return the system whose plan is this one; None where there is none."""
        tables, _, _ = self.system.declared(self.case, choice)
        plan = plan_of(tables, choice, self.case, self.mesh)
        return next((n for n, s in self.systems.items() if s.collection.plan == plan), None)

    def step_seconds(self, choice: PlanDecision, base: float, crowding: float) -> float:
        """Predict the seconds of a step.

        base: what the formulas say of the rehearsed system's processor, less what this one has of its own; what they
        leave out is the same for all.
        """
        seconds = choice.seconds
        processor = seconds.processor - base + (self.rehearsed or 0.0)
        return step_seconds(processor, seconds.waited, seconds.behind, crowding)

    def forced(self, links: World, collection: EmbeddingCollection) -> PlanDecision:
        """Predict a collection by its plan as it is, and by its own operators."""
        tables = collection.plan.tables
        constraints = {
            t.name: Constraint(t.sharding.kind, t.exchange, t.sharding.ranks) for t in tables
        }
        model = build_model_load(collection.declaration, self.loads, world=links)
        return choose(Problem(self.loads, links, rates=self.rates, forced=constraints, model=model))


def describe_decision(decision: PlanDecision) -> str:
    """Describe exchanges and shardings in words."""
    return describe_exchanges(table.chosen.option for table in decision.tables)


def is_predicted(collection: EmbeddingCollection) -> bool:
    """Return whether steps of the plan are predicted here: not with cached rows or codecs."""
    plan = collection.plan
    return plan.codecs == EXACT and all(table.cache is None for table in plan.tables)


def rehearse(system: Opened, mesh: Mesh) -> float:
    """Measure the processor seconds of a rank's step, the mean over ranks. Collective."""
    steps, began = min(REHEARSAL_STEPS, len(system.stored)), []
    system.run(0, steps, lambda: None)  # meets every row
    system.run(2, steps, lambda: began.append(time.process_time()))
    seconds = torch.tensor((time.process_time() - began[0]) / steps, dtype=torch.float64)
    return fmean(float(value) for value in mesh.all_gather("control", seconds))


def loads_of(case: Case, mesh: Mesh) -> list[TableLoad]:
    """Compute statistics of each table from the ids of all ranks in `COUNTED` batches: the same on every rank."""
    ids = np.load(case.ids, mmap_mode="r")[:COUNTED]  # (N, R, F, B * L)
    on_host = mesh.world.ranks_per_host
    loads = []
    for f, (name, rows) in enumerate(zip(case.names, case.rows, strict=True)):
        table = Table(name, case.width, rows=rows, optimizer=RowWiseAdagrad(lr=ROWS_LR))

        def different(ranks: int, column: int = f) -> float:
            """Rows of so many ranks' batches together, the mean over all such groups."""
            groups = [
                batch[r : r + ranks, column] for batch in ids for r in range(0, len(batch), ranks)
            ]
            return fmean(len(np.unique(group)) for group in groups)

        lookups = float(case.batch_size * case.lookups)
        columns = (ColumnLoad(lookups, case.lookups),)
        load = TableLoad(
            name=name, width=case.width, value_bytes=4 * case.width, gradient_bytes=4 * case.width,
            bag_bytes=4 * case.width, row_bytes=4 * case.width, rows=float(rows), slot_bytes=slot_bytes(table),
            samples=float(case.batch_size), unique_rank=different(1), unique_host=different(on_host),
            unique_world=different(mesh.num_ranks), lookups=lookups, columns=columns,
            is_pooled=case.pooled, vocabulary=rows,
        )  # fmt: skip
        loads.append(load)
    return loads


def build(
    case: Case, choices: Mapping[str, Any], system: type[Opened] = Opened
) -> tuple[dict[str, Any], dict[str, str], dict, Any]:
    mesh = the_mesh()
    stored = [batch_of(case, ids) for ids in case.load(mesh.rank)]
    systems: dict[str, Any] = {}
    left_out = {}
    for name, choice in choices.items():
        try:
            systems[name] = system(case, choice, stored, mesh)
        except ColonnadeError as error:  # on all ranks alike: nothing has travelled
            left_out[name] = str(error)
    chooser = Chooser(case, stored, mesh, systems, system) if mesh.num_ranks > 1 else None
    return systems, left_out, {"colonnade": colonnade.__version__}, chooser


if __name__ == "__main__":
    serve(build)
