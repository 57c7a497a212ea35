"""`--lm_layer auto`: the layer of an LM whose states tell a task's labels, found on its examples.

What a text means to a task is often plainer in the middle of an LM than at its end, where states
turn into the next word's (Skean et al. 2025, "Layer by Layer", arXiv 2502.02013). The whole LM
reads training examples once under the task's prompt, and at each of several depths a head is fitted
to their states (`pgra.rerank.head`). The choice is a product of its own, made once:

    manifest.json  its counts hold the layer, the number of examples and the accuracy by layer
"""

import logging
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pgra.artifacts import artifact_dir, build_once, digest
from pgra.core import Example, Json
from pgra.errors import ConfigError
from pgra.lm.load import layer_at
from pgra.lm.prefix import PromptedEncoder
from pgra.rerank.bank import bank_name, query_key
from pgra.rerank.base import RerankRequest
from pgra.rerank.head import fit_head

logger = logging.getLogger(__name__)

STAGE = "layer"
SHARES = (1 / 3, 1 / 2, 3 / 5, 2 / 3, 3 / 4, 5 / 6, 1.0)
"""Of the depth, at which states are compared."""
SAMPLE = 300
_SEED = 0


def choose_layer(request: RerankRequest) -> str:
    """Return the layer for a request whose `lm_layer` is "auto", as a number or "last".

    A run that is taken up has its own, without its training examples.

    Raises:
        ArtifactError: If the choice cannot be written, or is damaged.
        ConfigError: If there are too few training examples, or all have one label.
        ModelError: If the LM cannot be used.
    """
    made = request.reference.of_prefix(0, request.args.num_prefixes).made
    if made is not None:
        return str(made.get("lm_layer", "last"))
    return str(compare_layers(request)["layer"])


def compare_layers(request: RerankRequest) -> Mapping[str, Any]:
    """Measure a head at several depths, once: "layer", "examples", and "accuracy" by layer.

    Raises:
        PgraError: As `choose_layer`.
    """
    args, examples = request.args, _draw(request.reference.queries)
    counts = Counter(example.label for example in examples)
    if len(counts) < 2 or len(examples) < 2 * len(counts):
        by_label = ", ".join(map(str, counts.values())) or "none"
        raise ConfigError(
            "lm_layer 'auto' is chosen by how well training examples beside those in the prompt "
            f"are told apart, and by label there are {by_label}: give two of each of two labels "
            "at least, or a number, such as --lm_layer 0.6"
        )
    whole = replace(args, lm_layer="last")
    context = request.context
    encoder = PromptedEncoder.open(whole, request.prompt, context.device)
    depth = int(encoder.lm.config.num_hidden_layers)
    depths = sorted({layer_at(share, depth) for share in SHARES})
    fingerprint: Mapping[str, Json] = {
        **encoder.fingerprint,
        "depths": depths,
        "examples": digest([[query_key(one), one.label] for one in examples]),
    }

    def build(_: Path) -> Mapping[str, Json]:
        logger.info("lm_layer auto: the whole LM reads %d training examples", len(examples))
        encoder.lm.depths = depths
        states = np.split(encoder.encode_examples(examples), len(depths), axis=1)
        encoder.release()  # another LM, which may end with a layer, reads the rest
        labels = sorted(map(str, counts))
        targets = np.array([labels.index(str(one.label)) for one in examples], np.intp)
        accuracies = [fit_head(part, targets, len(labels)).accuracy for part in states]
        return {
            "layer": depths[earliest_good(accuracies, len(examples))],
            "examples": len(examples),
            "accuracy": dict(zip(map(str, depths), accuracies, strict=True)),
        }

    folder = artifact_dir(
        request.context.artifacts / "layers", bank_name(encoder.lm.source.name), fingerprint
    )
    chosen = build_once(
        folder, stage=STAGE, fingerprint=fingerprint, build=build, context=request.context
    )
    found: Mapping[str, Any] = chosen.manifest.counts
    logger.info(
        "lm_layer auto: layer %d of %d%s; a head's accuracy on %d training examples by layer: %s",
        found["layer"],
        depth,
        " (reused)" if chosen.reused else "",
        found["examples"],
        ", ".join(f"{layer} {value:.3f}" for layer, value in found["accuracy"].items()),
    )
    return found


def earliest_good(accuracies: Sequence[float], count: int) -> int:
    """Return the index of the first accuracy within one standard error of the best.

    Args:
        accuracies: Shares of `count` examples that were decided rightly.
        count: Their number.
    """
    best = max(accuracies)
    least = best - math.sqrt(best * (1 - best) / count)
    return next(index for index, value in enumerate(accuracies) if value >= least)


def _draw(queries: Sequence[Example]) -> list[Example]:
    """Draw labelled examples by chance, the same ones whatever their order."""
    labelled = [example for example in queries if example.label is not None]
    labelled.sort(key=lambda example: (query_key(example), str(example.label)))
    return random.Random(_SEED).sample(labelled, min(SAMPLE, len(labelled)))
