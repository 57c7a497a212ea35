"""What in-context learning starts from: a pool of examples, queries, and what compares them."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from pgra.config import DataArguments, RerankArguments
from pgra.data.splits import Splits, load_pool
from pgra.data.tasks import Task, load_task
from pgra.errors import ConfigError, DataError
from pgra.icl.arguments import BM25, PROMPTED, IclArguments, SelectionArguments
from pgra.icl.likeness import Likeness, PromptedStates, VectorLikeness, WordLikeness
from pgra.icl.opening import CompleterArguments
from pgra.io import digest
from pgra.pipelines.pgra import prompt_template
from pgra.prompts.fewshot import build_prompt
from pgra.rerank import open_prompted_encoder
from pgra.retrieval.dense import load_encoder
from pgra.retrieval.neighbors import Neighbors
from pgra.retrieval.store import examples_digest
from pgra.types import Json

# Of these sections, what decides no prediction: where, how fast, how often.
_RUNTIME = {
    *("artifacts_dir", "output_dir", "device", "seeds", "exemplar_seed", "base_url"),
    *("max_parallel_calls", "requests_per_minute", "max_retries", "request_timeout"),
    *("price_per_million_input", "price_per_million_output", "lm_device_map", "lm_batch_tokens"),
}


@dataclass(frozen=True, kw_only=True)
class IclRun:
    """All arguments of one run, or of several that differ in their seed."""

    data: DataArguments
    completer: CompleterArguments
    selection: SelectionArguments
    icl: IclArguments

    @property
    def artifacts(self) -> Path:
        """Give the root of all products."""
        return Path(self.icl.artifacts_dir)

    @property
    def system(self) -> str:
        """Name the system as reports do: icl-knn, icl-random, ...; the vote is its own."""
        kind = "vote" if self.icl.decide_by == "vote" else "icl"
        return f"{kind}-{self.selection.exemplars}"

    @property
    def folder(self) -> Path:
        """Give the run's folder, its places filled in."""
        task = (self.data.task or "").rpartition("/")[2].removesuffix(".yaml")
        name = self.icl.output_dir.replace("{task}", task)
        return Path(name.replace("{exemplars}", self.selection.exemplars))

    def sections(self) -> dict[str, Json]:
        """Give all arguments as `arguments.json` tells them: apart what decides nothing."""
        parts = {name: asdict(getattr(self, name)) for name in ("completer", "selection", "icl")}
        deciding: dict[str, Json] = {
            section: {name: value for name, value in values.items() if name not in _RUNTIME}
            for section, values in parts.items()
        }
        runtime = {
            name: value
            for values in parts.values()
            for name, value in values.items()
            if name in _RUNTIME
        }
        return {"data": asdict(self.data), **deciding, "runtime": runtime}


@dataclass(frozen=True)
class IclInputs:
    """A task's pool and queries.

    Attributes:
        task: The task.
        splits: The pool as train, the queries as test.
    """

    task: Task
    splits: Splits

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """Give digests of pool and queries, with their labels, named as other runs name them."""
        parts = {"train": self.splits.train, "test": self.splits.test}
        return {
            name: digest([examples_digest(part), [example.label for example in part]])
            for name, part in parts.items()
        }


def read_inputs(run: IclRun) -> IclInputs:
    """Read a task's pool and queries.

    Raises:
        ConfigError: If no task is named, or there is none of that name.
        DataError: If the data cannot be read.
    """
    if run.data.task is None:
        raise ConfigError("--task is missing: name one (pgra data lists them), or give a YAML")
    task = load_task(run.data.task)
    name = run.icl.query_dataset_name
    return IclInputs(task, load_pool(task, run.data, query_dataset_name=name))


def open_likeness(run: IclRun, inputs: IclInputs) -> Likeness | None:
    """Open what compares queries with the pool; None where nothing is compared.

    Raises:
        ConfigError: If the encoder is a prompted LM and that LM is behind an endpoint.
        ModelError: If the encoder cannot be found or loaded.
    """
    args, pool, device = run.selection, inputs.splits.train, run.icl.device
    if not args.compares:
        return None
    if args.encoder == BM25:
        return WordLikeness(pool)
    root = run.artifacts / "neighbors" / inputs.task.name
    if args.encoder.partition(":")[0] == PROMPTED:
        states = _open_states(run, inputs)
        return VectorLikeness(Neighbors(lambda: states, pool, root), args.likeness)
    load = partial(load_encoder, args.encoder_arguments(), device)
    return VectorLikeness(Neighbors(load, pool, root), args.likeness)


def _open_states(run: IclRun, inputs: IclInputs) -> PromptedStates:
    name = run.selection.encoder.partition(":")[2] or run.completer.lm
    if not run.selection.encoder.partition(":")[2] and run.completer.is_remote:
        raise ConfigError(
            f"encoder 'prompted' compares by the states of --lm {run.completer.lm}, and an "
            "endpoint gives none: name another LM, such as --encoder prompted:bundled:smollm2-135m"
        )
    prompt = build_prompt(
        prompt_template(inputs.task),
        inputs.splits.train,
        inputs.task.prompt_words,
        num_exemplars=run.selection.prompt_exemplars,
    )
    args = RerankArguments(lm=name, lm_dtype=run.completer.lm_dtype)
    return PromptedStates(open_prompted_encoder(args, prompt, device=run.icl.device))


def read_fixed(path: Path, inputs: IclInputs, count: int) -> tuple[int, ...]:
    """Read which examples all queries get: an example a line, by row or by id.

    Args:
        path: The file.
        inputs: The pool.
        count: How many are wanted: the first so many lines.

    Raises:
        DataError: If the file cannot be read, has too few lines, or names no example of the pool,
            or one twice.
    """
    try:
        lines = path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read exemplar_file {path}: {error}") from None
    if len(lines) < count:
        raise DataError(
            f"{path} names {len(lines)} exemplars, and num_exemplars is {count}: lower it, or add "
            "some"
        )
    row_of = {example.id: row for row, example in enumerate(inputs.splits.train)}
    rows: list[int] = []
    for number, word in enumerate(lines[:count], 1):
        row = row_of.get(word, int(word) if word.isdecimal() else -1)
        if not 0 <= row < len(inputs.splits.train):
            raise DataError(
                f"{path}, line {number}: '{word}' is no example of the pool: give a row from 0 to "
                f"{len(inputs.splits.train) - 1}, or an id such as {inputs.splits.train[0].id}"
            )
        if row in rows:
            raise DataError(f"{path}, line {number}: '{word}' stands there twice: leave one out")
        rows.append(row)
    return tuple(rows)
