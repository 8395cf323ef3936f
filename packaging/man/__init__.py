"""Make the man pages, of the documents' pages.

`pages` says what stands where, `markdown` reads Markdown, `roff` writes what man(1) reads.
"""
