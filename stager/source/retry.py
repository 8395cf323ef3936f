"""When is a request to a server made again, why did it fail, and how fast may bytes come?"""

from __future__ import annotations

import random
import re
import threading
import time
from dataclasses import dataclass
from socket import gaierror
from typing import TYPE_CHECKING, TypeVar

from obstore import exceptions

from stager.base.errors import IntegrityError, SourceError
from stager.base.telemetry import count
from stager.base.text import printable

if TYPE_CHECKING:
    from collections.abc import Callable


class Pace:
    """Says how long to wait after bytes have come, so that no more than ``rate`` come in a second.

    Time that nothing was read in is not made up for later. ``rate`` 0 is no limit.
    """

    def __init__(self, rate: int) -> None:
        self._rate = rate
        #: The time until which the bytes that have come are enough.
        self._until = 0.0
        self._lock = threading.Lock()

    def pause(self, length: int, now: float) -> float:
        """Return the seconds to wait after ``length`` bytes that came at ``now``, in seconds."""
        if not self._rate:
            return 0.0
        with self._lock:
            self._until = max(self._until, now) + length / self._rate
            return self._until - now


T = TypeVar("T")

#: Seconds before the first and the last repetitions, each of which waits about twice as long as the
#: one before.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0
#: The status in a message of the library, as ``503 Service Unavailable``, and those of requests
#: that may succeed later.
_STATUS = re.compile(r"status code: ((\d{3})[^:\n]*)")
_LATER = frozenset({"408", "429", "500", "502", "503", "504"})
#: The status of an answer to a request for headers alone after which a byte is asked for instead:
#: such an answer has no text that says why, and some servers refuse all such requests.
_ASK_FOR_BODY = frozenset({"400", "401", "403", "405", "501"})
#: The text of a store's answer, in the XML of S3 and Azure: of the message the first line, since
#: Azure adds a request's number and time. Azure says apart from it that a signature has expired.
_ANSWER = re.compile(r"<Code>([^<]*)</Code>(?:\s*<Message>([^<\n]*)[^<]*</Message>)?")
_PAST = re.compile(r"Signature not valid in the specified time frame[^<]*")
#: The codes of S3 for credentials that have expired. Their status is 400.
_EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenExpired"})
#: The code of S3 for a request that is signed for another region than the bucket's.
_OTHER_REGION = "AuthorizationHeaderMalformed"
#: The text of a refusal in plain words, as hubs write it. What has a '?' may be a signed URL.
_PLAIN_REFUSAL = re.compile(r"status code: 40[13][^:\n]*: ([^<{?\n]+)$")
#: What the library says of an answer without a length.
_NO_LENGTH = "Content-Length Header missing"
#: What the library says of an answer whose headers it cannot use.
_UNUSABLE = re.compile(
    r"error: ((?:Invalid (?:last modified|content length)|Content-Length Header missing"
    r"|Failed to parse value for|Received header|Requested \d)[^\n]*)"
)
#: Where the library asks for the identity of a machine of the vendor's, if it has no credentials.
_IDENTITY = ("//169.254.", "//metadata.google.internal")
#: A place where nothing listens, which the library is to ask for what must not be asked for.
NOWHERE = "127.0.0.1:0"
#: How much of what a server said is repeated.
_MOST_SAID = 200


class NoObjectError(SourceError):
    """There is no such object."""


class RefusedError(Exception):
    """A request failed, and whoever made it knows why."""

    def __init__(self, text: str, remedy: str = "", *, may_pass: bool = False) -> None:
        super().__init__(text)
        self.why = _Explained(text, remedy, may_pass)


def cut_short() -> RefusedError:
    """Return the error for an answer that ended early."""
    return RefusedError("the connection was closed before the end", may_pass=True)


class AnswerError(Exception):
    """A server answered with an error's ``status``, and ``said`` why."""

    def __init__(self, status: int, reason: str, said: str = "") -> None:
        super().__init__(f"status code: {status} {reason}")
        self.said = said


@dataclass(frozen=True, slots=True)
class Access:
    """What the refusals of a kind of server mean: a text, and a remedy.

    ``unknown`` is for status 401, and ``denied`` for 403.
    """

    unknown: tuple[str, str]
    denied: tuple[str, str]


TO_STORE = Access(
    (
        "the store does not know you",
        "check that your credentials are in the job's environment, and still valid",
    ),
    (
        "you may not read it",
        "check that your credentials are in the job's environment, and permit reading",
    ),
)


_CHECK_URL = "check the URL (in its file, if it has a secret), and ~/.netrc"
#: The same of a web server.
TO_WEB = Access(("the server does not know you", _CHECK_URL), ("you may not read it", _CHECK_URL))


class Patience:
    """Repeats a request until it succeeds, or ``limit`` seconds have passed without any success.

    ``server`` is what a message calls the other end.
    """

    def __init__(
        self, url: str, limit: float, access: Access = TO_STORE, *, server: str = "store"
    ) -> None:
        self._url = url
        self._server = server
        self._limit = limit
        self._access = access
        self.retries = 0
        # Since something came: the time, the failures, and how long to wait after the next.
        self._begun, self._failures, self._pause = time.monotonic(), 0, _FIRST_PAUSE

    def keep(self, act: Callable[[Callable[[], None]], T]) -> T:
        """Return what ``act`` returns. It may call what it is given when it gets on."""
        while True:
            try:
                return act(self._begin_anew)
            except (exceptions.BaseError, OSError, ValueError, AnswerError, RefusedError) as error:
                if isinstance(error, exceptions.PreconditionError):
                    raise changed(self._url) from None
                failure = _explained(error, self._access)
                pause = self._pause * random.uniform(0.75, 1.25)  # noqa: S311 - no secret
                if not failure.may_pass or time.monotonic() + pause > self._begun + self._limit:
                    kind = NoObjectError if failure.is_missing else SourceError
                    raise kind(self._message(failure)) from None
                self.retries += 1
                self._failures += 1
                count()  # the limit here decides, and not that of a stage that stalls
                time.sleep(pause)
                self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def _begin_anew(self) -> None:
        self._begun, self._failures, self._pause = time.monotonic(), 0, _FIRST_PAUSE

    def _message(self, failure: _Explained) -> str:
        text = f"{self._url}: {failure.text}"
        if not failure.may_pass:
            return f"{text}; {failure.remedy}"
        often = f"{self._failures + 1} times" if self._failures else "once"
        text = f"{text}, {often} in {time.monotonic() - self._begun:.0f} s"
        return f"{text}; submit again later, or tell those who run the {self._server}"


@dataclass(frozen=True, slots=True)
class _Explained:
    """What a store, or the way to it, said; and whether it may say something else later."""

    text: str
    remedy: str
    may_pass: bool = False
    is_missing: bool = False


def has_to_be_asked_for_a_byte(error: Exception, *, is_web: bool) -> bool:
    """Return whether to ask for a byte where a request for headers alone was refused.

    Web servers may answer it without the length of what they make, or as if it were not there.
    """
    is_made = isinstance(error, FileNotFoundError) or _NO_LENGTH in str(error)
    return _status_of(error) in _ASK_FOR_BODY or (is_web and is_made)


def is_beyond_end(error: Exception) -> bool:
    """Return whether a store was asked for bytes behind the end of an object."""
    return _status_of(error) == "416"


def is_denied(error: Exception) -> bool:
    """Return whether a store gives nothing of an object: it may not be read, or is archived."""
    kinds = exceptions.PermissionDeniedError, exceptions.AlreadyExistsError  # Azure's BlobArchived
    return isinstance(error, kinds) or _status_of(error) in ("403", "409")


def _status_of(error: Exception) -> str:
    """Return the status in a message of the library, nothing if there is none."""
    found = _STATUS.search(str(error))
    return found[2] if found else ""


def _explained(error: Exception, access: Access) -> _Explained:
    """Say in plain words what the library raised. No URL is repeated: it may have a signature."""
    if isinstance(error, RefusedError):
        return error.why
    if isinstance(error, ValueError):  # the library cannot put it into a request
        return _Explained(f"it cannot be asked for ({printable(str(error))})", "check the URL")
    text = str(error).partition("\n\nDebug source")[0]
    said = _said(error, text)
    found = _STATUS.search(text)
    answered, status = found.groups() if found else ("", "")
    if status not in _LATER and any(place in text for place in _IDENTITY):
        return _Explained(
            "no credentials were found for it",
            "put yours into the job's environment, or, for what is public, AWS_SKIP_SIGNATURE=true "
            "(AZURE_SKIP_SIGNATURE, GOOGLE_SKIP_SIGNATURE)",
        )
    if _has_expired(text):
        return _Explained(f"your credentials have expired{said}", "renew them and submit again")
    if isinstance(error, FileNotFoundError) or status in ("404", "410"):
        return _Explained(f"no such object{said}", "check the URL", is_missing=True)
    if isinstance(error, exceptions.UnauthenticatedError) or status == "401":
        what, remedy = access.unknown
        return _Explained(f"{what}{said}", remedy)
    if isinstance(error, exceptions.PermissionDeniedError) or status == "403":
        what, remedy = access.denied
        return _Explained(f"{what}{said}", remedy)
    if status:
        return _Explained(
            f"the store answered with {printable(answered)[:_MOST_SAID]}{said}",
            _remedy(text),
            may_pass=status in _LATER,
        )
    return _explained_connection(error)


def _remedy(text: str) -> str:
    answer = _ANSWER.search(text)
    if answer and answer[1] == _OTHER_REGION:
        return "set AWS_REGION to the region of the bucket"
    return "tell those who run the store"


def _has_expired(text: str) -> bool:
    """Whether a store says that the credentials have expired."""
    answer = _ANSWER.search(text)
    return bool(_PAST.search(text) or (answer and answer[1] in _EXPIRED))


def _said(error: Exception, text: str) -> str:
    """Return the server's own words in brackets, or nothing."""
    if isinstance(error, AnswerError):
        said = error.said
    elif answer := _ANSWER.search(text):
        past = _PAST.search(text)
        said = ": ".join(filter(None, (*answer.groups(), past and past[0])))
    else:
        plain = _PLAIN_REFUSAL.search(text)
        said = plain[1].strip() if plain else ""
    return f" ({printable(said)[:_MOST_SAID]})" if said else ""


#: The library's message repeats the URL, which may have any words in it.
_ANY_URL = re.compile(r"https?://\S+")
_UNKNOWN_HOST = _Explained("its host is not known here", "check the URL", may_pass=True)
#: What parts of the library's message mean, in lower case; the cause is in its second part.
_MEANINGS = (
    # The answer of S3 for a bucket in another region.
    (
        ("redirect without location",),
        _Explained(
            "it is redirected, but not told where to",
            "check the URL, and for s3: that AWS_REGION is the region of the bucket",
        ),
    ),
    (
        ("badscheme",),
        _Explained("it is redirected to a URL that is not https", "check the URL"),
    ),
    (("redirect",), _Explained("it is redirected in a circle, or too often", "check the URL")),
    (
        ("certificate", "invalid peer"),
        _Explained(
            "the server's certificate is not valid for this name, or not trusted",
            "check the URL; if the site has a certificate authority of its own, tell the "
            "administrator to name it (ca_file in [source] of stage.toml)",
        ),
    ),
    (
        ("range request", "not supported"),
        _Explained("the server cannot send parts of a file", "stage it from elsewhere"),
    ),
    (("dns error",), _UNKNOWN_HOST),
    (("timed out", "kind: timeout"), _Explained("the server did not answer", "", may_pass=True)),
)


def _explained_connection(error: Exception) -> _Explained:
    if unusable := _UNUSABLE.search(str(error)):
        return _Explained(
            f"the server's answer cannot be used ({printable(unusable[1])[:_MOST_SAID]})",
            "stage it from elsewhere, or tell those who run the server",
        )
    if isinstance(getattr(error, "reason", None), gaierror):
        return _UNKNOWN_HOST
    if f"{NOWHERE}," in str(error):
        return _Explained(
            "it is redirected to another server, which must not get your credentials",
            "name that server's own URL, or tell those who run the store",
        )
    text = _ANY_URL.sub("", str(error)).lower()
    for parts, meaning in _MEANINGS:
        if any(part in text for part in parts):
            return meaning
    return _Explained("the connection failed", "", may_pass=True)


def changed(url: str, etags: tuple[str, str] | None = None) -> IntegrityError:
    """Return the error for an object that is another version than the one to be staged.

    ``etags`` are those before and now, if nothing else tells that it is another version.
    """
    text = f"{url} changed while it was read"
    if not etags:
        return IntegrityError(f"{text}; submit again when nobody replaces it")
    before, now = (printable(one)[:_MOST_SAID] for one in etags)
    return IntegrityError(
        f"{text}: its ETag was {before} and is {now}, with the same size and date; submit again "
        "when nobody replaces it, or have its servers give one ETag"
    )
