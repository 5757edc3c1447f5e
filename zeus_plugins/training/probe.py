"""Timed passes of a training at several batch sizes, and the conclusions (docs/probing.md).

`Prober` runs on all ranks alike: rank 0 chooses each size, and all exchange their findings. A framework describes its
training by `Passes`. An obstacle ends the probe, never the training.
"""

from __future__ import annotations

import copy
import logging
import math
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from zeus_plugins.energy import EnergyMonitor
from zeus_plugins.protocol import GpuConfig, Probe, ProbedSize
from zeus_plugins.training.batches import BatchSplit, nested_samplers, uncounted, unwrapped
from zeus_plugins.training.outcomes import detail_of, is_out_of_memory
from zeus_plugins.training.passes import CannotProbe, Passes, untouched
from zeus_plugins.training.patches import Patches
from zeus_plugins.training.port import TrainerPort, decided

_logger = logging.getLogger("zeus_plugins")

# Bounds of a probe: a share of the samples and of the time of an epoch, and seconds. Timed passes may use the share
# `_SHARE_OF_TIMES` of these bounds; the rest is for the noise scale.
_SHARE = 0.05
_MOST_S = 60.0
_SHARE_OF_TIMES = 0.75
# Passes at a size: one to warm up, and timed ones.
_LEAST_PASSES, _MOST_PASSES = 2, 5

_WINDOW = "zeus_bso_probe"
# Shortest window whose mean power is trusted, seconds.
_LEAST_WINDOW_S = 0.5

# Standard deviation of the log of a cost: its least value, and the increase per octave between the sizes.
_LEAST_ERROR = 0.1
_ERROR_PER_OCTAVE = 0.05
# Until an epoch shows it: the most that a step takes beside its passes, as a share of the shortest pass (small models).
_MOST_HIDDEN = 0.75

# Passes of the noise scale: passes with summed gradients, and all passes.
_GROUP, _MOST_GROUPS = 8, 4
# Least standard deviation of log2 of the critical batch size, and that of a single group, octaves.
_LEAST_OCTAVES = 1.6
_OCTAVES_OF_ONE = 1.0

_TOO_SHORT = "an epoch is too short"

_COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "barrier", "broadcast"),
    *("broadcast_object_list", "gather", "gather_object", "recv", "reduce", "reduce_scatter", "scatter", "send"),
)


@dataclass(frozen=True)
class Timing:
    """Median time of a pass at one size, the standard error of its log, and the mean power in watts, or None."""

    seconds: float
    error: float = 0.0
    power_w: float | None = None


def outwards(size: int, sizes: Sequence[int]) -> list[int]:
    """Return the sizes ordered by distance from `size`: `size`, the next smaller and larger sizes, and so on."""
    ordered = sorted({*sizes, size})
    place = ordered.index(size)
    return sorted(ordered, key=lambda each: (abs(ordered.index(each) - place), each))


def epoch_costs(
    timings: Mapping[int, Timing],
    splits: Mapping[int, BatchSplit],
    size: int,
    *,
    steps: float,
    time_s: float,
    evaluation_s: float,
    power_w: float,
    is_ambiguous: bool = False,
    hidden_s: float = 0.0,
) -> tuple[ProbedSize, ...]:
    """Return the cost of an epoch at each size whose passes were timed.

    Args:
        timings: Timing of a pass, by samples per batch of a device.
        splits: The split of each global size.
        size: The global size of the run, whose passes were timed.
        steps: Optimizer steps of its first epoch.
        time_s: Seconds of these steps. A step's time beyond its passes is assumed to be the same at every size.
        evaluation_s: Seconds of the evaluations of an epoch.
        power_w: Mean power of the run over all GPUs, watts.
        is_ambiguous: True if a step's time beyond its passes may grow with its samples, such as time to load data.
        hidden_s: Width of the range, in seconds, in which a step's time beyond its passes lies; 0 if it is known.
    """
    own = splits[size]
    own_s = own.accumulation * timings[own.per_device].seconds
    overhead_s = time_s / steps - own_s
    own_power_w = timings[own.per_device].power_w
    costs = []
    for each, split in splits.items():
        timing = timings.get(split.per_device)
        if timing is None:
            continue
        pass_s = split.accumulation * timing.seconds
        # The overhead is negative if the passes of the probe were slowed down.
        step_s = max(pass_s + overhead_s, pass_s / 2)
        octaves = abs(math.log2(each / size))
        # The run's own size has the time of the real epoch.
        errors = [_LEAST_ERROR, _ERROR_PER_OCTAVE * octaves, timing.error if each != size else 0.0]
        errors.append((math.log1p(hidden_s / pass_s) - math.log1p(hidden_s / own_s)) / 2)
        if is_ambiguous:
            by_samples_s = max(pass_s + overhead_s * each / size, pass_s / 2)
            errors.append(abs(math.log(step_s / by_samples_s)) / 2)
        steps_s = steps * size / each * step_s
        relative = timing.power_w / own_power_w if timing.power_w and own_power_w else 1.0
        costs.append(
            ProbedSize(
                batch_size=each,
                time_s=steps_s + evaluation_s,
                energy_j=(steps_s * relative + evaluation_s) * power_w,
                error=math.hypot(*errors),
            )
        )
    return tuple(costs)


@dataclass(frozen=True)
class GradientSums:
    """Gradients of some passes: their number, the sum of their squared norms, and the squared norm of their sum."""

    passes: int
    squares: float
    square_of_sum: float

    @property
    def signal(self) -> float:
        """Unbiased estimate of |G|², the squared norm of the mean gradient, from all pairs of passes."""
        return (self.square_of_sum - self.squares) / (self.passes * (self.passes - 1))

    def noise(self, samples: int) -> float:
        """Unbiased estimate of tr Σ, the variance of the gradient of a sample, given the samples of a pass."""
        return samples * (self.squares / self.passes - self.signal)


def noise_scale(groups: Sequence[GradientSums], samples: int) -> tuple[float, float] | None:
    """Return the gradient noise scale tr Σ / |G|² in samples, with its error in octaves; None if it is not known.

    Pool the groups, whose passes have `samples` samples (McCandlish et al. 2018, arXiv 1812.06162, appendix A).
    """
    if not groups:
        return None
    signals = [each.signal for each in groups]
    signal, noise = statistics.fmean(signals), statistics.fmean(each.noise(samples) for each in groups)
    if not (math.isfinite(signal) and math.isfinite(noise) and signal > 0 and noise > 0):
        return None
    octaves = _OCTAVES_OF_ONE
    if len(groups) > 1:
        octaves = statistics.stdev(signals) / math.sqrt(len(groups)) / signal / math.log(2)
    return noise / signal, math.hypot(_LEAST_OCTAVES, octaves)


@dataclass
class _Finding:
    """The passes of one rank at one size, or the clause that says why they cannot be made."""

    seconds: list[float] = field(default_factory=list)
    is_out_of_memory: bool = False
    problem: str | None = None


class Prober:
    """The probe of one training: times at its start, calibration and noise scale after its first epoch.

    All ranks make all calls but `result`. Nothing here raises because of the training.

    Args:
        trainer: The training, at the global `size`.
        splits: The split of each global size of the job over the devices.
        monitor: Measures the power of the passes, on rank 0.
        say: Shows a line to the user, once for all ranks.
    """

    def __init__(
        self,
        trainer: TrainerPort,
        splits: Mapping[int, BatchSplit],
        size: int,
        monitor: EnergyMonitor | None,
        say: Callable[[str], None],
    ) -> None:
        self._trainer = trainer
        self._say = say
        self._splits = splits
        self._size = size
        self._own = splits[size].per_device
        self._monitor = monitor
        # By samples of a device: timings, the sizes already considered, and the smallest size that ran out of memory.
        self._timings: dict[int, Timing] = {}
        self._tried: set[int] = set()
        self._out_of_memory = math.inf
        # Limits of the whole probe: samples of a device, and seconds.
        self._samples, self._limit_s = 0.0, _MOST_S
        self._used_samples = 0
        self._spent_s = self._began_s = 0.0
        self._batches = 0.0
        self._is_ambiguous = self._mixes_samples = False
        self._resumed_s = self._ended_s = self._evaluation_s = 0.0
        self._epochs = 1.0
        self._scale: tuple[float, float] | None = None

    @property
    def is_open(self) -> bool:
        """True from passes at the training's own size until `finish`."""
        return self._own in self._timings and self._ended_s == 0.0

    def time_passes(self) -> None:
        """Time passes at the sizes, from the training's own size outwards, and report it in one line."""

        def work(passes: Passes) -> None:
            self._batches, self._samples = passes.batches, _SHARE * passes.batches * self._own
            self._is_ambiguous = passes.has_workers or not passes.knows_evaluations
            self._mixes_samples = passes.mixes_samples
            while (chosen := decided(self._trainer, self._choice)) is not None:
                self._visit(passes, *chosen)

        problem = self._guarded(work)
        self.resume()
        found = [size for size, split in self._splits.items() if split.per_device in self._timings]
        if problem == _TOO_SHORT:
            _logger.debug("batch sizes are not probed: %s", problem)
        elif problem is not None:
            self._timings.clear()
            self._say(f"batch sizes are not probed: {problem}")
        elif self.is_open:
            failed = "" if self._failed is None else f"; {self._failed} runs out of memory"
            sizes = "1 size" if len(found) == 1 else f"{len(found)} sizes"
            self._say(f"probed {sizes} in {self._spent_s:.2g} s{failed}")

    def resume(self, size: int | None = None) -> None:
        """Note that the training begins now, at the global `size` if given."""
        if size is not None:
            own = self._splits[size].per_device
            self._batches *= self._own / own
            self._size, self._own = size, own
        self._resumed_s = time.monotonic()

    def count_evaluation(self, seconds: float) -> None:
        """Keep the time of an evaluation, with its report, apart from the time of the steps."""
        self._evaluation_s += seconds

    def finish(self, ended_s: float, *, epochs: float, trains_on: bool) -> None:
        """Note the end of the first `epochs`; if the training `trains_on`, estimate the noise scale."""
        self._ended_s, self._epochs = ended_s, epochs
        if not trains_on or self._mixes_samples:
            return

        def work(passes: Passes) -> None:
            chosen = decided(self._trainer, self._choice_for_noise)
            if chosen is not None:
                per_device, count = chosen
                groups = self._exchanged(self._gradient_sums(passes, per_device, count))
                self._scale = noise_scale([each for rank in groups for each in rank], per_device)

        problem = self._guarded(work)
        if problem is not None:
            self._say(f"the gradient noise is not probed: {problem}")

    def result(self, gpus: GpuConfig, power_w: float) -> Probe:
        """Return the findings of a training on these GPUs with this mean power.

        Before `finish`, the costs are computed from the passes alone, without evaluations; their errors allow for the
        unknown rest of a step.
        """
        split = self._splits[self._size]
        steps, hidden_s = self._batches / split.accumulation, 0.0
        evaluation_s = min(self._evaluation_s, self._ended_s - self._resumed_s)
        time_s = self._ended_s - self._resumed_s - evaluation_s
        if self._ended_s == 0.0:
            hidden_s, evaluation_s = _MOST_HIDDEN * min(each.seconds for each in self._timings.values()), 0.0
            time_s = steps * (split.accumulation * self._timings[self._own].seconds + hidden_s / 2)
        costs = epoch_costs(
            self._timings,
            self._splits,
            self._size,
            steps=steps,
            time_s=time_s / self._epochs,
            evaluation_s=evaluation_s / self._epochs,
            power_w=power_w,
            is_ambiguous=self._is_ambiguous,
            hidden_s=hidden_s,
        )
        scale, error = self._scale or (None, None)
        return Probe(
            gpus=gpus, sizes=costs, out_of_memory=self._failed, critical_batch_size=scale, critical_error=error
        )

    @property
    def _failed(self) -> int | None:
        """The smallest global size that runs out of memory."""
        sizes = (size for size, split in self._splits.items() if split.per_device >= self._out_of_memory)
        return min(sizes, default=None)

    def _guarded(self, work: Callable[[Passes], None]) -> str | None:
        """Call `work` with the passes, and undo its traces; return the reason if it fails on a rank, otherwise None."""
        self._began_s, spent_s, problem = time.monotonic(), self._spent_s, None
        with ExitStack() as stack:
            passes: Any = None
            try:
                passes = self._trainer.passes()
                _check(passes)
                # Before the state is copied, which takes longer than such an epoch of a large model.
                if not self._timings and _SHARE * _SHARE_OF_TIMES * passes.batches < _LEAST_PASSES:
                    raise CannotProbe(_TOO_SHORT)
                stack.enter_context(untouched(passes.model, *passes.state, data=(passes.loader, *passes.data)))
                stack.enter_context(passes.muted())
            except Exception as error:
                problem = _reason_of(error)
            try:
                self._agree(problem)
                work(passes)
            except Exception as error:
                problem = _reason_of(error)
        self._spent_s = spent_s + time.monotonic() - self._began_s
        return problem

    def _exchanged(self, thing: Any) -> list[Any]:
        return [thing] if self._trainer.world_size == 1 else self._trainer.all_gather(thing)

    def _agree(self, problem: str | None) -> None:
        """Raise `CannotProbe` on all ranks if one has a problem."""
        found = next((each for each in self._exchanged(problem) if each is not None), None)
        if found is not None:
            raise CannotProbe(found)

    def _choice(self) -> tuple[int, int] | None:
        """Return the next size to time and its number of passes; None if no other size is within the bounds."""
        if self._tried and self._own not in self._timings:
            return None
        samples = _SHARE_OF_TIMES * self._samples - self._used_samples
        left_s = self._left_s(_SHARE_OF_TIMES)
        for size in outwards(self._own, [split.per_device for split in self._splits.values()]):
            if size in self._tried or size >= self._out_of_memory:
                continue
            self._tried.add(size)
            passes = min(_MOST_PASSES, max(_LEAST_PASSES, int(samples / 2 / size)))
            if passes * size <= samples and passes * self._expected_s(size) <= left_s:
                return size, passes
            if size == self._own:
                return None
        return None

    def _choice_for_noise(self) -> tuple[int, int] | None:
        """Return the largest timed size that allows all passes of the noise scale, or else the smallest; with passes.

        Return None if not even one group of passes is possible.
        """
        samples, left_s = self._samples - self._used_samples, self._left_s(1.0)
        chosen = None
        for size in sorted(self._timings, reverse=True):
            passes = min(_MOST_GROUPS * _GROUP, int(samples / size), int(left_s / self._timings[size].seconds))
            chosen = (size, max(0, passes // _GROUP * _GROUP))
            if passes == _MOST_GROUPS * _GROUP:
                break
        return chosen if chosen is not None and chosen[1] else None

    def _left_s(self, share: float) -> float:
        """Return the seconds that are left of a share of the limit."""
        return share * self._limit_s - self._spent_s - (time.monotonic() - self._began_s)

    def _expected_s(self, size: int) -> float:
        """Return the seconds that a pass will take, from those at other sizes; 0 for the first size."""
        below = max((each for each in self._timings if each < size), default=None)
        if below is not None:
            return self._timings[below].seconds * size / below
        return min((each.seconds for each in self._timings.values()), default=0.0)

    def _visit(self, passes: Passes, size: int, count: int) -> None:
        """Make this number of passes at a size, on all ranks."""
        finding = _Finding()
        power_w = self._power_of(lambda: self._time(passes, size, count, finding))
        self._used_samples += size * count
        findings: list[_Finding] = self._exchanged(finding)
        problem = next((each.problem for each in findings if each.problem is not None), None)
        if problem is not None:
            raise CannotProbe(problem)
        if any(each.is_out_of_memory for each in findings):
            if size == self._own:
                raise CannotProbe(f"a pass over {size} samples runs out of memory")
            self._out_of_memory = size
        elif all(each.seconds for each in findings):
            slowest = max((each.seconds for each in findings), key=statistics.median)
            logs = [math.log(each) for each in slowest]
            error = statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else _LEAST_ERROR
            self._timings[size] = Timing(statistics.median(slowest), error, power_w)
            if size == self._own:
                self._limit_s = min(_MOST_S, _SHARE * self._batches * self._timings[size].seconds)

    def _power_of(self, work: Callable[[], None]) -> float | None:
        """Call `work`, and return its mean power in watts; None if the monitor fails or the time is short."""
        monitor, measured = self._monitor, None
        with suppress(Exception):  # The probe works without power readings.
            if monitor is not None:
                monitor.begin_window(_WINDOW)
        work()
        with suppress(Exception):
            measured = None if monitor is None else monitor.end_window(_WINDOW)
        return None if measured is None or measured.time_s < _LEAST_WINDOW_S else measured.energy_j / measured.time_s

    def _time(self, passes: Passes, size: int, count: int, finding: _Finding) -> None:
        """Time passes after one to warm up, and note their seconds or the error that ended them."""
        torch: Any = sys.modules["torch"]
        device = next(passes.model.parameters()).device
        accelerator = None if device.type == "cpu" else getattr(torch, device.type)
        step = _kept_apart(passes, self._trainer.world_size)
        try:
            batches = self._batches_of(passes, size, count)
            for number in range(count):
                _drop_gradients(passes.model)
                began_s = time.perf_counter()
                batch = next(batches, None)
                if batch is None:
                    break
                if passes.has_workers:
                    began_s = time.perf_counter()
                step(batch)
                if accelerator is not None:
                    accelerator.synchronize()
                if number > 0:
                    finding.seconds.append(max(time.perf_counter() - began_s, 1e-9))  # A clock may be coarse.
                if self._left_s(_SHARE_OF_TIMES) < 0:
                    break
        except Exception as error:
            finding.is_out_of_memory = is_out_of_memory(error)
            finding.problem = None if finding.is_out_of_memory else _reason_of(error)
            traceback.clear_frames(error.__traceback__)  # Their variables hold the tensors of the failed pass.
        finally:
            _drop_gradients(passes.model)
            if accelerator is not None:
                accelerator.empty_cache()

    def _gradient_sums(self, passes: Passes, size: int, count: int) -> list[GradientSums]:
        """Make passes at one size, and return the sums of their gradients by groups."""
        groups: list[GradientSums] = []
        total: list[Any] = []
        squares = 0.0
        step, problem = _kept_apart(passes, self._trainer.world_size), None
        try:
            for number, batch in enumerate(self._batches_of(passes, size, count), 1):
                _drop_gradients(passes.model)
                step(batch)
                gradients = [each.grad for each in passes.model.parameters() if each.grad is not None]
                squares += _squared_norm(gradients)
                for each, gradient in zip(total, gradients, strict=True) if total else ():
                    each.add_(gradient)
                total = total or gradients
                if number % _GROUP == 0:
                    groups.append(GradientSums(_GROUP, squares, _squared_norm(total)))
                    total, squares = [], 0.0
        except Exception as error:
            problem = _reason_of(error)
            traceback.clear_frames(error.__traceback__)
        finally:
            _drop_gradients(passes.model)
        self._agree(problem)
        return groups

    def _batches_of(self, passes: Passes, size: int, count: int) -> Iterator[Any]:
        """Yield batches of a size from a separate loader over the training's data.

        Each rank gets different batches. If the training's loader has workers, the separate loader has one, so that the
        data set of this process remains unchanged.
        """
        torch: Any = sys.modules["torch"]
        loader = unwrapped(passes.loader)
        sampler = copy.copy(nested_samplers(loader.batch_sampler)[-1])
        sampler.__class__ = uncounted(type(sampler))
        sampler.batch_size = size
        rank, ranks = self._trainer.rank, self._trainer.world_size
        full = (indices for _ in range(count * ranks) for indices in sampler if len(indices) == size)
        chosen = list(islice(full, rank, count * ranks, ranks))
        if not chosen:
            raise CannotProbe(f"{type(sampler).__name__} makes no batches of {size} samples")
        more: dict[str, Any] = {}
        if loader.num_workers:
            more = {"num_workers": 1, "multiprocessing_context": loader.multiprocessing_context}
        yield from torch.utils.data.DataLoader(
            loader.dataset,
            batch_sampler=chosen,
            # Do not use up the check of `CheckedCollate`: it belongs to the training's own first batch.
            collate_fn=getattr(loader.collate_fn, "_collate", loader.collate_fn),
            worker_init_fn=loader.worker_init_fn,
            pin_memory=loader.pin_memory,
            **more,
        )


def _reason_of(error: Exception) -> str:
    return str(error) if isinstance(error, CannotProbe) else detail_of(error)


def _check(passes: Passes) -> None:
    """Raise `CannotProbe` for a training that passes would change, or whose data cannot be drawn again."""
    torch: Any = sys.modules["torch"]
    for module in passes.model.modules():
        forward = type(module).forward
        is_compiled = getattr(module, "_compiled_call_impl", None) is not None
        if is_compiled or type(module).__name__ == "OptimizedModule" or hasattr(forward, "_torchdynamo_orig_callable"):
            raise CannotProbe("a compiled model is compiled again for other sizes")
    loader = unwrapped(passes.loader)
    if not isinstance(loader, torch.utils.data.DataLoader) or type(passes.loader).__name__ == "DataLoaderDispatcher":
        raise CannotProbe(f"the loader is a {type(loader).__name__}, not a DataLoader of torch")
    if isinstance(loader.dataset, torch.utils.data.IterableDataset) or not math.isfinite(passes.batches):
        raise CannotProbe("its data are a stream")
    samplers = nested_samplers(loader.batch_sampler)
    if not samplers or not isinstance(getattr(samplers[-1], "batch_size", None), int):
        raise CannotProbe("its loader does not state a batch size")


def _kept_apart(passes: Passes, world_size: int) -> Callable[[Any], None]:
    """Return a step that fails if it generates samples, or waits for other ranks, which may have run out of memory."""

    def refuse(reason: str) -> Callable[..., None]:
        def refused(*_: Any, **__: Any) -> None:
            raise CannotProbe(reason)

        return refused

    torch: Any = sys.modules["torch"]
    distributed = torch.distributed
    generating = [each for each in passes.model.modules() if callable(getattr(type(each), "generate", None))]
    waiting = [name for name in _COLLECTIVES if world_size > 1 and hasattr(distributed, name)]

    def step(batch: Any) -> None:
        patches = Patches()
        try:
            for each in generating:
                patches.set_attribute(each, "generate", refuse("its step generates samples"))
            for name in waiting:
                patches.set_attribute(distributed, name, refuse(f"its step calls torch.distributed.{name}"))
            with torch.inference_mode(mode=False):  # This also enables gradients, without which a script may evaluate.
                passes.step(batch)
        finally:
            patches.undo()

    return step


def _drop_gradients(model: Any) -> None:
    for each in model.parameters():
        each.grad = None


def _squared_norm(tensors: Sequence[Any]) -> float:
    torch: Any = sys.modules["torch"]
    norms = [torch.linalg.vector_norm(each.detach(), dtype=torch.float32) for each in tensors]
    return float(torch.stack([each.double() for each in norms]).square().sum())
