"""Run ``stagectl`` by ``python -m stager``, for callers that must name their interpreter."""

from stager.cli.main import main

main()
