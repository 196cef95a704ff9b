"""Pictures in a conversation: looked at before an engine sees them, fetched only where the operator allows it."""

from app.images.images import Images

__all__ = ["Images"]
