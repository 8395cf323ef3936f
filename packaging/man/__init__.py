"""Make the man pages, from the texts that are there already.

``stagectl.1`` is what ``stagectl --help`` and the help of each command say. The other pages are
sections of README.md and slurm-config/README.md, and the example of stage.toml. `pages` says what
stands where, `markdown` reads Markdown, `roff` writes what man(1) reads.
"""
