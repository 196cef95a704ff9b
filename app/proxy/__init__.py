"""One request from admission to accounting."""

from app.proxy.exchange import ExchangeResponse
from app.proxy.preferences import Preferences
from app.proxy.progress import Phase, Progress
from app.proxy.proxy import Proxy

__all__ = ["ExchangeResponse", "Phase", "Preferences", "Progress", "Proxy"]
