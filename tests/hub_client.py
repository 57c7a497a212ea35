"""Asks a hub, in a process of its own: its client reads the environment once, when imported.

Reads [[check, name], ...] from the command line and prints one JSON value for each.
"""

import json
import logging
import sys
from pathlib import Path

from pgra.config import CorpusArguments
from pgra.data.corpus import open_corpus
from pgra.data.examples import open_split, read_split
from pgra.data.tasks import load_task
from pgra.errors import PgraError

TEXT = "The film is a warm and funny portrait."


def lm(name):
    from pgra.lm.causal_lm import CausalLM

    lm = CausalLM.from_name(name, device="cpu", dtype="float32")
    states = lm.states_of(lm.tokenize([TEXT]))
    return {"fingerprint": dict(lm.fingerprint), "state": states[0].tolist()}


def encoder(name):
    from pgra.encoders.encoder import Encoder

    encoder = Encoder.from_name(name, device="cpu")
    return {"fingerprint": dict(encoder.fingerprint), "vector": encoder.encode([TEXT])[0].tolist()}


def reader(name):
    from pgra.reader.fid import FusionReader

    parameters = FusionReader.from_name(name).named_parameters()
    return {name: float(weight.detach().abs().sum()) for name, weight in parameters}


def corpus(name):
    found = open_corpus(CorpusArguments(corpus=name), Path.cwd() / "artifacts")
    return found.texts(range(len(found)))


def task(name):
    task = load_task(name)
    rows = read_split(task, open_split(task, task.hub.id, "test"), "test")
    return [[example.fields["text"], example.label] for example in rows.examples]


def bars(_):
    from huggingface_hub.utils import are_progress_bars_disabled
    from transformers.utils.logging import is_progress_bar_enabled

    from pgra.commands.common import quiet_libraries

    quiet_libraries()
    return {"download": not are_progress_bars_disabled(), "read": is_progress_bar_enabled()}


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    answers = []
    for check, name in json.loads(sys.argv[1]):
        try:
            answers.append(globals()[check](name))
        except PgraError as error:
            answers.append({"error": f"{type(error).__name__}: {error}"})
    sys.stdout.write(json.dumps(answers))
