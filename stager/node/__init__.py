"""What runs on a node besides ranks? Root's parts, what a user asks of a node, and its facts.

`prolog`, `epilog` and what they call run as root, with the standard library and the modules of
`base` that a contract in pyproject.toml names.
"""
