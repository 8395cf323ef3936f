"""``python -m stager`` is ``stagectl``, for callers that must name their interpreter."""

from stager.cli import main

main()
