"""Pages of HTML that need no other file and load nothing: headings, tables, text, pictures. All text is escaped."""

from __future__ import annotations

import html
from collections.abc import Sequence

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:70em;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse}td,th{padding:.2em .8em;border-bottom:1px solid #ddd;text-align:left}"
    "td+td,th+th{text-align:right}pre{background:#f6f6f6;padding:1em;overflow-x:auto}svg{max-width:100%;height:auto}"
)
# A Content-Security-Policy, by which a browser loads nothing from elsewhere and runs no script, whatever stands in a
# page.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


class Page:
    """A page, written from top to bottom."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._parts: list[str] = []

    def heading(self, text: str) -> None:
        """Begin a section."""
        self._parts.append(f"<h2>{html.escape(text)}</h2>")

    def text(self, text: str) -> None:
        """Add a paragraph."""
        self._parts.append(f"<p>{html.escape(text)}</p>")

    def lines(self, text: str) -> None:
        """Add text whose lines and columns stay as they are."""
        self._parts.append(f"<pre>{html.escape(text)}</pre>")

    def table(self, head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Add a table; the first column names its rows."""
        names = "".join(f"<th>{html.escape(name)}</th>" for name in head)
        cells = ("".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) for row in rows)
        body = "".join(f"<tr>{row}</tr>" for row in cells)
        self._parts.append(f"<table><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table>")

    def picture(self, svg: str, alternative: str) -> None:
        """Add a picture.

        Args:
            svg: An `<svg>` element, as `offload.pictures.draw.svg` returns it: not escaped here.
            alternative: What the picture shows, in words for those who do not see it.
        """
        self._parts.append(f'<figure role="img" aria-label="{html.escape(alternative, quote=True)}">{svg}</figure>')

    def __str__(self) -> str:
        """Return the whole page as HTML."""
        title = html.escape(self._title)
        head = (
            f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
            f"<title>{title}</title><style>{_STYLE}</style>"
        )
        body = "\n".join([f"<h1>{title}</h1>", *self._parts])
        return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'
