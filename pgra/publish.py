"""A finished reader for others: its model card, and its way to the hub."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pgra import __version__
from pgra.artifacts import write_text
from pgra.data.read import hub_errors, hub_reason
from pgra.errors import ArtifactError, ConfigError
from pgra.reader.arguments import ReaderTrainingArguments
from pgra.reader.record import OWN_INPUTS, READER_FOLDER
from pgra.report.results import METRICS_FILE, read_object
from pgra.run_folder import ARGUMENTS_FILE, IDENTITY_FILE, TRAINING_FILE, check_reader

# The model card of a finished run: `README.md` beside the reader, for people and for the hub.
#
# It is written from the run's own files alone, so that it can be written again at any time. Paths
# of this machine stay out of it: a file is named, its folder is not.


CARD_FILE = "README.md"
_SHOWN = (  # of the Trainer's arguments
    *("learning_rate", "per_device_train_batch_size", "gradient_accumulation_steps", "max_steps"),
    *("num_train_epochs", "lr_scheduler_type", "warmup_steps", "weight_decay", "max_grad_norm"),
    *("optim", "bf16", "seed", "data_seed"),
)
_LORA = ("lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules")


@dataclass(frozen=True)
class _Run:
    """A finished run's files."""

    identity: Mapping[str, Any]
    arguments: Mapping[str, Any]
    metrics: Mapping[str, Any]
    training: Mapping[str, Any]

    @property
    def base_model(self) -> str | None:
        """Give the hub's id of the base model; None if it came from elsewhere."""
        repo, at, _ = str(self.identity["reader_weights"]).partition("@")
        return repo if at else None

    @property
    def base_name(self) -> str:
        """Name the base model without this machine's folders."""
        return self.base_model or public_name(self.arguments["reader"]["model_name_or_path"])


def public_name(name: str | None) -> str:
    """Leave a local path's folders out; a hub id or bundled name stays as it is."""
    text = str(name or "")
    return Path(text).name if Path(text).expanduser().exists() or text.startswith("/") else text


def write_card(run: Path) -> Path:
    """Write a finished run's model card into its reader's folder.

    Args:
        run: A folder that `train_run` left.

    Returns:
        The card.

    Raises:
        ArtifactError: If the run is not finished, or damaged.
    """
    from huggingface_hub import ModelCard

    if not (run / METRICS_FILE).is_file() or not (run / READER_FOLDER).is_dir():
        raise ArtifactError(
            f"{run} holds no finished run (no {METRICS_FILE} with its {READER_FOLDER}): give the "
            "folder of a finished run of train.py"
        )
    check_reader(run)
    training = read_object(run / TRAINING_FILE) if (run / TRAINING_FILE).is_file() else {}
    identity, arguments = read_object(run / IDENTITY_FILE), read_object(run / ARGUMENTS_FILE)
    told = _Run(identity, arguments, read_object(run / METRICS_FILE), training)
    card = ModelCard(f"---\n{_metadata(told)}\n---\n\n{_body(told)}\n")
    write_text(run / READER_FOLDER / CARD_FILE, card.content)
    return run / READER_FOLDER / CARD_FILE


def _metadata(run: _Run) -> str:
    """Give the YAML that the hub reads. The licence is the base model's: it is left to it."""
    from huggingface_hub import EvalResult, ModelCardData

    task, metrics = str(run.metrics["task"]), run.metrics
    result = EvalResult(
        task_type="text-classification",
        dataset_type=public_name(run.arguments["data"].get("dataset_name")) or task,
        dataset_name=task,
        dataset_split=str(metrics["split"]),
        metric_type=str(metrics["metric"]),
        metric_value=round(float(metrics["value"]), 6),
    )
    data = ModelCardData(
        base_model=run.base_model,
        library_name="transformers",
        pipeline_tag="text-classification",
        tags=_tags(str(run.identity["method"])),
        metrics=[str(metrics["metric"])],
        model_name=f"{task}-{run.identity['method']}",
        eval_results=[result],
    )
    return str(data.to_yaml()).rstrip()


def _body(run: _Run) -> str:
    identity = run.identity
    return "\n\n".join(
        [
            f"# {run.metrics['task']}: a reader by {identity['method']}",
            f"A T5 (`{run.base_name}`) trained by `pgra` as a Fusion-in-Decoder reader: the "
            "encoder reads each piece of evidence beside the text, the decoder reads all of them, "
            "and a label is decided by scoring its words. The files are a plain T5.",
            "## Task\n\n" + _list(_task(run)),
            "## Evidence\n\n" + _list(_evidence(run)),
            "## Results\n\n" + _list(_results(run)),
            "## Training\n\n" + _list(_training(run)),
            "## Use\n\n" + _use(run),
            "## Versions\n\n" + _list({"pgra": __version__, **run.metrics["versions"]}),
            "## Licence\n\nThat of the base model and of the data it was trained on; this card "
            "grants none.",
            "## Notes\n\n" + _notes(run),
        ]
    )


def _list(values: Mapping[str, object]) -> str:
    return "\n".join(f"- {name}: {value}" for name, value in values.items())


def _task(run: _Run) -> dict[str, object]:
    words = run.identity["verbalizer"]
    reader = run.arguments["reader"]
    return {
        "labels and their words": ", ".join(f"{label} = `{words[label]}`" for label in words),
        "template": f"`{run.identity['reader_template']}`",
        "order in a segment": reader["segment_order"],
        "tokens of a segment": reader["max_segment_tokens"],
        "decision": reader["decode"],
    }


def _corpus_names(run: _Run) -> list[str]:
    named = run.arguments["corpus"]["corpus"]
    return [named] if isinstance(named, str) else list(named)


def _evidence(run: _Run) -> dict[str, object]:
    retriever, rerank = run.arguments["retriever"], run.arguments["rerank"]
    method = run.identity["method"]
    if not rerank["num_evidence"]:
        return {"method": f"{method} (no evidence)"}
    told: dict[str, object] = {
        "method": method,
        "corpus": ", ".join(f"`{public_name(name)}`" for name in _corpus_names(run)),
        "retriever": retriever["retriever"],
    }
    if retriever["retriever"] in ("dense", "hybrid"):
        told["encoder"] = f"`{public_name(retriever['encoder'])}`"
    if retriever["retriever"] != "exhaustive":
        told["candidates (k)"] = retriever["num_candidates"]
    told["reranker"] = rerank["reranker"]
    if rerank["reranker"] == "prompted":
        told["LM"] = f"`{public_name(rerank['lm'])}`"
        told["similarity"] = rerank["similarity"]
        own = ", the nearest of each query" if rerank["exemplars"] == "knn" else ""
        told["exemplars in its prompt"] = f"{rerank['num_exemplars']}{own}"
    told["evidence (d)"] = rerank["num_evidence"]
    return told


def _results(run: _Run) -> dict[str, object]:
    metrics, dev = run.metrics, run.training
    low, high = metrics["interval_95"]
    told: dict[str, object] = {
        f"{metrics['split']} {metrics['metric']}": f"{metrics['value']:.4f} (95 % interval "
        f"{low:.4f} to {high:.4f}, n = {metrics['n']})",
        "seed": metrics["seed"],
    }
    if dev.get("value") is not None:
        told[f"dev {dev['metric']}"] = (
            f"{dev['value']:.4f} at step {dev['step']}; it chose the checkpoint"
        )
    return told


def _training(run: _Run) -> dict[str, object]:
    given = run.arguments["training"]
    told: dict[str, object] = {n: given[n] for n in _SHOWN if given.get(n) is not None}
    if int(given.get("max_steps") or -1) > 0:
        told.pop("num_train_epochs", None)  # which they stand over
    told["processes"] = run.identity["num_processes"]
    if run.arguments["reader"].get("lora_rank") is not None:
        adapters = {name: run.arguments["reader"][name] for name in _LORA}
        told |= {name: value for name, value in adapters.items() if value is not None}
        told["adapters"] = "merged into the weights"
    return told


def _tags(method: str) -> list[str]:
    """Say of a reader what it is; not all read their evidence fused, or any."""
    kinds = [] if method in OWN_INPUTS else ["fusion-in-decoder"]
    kinds += [] if method == "lm-bff" else ["retrieval-augmented"]
    return ["pgra", *kinds, method]


def _use(run: _Run) -> str:
    if run.identity["method"] in OWN_INPUTS:
        return (
            f"The weights are a plain T5's, but it reads what `train.py --system "
            f"{run.identity['method']}` puts together for it; `pgra.Reader` does not."
        )
    texts = [f"{name}=..." for name in _fields(str(run.identity["reader_template"]))]
    return (
        "With evidence, through `pgra`:\n\n```python\nimport pgra\n\n"
        "reader = pgra.Reader.load(FOLDER)  # this folder, or huggingface_hub.snapshot_download(ID)"
        "\n```\n\nWithout `pgra` it is a T5:\n\n```python\n"
        "from transformers import AutoModelForSeq2SeqLM, AutoTokenizer\n\n"
        "model = AutoModelForSeq2SeqLM.from_pretrained(FOLDER_OR_ID)\n"
        "tokenizer = AutoTokenizer.from_pretrained(FOLDER_OR_ID)\n"
        f"text = {str(run.identity['reader_template'])!r}.format({', '.join(texts)})\n"
        "tokens = model.generate(**tokenizer(text, return_tensors='pt'), max_new_tokens=4)\n"
        "tokenizer.decode(tokens[0])  # a label's word stands between <extra_id_0> and "
        "<extra_id_1>\n```"
    )


def _fields(template: str) -> list[str]:
    from string import Formatter

    return [name for _, name, _, _ in Formatter().parse(template) if name]


def _notes(run: _Run) -> str:
    notes = [str(note) for note in run.metrics["notes"]]
    return "\n".join(f"- {note}" for note in notes) or "None."


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HubTarget:
    """Where a reader goes.

    Attributes:
        repo: Hub id; without a namespace it is the user's own.
        token: What to sign with; None takes HF_TOKEN, or the login's.
        is_private: Of a repository that is made; None leaves it to the hub.
        revision: A branch; None is main.
    """

    repo: str
    token: str | None = None
    is_private: bool | None = None
    revision: str | None = None

    def __repr__(self) -> str:
        """Leave the token out: what is printed may be kept."""
        return f"HubTarget({self.repo!r}, revision={self.revision!r})"


def take_target(training: ReaderTrainingArguments, repo: str) -> HubTarget | None:
    """Take the hub's arguments from the Trainer's, which would upload and store with each step.

    The token goes with them: the Trainer writes its arguments into every checkpoint.

    Args:
        training: Changed in place.
        repo: The id where none is given.

    Returns:
        The target; None if nothing is to be pushed.

    Raises:
        ConfigError: As `check_target`.
    """
    target = HubTarget(
        training.hub_model_id or repo,
        training.hub_token,
        training.hub_private_repo,
        training.hub_revision,
    )
    is_wanted, training.push_to_hub, training.hub_token = training.push_to_hub, False, None
    if not is_wanted:
        return None
    check_target(target)
    return target


def check_target(target: HubTarget) -> None:
    """Refuse what can be refused without asking the hub.

    Raises:
        ConfigError: In offline mode, without a token, or with an id that cannot be one.
    """
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(target.repo)
    except HFValidationError as error:
        raise ConfigError(
            f"hub_model_id '{target.repo}' is no hub id: {hub_reason(error)} "
            "Give --hub_model_id OWNER/NAME."
        ) from None
    if constants.is_offline_mode():
        raise ConfigError(
            f"cannot push to '{target.repo}' in offline mode: unset HF_HUB_OFFLINE, or leave "
            "--push_to_hub out and push later with pgra push --run DIR"
        )
    if not (target.token or get_token()):
        raise ConfigError(
            f"cannot push to '{target.repo}' without a token: log in with 'hf auth login', set "
            "HF_TOKEN, or give --hub_token"
        )


def open_target(target: HubTarget) -> HubTarget:
    """Make the repository and its branch if there are none, so that no training is in vain.

    Returns:
        The same with the whole id.

    Raises:
        ConfigError: If the hub refuses: the token, the id, or the right to write.
    """
    from huggingface_hub import HfApi

    api = HfApi(token=target.token)
    try:
        made = api.create_repo(target.repo, private=target.is_private, exist_ok=True)
        if target.revision is not None:
            api.create_branch(made.repo_id, branch=target.revision, exist_ok=True)
    except hub_errors() as error:
        raise ConfigError(
            f"cannot push to '{target.repo}': the hub says: {hub_reason(error)} "
            "Check the id and that the token may write there."
        ) from None
    return HubTarget(made.repo_id, target.token, target.is_private, target.revision)


def push_run(run: Path, target: HubTarget) -> str:
    """Upload a finished run's reader with its model card.

    Args:
        run: A folder that `train_run` left; it is not changed but for the card, written again.
        target: As `open_target` gives it.

    Returns:
        The address of the commit.

    Raises:
        ArtifactError: If the run is not finished, or the upload fails; the run stays whole.
    """
    from huggingface_hub import HfApi

    write_card(run)
    metrics = read_object(run / METRICS_FILE)
    message = f"{metrics['task']}: {metrics['split']} {metrics['metric']} {metrics['value']:.4f}"
    try:
        commit = HfApi(token=target.token).upload_folder(
            repo_id=target.repo,
            folder_path=run / READER_FOLDER,
            revision=target.revision,
            commit_message=message,
        )
    except hub_errors(ValueError, RuntimeError) as error:
        # The client words a large file's failure without its reason.
        reason = error.__cause__ if isinstance(error, RuntimeError) else error
        branch = f" --hub_revision {target.revision}" if target.revision else ""
        raise ArtifactError(
            f"the run in {run} is whole, but pushing it to '{target.repo}' failed: "
            f"{hub_reason(reason or error)} Push it later: pgra push --run {run} "
            f"--hub_model_id {target.repo}{branch}"
        ) from None
    logger.info("run: %s is on the hub as %s", run, target.repo)
    return str(commit.commit_url)
