"""``python -m stager`` is ``stagectl``, for callers that must name their interpreter."""

from stager.cli.main import main

main()
