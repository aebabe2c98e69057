"""The socket that a server listens on, opened before anything is loaded."""

import contextlib
import resource
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pagedserve.errors import ConfigError, reason
from pagedserve.server.options import ServerArgs


@dataclass(frozen=True, slots=True)
class Listener:
    """A socket that listens.

    Attributes:
        socket: TCP or Unix domain socket.
        tls: TLS context; None without TLS.
        address: Address for clients.
    """

    socket: socket.socket
    tls: ssl.SSLContext | None
    address: str


def listen(args: ServerArgs) -> Listener:
    """Listen on the address of the options.

    Raises:
        ConfigError: A certificate or key that cannot be read, or an address that is unavailable.
    """
    tls = _tls(args)
    if args.uds is not None:
        return Listener(_unix_socket(Path(args.uds)), tls, f"the socket {args.uds}")
    is_ipv6 = ":" in args.host
    family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
    with _refusing(f"cannot listen at --host {args.host}, --port {args.port}"):
        taken = socket.create_server((args.host, args.port), family=family)
    host = f"[{args.host}]" if is_ipv6 else args.host
    scheme = "http" if tls is None else "https"
    return Listener(taken, tls, f"{scheme}://{host}:{taken.getsockname()[1]}")


def allow_descriptors() -> None:
    """Raise the limit of file descriptors to the maximum: shells allow 1,024 by default."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # a system may have lower limits
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _unix_socket(path: Path) -> socket.socket:
    """A socket at a path; the file of a server that has exited is replaced."""
    taken = socket.socket(socket.AF_UNIX)
    with contextlib.ExitStack() as stack, _refusing(f"uds: cannot listen at {path}"):
        stack.enter_context(taken)
        if _is_left_over(path):
            path.unlink()
        taken.bind(str(path))
        taken.listen()
        stack.pop_all()
    return taken


def _is_left_over(path: Path) -> bool:
    """Whether a path is a socket without a listener."""
    if not path.is_socket():
        return False
    with socket.socket(socket.AF_UNIX) as asking, contextlib.suppress(ConnectionRefusedError):
        asking.connect(str(path))
        return False
    return True


def _tls(args: ServerArgs) -> ssl.SSLContext | None:
    certificate, key, authorities = args.ssl_certfile, args.ssl_keyfile, args.ssl_ca_certs
    if certificate is None:
        if key is not None or authorities is not None:
            raise ConfigError("ssl_keyfile or ssl_ca_certs is given without ssl_certfile")
        return None
    if args.ssl_cert_reqs and authorities is None:
        raise ConfigError(
            "ssl_cert_reqs requires client certificates; give ssl_ca_certs, which verifies them"
        )
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    shown = "" if key is None else f" with ssl_keyfile {key}"
    with _refusing(f"cannot use ssl_certfile {certificate}{shown}"):
        tls.load_cert_chain(certificate, key, _no_password)
    if args.ssl_ciphers is not None:
        with _refusing(f"cannot use ssl_ciphers {args.ssl_ciphers}"):
            tls.set_ciphers(args.ssl_ciphers)
    tls.verify_mode = ssl.VerifyMode(args.ssl_cert_reqs)
    if authorities is not None:
        with _refusing(f"cannot use ssl_ca_certs {authorities}"):
            tls.load_verify_locations(authorities)
    return tls


def _no_password() -> str:
    """Refuse a key with a password instead of asking for it on the terminal."""
    raise ValueError("the key has a password; one without is needed")


@contextlib.contextmanager
def _refusing(what: str) -> Iterator[None]:
    """A context whose errors become a ``ConfigError`` that names what failed."""
    try:
        yield
    except (OSError, ValueError) as error:
        failed = reason(error).partition(" (while attempting to bind")[0]  # the address again
        raise ConfigError(f"{what}: {failed}") from error
