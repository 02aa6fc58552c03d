"""Certificates are what TLS and Flower take, private where they must be, and never overwritten unasked."""

from __future__ import annotations

import socket
import ssl
import stat
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from flwr.cli.supernode.register import try_load_public_key

from fedasync.flower.certificates import Certificates, commands, load, make


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    folder = tmp_path_factory.mktemp("certificates") / "files"
    return make(folder, names=("localhost", "server.example"), addresses=("127.0.0.1", "::1"), clients=2)


def handshake(made: Certificates, authority: Path, host: str) -> None:
    """A TLS handshake of a server with these files and a client that trusts ``authority`` and asks for ``host``."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(made.server, made.server_key)
    client = ssl.create_default_context(cafile=authority)
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    one, other = socket.socketpair()

    def serve() -> None:
        with one, suppress(ssl.SSLError, OSError):  # the client says why
            server.wrap_socket(one, server_side=True).close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with other:
            client.wrap_socket(other, server_hostname=host).close()
    finally:
        thread.join()


@pytest.mark.parametrize("host", ["localhost", "server.example", "127.0.0.1", "::1"])
def test_a_client_that_knows_the_authority_accepts_every_name(made: Certificates, host: str) -> None:
    handshake(made, made.authority, host)


def test_another_name_and_another_authority_are_refused(made: Certificates, tmp_path: Path) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        handshake(made, made.authority, "elsewhere.example")
    other = make(tmp_path)
    with pytest.raises(ssl.SSLCertVerificationError, match="verify failed"):
        handshake(made, other.authority, "localhost")


def test_every_node_has_a_key_of_its_own_that_flower_takes(made: Certificates) -> None:
    keys = []
    for partition in range(2):
        private = load_ssh_private_key(made.key(partition).read_bytes(), None)
        assert isinstance(private, ec.EllipticCurvePrivateKey)
        assert private.curve.name == "secp384r1"
        assert private.public_key() == load_ssh_public_key(made.public_key(partition).read_bytes())
        keys.append(try_load_public_key(made.public_key(partition)))
    assert keys[0] != keys[1]


def test_private_files_are_the_owners_alone(made: Certificates) -> None:
    assert stat.S_IMODE(made.folder.stat().st_mode) == 0o700
    for path in (made.authority_key, made.server_key, made.key(0), made.key(1)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_nothing_is_overwritten_unasked(made: Certificates) -> None:
    before = {path: path.read_bytes() for path in made.folder.iterdir()}
    with pytest.raises(ValueError, match=r"ca\.crt is there already \(8 such files\)"):
        make(made.folder, clients=2)
    assert {path: path.read_bytes() for path in made.folder.iterdir()} == before


def test_overwritten_when_asked_and_private_again(tmp_path: Path) -> None:
    first = make(tmp_path).server_key.read_bytes()
    (tmp_path / "server.key").chmod(0o644)
    again = make(tmp_path, overwrite=True)
    assert again.server_key.read_bytes() != first
    assert stat.S_IMODE(again.server_key.stat().st_mode) == 0o600
    handshake(again, again.authority, "localhost")


def test_keys_of_nodes_that_are_no_more_go_too(tmp_path: Path) -> None:
    make(tmp_path, clients=3)
    with pytest.raises(ValueError, match="10 such files"):
        make(tmp_path, clients=1)
    make(tmp_path, clients=1, overwrite=True)
    assert load(tmp_path).clients == 1
    assert len(list(tmp_path.iterdir())) == 6


def test_they_are_found_again(made: Certificates, tmp_path: Path) -> None:
    assert load(made.folder) == made
    with pytest.raises(ValueError, match=r"ca\.crt is missing"):
        load(tmp_path)
    with pytest.raises(ValueError, match="partition 2 has no key; there are 0 … 1"):
        made.key(2)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"clients": 0}, "clients must be an integer ≥ 1, got 0"),
        ({"days": 0}, "days must be"),
        ({"names": ("two words",)}, "name 'two words'"),
        ({"names": ("",)}, "name ''"),
        ({"addresses": ("localhost",)}, "address 'localhost': an IP address"),
        ({"names": (), "addresses": ()}, "names and addresses are empty"),
    ],
)
def test_what_no_certificate_can_hold_is_refused_before_anything_is_written(
    tmp_path: Path, given: dict[str, object], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        make(tmp_path / "folder", **given)  # type: ignore[arg-type]
    assert not (tmp_path / "folder").exists()


def test_the_commands_name_every_file_an_operator_needs(made: Certificates) -> None:
    text = commands(made, "server.example", 9000)
    for path in (
        made.authority,
        made.server,
        made.server_key,
        *map(made.key, range(2)),
        *map(made.public_key, range(2)),
    ):
        assert str(path) in text
    assert str(made.authority_key) not in text
    assert text.count("--superlink server.example:9000") == 2
