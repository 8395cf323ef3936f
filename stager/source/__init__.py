"""Where do the bytes come from, and what identifies a source?

`schemes` lists the kinds of sources and reads URLs; `access` chooses the module that looks at one,
and has the methods of the readers. `posix` looks at files and folders on mounted filesystems,
`remote` at objects in stores and on the web, `prefix` at all that lies beneath a folder of a store,
and `hub` at a model. `registry` looks at container images and makes files of them,
which one node reads (`rank.file_transfer`). Each tells what identifies a version
(`facts.SourceFacts`).
"""
