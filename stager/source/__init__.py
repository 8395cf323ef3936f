"""Where do the bytes come from, and what identifies a source?

`posix` is the one kind of source today: files and folders on mounted filesystems. An object store
would be a module beside it that answers the same questions: ``look_at_source`` by one request for
an object's size and version, ``facts_of`` for what the records keep of it (an ETag or a version has
no place in `disk.record.SourceFacts` yet), ``data_size``, and a reader with the methods of
`disk.reader.FileReader`. `request.grammar` refuses URLs today; `rank.sources`,
`rank.file_cargo` and `rank.archive_cargo` call these functions; `copies.status` compares the facts.
"""
