"""Each module that a document names is there, and has in it what is said to be in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGES = "|".join(one.name for one in (REPOSITORY / "stager").iterdir() if one.is_dir())
#: A path of a module, or its dotted name, with the names in it that may follow in brackets.
MODULE = re.compile(rf"\b({PACKAGES})([/.])(\w+|\*_\w+)(?:\.py)?\b`?( \((?:`\w+`(?:, )?)+\))?")
DOCUMENTS = "stager/README.md", "stager/DECISIONS.md", "tests/README.md"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_each_module_that_a_document_names_is_there(document: str) -> None:
    for found in MODULE.finditer((REPOSITORY / document).read_text()):
        package, _, name, inside = found.groups("")
        place = f"*/{package}/{name}"
        files = [*REPOSITORY.glob(f"{place}.py"), *REPOSITORY.glob(f"{place}/")]
        assert files, found[0]
        for word in re.findall(r"\w+", inside):
            assert re.search(rf"\b{word}\b", files[0].read_text()), found[0]
