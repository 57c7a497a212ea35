"""What is run, and in what order: groups of command lines, each in one folder of its own.

`{name}` stands for `SHORT[name]`; a line "python:NAME" asks the public Python API.
"""

SHORT = {
    "data": "--task reviews.yaml --train_file train.jsonl --test_file test.jsonl",
    "pairs": "--task pairs.yaml --train_file pairs.jsonl --test_file pairs-test.jsonl",
    "dense": "--corpus corpus.txt --encoder m/bert --num_candidates 6 --device cpu",
    "lm": "--lm m/gpt2 --num_exemplars 4",
    "reads": "--model_name_or_path m/t5 --max_steps 4 --eval_steps 2 --per_device_train_batch_size 4 "
    "--learning_rate 1e-2 --adam_epsilon 1 --seed 1 --device cpu",
    "two": "--num_evidence 2",
    "all": "{data} {dense} {lm} {two} {reads}",
    "rerank": 'rerank "A warm film." {data} {dense} --num_evidence 6 --num_shown 4',
    "icl": "icl {data} --lm m/gpt2 --encoder m/bert --num_exemplars 3 --device cpu",
    "ask": "icl --task webquestions --train_file pool.jsonl --test_file asked.jsonl --lm m/gpt2 "
    "--encoder bm25 --num_exemplars 2 --device cpu",
    "stream": "memory stream --family lexical.yaml --stream stream.jsonl --lm m/long --max_new_tokens 6 --device cpu",
    "run": "--run runs/pgra --device cpu",
}

SCENARIOS: dict[str, dict[str, str]] = {
    "readers": {
        "pgra": "train {all} --output_dir runs/pgra",
        "pgra again": "train {all} --output_dir runs/pgra",
        "other seed": "train {all} --output_dir runs/seed2 --seed 2",
        "fid": "train {all} --system fid --output_dir runs/fid",
        "random": "train {all} --system random --output_dir runs/random",
        "exhaustive": "train {all} --system exhaustive --output_dir runs/exhaustive",
        "plain": "train {data} {reads} --system plain --output_dir runs/plain",
        "icl": "train {data} {dense} {lm} --seed 1 --system icl --output_dir runs/icl",
        "icl knn": "train {data} {dense} {lm} --seed 1 --system icl --exemplars knn --output_dir runs/icl-knn",
        "knn": "train {data} {dense} --seed 1 --system knn --output_dir runs/knn",
        "knn by the reader": "train {data} {dense} --seed 1 --system knn --num_neighbors 3 "
        "--neighbor_encoder reader --model_name_or_path m/t5 --output_dir runs/knn-reader",
        "rag": "train {data} {dense} {two} {reads} --system rag --output_dir runs/rag",
        "lm-bff": "train {data} {dense} {reads} --system lm-bff --num_shots 4 --exemplar_sets 2 "
        "--output_dir runs/lm-bff",
        "default folder": "train {data} {reads} --num_evidence 0 --seed 7",
    },
    "options": {
        "bm25": "train {all} --retriever bm25 --output_dir runs/bm25",
        "hybrid": "train {all} --retriever hybrid --output_dir runs/hybrid",
        "pairs": "train {pairs} {dense} --lm m/llama --num_exemplars 3 {two} {reads} --output_dir runs/pairs",
        "lora": "train {all} --lora_rank 2 --output_dir runs/lora",
        "decode official": "train {all} --decode official --output_dir runs/decode",
        "length normalize": "train {all} --length_normalize --output_dir runs/length",
        "evidence first": "train {all} --segment_order evidence_first --output_dir runs/first",
        "profile official": "train {data} {dense} {lm} {two} {reads} --profile official --max_encoder_tokens 64 "
        "--output_dir runs/official",
        "profile paper": "train {data} {dense} {lm} {two} {reads} --profile paper --output_dir runs/paper",
        "profile pgra": "train {data} {dense} {lm} {reads} --profile pgra {two} --output_dir runs/default",
        "yaml beneath": "train {data} {dense} {lm} {reads} --config half.yaml --output_dir runs/yaml",
        "calibrated": "train {all} --validation_file dev.jsonl --seed 3 --output_dir runs/calibrated",
        "shipped task": "train {data} {dense} {lm} --task sst2 --seed 1 --system icl --output_dir runs/sst2",
        "flan": "train {all} --model_name_or_path m/flan-t5 --max_segment_tokens 24 --output_dir runs/flan",
        "bank full": "train {all} --bank full --output_dir runs/full",
        "attention": "train {all} --evidence_attention --output_dir runs/attention",
    },
    "rerank": {
        **{
            f"states {kind}": f"python:states {kind}"
            for kind in ("gpt2", "llama", "opt", "opt-350m", "qwen2")
        },
        **{
            f"LM {kind}": f"{{rerank}} --lm m/{kind} --num_exemplars 2"
            for kind in ("llama", "opt", "qwen2")
        },
        **{
            f"similarity {name}": f"{{rerank}} {{lm}} --similarity {name}"
            for name in ("dot", "cosine", "whitened", "whitened_cosine", "label_words")
        },
        **{
            f"exemplars {name}": f"{{rerank}} {{lm}} --exemplars {name}"
            for name in ("random", "official", "knn")
        },
        "two prefixes": "{rerank} {lm} --num_prefixes 2",
        "other exemplar seed": "{rerank} {lm} --exemplar_seed 1",
        "no exemplars": "{rerank} --lm m/gpt2 --num_exemplars 0",
        "prefix not shared": "{rerank} {lm} --prefix_sharing none",
        **{
            f"retriever {name}": f"{{rerank}} {{lm}} --retriever {name}"
            for name in ("bm25", "hybrid", "random")
        },
        "retriever exhaustive": "{rerank} {lm} --retriever exhaustive",
        "roberta": "{rerank} {lm} --encoder m/roberta --pooling cls --no_normalize",
        "plan": "plan {data} {dense} {lm} {two} --calibration_seconds 0 --json plan.json",
    },
    "index": {
        "build": "index --corpus corpus.txt --encoder m/bert --shard_rows 5 --device cpu",
        "again": "index --corpus corpus.txt --encoder m/bert --shard_rows 5 --device cpu",
        "info": "index info --corpus corpus.txt --encoder m/bert --device cpu",
        "verify": "index verify --corpus corpus.txt --encoder m/bert --device cpu",
        "search": "index search --corpus corpus.txt --encoder m/bert --device cpu --num_candidates 3 "
        '--text "a warm film" "the sea"',
        "add": "index add --index_dir BUILT --corpus more.txt --device cpu",
        "remove": "index remove --index_dir BUILT --rows 3 5",
        "search what is left": "index search BUILT --device cpu "
        '--num_candidates 12 --text "a warm film"',
        "info of what is left": "index info BUILT",
        "verify what is left": "index verify BUILT",
        "HNSW": "index build --corpus corpus.txt --encoder m/bert --index_factory HNSW4 --device cpu",
        "cut": "index build --corpus corpus.txt more.txt --encoder m/bert --passage_words 4 --max_passages 9 --device cpu",
        "find dense": 'search "a warm film" {dense}',
        "find bm25": 'search "a warm film" "the blue sea" {dense} --retriever bm25',
        "find hybrid": 'search "a warm film" {dense} --retriever hybrid',
        "find random": 'search "a warm film" {dense} --retriever random',
    },
    "icl": {
        **{
            name: f"{{icl}} --exemplars {name} --output_dir runs/{name}"
            for name in ("random", "balanced", "fixed", "knn", "knn-mmr")
        },
        "again": "{icl} --exemplars knn --output_dir runs/knn",
        "farthest": "{icl} --farthest --likeness euclidean --output_dir runs/farthest",
        "redrawn": "{icl} --exemplars random --redraw --seeds 0 1 --output_dir runs/redrawn",
        "nearest last": "{icl} --order nearest-last --output_dir runs/last",
        "random order": "{icl} --order random --output_dir runs/shuffled",
        "generation": "{icl} --decide_by generation --output_dir runs/generation",
        "vote": "{icl} --decide_by vote --output_dir runs/vote",
        "calibrated": "{icl} --calibrate --output_dir runs/calibrated",
        "format": "{icl} --prompt_format kate --output_dir runs/kate",
        "bm25": "{icl} --encoder bm25 --output_dir runs/bm25",
        "prompted": "{icl} --encoder prompted --prompt_exemplars 2 --output_dir runs/prompted",
        "written": "{ask}",
        "written vote": "{ask} --decide_by vote --output_dir runs/written-vote",
        "correct": 'memory add "A warm album number 21." negative --task reviews',
        "memory as exemplar": "{icl} --memory memory.sqlite --output_dir runs/memory",
        "memory as clarification": "{icl} --memory memory.sqlite --memory_as clarification --output_dir runs/told",
        "predict": 'predict "A warm film by the sea." --run runs/knn --device cpu',
        "predict json": "predict --file new.txt --run runs/kate --json --device cpu",
        "report": "report runs --baseline icl-random",
    },
    "memory": {
        "add": 'memory add "what is like < a >" "I mean a synonym"',
        "add near": 'memory add "what is unlike < b >" "an antonym" --family lexical.yaml',
        "add label": 'memory add "So bad it is good." positive --task reviews',
        "lookup": 'memory lookup "what is like < c >" --num_matches 9 --family lexical.yaml',
        "lookup any": 'memory lookup "what is like < a >"',
        "lookup bm25": 'memory lookup "what is like < c >" --lookup bm25',
        "lookup encoder": 'memory lookup "what is like < c >" --lookup encoder --encoder m/bert --device cpu',
        "correct": 'memory correct 1 "a synonym"',
        "collisions": "memory list --collisions --family lexical.yaml",
        "forget": "memory forget 2",
        "list": "memory list --verify",
        "log": "memory list --log",
        "export": "memory export log.jsonl",
        "import": "memory import log.jsonl --memory other.sqlite",
        "list imported": "memory list --memory other.sqlite",
        "gate": "memory gate --family lexical.yaml --stream stream.jsonl",
        "gate encoder": "memory gate --family lexical.yaml --stream stream.jsonl --lookup encoder --encoder m/bert --device cpu",
        "stream": "{stream} --clarification_probabilities 1 --output_dir runs/stream",
        "stream again": "{stream} --clarification_probabilities 1 --output_dir runs/stream",
        "stream encoder": "{stream} --systems mem --lookup encoder --encoder m/bert --threshold 0.5 "
        "--num_steps 6 --seeds 3 --shuffle --output_dir runs/encoder",
        "train similarity": "memory train-similarity feedback.jsonl --encoder m/bert --width 8 "
        "--num_steps 3 --device cpu --output_dir similar",
        "train generator": "memory train-gud-ir feedback.jsonl --model m/t5 --num_train_epochs 1 "
        "--device cpu --output_dir gud",
        "lookup generated": 'memory lookup "what is like < c >" --lookup gud-ir --generator gud --feedback_by edit --device cpu',
        "finetune": "memory finetune --lm m/long --words words.jsonl --held_out stream.jsonl "
        "--max_steps 2 --packs_per_step 1 --device cpu --output_dir tuned",
    },
    "runs": {
        "train": "train {all} --output_dir runs/pgra",
        "plain": "train {data} {reads} --system plain --output_dir runs/plain",
        "evaluate": "evaluate {run}",
        "evaluate dev": "evaluate {run} --split dev --output_dir runs/dev",
        "evaluate another file": "evaluate {run} --test_file other.jsonl --output_dir runs/other",
        "evaluate official": "evaluate {run} --decode official --output_dir runs/coded",
        "predict": 'predict "A warm film by the sea." {run}',
        "predict json": "predict --file new.txt --json {run}",
        "predict attention": 'predict "A warm film by the sea." --attention {run}',
        "correct": 'memory add "A warm film by the sea." negative --task reviews',
        "predict with memory": 'predict "A warm film by the sea" --memory memory.sqlite {run}',
        "labels": "memory labels {run} --seeds 0 --output labels.jsonl --device cpu",
        "reader": "python:reader",
        "seeds": "train {all} --seeds 0 1 --output_dir runs/seeds",
        "search": "train {all} --search grid --search_learning_rates 1e-3 1e-2 --search_batch_sizes 4 "
        "--output_dir runs/search",
        "consistency": "consistency --runs runs/pgra runs/plain --output_dir consistency --no_plots --device cpu",
        "grid": "ablate axes.yaml --output_dir runs/axes",
        "grid listed": "ablate points.yaml --dry_run --output_dir runs/points",
        "grid of systems": "ablate points.yaml --seeds 0 --output_dir runs/points",
        "report": "report runs/plain runs/seeds --baseline plain",
        "report markdown": "report runs/axes --format markdown",
        "report latex": "report runs/axes --output axes.tex",
        "report csv": "report runs/points runs/pgra --output all.csv",
        "report html": "report runs/points --html points.html",
    },
    "errors": {
        "unknown command": "trian",
        "unknown argument": "train --num_evidense 2",
        "unknown value": "train {all} --system pgro",
        "not a number": "train {all} --num_evidence two",
        "out of range": "train {all} --num_candidates 0",
        "more evidence than candidates": "train {all} --num_evidence 7",
        "no task": "train {dense} {lm} {two} {reads}",
        "unknown task": "train {all} --task sst3",
        "no such file": "train {all} --train_file none.jsonl",
        "no label": "train {all} --test_file unlabelled.jsonl",
        "no such model": "train {all} --lm m/none",
        "not an LM": "train {all} --lm m/bert",
        "no such corpus": "train {all} --corpus none.txt",
        "broken yaml": "train {all} --config broken.yaml",
        "unknown profile": "train {all} --profile papre",
        "does not suit the system": "train {all} --system knn",
        "search of what is not trained": "train {data} {dense} --system knn --search grid",
        "too few shots": "train {data} {dense} {reads} --system lm-bff",
        "evaluate no run": "evaluate --run runs/none",
        "predict nothing": 'predict "x" --run runs/none',
        "report of nothing": "report runs/none",
        "no such index": "index info artifacts/none",
        "no such memory": 'memory correct 1 "x"',
        "unknown family": 'memory lookup "a" --family lexcal',
        "a run": "train {data} {reads} --system plain --output_dir runs/plain",
        "another run in its folder": "train {data} {reads} --system plain --seed 2 --output_dir runs/plain",
        "a label that is none": 'memory add "So bad." positiv --task reviews',
        "grid of nothing": "ablate none.yaml",
        "quantized on a CPU": "train {all} --lm_quantization 3bit",
        "endpoint without a key": "icl {data} --lm openai:x --base_url ftp://x",
    },
}

SLOW = ("options", "runs")
"""Groups that train many readers."""
