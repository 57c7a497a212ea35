"""MemPrompt's experiment: a stream of questions, a simulated user, and what a memory is worth.

    RUN/run.json                    what decides every number here
    RUN/mem-p0.5-seed0/steps.jsonl  what happened at each step
    RUN/mem-p0.5-seed0/memory.sqlite
    RUN/mem-p0.5-seed0/metrics.json written last: the stream is done
    RUN/report.md, RUN/running.png  all of them beside each other

The LM's answers are kept among the artefacts. A stream that was stopped is played again from its
start, which asks the LM nothing it has answered, and then goes on.
"""

import json
import logging
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from pgra.errors import ArtifactError, ConfigError
from pgra.icl.completion import Completer
from pgra.io import check_fingerprint, digest, lock_folder, write_json
from pgra.memory.families import Family
from pgra.memory.gate import GateReport, Trial, choose_threshold, try_lookup
from pgra.memory.log import FeedbackLog
from pgra.memory.measures import compare_with, measure, wrong_type_pairs
from pgra.memory.opening import OpenLookup
from pgra.memory.prompter import FewShot, GrowingPrompt
from pgra.memory.simulator import Simulation, Taken
from pgra.memory.steps import Step
from pgra.memory.systems import Growing, NoMemory, System, open_system
from pgra.types import Json

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
    completer: Completer
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
        metrics: Of `pgra.memory.measures.measure`, and of the comparison with no-mem.
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
