"""Dense gradients: all-reduce in buckets with a fixed layout, overlapped with backward.

Each bucket is summed over ranks as soon as backward fills it. DDP rebuilds its buckets after the first step, which
changes the order of sums at three or more ranks and after a restart. These buckets are laid out once, in reverse order
of the parameters, and sums keep the order of `comm/collectives.py`. So the bits do not depend on when or how a bucket
is sent.

The last bucket ends with the signals of a step: whether all gradients are finite, whether a rank requested to stop or a
checkpoint, and the rank's part of the loss. Signals have a bucket of their own in two cases:
  * Gradients are compressed (`plan.codec.dense`): signals are sent uncompressed.
  * The last bucket takes long between hosts: with signals it could not be sent before backward ends.

Parameters that one tower alone uses (`TowerWeights`) have buckets of their own, which are summed inside the tower just
before the last bucket. Their norm, by tower, is part of the signals. Ranks of other towers have no gradient of them.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from colonnade.comm.collectives import (
    CHUNK_ELEMENTS,
    SUM_ALGORITHMS,
    choose_sum_algorithm,
    sum_algorithm_of_layout,
)
from colonnade.comm.mesh import Mesh
from colonnade.comm.process_groups import open_tower_mesh
from colonnade.comm.traffic import count_waiting_time
from colonnade.plan.advice import GradientNoise
from colonnade.plan.names import DenseCodec, Thresholding
from colonnade.train.tower_weights import TowerWeights, reject_tower_gradient
from colonnade.wire.dense_sums import (
    SIGNALS,
    CodedAllReduce,
    GradientBucket,
    State,
    describe_residual_layout,
    is_coded,
    join_by_parameter,
    sum_gradient_squares,
    sum_residuals_by_parameter,
)

BUCKET_BYTES = 1 << 20
"""Minimum size of a full bucket: 8 ms on an uplink of 1 Gbit/s, where the latency of its hops is below 1 ms."""


ParameterKind = tuple[torch.dtype, torch.device, bool]
"""Dtype and device of a parameter, and whether its gradients are encoded."""


def assign_parameters_to_buckets(
    kinds: Sequence[ParameterKind],
    parameter_sizes: Sequence[int],
    late_indices: Collection[int] = (),
    excluded_indices: Collection[int] = (),
) -> list[list[int]]:
    """Assign parameters to buckets; return the parameter indices of each bucket. Pure.

    Parameters of a bucket are of one kind. Buckets are ordered as backward fills them if it runs through the model from
    end to beginning. `late_indices` parameters have separate buckets after all others. The last bucket may carry
    signals, so it has float32 or float64 or is empty.
    """
    buckets = fill_buckets(
        kinds,
        parameter_sizes,
        [n for n in range(len(kinds)) if n not in excluded_indices],
        late_indices,
    )
    if not buckets or kinds[buckets[-1][0]][0] not in (torch.float32, torch.float64):
        buckets.append([])
    return buckets


def fill_buckets(
    kinds: Sequence[ParameterKind],
    sizes: Sequence[int],
    indices: Sequence[int],
    late_indices: Collection[int] = (),
) -> list[list[int]]:
    """Fill buckets with the parameters `indices`, last one first; see `assign_parameters_to_buckets`. Pure."""
    buckets: list[list[int]] = []
    open_buckets: dict[tuple[ParameterKind, bool], list[int]] = {}
    for index in reversed(indices):
        kind = (kinds[index], index in late_indices)
        open_bucket = open_buckets.setdefault(kind, [])
        open_bucket.append(index)
        if sum(sizes[n] for n in open_bucket) * kinds[index][0].itemsize >= BUCKET_BYTES:
            buckets.append(open_buckets.pop(kind))
    return sorted(
        [*buckets, *open_buckets.values()],
        key=lambda open_bucket: (open_bucket[-1] in late_indices, -open_bucket[-1]),
    )


NOT_CODED = {"sent": None, "summed": None}  # in checkpoints
ALONE_BYTES = 1 << 16
"""Bytes from which the last bucket is sent without signals between hosts: 0.5 ms at 1 Gbit/s, one message's time."""


class DenseGradients:
    """Sums of dense gradients over ranks. The `.grad` of every parameter is a view of a bucket.

    Call `zero` instead of `zero_grad`. Parameters on a GPU have their buffers there; gloo reduces them through the CPU.
    Per step, on every rank:

        zero()
        loss.backward(), any number of times
        begin_last_backward(), optional; then the step's last backward: a thread sends buckets while it runs
        send(...); anything on other groups of the mesh; wait()      (or `reduce`, which does both)
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        mesh: Mesh,
        codec: DenseCodec = "exact",
        *,
        late: Sequence[nn.Parameter] = (),
        towers: TowerWeights | None = None,
    ) -> None:
        """Set up without buckets; `build_buckets` builds them.

        parameters: ignored on a server, which takes part in the signals of a step alone.
        codec: compression of gradients on the slow hop (of those that `is_coded` names); not used on one rank or inside
        a tower.
        late: parameters with gradients that are complete only at `send` (`Exchange.pushed_parameters`). Their buckets
        are the last.
        towers: weights that one tower alone trains, which are `late`, too. Not possible with servers.
        """
        self.late = {id(parameter) for parameter in late}
        self.full_mesh = mesh
        self.mesh = mesh.trainers
        self.codec: DenseCodec = codec if self.mesh.num_ranks > 1 else "exact"
        self.parameters = () if mesh.is_server else tuple(parameters)
        self.buckets: list[GradientBucket] = []  # in sending order; the last carries the signals
        self.towers = towers
        parameters_by_tower = (
            []
            if towers is None
            else [towers.parameters(tower) for tower in range(len(towers.modules))]
        )
        self._tower_of = {
            id(parameter): tower
            for tower, parameters in enumerate(parameters_by_tower)
            for parameter in parameters
        }
        # Norms of gradients, by tower.
        self._tower_norms = torch.zeros(len(parameters_by_tower), dtype=torch.float64)
        self._signals = torch.zeros(SIGNALS)
        # Number of micro-batches, and squared norm of the gradients of the first.
        self._first_part = (1, 0.0)
        self.noise = GradientNoise()
        self.is_checkpoint_requested = False  # by a rank, in the last step
        self._views: list[Tensor | None] = []  # by parameter; None: another tower's
        self._bucket_of: list[GradientBucket | None] = []  # by parameter
        self._num_received: list[int] = []  # by parameter: gradients added by the current backward
        # By parameter: maximum of `_num_received` so far; [] before the first backward.
        self._num_expected: list[int] = []
        self._lock = threading.Lock()  # backward has a thread for every device
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._is_watching = False
        self._thread: threading.Thread | None = None
        self._is_aborted = False
        self._error: BaseException | None = None
        self._gradient_scale = 1.0
        self._can_restore_residuals = False
        self._saved_residuals: Sequence[State | None] = ()
        self.late_directions: dict[nn.Parameter, Tensor] = {}
        """Directions of Adam, flat, that a checkpoint owes to parameters whose gradients are sent now."""

    @property
    def directed_parameters(self) -> list[nn.Parameter]:
        """Parameters that get directions of Adam instead of gradients."""
        if isinstance(self.codec, str) or self.codec.adam_weight_decay is None:
            return []
        return [
            parameter
            for parameter in self.parameters
            if is_coded(self.codec, parameter) and id(parameter) not in self._tower_of
        ]

    def build_buckets(self) -> None:
        """Build the buckets, make every `.grad` a view of them, and load restored residuals. Collective."""
        for hook in self._hooks:
            hook.remove()
        kinds = [(p.dtype, p.device, is_coded(self.codec, p)) for p in self.parameters]
        late = {index for index, p in enumerate(self.parameters) if id(p) in self.late}
        sizes = [p.numel() for p in self.parameters]
        tower_of_parameter = self._map_parameters_to_towers()
        layout = assign_parameters_to_buckets(kinds, sizes, late, tower_of_parameter)
        # The loss shares a bucket with gradients, so it has their dtype.
        dtype = kinds[layout[-1][-1]][0] if layout[-1] else torch.float32
        last_bytes = sum(sizes[index] * dtype.itemsize for index in layout[-1] if index not in late)
        is_signal_bucket = last_bytes >= ALONE_BYTES and self.mesh.world.num_hosts > 1
        if self.codec != "exact":
            dtype = torch.float64
            is_signal_bucket = bool(layout[-1])
        if is_signal_bucket:
            layout.append([])  # for the signals
        self.buckets = [
            self._build_bucket(indices, self.mesh, bucket_index == len(layout) - 1, dtype)
            for bucket_index, indices in enumerate(layout)
        ]
        self._agree_on_algorithms(self.mesh, self.buckets)
        self._signals = self.buckets[-1].send_buffer[-SIGNALS - len(self._tower_norms) :]
        if self.towers is not None:
            tower = self.mesh.rank // self.towers.size
            mesh_of_tower = open_tower_mesh(self.mesh, self.towers.size)
            own_parameters = [
                index
                for index, tower_of_index in tower_of_parameter.items()
                if tower_of_index == tower
            ]
            tower_buckets = [
                self._build_bucket(indices, mesh_of_tower)
                for indices in fill_buckets(kinds, sizes, own_parameters)
            ]
            self._agree_on_algorithms(mesh_of_tower, tower_buckets)
            self.buckets[-1:-1] = tower_buckets
        bucket_of_parameter = {index: bucket for bucket in self.buckets for index in bucket.indices}
        self._bucket_of = [bucket_of_parameter.get(index) for index in range(len(self.parameters))]
        self._views = [None] * len(self.parameters)
        for bucket in self.buckets:
            start = 0
            for index in bucket.indices:
                parameter = self.parameters[index]
                stop = start + parameter.numel()
                self._views[index] = bucket.gradients[start:stop].view_as(parameter)
                parameter.grad = self._views[index]
                start = stop
        self._num_expected = []
        self._hooks = []
        self._can_restore_residuals = False
        self._load_residuals(self._saved_residuals)
        self._saved_residuals = ()
        if self.mesh.num_ranks > 1:
            self._hooks = [
                parameter.register_post_accumulate_grad_hook(
                    reject_tower_gradient
                    if index in tower_of_parameter
                    else self._build_gradient_hook(index)
                )
                for index, parameter in enumerate(self.parameters)
            ]

    def zero_gradients(self) -> None:
        """Set all gradients to zero, before the first backward of a step."""
        if self._thread is not None:
            self._abort_step()
            raise RuntimeError(
                "got zero() in the middle of a step: some buckets of the dense gradients are sent, and other ranks "
                "wait for the rest. After begin_last_backward() a step ends with send() and wait(); after an error in "
                "its backward, leave the world and go on from the newest checkpoint"
            )
        for bucket in self.buckets:
            bucket.gradients.zero_()
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.grad = view

    def begin_last_backward(self, *, gradient_scale: float = 1.0) -> None:
        """Announce the step's last backward, on every rank: each full bucket is sent while it runs, in fixed order.

        gradient_scale: divisor of gradients (`scale`) before they are applied, the same on every rank. Residuals of
        other steps are multiplied by it, since they are in the scale of applied gradients.

        The first such backward only counts the gradients that each parameter gets. (Checkpointing that re-enters
        backward adds several.) Backward raises RuntimeError if a parameter gets one more than ever before after its
        bucket was sent.
        """
        self._gradient_scale = gradient_scale
        if self.mesh.num_ranks == 1:
            return
        self._num_received = [0] * len(self.parameters)
        self._is_watching = True
        if not self._num_expected:
            return
        for bucket in self.buckets:
            bucket.num_missing = sum(self._num_expected[index] for index in bucket.indices)
            bucket.num_missing += bucket.is_late  # `send` brings the rest
            bucket.ready.clear()
        self.buckets[-1].num_missing += 1  # the signals, which `send` brings
        self._start_thread()

    def send_remaining_buckets(
        self, *, finite: bool, stop: bool, checkpoint: bool = False, loss: Tensor | float = 0.0
    ) -> None:
        """Send the remaining buckets after the step's last backward.

        stop, checkpoint: requests of this rank. loss: this rank's part of it."""
        self._signals[:3] = torch.tensor([not finite, stop, checkpoint])
        self._signals[3] = loss
        self._signals[SIGNALS:] = 0
        if self._is_watching:
            self._is_watching = False
            max_counts = self._num_expected or [1] * len(self.parameters)
            self._num_expected = [
                max(pair) for pair in zip(max_counts, self._num_received, strict=True)
            ]
        if self._thread is None:  # none is sent yet
            for bucket in self.buckets:
                bucket.ready.clear()
        for bucket in self.buckets:
            if bucket.ready.is_set():
                continue
            for index in bucket.indices:
                self._move_gradient_to_bucket(index)
            if bucket.stream is not None:  # recorded after the kernels of backward
                bucket.gradient_events = [_record_event(bucket.stream.device)]
            bucket.ready.set()
        if self._thread is None and self.mesh.num_ranks > 1:
            self._start_thread()

    def wait_for_sums(self) -> tuple[bool, bool, float]:
        """Wait until gradients are summed over all ranks, in place. Collective.

        Returns whether all are finite on all ranks, whether a rank requested to stop, and the loss of all ranks.
        Raises PeerLost.
        """
        if self._thread is None:
            self._reduce_all_buckets()
        else:
            with count_waiting_time("dense"):
                self._thread.join()
            self._thread = None
        error = self._error
        self._error = None
        if error is not None:
            raise error
        for parameter, view in zip(self.parameters, self._views, strict=True):
            if view is None:  # of another tower; a zero would let an optimizer change it
                parameter.grad = None
        # A NaN or inf of any rank survives the sum, so every rank sees the same answer.
        signals = self._signals[:SIGNALS].double()
        self._tower_norms.copy_(self._signals[SIGNALS:])
        are_signals_finite = torch.cat([signals[3:4], self._tower_norms]).isfinite().all()
        signals[0] += not (are_signals_finite and all(bucket.is_finite for bucket in self.buckets))
        for bucket in self.buckets:
            bucket.residual, bucket.previous_residual = None, bucket.residual
        self._can_restore_residuals = True
        unhealthy, stops, checkpoints, loss, rank_squares = self._add_signals_of_servers(
            signals
        ).tolist()
        self.is_checkpoint_requested = checkpoints > 0
        if unhealthy == 0:
            self._add_noise(rank_squares)
        else:
            self.restore_residuals()
        return unhealthy == 0, stops > 0, loss

    def measure_first_part(self, num_parts: int) -> None:
        """Measure the gradients of a step's first micro-batch of `num_parts` equal ones, for `noise` on one rank."""
        self._first_part = (
            num_parts,
            sum(sum_gradient_squares([bucket.gradients]) for bucket in self.buckets),
        )

    def _add_noise(self, rank_squares: float) -> None:
        """Add the step to `noise`. rank_squares: sum of the squared norms of the ranks' gradients."""
        num_parts, first_square = self._first_part
        self._first_part = 1, 0.0
        square_of_parts = num_parts * first_square
        if self.mesh.num_ranks > 1:
            num_parts, square_of_parts = self.mesh.num_ranks, rank_squares
        if isinstance(self.codec, Thresholding):  # a sum has late elements of many steps
            return
        square = sum(bucket.square for bucket in self.buckets if bucket.tower_mesh is None)
        if num_parts > 1 and 0 < square < math.inf and square_of_parts < math.inf:
            unit = self._gradient_scale**2
            self.noise.add_step(square_of_parts / unit, square / unit, num_parts)

    def restore_residuals(self) -> None:
        """Restore the residuals from before this step, because its gradients are not applied.

        `wait` calls it if gradients are not finite. A second call does nothing.
        """
        if self._can_restore_residuals:
            for bucket in self.buckets:
                bucket.residual = bucket.previous_residual
                if bucket.coded is not None:
                    bucket.coded.undo_last_step()
        self._can_restore_residuals = False

    def export_residuals(self) -> State | None:
        """Return a copy of this rank's residuals, between steps; None if there are none."""
        if all(bucket.coded is None and bucket.residual is None for bucket in self.buckets):
            return None
        world = self.mesh.world
        return {
            "hosts": world.num_hosts,
            "local": world.ranks_per_host,
            "sizes": [parameter.numel() for parameter in self.parameters],
            "towers": self._map_parameters_to_towers(),
            "buckets": [
                {
                    "is_inside": bucket.tower_mesh is not None,
                    "numbers": list(bucket.indices),
                    **(NOT_CODED if bucket.coded is None else bucket.coded.export_state()),
                    "owed": None if bucket.residual is None else bucket.residual.cpu().clone(),
                }
                for bucket in self.buckets
            ],
        }

    def set_checkpoint_residuals(self, states_by_trainer: Sequence[State | None]) -> None:
        """Set the residuals of a checkpoint, by trainer, for `build_buckets` to load. Call it on every rank.

        In the same world with the same buckets each rank loads its own residuals. Otherwise rank 0 adds all of them to
        its next gradients or directions; directions of parameters that now get gradients are `late_directions`. They
        are dropped if other parameters are trained than in the checkpoint, because their parameters are unknown.
        """
        self._saved_residuals = states_by_trainer

    def _add_signals_of_servers(self, signals: Tensor) -> Tensor:
        """Add the signals of servers, which may request to stop, to those of trainers. Collective with servers."""
        mesh = self.full_mesh
        if not mesh.world.has_servers:
            return signals
        if not mesh.is_server and self.mesh.rank > 0:  # all trainers know the same
            signals.zero_()
        return mesh.all_reduce("push", signals, traffic_tag="control")

    def reduce(
        self, *, finite: bool, stop: bool, loss: Tensor | float = 0.0
    ) -> tuple[bool, bool, float]:
        """Send all buckets and wait for the sums: `send` and `wait`. Collective."""
        self.send_remaining_buckets(finite=finite, stop=stop, loss=loss)
        return self.wait_for_sums()

    def scale(self, factor: float) -> None:
        """Multiply every gradient."""
        for bucket in self.buckets:
            bucket.gradients.mul_(factor)
        self._tower_norms.mul_(abs(factor))

    def clip_norm(self, max_norm: float) -> float:
        """Scale all gradients so that their joint 2-norm is at most `max_norm`, as torch's clip_grad_norm_.

        Call it after `wait`, when gradients are the same on all ranks, or on all ranks of a tower. Returns the norm
        before clipping.
        """
        norms = [
            float(torch.linalg.vector_norm(bucket.gradients))
            for bucket in self.buckets
            if len(bucket.gradients) and bucket.tower_mesh is None
        ]
        norm = math.hypot(*norms, *self._tower_norms.tolist())
        if max_norm < norm + 1e-6:
            self.scale(max_norm / (norm + 1e-6))
        return norm

    def broadcast_parameters(self, other_tensors: Sequence[Tensor] = ()) -> None:
        """Send rank 0's parameters and `other_tensors` (buffers, frozen parameters) to all trainers. Collective."""
        if self.full_mesh.is_server:
            return
        with torch.no_grad():
            for tensor in (*self.parameters, *other_tensors):
                if not tensor.numel():
                    continue
                if tensor.device.type == "cpu":
                    self.mesh.broadcast("dense", tensor.data)
                elif self.mesh.num_ranks > 1:
                    tensor.data.copy_(self.mesh.broadcast("dense", tensor.data.cpu()))

    def broadcast_tower_weights(self, optimizer: Optimizer) -> None:
        """Send weights that one tower alone trains, with their state in `optimizer`, to all ranks.

        Collective, between steps.
        """
        if self.towers is not None:
            self.towers.broadcast_to_other_towers(self.mesh, optimizer)

    def _build_bucket(
        self,
        indices: list[int],
        mesh: Mesh,
        is_last: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> GradientBucket:
        """Allocate the buffers of a bucket. dtype: used if the bucket holds signals alone."""
        first_parameter = self.parameters[indices[0]] if indices else torch.zeros(0, dtype=dtype)
        sizes = [self.parameters[index].numel() for index in indices]
        size = sum(sizes)
        ranks = mesh.num_ranks
        signals = (SIGNALS + len(self._tower_norms)) * is_last
        padded_size = -(-(size + signals) // ranks) * ranks
        send_buffer = torch.zeros(padded_size, dtype=first_parameter.dtype)
        gradients = send_buffer[:size]
        stream = None
        if first_parameter.device.type != "cpu":
            gradients = torch.zeros(
                size, dtype=first_parameter.dtype, device=first_parameter.device
            )
            stream = torch.Stream(first_parameter.device)
        world = mesh.world
        is_in_tower = mesh is not self.mesh
        algorithm = choose_sum_algorithm(world, padded_size * send_buffer.itemsize)
        coded = None
        if self.codec != "exact" and indices and is_coded(self.codec, first_parameter):
            if not is_in_tower:
                algorithm = sum_algorithm_of_layout(world)
                coded = CodedAllReduce(
                    self.codec, world, mesh.rank, algorithm, sizes, send_buffer.dtype
                )
        return GradientBucket(
            indices,
            gradients,
            send_buffer,
            algorithm,
            stream,
            is_late=is_in_tower or any(id(self.parameters[n]) in self.late for n in indices),
            tower_mesh=mesh if is_in_tower else None,
            coded=coded,
        )

    def _map_parameters_to_towers(self) -> dict[int, int]:
        """Map the index of each parameter that one tower alone uses to this tower."""
        return {
            index: self._tower_of[id(parameter)]
            for index, parameter in enumerate(self.parameters)
            if id(parameter) in self._tower_of
        }

    def _load_residuals(self, states: Sequence[State | None]) -> None:
        """Load the residuals that `restore` set."""
        sizes = [parameter.numel() for parameter in self.parameters]
        saved_states = [state for state in states if state is not None]
        if self.full_mesh.is_server or not saved_states or saved_states[0]["sizes"] != sizes:
            return
        is_same_layout = len(saved_states) == self.mesh.num_ranks and describe_residual_layout(
            saved_states[0]
        ) == describe_residual_layout(self.export_residuals())
        if is_same_layout and saved_states[0].get("towers", {}) == self._map_parameters_to_towers():
            for bucket, saved_bucket in zip(
                self.buckets, saved_states[self.mesh.rank]["buckets"], strict=True
            ):
                if bucket.coded is not None:
                    bucket.coded.load_state(saved_bucket)
                if saved_bucket["owed"] is not None:
                    bucket.residual = saved_bucket["owed"].to(bucket.gradients)
        else:
            self._load_residuals_of_another_layout(states, saved_states[0]["buckets"], sizes)

    def _load_residuals_of_another_layout(
        self,
        states: Sequence[State | None],
        saved_buckets: Sequence[Mapping[str, Any]],
        sizes: Sequence[int],
    ) -> None:
        """Let the first rank of each bucket owe what all ranks of the checkpoint owe: gradients, and directions where
        they are sent now, too. Adam would take late directions for gradients, a hundredfold too large."""
        owed_gradients = sum_residuals_by_parameter(states)
        owed_directions = sum_residuals_by_parameter(states, of_directions=True)
        step = max(bucket["step"] if bucket.get("thresholds") else 0 for bucket in saved_buckets)
        for bucket in self.buckets:
            if bucket.coded is not None:
                bucket.coded.step = step  # the warm-up is not repeated
                if bucket.coded.adam is not None and owed_directions:
                    owed = join_by_parameter(owed_directions, bucket.indices, sizes)
                    bucket.coded.add_owed_directions(owed, self.mesh)
            is_first = (bucket.tower_mesh or self.mesh).rank == 0
            if is_first and any(index in owed_gradients for index in bucket.indices):
                owed = join_by_parameter(owed_gradients, bucket.indices, sizes)
                bucket.residual = owed.to(bucket.gradients)
        directed = {id(parameter) for parameter in self.directed_parameters}
        self.late_directions = {
            self.parameters[index]: owed
            for index, owed in owed_directions.items()
            if id(self.parameters[index]) not in directed
        }

    def _agree_on_algorithms(self, mesh: Mesh, buckets: Sequence[GradientBucket]) -> None:
        """Take rank 0's reduction algorithms on all ranks, since ranks may have measured other links. Collective."""
        algorithm_indices = torch.tensor(
            [SUM_ALGORITHMS.index(bucket.algorithm) for bucket in buckets]
        )
        agreed_indices = mesh.broadcast("dense", algorithm_indices, traffic_tag="control").tolist()
        for bucket, algorithm_index in zip(buckets, agreed_indices, strict=True):
            bucket.algorithm = SUM_ALGORITHMS[algorithm_index]

    def _build_gradient_hook(self, parameter_index: int) -> Callable[[Tensor], None]:
        """Return a hook that counts the gradients of a parameter."""

        def count_gradient(parameter: Tensor) -> None:  # on a thread of backward's
            if self._is_watching:
                self._count_gradient(parameter_index)

        return count_gradient

    def _count_gradient(self, index: int) -> None:
        """Count a gradient that backward added; mark the bucket as ready if it is complete."""
        bucket = self._bucket_of[index]
        assert bucket is not None
        with self._lock:
            self._num_received[index] += 1
            if self._thread is None:
                return
            if bucket.ready.is_set():
                raise RuntimeError(
                    f"parameter {index} of {len(self.parameters)}, {tuple(self.parameters[index].shape)}, got "
                    f"{self._num_received[index]} gradients in one backward, {self._num_expected[index]} at most in "
                    "every one before, and its bucket is already sent. Let the first step be one that uses "
                    "every part of the model as often as any later step does (checkpoint with use_reentrant=False)"
                )
            self._move_gradient_to_bucket(index)
            if self._num_received[index] > self._num_expected[index]:
                return
            if bucket.stream is not None:
                bucket.gradient_events.append(_record_event(bucket.stream.device))
            bucket.num_missing -= 1
            if not bucket.num_missing:
                bucket.ready.set()

    def _move_gradient_to_bucket(self, index: int) -> None:
        """Copy a gradient that is outside its bucket (zero_grad, a backward with create_graph) into it."""
        parameter = self.parameters[index]
        view = self._views[index]
        if view is None or parameter.grad is view:
            return
        with torch.no_grad():
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad)
        parameter.grad = view

    def _start_thread(self) -> None:
        """Start the thread that reduces the buckets of a step."""
        self._is_aborted = False
        # No daemon: Python would end it inside gloo when the process does, which aborts.
        self._thread = threading.Thread(target=self._reduce_all_buckets, name="dense")
        self._thread.start()

    def _reduce_all_buckets(self) -> None:
        """Reduce every bucket, in order. Runs on the thread of a step, which ends with it."""
        rank_square = 0.0
        try:
            for bucket in self.buckets:
                while not bucket.ready.wait(0.5):
                    if not threading.main_thread().is_alive():
                        return  # the process ends in the middle of a step
                if self._is_aborted:
                    return
                mesh = bucket.tower_mesh or self.mesh
                self._add_weight_decay(bucket)
                bucket.fill_send_buffer(mesh, self._gradient_scale)
                if mesh is self.mesh and mesh.num_ranks > 1:
                    rank_square += sum_gradient_squares(bucket.send_pieces)
                    self._signals[SIGNALS - 1] = rank_square  # sent with the last bucket
                bucket.sum_over_ranks(mesh, self._gradient_scale)
                if bucket.tower_mesh is not None and bucket.tower_mesh.rank == 0:
                    self._add_tower_norm(bucket)
        except BaseException as error:  # raised again by `wait`
            self._error = error

    def _add_weight_decay(self, bucket: GradientBucket) -> None:
        """Add this rank's part of the weight decay that Adam adds to gradients, where directions are sent."""
        if bucket.coded is None or isinstance(self.codec, str) or not self.codec.adam_weight_decay:
            return
        for event in bucket.gradient_events:
            event.synchronize()
        factor = self.codec.adam_weight_decay * self._gradient_scale / self.mesh.num_ranks
        with torch.no_grad():
            for index in bucket.indices:
                view = self._views[index]
                assert view is not None
                view.add_(self.parameters[index], alpha=factor)

    def _add_tower_norm(self, bucket: GradientBucket) -> None:
        """Add the norm of a tower's gradients to the signals, on its first rank. NaN or inf if they are not finite."""
        assert self.towers is not None
        slot = SIGNALS + self.mesh.rank // self.towers.size
        norms = [
            float(torch.linalg.vector_norm(piece, dtype=torch.float64))
            for piece in bucket.gradients.split(CHUNK_ELEMENTS)
        ]
        self._signals[slot] = math.hypot(float(self._signals[slot]), *norms)

    def _abort_step(self) -> None:
        """Make the thread of the step end without reducing further buckets."""
        self._is_aborted = True
        self._is_watching = False
        self._thread = None
        for bucket in self.buckets:
            bucket.ready.set()


def _record_event(device: torch.device) -> torch.Event:
    event = torch.Event(device)
    event.record()
    return event
