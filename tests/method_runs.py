"""Arguments of runs on tiny models, and what runs leave, for the tests of methods."""

import json
from dataclasses import fields, replace

from pgra.commands.common import parse_run
from pgra.exemplars import SelectionArguments
from pgra.lm.base import CompleterArguments
from pgra.methods.arguments import RunArguments, RuntimeArguments
from pgra.methods.base import find_method, find_sections
from pgra.methods.kate import AnswerArguments
from pgra.reader.arguments import FolderArguments, TrainingArguments


def run_of(args, method, folder, **training):
    """A run of a method with PGRA's arguments; `training` holds the Trainer's and its own.

    With ralm the reader is the reranker's LM, and what a `RalmArguments` has, goes there.
    """
    runtime = replace(args.runtime, method=method)
    sections = {**args.sections, "runtime": runtime}
    if method == "head":
        sections = {"runtime": runtime, "data": args.data}
        training = {"lm": args.rerank.lm, "num_exemplars": 2, **training}
    if method == "ralm":
        del sections["reader"]
        training.setdefault("reader_lm", args.rerank.lm)
    for name, cls in find_method(method).SECTIONS.items():
        if name not in sections and name != "training":
            own = {f.name for f in fields(cls)} & set(training)
            sections[name] = cls(**{key: training.pop(key) for key in own})
    if "training" in find_sections({"method": method}):
        usual = {"max_steps": 2, "per_device_train_batch_size": 4, "seed": 1}
        sections["training"] = TrainingArguments(output_dir=str(folder), **{**usual, **training})
    else:
        seed = int(training.get("seed", 0))
        sections["folder"] = FolderArguments(output_dir=str(folder), seed=seed)
    return RunArguments(sections)


def kate_run(data, root, *, lm, name="run", **changes):
    """A run of KATE: `changes` go to whichever section has an argument of that name."""
    run = RunArguments(
        {
            "runtime": RuntimeArguments(
                method="kate", artifacts_dir=str(root / "artifacts"), device="cpu"
            ),
            "data": data,
            "completer": CompleterArguments(lm=str(lm)),
            "selection": SelectionArguments(),
            "icl": AnswerArguments(),
            "folder": FolderArguments(output_dir=str(root / "runs" / name)),
        }
    )
    return having(run, **changes)


def having(run, **changes):
    """Change arguments wherever they stand; `name` is the run folder's."""
    sections = dict(run.sections)
    if "name" in changes:
        changes["output_dir"] = str(run.folder.with_name(str(changes.pop("name"))))
    for section, part in sections.items():
        names = [f.name for f in fields(part) if f.name in changes]
        if section == "training":
            for name in names:
                part = run.change(section, **{name: changes[name]})[section]
        elif names:
            part = replace(part, **{name: changes[name] for name in names})
        sections[section] = part
        for name in names:
            del changes[name]
    assert not changes, changes
    return RunArguments(sections)


def parse(*flags):
    """Arguments as of a command line, the task and the folder given."""
    words = ["--task", "sst2", "--output_dir", "x", "--device", "cpu", *flags]
    return parse_run(parse, "test", words)[0]


def lines_of(folder):
    text = (folder / "predictions.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]
