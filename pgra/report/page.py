"""A report as one HTML page with the tables, a figure of each, and some examples.

The page has no script and loads nothing: the figures are inline. Jinja2 escapes all text of runs.
"""

import base64
import io
from collections.abc import Sequence
from pathlib import Path

from pgra.report.compare import Study, detail_table, results_table
from pgra.report.figures import draw_study, plain_text

_ASSETS = Path(__file__).parent / "assets"
PAGES = (".html", ".htm")


def page_title(studies: Sequence[Study]) -> str:
    """Return a grid's own title; of other runs their tasks."""
    if len(studies) == 1 and studies[0].group.points:
        return studies[0].group.title
    return f"Results: {', '.join(dict.fromkeys(t for study in studies for t in study.tasks))}"


def render_page(
    title: str, studies: Sequence[Study], samples: Sequence[str] = (), *, lead: str = ""
) -> str:
    """Return the page: title, `lead` with its line breaks, studies, then the texts of `samples`."""
    from jinja2 import Environment, FileSystemLoader

    parts = [
        {"results": results_table(study), "detail": detail_table(study), "figure": _figure(study)}
        for study in studies
    ]
    environment = Environment(loader=FileSystemLoader(_ASSETS), autoescape=True)
    template = environment.get_template("page.html")
    page = template.render(title=title, lead=lead, parts=parts, samples=samples)
    # Half of a surrogate pair, which JSON may hold and UTF-8 may not, becomes a question mark.
    return page.encode("utf-8", "replace").decode("utf-8")


def _figure(study: Study) -> str:
    file = io.BytesIO()
    with plain_text():
        draw_study(study).savefig(file, format="svg", metadata={"Date": None})
    return base64.b64encode(file.getvalue()).decode()
