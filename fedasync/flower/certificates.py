"""What a deployment over a network needs: a certificate authority, a server certificate, a key for each SuperNode."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

CLOCKS_DIFFER = timedelta(hours=1)
"""By so much a node's clock may be behind the one of the machine that made the certificates."""


@dataclass(frozen=True)
class Certificates:
    """Where the files of one deployment lie, for SuperNodes 0 … ``clients`` − 1."""

    folder: Path
    clients: int

    @property
    def authority(self) -> Path:
        """The certificate that every client of the SuperLink checks it with."""
        return self.folder / "ca.crt"

    @property
    def authority_key(self) -> Path:
        """Signs further server certificates; no process needs it."""
        return self.folder / "ca.key"

    @property
    def server(self) -> Path:
        """The SuperLink's certificate."""
        return self.folder / "server.crt"

    @property
    def server_key(self) -> Path:
        """The SuperLink's private key."""
        return self.folder / "server.key"

    def key(self, partition: int) -> Path:
        """A SuperNode's private key (OpenSSH, P-384). Raises ValueError for a client that there is not."""
        if not 0 <= partition < self.clients:
            raise ValueError(f"{self.folder}: partition {partition} has no key; there are 0 … {self.clients - 1}")
        return self.folder / f"supernode-{partition}"

    def public_key(self, partition: int) -> Path:
        """What the SuperLink knows a SuperNode by."""
        return self.key(partition).with_suffix(".pub")


def load(folder: Path) -> Certificates:
    """The certificates that ``make`` wrote there. Raises ValueError where files are missing."""
    keys = 0
    while (folder / f"supernode-{keys}").is_file():
        keys += 1
    found = Certificates(folder, keys)
    for path in (found.authority, found.server, found.server_key):
        if not path.is_file():
            raise ValueError(f"{folder}: {path.name} is missing; a folder that `fedasync certs` wrote would do")
    return found


def make(
    folder: Path,
    names: Sequence[str] = ("localhost",),
    addresses: Sequence[str] = ("127.0.0.1",),
    clients: int = 1,
    days: int = 30,
    *,
    overwrite: bool = False,
) -> Certificates:
    """Write an authority, a server certificate for the host ``names`` and IP ``addresses``, and ``clients`` keys.

    Valid for ``days`` from now. Private files are readable by their owner alone; the authority's own key is among
    them. Raises ValueError for what no certificate can hold, and for files that are there already unless ``overwrite``.
    """
    for name, number in (("clients", clients), ("days", days)):
        if number < 1:
            raise ValueError(f"{name} must be an integer ≥ 1, got {number}")
    alternatives = [*map(_name, names), *map(_address, addresses)]
    if not alternatives:
        raise ValueError("names and addresses are empty; a host name or an IP address of the SuperLink would do")
    made = Certificates(folder, clients)
    contents = _contents(made, alternatives, days)
    there = sorted({*folder.glob("supernode-*"), *(path for path in contents if path.exists())})
    if there and not overwrite:
        raise ValueError(
            f"{folder}: {there[0].name} is there already ({len(there)} such files); another folder would do"
        )
    for path in there:
        path.unlink()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path, content in contents.items():
        _write(path, content, private=path.suffix in (".key", ""))
    return made


def _contents(made: Certificates, alternatives: Iterable[x509.GeneralName], days: int) -> Mapping[Path, bytes]:
    """Every file and what is in it."""
    authority_key, server_key = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    now = datetime.now(UTC)
    until = now + timedelta(days=days)
    authority = _authority(authority_key, now, until)
    server = _server(server_key, authority, authority_key, alternatives, now, until)
    contents = {
        made.authority: authority.public_bytes(Encoding.PEM),
        made.authority_key: _pem(authority_key),
        made.server: server.public_bytes(Encoding.PEM),
        made.server_key: _pem(server_key),
    }
    for partition in range(made.clients):
        key = ec.generate_private_key(ec.SECP384R1())
        contents[made.key(partition)] = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
        public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        contents[made.public_key(partition)] = public + f" supernode-{partition}\n".encode()
    return contents


def _authority(key: ec.EllipticCurvePrivateKey, now: datetime, until: datetime) -> x509.Certificate:
    name = _common_name("fedasync deployment CA")
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    return (
        _builder(name, name, key.public_key(), now, until)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(identifier, critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
        .sign(key, hashes.SHA384())
    )


def _server(
    key: ec.EllipticCurvePrivateKey,
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
    alternatives: Iterable[x509.GeneralName],
    now: datetime,
    until: datetime,
) -> x509.Certificate:
    identifier = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    return (
        _builder(_common_name("fedasync SuperLink"), authority.subject, key.public_key(), now, until)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
        .sign(authority_key, hashes.SHA384())
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime, until: datetime
) -> x509.CertificateBuilder:
    return x509.CertificateBuilder(
        issuer, subject, key, x509.random_serial_number(), now - CLOCKS_DIFFER, until, extensions=[]
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _common_name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _name(text: str) -> x509.GeneralName:
    try:
        ascii_name = text.encode("idna").decode() if text else ""
    except UnicodeError:
        ascii_name = ""
    if not ascii_name or set(ascii_name) & set(" /:@,"):
        raise ValueError(f"name {text!r}: a host name such as superlink.example.org would do")
    return x509.DNSName(ascii_name)


def _address(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(text))
    except ValueError:
        raise ValueError(f"address {text!r}: an IP address such as 192.0.2.7 would do") from None


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write(path: Path, content: bytes, *, private: bool) -> None:
    """A new file, which is private from its first moment on."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o644), "wb") as file:
        file.write(content)


def commands(made: Certificates, host: str = "localhost", port: int = 8000, bind: str = "0.0.0.0") -> str:
    """The commands that start a deployment with these files: text for an operator.

    ``host`` is how SuperNodes reach the SuperLink, which listens at ``bind``:``port``.
    """
    return "\n".join(_command_lines(made, host, port, bind))


def _command_lines(made: Certificates, host: str, port: int, bind: str) -> Iterator[str]:
    def at(path: Path) -> str:
        return shlex.quote(str(path.absolute()))

    superlink = f"{host}:{port}"
    yield "# In every shell, with fedasync's own Python environment first on PATH:"
    yield "export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1"
    yield ""
    yield "# The server's machine"
    yield (
        f"flower-superlink --host {bind} --port {port} --ssl-ca-certfile {at(made.authority)} "
        f"--ssl-certfile {at(made.server)} --ssl-keyfile {at(made.server_key)} --enable-supernode-auth "
        "--isolation process --database state.db --disable-runtime-dependency-installation"
    )
    yield f"flower-superexec --root-certificates {at(made.authority)} --runtime-api-address {superlink}"
    yield ""
    yield "# Where `flwr` is called: these lines in ~/.flwr/config.toml"
    yield "#   [superlink]"
    yield '#   default = "deployment"'
    yield "#   [superlink.deployment]"
    yield f'#   address = "{superlink}"'
    yield f'#   root-certificates = "{made.authority.absolute()}"'
    for partition in range(made.clients):
        yield f"flwr supernode register {at(made.public_key(partition))}"
    yield ""
    yield f"# Each client's machine, with its own copy of {made.authority.name} and of its own key alone"
    for partition in range(made.clients):
        yield (
            f"flower-supernode --superlink {superlink} --root-certificates {at(made.authority)} "
            f"--auth-supernode-private-key {at(made.key(partition))} "
            f'--node-config "partition-id={partition} num-partitions={made.clients}"'
        )
