"""Decide labels from none to many: what each part of a `Classifier` adds, and the simplest rivals.

    python benchmarks/decide.py --tasks sst2 trec cr subj=data/plots sms-spam=data/spam
    python benchmarks/decide.py --quick --json figures.json

A frozen LM reads each text once, under a prompt of 8 examples, or of none. From 0, 2, 8, 16 and 32
more examples of each label, drawn three times, these decide 300 test texts:

    words                   what the LM would answer
    words less their mean   less the mean over unlabelled texts (Zhou et al. 2024, eq. 5)
    head, last layer        what `--method head` was
    heads, five depths      the mean of their probabilities
    heads and words         joined log-linearly
    all                     with a head on MiniLM's vectors: `Classifier`, `--method head`
    MiniLM, regression      scikit-learn's logistic regression; it has the prompt's examples too
    MiniLM, nearest         the label of the nearest example; the same
    T5                      (`--others t5`) fine-tuned for 24 steps of 8, without evidence; the same
    SetFit                  (`--others setfit`) on MiniLM (Tunstall et al. 2022); pip install it
    pipeline("decision")    (`--others decision`) of transformers, on the LM, without an example

Hypotheses, written before the first run (percent right, means over tasks, paired by text, Holm):

    D1  words less their mean beat the words as they are by 8 points without a label, p < 0.001
    D2  all beat the last layer's head by 4 points at 8 and at 16 a label, p < 0.001, and lose on no
        task at 32 beyond noise
    D3  at 8, 16 and 32 all beat both rivals, p < 0.001; from 16 on they are not below T5
    D5  expected calibration error is at most 0.08 at 16 a label; of the texts above the threshold
        that held-out examples give for 5 % error at most 5 % are wrong, beyond noise
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from measuring import parse_flags, shared_parser, write_figures
from sklearn.linear_model import LogisticRegression

import pgra
from pgra.arrays import Vectors
from pgra.artifacts import digest
from pgra.commands.common import say
from pgra.context import Context
from pgra.data.bundled import bundled_model_dir
from pgra.data.examples import DataArguments, load_splits
from pgra.data.tasks import Task
from pgra.exemplars.selector import build_prompt
from pgra.lm.base import DEPTHS
from pgra.lm.prefix import PromptedEncoder, StateColumns
from pgra.methods.head import LabelReader
from pgra.methods.held_out import HeldOut
from pgra.prompts import prompt_template
from pgra.report.metrics import average_differences, compare_means, holm, interval_95
from pgra.rerank.base import query_keys
from pgra.rerank.head import block_columns, fit_labels, softmax
from pgra.rerank.states import StateBank
from pgra.types import Example

TASKS = ("rotten-tomatoes=bundled:rotten-tomatoes",)
ENCODER = "bundled:minilm-l6"
T5 = "bundled:t5-small-titles"
OTHERS = {"t5": (16,), "setfit": (16,), "decision": (0,)}  # where each is asked
SIZES = (0, 2, 8, 16, 32)
NUM_EXEMPLARS = 8
NUM_TEST = 300
BINS = 10  # of the expected calibration error
Right = npt.NDArray[np.bool_]
_IN_WORDS = ("cr", "sst2", "trec")  # few steps do not teach a T5 the slots of their templates
_SUBJ = "Is the following sentence subjective or objective? Sentence: {text} Answer:"


@dataclass(frozen=True)
class Draw:
    """One draw of a task: exemplars of the prompt, others by label in the order of use, test."""

    task: Task
    exemplars: Sequence[Example]
    pool: Sequence[Example]
    places: Sequence[int]  # of each pool example among those of its label
    test: Sequence[Example]

    def take(self, size: int) -> list[int]:
        """Return the places in the pool of the first so many examples of each label."""
        return [row for row, place in enumerate(self.places) if place < size]


def read_draws(task_name: str, source: str | None, draws: int, num_test: int) -> Iterator[Draw]:
    """Draw examples of a task; the test texts are the same in all draws."""
    task = Task.load(task_name)
    args = DataArguments(task=task_name, dataset_name=source, max_test_samples=num_test)
    splits = load_splits(task, args)
    for seed in range(draws):
        order = np.random.default_rng(seed).permutation(len(splits.train))
        shuffled = [splits.train[row] for row in order]
        prompt = build_prompt(
            prompt_template(task),
            shuffled,
            task.prompt_words,
            num_exemplars=NUM_EXEMPLARS,
            seed=seed,
        )
        by_id = {example.id: example for example in shuffled}
        exemplars = [by_id[name] for name in prompt.exemplar_ids]
        seen = {str(example.text) for example in exemplars}
        counts: dict[str, int] = defaultdict(int)
        pool = []
        places = []
        for example in shuffled:
            label = str(example.label)
            if counts[label] < SIZES[-1] and example.text not in seen:
                pool.append(example)
                places.append(counts[label])
                seen.add(example.text)
                counts[label] += 1
        yield Draw(task, exemplars, pool, places, splits.test)


@dataclass(frozen=True)
class Reading:
    """What is known of a draw's texts, (n, W); of the prompt's the encoder's part alone."""

    pool: Vectors
    test: Vectors
    shown: Vectors
    columns: StateColumns

    def only(self, blocks: Sequence[int], *, with_words: bool = False) -> "Reading":
        """Return some of the blocks."""
        widths = self.columns.widths
        here = [block_columns(widths, block) for block in blocks]
        places = np.concatenate([np.arange(part.start, part.stop) for part in here])
        columns = StateColumns(
            [widths[block] for block in blocks],
            has_encoder=len(widths) - 1 in blocks,
            words=self.columns.words if with_words else None,
        )
        shown = self.shown[:, places] if columns.has_encoder else self.shown[:0, places]
        return Reading(self.pool[:, places], self.test[:, places], shown, columns)


def read_texts(
    lm: pgra.CausalLM, encoder: pgra.Encoder, draw: Draw, *, num_exemplars: int, artifacts: Path
) -> Reading:
    """Let the LM and the encoder read a draw; the LM's states are kept."""
    words = draw.task.prompt_words
    exemplars = draw.exemplars[:num_exemplars]
    prompt = build_prompt(
        prompt_template(draw.task),
        exemplars,
        words,
        num_exemplars=len(exemplars),
        method="random",
    )
    reader = LabelReader(PromptedEncoder(lm, prompt, depths=DEPTHS), encoder, words)
    assert reader.prompted is not None
    bank = StateBank(
        reader.prompted,
        reader.prompted.fingerprint,
        Context(artifacts=artifacts),
        shard_rows=512,
        suffix="-queries",
    )
    examples = [*draw.pool, *draw.test]
    bank.read_queries(examples, draw.task.name)
    known = reader.read(examples, bank.states(query_keys(examples)))
    count = len(draw.pool)
    shown = reader.read_shown(exemplars)
    return Reading(known[:count], known[count:], shown, reader.columns)


@dataclass(frozen=True)
class Outcome:
    """Which test texts are decided rightly, (n,), how surely, and from where on that is enough."""

    is_right: Right
    chances: Vectors
    threshold: float = 1.0


Other = Callable[[Draw, Sequence[Example]], Sequence[str]]  # labels of the test texts


def decide(
    draw: Draw, reading: Reading, size: int, others: Mapping[str, Other]
) -> dict[str, Outcome]:
    """Decide the test texts in each way, by its name."""
    labels = list(draw.task.labels)
    truth = np.array([labels.index(str(example.label)) for example in draw.test])
    rows = draw.take(size)
    learned = [draw.pool[row] for row in rows]
    count = len(reading.columns.widths)

    def learn(part: Reading) -> Outcome:
        shown = draw.exemplars[: len(part.shown)]
        states = np.concatenate([part.pool[rows], part.shown])
        examples = [*learned, *shown]
        fit = fit_labels(states, part.columns, examples, labels, num_shown=len(shown))
        model = fit.model
        if not learned and model.has_opinion:  # the pool has no labels then
            model = replace(model, prior=model.opinion(part.pool).mean(axis=0))
        scores = model.score(part.test)
        threshold = HeldOut.of(fit).threshold if learned else 1.0
        is_right = scores.argmax(axis=1) == truth
        return Outcome(is_right, np.exp(scores.max(axis=1)), threshold)

    outcomes: dict[str, Outcome] = {}
    if not size:
        of_words = reading.only([count - 2], with_words=True)
        blank = fit_labels(of_words.pool[:0], of_words.columns, [], labels).model
        said = blank.opinion(of_words.test)
        mean = blank.opinion(of_words.pool).mean(axis=0)
        for name, scores in {"words": said, "words less their mean": said - mean}.items():
            is_right = scores.argmax(axis=1) == truth
            outcomes[name] = Outcome(is_right, softmax(scores).max(axis=1))
    else:
        depths = range(count - 1)
        outcomes["head, last layer"] = learn(reading.only([count - 2]))
        outcomes["heads, five depths"] = learn(reading.only(depths))
        outcomes["heads and words"] = learn(reading.only(depths, with_words=True))
    if size or len(reading.shown):
        outcomes["all"] = learn(reading)
    vectors = reading.only([count - 1])
    known = np.concatenate([vectors.pool[rows], vectors.shown])
    names = [str(example.label) for example in (*learned, *draw.exemplars[: len(vectors.shown)])]
    if len({*names}) > 1:
        model = LogisticRegression(max_iter=1000).fit(known, names)
        ways = {
            "MiniLM, regression": model.predict(vectors.test),
            "MiniLM, nearest": np.array(names)[(vectors.test @ known.T).argmax(axis=1)],
        }
        for name, other in others.items():
            if size in OTHERS[name]:
                ways[name] = np.array(other(draw, [*learned, *draw.exemplars]))
        for name, decided in ways.items():
            is_right = decided == np.array([labels[number] for number in truth])
            outcomes[name] = Outcome(is_right, np.ones(len(truth), np.float32))
    return outcomes


def decide_t5(artifacts: Path, draw: Draw, learned: Sequence[Example]) -> Sequence[str]:
    """Return the labels that a T5 gives after 24 steps on the examples."""
    task = draw.task
    template = _SUBJ if task.name == "subj" else task.reader_template
    if task.name in _IN_WORDS:
        template = Task.load(f"{task.name}-instruction").reader_template
    rows = [(str(example.text), str(example.label)) for example in learned]
    run = pgra.train(
        replace(task, reader_template=template),
        rows,
        validation=rows[:2],  # nothing is chosen on it
        test=[(str(example.text), str(example.label)) for example in draw.test],
        artifacts_dir=artifacts,
        output_dir=artifacts / "t5" / f"{task.name}-{len(rows)}-{digest(rows)[:12]}",
        method="plain",
        model_name_or_path=T5,
        max_steps=24,
        total_train_batch_size=8,
        learning_rate=5e-4 if task.name == "trec" else 3e-4,
        eval_steps=0,
        save_steps=0,
    )
    return [str(line["prediction"]) for line in run.predictions]


def decide_setfit(draw: Draw, learned: Sequence[Example]) -> Sequence[str]:
    """Return the labels that SetFit gives: an encoder tuned on pairs, 20 an example."""
    import setfit
    from datasets import Dataset

    columns = {
        "text": [str(example.text) for example in learned],
        "label": [str(example.label) for example in learned],
    }
    folder = str(bundled_model_dir(ENCODER.removeprefix("bundled:")))
    model = setfit.SetFitModel.from_pretrained(folder, labels=sorted({*columns["label"]}))
    args = setfit.TrainingArguments(
        num_iterations=20, batch_size=16, num_epochs=1, seed=0, show_progress_bar=False
    )
    setfit.Trainer(model, args, train_dataset=Dataset.from_dict(columns)).train()
    decided: Sequence[str] = model.predict([str(example.text) for example in draw.test])
    return decided


class DecisionPipeline:
    """Transformers' own typed decision, which takes no example: one answer for all draws."""

    def __init__(self, lm: pgra.CausalLM) -> None:
        """Take the LM whose folder it opens."""
        self.lm = lm
        self._decided: dict[str, Sequence[str]] = {}

    def __call__(self, draw: Draw, learned: Sequence[Example]) -> Sequence[str]:  # noqa: ARG002
        """Return the labels of the test texts."""
        if draw.task.name not in self._decided:
            self._decided[draw.task.name] = self._decide(draw)
        return self._decided[draw.task.name]

    def _decide(self, draw: Draw) -> Sequence[str]:
        from transformers import pipeline

        answer = pipeline("decision", model=self.lm.source.path)
        question = {
            "type": "choice",
            "instructions": draw.task.prompt.format(text="").strip(),
            "criteria": dict(draw.task.prompt_words),
        }
        decided = []
        for example in draw.test:
            answers = answer({"state": str(example.text), "questions": {"label": question}})
            decided.append(str(answers["label"]["choice"]))
        return decided


def calibration_error(outcomes: Sequence[Outcome]) -> float:
    """Return the expected calibration error over equal bins (Guo et al. 2017, eq. 3)."""
    is_right = np.concatenate([outcome.is_right for outcome in outcomes])
    chances = np.concatenate([outcome.chances for outcome in outcomes])
    bins = np.minimum((chances * BINS).astype(int), BINS - 1)
    gaps = [
        abs(float((is_right[bins == number] - chances[bins == number]).sum()))
        for number in range(BINS)
    ]
    return sum(gaps) / len(chances)


Cells = Mapping[str, Mapping[int, Mapping[str, Sequence[Outcome]]]]  # task, size, way: draws


def compare(cells: Cells, size: int, way: str, other: str) -> str:
    """Return what a way gains over another, on average over tasks, and its p."""
    differences = []
    for sizes in cells.values():
        sides = [
            np.mean([outcome.is_right for outcome in sizes[size][name]], axis=0)
            for name in (way, other)
        ]
        differences.append(compare_means(sides[0], sides[1], seed=0))
    mean = average_differences(differences)
    low, high = interval_95(mean.draws)
    adjusted = holm([gap.p for gap in differences])
    worse = [
        task
        for task, gap, p in zip(cells, differences, adjusted, strict=True)
        if gap.difference < 0 and p < 0.05
    ]
    text = f"{100 * mean.difference:+.1f} ({100 * low:+.1f} to {100 * high:+.1f}), p {mean.p:.4f}"
    return text + (f"; worse on {', '.join(worse)}" if worse else "")


def show_table(title: str, cells: Cells, figures: dict[str, float]) -> None:
    """Print percent right by size and way, and what the hypotheses ask."""
    say(f"\n{title}: {', '.join(cells)}")
    sizes = next(iter(cells.values()))
    for size, ways in sizes.items():
        say(f"  {size} more a label")
        for way in ways:
            values = [
                100 * float(np.mean([outcome.is_right for outcome in task[size][way]]))
                for task in cells.values()
            ]
            say(f"    {way:<22} {np.mean(values):5.1f}   {' '.join(f'{v:5.1f}' for v in values)}")
            figures[f"{title}, {size} a label: {way}"] = float(np.mean(values))
        if "words" in ways:
            gap = compare(cells, size, "words less their mean", "words")
            say(f"    words less their mean, over words: {gap}")
        for other in ways:
            if "all" in ways and other != "all" and "words" not in other.split(" ")[0]:
                say(f"    all over {other}: {compare(cells, size, 'all', other)}")
        if "all" in ways:
            outcomes = [outcome for task in cells.values() for outcome in task[size]["all"]]
            error = calibration_error(outcomes)
            sure = [outcome.chances >= outcome.threshold for outcome in outcomes]
            wrong = sum(int((~o.is_right[s]).sum()) for o, s in zip(outcomes, sure, strict=True))
            count = sum(int(mask.sum()) for mask in sure)
            share = count / sum(map(len, sure))
            figures[f"{title}, {size} a label: calibration error"] = error
            say(
                f"    expected calibration error {error:.3f}; called decidable {100 * share:.0f} % "
                f"({count}), of them {wrong} wrong ({100 * wrong / max(1, count):.1f} %)"
            )


def main() -> None:
    """Print the tables."""
    quick = "one draw, 60 test texts, 0, 2 and 8 a label"
    parser = shared_parser(__doc__ or "", quick=quick, lm="bundled:smollm2-135m")
    parser.add_argument("--tasks", nargs="+", default=TASKS, help="TASK, or TASK=data set")
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--others", nargs="+", default=(), choices=OTHERS, help="also ask these")
    parser.add_argument("--artifacts", type=Path, default=Path("artifacts"))
    args = parse_flags(parser)
    lm = pgra.CausalLM(args.lm, device=args.device)
    encoder = pgra.Encoder(ENCODER, device=args.device)
    sizes = SIZES[:3] if args.quick else SIZES
    num_draws = 1 if args.quick else args.draws
    num_test = 60 if args.quick else NUM_TEST
    figures: dict[str, float] = {}
    asked: dict[str, Other] = {
        "t5": partial(decide_t5, args.artifacts),
        "setfit": decide_setfit,
        "decision": DecisionPipeline(lm),
    }
    others = {name: asked[name] for name in args.others}
    for num_exemplars in (NUM_EXEMPLARS, 0):
        asked_now = others if num_exemplars else {}  # they have the examples of the prompt in both
        cells: dict[str, dict[int, dict[str, list[Outcome]]]] = {}
        for words in args.tasks:
            name, _, source = words.partition("=")
            ways: dict[int, dict[str, list[Outcome]]] = {}
            for draw in read_draws(name, source or None, num_draws, num_test):
                reading = read_texts(
                    lm, encoder, draw, num_exemplars=num_exemplars, artifacts=args.artifacts
                )
                for size in sizes:
                    for way, outcome in decide(draw, reading, size, asked_now).items():
                        ways.setdefault(size, {}).setdefault(way, []).append(outcome)
            cells[name] = ways
        show_table(f"a prompt of {num_exemplars} examples", cells, figures)
    write_figures(args.json, figures)


if __name__ == "__main__":
    main()
