"""The training loop, for any model that has a loss.

A training can be stopped at any time (signals, `max_train_minutes`) and resumes from its last whole
checkpoint, bit for bit on a CPU. The order of examples depends on the seed alone, not on the
evidence.

    OUTPUT_DIR/losses.jsonl      every step's loss: the same bytes whether or not it was stopped
    OUTPUT_DIR/checkpoint-N/     see `pgra.reader.resume`
"""

import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import send_to_device
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader
from transformers import enable_full_determinism, get_scheduler, set_seed

from pgra.artifacts import write_aside, write_text
from pgra.config import choose
from pgra.core import Context, Worker, gather
from pgra.errors import ModelError
from pgra.lm.load import choose_device
from pgra.progress import Bar
from pgra.reader.arguments import LOSSES_FILE, TrainingArguments
from pgra.reader.fid import IGNORED
from pgra.reader.module import ReaderModule, Trainable, choose_precision
from pgra.reader.resume import (
    Progress,
    Stopper,
    Updates,
    checkpoint_folder,
    last_checkpoint,
    resume,
    save_checkpoint,
    stopped,
)

logger = logging.getLogger(__name__)

_CHUNK = 50  # steps copied from the device at once, and at most lost after a loss that is none


@dataclass(frozen=True)
class TrainResult:
    """The outcome of a training: the best model's folder, and numbers over all its resumed parts.

    `best_step` is that of the best measurement on the dev set, None without measurements;
    `train_loss` the mean over all steps, NaN without any; `seconds` only of this call.
    """

    folder: Path
    steps: int
    best_step: int | None
    best_metric: float | None
    train_loss: float
    seconds: float
    history: list[dict[str, float]]


def fit(
    trainable: Trainable,
    rows: Any,
    arguments: TrainingArguments,
    context: Context,
    *,
    folder: Path,
    evaluate: Callable[[], Mapping[str, float]] | None = None,
    metric: str = "",
) -> TrainResult:
    """Train a model, resuming where an earlier call was stopped, and write it.

    Args:
        trainable: Trained in place; holds the best weights afterwards, or the last where nothing
            is measured.
        rows: The training set: has `len`, gives rows by number.
        arguments: With `max_steps` 0 the model is written as it is.
        context: The device, and the processes that train together.
        folder: Where the main process writes the finished model.
        evaluate: Measures the model as it is on the dev set, never on the test set; None where
            `eval_steps` is 0.
        metric: Which of the measures chooses the checkpoint, the highest value; unless
            `metric_for_best_model` names another.

    Raises:
        ArtifactError: If the run's best checkpoint is lost.
        ConfigError: If there are too few examples, or batches cannot be shared.
        ModelError: If the loss or a weight stops being a number.
        Stopped: If a signal or the time limit asked for it; the same call then resumes.
    """
    start, worker, module = time.monotonic(), context.worker, trainable.module
    device, home = choose_device(context.device), Path(arguments.output_dir)
    arguments.share_batch(worker.world)
    arguments.check_rows(len(rows), worker.world)
    num_steps, epoch_steps = arguments.count_steps(len(rows), worker.world)
    metric = arguments.metric_for_best_model or metric

    (enable_full_determinism if arguments.full_determinism else set_seed)(arguments.seed)
    module.precision = choose_precision(arguments, device)
    model = _distribute(module.to(device).train(), arguments, worker)
    optimizer = trainable.optimizer(arguments)
    warmup = arguments.warmup_steps
    warmup = math.ceil(warmup * num_steps) if warmup < 1 else int(warmup)
    schedule = get_scheduler(arguments.lr_scheduler_type, optimizer, warmup, num_steps)
    updates, needs_best = Updates(optimizer, schedule), arguments.load_best_model_at_end
    progress = resume(home, module, updates, worker, needs_best=needs_best)
    losses = LossLog(home, progress, worker)
    stopper = Stopper(world=worker.world, minutes=arguments.max_train_minutes)
    bar = Bar(
        total=num_steps,
        initial=progress.step,
        desc="train",
        unit="step",
        disable=not context.shows_progress or progress.step >= num_steps,
    )
    logger.info(
        "training: %d examples a step (%d processes, %d at once on each) in %s",
        *(arguments.total_train_batch_size, worker.world),
        *(arguments.per_device_train_batch_size, module.precision),
    )

    with stopper.listening(), module.rounding(), bar, tracking(arguments, device) as track:
        while progress.step < num_steps:
            epoch, done = divmod(progress.step, epoch_steps)
            batches = load_epoch(rows, trainable.collator(device), arguments, worker, epoch, done)
            for _ in range(done, min(epoch_steps, done + num_steps - progress.step)):
                # Forward and backward, for each of the batches that are accumulated.
                batches_of_step = list(islice(batches, arguments.num_accumulated(worker.world)))
                num_tokens = count_tokens(batches_of_step, device, worker)
                parts = []
                for batch in batches_of_step:
                    is_last = batch is batches_of_step[-1]
                    with nullcontext() if is_last or model is module else model.no_sync():
                        with module.deciding():
                            output = model(
                                **send_to_device(batch, device, non_blocking=True),
                                num_items_in_batch=num_tokens,
                            )
                        loss = output.loss * worker.world  # gradients are averaged over processes
                        loss.backward()
                    parts.append(loss.detach())

                # The step.
                norm = clip_grad_norm_(module.parameters(), arguments.max_grad_norm or math.inf)
                rate = optimizer.param_groups[0]["lr"]
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                progress.step += 1
                losses.add(parts, rate)
                bar.update()

                # What is due after it: log, measure, save, stop.
                step = progress.step
                code = stopper.agreed(has_more=step < num_steps)
                is_measured = evaluate is not None and _is_due(step, arguments.eval_steps)
                is_end = step == num_steps and bool(arguments.save_steps)
                is_saved = bool(code) or is_end or _is_due(step, arguments.save_steps)
                if is_measured or is_saved:
                    losses.flush()
                    check_weights(module, step, home)
                if step % arguments.logging_steps == 0:
                    line = {"loss": losses.mean_since_log(), "grad_norm": float(norm)}
                    line |= {"learning_rate": rate, "epoch": step / epoch_steps}
                    progress.add(line)
                    track(line, step=step)
                    bar.set_postfix(loss=f"{line['loss']:.3f}", refresh=False)
                if is_measured and evaluate is not None:
                    values = evaluate()
                    choose("metric_for_best_model", metric, values)
                    progress.keep_best(values[metric])
                    line = {f"dev_{name}": value for name, value in values.items()}
                    progress.add(line)
                    track(line, step=step)
                    shown = ", ".join(f"{name} {value:.4f}" for name, value in values.items())
                    bar.tell(f"step {step}: dev {shown}")
                if is_saved:
                    save_checkpoint(home, trainable, progress, updates, worker)
                    context.barrier()
                if code:
                    raise stopped(code, f"after step {step} of {num_steps}")
        losses.flush()
        if needs_best and progress.best_step not in (None, num_steps):
            module.load_weights(checkpoint_folder(home, int(str(progress.best_step))))
        if worker.is_main:
            with write_aside(folder) as aside:
                trainable.save(aside)
        context.barrier()
        if code := stopper.agreed(has_more=False):
            raise stopped(code, "after training")
    return TrainResult(
        folder=folder,
        steps=progress.step,
        best_step=progress.best_step,
        best_metric=progress.best_value,
        train_loss=losses.mean(),
        seconds=time.monotonic() - start,
        history=progress.history,
    )


def _is_due(step: int, every: int | None) -> bool:
    return bool(every) and step % int(every or 1) == 0


def _distribute(module: ReaderModule, arguments: TrainingArguments, worker: Worker) -> Any:
    """Return the module as its processes train it together."""
    if arguments.gradient_checkpointing:
        inner = module.model  # transformers before 5.23 has the second name alone
        both = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
        next(getattr(inner, name) for name in both if hasattr(inner, name))()
    if worker.world == 1:
        return module
    ids = [module.device] if module.device.type == "cuda" else None
    return DistributedDataParallel(module, device_ids=ids)


# Batches.


def load_epoch(
    rows: Any,
    collate: Callable[[Sequence[Any]], dict[str, Any]],
    arguments: TrainingArguments,
    worker: Worker,
    epoch: int,
    done: int,
) -> Iterator[dict[str, Any]]:
    """Return this process's batches of an epoch, but for those of its first `done` steps."""
    draw = torch.Generator().manual_seed(arguments.seed + epoch)
    order = torch.randperm(len(rows), generator=draw).tolist()
    size = int(arguments.per_device_train_batch_size or 1)
    together = size * worker.world
    if arguments.dataloader_drop_last:
        order = order[: len(order) // together * together]
    elif worker.world > 1:  # all have as many batches
        order = list(islice(cycle(order), math.ceil(len(order) / together) * together))
    batches = [order[first : first + size] for first in range(0, len(order), size)]
    own = batches[worker.rank :: worker.world][done * arguments.num_accumulated(worker.world) :]
    loader = DataLoader(
        rows,
        batch_sampler=own,
        collate_fn=collate,
        num_workers=arguments.dataloader_num_workers,
        pin_memory=torch.cuda.is_available(),
    )
    # A loader draws a number when an epoch begins: not once more in its middle.
    with torch.random.fork_rng(devices=[], enabled=done > 0):
        return iter(loader)


def count_tokens(
    batches: Sequence[Mapping[str, Any]], device: torch.device, worker: Worker
) -> Tensor:
    """Count the target tokens of a step, of all processes, ()."""
    count = torch.stack([(batch["labels"] != IGNORED).sum() for batch in batches]).sum()
    count = count.to(device, non_blocking=True)
    if worker.world > 1:
        dist.all_reduce(count)
    return count


# What is kept of a training.


def check_weights(module: ReaderModule, step: int, home: Path) -> None:
    """Raise a ModelError if a weight is not a number; such a sum neither."""
    sums = [p.detach().float().sum() for p in module.parameters() if p.requires_grad]
    if not torch.stack(sums).isfinite().all():
        raise ModelError(f"a weight is not a number after step {step}: {_way_out(home)}")


def _way_out(home: Path) -> str:
    last = last_checkpoint(home)
    found = "there is no checkpoint yet." if last is None else f"the last good one is {last}."
    return f"{found} Lower the learning rate"


class LossLog:
    """Keeps every step's loss in the progress, and writes `losses.jsonl` by the chunk.

    A loss stays on its device until several are copied at once, so that no step waits for a number.
    All processes must call `add` and `flush` together; the main process writes.
    """

    def __init__(self, home: Path, progress: Progress, worker: Worker) -> None:
        """Cut the file back to the progress."""
        self._home, self._progress, self._worker = home, progress, worker
        self._pending: list[tuple[Tensor, float]] = []  # steps, still on the device
        if worker.is_main:
            write_text(home / LOSSES_FILE, self._lines(0))

    def add(self, parts: Sequence[Tensor], learning_rate: float) -> None:
        """Take a step's accumulated losses of this process, each divided by the step's tokens."""
        self._pending.append((torch.stack(list(parts)).float().sum(), learning_rate))
        if len(self._pending) >= _CHUNK:
            self.flush()

    def flush(self) -> None:
        """Gather and write the new losses; one that is no number is a ModelError."""
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        losses, first = self._progress.losses, len(self._progress.losses)
        own = torch.stack([total for total, _ in pending]).double().cpu().tolist()
        # A sum over the wire would depend on how many steps are sent at once.
        shares = zip(*gather([own], self._worker), strict=True)
        broken = None
        for values, (_, rate) in zip(shares, pending, strict=True):
            loss = sum(values) / len(values)
            if not math.isfinite(loss):
                broken = loss
                break
            losses.append(loss)
            self._progress.rates.append(rate)
        if self._worker.is_main:
            with (self._home / LOSSES_FILE).open("a", encoding="utf-8") as file:
                file.write(self._lines(first))
        if broken is not None:
            step = len(losses) + 1
            raise ModelError(f"the loss is {broken} at step {step}: {_way_out(self._home)}")

    def mean(self, after: int = 0) -> float:
        """Return the mean loss of the written steps after a step."""
        losses = self._progress.losses[after:]
        return math.fsum(losses) / len(losses) if losses else math.nan

    def mean_since_log(self) -> float:
        """Return the mean loss of the steps since the last line of the log."""
        self.flush()
        logged = [line["step"] for line in self._progress.history if "loss" in line]
        return self.mean(after=int(max(logged, default=0)))

    def _lines(self, first: int) -> str:
        """Write steps; a float's repr is exact."""
        pairs = zip(self._progress.losses, self._progress.rates, strict=True)
        rows = [
            {"step": number, "loss": loss, "learning_rate": rate}
            for number, (loss, rate) in enumerate(pairs, start=1)
        ]
        return "".join(f"{json.dumps(row)}\n" for row in rows[first:])


def check_trackers(names: Sequence[str] | None) -> None:
    """Raise a ConfigError if a tracker is unknown, or its package is not installed."""
    known = [str(name) for name in get_available_trackers()]
    for name in names or ():
        choose("tracker (of those that are installed)", name, known)


@contextmanager
def tracking(arguments: TrainingArguments, device: torch.device) -> Iterator[Callable[..., object]]:
    """Open the trackers; what is yielded sends them a line, and the `step`."""
    if not arguments.report_to:
        yield lambda *_, **__: None
        return
    home = Path(arguments.output_dir)
    accelerator = Accelerator(
        cpu=device.type == "cpu", log_with=arguments.report_to, project_dir=home
    )
    accelerator.init_trackers("pgra", init_kwargs={"wandb": {"name": home.name}})
    try:
        yield accelerator.log
    finally:
        for tracker in accelerator.trackers:
            tracker.finish()
