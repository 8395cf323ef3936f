"""How is an archive unpacked safely, and how is one made?

An archive is hostile input: whoever made it must not reach a file outside of the folder that it is
unpacked into, nor take memory, time or room beyond what the site allows. `unpack` is the entry: it
reads a tar (`decompress`, then `tar` and its parts) or a `zip`, and a `Target` makes the files.
"""
