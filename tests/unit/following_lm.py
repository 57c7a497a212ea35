"""A completer that answers by a rule: for the bookkeeping of simulated users, not for results."""

import random
import re

from pgra.commands.serve import build_app
from pgra.lm.base import Completion
from pgra.memory.chat import Conversation, page
from pgra.memory.families import Step, load_family, load_few_shot
from pgra.memory.lookup import EditLookup
from pgra.memory.memory import Memory
from pgra.memory.stream import PromptedLM

AKIN, MEANT = "what is akin to < pretty > ?", "when I ask for akin to, I want a synonym"
SAID = {
    "synonym": "the synonym for {word} is x",
    "antonym": "the antonym for {word} is x",
    "homonym": "the homonym for {word} is x",
    "definition": "the definition of {word} is x",
    "sentence": "a sentence with {word} is: x",
}


ASKED = {  # by type: its name, and how it is asked
    "syn": ("synonym", "like", "similar to", "akin to"),
    "ant": ("antonym", "unlike", "different than", "opposed to"),
    "hom": ("homonym", "heard as", "confused with", "sounding as"),
    "defn": ("definition", "expanded on by", "told of", "known of"),
    "sent": ("sentence", "made with", "said with", "done with"),
}


def stream(count=60, *, seed=0):
    """Draw lexical questions: each in one of the ways to ask, about one of five words."""
    draw, steps = random.Random(seed), []
    for _ in range(count):
        kind = draw.choice(sorted(ASKED))
        name, *ways = ASKED[kind]
        way, word = draw.choice(ways), f"word{draw.randrange(5)}"
        feedback = f"when I ask for {way}, I want a {name}"
        expected = SAID[name].format(word=word)
        steps.append(Step(kind, f"what is {way} < {word} > ?", feedback, (expected,)))
    return steps


class FollowingLM:
    """Says what the clarification in the prompt's last question asks for, else a homonym.

    A token is a word.
    """

    def __init__(self):
        self.window = 4096
        self.calls = []

    @property
    def fingerprint(self):
        return {"lm": "following"}

    def count_tokens(self, texts):
        return [len(text.split()) for text in texts]

    def complete(self, prompts, *, max_new_tokens, stop, advance=None):
        self.calls.append(len(prompts))
        return [self._go_on(prompt) for prompt in prompts]

    def score(self, prompts, words, *, advance=None):
        raise AssertionError("nothing is scored")

    def _go_on(self, prompt):
        question = prompt.split("\n\n###\n\n")[-2]
        told = re.search(r"I want an? (\w+)", question)
        kind = told.group(1) if told else "homonym"
        word = re.search(r"< (.*) >", question).group(1)
        text = f" {SAID[kind].format(word=word)} END\n\n### what stands behind it"
        return Completion(text, len(prompt.split()), len(text.split()))


class Echo(FollowingLM):
    """Answers as the nearest example does, which is the last."""

    def _go_on(self, prompt):
        answer = prompt.split("\n\n###\n\n")[-3].removesuffix(" END")
        return Completion(f"{answer} END", len(prompt.split()), 1)


def open_memory(threshold=-5.0):
    """Open a memory as the paper's streams have it."""
    return Memory(":memory:", lookup=EditLookup, threshold=threshold)


def prompted(name="lexical", completer=None, **more):
    """Return an LM that is asked a family's questions."""
    asked = {"family": load_family(name), "few_shot": load_few_shot(name)}
    return PromptedLM(**{**asked, "completer": completer or FollowingLM(), **more})


def open_page(memory, completer=None):
    """Open the page's application on a memory, with the conversation that it shows."""
    conversation = Conversation(prompted(completer=completer), memory)
    return build_app({}, ["127.0.0.1"], page=page(conversation))
