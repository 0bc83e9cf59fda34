"""Keeping older full checkpoints small while the server runs: rarely, in a thread, never in the way of a publication."""

import asyncio
import logging

from reef_cli.core.errors import ReefError
from reef_cli.releases.service import ReleaseService

logger = logging.getLogger(__name__)

EVERY_S = 300.0


async def compact(releases: ReleaseService) -> None:
    """Until cancelled. A chain without full checkpoints costs a look at its refs."""
    while True:
        await asyncio.sleep(EVERY_S)
        try:
            report = await asyncio.to_thread(releases.compact)
        except ReefError as error:
            logger.warning("compacting checkpoints failed: %s", error)
        else:
            if report.objects or report.folders:
                logger.info("kept %d checkpoints as differences, %d bytes saved", report.objects, report.bytes)
