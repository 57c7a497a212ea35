"""The training loop, for any model that has a loss.

A training can be stopped at any time (signals, `max_train_minutes`) and resumes from its last whole
checkpoint, bit for bit on a CPU. The order of examples depends on the seed alone, not on the
evidence.

    OUTPUT_DIR/losses.jsonl      every step's loss: the same bytes whether or not it was stopped
    OUTPUT_DIR/checkpoint-N/     see `pgra.reader.resume`
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader
from transformers import get_scheduler, set_seed

from pgra.artifacts import write_aside, write_lines
from pgra.context import Context
from pgra.errors import ModelError
from pgra.lm.load import choose_device
from pgra.parallel import Worker, gather
from pgra.progress import Bar
from pgra.reader.arguments import TrainingArguments
from pgra.reader.fid import IGNORED, FusionReader
from pgra.reader.predict import Collate, T5Classifier
from pgra.reader.resume import (
    Progress,
    Stopper,
    checkpoint_folder,
    resume,
    save_checkpoint,
    stopped,
)
from pgra.run_folder import LOSSES_FILE

logger = logging.getLogger(__name__)

_CHUNK = (
    50  # steps copied from the device at once, and at most so many are lost if the loss becomes NaN
)


def make_optimizer(module: FusionReader, arguments: TrainingArguments) -> torch.optim.Optimizer:
    """Return AdamW, which decays all weights but norms and biases."""
    assert arguments.learning_rate is not None  # the method chose it
    weights: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, weight in module.named_parameters():
        if weight.requires_grad:
            weights["bias" not in name and "norm" not in name.lower()].append(weight)
    return torch.optim.AdamW(
        [
            {"params": weights[True], "weight_decay": arguments.weight_decay},
            {"params": weights[False], "weight_decay": 0.0},
        ],
        lr=arguments.learning_rate,
        eps=arguments.adam_epsilon,
        fused=True,
    )


def uses_bf16(arguments: TrainingArguments, device: torch.device) -> bool:
    """Whether a device trains in bfloat16; a ModelError if that is asked for, and it has none."""
    is_on_gpu = device.type == "cuda"
    # Torch emulates bfloat16 on any GPU, slower than float32.
    has_bf16 = is_on_gpu and torch.cuda.is_bf16_supported(including_emulation=False)
    if arguments.bf16 and is_on_gpu and not has_bf16:
        raise ModelError(f"{device} has no bfloat16: use --no_bf16")
    return has_bf16 if arguments.bf16 is None else arguments.bf16


def fit(
    trainable: T5Classifier,
    rows: Any,
    arguments: TrainingArguments,
    context: Context,
    *,
    folder: Path,
    evaluate: Callable[[], Mapping[str, float]],
    metric: str,
) -> Progress:
    """Train a model, resuming where an earlier call was stopped, and write it.

    What is returned is of all its resumed parts.

    Args:
        trainable: Trained in place; holds the best weights afterwards, or the last where nothing
            is measured.
        rows: The training set: has `len`, gives rows by number.
        arguments: With `max_steps` 0 the model is written as it is.
        context: The device, and the processes that train together.
        folder: Where the main process writes the finished model.
        evaluate: Measures the model as it is on the dev set, never on the test set.
        metric: Which of the measures chooses the checkpoint, the highest value.

    Raises:
        ArtifactError: If the run's best checkpoint is lost.
        ConfigError: If there are too few examples, or batches cannot be shared.
        ModelError: If the loss or a weight stops being a number.
        Stopped: If a signal or the time limit asked for it; the same call then resumes.
    """
    worker = context.worker
    module = trainable.module
    device = choose_device(context.device)
    home = Path(arguments.output_dir)
    num_sharing = arguments.share_batch(worker.world)
    num_steps, epoch_steps = arguments.count_steps(len(rows), num_sharing)
    num_accumulated = arguments.num_accumulated(num_sharing)
    # A process beyond those that share a step reads what another does, and adds nothing.
    sharer = Worker(worker.rank % num_sharing, num_sharing)
    weight = worker.world if worker.rank < num_sharing else 0  # gradients are averaged

    set_seed(arguments.seed)
    module.is_half = uses_bf16(arguments, device)
    model = _distribute(module.to(device).train(), arguments, worker)
    optimizer = make_optimizer(module, arguments)
    schedule = get_scheduler(
        arguments.lr_scheduler_type, optimizer, arguments.warmup_steps, num_steps
    )
    updates = {"optimizer": optimizer, "schedule": schedule}
    needs_best = arguments.load_best_model_at_end
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
        "training: %d examples a step (%d processes, %d at once on each)%s",
        arguments.total_train_batch_size,
        num_sharing,
        arguments.per_device_train_batch_size,
        " in bfloat16" if module.is_half else "",
    )

    with stopper.listening(), bar, logging_to(arguments, device, progress) as log:
        while progress.step < num_steps:
            epoch, done = divmod(progress.step, epoch_steps)
            batches = load_epoch(rows, trainable.collator(device), arguments, sharer, epoch, done)
            for _ in range(done, min(epoch_steps, done + num_steps - progress.step)):
                # Forward and backward, for each of the batches that are accumulated.
                batches_of_step = list(islice(batches, num_accumulated))
                num_tokens = count_tokens(batches_of_step, device, worker, weight)
                parts = []
                for batch in batches_of_step:
                    is_last = batch is batches_of_step[-1]
                    with nullcontext() if is_last or model is module else model.no_sync():
                        with module.deciding():
                            output = model(
                                **send_to_device(batch, device, non_blocking=True),
                                num_items_in_batch=num_tokens,
                            )
                        loss = output.loss * weight
                        loss.backward()
                    parts.append(loss.detach())

                # The step.
                norm = clip_grad_norm_(module.parameters(), arguments.max_grad_norm or math.inf)
                rate = schedule.get_last_lr()[0]
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                progress.step += 1
                losses.add(parts)
                bar.update()

                # What is due after it: log, measure, save, stop.
                step = progress.step
                code = stopper.stop_code(has_more=step < num_steps)
                is_measured = _is_due(step, arguments.eval_steps)
                is_end = step == num_steps and bool(arguments.save_steps)
                is_saved = bool(code) or is_end or _is_due(step, arguments.save_steps)
                if is_measured or is_saved:
                    losses.flush()
                    check_weights(module, step)
                if step % arguments.logging_steps == 0:
                    losses.flush()
                    mean = fmean(progress.losses[-arguments.logging_steps :])
                    values = {"loss": mean, "grad_norm": float(norm)}
                    log({**values, "learning_rate": rate, "epoch": step / epoch_steps})
                    bar.set_postfix(loss=f"{mean:.3f}", refresh=False)
                if is_measured:
                    measured = evaluate()
                    progress.keep_best(measured[metric])
                    log({f"dev_{name}": value for name, value in measured.items()})
                    dev_values = ", ".join(
                        f"{name} {value:.4f}" for name, value in measured.items()
                    )
                    bar.tell(f"step {step}: dev {dev_values}")
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
        if code := stopper.stop_code(has_more=False):
            raise stopped(code, "after training")
    return progress


def _is_due(step: int, every: int | None) -> bool:
    return bool(every) and step % int(every or 1) == 0


def _distribute(module: FusionReader, arguments: TrainingArguments, worker: Worker) -> Any:
    """Return the module as it is trained, alone or by several processes."""
    if arguments.gradient_checkpointing:
        old = module.model.gradient_checkpointing_enable  # its name in transformers before 5.23
        getattr(module.model, "activation_checkpointing_enable", old)()
    if arguments.torch_compile:
        module.compile_layers(dynamic=True)  # one kernel for all lengths
    if worker.world == 1:
        return module
    ids = [module.device] if module.device.type == "cuda" else None
    return DistributedDataParallel(module, device_ids=ids)


# Batches.


def load_epoch(
    rows: Any,
    collate: Collate,
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
    order = order[: len(order) // together * together]
    batches = [order[first : first + size] for first in range(0, len(order), size)]
    share = batches[worker.rank :: worker.world]
    share = share[done * arguments.num_accumulated(worker.world) :]
    loader = DataLoader(
        rows, batch_sampler=share, collate_fn=collate, pin_memory=torch.cuda.is_available()
    )
    # A loader draws a number when an epoch begins: not once more in its middle.
    with torch.random.fork_rng(devices=[], enabled=done > 0):
        return iter(loader)


def count_tokens(
    batches: Sequence[Mapping[str, Any]], device: torch.device, worker: Worker, weight: int
) -> Tensor:
    """Count the target tokens of a step, of all processes but those of weight 0, ()."""
    count = torch.stack([(batch["labels"] != IGNORED).sum() for batch in batches]).sum()
    count = (count * bool(weight)).to(device, non_blocking=True)
    if worker.world > 1:
        dist.all_reduce(count)
    return count


# What is kept of a training.


def check_weights(module: FusionReader, step: int) -> None:
    """Raise a ModelError if a weight is infinite or not a number: then its sum is too."""
    sums = [p.detach().float().sum() for p in module.parameters() if p.requires_grad]
    if not torch.stack(sums).isfinite().all():
        raise ModelError(f"a weight is not a number after step {step}: lower the learning rate")


class LossLog:
    """Keeps every step's loss in the progress, and in `losses.jsonl`.

    A loss stays on its device until several are copied at once, so that no step waits for a number.
    All processes must call `add` and `flush` together; the main process writes.
    """

    def __init__(self, home: Path, progress: Progress, worker: Worker) -> None:
        self._path = home / LOSSES_FILE
        self._progress = progress
        self._worker = worker
        self._pending: list[Tensor] = []  # losses of steps, still on the device

    def add(self, parts: Sequence[Tensor]) -> None:
        """Take a step's accumulated losses of this process, each divided by the step's tokens."""
        self._pending.append(torch.stack(list(parts)).float().sum())
        if len(self._pending) >= _CHUNK:
            self.flush()

    def flush(self) -> None:
        """Gather and write the losses; a loss that is not finite is a ModelError."""
        losses = self._progress.losses
        means: list[float] = []
        if self._pending:
            pending = torch.stack(self._pending).double().cpu().tolist()
            # A sum over the wire would depend on how many steps are sent at once.
            shares = zip(*gather([pending], self._worker), strict=True)
            means = [sum(values) / len(values) for values in shares]
        self._pending = []
        good = next((i for i, loss in enumerate(means) if not math.isfinite(loss)), len(means))
        losses += means[:good]
        if self._worker.is_main:  # a float's repr is exact
            rows = enumerate(losses, start=1)
            write_lines(self._path, [{"step": step, "loss": loss} for step, loss in rows])
        if good < len(means):
            step = len(losses) + 1
            raise ModelError(f"the loss is {means[good]} at step {step}: lower the learning rate")


@contextmanager
def logging_to(
    arguments: TrainingArguments, device: torch.device, progress: Progress
) -> Iterator[Callable[[Mapping[str, float]], None]]:
    """Open the trackers; what is yielded sends them a line of this step."""
    home = Path(arguments.output_dir)
    trackers = []
    if arguments.report_to:
        accelerator = Accelerator(
            cpu=device.type == "cpu", log_with=arguments.report_to, project_dir=home
        )
        accelerator.init_trackers("pgra", init_kwargs={"wandb": {"name": home.name}})
        trackers = accelerator.trackers

    def log(line: Mapping[str, float]) -> None:
        for tracker in trackers:
            tracker.log(line, step=progress.step)

    try:
        yield log
    finally:
        for tracker in trackers:
            tracker.finish()
