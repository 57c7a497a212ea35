"""What KATE starts from: pool, queries, comparison, LM, and a memory of corrections."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path

from tqdm import tqdm

from pgra.artifacts import digest
from pgra.config import DataArguments, RerankArguments, choose, read_yaml
from pgra.core import ALONE, Context, Example, Json
from pgra.data.examples import check_pool_arguments, load_pool
from pgra.data.references import Reference, load_references
from pgra.data.tasks import (
    GenerationTask,
    Task,
    generation_task_names,
    load_generation_task,
    load_task,
    task_names,
)
from pgra.errors import ConfigError
from pgra.exemplars import PROMPTED, SelectionArguments
from pgra.exemplars.prompt import build_prompt
from pgra.exemplars.selection import ExemplarPool, Selector, open_selector
from pgra.exemplars.similarity import PromptedStates, Similarity, open_similarity
from pgra.lm.base import CompleterArguments, LanguageModel
from pgra.lm.base import open_lm as open_named_lm
from pgra.memory.labels import Correction, LabelMemory, PromptMemoryArguments
from pgra.memory.prompts import as_data, clarify
from pgra.methods.answers import Decider, TextWriter, WordScorer, WordWriter
from pgra.methods.kate_arguments import IclArguments
from pgra.methods.pgra import prompt_template
from pgra.prompts.fewshot import FewShotPrompt, line_format, task_format
from pgra.prompts.template import PromptTemplate
from pgra.rerank.states import open_prompted_encoder
from pgra.retrieval.neighbors import LEAK_RULE, text_key
from pgra.retrieval.shards import examples_digest

# Of these sections, what decides no prediction: where, how fast, how often.
_RUNTIME = {
    *("artifacts_dir", "output_dir", "device", "seeds", "exemplar_seed", "base_url"),
    *("max_parallel_calls", "requests_per_minute", "max_retries", "request_timeout"),
    *("price_per_million_input", "price_per_million_output", "lm_device_map", "lm_batch_tokens"),
    "fast_kernels",
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


def open_likeness(run: IclRun, inputs: IclInputs) -> Similarity | None:
    """Open what compares queries with the pool; None where nothing is compared.

    Raises:
        ConfigError: If the encoder is a prompted LM and that LM is behind an endpoint.
        ModelError: If the encoder cannot be found or loaded.
    """
    args = run.selection
    if not args.compares:
        return None
    states = _open_states(run, inputs) if args.encoder.partition(":")[0] == PROMPTED else None
    return open_similarity(
        args,
        inputs.pool,
        run.artifacts / "neighbors" / inputs.task.name,
        device=run.icl.device,
        open_encoder=None if states is None else lambda: states,
    )


def _open_states(run: IclRun, inputs: IclInputs) -> PromptedStates:
    name = run.selection.encoder.partition(":")[2] or run.completer.lm
    if not run.selection.encoder.partition(":")[2] and run.completer.is_remote:
        raise ConfigError(
            f"encoder 'prompted' compares by the states of --lm {run.completer.lm}, and an "
            "endpoint gives none: name another LM, such as --encoder prompted:bundled:smollm2-135m"
        )
    prompt = _encoder_prompt(inputs, run.selection.prompt_exemplars)
    args = RerankArguments(lm=name, lm_dtype=run.completer.lm_dtype)
    return PromptedStates(open_prompted_encoder(args, prompt, Context(device=run.icl.device)))


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


# What a memory of corrections adds to prompts: KATE with memory.
#
# A corrected label is a labelled example whose neighborhood is known: it stands first among the
# exemplars of a near query, in the place of the last one. Free feedback stands behind the query, as
# MemPrompt's prompter writes it (Madaan et al. 2022, section 3.1).


@dataclass(frozen=True)
class Recalled:
    """What a memory gave each of B queries; nothing where there is none.

    In the prompt's rows a correction is a row behind the pool's.

    Attributes:
        pool: The pool.
        matches: Corrections of each query that passed the gate, the nearest first; B lists.
        use: One of `pgra.memory.labels.USES`.
        fingerprint: Of the memory; empty where there is none.
        sizes: Entries of the task and of others, as `metrics.json` tells them.
    """

    pool: Sequence[Example]
    matches: Sequence[Sequence[Correction]]
    use: str = "exemplar"
    fingerprint: Mapping[str, Json] = field(default_factory=dict)
    sizes: Mapping[str, Json] = field(default_factory=dict)

    @cached_property
    def _corrected(self) -> dict[int, Example]:
        found = {one.entry.id: one.example for line in self.matches for one in line}
        return dict(sorted(found.items()))

    @cached_property
    def _row_of(self) -> dict[int, int]:
        return {name: len(self.pool) + i for i, name in enumerate(self._corrected)}

    @cached_property
    def _all(self) -> list[Example]:
        return [*self.pool, *self._corrected.values()]

    def example(self, row: int) -> Example:
        """Give what a row stands for."""
        return self._all[row]

    def is_of_pool(self, row: int) -> bool:
        """Say whether a row is of the pool, and no correction."""
        return row < len(self.pool)

    def rows(self, place: int, chosen: Sequence[int], count: int) -> list[int]:
        """Put a query's corrections before its exemplars.

        The last exemplars make room for them, so that a prompt has as many examples as without a
        memory. Of the pool's, those of a correction's own text go: the user's word stands.

        Args:
            place: The query.
            chosen: Its exemplars' rows, in the order of choice.
            count: How many examples a prompt has.
        """
        found = self.matches[place] if self.use == "exemplar" else []
        if not found:
            return list(chosen)
        said = {text_key(one.example.text) for one in found}
        others = [row for row in chosen if text_key(self.pool[row].text) not in said]
        own = [self._row_of[one.entry.id] for one in found]
        return [*own, *others][: max(count, len(own))]

    def asked(self, place: int, query: Example) -> Example:
        """Give a query as its prompt shows it: with its clarifications, if they go there."""
        if self.use != "clarification":
            return query
        *_, last = query.fields
        asked = as_data(query.fields[last], is_question=True)
        for one in self.matches[place]:
            asked = clarify(asked, as_data(one.entry.feedback))
        return replace(query, fields={**query.fields, last: asked})

    def line(self, place: int, shown: Sequence[int]) -> dict[str, Json]:
        """Give what `predictions.jsonl` tells of a query's corrections.

        Args:
            place: The query.
            shown: The rows in its prompt: a correction may have had no room.
        """
        if not self.fingerprint:
            return {}
        told = [
            {**one.as_json(), "is_shown": self._is_shown(one, shown)} for one in self.matches[place]
        ]
        return {"memory": told}

    def counts(self, queries: Sequence[Example], shown: Sequence[Sequence[int]]) -> dict[str, Json]:
        """Give what `metrics.json` tells of the memory; nothing where there is none."""
        if not self.fingerprint:
            return {}
        used = [
            place
            for place, rows in enumerate(shown)
            if any(self._is_shown(one, rows) for one in self.matches[place])
        ]
        same = sum(
            text_key(queries[place].text) == text_key(self.matches[place][0].example.text)
            for place in used
        )
        return {
            **self.sizes,
            "queries_with_memory": len(used),
            "queries_that_were_corrected": same,
        }

    def _is_shown(self, one: Correction, shown: Sequence[int]) -> bool:
        return self.use == "clarification" or self._row_of[one.entry.id] in shown


def recall_all(run: IclRun, inputs: IclInputs) -> Recalled:
    """Look all queries up, where a memory is named.

    Raises:
        ArtifactError: If there is no such memory, or it is damaged.
        ConfigError: If nothing would be asked with it.
        DataError: If an entry of the task has no label of it.
        ModelError: If the look-up's encoder cannot be used.
    """
    args = run.memory
    if args.memory is None:
        return Recalled(inputs.pool, [[] for _ in inputs.queries])
    if run.icl.decide_by == "vote":
        raise ConfigError(
            "decide_by 'vote' asks no LM, and --memory adds to its prompts: leave one of them out"
        )
    labels = inputs.labels if args.memory_as == "exemplar" else ()
    opened = LabelMemory.open(
        args,
        task=inputs.task.name,
        inputs=inputs.task.inputs,
        labels=labels,
        device=run.icl.device,
    )
    with opened as memory:
        bar = tqdm(inputs.queries, desc="memory", unit="query", delay=1)
        matches = [memory.recall(query.fields) for query in bar]
        made = {**memory.fingerprint, "use": args.memory_as}
        sizes = {"entries": memory.num_entries, "entries_of_other_tasks": memory.num_others}
    return Recalled(inputs.pool, matches, args.memory_as, made, sizes)


# Opens what a run of in-context learning needs: data, pool, comparison, LM, and what asks it.


OpenLm = Callable[[IclRun, Context], LanguageModel]
_WRITTEN_TOKENS = 10  # KATE's max_tokens


@dataclass(frozen=True)
class Icl:
    """One task's pool, queries, comparison and LM, opened once for all seeds.

    Attributes:
        run: The arguments.
        inputs: Pool and queries.
        pool: The pool, to choose from.
        likeness: What compares; None where exemplars are drawn or fixed.
        recalled: What a memory gave the queries; nothing where none is named.
        completer: The LM; None with `--decide_by vote`.
        decider: What asks it; None likewise.
        seconds: Wall-clock time by stage.
        context: Who share the prompts out; the main one writes.
    """

    run: IclRun
    inputs: IclInputs
    pool: ExemplarPool
    likeness: Similarity | None
    recalled: Recalled
    completer: LanguageModel | None = None
    decider: Decider | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    context: Context = ALONE

    @property
    def queries(self) -> Sequence[Example]:
        """Give the queries."""
        return self.inputs.queries

    def selector(self, seed: int) -> Selector:
        """Return what chooses exemplars, with a seed."""
        args = replace(self.run.selection, exemplar_seed=seed)
        return open_selector(args, self.pool, self.likeness)

    def identity(self, selector: Selector) -> dict[str, Json]:
        """Give all that decides a run's predictions."""
        asked = self.run.selection
        named: dict[str, Json] = {
            "method": self.run.system,
            "task": self.inputs.task.name,
            "labels": list(self.inputs.labels),
            "metric": self.inputs.metric,
            **selector.fingerprint,
            "order": asked.order,
            "leak_jaccard": asked.leak_jaccard,
            "leak_rule": LEAK_RULE,
            "seed": selector.args.exemplar_seed,
            **self.inputs.fingerprint,
        }
        if self.likeness is not None:
            named["likeness"] = dict(self.likeness.fingerprint)
        if self.decider is not None and self.completer is not None:
            named["prompt"] = dict(self.decider.fingerprint)
            named["lm"] = dict(self.completer.fingerprint)
            named["window"] = self.completer.window
        if self.recalled.fingerprint:
            named["memory"] = dict(self.recalled.fingerprint)
        return named


def open_lm(run: IclRun, context: Context = ALONE) -> LanguageModel:
    """Open the LM that answers, with the answers it gave before.

    Raises:
        PgraError: As `run_icl`.
    """
    where = replace(context, artifacts=run.artifacts, device=run.icl.device)
    return open_named_lm(run.completer, where)


def open_icl(
    run: IclRun,
    inputs: IclInputs | None = None,
    *,
    lm: OpenLm = open_lm,
    context: Context = ALONE,
) -> Icl:
    """Open pool, comparison, memory and LM; weights are loaded when they are first needed.

    Args:
        run: Everything.
        inputs: Pool and queries; None reads the run's own.
        lm: Opens the LM, where several runs share it.
        context: Who share the prompts out.

    Raises:
        PgraError: As `run_icl`.
    """
    inputs = read_inputs(run) if inputs is None else inputs
    run = _settle(run, inputs)
    root = run.artifacts / "neighbors" / inputs.task.name
    pool = ExemplarPool(inputs.pool, jaccard=run.selection.leak_jaccard, root=root, context=context)
    likeness, recalled = open_likeness(run, inputs), recall_all(run, inputs)
    icl = Icl(run, inputs, pool, likeness, recalled, context=context)
    icl.selector(run.selection.exemplar_seed)  # refuses what the pool does not have
    if run.icl.decide_by == "vote":
        return icl
    completer = lm(run, context)
    decider = _open_decider(run, inputs, completer, progress=context.worker.is_main)
    return replace(icl, completer=completer, decider=decider)


def _settle(run: IclRun, inputs: IclInputs) -> IclRun:
    """Fill in what the task decides where the user does not, and refuse what it does not have."""
    task, count = inputs.task, run.selection.num_exemplars
    if isinstance(task, GenerationTask):
        _refuse_labels(run, task.name)
        count = task.num_exemplars if count is None else count
        decide_by, format_ = run.icl.decide_by or "generation", "kate"
    else:
        decide_by, format_ = run.icl.decide_by or "score", run.icl.prompt_format or "task"
    selection = replace(
        run.selection, num_exemplars=run.selection.count if count is None else count
    )
    if decide_by == "vote" and not selection.compares:
        raise ConfigError(
            f"decide_by 'vote' is the neighbors' vote, and exemplars '{selection.exemplars}' "
            f"with --num_exemplars {selection.count} are none: use --exemplars knn"
        )
    args = replace(run.icl, decide_by=decide_by, prompt_format=format_)
    return replace(run, selection=selection, icl=args)


def _refuse_labels(run: IclRun, task: str) -> None:
    for name, asked, own in (
        ("decide_by", run.icl.decide_by, "score"),
        ("exemplars", run.selection.exemplars, "balanced"),
        ("prompt_format", run.icl.prompt_format, "task"),
        ("calibrate", run.icl.calibrate, True),
        ("length_normalize", run.icl.length_normalize, True),
    ):
        if asked == own:
            raise ConfigError(
                f"{name} {own} is for tasks with labels, and answers of '{task}' are written: "
                "leave it out"
            )


def _open_decider(
    run: IclRun, inputs: IclInputs, completer: LanguageModel, *, progress: bool
) -> Decider:
    args, task = run.icl, inputs.task
    if isinstance(task, GenerationTask):
        return TextWriter(
            completer,
            line_format(task.frame, task.inputs),
            max_new_tokens=args.max_new_tokens or task.max_new_tokens,
            stop=task.stop,
            progress=progress,
        )
    how = task_format(task, args.prompt_format or "task")
    if args.decide_by == "generation":
        most = args.max_new_tokens or _WRITTEN_TOKENS
        return WordWriter(completer, how, most, progress=progress, words=how.words)
    if args.max_new_tokens is not None:
        raise ConfigError(
            f"max_new_tokens is {args.max_new_tokens}, and label words are scored, not written: "
            "leave it out, or use --decide_by generation"
        )
    return WordScorer(
        completer,
        how,
        how.words,
        task.inputs,
        calibrated=args.calibrate,
        length_normalize=args.length_normalize,
        progress=progress,
    )
