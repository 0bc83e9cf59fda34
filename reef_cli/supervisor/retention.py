"""Evicting records beyond the limits of `storage`, while the server runs; the log counts and lists what went.

What learning is not done with stays, unless the deployment says otherwise; that limits are exceeded for it is logged once.
"""

import asyncio
import logging

from reef_cli.config.schema import StorageSettings
from reef_cli.core.errors import ReefError
from reef_cli.experience.log import ExperienceLog

logger = logging.getLogger(__name__)

EVERY_S = 60.0


async def retain(log: ExperienceLog, storage: StorageSettings) -> None:
    """Until cancelled."""
    unconsumed = storage.unconsumed == "evict"
    told = False
    while True:
        try:
            gone = await log.retain(keep_bytes=storage.keep_bytes, keep_days=storage.keep_days, unconsumed=unconsumed)
        except ReefError as error:
            logger.warning("retention failed: %s", error)
        else:
            if gone.records or gone.reports:
                logger.info("evicted %d records and %d reports, %d bytes", gone.records, gone.reports, gone.freed_bytes)
            if gone.held and not told:
                why = (
                    "a job holds them"
                    if unconsumed
                    else "learning is not done with them (storage.unconsumed: evict drops them too)"
                )
                logger.warning("records beyond storage.keep_bytes or storage.keep_days are kept: %s", why)
            told = gone.held
        await asyncio.sleep(EVERY_S)
