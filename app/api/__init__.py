"""One router per noun; together they are the allow-list of what the gateway answers."""

from app.api.faults import install_fault_handlers
from app.api.gateway import Gateway
from app.api.routes import router

__all__ = ["Gateway", "install_fault_handlers", "router"]
