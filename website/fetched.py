"""What a page of the site fetches from elsewhere when it is read. Links that a reader follows are not among it."""

from html.parser import HTMLParser

# Attributes of tags that a browser fetches without a click; `link` by its `rel`.
FETCHED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "link": "href"}
NOT_FETCHED = {"canonical", "prev", "next", "alternate", "edit"}


class _Fetched(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        address = given.get(FETCHED.get(tag, "")) or ""
        if address.startswith(("http:", "https:", "//")) and given.get("rel") not in NOT_FETCHED:
            self.addresses.append(address)


def fetched(html: str) -> list[str]:
    """Return the foreign addresses that a browser fetches to show a page."""
    parser = _Fetched()
    parser.feed(html)
    return parser.addresses
