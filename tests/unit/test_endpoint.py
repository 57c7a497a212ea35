"""An LM behind a real endpoint on loopback: kept answers, no answers, failures and the key."""

import functools
import json
import logging
import ssl

import pytest
import torch
from loopback import BUSY, Fault, LoopbackEndpoint, Written, toy_writer

from pgra.context import Context
from pgra.errors import ConfigError, ModelError
from pgra.lm import open_lm
from pgra.lm.base import CompleterArguments
from pgra.lm.causal_lm import CausalLM
from pgra.lm.endpoint import continuation, without_reasoning, word_chance

KEY = "sk-proj-VerySecret0123456789abcdef"
URL = "http://127.0.0.1:9/v1"
PROMPTS = ["Q: red", "Q: green", "Q: blue", "Q: grey"]
TEXTS = [" red", " green", " blue", " grey"]
WORDS = [" great", " terrible", " not great"]

tls_context = functools.cache(ssl.create_default_context)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("OPENAI_BASE_URL", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)  # a test's pauses
    monkeypatch.setattr(ssl, "create_default_context", tls_context)  # takes longer than most tests


@pytest.fixture
def server():
    return LoopbackEndpoint()


@pytest.fixture
def open_at(tmp_path):
    """Open LMs behind an address."""

    def open_one(url, lm="openai:toy", **options):
        named = {"lm_window": 65, "endpoint": "completions", **options}
        args = CompleterArguments(lm=lm, base_url=url, **named)
        return open_lm(args, Context(artifacts=tmp_path))

    return open_one


def complete(lm, prompts=PROMPTS):
    done = []
    answers = lm.complete(prompts, max_new_tokens=4, stop="\n", advance=done.append)
    assert sum(done) == len(set(prompts))
    return [answer.text for answer in answers]


def test_answers_are_in_order_and_asked_for_once(server, open_at):
    server.writer = lambda prompt, most, stop: toy_writer(prompt, most, None)  # writes on
    with server.serve() as url:
        assert complete(open_at(url), PROMPTS[:2] * 2) == TEXTS[:2] * 2
        again = open_at(url)
        assert complete(again) == TEXTS
        assert sorted(str(body["prompt"]) for body in server.bodies) == sorted(PROMPTS)
        spent = again.describe_spending()
        assert [spent[name] for name in ("calls", "prompt_tokens")] == [2, 4]
        again.complete(PROMPTS[:1], max_new_tokens=4, stop=";")  # the control: another question
    asked = {"model": "toy", "temperature": 0, "max_tokens": 4, "path": "/v1/completions"}
    assert asked | {"prompt": PROMPTS[0], "stop": [";"]} == server.bodies[-1]
    assert server.headers[0]["authorization"] == f"Bearer {KEY}"


def test_a_chat_gets_the_prompt_as_one_message(server, open_at):
    server.endpoints = ["chat"]
    server.writer = lambda prompt, *_: Written(f"\nQ: {prompt.split()[-1]} wine\nQ: more", 3, 4)
    with server.serve() as url:
        lm = open_at(url, endpoint="auto")
        assert complete(lm, PROMPTS[:2]) == [" wine", " wine"]
        assert lm.fingerprint["endpoint"] == "chat"
        assert "endpoint" not in open_at(url).fingerprint  # the control; completions as ever
    contents = [body["messages"][0]["content"] for body in server.bodies if "messages" in body]
    assert {text.rpartition("\n\n")[2] for text in contents} > {*PROMPTS[:2]}
    assert not any("stop" in body for body in server.bodies)  # it would end a reasoning block


# Answers that are none.


def said(finish="stop", *, is_chat=True, **message):
    choice = {"message": message} if is_chat else message
    choice = {"index": 0, "finish_reason": finish, **choice}
    return Fault(200, json.dumps({"choices": [choice]}))


FILTER = {"error": {"message": "the policy", "code": "content_filter"}}
NO_ANSWERS = [
    ("chat", said("content_filter", content="Half an")),
    ("chat", Fault(400, json.dumps(FILTER))),
    ("chat", said(content="Sorry", refusal="I cannot")),
    ("chat", said("length", content="<think>\nSo the user")),
    ("completions", said("content_filter", is_chat=False, text=" red")),
]


@pytest.mark.parametrize(("endpoint", "fault"), NO_ANSWERS)
def test_an_answer_that_is_none_is_counted_said_and_asked_again(
    server, open_at, caplog, endpoint, fault
):
    server.faults = [fault]
    with server.serve() as url:
        lm = open_at(url, endpoint=endpoint, max_parallel_calls=1)
        first, second = complete(lm, PROMPTS[:2])
        assert (first, second.strip()) == ("", "green")  # the control: an answer
        assert lm.describe_spending()["unanswered"] == 1
        assert "1 of 2 answers are empty" in caplog.text
        again = [text.strip() for text in complete(lm, PROMPTS[:2])]
    assert again == ["red", "green"]
    assert len(server.bodies) == 3  # one was kept
    assert lm.describe_spending()["unanswered"] == 0


BLOCKS = [
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
]


@pytest.mark.parametrize(("opening", "closing"), BLOCKS)
def test_a_reasoning_block_is_left_out_wherever_it_stands(server, open_at, opening, closing):
    for inside in ("\n\n", "\nIt seems negative.\nNo.\n"):
        whole = f"{opening}{inside}{closing}"
        assert without_reasoning(f"{whole}{whole}\n\nPositive") == "\n\nPositive"
        assert without_reasoning(f"{inside}{closing}Positive") == "Positive"  # the prompt opened it
        assert without_reasoning(f"{opening}{inside}") == ""
        assert without_reasoning(f"Positive\n{inside}") == f"Positive\n{inside}"  # the control
    server.faults = [said(content=f"{whole}\n\nred")]
    with server.serve() as url:
        lm = open_at(url, endpoint="chat")
        assert complete(lm, PROMPTS[:1]) == complete(lm, PROMPTS[:1]) == ["red"]


# Which way it is asked.


@pytest.mark.parametrize(
    ("offers", "chosen"),
    [
        ({}, "completions score"),
        ({"echoes": False}, "completions generation"),
        ({"endpoints": ["chat"]}, "chat generation"),
    ],
)
def test_the_best_way_that_a_server_offers_is_chosen(server, open_at, offers, chosen):
    vars(server).update(offers)
    with server.serve() as url:
        lm = open_at(url, endpoint="auto").resolve(None)
    assert " ".join(vars(lm.mode).values()) == chosen


def test_a_way_that_is_named_is_taken_as_it_is_or_refused(server, open_at):
    assert open_at(URL).resolve("score").mode.decide_by == "score"  # nothing is asked
    with pytest.raises(ConfigError):
        open_at(URL, endpoint="chat").resolve("score")
    server.faults = [Fault(400, json.dumps(FILTER))]  # of one word alone
    with server.serve() as url:
        for server.echoes in (True, False):
            with pytest.raises(ModelError, match="--decide_by"):
                open_at(url).score(PROMPTS[:1], WORDS)


# Chances.


TOKENS = ("It", " was", " great", " fun", ".")  # the last one is written
CHANCES = (None, -1.0, -0.5, -0.25, -4.0)


@pytest.mark.parametrize(
    ("tokens", "chances", "word", "expected"),
    [
        (TOKENS, CHANCES, " great fun", -0.75),
        (TOKENS, CHANCES, " fun", -0.25),  # the control
        (("<s>", *TOKENS), (None, -9.0, *CHANCES[1:]), " great fun", -0.75),
        (("It", " was", " great", " ", "fun", "."), (*CHANCES, -2.0), " fun", -4.25),
        (("bytes:\\xe6", "\ufffd", *TOKENS[2:]), CHANCES, " great fun", -0.75),
        (TOKENS, CHANCES, " dull", None),
        (TOKENS, CHANCES[1:], " fun", None),
        (TOKENS, (None, -1.0, float("inf"), -0.25, -4.0), " great fun", None),
        (("It", " was great", " fun", "."), CHANCES[1:], " great fun", None),
    ],
)
def test_only_the_words_tokens_count_however_a_server_spells_them(tokens, chances, word, expected):
    scored = {"tokens": tokens, "token_logprobs": chances}
    prompt = "It was great fun".removesuffix(word)
    choice = {"text": "It was great fun.", "logprobs": scored}
    assert word_chance(choice, prompt, word, 1) == expected


@pytest.mark.parametrize(
    ("prompt", "text", "rest"),
    [
        ("Q: Italy?\nA:", " A: Rome", " Rome"),
        ("a dull film It was", "It was terrible", " terrible"),
        ("a dull film It was", "\nwaste of time", "waste of time"),  # no whole word of the end
        ("Q: Italy?\nA:", "Rome", "Rome"),
    ],
)
def test_a_chat_that_says_the_prompts_end_again_is_read_without_it(prompt, text, rest):
    assert continuation(prompt, text) == rest


# Failures.


def error_of(message, code=None):
    return json.dumps({"error": {"message": message, "code": code}})


def test_what_may_pass_is_tried_again_under_status_200_too(server, open_at):
    upstream, lost = error_of("Provider returned error", 429), error_of("the model is busy")
    inner = json.dumps({"choices": [{"index": 0, "text": "re", **json.loads(upstream)}]})
    server.faults = [BUSY, Fault(), *(Fault(200, body) for body in (upstream, lost, inner))]
    with server.serve() as url:
        assert complete(open_at(url), PROMPTS[:1]) == TEXTS[:1]
    assert len(server.bodies) == 6


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault(200, "<html>Hi</html>", {"Content-Type": "text/html"}), "/v1"),
        (Fault(200, "[" * 100_000), "/v1"),
        (Fault(200, error_of("no such voice", 404)), "404"),
        (Fault(307, "", {"Location": "http://elsewhere/v1"}), "307"),
    ],
)
def test_what_trying_again_does_not_mend_is_reported_at_once(server, open_at, fault, message):
    server.faults = [fault]
    with server.serve() as url, pytest.raises(ModelError, match=message):
        complete(open_at(url), ["Q: red"])
    assert len(server.bodies) == 1


def test_what_a_chat_model_does_not_take_is_left_out_once_it_says_so(server, open_at):
    server.unsupported = {"max_tokens", "temperature"}
    with server.serve() as url:
        lm = open_at(url, endpoint="chat", max_parallel_calls=1)
        assert complete(lm) == [text.strip() for text in TEXTS]
    assert len(server.bodies) == len(TEXTS) + 2
    assert server.bodies[-1]["max_completion_tokens"] == 4


# The key, the address, and what a run is made of.


def test_the_key_is_nowhere(server, open_at, tmp_path, caplog, capfd):
    """Not in errors, though endpoints quote it; not in logs of any level, reprs or files."""
    caplog.set_level(logging.DEBUG)
    quoted = f"Incorrect API key provided: {KEY}. or {KEY[:9]}*****cdef, " + "x" * 190 + KEY
    server.faults = [BUSY, Fault(), Fault(500, quoted)]
    texts = []
    with server.serve() as url:
        lm = open_at(url)
        complete(lm)
        for fault in (Fault(401, error_of(quoted)), Fault(400, quoted)):
            server.faults = [fault]
            with pytest.raises(ModelError, match=r"\*\*\*") as caught:
                complete(lm, ["Q: another"])
            texts.append(f"{caught.value!r} {caught.value.__context__!r}")
    texts += [caplog.text, *capfd.readouterr(), repr(lm), repr(vars(lm)), str(lm.fingerprint)]
    texts += [path.read_bytes().decode("latin1") for path in tmp_path.rglob("*.sqlite*")]
    assert len(caplog.text) > 1000  # the control: the libraries did log
    assert [text for text in texts if "VerySecret" in text or KEY[:9] in text] == []


def test_an_endpoint_of_ones_own_needs_no_key_and_openais_does(server, open_at, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "")
    with server.serve() as url:
        assert complete(open_at(url), ["Q: red"]) == [" red"]
    assert KEY not in server.headers[0]["authorization"]
    with pytest.raises(ConfigError, match="openai:toy"):
        open_at(None)


@pytest.mark.parametrize(
    ("url", "changes"),
    [
        ("https://me:Secret@there/v1", {}),
        ("https://there/v1?key=Secret", {}),
        (URL, {"key": "Secret\nlines"}),
        (URL, {"lm": "gpt2"}),
    ],
)
def test_what_cannot_be_asked_is_refused_without_its_secrets(open_at, monkeypatch, url, changes):
    monkeypatch.setenv("OPENAI_API_KEY", changes.pop("key", KEY))
    with pytest.raises(ConfigError) as caught:
        open_at(url, **{"lm_window": None, "endpoint": "auto", **changes})
    assert "Secret" not in str(caught.value)


def test_the_fingerprint_names_model_endpoint_window_and_tokenizer(open_at, lm_dirs):
    lm = open_at(f"{URL}/")
    fields = {"lm": "openai:toy", "base_url": URL, "window": 65, "tokens": "estimate"}
    assert (lm.fingerprint, lm.window) == (fields, 64)  # one token is written by scoring
    assert open_at(URL, lm_tokenizer=str(lm_dirs["opt"])).fingerprint["tokens"] != "estimate"


# The same LM here and behind an endpoint.


def test_an_lm_answers_the_same_behind_an_endpoint(lm_dirs, server, open_at):
    local = CausalLM(str(lm_dirs["opt"]), device="cpu")
    prompts = ["The film is a warm", "The boats came home early. The answer is"]

    @torch.inference_mode()
    def write(prompt, max_tokens, stop):
        """Write greedily by the library's own `generate`, one prompt at a time."""
        ids = torch.tensor([[*local.lead_ids, *local.tokenize([prompt])[0]]])
        how = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
        whole = local.whole.generate(ids, max_new_tokens=max_tokens, **how)
        new = whole[0, ids.shape[1] :]
        if stop:
            text = local.tokenizer.decode(new, skip_special_tokens=True)
            return Written(text.split(stop)[0], ids.shape[1], len(new))
        chances = local.whole(ids).logits[0].float().log_softmax(-1)
        chances = chances.gather(-1, whole[0, 1:, None])[:, 0].tolist()
        tokens = tuple(local.tokenizer.decode([token]) for token in whole[0].tolist())
        return Written(tokens[-1], ids.shape[1], 1, tokens, (None, *chances))

    server.writer = write
    with server.serve() as url:
        remote = open_at(url, lm_tokenizer=str(lm_dirs["opt"]), lm_window=None)
        mine, theirs = (
            lm.complete(prompts, max_new_tokens=8, stop=" the") for lm in (local, remote)
        )
        assert [a.text for a in theirs] == [a.text for a in mine]
        assert [a.num_prompt_tokens for a in theirs] == local.count_tokens(prompts)
        scores = remote.score(prompts, WORDS)
    for line, expected in zip(scores, local.score(prompts, WORDS), strict=True):
        assert line == pytest.approx(expected, abs=1e-3)
