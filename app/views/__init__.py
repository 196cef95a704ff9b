"""What the gateway does and why, for a browser and for programs that show it to people."""

from app.views.routes import Views, routes

__all__ = ["Views", "routes"]
