"""Imports all that commands need; the warm process loads it before it forks."""

import gc
import pkgutil
from importlib import import_module

import pgra

_LATE = (
    *("accelerate", "bm25s", "datasets", "faiss", "jinja2", "matplotlib.backends.backend_svg"),
    *("matplotlib.pyplot", "mpl_toolkits", "pandas", "pyarrow.dataset"),
    *("safetensors.torch", "scipy.optimize", "scipy.stats", "torch._dynamo", "torch.distributed"),
    *("transformers.conversion_mapping", "transformers.models.auto.modeling_auto"),
    *("transformers.models.auto.tokenization_auto", "transformers.models.bert.modeling_bert"),
    *("transformers.models.gpt2.modeling_gpt2", "transformers.models.t5.modeling_t5"),
    *("transformers.safetensors_conversion", "transformers.trainer"),
)

for found in pkgutil.walk_packages(pgra.__path__, "pgra."):
    if not found.name.startswith(("pgra.integrations", "pgra.__main__", "pgra.configs")):
        import_module(found.name)
for name in _LATE:
    import_module(name)

# The tests' conftest turned the collector off. Commands have it on, and need it: a model's parts
# know each other, so that nothing else frees one. What was imported is left out, which is quicker.
gc.freeze()
gc.enable()
