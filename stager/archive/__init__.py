"""How is an archive unpacked safely, and how is one made?"""
