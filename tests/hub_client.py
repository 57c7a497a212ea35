"""Asks a hub, in a process of its own: its client reads the environment once, when imported.

Reads [[check, name], ...] from the command line and prints one JSON value for each.
"""

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path

from pgra.errors import PgraError

TEXT = "The film is a warm and funny portrait."


def ask_commit(name: str) -> object:
    from pgra.lm.load import find_model

    return find_model(name).revision


def ask_weights(name: str) -> object:
    from huggingface_hub import hf_hub_download

    commit = str(ask_commit(name))
    hf_hub_download(name.partition("@")[0], "model.safetensors", revision=commit)
    return commit


def ask_lm(name: str) -> object:
    from pgra.lm.causal_lm import CausalLM

    lm = CausalLM.from_name(name, device="cpu", dtype="float32")
    states = lm.states_of(lm.tokenize([TEXT]))
    return {"fingerprint": dict(lm.fingerprint), "state": states[0].tolist()}


def ask_encoder(name: str) -> object:
    from pgra.encoders.encoder import Encoder

    encoder = Encoder.from_name(name, device="cpu")
    return {"fingerprint": dict(encoder.fingerprint), "vector": encoder.encode([TEXT])[0].tolist()}


def ask_reader(name: str) -> object:
    from pgra.reader.fid import FusionReader

    return {
        name: float(w.detach().abs().sum())
        for name, w in FusionReader.from_name(name).named_parameters()
    }


def ask_corpus(name: str) -> object:
    from pgra.config import CorpusArguments
    from pgra.data.corpus import open_corpus

    corpus = open_corpus(CorpusArguments(corpus=name), Path.cwd() / "artifacts")
    return corpus.texts(range(len(corpus)))


def ask_task(name: str) -> object:
    from pgra.data.examples import load_examples
    from pgra.data.tasks import load_task

    task = load_task(name)
    assert task.hub is not None
    examples = load_examples(task, task.hub.id, "test")
    return [[example.fields["text"], example.label] for example in examples]


def ask_bars(_: str) -> object:
    from huggingface_hub.utils import are_progress_bars_disabled
    from transformers.utils.logging import is_progress_bar_enabled

    from pgra.commands.common import quiet_libraries

    quiet_libraries()
    return {"download": not are_progress_bars_disabled(), "read": is_progress_bar_enabled()}


CHECKS: dict[str, Callable[[str], object]] = {
    "commit": ask_commit,
    "weights": ask_weights,
    "lm": ask_lm,
    "encoder": ask_encoder,
    "reader": ask_reader,
    "corpus": ask_corpus,
    "task": ask_task,
    "bars": ask_bars,
}


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    answers = []
    for check, name in json.loads(sys.argv[1]):
        try:
            answers.append(CHECKS[check](name))
        except PgraError as error:
            answers.append({"error": f"{type(error).__name__}: {error}"})
    sys.stdout.write(json.dumps(answers))


if __name__ == "__main__":
    main()
