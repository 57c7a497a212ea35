"""MemPrompt's experiment: streams with a simulated user, compared and reported.

    RUN/run.json                    what decides every number here
    RUN/mem-p0.5-seed0/steps.jsonl  what happened at each step
    RUN/mem-p0.5-seed0/memory.sqlite
    RUN/mem-p0.5-seed0/metrics.json written last: the stream is done
    RUN/report.md, RUN/running.png  all of them beside each other

The LM's answers are kept among the artefacts. A stream that was stopped is played again from its
start, which asks the LM nothing it has answered, and then goes on.
"""

import importlib.util
import json
import logging
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from tqdm import tqdm

from pgra.artifacts import (
    check_fingerprint,
    digest,
    lock_folder,
    write_aside,
    write_json,
    write_text,
)
from pgra.core import Example, Json
from pgra.errors import ArtifactError, ConfigError
from pgra.exemplars import SelectionArguments
from pgra.exemplars.similarity import Similarity, open_similarity
from pgra.lm.base import LanguageModel
from pgra.memory.families import Family
from pgra.memory.log import FeedbackLog
from pgra.memory.lookup import GateReport, OpenLookup, Trial, choose_threshold, try_lookup
from pgra.memory.nearest_examples import without_slots
from pgra.memory.prompts import FewShot, GrowingPrompt
from pgra.memory.stream import (
    Growing,
    NoMemory,
    Simulation,
    Step,
    System,
    Taken,
    compare_with,
    correlate,
    measure,
    open_system,
    running_accuracy,
    wrong_type_pairs,
)
from pgra.report.metrics import Spread, combine_p, mcnemar, mean_sd_interval

logger = logging.getLogger(__name__)

SYSTEMS = ("no-mem", "grow", "mem")
RUN_FILE, STEPS_FILE, METRICS_FILE = "run.json", "steps.jsonl", "metrics.json"
MEMORY_FILE = "memory.sqlite"


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A stream and all that its systems share.

    Attributes:
        folder: Where the runs go.
        family: Of the questions.
        few_shot: The prompt.
        completer: The LM.
        open_lookup: Opens the look-up of a memory.
        threshold: The gate's; None where label feedback has none.
        max_new_tokens: Of an answer.
        max_prompt_tokens: Of a prompt.
        max_added: Corrections that GROW-PROMPT shows; None: as many as fit.
        as_released: Whether the understanding is told as the paper's release does.
        num_ahead: Questions asked together; 1 wastes no call of an endpoint that is paid.
    """

    folder: Path
    family: Family
    few_shot: FewShot
    completer: LanguageModel
    open_lookup: OpenLookup
    threshold: float | None
    max_new_tokens: int
    max_prompt_tokens: int
    max_added: int | None = None
    as_released: bool = False
    num_ahead: int = 16


@dataclass(frozen=True)
class Variant:
    """One stream by one system.

    Attributes:
        system: One of `SYSTEMS`.
        probability: Of a clarification; 0 for no-mem.
        seed: Of the user's draws, and of the stream where it is made or shuffled.
    """

    system: str
    probability: float
    seed: int

    @property
    def name(self) -> str:
        """Give its folder's name."""
        told = "" if self.system == "no-mem" else f"-p{self.probability:g}"
        return f"{self.system}{told}-seed{self.seed}"


@dataclass(frozen=True)
class StreamResult:
    """What a variant gave.

    Attributes:
        variant: Which.
        metrics: Of `pgra.memory.stream.measure`, and of the comparison with no-mem.
        taken: Its steps.
    """

    variant: Variant
    metrics: dict[str, Json]
    taken: list[Taken]


def plan_variants(
    systems: Sequence[str],
    probabilities: Sequence[float],
    seeds: Sequence[int],
    *,
    grow_probabilities: Sequence[float] | None = None,
) -> list[Variant]:
    """List what is run, in order: without a memory first, which the others are compared with.

    Args:
        systems: Names of `SYSTEMS`.
        probabilities: Of a clarification.
        seeds: Of the draws.
        grow_probabilities: Those of GROW-PROMPT, which costs most; None: the same.

    Raises:
        ConfigError: If a system is unknown, or a probability is none.
    """
    for system in systems:
        if system not in SYSTEMS:
            raise ConfigError(f"systems names '{system}': known are {', '.join(SYSTEMS)}")
    of_grow = probabilities if grow_probabilities is None else grow_probabilities
    by_system = {"no-mem": [0.0], "grow": of_grow, "mem": probabilities}
    for value in (*probabilities, *of_grow):
        if not 0 < value <= 1:
            raise ConfigError(
                f"clarification_probabilities has {value:g}: each is above 0 and at most 1"
            )
    plan = []
    for seed in dict.fromkeys(seeds):
        for system in sorted(set(systems), key=SYSTEMS.index):
            plan += [Variant(system, p, seed) for p in dict.fromkeys(by_system[system])]
    return plan


def choose_gate(steps: Sequence[Step], open_lookup: OpenLookup) -> GateReport:
    """Choose the gate's threshold on a dev stream.

    Raises:
        DataError: As `choose_threshold`.
    """
    return choose_threshold(try_gate(steps, open_lookup))


def try_gate(steps: Sequence[Step], open_lookup: OpenLookup) -> list[Trial]:
    """Look each question up among those before it, in a memory that is thrown away."""
    with (
        tempfile.TemporaryDirectory() as folder,
        FeedbackLog.open(Path(folder) / MEMORY_FILE) as log,
    ):
        return try_lookup(
            log,
            open_lookup(log),
            [step.question for step in steps],
            [step.meaning for step in steps],
            feedbacks=[step.feedback for step in steps],
        )


def run_streams(
    experiment: Experiment, streams: dict[int, list[Step]], plan: Sequence[Variant]
) -> list[StreamResult]:
    """Run every variant that is not done, and compare those with a memory with no-mem.

    Args:
        experiment: What they share.
        streams: The questions, by seed.
        plan: Of `plan_variants`.

    Raises:
        ArtifactError: If the folder is another experiment's.
        DataError: If a question does not fit the LM's window.
    """
    results: list[StreamResult] = []
    bare: dict[int, list[Taken]] = {}
    with lock_folder(experiment.folder):
        _check_experiment(experiment)
        for variant in plan:
            steps = streams[variant.seed]
            taken = _run_variant(experiment, variant, steps)
            metrics = measure(taken)
            if variant.system == "no-mem":
                bare[variant.seed] = taken
            elif variant.seed in bare:
                metrics["against_no_mem"] = compare_with(taken, bare[variant.seed])
            metrics["wrong_type_pairs"] = wrong_type_pairs(taken)
            told = {"system": variant.system, "probability": variant.probability}
            whose = {**told, "seed": variant.seed, "stream": _stream_digest(steps)}
            write_json(_folder(experiment, variant) / METRICS_FILE, {**whose, **metrics})
            results.append(StreamResult(variant, metrics, taken))
    return results


def _folder(experiment: Experiment, variant: Variant) -> Path:
    return experiment.folder / variant.name


def _stream_digest(steps: Sequence[Step]) -> str:
    return digest([asdict(step) for step in steps])[:12]


def _run_variant(experiment: Experiment, variant: Variant, steps: Sequence[Step]) -> list[Taken]:
    folder = _folder(experiment, variant)
    if (folder / METRICS_FILE).is_file():
        return _read_done(folder, _stream_digest(steps))
    shutil.rmtree(folder, ignore_errors=True)  # of a stream that was stopped; it is played again
    folder.mkdir(parents=True)
    simulation = Simulation(
        family=experiment.family,
        few_shot=experiment.few_shot,
        completer=experiment.completer,
        clarification_probability=variant.probability,
        seed=variant.seed,
        max_new_tokens=experiment.max_new_tokens,
        max_prompt_tokens=experiment.max_prompt_tokens,
        as_released=experiment.as_released,
        num_ahead=experiment.num_ahead,
    )
    taken = []
    with (
        FeedbackLog.open(folder / MEMORY_FILE) as log,
        (folder / STEPS_FILE).open("w", encoding="utf-8") as file,
        tqdm(total=len(steps), desc=variant.name, unit="step") as bar,
    ):
        system = _open_system(experiment, variant, log)
        for one in simulation.run(steps, system, advance=bar.update):
            file.write(json.dumps(asdict(one), ensure_ascii=False) + "\n")
            file.flush()
            taken.append(one)
    return taken


def _open_system(experiment: Experiment, variant: Variant, log: FeedbackLog) -> System:
    if variant.system == "no-mem":
        return NoMemory(experiment.few_shot)
    if variant.system == "grow":
        room = experiment.completer.window - experiment.max_new_tokens
        growing = GrowingPrompt(
            experiment.few_shot,
            experiment.completer.count_tokens,
            max_prompt_tokens=min(experiment.max_prompt_tokens, room),
            max_added=experiment.max_added,
        )
        return Growing(growing)
    lookup = experiment.open_lookup(log)
    return open_system(
        experiment.family, experiment.few_shot, log, lookup=lookup, threshold=experiment.threshold
    )


def _read_done(folder: Path, stream: str) -> list[Taken]:
    try:
        made_of = json.loads((folder / METRICS_FILE).read_text()).get("stream")
        lines = (folder / STEPS_FILE).read_text(encoding="utf-8").splitlines()
        taken = [Taken(**json.loads(line)) for line in lines]
    except (OSError, ValueError, TypeError) as error:
        raise ArtifactError(f"{folder} is damaged ({error}): delete it and run it again") from None
    if made_of != stream:
        raise ArtifactError(
            f"{folder} was made of another stream: use another --output_dir, or delete it"
        )
    return taken


def _check_experiment(experiment: Experiment) -> None:
    """Refuse the folder of another experiment; a new one says whose it is."""
    fields = _identity(experiment)
    path = experiment.folder / RUN_FILE
    if not path.is_file():
        write_json(path, fields)
        return
    try:
        made: Any = json.loads(path.read_text())
    except ValueError as error:
        raise ArtifactError(f"{path} is damaged ({error}): use another --output_dir") from None
    check_fingerprint(experiment.folder, made=made, asked=fields)


def _identity(experiment: Experiment) -> dict[str, Json]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / MEMORY_FILE
        with FeedbackLog.open(path) as log:
            lookup = dict(experiment.open_lookup(log).fingerprint)
    return {
        "lm": dict(experiment.completer.fingerprint),
        "family": experiment.family.name,
        "family_digest": _family_digest(experiment.family),
        "prompt": experiment.few_shot.name,
        "prompt_digest": digest(experiment.few_shot.fingerprint)[:12],
        "lookup": lookup,
        "threshold": experiment.threshold,
        "max_new_tokens": experiment.max_new_tokens,
        "max_prompt_tokens": experiment.max_prompt_tokens,
        "max_added": experiment.max_added,
        "as_released": experiment.as_released,
    }


def _family_digest(family: Family) -> str:
    """Tell families apart; what the paper prints of one decides no number here."""
    fields = asdict(family)
    del fields["paper_answered"], fields["is_of_paper"]
    if family.situations is None:  # runs of before there were situations stay whose they are
        del fields["situations"]
    return digest(fields)[:12]


# Is one system of a memory better than another? The same steps, by seed, with McNemar's test.


Key = tuple[str, float]
"""System and clarification probability."""


@dataclass(frozen=True)
class Claim:
    """What one system has over another, in accuracy of the understanding.

    Attributes:
        better: The one that is claimed to be better.
        worse: The other.
        final: Gap over all steps, by seed.
        area: Gap of the areas under the running curves, by seed.
        p_value: Of McNemar's tests of all seeds together (`combine_p`).
        cost: Prompt tokens of the first for one of the second, all seeds together.
    """

    better: Variant
    worse: Variant
    final: Spread
    area: Spread
    p_value: float
    cost: float


def compare_systems(results: Sequence[StreamResult]) -> list[Claim]:
    """Compare what the paper does: GROW with NO-MEM, MEM with GROW and NO-MEM, p with a lower p.

    Args:
        results: Of `run_streams`; only seeds that both have are compared.
    """
    by_key: dict[Key, dict[int, StreamResult]] = {}
    for one in results:
        key = (one.variant.system, one.variant.probability)
        by_key.setdefault(key, {})[one.variant.seed] = one
    return [_compare(by_key[better], by_key[worse]) for better, worse in _pairs(list(by_key))]


def _pairs(keys: Sequence[Key]) -> list[tuple[Key, Key]]:
    """Pair what is compared: with no memory, with GROW at the same p, with the next lower p."""
    found = []
    for system, p in keys:
        if system == "no-mem":
            continue
        below = [key for key in keys if key[0] == "no-mem"]
        if system == "mem" and ("grow", p) in keys:
            below.append(("grow", p))
        lower = [q for other, q in keys if other == system and q < p]
        if lower:
            below.append((system, max(lower)))
        found += [((system, p), worse) for worse in below]
    return found


def _compare(better: Mapping[int, StreamResult], worse: Mapping[int, StreamResult]) -> Claim:
    seeds = sorted(set(better) & set(worse))
    ours = [[t.understood for t in better[seed].taken] for seed in seeds]
    others = [[t.understood for t in worse[seed].taken] for seed in seeds]
    final = [_mean_of_runs(a) - _mean_of_runs(b) for a, b in zip(ours, others, strict=True)]
    area = [
        _mean_of_runs(running_accuracy(a)) - _mean_of_runs(running_accuracy(b))
        for a, b in zip(ours, others, strict=True)
    ]
    tokens = [
        sum(t.num_prompt_tokens for seed in seeds for t in side[seed].taken)
        for side in (better, worse)
    ]
    return Claim(
        better=better[seeds[0]].variant,
        worse=worse[seeds[0]].variant,
        final=mean_sd_interval(final),
        area=mean_sd_interval(area),
        p_value=combine_p([mcnemar(a, b) for a, b in zip(ours, others, strict=True)]),
        cost=tokens[0] / max(1, tokens[1]),
    )


def _mean_of_runs(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# What streams with a memory gave, as a table and a figure beside the paper's numbers.


REPORT_FILE, FIGURE_FILE = "report.md", "running.png"
_DOTS_PER_INCH = 150
_MARKS = (25, 50, 100, 200)  # steps at which the running accuracy is told
_TITLES = {"no-mem": "NO-MEM", "grow": "GROW-PROMPT", "mem": "MEM-PROMPT"}


def write_report(
    folder: Path, family: Family, results: Sequence[StreamResult], *, gate: GateReport | None
) -> str:
    """Write the table, and the figure where matplotlib is installed.

    Args:
        folder: The run's.
        family: Whose questions they were.
        results: Of `run_streams`.
        gate: How the threshold was chosen; None where it was given.

    Returns:
        The table's text.
    """
    text = render_report(family, results, gate=gate)
    write_text(folder / REPORT_FILE, text)
    if importlib.util.find_spec("matplotlib") is None:
        logger.warning("no figure: matplotlib is not installed (pip install 'pgra[demo]')")
    else:
        plot_running(folder / FIGURE_FILE, results)
    return text


def render_report(
    family: Family, results: Sequence[StreamResult], *, gate: GateReport | None
) -> str:
    """Write the table as Markdown: means over the seeds, and below each what the paper has."""
    kinds = family.kinds
    groups = _by_variant(results)
    lines = [
        f"# A memory of corrections: {family.name}, {results[0].metrics['n']} steps",
        "",
        _row("understood", *kinds, "all", "area", "last 100", "answered", "prompt tokens"),
        "|:--|" + "--:|" * (len(kinds) + 5),
    ]
    for group in groups:
        lines.append(_row(_title(group), *_cells(group, kinds)))
    for system in dict.fromkeys([*family.paper, *family.paper_answered]):
        told = family.paper.get(system, {})
        cells = [_number(told.get(kind)) for kind in (*kinds, "all")]
        cells += ["", "", _number(family.paper_answered.get(system), places=3), ""]
        lines.append(_row(f"{_TITLES[system]}, paper (GPT-3)", *cells))
    if family.situations is not None:
        lines += ["", *_correlation_lines(groups)]
    lines += [
        "",
        *_running_lines(groups),
        *_claim_lines(results),
        *_lookup_lines(groups),
        *_gate_lines(gate),
        *_collision_lines(results),
    ]
    return "\n".join(lines) + "\n"


def _by_variant(results: Sequence[StreamResult]) -> list[list[StreamResult]]:
    groups: dict[tuple[str, float], list[StreamResult]] = {}
    for result in results:
        groups.setdefault((result.variant.system, result.variant.probability), []).append(result)
    return list(groups.values())


def _title(group: Sequence[StreamResult]) -> str:
    seeds = f" ({len(group)} seeds)" if len(group) > 1 else ""
    return f"{_name(group[0].variant)}{seeds}"


def _name(variant: Variant) -> str:
    told = "" if variant.system == "no-mem" else f", p = {variant.probability:g}"
    return f"{_TITLES[variant.system]}{told}"


def _cells(group: Sequence[StreamResult], kinds: Sequence[str]) -> list[str]:
    by_type = [_mean(group, "understood_by_type", kind) for kind in kinds]
    names = ("understood", "understood_area", "understood_last_100", "answered")
    tokens = fmean(float(str(one.metrics["prompt_tokens"])) for one in group)
    return [
        *map(_number, by_type),
        *(_with_sd(group, name) for name in names),
        f"{tokens:,.0f}",
    ]


def _with_sd(group: Sequence[StreamResult], name: str) -> str:
    """Write a measure's mean, and behind that of several seeds their standard deviation."""
    spread = mean_sd_interval([float(str(one.metrics[name])) for one in group])
    return _number(spread.mean) + ("" if spread.sd is None else f" ± {_number(spread.sd)}")


def _mean(group: Sequence[StreamResult], *names: str) -> float | None:
    values = []
    for one in group:
        value: Any = one.metrics
        for name in names:
            value = None if value is None else value.get(name)
        values += [] if value is None else [float(value)]
    return fmean(values) if values else None


def _running_lines(groups: Sequence[Sequence[StreamResult]]) -> list[str]:
    """Write the paper's figure 6 in numbers: accuracy of all steps up to some."""
    length = len(groups[0][0].taken)
    marks = [mark for mark in _MARKS if mark < length] + [length]
    rows = []
    for group in groups:
        means = _mean_running(group, "understood")
        rows.append(_row(_title(group), *(_number(means[mark - 1]) for mark in marks)))
    head = _row("understood, steps up to", *map(str, marks))
    return [head, "|:--|" + "--:|" * len(marks), *rows, ""]


def _mean_running(group: Sequence[StreamResult], name: str) -> list[float]:
    lines = [running_accuracy([getattr(t, name) for t in one.taken]) for one in group]
    return [fmean(values) for values in zip(*lines, strict=False)]


def _claim_lines(results: Sequence[StreamResult]) -> list[str]:
    rows = [
        _row(
            f"{_name(one.better)} - {_name(one.worse)}",
            _gap(one.final),
            _gap(one.area),
            f"{one.p_value:.2g}",
            f"{one.cost:.2f}",
        )
        for one in compare_systems(results)
    ]
    if not rows:
        return []
    head = _row("understood, gap of", "all", "area", "p (McNemar)", "prompt tokens, ratio")
    return [head, "|:--|" + "--:|" * 4, *rows, ""]


def _gap(spread: Spread) -> str:
    """Write a gap; behind several seeds' mean their standard deviation."""
    return f"{spread.mean:+.3f}" + ("" if spread.sd is None else f" ± {spread.sd:.3f}")


def _lookup_lines(groups: Sequence[Sequence[StreamResult]]) -> list[str]:
    rows = []
    for group in groups:
        if group[0].variant.system != "mem":
            continue
        names = [("lookups", "effective"), ("lookups", "wrong_type")]
        names += [("against_no_mem", name) for name in ("helped", "hurt")]
        used = _mean(group, "lookups", "used") or 0.0
        cells = [_number(_mean(group, *name)) for name in names]
        rows.append(_row(_title(group), f"{used:.0f}", *cells))
    if not rows:
        return []
    head = _row("look-ups", "used", "understood after", "wrong type", "helped", "hurt")
    return [head, "|:--|" + "--:|" * 5, *rows, ""]


def _gate_lines(gate: GateReport | None) -> list[str]:
    if gate is None:
        return []
    return [
        f"Gate: scores of at least {gate.threshold:.4g} pass, chosen on {gate.num_trials} other "
        f"questions (precision {_number(gate.precision)}, recall {_number(gate.recall)}).",
        "",
    ]


def _collision_lines(results: Sequence[StreamResult]) -> list[str]:
    lines = []
    for result in results:
        pairs: Any = result.metrics["wrong_type_pairs"]
        lines += [
            f"- {result.variant.name}: {pair['asked']} took a clarification for {pair['found']} "
            f"{pair['times']} times ('{pair['question']}' found '{pair['key']}', score "
            f"{pair['score']:.3g}); understood all the same: {pair['understood']}"
            for pair in pairs
        ]
    return ["Near keys of another type:", "", *lines] if lines else []


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _correlation_lines(groups: Sequence[Sequence[StreamResult]]) -> list[str]:
    """Say how far the answer is right where the understanding is (the paper, section 4.1.1)."""
    told = []
    for group in groups:
        taken = [one for result in group for one in result.taken]
        value = correlate([one.understood for one in taken], [one.answered for one in taken])
        told.append(f"{_title(group)} {_number(value) or 'none'}")
    return [
        f"Correlation of understanding and answer, question by question: {'; '.join(told)}. The "
        "paper has 0.36 (ERT-CAT, MEM-PROMPT) and does not say over what."
    ]


def _number(value: float | None, *, places: int = 2) -> str:
    return "" if value is None else f"{value:.{places}f}"


def plot_running(path: Path, results: Sequence[StreamResult]) -> None:
    """Draw the running accuracy of understanding and answer over the steps, means over the seeds.

    Args:
        path: A .png file.
        results: Of `run_streams`.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for group in _by_variant(results):
        for axes, name in ((left, "understood"), (right, "answered")):
            mean = _mean_running(group, name)
            axes.plot(range(1, len(mean) + 1), mean, label=_title(group))
    for axes, name in ((left, "understanding"), (right, "answer")):
        axes.set(title=f"running accuracy of the {name}", xlabel="step", ylim=(0, 1))
        axes.grid(visible=True, alpha=0.3)
    left.legend(fontsize="small")
    with write_aside(path) as aside:
        figure.savefig(aside, dpi=_DOTS_PER_INCH)


# Opens what compares a stream's questions with the examples of a prompt (`--prefix kate`).


def open_question_similarity(
    pool: Sequence[Example], *, encoder: str, key_form: str, device: str, root: Path
) -> Similarity:
    """Open a comparison of questions by cosine, or by BM25.

    Args:
        pool: The examples' questions.
        encoder: Hub id, folder or bundled:NAME; or bm25.
        key_form: "slotless" compares questions without what stands in <...>, "whole" with it.
        device: Where an encoder runs.
        root: Folder of vectors, which are stored.

    Raises:
        ModelError: If the encoder cannot be found or loaded.
    """
    key = None if key_form == "whole" else without_slots
    args = SelectionArguments(encoder=encoder)
    return open_similarity(args, pool, root, device=device, key=key)
