"""MemPrompt's prefix by KATE: each question's nearest examples, never the question itself."""

from conftest import write_jsonl
from msgspec.structs import asdict

from pgra.memory.families import FewShot, PromptExample
from pgra.memory.lookup import LookupArguments
from pgra.memory.stream import StreamArguments, choose_examples

POOL = [
    PromptExample("what is akin to < red > ?", "the synonym for red is scarlet"),
    PromptExample("what is the reverse of < up > ?", "the antonym for up is down"),
    PromptExample("say more about < owl > ?", "it is a bird", "I want a definition"),
    PromptExample("what sounds like < sea > ?", "the homonym for sea is see", "f"),
]
PLAIN = FewShot("mine", "\n#\n", "END", "{question} | {feedback}", tuple(POOL[:2]))
ASKED = [
    "what is the reverse of < hot > ?",
    "say more about < oak > ?",
    "what is akin to < red > ?",
]


def chosen(tmp_path, *, count=2, form="slotless", more=(), asked=ASKED):
    lines = [asdict(shown) | {"feedback": shown.feedback or "f"} for shown in [*POOL[2:], *more]]
    pool = write_jsonl(tmp_path / "pool.jsonl", lines)
    kate = {"prefix": "kate", "prefix_examples": count}
    place = {"artifacts_dir": str(tmp_path), "device": "cpu"}
    args = StreamArguments(stream="x", prefix_pool=str(pool), **kate, **place)
    return choose_examples(PLAIN, asked, args, LookupArguments(key_form=form, encoder="bm25"))


def test_each_question_has_its_nearest_first_and_is_never_shown_itself(tmp_path):
    prompt = chosen(tmp_path)
    assert prompt.examples_of(ASKED[0]) == (POOL[1], POOL[0])
    assert prompt.examples_of(ASKED[1]) == (POOL[2], POOL[0])
    assert prompt.write(ASKED[1]).startswith("say more about < owl > ? | I want a definition\n#\n")
    assert prompt.write("else") == PLAIN.write("else")  # the prompt's own, as without KATE
    shown = chosen(tmp_path, count=3).examples_of(ASKED[2])
    assert (len(shown), POOL[0] in shown) == (3, False)
