"""Where do the bytes come from, and what identifies a source?

`posix` looks at files and folders on mounted filesystems. `location` reads URLs; `remote` looks at
the objects that they name and reads ranges of them, `prefix` does so with all that lies beneath a
folder of a store, and `hub` with a model of a hub, which `hub_api` asks and `hub_cache` may lay out
as the hub's own programs do. `registry` looks at container images and makes files of them, which
one node reads (`rank.image_cargo`). Each tells what identifies a version
(`disk.record.SourceFacts`). `access` chooses between them, and has the methods of their readers. A
new scheme is named in `location`, and what it needs of a job's environment in `settings`,
`launch.environment` and `launch.credentials`.
"""
