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


def is_private_group(gid: int, uid: int) -> bool:
    """Return whether the user is the only member of a group, which has the user's name then.

    Many systems give each user such a group, and let it write what the user makes.
    """
    import grp

    try:
        group = grp.getgrgid(gid)
    except KeyError:
        return gid == uid
    return group.gr_name == user_name(uid) and set(group.gr_mem) <= {group.gr_name}


def group_name(gid: int) -> str:
    """Return the name of a group, or its number as messages name it if it has none."""
    import grp

    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return f"gid {gid}"
