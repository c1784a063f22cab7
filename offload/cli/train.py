"""`offload train`: trains a language model through the whole engine and says what that cost.

Its options are in `settings`, its results in `record` and `report`; here is the loop.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import importlib.util
import math
import os
import platform
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from torch.nn.functional import cross_entropy

import offload
from offload.backends import accelerator
from offload.checkpoint.contents import is_checkpoint
from offload.cli.model import Shape, build_model, choose_shape, parameter_groups
from offload.cli.progress import Progress
from offload.cli.record import LAST_STEPS, OPTIMIZERS, Comparison, RunRecord, progress_text
from offload.cli.report import table
from offload.cli.text import VOCABULARY, Text, draw_windows, load_text
from offload.cli.values import given_settings, to_json
from offload.errors import ConfigError, OffloadError
from offload.formats import EXACT_ADAMW, FP32
from offload.measure.products import DTYPES, Compute, choose_compute, computing_in
from offload.memory.arenas import available_bytes
from offload.optim.reporting import report_of
from offload.pictures.draw import draw_lanes, draw_losses
from offload.pictures.report import write_run, write_timeline
from offload.schedule.timeline import Interval
from offload.units import format_bytes, format_count

_EXTRA = ("transformers", "matplotlib", "tqdm")
_NO_SETTINGS = ("command", "refuse")
"""Attributes of the parsed arguments that are no options."""


def run(settings: Namespace) -> int:
    """Train, write the run's folder, print the outcome.

    Returns:
        The exit status: 0, 1 if a comparison found a difference, 130 if interrupted.

    Raises:
        OffloadError: The input cannot be used or the engine failed; what there was by then has been written.
    """
    if missing := [name for name in _EXTRA if importlib.util.find_spec(name) is None]:
        raise OffloadError(f"{', '.join(missing)} not installed; run: pip install {' '.join(missing)}")
    _check_device(settings.device)
    shape = choose_shape(settings.params, layers=settings.layers, hidden=settings.hidden)
    _check_memory(settings, shape)
    if settings.resume is not None and not is_checkpoint(settings.resume):
        raise ConfigError("--resume", settings.resume, "there is no checkpoint in this folder")
    text = load_text(settings.data, min_bytes=settings.seq + 1)
    with _run_folder(settings) as (folder, paths), _reproducible(settings.threads):
        config = _offload_config(settings, shape, paths)
        size = f"{shape.numel:,} parameters, {shape.layers} layers, hidden width {shape.hidden}"
        _say(settings, f"model: {size}, {settings.dtype}")
        _say(settings, f"text: {text.source}, {len(text.values):,} bytes in {text.files} files")
        compute = choose_compute(settings.dtype, settings.device)
        _say(settings, str(compute))
        training = _Run(settings, shape, text, folder, compute)
        try:
            training.train(config, training.main, "metrics.jsonl", "offloaded")
            if settings.compare_in_memory:
                training.compare(config)
        except KeyboardInterrupt:
            training.interrupted = True
        except OffloadError as error:
            training.error = str(error)
            raise
        finally:  # also after an error: the results so far are kept
            summary = training.write(paths)
    return _print_outcome(settings, training, summary, folder)


def _print_outcome(settings: Namespace, training: _Run, summary: Mapping[str, Any], folder: Path) -> int:
    """Print how a run has ended, and its summary; return the exit status."""
    is_different = training.comparison is not None and not training.comparison.identical
    if training.interrupted:
        done = format_count(len(training.main.rows), "step")
        print(f"offload train: interrupted after {done}; results so far are in {folder}", file=sys.stderr)
        if settings.save is not None and is_checkpoint(settings.save):
            print(f"offload train: go on from the last checkpoint with --resume {settings.save}", file=sys.stderr)
    elif is_different and settings.quiet:  # else the table below says it
        print(f"offload train: {summary['verdict']}", file=sys.stderr)
    if settings.json:
        print(to_json(summary, indent=2))
    _say(settings, table(summary))
    return 130 if training.interrupted else int(is_different)


def _say(settings: Namespace, text: str) -> None:
    """Print text for people: on stdout, or on stderr if stdout is for JSON; nothing if quiet."""
    if not settings.quiet:
        print(text, file=sys.stderr if settings.json else sys.stdout, flush=True)


class _Run:
    """The training of one call of the command, with its results and those of the comparison, if there is one.

    Attributes:
        settings: The parsed options.
        main: What is recorded of the training.
        in_memory: The same of the second training, with all state in memory; without rows if nothing is compared.
        comparison: Of the two; None if there is none.
        interrupted: Whether a Ctrl-C has ended the training.
        error: Text of the error that has ended it; None if none has.
    """

    def __init__(self, settings: Namespace, shape: Shape, text: Text, folder: Path, compute: Compute) -> None:
        self.settings = settings
        self.main = RunRecord()
        self.in_memory = RunRecord()
        self.comparison: Comparison | None = None
        self.interrupted = False
        self.error: str | None = None
        self._shape = shape
        self._text = text
        self._folder = folder
        self._compute = compute
        self._weights: dict[str, torch.Tensor] = {}

    def train(self, config: Any, record: RunRecord, metrics_name: str, title: str) -> None:
        """Train a model from the seed on, and keep a copy of its weights if runs are to be compared.

        Args:
            config: The optimizer's `OffloadConfig`.
            record: What gets a row for each step. Checkpoints are saved only if it is `main`.
            metrics_name: File in the run's folder that gets a line for each step.
            title: For the progress bar.
        """
        settings = self.settings
        started_s = time.perf_counter()
        dtype = DTYPES[settings.dtype]
        model = build_model(self._shape, seq=settings.seq, dtype=dtype, device=settings.device, seed=settings.seed)
        draws = torch.Generator().manual_seed(settings.seed)
        progress = Progress(settings.steps, title=title, quiet=settings.quiet, log=True)
        hyperparameters = {"lr": settings.lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
        groups = parameter_groups(model, weight_decay=0.1)
        try:
            with (
                offload.AdamW(groups, offload=config, **hyperparameters) as optimizer,
                (self._folder / metrics_name).open("w", encoding="utf-8") as lines,
            ):
                _say(settings, str(optimizer.plan))
                if settings.overlap in ("forward", "both", "auto"):
                    optimizer.overlap_forward(model)
                first_step = self._resume(optimizer, draws)
                note_metrics = partial(_note_metrics, optimizer, record, lines)
                try:
                    for index in range(first_step, settings.steps):
                        row = self._iterate(model, optimizer, draws, index, note_metrics)
                        record.rows.append(row)
                        progress.show(row["step"], settings.steps, progress_text(row))
                        if record is self.main and self._is_saved(index + 1):
                            extra = {"step": index + 1, "batches": draws.get_state()}
                            optimizer.save_checkpoint(settings.save, extra=extra)
                    note_metrics()  # of the last step: an iteration notes those of the step before
                except BaseException:
                    with contextlib.suppress(OffloadError):  # so that an interrupted run has all its steps
                        note_metrics()
                    raise
                if record is self.main and settings.save is not None:
                    optimizer.wait_checkpoint()  # the last save goes on after its call; here its error is raised
                if record.rows:
                    record.report = report_of(optimizer.engine, optimizer.metrics(), optimizer.plan)
        finally:
            progress.close()
            record.seconds = time.perf_counter() - started_s
        if settings.compare_in_memory:
            self._weights = {name: weight.detach().cpu().clone() for name, weight in model.named_parameters()}

    def _resume(self, optimizer: Any, draws: torch.Generator) -> int:
        """Load the checkpoint of `--resume`, if given, and the state of `draws`; return how many steps are done."""
        settings = self.settings
        if settings.resume is None:
            return 0
        extra = optimizer.load_checkpoint(settings.resume)
        if not isinstance(extra, dict) or not {"step", "batches"} <= extra.keys():
            raise ConfigError("--resume", settings.resume, "give a checkpoint that `offload train` has written")
        if extra["step"] >= settings.steps:
            raise ConfigError("--resume", settings.resume, f"it is of step {extra['step']}: give more --steps")
        draws.set_state(extra["batches"])
        _say(settings, f"resumed from {settings.resume} after step {extra['step']}")
        return int(extra["step"])

    def _is_saved(self, step: int) -> bool:
        """Return whether a checkpoint is saved after a step: the last, and every `--save-every`-th."""
        settings = self.settings
        if settings.save is None:
            return False
        return step == settings.steps or (settings.save_every is not None and step % settings.save_every == 0)

    def _iterate(
        self, model: Any, optimizer: Any, draws: torch.Generator, index: int, note_metrics: Callable[[], None]
    ) -> dict[str, Any]:
        """Run one iteration: forward and backward of every micro-step, then the optimizer's step.

        Args:
            draws: Generator that draws the batches.
            index: Number of steps before this one.
            note_metrics: Records the metrics of the step before. Called only after backward, as that step may go on
                until then.

        Returns:
            The row of `RunRecord`, without the optimizer's metrics.
        """
        settings = self.settings
        lr = _learning_rate(settings, index)
        for group in optimizer.param_groups:
            group["lr"] = lr
        forward_s = backward_s = 0.0
        loss_sum = torch.zeros((), dtype=torch.float32, device=settings.device)
        began_s = started_s = _now_s(settings.device)
        for _ in range(settings.accumulate):
            windows = draw_windows(self._text.values, draws, batch=settings.batch, seq=settings.seq)
            windows = windows.to(settings.device)
            with computing_in(self._compute.dtype):
                logits = model(input_ids=windows[:, :-1]).logits
                loss = cross_entropy(logits.float().reshape(-1, VOCABULARY), windows[:, 1:].reshape(-1))
                forward_done_s = _now_s(settings.device)
                torch.autograd.backward(loss / settings.accumulate)
            loss_sum += loss.detach()
            backward_done_s = _now_s(settings.device)
            forward_s += forward_done_s - started_s
            backward_s += backward_done_s - forward_done_s
            started_s = backward_done_s
        note_metrics()
        started_s = _now_s(settings.device)
        if settings.clip:
            optimizer.clip_grad_norm_(settings.clip)
        optimizer.step()
        optimizer.zero_grad()
        finished_s = _now_s(settings.device)
        return {
            "step": index + 1,
            "loss": loss_sum.item() / settings.accumulate,
            "lr": lr,
            "norm": math.nan,  # until `note_metrics` sets it
            "tokens_per_s": settings.batch * settings.seq * settings.accumulate / (finished_s - began_s),
            "forward_s": forward_s,
            "backward_s": backward_s,
            "step_s": finished_s - started_s,
            "iteration_s": forward_s + backward_s + finished_s - started_s,
        }

    def compare(self, config: offload.OffloadConfig) -> None:
        """Train again with all state in memory, and compare weights and losses with those of `main`."""
        offloaded_weights = self._weights
        gc.collect()  # The first model is in reference cycles; its memory is needed now.
        self.train(config.in_memory(), self.in_memory, "metrics-in-memory.jsonl", "in memory")
        self.comparison = Comparison.of(offloaded_weights, self._weights, self.main.losses, self.in_memory.losses)
        self._weights = {}

    def write(self, paths: Sequence[str]) -> dict[str, Any]:
        """Return the summary of the run; write it, the timeline, the report and pictures if any step was taken.

        `paths` are the places of state, in the order of the config's paths.
        """
        shape, text, comparison = self._shape, self._text, self.comparison
        summary = self.main.summary()
        path_bytes = summary.pop("path_bytes", [])
        sizes = ("numel", "layers", "hidden", "intermediate", "heads")
        summary = {
            "environment": _environment(),
            "settings": {name: value for name, value in vars(self.settings).items() if name not in _NO_SETTINGS},
            "model": {**{name: getattr(shape, name) for name in sizes}, "compute": self._compute.name},
            "text": {
                "source": text.source,
                "files": text.files,
                "bytes": len(text.values),
                "byte_entropy": text.byte_entropy(),
            },
            "output": str(self._folder),
            "interrupted": self.interrupted,
            "error": self.error,
            **summary,
            # Without figures, `path_bytes` is empty.
            "paths": [{"path": path, **moved} for path, moved in zip(paths, path_bytes, strict=False)],
            "in_memory": self.in_memory.summary() if self.in_memory.rows else None,
            "comparison": asdict(comparison) if comparison is not None else None,
            "verdict": comparison.verdict() if comparison is not None else None,
        }
        if self.main.rows:
            timeline, step = self.main.timeline, self.main.rows[-1]["step"]
            (self._folder / "summary.json").write_text(to_json(summary, indent=2) + "\n", encoding="utf-8")
            write_timeline(self._folder, timeline, paths, step=step)
            self._write_report(summary, timeline, paths, step)
            draw_losses(self._folder / "loss.png", self.main.losses, summary["text"]["byte_entropy"], LAST_STEPS)
            draw_lanes(self._folder / "lanes.png", timeline, paths, step=step)
        return summary

    def _write_report(
        self, summary: Mapping[str, Any], timeline: Sequence[Interval], paths: Sequence[str], step: int
    ) -> None:
        """Write the data and the page of the report, if the run got as far as to have one."""
        notes = filter(None, [f"{summary['steps']} steps in {self._folder}", summary["verdict"], summary["error"]])
        report = self.main.report_with_steps([*notes])
        if report is not None:
            write_run(self._folder, report, timeline, paths, step=step)


def _note_metrics(optimizer: Any, record: RunRecord, lines: IO[str]) -> None:
    """Wait for the last step; add the optimizer's metrics to its row, and write the row to `lines`.

    Does nothing if there is no step, or its metrics have been added.
    """
    if not record.rows or f"{OPTIMIZERS}step" in record.rows[-1]:
        return
    record.timeline = optimizer.timeline()  # waits for the step; `metrics` does not
    metrics = optimizer.metrics()
    row = record.rows[-1]
    row["norm"] = float(metrics.get("gradient_norm", math.nan))
    row |= {f"{OPTIMIZERS}{name}": value for name, value in metrics.items()}
    lines.write(to_json(row) + "\n")
    lines.flush()


def _learning_rate(settings: Namespace, step: int) -> float:
    """Return the rate of a step, counted from 0: a short linear warm-up, then a cosine down to a tenth."""
    peak: float = settings.lr
    warmup: int = min(100, max(1, settings.steps // 10))
    if step < warmup:
        return peak * (step + 1) / warmup
    progress: float = (step - warmup) / max(1, settings.steps - warmup)  # from 0 to 1
    # The cosine goes from 1 to -1, so the factor of the peak from 1 to 0.1.
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def _now_s(device: str) -> float:
    """Return the time once the device has done all its work."""
    if not _is_host(device):
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def _check_memory(settings: Namespace, shape: Shape) -> None:
    """Refuse a model whose weights, gradients and logits alone do not fit, before anything is built."""
    item_bytes = 4 if settings.dtype == "fp32" else 2
    weights_and_gradients_bytes = 2 * item_bytes * shape.numel
    logits_bytes = 3 * 4 * VOCABULARY * settings.batch * settings.seq  # fp32: themselves, softmax, gradient
    needed = weights_and_gradients_bytes + logits_bytes
    available = available_bytes()
    if needed > available:
        advice = (
            f"its weights, gradients and logits need {format_bytes(needed)} and {format_bytes(available)} of memory "
            "are available; choose a smaller model, or a smaller --batch or --seq"
        )
        raise ConfigError("--params", f"{shape.numel:,}", advice)


def _offload_config(settings: Namespace, shape: Shape, paths: Sequence[str]) -> offload.OffloadConfig:
    """Return the optimizer's config by the options; without --host-memory that budget is a quarter of the state."""
    updates_in_backward = settings.overlap in ("backward", "both", "auto")
    # Updates in backward are the CPU's: with weights on a GPU, gradients have to leave it during backward.
    gradients_leave_gpu = updates_in_backward and not _is_host(settings.device)
    has_checkpoints = settings.save is not None or settings.resume is not None
    config = offload.OffloadConfig(
        **{**given_settings(settings, "train"), "paths": list(paths)},
        checkpoints_kept=1 if has_checkpoints else 0,
        keep_grads=not gradients_leave_gpu,
    )
    if config.host_memory is not None:
        return config
    # An fp32 weight is its own master, which is no state then. Sizes are bytes of one parameter.
    masters_bytes = FP32.item_bytes if settings.dtype == "fp32" else 0
    item_bytes = EXACT_ADAMW.stored_in(config.format).item_bytes - masters_bytes
    return replace(config, host_memory=int(shape.numel * item_bytes / 4))


@contextlib.contextmanager
def _run_folder(settings: Namespace) -> Iterator[tuple[Path, Sequence[str]]]:
    """Make the run's folder, and one for state in it if no paths are given; yield the run's folder and the paths.

    At the end those of the new folders that are empty are removed, as after an error before the first step.
    """
    if settings.output is None:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        # Numbered, as several runs may begin in one second.
        names = (f"runs/{stamp}" + (f"-{count}" if count else "") for count in range(1000))
        folder = next(path for path in map(Path, names) if not os.path.lexists(path))
    else:
        folder = Path(settings.output)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError("--output", settings.output, "give a folder that is new or empty")
    state = folder / "state"
    deepest = folder if settings.paths else state
    new_folders = [path for path in (deepest, *deepest.parents) if not path.exists()]  # the deepest first
    try:
        deepest.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("--output", str(folder), f"the folder cannot be made: {error.strerror}") from error
    try:
        yield folder, settings.paths or [str(state)]
    finally:
        for new_folder in new_folders:
            with contextlib.suppress(OSError):
                new_folder.rmdir()  # Fails, as it should, unless the folder is empty.


@contextlib.contextmanager
def _reproducible(threads: int | None) -> Iterator[None]:
    """Make torch's own operations repeatable in this block, on `threads` threads (None: as many as before).

    Afterwards torch's settings are as they were; the environment variable for CUDA's library stays set.
    """
    # CUDA's matrix library reads this when it starts.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    threads_before = torch.get_num_threads()
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    deterministic: Any = torch.utils.deterministic
    fill_before = deterministic.fill_uninitialized_memory
    torch.set_num_threads(threads or threads_before)
    torch.use_deterministic_algorithms(True)
    # A debugging aid that deterministic algorithms switch on, and which costs a pass over memory.
    deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.set_num_threads(threads_before)
        torch.use_deterministic_algorithms(was_deterministic)
        deterministic.fill_uninitialized_memory = fill_before


def _check_device(device: str) -> None:
    """Refuse a device that torch does not know, or whose accelerator cannot be used."""
    try:
        on_host = _is_host(device)
    except RuntimeError as error:
        raise ConfigError("--device", device, "give cpu, cuda or cuda:N") from error
    if not on_host:
        accelerator(device, "--device")


def _is_host(device: str) -> bool:
    return torch.device(device).type == "cpu"


def _environment() -> dict[str, Any]:
    """Return versions and facts of the machine, for the summary."""
    return {
        "offload": importlib.metadata.version("offload"),
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "command": sys.argv,
    }
