"""Dense gradients: buckets with a fixed layout, each summed over ranks as soon as backward has filled it.

DDP rebuilds its buckets after the first step, which changes the order of sums at three or more ranks and
after a restart; these are laid out once, in reverse order of the parameters, and sums keep the order of
`comm/collectives.py`, so bits depend neither on when a bucket leaves nor on how it travels. The ranks' word that
all is finite, and that somebody asked to stop, and their parts of the loss, ride at the end of the last. Where
gradients are coded (`plan.codec.dense`), that word has a bucket of its own, which is not; and where the last one would
take long between hosts, for with that word it could not leave before backward ends.

Parameters that the ranks of one tower alone use (`TowerWeights`) have buckets of their own, summed inside the tower,
just before the last: their norm, by tower, is part of the ranks' word. Elsewhere they have no gradient.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from colonnade.comm.collectives import (
    PIECE,
    WAYS,
    Way,
    choose_way,
    sum_over_ranks,
    way_of_layout,
)
from colonnade.comm.mesh import Mesh
from colonnade.comm.process_groups import tower_mesh
from colonnade.comm.traffic import waiting
from colonnade.errors import ConfigError
from colonnade.train.tower_weights import TowerWeights
from colonnade.wire.codec import CODECS, CodecName
from colonnade.wire.coded_sums import CODED_DTYPES, CodedSum, State, lost_by_parameter

BUCKET_BYTES = 1 << 20
"""A bucket takes parameters until it has as much: 8 ms on an uplink of 1 Gbit/s, where its hops take less than one."""


@dataclass(slots=True)
class Bucket:
    """Parameters of one dtype and device, neighbours in reverse order, and their gradients as one buffer."""

    numbers: list[int]  # of the parameters
    gradients: Tensor  # (n,) where the parameters are: each `.grad` is a view of it
    wire: Tensor  # (m,) on the CPU, m >= n a multiple of the ranks; `gradients` are its first n where they are there
    way: Way
    stream: torch.Stream | None  # on a device: of the copies to `wire` and back
    is_late: bool = False  # leaves at `send`
    inside: Mesh | None = None  # of a tower, whose ranks alone have it
    coded: CodedSum | None = None  # instead of `way`
    owed: Tensor | None = None
    """As `gradients`: what other ranks' residuals had kept, for the next step, on the first rank that has it."""
    owed_before: Tensor | None = None  # before the last step
    missing: int = 0  # gradients that backward has yet to add
    written: list[torch.Event] = field(default_factory=list)  # on a device: when they are
    ready: threading.Event = field(default_factory=threading.Event)
    total: float = 0.0  # after the reduction: NaN or inf where any gradient of any rank is


def bucket_layout(
    kinds: Sequence[tuple[torch.dtype, torch.device]],
    sizes: Sequence[int],
    late: Collection[int] = (),
    without: Collection[int] = (),
) -> list[list[int]]:
    """Numbers of the parameters of each bucket, in the order in which backward fills them if it goes through the model
    from its end to its beginning; `late` ones apart, behind all others. Pure. The last may carry signals: it has 32 or
    64 bits, or no parameters."""
    done = filled(kinds, sizes, [n for n in range(len(kinds)) if n not in without], late)
    if not done or kinds[done[-1][0]][0] not in (torch.float32, torch.float64):
        done.append([])
    return done


def filled(
    kinds: Sequence[tuple[torch.dtype, torch.device]],
    sizes: Sequence[int],
    numbers: Sequence[int],
    late: Collection[int] = (),
) -> list[list[int]]:
    """Pure. `bucket_layout` of these alone."""
    done: list[list[int]] = []
    filling: dict[tuple[torch.dtype, torch.device, bool], list[int]] = {}
    for number in reversed(numbers):
        kind = (*kinds[number], number in late)
        bucket = filling.setdefault(kind, [])
        bucket.append(number)
        if sum(sizes[n] for n in bucket) * kind[0].itemsize >= BUCKET_BYTES:
            done.append(filling.pop(kind))
    return sorted([*done, *filling.values()], key=lambda bucket: (bucket[-1] in late, -bucket[-1]))


SIGNALS = 3  # not finite, stop asked, loss
ALONE_BYTES = 1 << 16
"""Between hosts a bucket of so many leaves without the signals: 0.5 ms on an uplink of 1 Gbit/s, a message's time."""


class DenseGradients:
    """The `.grad` of every parameter is a view of a bucket; call `zero` instead of `zero_grad`.

    Parameters on a GPU have their buffers there; gloo reduces them by way of the CPU. Per step, on every rank:

        zero()
        loss.backward(), any number of times
        begin(), optional; then the step's last backward: buckets leave while it runs, on a thread of their own
        send(...); anything on other groups of the mesh; wait()      (or `reduce`, which is both)
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        mesh: Mesh,
        codec: CodecName = "exact",
        *,
        late: Sequence[nn.Parameter] = (),
        towers: TowerWeights | None = None,
    ) -> None:
        """late: those whose gradients are not complete before `send` (`Exchange.pushed_parameters`): their
        buckets are the last, and wait for it. On a server: no parameters. It says and hears what `send` and `wait` say
        of the step, and nothing else. `codec`: of gradients of 32 and 64 bits on the slow hop; on one rank, and inside
        a tower, nothing is coded. `towers`: whose parameters are `late`, too; not beside servers."""
        self.late = {id(each) for each in late}
        self.everybody, self.mesh = mesh, mesh.trainers
        self.codec: CodecName = codec if self.mesh.num_ranks > 1 else "exact"
        self.parameters = () if mesh.is_server else tuple(parameters)
        self.buckets: list[
            Bucket
        ] = []  # in the order in which they leave; the last carries the signals
        self.towers = towers
        of_tower = (
            [] if towers is None else [towers.parameters(t) for t in range(len(towers.modules))]
        )
        self._tower_of = {id(each): t for t, some in enumerate(of_tower) for each in some}
        self._norms = torch.zeros(len(of_tower), dtype=torch.float64)  # of gradients, by tower
        self._signals = torch.zeros(SIGNALS)
        self._views: list[Tensor | None] = []  # by parameter; None: another tower's
        self._bucket_of: list[Bucket | None] = []  # by parameter
        self._heard: list[int] = []  # by parameter: gradients that the running backward has added
        self._expected: list[int] = []  # the most it ever did; [] until one was watched
        self._lock = threading.Lock()  # backward has a thread for every device
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._is_watching = False
        self._thread: threading.Thread | None = None
        self._is_given_up = False
        self._error: BaseException | None = None
        self._unit = 1.0
        self._may_take_back = False
        self._saved: Sequence[State | None] = ()

    def attach(self) -> None:
        """Collective. Lay the buckets out, point every parameter's gradient into them, take up what `restore` gave."""
        for hook in self._hooks:
            hook.remove()
        kinds = [(p.dtype, p.device) for p in self.parameters]
        late = {number for number, p in enumerate(self.parameters) if id(p) in self.late}
        sizes = [p.numel() for p in self.parameters]
        of_tower = self._numbers_of_towers()
        layout = bucket_layout(kinds, sizes, late, of_tower)
        # Beside gradients, the loss has their dtype.
        dtype = kinds[layout[-1][-1]][0] if layout[-1] else torch.float32
        last = sum(sizes[n] * dtype.itemsize for n in layout[-1] if n not in late)
        is_long = last >= ALONE_BYTES and self.mesh.world.num_hosts > 1
        if self.codec != "exact":
            dtype, is_long = torch.float64, bool(layout[-1])
        if is_long:
            layout.append([])  # for the signals
        self.buckets = [
            self._bucket(numbers, self.mesh, i == len(layout) - 1, dtype)
            for i, numbers in enumerate(layout)
        ]
        self._agree_on_ways(self.mesh, self.buckets)
        self._signals = self.buckets[-1].wire[-SIGNALS - len(self._norms) :]
        if self.towers is not None:
            tower, inside = (
                self.mesh.rank // self.towers.size,
                tower_mesh(self.mesh, self.towers.size),
            )
            mine = [n for n, t in of_tower.items() if t == tower]
            own = [self._bucket(numbers, inside) for numbers in filled(kinds, sizes, mine)]
            self._agree_on_ways(inside, own)
            self.buckets[-1:-1] = own
        by_number = {number: bucket for bucket in self.buckets for number in bucket.numbers}
        self._bucket_of = [by_number.get(number) for number in range(len(self.parameters))]
        self._views = [None] * len(self.parameters)
        for bucket in self.buckets:
            start = 0
            for number in bucket.numbers:
                parameter = self.parameters[number]
                stop = start + parameter.numel()
                self._views[number] = bucket.gradients[start:stop].view_as(parameter)
                parameter.grad = self._views[number]
                start = stop
        self._expected, self._hooks, self._may_take_back = [], [], False
        self._take_up(self._saved)
        self._saved = ()
        if self.mesh.num_ranks > 1:
            self._hooks = [
                parameter.register_post_accumulate_grad_hook(
                    refuse if number in of_tower else self._hook(number)
                )
                for number, parameter in enumerate(self.parameters)
            ]

    def zero(self) -> None:
        if self._thread is not None:
            self._give_up()
            raise RuntimeError(
                "got zero() in the middle of a step: some buckets of the dense gradients have left, and other ranks "
                "wait for the others. A step that begin() has begun ends with send() and wait(); after an error in "
                "its backward, leave the world and go on from the newest checkpoint"
            )
        for bucket in self.buckets:
            bucket.gradients.zero_()
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.grad = view

    def begin(self, *, unit: float = 1.0) -> None:
        """The next backward is the step's last, on every rank: each bucket leaves when it is full, in fixed order.
        `unit`: what gradients are divided by (`scale`) before they are applied, the same on every rank, since
        residuals of other steps are parts of what is applied.

        The first such backward is only watched: how many gradients does each parameter get? (Checkpointing that
        re-enters backward adds several.) RuntimeError in backward where a parameter gets one more than ever before
        and its bucket has left.
        """
        self._unit = unit
        if self.mesh.num_ranks == 1:
            return
        self._heard = [0] * len(self.parameters)
        self._is_watching = True
        if not self._expected:
            return
        for bucket in self.buckets:
            bucket.missing = sum(self._expected[number] for number in bucket.numbers)
            bucket.missing += bucket.is_late  # `send` brings the rest
            bucket.ready.clear()
        self.buckets[-1].missing += 1  # the signals, which `send` brings
        self._start()

    def send(self, *, finite: bool, stop: bool, loss: Tensor | float = 0.0) -> None:
        """After the step's last backward: what has not left leaves. `loss`: this rank's part of it."""
        self._signals[0], self._signals[1] = float(not finite), float(stop)
        self._signals[2] = loss
        self._signals[SIGNALS:] = 0
        if self._is_watching:
            self._is_watching = False
            before = self._expected or [1] * len(self.parameters)
            self._expected = [max(pair) for pair in zip(before, self._heard, strict=True)]
        if self._thread is None:  # none has left
            for bucket in self.buckets:
                bucket.ready.clear()
        for bucket in self.buckets:
            if bucket.ready.is_set():
                continue
            for number in bucket.numbers:
                self._point(number)
            if bucket.stream is not None:  # behind what backward has put on its streams
                bucket.written = [_recorded(bucket.stream.device)]
            bucket.ready.set()
        if self._thread is None and self.mesh.num_ranks > 1:
            self._start()

    def wait(self) -> tuple[bool, bool, float]:
        """Collective. Gradients are those of all ranks, in place. Returns (all finite everywhere, anybody stops, the
        whole loss). PeerLost."""
        if self._thread is None:
            self._reduce_all()
        else:
            with waiting("dense"):
                self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
        for parameter, view in zip(self.parameters, self._views, strict=True):
            if view is None:  # of another tower; a zero would let an optimizer change it
                parameter.grad = None
        # A NaN or inf of any rank survives the sum, so every rank sees the same answer.
        unhealthy, stops, whole = self._signals[:SIGNALS].tolist()
        self._norms.copy_(self._signals[SIGNALS:])
        is_finite = all(math.isfinite(bucket.total) for bucket in self.buckets)
        for bucket in self.buckets:
            bucket.owed, bucket.owed_before = None, bucket.owed
        self._may_take_back = True
        said = self._heard_by_servers(unhealthy == 0 and is_finite, stops > 0, whole)
        if not said[0]:
            self.take_back()
        return said

    def take_back(self) -> None:
        """The step's gradients are not applied: what was owed before it still is. `wait` calls it where it finds them
        not finite; a second call does nothing."""
        if self._may_take_back:
            for bucket in self.buckets:
                bucket.owed = bucket.owed_before
                if bucket.coded is not None:
                    bucket.coded.take_back()
        self._may_take_back = False

    def state(self) -> State | None:
        """Between steps: this rank's residuals, copied; None where there are none."""
        if all(bucket.coded is None and bucket.owed is None for bucket in self.buckets):
            return None
        world = self.mesh.world
        return {
            "hosts": world.num_hosts,
            "local": world.ranks_per_host,
            "sizes": [parameter.numel() for parameter in self.parameters],
            "towers": self._numbers_of_towers(),
            "buckets": [
                {
                    "is_inside": bucket.inside is not None,
                    "numbers": list(bucket.numbers),
                    "sent": None if bucket.coded is None else bucket.coded.sent.kept.clone(),
                    "summed": None if bucket.coded is None else bucket.coded.summed.kept.clone(),
                    "owed": None if bucket.owed is None else bucket.owed.cpu().clone(),
                }
                for bucket in self.buckets
            ],
        }

    def restore(self, states: Sequence[State | None]) -> None:
        """Before `attach`, on every rank: the residuals of a checkpoint, by trainer. In the same world with the same
        buckets each rank goes on with its own. Else rank 0 adds all of them to its next gradients: nothing is lost,
        also where sums are exact from now on. Where other parameters are trained than in the checkpoint, residuals are
        dropped: what they belong to is not known, and they are one rounding of one step.
        """
        self._saved = states

    def _heard_by_servers(
        self, is_finite: bool, stops: bool, loss: float
    ) -> tuple[bool, bool, float]:
        """Collective where there are servers, which have a word, too: somebody may ask them to stop."""
        mesh = self.everybody
        if not mesh.world.has_servers:
            return is_finite, stops, loss
        said = torch.zeros(SIGNALS, dtype=torch.float64)
        if mesh.is_server or self.mesh.rank == 0:  # all trainers know the same
            said = torch.tensor([float(not is_finite), float(stops), loss], dtype=torch.float64)
        unhealthy, asked, whole = mesh.all_reduce("push", said, traffic_tag="control").tolist()
        return unhealthy == 0, asked > 0, whole

    def reduce(
        self, *, finite: bool, stop: bool, loss: Tensor | float = 0.0
    ) -> tuple[bool, bool, float]:
        """Collective: `send`, and `wait`."""
        self.send(finite=finite, stop=stop, loss=loss)
        return self.wait()

    def scale(self, factor: float) -> None:
        """Multiply every gradient."""
        for bucket in self.buckets:
            bucket.gradients.mul_(factor)
        self._norms.mul_(abs(factor))

    def clip_norm(self, max_norm: float) -> float:
        """After `reduce`, which left the same gradients everywhere, or in all of a tower: scale them so that their
        2-norm, of all together, is at most `max_norm`, as torch's clip_grad_norm_. Returns the norm they had."""
        norms = [
            float(torch.linalg.vector_norm(bucket.gradients))
            for bucket in self.buckets
            if len(bucket.gradients) and bucket.inside is None
        ]
        norm = math.hypot(*norms, *self._norms.tolist())
        if max_norm < norm + 1e-6:
            self.scale(max_norm / (norm + 1e-6))
        return norm

    def synchronise(self, others: Sequence[Tensor] = ()) -> None:
        """Collective: every rank that trains starts from rank 0's parameters, and its `others` (buffers, frozen
        parameters)."""
        if self.everybody.is_server:
            return
        with torch.no_grad():
            for tensor in (*self.parameters, *others):
                if not tensor.numel():
                    continue
                if tensor.device.type == "cpu":
                    self.mesh.broadcast("dense", tensor.data)
                elif self.mesh.num_ranks > 1:
                    tensor.data.copy_(self.mesh.broadcast("dense", tensor.data.cpu()))

    def hand_out(self, optimizer: Optimizer) -> None:
        """Collective, between steps: every rank gets the weights that other ranks alone have trained, and what
        `optimizer`, which trained them, keeps of them."""
        if self.towers is not None:
            self.towers.hand_out(self.mesh, optimizer)

    def _bucket(
        self, numbers: list[int], mesh: Mesh, is_last: bool = False, dtype: torch.dtype = torch.float32
    ) -> Bucket:  # fmt: skip
        """dtype: of one for the signals alone."""
        first = self.parameters[numbers[0]] if numbers else torch.zeros(0, dtype=dtype)
        size = sum(self.parameters[number].numel() for number in numbers)
        ranks, signals = mesh.num_ranks, (SIGNALS + len(self._norms)) * is_last
        padded = -(-(size + signals) // ranks) * ranks
        wire = torch.zeros(padded, dtype=first.dtype)
        gradients = wire[:size]
        stream = None
        if first.device.type != "cpu":
            gradients = torch.zeros(size, dtype=first.dtype, device=first.device)
            stream = torch.Stream(first.device)
        world = mesh.world
        if mesh is not self.mesh:
            way = choose_way(world, padded * wire.itemsize)
            return Bucket(numbers, gradients, wire, way, stream, is_late=True, inside=mesh)
        is_late = any(id(self.parameters[number]) in self.late for number in numbers)
        if numbers and self.codec != "exact" and wire.dtype in CODED_DTYPES:
            way = way_of_layout(world)
            coded = CodedSum(CODECS[self.codec], world, way, padded, wire.dtype)
            return Bucket(numbers, gradients, wire, way, stream, is_late, coded=coded)
        way = choose_way(world, padded * wire.itemsize)
        return Bucket(numbers, gradients, wire, way, stream, is_late)

    def _numbers_of_towers(self) -> dict[int, int]:
        """Of parameters that one tower alone uses: which."""
        return {
            number: self._tower_of[id(each)]
            for number, each in enumerate(self.parameters)
            if id(each) in self._tower_of
        }

    def _take_up(self, states: Sequence[State | None]) -> None:
        """What `restore` says."""
        sizes = [parameter.numel() for parameter in self.parameters]
        said = [state for state in states if state is not None]
        if self.everybody.is_server or not said or said[0]["sizes"] != sizes:
            return
        alike = len(said) == self.mesh.num_ranks and _layout(said[0]) == _layout(self.state())
        if alike and said[0].get("towers", {}) == self._numbers_of_towers():
            for bucket, of in zip(self.buckets, said[self.mesh.rank]["buckets"], strict=True):
                if bucket.coded is not None:
                    bucket.coded.sent.kept.copy_(of["sent"])
                    bucket.coded.summed.kept.copy_(of["summed"])
                if of["owed"] is not None:
                    bucket.owed = of["owed"].to(bucket.gradients)
        else:
            lost = lost_by_parameter(states)
            for bucket in self.buckets:
                is_first = (bucket.inside or self.mesh).rank == 0
                if is_first and any(number in lost for number in bucket.numbers):
                    nothing = (torch.zeros(sizes[number]) for number in bucket.numbers)
                    parts = [
                        lost.get(n, zero) for n, zero in zip(bucket.numbers, nothing, strict=True)
                    ]
                    bucket.owed = torch.cat(parts).to(bucket.gradients)

    def _agree_on_ways(self, mesh: Mesh, buckets: Sequence[Bucket]) -> None:
        """Collective: all go rank 0's ways. A rank that has measured other links would wait in another group."""
        numbers = torch.tensor([WAYS.index(bucket.way) for bucket in buckets])
        agreed = mesh.broadcast("dense", numbers, traffic_tag="control").tolist()
        for bucket, number in zip(buckets, agreed, strict=True):
            bucket.way = WAYS[number]

    def _hook(self, number: int) -> Callable[[Tensor], None]:
        def heard(parameter: Tensor) -> None:  # on a thread of backward's
            if self._is_watching:
                self._arrived(number)

        return heard

    def _arrived(self, number: int) -> None:
        """A parameter's gradient has grown by one of those that the running backward adds."""
        bucket = self._bucket_of[number]
        assert bucket is not None
        with self._lock:
            self._heard[number] += 1
            if self._thread is None:
                return
            if bucket.ready.is_set():
                raise RuntimeError(
                    f"parameter {number} of {len(self.parameters)}, {tuple(self.parameters[number].shape)}, got "
                    f"{self._heard[number]} gradients in one backward, {self._expected[number]} at most in every "
                    "one before, and its bucket has left for the other ranks. Let the first step be one that uses "
                    "every part of the model as often as any later step does (checkpoint with use_reentrant=False)"
                )
            self._point(number)
            if self._heard[number] > self._expected[number]:
                return
            if bucket.stream is not None:
                bucket.written.append(_recorded(bucket.stream.device))
            bucket.missing -= 1
            if not bucket.missing:
                bucket.ready.set()

    def _point(self, number: int) -> None:
        """A gradient that lies elsewhere (zero_grad, a backward that created a graph) comes into its bucket."""
        parameter, view = self.parameters[number], self._views[number]
        if view is None or parameter.grad is view:
            return
        with torch.no_grad():
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad)
        parameter.grad = view

    def _start(self) -> None:
        self._is_given_up = False
        # No daemon: Python would end it inside gloo when the process does, which aborts.
        self._thread = threading.Thread(target=self._reduce_all, name="dense")
        self._thread.start()

    def _reduce_all(self) -> None:
        """Every bucket, in order. The thread of a step, which ends with it: nothing is left to close."""
        try:
            for bucket in self.buckets:
                while not bucket.ready.wait(0.5):
                    if not threading.main_thread().is_alive():
                        return  # the process ends in the middle of a step
                if self._is_given_up:
                    return
                _reduce(bucket, self.mesh, self._unit)
                if bucket.inside is not None and bucket.inside.rank == 0:
                    self._tell_norm(bucket)
        except BaseException as error:  # raised again by `wait`
            self._error = error

    def _tell_norm(self, bucket: Bucket) -> None:
        """A tower's first rank tells all others, with the signals: NaN or inf where its gradients are not finite."""
        assert self.towers is not None
        place = SIGNALS + self.mesh.rank // self.towers.size
        norms = [
            float(torch.linalg.vector_norm(piece, dtype=torch.float64))
            for piece in bucket.gradients.split(PIECE)
        ]
        self._signals[place] = math.hypot(float(self._signals[place]), *norms)

    def _give_up(self) -> None:
        self._is_given_up, self._is_watching, self._thread = True, False, None
        for bucket in self.buckets:
            bucket.ready.set()


def _layout(state: State | None) -> list[Any]:
    """What residuals of two checkpoints must have in common to be of the same places."""
    if state is None:
        return []
    buckets = [
        (bucket["numbers"], bucket["sent"] is None)
        for bucket in state["buckets"]
        if not bucket.get("is_inside")
    ]
    return [state["hosts"], state["local"], state["sizes"], buckets]


def _reduce(bucket: Bucket, mesh: Mesh, unit: float) -> None:
    if bucket.owed is not None:
        for event in bucket.written:
            event.synchronize()
        bucket.gradients.add_(bucket.owed, alpha=unit)
    mesh = bucket.inside or mesh
    if mesh.num_ranks == 1:
        bucket.total = float(bucket.gradients.sum(dtype=torch.float64))
        return
    size = len(bucket.gradients)
    if bucket.stream is not None:
        for event in bucket.written:
            event.synchronize()
        bucket.written = []
        with bucket.stream:
            bucket.wire[:size].copy_(bucket.gradients)
    if bucket.coded is None:
        sum_over_ranks(mesh, bucket.wire, bucket.way)
    else:
        bucket.wire[
            size:
        ].zero_()  # NaN where the last step's were: a scale is of gradients and padding
        bucket.coded.add(mesh, bucket.wire, unit)
    bucket.total = sum(float(piece.sum(dtype=torch.float64)) for piece in bucket.wire.split(PIECE))
    if bucket.stream is not None:
        with bucket.stream:
            bucket.gradients.copy_(bucket.wire[:size])
        bucket.stream.synchronize()


def refuse(parameter: Tensor) -> None:
    """Backward has added to the gradient of a parameter that the ranks of one tower alone train."""
    raise ConfigError(
        f"got a gradient from the loss of a {tuple(parameter.shape)} weight that is trained inside a tower: ranks of "
        "other towers have older values of it. Use weights of operators inside towers nowhere else (for a penalty on "
        "them, take the optimizer's weight_decay), or let values travel (plan.exchange=pooled)"
    )


def _recorded(device: torch.device) -> torch.Event:
    event = torch.Event(device)
    event.record()
    return event
