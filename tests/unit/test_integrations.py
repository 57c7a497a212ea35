"""The wrappers for other libraries, in these, with a tiny LM and encoder."""

import pytest
from conftest import SENTENCES

import pgra
from pgra.integrations.cross_encoder import PgraCrossEncoder
from pgra.types import Prediction

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


def test_mteb_measures_the_rerankers_order(reranker, hits):
    mteb = pytest.importorskip("mteb", reason="needs the extra `dev`")
    from datasets import Dataset
    from mteb.mocks.mock_tasks.reranking import MockRerankingTask

    from pgra.integrations.mteb import PgraReranker

    class Toy(MockRerankingTask):
        def load_data(self, **options):
            rows = [{"id": f"d{number}", "text": text} for number, text in enumerate(DOCUMENTS)]
            split = {
                "queries": Dataset.from_list([{"id": "q", "text": QUERY}]),
                "corpus": Dataset.from_list(rows),
                "relevant_docs": {"q": {f"d{hits[-1].index}": 1}},
                "top_ranked": {"q": [row["id"] for row in rows]},
            }
            self.dataset = {"default": {"test": split}}
            self.data_loaded = True

    (result,) = mteb.evaluate(PgraReranker(reranker, "me/opt"), Toy(), cache=None)
    assert result.scores["test"][0]["mrr_at_10"] == pytest.approx(1 / 6, 1e-4)


def test_pyterrier_measures_an_index_and_a_reranker_and_ends_in_answers(lm_dirs, encoder_dir):
    pt = pytest.importorskip("pyterrier", reason="needs the extra `integrations`")
    import pandas as pd

    from pgra.integrations.pyterrier import PgraReader, PgraReranker, PgraRetriever

    index = pgra.Index.build(SENTENCES, encoder=str(encoder_dir), device="cpu")
    reranker = pgra.Reranker(str(lm_dirs["opt"]), by="likelihood", device="cpu")
    first = PgraRetriever(index, 6)
    both = first >> PgraReranker(reranker)
    queries = ["the film", QUERY]
    topics = pd.DataFrame({"qid": ["a", "b"], "query": queries})
    expected = []
    for qid, query, found in zip("ab", queries, index.search(queries, 6), strict=True):
        ranked = reranker.rank(query, found)  # by the first stage's scores too
        assert ranked != reranker.rank(query, [hit.text for hit in found])  # the control
        expected += [[qid, str(hit.index), pytest.approx(hit.score), hit.text] for hit in ranked]
    results = both(topics).sort_values(["qid", "rank"])
    assert results[["qid", "docno", "score", "text"]].to_numpy().tolist() == expected
    last = results[results["rank"] == 5].assign(label=1)
    measured = pt.Experiment([first, both], topics, last, ["recip_rank"], plan="tree")
    assert measured["recip_rank"][1] == pytest.approx(1 / 6)
    assert not pt.java.started()

    class FirstText:
        def predict(self, queries, evidence):
            return [Prediction("", texts[0], {}) for texts in evidence]

    answers = PgraReader(FirstText())(results[::-1])
    assert {*answers["qanswer"]} == {expected[0][3], expected[6][3]}
