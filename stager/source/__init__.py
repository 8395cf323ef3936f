"""Where do the bytes come from, and what identifies a source?

`posix` looks at files and folders on mounted filesystems; `location` reads URLs, and `remote` looks
at the objects that they name and reads ranges of them. Each tells what identifies a version
(`disk.record.SourceFacts`), and its reader has the methods of `disk.reader.FileReader`.
`rank.sources` and `rank.file_cargo` choose between them by `location.is_url`. Objects are single
files as yet: not folders, and not archives to unpack.
"""
