import pytest

from pgra.config import (
    CorpusArguments,
    DataArguments,
    ReaderArguments,
    RerankArguments,
    RetrieverArguments,
    check_depths,
    config_root,
    read_yaml,
)
from pgra.errors import ConfigError


@pytest.mark.parametrize(
    ("cls", "values", "message"),
    [
        (
            RetrieverArguments,
            {"retriever": "bm52"},
            "unknown retriever 'bm52'. Did you mean 'bm25'",
        ),
        (RetrieverArguments, {"pooling": "sum"}, "unknown pooling 'sum'"),
        (RetrieverArguments, {"encoder_dtype": "float8"}, "unknown encoder_dtype 'float8'"),
        (RetrieverArguments, {"num_candidates": 0}, "num_candidates is 0: .* at least 1"),
        (RetrieverArguments, {"shard_rows": 0}, "shard_rows is 0"),
        (RerankArguments, {"exemplars": "ballanced"}, "Did you mean 'balanced'"),
        (RerankArguments, {"prefix_sharing": "yes"}, "unknown prefix_sharing 'yes'"),
        (RerankArguments, {"num_evidence": -1}, "num_evidence is -1: it must be at least 0"),
        (RerankArguments, {"max_prompt_tokens": 3}, "max_prompt_tokens is 3"),
        (ReaderArguments, {"segment_order": "evidence"}, "Did you mean 'evidence_first'"),
        (ReaderArguments, {"decode": "greedy"}, "unknown decode 'greedy'"),
        (ReaderArguments, {"max_segment_tokens": 2}, "max_segment_tokens is 2"),
        (DataArguments, {"dev_fraction": 1.0}, "dev_fraction is 1.0: .* above 0 and below 1"),
        (DataArguments, {"max_train_samples": 0}, "max_train_samples is 0"),
        (CorpusArguments, {"max_passages": 0}, "max_passages is 0"),
    ],
)
def test_what_cannot_work_is_refused(cls, values, message):
    with pytest.raises(ConfigError, match=message):
        cls(**values)
    cls()  # the defaults stand


def test_more_evidence_than_candidates_is_refused():
    check_depths(RetrieverArguments(num_candidates=5), RerankArguments(num_evidence=5))
    with pytest.raises(ConfigError, match=r"num_evidence \(6\) exceeds num_candidates \(5\)"):
        check_depths(RetrieverArguments(num_candidates=5), RerankArguments(num_evidence=6))


@pytest.mark.parametrize("path", sorted(config_root().rglob("*.yaml")), ids=lambda p: p.stem)
def test_every_shipped_yaml_is_read(path):
    if path.parent.name == "profiles" and path.stem == "pgra":
        assert "Every value is" in path.read_text()  # it says nothing, and says so
    else:
        assert read_yaml(path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"a: [", "is not valid YAML"),
        (b"caf\xe9: 1", "is not valid YAML"),
        (b"just words", "must be a mapping of names to values"),
    ],
)
def test_a_yaml_that_is_none_is_refused(tmp_path, data, message):
    path = tmp_path / "a.yaml"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=message):
        read_yaml(path)
    with pytest.raises(ConfigError, match="cannot read .*b.yaml: No such file"):
        read_yaml(tmp_path / "b.yaml")
