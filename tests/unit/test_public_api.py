"""The Python API: light to import, every name documented and typed."""

import inspect
import json
import subprocess
import sys

import pytest

import pgra


def modules_after(code):
    """Run code in a fresh interpreter and return what it imported."""
    told = f"{code}\nimport sys, json; print(json.dumps([*sys.modules]))"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


@pytest.mark.slow
def test_a_name_imports_its_own_module_only():
    heavy = {"torch", "transformers", "datasets", "faiss"}
    assert not modules_after("import pgra") & {*heavy, "numpy", "pgra.core"}
    loaded = modules_after("from pgra import Candidates")
    assert "pgra.core" in loaded
    assert not loaded & heavy


@pytest.mark.parametrize("name", pgra.__all__)
def test_every_public_name_is_what_its_home_defines(name):
    value = getattr(pgra, name)
    assert value.__name__ == name
    assert value.__module__.startswith("pgra.")
    assert value.__doc__


def test_names_are_listed_and_an_unknown_one_is_an_attribute_error():
    assert {"CausalLM", "Reader", *pgra.__all__} <= set(dir(pgra))
    with pytest.raises(AttributeError, match="module 'pgra' has no attribute 'Encodre'"):
        _ = pgra.Encodre


# A device that is not there. What else is asked for is not there either, so that anything that was
# looked for first would be told of first.

NONE = "/nowhere/none"
RERANK = pgra.RerankArguments(lm=NONE)
ON_DEVICE = {
    "CausalLM": lambda at: pgra.CausalLM(NONE, device=at),
    "CausalLM.from_name": lambda at: pgra.CausalLM.from_name(NONE, device=at),
    "CausalLM.open": lambda at: pgra.CausalLM.open(RERANK, at),
    "Context": lambda at: pgra.Context(device=at),
    "Encoder": lambda at: pgra.Encoder(NONE, device=at),
    "Encoder.from_name": lambda at: pgra.Encoder.from_name(NONE, device=at),
    "ExemplarSelector": lambda at: pgra.ExemplarSelector(NONE, encoder=NONE, device=at),
    "Index.build": lambda at: pgra.Index.build(NONE, encoder=NONE, device=at),
    "Index.load": lambda at: pgra.Index.load(NONE, device=at),
    "Memory": lambda at: pgra.Memory("/nowhere/memory.sqlite", encoder=NONE, device=at),
    "Predictor.open": lambda at: pgra.Predictor.open(NONE, device=at),
    "PromptedEncoder.open": lambda at: pgra.PromptedEncoder.open(RERANK, None, at),
    "Reader.from_pretrained": lambda at: pgra.Reader.from_pretrained(NONE, device=at),
    "Reader.load": lambda at: pgra.Reader.load(NONE, device=at),
    "Reranker": lambda at: pgra.Reranker(NONE, template="{text}", device=at),
    "RuntimeArguments": lambda at: pgra.train("sst2", model_name_or_path=NONE, device=at),
}


def test_the_table_has_all_that_takes_a_device():
    found = set()
    for name in pgra.__all__:
        value = getattr(pgra, name)
        own = [n for n in vars(value) if n[0] != "_"] if inspect.isclass(value) else []
        places = {name: value, **{f"{name}.{n}": getattr(value, n) for n in own}}
        found |= {
            place
            for place, called in places.items()
            if callable(called) and "device" in inspect.signature(called).parameters
        }
    assert found == set(ON_DEVICE)


@pytest.mark.parametrize("name", ON_DEVICE)
def test_a_device_that_is_not_there_is_refused_before_anything_else(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    for device in ("cuda", "cuda:7", "mps", "tpu", "hpu", ""):
        with pytest.raises(pgra.PgraError) as refused:
            ON_DEVICE[name](device)
        told = str(refused.value)
        assert told.startswith(f"cannot use device '{device}': "), told
        assert told.endswith(". Use auto or cpu.")
        assert "\n" not in told
    if name != "Context":  # the control
        with pytest.raises((pgra.PgraError, OSError), match="nowhere"):
            ON_DEVICE[name]("cpu")
    kind = pgra.ConfigError if name == "RuntimeArguments" else ValueError
    with pytest.raises(kind, match="device"):
        ON_DEVICE[name](0)
    assert list(tmp_path.iterdir()) == []
