"""Hosts as a configuration names them: IPv4, IPv6 or a name."""

import errno
import ipaddress
import socket

EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104
UNSUPPORTED = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}


def host_and_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it. Of names only localhost is known to be so."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def from_this_machine(host: str) -> str:
    """The address at which a process on the same machine reaches a server that listens on `host`."""
    return EVERY_ADDRESS.get(host, host)


def listen(host: str, port: int) -> list[socket.socket]:
    """One socket for each address of `host`, all on one port; port 0 takes a free one. Raises OSError for none."""
    sockets: list[socket.socket] = []
    refusals: list[OSError] = []
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    both = host == "::" and socket.has_dualstack_ipv6()
    for family, (name, _, *scope) in dict.fromkeys((family, address) for family, _, _, _, address in found):
        taken = sockets[0].getsockname()[1] if sockets else port
        try:
            sockets.append(socket.create_server((name, taken, *scope), family=family, dualstack_ipv6=both))
        except OSError as error:
            refusals.append(error)
    if not sockets or any(refusal.errno not in UNSUPPORTED for refusal in refusals):
        for opened in sockets:
            opened.close()
        raise refusals[0]
    return sockets
