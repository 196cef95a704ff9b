"""Which addresses a picture may be fetched from: those that the whole world reaches, and none of this network."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

# It carries an IPv4 address in its last four bytes, which a translator on the way would be sent to.
_NAT64 = IPv6Network("64:ff9b::/96")


def is_public(address: str) -> bool:
    """Whether an address is on the internet: no loopback, private, link-local, shared, reserved or multicast one.

    Addresses that carry another within them (mapped, 6to4, Teredo, NAT64) are never public.
    """
    try:
        parsed = ip_address(address.partition("%")[0])
    except ValueError:
        return False
    return parsed.is_global and not parsed.is_multicast and not _carries_another(parsed)


def _carries_another(address: IPv4Address | IPv6Address) -> bool:
    if isinstance(address, IPv4Address):
        return False
    return (
        address.ipv4_mapped is not None
        or address.sixtofour is not None
        or address.teredo is not None
        or address in _NAT64
    )
