"""Read URLs with a secret in them from files of the user's own: a source is written ``@FILE``.

So no option, argument list or job's description has the secret. It stays apart from the URL from
here on; see `source.web`.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.parse import unquote

from stager.base.errors import SourceError, UsageError
from stager.base.formats import ARCHIVES, COMPRESSIONS, archive_suffix, compressed_suffix
from stager.base.options import ITSELF
from stager.disk.files import opened
from stager.source.location import Location, is_url_file
from stager.source.web import URL_SECRETS, Secret, as_text, secrets_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, MutableMapping

    from stager.request.directive import Directive

#: The parts of a URL: what is before the user, the user, the rest without a query, and the query.
_PARTS = re.compile(r"(https?://)(?:([^/?#]*)@)?([^?#]*)(?:\?([^#]*))?(?:#.*)?")
#: What can be a URL, and the most bytes of a file.
_PRINTING = re.compile(r"[!-~]+")
_LONGEST = 16 << 10


#: What is said of a file that is not `is_private`.
NOT_PRIVATE = "others may use it; have it your own, by chmod 600"


def is_private(facts: os.stat_result) -> bool:
    """Whether nobody but this user may use a file, whose stat that is."""
    return facts.st_uid == os.geteuid() and not facts.st_mode & 0o077


class UnseenError(SourceError):
    """The file of a URL is not seen from this node, or its filesystem gives no answer."""


def content(path: str) -> str:
    """Return the text of a file that the user alone can read. Raise SourceError, OSError."""
    with opened(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC) as descriptor:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise SourceError(f"{path}: it is no file; write the URL into one")
        if not is_private(facts):
            raise SourceError(f"{path}: {NOT_PRIVATE}")
        return os.read(descriptor, _LONGEST).decode("ascii", "replace")


def read_url_files(
    directives: Iterable[Directive],
    environment: MutableMapping[str, str],
    read_content: Callable[[str], str] = content,
) -> list[Directive]:
    """Return the directives with URLs in place of files; add their secrets to `environment`.

    ``read_content`` reads a file as `content`. Raise SourceError for one that cannot be used, its
    UnseenError if that is not known; UsageError for two with the same URL but another secret, or if
    a directive's options do not fit the URL.
    """
    secrets = secrets_of(environment)
    read: list[Directive] = []
    for directive in directives:
        if not is_url_file(directive.source):
            read.append(directive)
            continue
        path = directive.source[1:]
        try:
            url, secret = _parsed(path, read_content(path))
        except OSError as error:
            remedy = "check the path, and that this node mounts its filesystem"
            raise UnseenError(f"{path}: {error.strerror}; {remedy}") from None
        if secrets.setdefault(url, secret) != secret:
            raise UsageError(
                f"{path}: another file has {url} with another query or user; stage one of them in "
                "another job"
            )
        read.append(_fitting(replace(directive, source=url)))
    if secrets:
        environment[URL_SECRETS] = as_text(secrets)
    return read


def _fitting(directive: Directive) -> Directive:
    """Return a directive, of which the source's name was not known when it was read."""
    url, options = directive.source, directive.options
    if options.extract and not archive_suffix(url):
        raise UsageError(f"{url}: 'extract' needs an archive as source: {' '.join(ARCHIVES)}")
    if options.decompress == ITSELF and not compressed_suffix(url):
        known = " ".join(COMPRESSIONS)
        raise UsageError(f"{url}: 'decompress' needs a compressed file as source: {known}")
    return directive


def _parsed(path: str, text: str) -> tuple[str, Secret]:
    """Return the URL in a file's text without what is secret, and that. No message repeats it."""
    line = text.removesuffix("\n").removesuffix("\r")
    found = _PARTS.fullmatch(line) if _PRINTING.fullmatch(line) else None
    if not found:
        raise SourceError(f"{path}: it has no URL; write one https://HOST/PATH, on one line alone")
    scheme, user, rest, query = found.groups()
    url = f"{scheme}{rest}"
    try:
        Location.parse(url)
    except ValueError as error:
        raise SourceError(f"{path}: its URL {error}") from None
    return url, Secret(unquote(user or "", errors="surrogateescape"), query or "")
