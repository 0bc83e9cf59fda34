"""Evicting consumed records beyond the limits of `storage`, while the server runs; the log counts and lists what went."""

import asyncio
import logging

from reef_cli.config.schema import StorageSettings
from reef_cli.core.errors import ReefError
from reef_cli.experience.log import ExperienceLog

logger = logging.getLogger(__name__)

EVERY_S = 60.0


async def retain(log: ExperienceLog, storage: StorageSettings) -> None:
    """Until cancelled."""
    while True:
        try:
            gone = await log.retain(keep_bytes=storage.keep_bytes, keep_days=storage.keep_days)
        except ReefError as error:
            logger.warning("retention failed: %s", error)
        else:
            if gone.records or gone.reports:
                logger.info("evicted %d records and %d reports, %d bytes", gone.records, gone.reports, gone.freed_bytes)
        await asyncio.sleep(EVERY_S)
