"""The wrappers for other libraries, in these, with a tiny LM and encoder."""

import pytest
from conftest import SENTENCES

import pgra
from pgra.integrations.cross_encoder import PgraCrossEncoder

pytestmark = pytest.mark.slow

QUERY, DOCUMENTS = "red apples in the garden", SENTENCES[:6]
POOL = [
    {"question": "Where do red apples grow?", "answer": "in the garden"},
    {"question": "Who loved the film?", "answer": "the critics"},
    {"question": "What is by the sea?", "answer": "an old house"},
]


@pytest.fixture(scope="module")
def reranker(lm_dirs):
    return pgra.Reranker(str(lm_dirs["opt"]), template="{text} It was", device="cpu")


@pytest.fixture(scope="module")
def hits(reranker):
    found = reranker.rank(QUERY, DOCUMENTS)
    assert [hit.index for hit in found] != list(range(6))  # the control: the order changes
    return found


def test_a_langchain_compressor_gives_the_rerankers_best_as_documents(reranker, hits):
    pytest.importorskip("langchain_core", reason="needs the extra `integrations`")
    from pgra.integrations import langchain

    documents = [
        langchain.Document(text, id=f"d{number}", metadata={"row": number})
        for number, text in enumerate(DOCUMENTS)
    ]
    compressor = langchain.PgraReranker(reranker=reranker, top_n=2)
    best = compressor.compress_documents(documents, QUERY)
    assert [document.page_content for document in best] == [hit.text for hit in hits[:2]]
    assert [document.id for document in best] == [f"d{hit.index}" for hit in hits[:2]]
    for document, hit in zip(best, hits, strict=False):
        assert document.metadata == {"row": hit.index, "relevance_score": hit.score}
    assert all("relevance_score" not in document.metadata for document in documents)  # copies
    assert compressor.compress_documents([], QUERY) == []


def test_kate_chooses_the_examples_of_a_langchain_prompt(encoder_dir):
    pytest.importorskip("langchain_core", reason="needs the extra `integrations`")
    from langchain_core.prompts import FewShotPromptTemplate, PromptTemplate

    from pgra.integrations import langchain

    selector = pgra.ExemplarSelector(
        POOL, text="question", label="answer", encoder=str(encoder_dir), device="cpu"
    )
    asked = "Where do green apples grow?"
    prompt = FewShotPromptTemplate(
        example_selector=langchain.KateSelector(selector, k=2),
        example_prompt=PromptTemplate.from_template("Q: {question}\nA: {answer}"),
        suffix="Q: {question}\nA:",
        input_variables=["question"],
    ).format(question=asked)
    near = selector.select(asked, 2)
    blocks = [f"Q: {item['question']}\nA: {item['answer']}" for item in near]
    assert prompt == "\n\n".join([*blocks, f"Q: {asked}\nA:"])


def test_a_llama_index_postprocessor_gives_the_rerankers_best_as_nodes(reranker, hits):
    pytest.importorskip("llama_index.core", reason="needs the extra `integrations`")
    from llama_index.core.schema import TextNode

    from pgra.integrations import llama_index

    nodes = [
        llama_index.NodeWithScore(node=TextNode(text=text, id_=f"n{number}"), score=0.5)
        for number, text in enumerate(DOCUMENTS)
    ]
    rerank = llama_index.PgraRerank(reranker, top_n=3)
    best = rerank.postprocess_nodes(nodes, query_str=QUERY)
    assert [node.node.node_id for node in best] == [f"n{hit.index}" for hit in hits[:3]]
    assert [node.score for node in best] == [hit.score for hit in hits[:3]]
    assert {node.score for node in nodes} == {0.5}  # the given ones stay
    assert rerank.postprocess_nodes([], query_str=QUERY) == []


def test_a_cross_encoders_calls_give_the_rerankers_scores_to_an_evaluator(reranker, hits):
    from sentence_transformers.cross_encoder.evaluation import CrossEncoderRerankingEvaluator

    ours = PgraCrossEncoder(reranker)
    best = ours.rank(QUERY, DOCUMENTS, top_k=2, return_documents=True)
    assert best == [{"corpus_id": h.index, "score": h.score, "text": h.text} for h in hits[:2]]
    asked = [(query, text) for text in DOCUMENTS for query in ("A film.", QUERY)]
    scores = ours.predict(asked, batch_size=2)
    assert scores[1::2][[hit.index for hit in hits]] == pytest.approx([hit.score for hit in hits])
    assert ours.predict(asked[0]) == pytest.approx(scores[0])
    *others, last = [hit.text for hit in hits]
    sample = {"query": QUERY, "positive": last, "negative": others}
    evaluate = CrossEncoderRerankingEvaluator([sample], name="x", write_csv=False)
    assert evaluate(ours)["x_mrr@10"] == pytest.approx(1 / 6)
