"""Pages of HTML as a parser sees them."""

from __future__ import annotations

import html.parser


class Reader(html.parser.HTMLParser):
    """Collects the tags and the text of a page, and whether all that was begun has ended."""

    VOID = ("meta", "image", "path", "use", "rect", "br", "hr", "img", "link")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.said: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.said.append(data)
