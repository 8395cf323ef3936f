"""Look up users by their number."""

from __future__ import annotations

#: The largest user id; the next one stands for none.
LARGEST_UID = (1 << 32) - 2


def name_or_uid(uid: int) -> str:
    """Return the user's name, or the number where the user has none: what ``--user`` takes."""
    return user_name(uid) or str(uid)


def user_name(uid: int) -> str:
    """Return the name of a user, empty if this machine does not know the number."""
    import pwd  # not needed where all is well

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return ""
