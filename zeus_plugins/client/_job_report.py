"""A job's page in one file, as a notebook shows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from pathlib import Path


@dataclass(frozen=True, slots=True)
class JobReport:
    """A job's page in one file, without scripts and requests: shown in a notebook, or written to be sent.

    Attributes:
        job_id: The job.
        html: The file, a whole document.
    """

    job_id: str
    html: str = field(repr=False)

    def save(self, file: str | Path) -> Path:
        """Write it to a file, whose path is returned."""
        path = Path(file)
        path.write_text(self.html, "utf-8")
        return path

    def _repr_html_(self) -> str:
        # A frame of its own: the page's style must not become the notebook's, and nothing in it may run.
        return (
            f'<iframe title="Report of {escape(self.job_id)}" srcdoc="{escape(self.html)}" sandbox="" '
            'width="100%" height="900" style="border: 0"></iframe>'
        )
