"""How are files opened, read, written out of sight and removed, so that no link leads astray?"""
