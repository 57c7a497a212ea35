"""Which class runs the LM that `--lm` names. Light: no torch."""

import re
from dataclasses import dataclass

from pgra.data.bundled import BUNDLED


@dataclass(frozen=True)
class LMEntry:
    """The classes of one kind of LM, as "module:Class".

    Attributes:
        states: A `StateLM`, which gives states and scores of token ids; None: it gives none.
        answers: A `LanguageModel`, which answers prompts.
        is_engine: Whether another program runs it: its states are compared before they are used.
    """

    states: str | None
    answers: str
    is_engine: bool = False


ENDPOINT = "pgra.lm.endpoint:EndpointLM"
REMOTE = "openai:"
_LOCAL = LMEntry("pgra.lm.causal_lm:CausalLM", "pgra.lm.causal_lm:CausalLM")
_SERVER = LMEntry("pgra.lm.state_server:StateServer", ENDPOINT, is_engine=True)

# By the beginning of the name; a hub id or a folder has none of these.
LMS = {
    "": _LOCAL,
    BUNDLED: _LOCAL,
    REMOTE: LMEntry(None, ENDPOINT),
    "http:": _SERVER,
    "https:": _SERVER,
}


def find_entry(name: str) -> LMEntry:
    """Return the classes of the LM of that name; a "module:Class" is one of a user's own."""
    beginning, colon, _ = name.partition(":")
    if colon and f"{beginning}:" in LMS:
        return LMS[f"{beginning}:"]
    if re.fullmatch(r"[^\W\d][\w.]*:[^\W\d]\w*", name):
        return LMEntry(name, name)
    return LMS[""]


def is_model(name: str) -> bool:
    """Whether a name is that of a model's files: a hub id, a folder or bundled:NAME."""
    return find_entry(name) is _LOCAL
