"""Optuna's part of a search: which point to try next, kept in a file of the search's folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pgra.errors import ArtifactError
from pgra.io import canonical_json
from pgra.series import SeriesArguments

STUDY_FILE = "optuna.jsonl"
_NAME = "reader"
_MOST_SEED = 1 << 32


@dataclass(frozen=True, order=True)
class Point:
    """One combination that is tried.

    Attributes:
        learning_rate: Peak learning rate.
        batch_size: Examples a device and step.
    """

    learning_rate: float
    batch_size: int


class Study:
    """A study of the learning rate (any between two ends, on a log scale) and the batch size."""

    def __init__(self, root: Path, series: SeriesArguments, seed: int) -> None:
        """Open the folder's study, or begin one.

        Raises:
            ArtifactError: If the folder's study is of other ends, sizes or another seed.
        """
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        root.mkdir(parents=True, exist_ok=True)
        rates, self._seed = series.learning_rates(), seed
        self._space = {
            "learning_rate": optuna.distributions.FloatDistribution(
                min(rates), max(rates), log=True
            ),
            "batch_size": optuna.distributions.CategoricalDistribution(series.batch_sizes()),
        }
        self._study: Any = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(root / STUDY_FILE))),
            study_name=_NAME,
            direction="maximize",
            load_if_exists=True,
        )
        asked = {
            "search_learning_rates": [min(rates), max(rates)],
            "search_batch_sizes": series.batch_sizes(),
            "seed": seed,
        }
        self._check_same(root / STUDY_FILE, asked)

    def _check_same(self, path: Path, asked: dict[str, Any]) -> None:
        made = self._study.user_attrs.get("asked")
        if made is None:
            self._study.set_user_attr("asked", asked)
            return
        for name, value in asked.items():
            if made.get(name) != value:
                raise ArtifactError(
                    f"{path} is a study with {name} {canonical_json(made.get(name))}, this search "
                    f"asks for {canonical_json(value)}: choose another --output_dir"
                )

    def ask(self, number: int) -> Point:
        """Give the point of a trial: the one it had before the search was stopped, or a new one.

        A trial's sampler is seeded by its number, so that a study that goes on asks for what an
        unbroken one would have asked for.
        """
        import optuna

        trials = self._trials()
        if number < len(trials):
            return _point(trials[number].params)
        self._study.sampler = optuna.samplers.TPESampler(
            seed=(self._seed * 10_007 + number) % _MOST_SEED
        )
        return _point(self._study.ask(self._space).params)

    def tell(self, number: int, value: float) -> None:
        """Keep what a trial's point gave on the dev set."""
        trial = self._trials()[number]
        if not trial.state.is_finished():
            self._study.tell(trial.number, value)

    def _trials(self) -> list[Any]:
        """Give the trials that have a point: a killed job may leave one without."""
        return [trial for trial in self._study.trials if set(trial.params) == set(self._space)]


def _point(params: dict[str, Any]) -> Point:
    """Round the learning rate as a person would write it: it names the run's folder."""
    return Point(float(f"{params['learning_rate']:.3g}"), int(params["batch_size"]))
