"""The page of an audit: one HTML file that needs nothing else, not even a script."""

from hal.auditing.html.page import render_html

__all__ = ["render_html"]
