"""An LM that can be corrected: lessons of one or several families, drawn, packed and learned."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from pgra.errors import ArtifactError, ConfigError
from pgra.io import check_fingerprint, digest, lock_folder, write_json
from pgra.memory.finetuning import LM_FOLDER, FinetuneSettings, finetune
from pgra.memory.lesson_packs import Pack, Packer
from pgra.memory.lessons import Lesson, Lessons, draw_lessons
from pgra.memory.prompter import load_few_shot
from pgra.memory.seen import Seen, read_seen
from pgra.memory.steps import Words
from pgra.models.causal_lm import CausalLM
from pgra.types import Json

RUN_FILE = "run.json"


@dataclass(frozen=True)
class Course:
    """Lessons and the words they are about."""

    lessons: Lessons
    words: Words


@dataclass(frozen=True)
class TrainedLM:
    """An LM that was fine-tuned.

    Attributes:
        folder: For --lm.
        num_words: That it learned with.
        num_questions: Questions without their words.
    """

    folder: Path
    num_words: int
    num_questions: int


def train_lm(
    lm: str,
    courses: Sequence[Course],
    *,
    pack_tokens: int,
    settings: FinetuneSettings,
    folder: Path,
) -> TrainedLM:
    """Draw lessons, each course's in every so many sequences, and fine-tune an LM with them.

    Args:
        lm: By hub id, folder or `bundled:NAME`.
        courses: What is taught.
        pack_tokens: Most tokens of a sequence.
        settings: How.
        folder: Of the run. One that is done is given as it is, one that was stopped goes on.

    Raises:
        ArtifactError: If the folder is of another run.
        ConfigError: If the LM holds no such sequence or has not so many layers, or a lesson does
            not fit a sequence.
        ModelError: If the LM cannot be loaded.
    """
    opened = CausalLM.from_name(lm, device="cpu")  # its weights are not loaded for this
    if pack_tokens > opened.window:
        raise ConfigError(
            f"pack_tokens is {pack_tokens}, and '{lm}' holds {opened.window}: lower it"
        )
    depth = opened.config.num_hidden_layers
    if settings.frozen_layers >= depth:
        raise ConfigError(
            f"frozen_layers is {settings.frozen_layers}, and '{lm}' has {depth}: leave one to train"
        )
    asked: dict[str, Json] = {
        "lm": opened.source.identity,
        "courses": digest([_told(course) for course in courses])[:12],
        "pack_tokens": pack_tokens,
        **asdict(settings),
    }
    done = read_seen(str(folder / LM_FOLDER))
    drawn = _draw(courses, opened, pack_tokens=pack_tokens, settings=settings)
    with lock_folder(folder):
        _check_run(folder, asked)
        if done is None:
            finetune(
                opened.source,
                opened.tokenizer,
                drawn.packs,
                settings=settings,
                seen=drawn.seen,
                folder=folder,
            )
    return TrainedLM(folder / LM_FOLDER, len(drawn.seen.words), len(drawn.seen.forms))


def _told(course: Course) -> Json:
    few_shot = load_few_shot(course.lessons.family.prompt)
    return [asdict(course.lessons), {k: dict(v) for k, v in course.words.items()}, asdict(few_shot)]


def _check_run(folder: Path, asked: dict[str, Json]) -> None:
    """Refuse the folder of another run; a new one says whose it is."""
    path = folder / RUN_FILE
    if not path.is_file():
        write_json(path, asked)
        return
    try:
        made: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ArtifactError(f"{path} is damaged ({error}): use another --output_dir") from None
    check_fingerprint(folder, made=made, asked=asked)


@dataclass(frozen=True)
class _Drawn:
    packs: list[Pack]
    seen: Seen


def _draw(
    courses: Sequence[Course], lm: CausalLM, *, pack_tokens: int, settings: FinetuneSettings
) -> _Drawn:
    """Draw as many sequences as are learned, the courses' in turn."""
    words: set[str] = set()
    forms: set[str] = set()

    def packs_of(course: Course) -> Iterator[Pack]:
        few_shot = load_few_shot(course.lessons.family.prompt)
        packer = Packer(
            lm.tokenizer,
            few_shot,
            pack_tokens=pack_tokens,
            seed=settings.seed,
            lead_ids=lm.lead_ids,
        )
        draw = draw_lessons(course.lessons, course.words, seed=settings.seed)

        def next_lesson() -> Lesson:
            lesson = draw()
            words.add(lesson.word)
            forms.add(lesson.form)
            return lesson

        while True:
            yield packer.pack(next_lesson)

    turns = cycle([packs_of(course) for course in courses])
    count = settings.max_steps * settings.packs_per_step
    return _Drawn([next(turn) for turn in islice(turns, count)], Seen(words, forms))
