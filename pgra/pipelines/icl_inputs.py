"""What in-context learning starts from: a pool of examples, queries, and what compares them."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from pgra.config import DataArguments, RerankArguments, choose, read_yaml
from pgra.data.generation import GenerationTask, generation_task_names, load_generation_task
from pgra.data.references import Reference, load_references
from pgra.data.splits import check_pool_arguments, load_pool
from pgra.data.tasks import Task, load_task, task_names
from pgra.errors import ConfigError, DataError
from pgra.icl.arguments import BM25, PROMPTED, IclArguments, SelectionArguments
from pgra.icl.likeness import Likeness, PromptedStates, VectorLikeness, WordLikeness
from pgra.icl.opening import CompleterArguments
from pgra.io import digest
from pgra.memory.label_arguments import PromptMemoryArguments
from pgra.pipelines.pgra import prompt_template
from pgra.prompts.fewshot import FewShotPrompt, build_prompt
from pgra.prompts.template import PromptTemplate
from pgra.rerank import open_prompted_encoder
from pgra.retrieval.dense import load_encoder
from pgra.retrieval.neighbors import Neighbors
from pgra.retrieval.store import examples_digest
from pgra.types import Example, Json

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
    memory: PromptMemoryArguments = field(default_factory=PromptMemoryArguments)

    @property
    def artifacts(self) -> Path:
        """Give the root of all products."""
        return Path(self.icl.artifacts_dir)

    @property
    def system(self) -> str:
        """Name the system as reports do: icl-knn, icl-farthest, ...; the vote is its own."""
        kind = "vote" if self.icl.decide_by == "vote" else "icl"
        who = "farthest" if self.selection.farthest else self.selection.exemplars
        memory = "" if self.memory.memory is None else "-memory"
        return f"{kind}-{who}{memory}"

    @property
    def folder(self) -> Path:
        """Give the run's folder, its places filled in."""
        task = (self.data.task or "").rpartition("/")[2].removesuffix(".yaml")
        name = self.icl.output_dir.replace("{task}", task)
        return Path(name.replace("{system}", self.system))

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
        if self.memory.memory is not None:
            deciding["memory"] = asdict(self.memory)
        return {"data": asdict(self.data), **deciding, "runtime": runtime}


@dataclass(frozen=True)
class IclInputs:
    """A task's pool and queries.

    Attributes:
        task: The task: its labels are chosen, or its answers written.
        pool: Examples to choose exemplars from.
        queries: What is asked.
        shared: How many queries' texts stand in the pool's source too.
        references: What is right for each query, where answers are written; else none.
    """

    task: Task | GenerationTask
    pool: list[Example]
    queries: list[Example]
    shared: int = 0
    references: Sequence[Reference] = ()

    @property
    def labels(self) -> tuple[str, ...]:
        """Give the task's labels; none where answers are written."""
        return self.task.labels if isinstance(self.task, Task) else ()

    @property
    def metric(self) -> str:
        """Give the headline metric."""
        return self.task.metric if isinstance(self.task, Task) else self.task.metrics[0]

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """Give digests of pool and queries, with their labels, named as other runs name them."""
        parts = {"train": self.pool, "test": self.queries}
        found: dict[str, Json] = {
            name: digest([examples_digest(part), [example.label for example in part]])
            for name, part in parts.items()
        }
        if self.references:
            found["answers"] = digest([list(reference.answers) for reference in self.references])
        return found


def load_any_task(name: str) -> Task | GenerationTask:
    """Read a task by its name or YAML: one with labels, or one whose answers are written.

    Raises:
        ConfigError: If there is none, or its YAML contradicts itself.
    """
    if Path(name).suffix in (".yaml", ".yml"):
        is_written = "kind" in read_yaml(Path(name))
        return load_generation_task(name) if is_written else load_task(name)
    if name in generation_task_names():
        return load_generation_task(name)
    choose("task", name, [*task_names(), *generation_task_names()])
    return load_task(name)


def read_inputs(run: IclRun) -> IclInputs:
    """Read a task's pool and queries.

    Raises:
        ConfigError: If no task is named, or there is none of that name.
        DataError: If the data cannot be read.
    """
    if run.data.task is None:
        raise ConfigError("--task is missing: name one (pgra data lists them), or give a YAML")
    task, name = load_any_task(run.data.task), run.icl.query_dataset_name
    if isinstance(task, Task):
        splits = load_pool(task, run.data, query_dataset_name=name)
        shared = int(str(splits.notes["test_rows_in_train"]))
        return IclInputs(task, splits.train, splits.test, shared)
    check_pool_arguments(run.data, name)
    data = run.data if name is None else replace(run.data, test_file=name)
    found = load_references(task, data)
    pool, queries = ([one.example for one in part] for part in (found.pool, found.queries))
    texts = {example.text for example in pool}
    shared = sum(query.text in texts for query in queries)
    return IclInputs(task, pool, queries, shared, found.queries)


def open_likeness(run: IclRun, inputs: IclInputs) -> Likeness | None:
    """Open what compares queries with the pool; None where nothing is compared.

    Raises:
        ConfigError: If the encoder is a prompted LM and that LM is behind an endpoint.
        ModelError: If the encoder cannot be found or loaded.
    """
    args, pool, device = run.selection, inputs.pool, run.icl.device
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
    prompt = _encoder_prompt(inputs, run.selection.prompt_exemplars)
    args = RerankArguments(lm=name, lm_dtype=run.completer.lm_dtype)
    return PromptedStates(open_prompted_encoder(args, prompt, device=run.icl.device))


def _encoder_prompt(inputs: IclInputs, count: int) -> FewShotPrompt:
    """Write the one prompt under which all examples are compared, as the reranker's."""
    task, pool = inputs.task, inputs.pool
    if isinstance(task, Task):
        template = prompt_template(task)
        return build_prompt(template, pool, task.prompt_words, num_exemplars=count)
    body, _, answer = task.frame.rpartition("}")
    template = PromptTemplate(f"{body}}}", answer.strip(), task.inputs)
    words = {str(example.label): str(example.label) for example in pool}
    return build_prompt(template, pool, words, num_exemplars=count, method="random")


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
    row_of = {example.id: row for row, example in enumerate(inputs.pool)}
    rows: list[int] = []
    for number, word in enumerate(lines[:count], 1):
        row = row_of.get(word, int(word) if word.isdecimal() else -1)
        if not 0 <= row < len(inputs.pool):
            raise DataError(
                f"{path}, line {number}: '{word}' is no example of the pool: give a row from 0 to "
                f"{len(inputs.pool) - 1}, or an id such as {inputs.pool[0].id}"
            )
        if row in rows:
            raise DataError(f"{path}, line {number}: '{word}' stands there twice: leave one out")
        rows.append(row)
    return tuple(rows)
