"""Make the pages of the reference, and the template of stage.toml, from the code.

`pages` says what stands on which page.
"""
