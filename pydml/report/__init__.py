"""``pydml report RUN…``: what happened in training runs, as figures and one page that needs no other file."""

from pydml.report.page import main, write
from pydml.report.runs import Run

__all__ = ["Run", "main", "write"]
