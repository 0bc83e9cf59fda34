"""What the HTTP library has to say: one line for bytes that are no HTTP, without the bytes, since headers may hold tokens."""

import logging

from aiohttp.http_exceptions import HttpProcessingError

logger = logging.getLogger(__name__)
"""Given to the library as its own logger."""


class _Calmly(logging.Filter):
    """Strangers' mistakes are no failures of the server: said once, by kind, without a traceback."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            record.msg, record.args, record.exc_info = (
                "a client sent what is no HTTP request: %s",
                (type(error).__name__,),
                None,
            )
            record.levelno, record.levelname = logging.INFO, "INFO"
        return True


logger.addFilter(_Calmly())
